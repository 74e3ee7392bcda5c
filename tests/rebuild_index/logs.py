"""Random segments on disk, with index files as a broker leaves them, for tests of maintenance."""

from __future__ import annotations

import random
from pathlib import Path

from keytail.rebuild_index.indexes import SegmentTask
from tests.reference.batches import Rec, decode_log, encode_batch
from tests.reference.indexing import index_files

INTERVALS = (0, 1, 60, 200, 1000, 2**31 - 1)


def random_segment(rng: random.Random, base_offset: int, *, batches: int = 60, equal: bool = False) -> bytes:
    """Return batches of 70 to 500 bytes, or all of one size; timestamps ascend, descend, repeat, or are missing."""
    offset, parts, now_ms = base_offset, [], rng.choice([1000, 1_700_000_000_000])
    for _ in range(batches):
        offset += rng.choice([0, 0, 0, 5])
        now_ms += rng.choice([0, 0, 1, 7, -3])
        count = 1 if equal else rng.randint(1, 3)
        value = b"v" * (20 if equal else rng.randint(0, 150))
        at_ms = -1 if rng.random() < 0.1 else now_ms
        records = [Rec(offset + i, at_ms, b"k%d" % i, value) for i in range(count)]
        parts.append(encode_batch(records, leader_epoch=3, codec=0 if equal else rng.choice([0, 0, 4])))
        offset += count
    return b"".join(parts)


def restarted_indexes(rng: random.Random, log: bytes, base_offset: int, interval_bytes: int) -> tuple[bytes, bytes]:
    """Return the indexes of a broker that was cleanly restarted within the segment, and then counted bytes from zero
    again.
    """
    batches = decode_log(log)
    at = rng.choice(batches).position
    before = index_files(log[:at], base_offset, interval_bytes)
    index, times = bytearray(before[0]), [before[1][n : n + 12] for n in range(0, len(before[1]), 12)]
    since = 0
    largest = int.from_bytes(times[-1][:8], "big", signed=True) if times else -1
    pending = last = largest
    pending_at = base_offset
    for batch in batches:
        if batch.position < at:
            continue
        if batch.max_timestamp > pending:
            pending, pending_at = batch.max_timestamp, batch.last_offset
        if since > interval_bytes:
            index += (batch.last_offset - base_offset).to_bytes(4, "big") + batch.position.to_bytes(4, "big")
            if pending > last:
                times.append(_time_entry(pending, pending_at - base_offset))
                last = pending
            since = 0
        since += batch.size
    if pending > last:
        times.append(_time_entry(pending, pending_at - base_offset))
    return bytes(index), b"".join(times)


def _time_entry(timestamp_ms: int, relative_offset: int) -> bytes:
    return timestamp_ms.to_bytes(8, "big", signed=True) + relative_offset.to_bytes(4, "big")


def write_segment(
    path: Path, base_offset: int, log: bytes, *, index: bytes | None = None, time_index: bytes | None = None,
    txn_index: bytes | None = None,
) -> None:  # fmt: skip
    """Write the files of one segment; an index that is None is missing."""
    path.mkdir(parents=True, exist_ok=True)
    for suffix, data in ((".log", log), (".index", index), (".timeindex", time_index), (".txnindex", txn_index)):
        if data is not None:
            (path / f"{base_offset:020d}{suffix}").write_bytes(data)


def task_of(path: Path, base_offset: int, interval_bytes: int, **more: object) -> SegmentTask:
    facts = (path / f"{base_offset:020d}.log").stat()
    fields: dict[str, object] = {
        "end_offset": 2**63 - 1,
        "log_start_offset": 0,
        "segment_index_bytes": 10_485_760,
        "run_id": "test",
    }
    return SegmentTask(
        str(path),
        base_offset,
        facts.st_size,
        facts.st_mtime_ns,
        index_interval_bytes=interval_bytes,
        **(fields | more),  # type: ignore[arg-type]
    )
