"""Calls the kernels directly on damaged logs; every array ends, or begins, at an inaccessible page.

The arrays have the size that the kernels' docstrings require, and no more. Results are compared with the reference
model if the complete log was accepted.
"""

from __future__ import annotations

import random
import struct

import numpy as np

from keytail.format.batch import BATCH_TABLE
from keytail.format.codecs.errors import TooLarge
from keytail.format.compression import decompress
from keytail.format.legacy import LegacyProblem, summarize_rows, transcode
from keytail.kernels import (
    batches,
    columns,
    index,
    legacy,
    offset_map,
    records,
    transactions,
)
from keytail.kernels.dump import batches as dump
from keytail.kernels.proof import key_hash
from keytail.kernels.proof import markers as proof_markers
from keytail.kernels.proof import records as proof_records
from keytail.kernels.rewriting import assembly as assembly_kernels
from keytail.kernels.rewriting import blocks as block_kernels
from keytail.kernels.rewriting import records as record_kernels
from keytail.kernels.verify import batches as verify
from keytail.kernels.verify import codes
from keytail.kernels.verify import columns as verified
from keytail.kernels.verify import producers as verify_producers
from tests.hostile.arena import Arena
from tests.hostile.mutator import split

HEADER = 61
LIMIT_BYTES = 4 << 20
RAW, BLOCK, TABLE, RECORDS, OUT, ROWS, NAMES = (Arena(n << 20) for n in (1, 5, 1, 2, 8, 4, 4))
_EVERYTHING_BELOW = 2**63 - 1
_FEW = np.empty(0, np.int64)
_COEFFICIENTS = key_hash.coefficients_of(bytes(key_hash.SECRET_BYTES))


def batches_of(data: bytes) -> list[bytes]:
    """Return the complete batches, found by their lengths."""
    return [part for part in split(data) if len(part) >= HEADER or (len(part) > 22 and part[16] < 2)]


def drive(data: bytes, rng: random.Random) -> None:
    in_front = rng.random() < 0.4
    raw = RAW.put(data, in_front=in_front)
    table = _index(raw, rng)
    _index_any(raw)
    _find(raw, rng)
    _inspect(raw)
    _collect(raw)
    if len(table):
        _steps_on_tables(table)
        _records(raw, table, rng)
    _old(raw, table)


def _index(raw: np.ndarray, rng: random.Random) -> np.ndarray:
    """Return the rows of the valid batches, from a table with room for exactly that number, or for one less."""
    out = np.zeros(4, np.int64)
    probe = np.empty(max(1, len(raw) // 17), BATCH_TABLE)
    batches.index_batches(raw, len(raw), 0, -1, probe, out)
    n = int(out[batches.ROWS])
    room = TABLE.room(BATCH_TABLE, n if rng.random() < 0.8 else max(0, n - 1))
    batches.index_batches(raw, len(raw), 0, -1, room, out)
    rows = room[: int(out[batches.ROWS])]
    assert int(rows["size_bytes"].sum(dtype=np.int64)) == int(out[batches.CONSUMED]) <= len(raw)
    assert (rows["last_offset"] >= rows["base_offset"]).all(), "a batch ends before it begins"
    assert (rows["base_offset"][1:] > rows["last_offset"][:-1]).all(), "batches overlap"
    return np.array(rows)


def _index_any(raw: np.ndarray) -> None:
    out = np.zeros(4, np.int64)
    n = max(1, len(raw) // 26)
    dump.index_any(raw, len(raw), 0, TABLE.room(BATCH_TABLE, n), np.empty(n, np.bool_), out)
    assert 0 <= out[dump.CONSUMED] <= len(raw)


def _find(raw: np.ndarray, rng: random.Random) -> None:
    out = np.zeros(4, np.int64)
    dump.find_batch(raw, len(raw), 0, rng.choice((-(2**63), 0, 5, 2**63 - 1)), out)


def _inspect(raw: np.ndarray) -> None:
    """Call `inspect` as the inspection does, with every array as small as possible."""
    state = np.zeros(verified.STATE_SIZE, np.int64)
    state[verified.LAST_OFFSET] = state[verified.MAX_TIMESTAMP] = -1
    state[verified.TO], state[verified.IS_ALL], state[verified.NEXT_BASE] = len(raw), 1, _EVERYTHING_BELOW
    rows, runs = np.empty((3, verified.ROW_COLUMNS), np.int64), np.empty((2, verified.RUN_COLUMNS), np.int64)
    entries = np.arange(0, len(raw) + 1, 50)
    scratch = np.zeros(6, np.int64)
    written = []
    for _ in range(20 * (len(raw) // 14 + 10)):
        code = verify.inspect(raw, entries, entries, entries, entries, rows, runs, scratch, state)
        at = int(state[verified.FROM])
        assert 0 <= at <= len(raw)
        if code == codes.DONE or code in codes.ENDS_THE_WALK:
            break
        if code == codes.NEED_ROOM:
            written.append(rows[: state[verified.ROWS]].copy())
            state[verified.ROWS] = state[verified.RUNS] = 0
        elif code == codes.NEED_BLOCK:
            _check_block(raw, at, state)
    else:
        raise AssertionError("the inspection did not end")
    written.append(rows[: state[verified.ROWS]].copy())
    _follow(np.concatenate(written))


def _check_block(raw: np.ndarray, at: int, state: np.ndarray) -> None:
    header = raw[at : at + HEADER].tobytes()
    base, length = struct.unpack_from(">qi", header)
    delta, base_timestamp, max_timestamp = struct.unpack_from(">iqq", header, 23)
    (count,) = struct.unpack_from(">i", header, 57)
    try:
        opened = decompress(header[22] & 7, raw[at + HEADER : at + 12 + length].data, LIMIT_BYTES)
    except (ValueError, TooLarge):
        return
    block = BLOCK.put(opened)
    verify.check_block(block, base, _wrapped(base + delta), count, base_timestamp, max_timestamp, header[22], state)


def _wrapped(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def _follow(rows: np.ndarray) -> None:
    ids, producers = np.unique(rows[:, verified.ROW_PRODUCER], return_inverse=True)
    state = np.full((len(ids), verify_producers.STATE_COLUMNS), -1, np.int64)
    markers = np.empty((len(rows), verify_producers.MARKER_COLUMNS), np.int64)
    at = 0
    while at < len(rows):
        _, at = verify_producers.follow(rows, producers.astype(np.int64), at, 0, state, markers)


def _collect(raw: np.ndarray) -> None:
    cursor = np.zeros(proof_markers.CURSOR_SIZE, np.int64)
    cursor[proof_markers.TO], cursor[proof_markers.IS_ALL] = len(raw), 1
    cursor[proof_markers.LAST_OFFSET] = -1
    n = 0
    while True:
        found = np.empty((n, proof_markers.COLUMNS), np.int64)
        code = proof_markers.collect(raw, cursor, found)
        if code != proof_markers.NEED_ROOM:
            return
        n += 1
        cursor[proof_markers.FOUND] = 0
        cursor[proof_markers.FROM], cursor[proof_markers.LAST_OFFSET] = 0, -1


def _steps_on_tables(table: np.ndarray) -> None:
    n = len(table)
    state = np.array([0, -1, 0, -1, 0, 0], np.int64)
    out = np.zeros(3, np.int64)
    index.index_rows(
        table, n, int(table["base_offset"][0]), 60, 1 << 20, 1 << 20, state, np.empty((n, 2), np.int64),
        np.empty((n, 2), np.int64), out,
    )  # fmt: skip
    ids, producers = np.unique(table["producer_id"], return_inverse=True)
    of_producers = np.tile(np.array([-1, 0, 0, transactions.NO_OFFSET, -1], np.int64), (len(ids), 1))
    n_control = int(np.count_nonzero(table["attributes"] & 0x20))
    cursor = np.array([0, 0, 0, transactions.NO_OFFSET], np.int64)
    transactions.track(
        table, producers.astype(np.int64), 0, _FEW, _FEW, of_producers, cursor, np.zeros(n, np.uint8),
        np.empty((n_control, 2), np.int64), np.empty((n_control, transactions.ABORT_COLUMNS), np.int64),
    )  # fmt: skip
    flags = np.zeros(n, np.uint8)
    transactions.aborted_rows(table, ids, np.zeros(len(ids), np.int64), np.full(len(ids), 2**40), flags)
    transactions.marker_flags(table, np.sort(table["base_offset"]), flags, np.zeros(n, np.uint8))


def _records(raw: np.ndarray, table: np.ndarray, rng: random.Random) -> None:
    """Process the records of one batch after the other, from their spans to the bytes of a rebuilt batch."""
    n = len(table)
    where = np.full(n, records.CLOSED, np.int8)
    start = table["position"] + HEADER
    size = table["size_bytes"].astype(np.int64) - HEADER
    no_bit = np.full(n, -1, np.int64)
    out = np.zeros(4, np.int64)
    for row in np.flatnonzero(table["magic"] == 2).tolist():
        count = int(table["record_count"][row])
        arena, block_start, block_size = raw, start.copy(), size.copy()
        where[:] = records.CLOSED
        where[row] = records.IN_RAW
        codec = int(table["attributes"][row]) & 7
        if codec and count:
            try:
                opened = decompress(codec, memoryview(raw)[start[row] : start[row] + size[row]], LIMIT_BYTES)
            except (ValueError, TooLarge):
                continue
            arena = BLOCK.put(opened)
            where[row], block_start[row], block_size[row] = records.IN_ARENA, 0, len(arena)
        spans = np.empty((8, 6), np.int64)
        proof_records.read_records(arena if where[row] == records.IN_ARENA else raw[start[row] :], spans)
        if count * records.MIN_RECORD_BYTES > block_size[row] or count * records.RECORD_TABLE.itemsize > 2 << 20:
            count = 0
        found = RECORDS.room(records.RECORD_TABLE, count)
        records.scan_records(
            raw, arena, table, where, block_start, block_size, row, row + 1, np.zeros(1, np.uint8), no_bit, found, out
        )
        n_found = int(out[records.COUNT])
        if out[records.CODE] == records.OK and n_found:
            _on_records(raw, arena, table, where, found[:n_found], row, rng)
            _some_by_bits(raw, arena, table, where, block_start, block_size, found[:n_found].copy(), row, rng)


def _some_by_bits(raw, arena, table, where, start, size, found, row, rng) -> None:  # type: ignore[no-untyped-def]
    """Scan the same batch with only some records selected, and check that the selected records are the same."""
    n = len(found)
    bits = np.frombuffer(rng.randbytes((n + 7) // 8), np.uint8)
    first_bit = np.full(len(table), -1, np.int64)
    first_bit[row] = 0
    out, again = np.zeros(4, np.int64), RECORDS.room(records.RECORD_TABLE, n)
    records.scan_records(raw, arena, table, where, start, size, row, row + 1, bits, first_bit, again, out)
    chosen = np.unpackbits(bits, bitorder="little")[:n].astype(bool)
    assert out[records.CODE] == records.OK
    assert np.array_equal(again[: int(out[records.COUNT])], found[chosen]), (
        "a selection by bits returned different records"
    )


def _on_records(raw, arena, table, where, found, row, rng) -> None:  # type: ignore[no-untyped-def]
    n = len(found)
    low, high = np.empty(n, np.uint64), np.empty(n, np.uint64)
    records.hash_keys(raw, arena, where, found, n, np.uint64(7), low, high)
    ordinals, keyless = np.empty(n, np.int64), np.zeros(2, np.int64)
    first = np.zeros(len(table), np.int64)
    records.number_records(found, n, first, 0, ordinals, keyless)
    slots = np.zeros(2 * n + 2, offset_map.SLOT)
    counts, times = np.zeros(2 * n + 2, np.uint32), np.zeros(0, np.uint32)
    offset_map.put_all(slots, counts, 0, 2 * n + 2, low, high, ordinals, times, n, 0)
    _columns(raw, arena, where, found)
    _hashes(raw, arena, where, found)
    _rebuild(raw, arena, table, where, found, row, rng)


def _columns(raw, arena, where, found) -> None:  # type: ignore[no-untyped-def]
    n = len(found)
    in_arena = where[found["row"]] == records.IN_ARENA
    values = found["body_start"] + found["value_skip"]
    starts, ends = values + np.maximum(found["value_bytes"], 0), found["body_start"] + found["body_bytes"]
    offsets = np.empty(n + 1, np.int64)
    none = np.empty(0, np.int64)
    columns.header_spans(raw, arena, in_arena, starts, ends, offsets, np.empty(0, np.bool_), none, none, none, none)
    count = int(offsets[-1])
    spans = [ROWS.room(np.int64, 4 * count)[i * count : (i + 1) * count] for i in range(4)]
    columns.header_spans(raw, arena, in_arena, starts, ends, offsets, np.empty(count, np.bool_), *spans)
    sizes = found["value_bytes"].astype(np.int64)
    target = OUT.room(np.uint8, int(np.maximum(sizes, 0).sum()))
    columns.gather(raw, arena, in_arena, values, sizes, np.empty(n + 1, np.int64), target)


def _hashes(raw, arena, where, found) -> None:  # type: ignore[no-untyped-def]
    keyed = found[found["key_bytes"] >= 0]
    for record in keyed:
        source = arena if where[record["row"]] == records.IN_ARENA else raw
        key_hash.hash_one(source[record["key_start"] :], int(record["key_bytes"]), _COEFFICIENTS)


def _rebuild(raw, arena, table, where, found, row, rng) -> None:  # type: ignore[no-untyped-def]
    """Rebuild one batch with all or some records; the records read back must equal the retained ones."""
    n = len(found)
    keep = np.array([rng.random() < 0.7 for _ in range(n)], np.uint8)
    if not keep.any():
        keep[0] = 1
    action = np.full(len(table), record_kernels.DROP, np.int8)
    action[row] = record_kernels.REBUILD
    kept, nulls = np.zeros(len(table), np.int64), np.zeros(len(table), np.int64)
    kept[row] = keep.sum()
    nulls[row] = int(((found["value_bytes"] < 0) & (keep == 1)).sum())
    blocks = OUT.room(np.uint8, int(found["body_bytes"].sum(dtype=np.int64)) + block_kernels.MAX_GROWTH_BYTES * n)
    rebuilt, out = np.empty(1, block_kernels.REBUILT), np.zeros(4, np.int64)
    block_kernels.rebuild_blocks(
        raw, arena, where, found, n, keep, table, action, kept, nulls, 10**13, block_kernels.NOT_EARLIER, False, False,
        blocks, 0, rebuilt, out,
    )
    if out[2] != block_kernels.OK:
        return
    rebuilt["attributes"] &= ~7  # the blocks remain unchanged
    total = int(assembly_kernels.assembled_bytes(table, action, row, row + 1, rebuilt, 1))
    target, new_table = ROWS.room(np.uint8, total), np.empty(1, BATCH_TABLE)
    done, _ = assembly_kernels.assemble(
        raw, 0, table, action, row, row + 1, blocks, raw, rebuilt, target, 0, 0, new_table
    )  # fmt: skip
    assert done == total
    _read_back(target, found[keep == 1], raw, arena, where)


def _read_back(target: np.ndarray, wanted: np.ndarray, raw: np.ndarray, arena: np.ndarray, where: np.ndarray) -> None:
    out = np.zeros(4, np.int64)
    table = np.empty(1, BATCH_TABLE)
    batches.index_batches(target, len(target), 0, -1, table, out)
    assert out[batches.CODE] == batches.OK and out[batches.ROWS] == 1, f"a rebuilt batch is damaged: {out}"
    found, start, size = (
        np.empty(len(wanted), records.RECORD_TABLE),
        np.array([HEADER]),
        np.array([len(target) - HEADER]),
    )
    inside = np.zeros(1, np.int8)
    records.scan_records(
        target, target, table, inside, start, size, 0, 1, np.zeros(1, np.uint8), np.full(1, -1), found, out
    )
    assert out[records.CODE] == records.OK and out[records.COUNT] == len(wanted), f"rebuilt records: {out}"
    for field in ("offset", "timestamp_ms", "key_bytes", "value_bytes"):
        assert np.array_equal(found[field], wanted[field]), f"a rebuilt batch has a different {field}"
    for item, other in zip(found, wanted, strict=True):
        source = arena if where[other["row"]] == records.IN_ARENA else raw
        n = max(int(item["key_bytes"]), 0)
        assert np.array_equal(target[item["key_start"] :][:n], source[other["key_start"] :][:n]), (
            "a rebuilt batch has a different key"
        )
        a, b = int(item["body_start"] + item["value_skip"]), int(other["body_start"] + other["value_skip"])
        n = max(int(item["value_bytes"]), 0)
        assert np.array_equal(target[a : a + n], source[b : b + n]), "a rebuilt batch has a different value"


def _old(raw: np.ndarray, table: np.ndarray) -> None:
    """Check messages of magic 0 and 1, and then write them as records of version 2."""
    rows = np.array(table)
    good = len(rows)
    if not len(rows) or not (rows["magic"] < 2).any():
        return
    try:
        summarize_rows(raw, 0, rows, -1, LIMIT_BYTES)
    except LegacyProblem as problem:
        good = problem.row
    except TooLarge as problem:
        good = int(np.searchsorted(rows["position"], problem.byte_position))
    rows = rows[:good]
    plain = (rows["magic"] < 2) & (rows["attributes"] & 7 == 0)
    where = np.where(plain, np.int8(records.IN_RAW), np.int8(records.CLOSED))
    start, size = rows["position"].copy(), rows["size_bytes"].astype(np.int64)
    room = OUT.room(np.uint8, int(size[plain].sum()))
    done, _ = legacy.transcode_plain(raw, 0, rows, 0, good, where, start, size, room, 0)
    assert done == good, "valid messages do not fit into the space for them"
    for row in np.flatnonzero((rows["magic"] < 2) & ~plain):
        item = rows[row]
        try:
            transcode(raw, int(item["position"]), int(item["size_bytes"]), int(item["base_offset"]),
                      int(item["base_timestamp_ms"]), LIMIT_BYTES)  # fmt: skip
        except ValueError as reason:
            raise AssertionError(f"summarized, but not transcoded: {reason}") from reason
