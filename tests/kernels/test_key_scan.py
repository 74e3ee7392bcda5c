"""Keys are hashed while records are scanned: the hashes and error codes are those of two separate steps."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keytail.format.batch import BATCH_TABLE
from keytail.kernels import batches, key_scan, records
from tests.chance import draws
from tests.kernels.guard import guarded
from tests.kernels.test_records import rec_strategy, scan_rows
from tests.reference.batches import Rec, encode_batch

SEED = np.uint64(9)


def scan_keys(raw, table, first_ordinal, from_offset=0, capacity=1000, where=records.IN_RAW):
    n, empty = len(table), guarded(b"")
    low, high, ordinals = np.zeros(capacity, np.uint64), np.zeros(capacity, np.uint64), np.zeros(capacity, np.int64)
    nulls, keyless, out = np.zeros(n // 8 + 2, np.uint8), np.zeros(2, np.int64), np.zeros(4, np.int64)
    raw, arena = (raw, empty) if where == records.IN_RAW else (empty, raw)
    key_scan.scan_keys(
        raw, arena, table, np.full(n, where, np.int8), table["position"] + 61,
        table["size_bytes"].astype(np.int64) - 61, 0, n, from_offset, SEED, first_ordinal, nulls, 3,
        low, high, ordinals, keyless, out,
    )  # fmt: skip
    found = out[records.COUNT]
    return (low[:found], high[:found], ordinals[:found]), nulls, keyless, out


def table_of(data):
    raw = guarded(data)
    table, out = np.zeros(100, BATCH_TABLE), np.zeros(4, np.int64)
    batches.index_batches(raw, len(raw), 0, -1, table, out)
    assert out[batches.CODE] == batches.OK
    return raw, table[: out[0]]


@settings(deadline=None, max_examples=draws(150))
@given(
    st.lists(st.lists(rec_strategy, min_size=1, max_size=8), min_size=1, max_size=9),
    st.integers(0, 2000),
    st.sampled_from([records.IN_RAW, records.IN_ARENA]),
)
def test_keys_equal_those_of_records_that_are_scanned_and_hashed(logs, from_offset, where):
    offset, parts, first_ordinal, seen = 5, [], [], 2**32
    for batch in logs:
        parts.append(encode_batch([Rec(offset + i * 70, t, k, v, tuple(h)) for i, (t, k, v, h) in enumerate(batch)]))
        offset += len(batch) * 70
        first_ordinal.append(seen)
        seen += len(batch)
    raw, table = table_of(b"".join(parts))
    first_ordinal = np.array(first_ordinal)
    (low, high, ordinals), nulls, keyless, out = scan_keys(raw, table, first_ordinal, from_offset, where=where)

    found, _ = scan_rows(raw, table, 1000)
    n = len(found)
    hashes = np.zeros((2, n), np.uint64)
    records.hash_keys(raw, guarded(b""), np.zeros(len(table), np.int8), found, n, SEED, hashes[0], hashes[1])
    numbers, without = np.zeros(n, np.int64), np.zeros(2, np.int64)
    records.number_records(found, n, first_ordinal, from_offset, numbers, without)
    assert out.tolist()[:3] == [len(logs), n, records.OK]
    assert (low.tolist(), high.tolist()) == (hashes[0].tolist(), hashes[1].tolist())
    assert ordinals.tolist() == numbers.tolist()
    assert keyless.tolist() == without.tolist()
    rows = {int(row) for row in found["row"][found["value_bytes"] < 0]}
    assert set(np.flatnonzero(np.unpackbits(nulls, bitorder="little")).tolist()) == {3 + row for row in rows}


@settings(deadline=None, max_examples=draws(300))
@given(st.lists(rec_strategy, min_size=1, max_size=4), st.data())
def test_damaged_records_have_the_error_code_of_the_record_scan(batch, data):
    first = encode_batch([Rec(i, 0, b"k", b"v") for i in range(3)])
    block = bytearray(encode_batch([Rec(i + 3, t, k, v, tuple(h)) for i, (t, k, v, h) in enumerate(batch)]))
    for _ in range(data.draw(st.integers(1, 3))):
        block[data.draw(st.integers(61, len(block) - 1))] = data.draw(st.integers(0, 255))
    raw = guarded(first + block)
    # The damage has a valid checksum: the table is that of the undamaged batches.
    table = np.zeros(2, BATCH_TABLE)
    table["position"], table["size_bytes"] = [0, len(first)], [len(first), len(block)]
    table["base_offset"], table["last_offset"] = [0, 3], [2, 2 + len(batch)]
    table["record_count"] = [3, data.draw(st.sampled_from([len(batch), len(block) - 61, 2**31 - 1]))]
    table["magic"] = 2
    _, theirs = scan_rows(raw, table, 100)
    _, _, _, own = scan_keys(raw, table, np.zeros(2, np.int64), capacity=100)
    assert own[records.CODE] == theirs[records.CODE] and own[records.BAD_ROW] == theirs[records.BAD_ROW]


@pytest.mark.parametrize("capacity, rows", [(7, 2), (9, 3), (2, 0)])
def test_scanning_stops_before_a_batch_that_might_not_fit(capacity, rows):
    raw, table = table_of(b"".join(encode_batch([Rec(o + i, 0, b"k", b"v") for i in range(3)]) for o in (0, 3, 6)))
    _, _, _, out = scan_keys(raw, table, np.arange(3) * 3, capacity=capacity)
    assert out.tolist()[:3] == [rows, 3 * rows, records.OK]
