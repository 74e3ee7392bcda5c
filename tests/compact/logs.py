"""Random partitions for tests of cleaning: the bytes of segments, their files, and the tasks that clean them."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass

from keytail.compact.task import CleaningTask
from keytail.config.compaction import CompactionConfig
from keytail.log.partition import SegmentFacts
from tests.reference.batches import Rec, encode_batch
from tests.reference.cleaner import Segment
from tests.reference.indexing import index_files
from tests.reference.varints import longer_varint


@dataclass
class RandomLog:
    segments: list[Segment]  # the last segment is active and empty
    batch_ends: list[int]
    log_end_offset: int
    producers: dict[int, tuple[int, int]]  # producer id -> (last data offset, epoch)


def random_log(rng: random.Random, now_ms: int, *, codecs=(0,), keyless=0.0, max_gap=5, segments=None) -> RandomLog:
    """Return a log that a broker could have: with idempotent producers, delete horizons of earlier rounds, offset gaps,
    emptied batches, and overlong varints.
    """
    keys = [b"k%d" % i for i in range(rng.choice([1, 3, 10, 40]))] + [b""]
    offset, made, ends = rng.choice([0, 0, 17, 2**40]), [], []
    producers: dict[int, tuple[int, int]] = {}
    for number in range(segments or rng.randint(1, 6)):
        base, parts = offset, []
        for _ in range(rng.choice([0, 1, 2, 3, 8])):
            data, offset = _random_batch(rng, offset, now_ms, keys, codecs, keyless, producers)
            parts.append(data)
            ends.append(offset)
            offset += rng.choice([0, 0, 0, rng.randint(0, max_gap)])
        log = b"".join(parts)
        index, time_index = index_files(log, base, 64)
        mtime_ms = now_ms - 10**6 + number * 1000
        made.append(Segment(base, log, len(index), len(time_index), mtime_ms))
        offset = max(offset, base + 1)
    made.append(Segment(offset, b"", 0, 0, now_ms))
    return RandomLog(made, ends, offset, producers)


def _random_batch(rng, offset, now_ms, keys, codecs, keyless, producers):
    n = rng.choice([1, 1, 2, 5, 20])
    records, at = [], offset
    for _ in range(n):
        value = None if rng.random() < 0.25 else rng.choice([b"", b"v" * rng.randint(1, 90)])
        headers = tuple((b"h", rng.choice([b"x", None])) for _ in range(rng.choice([0, 0, 0, 2])))
        key = None if rng.random() < keyless else rng.choice(keys)
        records.append(Rec(at, now_ms - rng.randint(0, 10**6), key, value, headers))
        at += 1 + rng.choice([0, 0, 0, 2])
    last = at - 1 + rng.choice([0, 0, 3])
    fields = {"codec": rng.choice(codecs), "leader_epoch": rng.randint(0, 3), "last_offset": last}
    if rng.random() < 0.4:
        pid = rng.randint(1, 3)
        fields |= {"producer_id": pid, "producer_epoch": 1, "base_sequence": rng.choice([0, 7, 2**31 - 2])}
        producers[pid] = (last, 1)
    if rng.random() < 0.2:
        fields |= {"timestamp_type": 1, "max_timestamp": now_ms - rng.randint(0, 1000)}
    if rng.random() < 0.25:
        fields["delete_horizon_ms"] = now_ms + rng.choice([-5000, -1, 0, 1, 5000])
    if rng.random() < 0.1:
        records, fields["base_offset"] = [], offset
        fields["max_timestamp"] = now_ms
        fields.pop("delete_horizon_ms", None)
        fields["codec"] = 0
    if rng.random() < 0.05:
        fields["extra_attributes"] = 0x100
    if rng.random() < 0.1:  # some varints are overlong, so that records of rebuilt batches must be encoded again
        fields["spell"] = lambda varint: longer_varint(varint) if rng.random() < 0.3 else varint
    return encode_batch(records, **fields), last + 1


def write_log(path: str, segments: list[Segment]) -> tuple[SegmentFacts, ...]:
    """Write the `.log` files in `path`, with empty indexes; return the facts of a survey."""
    os.makedirs(path, exist_ok=True)
    facts = []
    for segment in segments:
        for suffix, data in ((".log", segment.log), (".index", b""), (".timeindex", b"")):
            name = f"{path}/{segment.base_offset:020d}{suffix}"
            with open(name, "wb") as file:
                file.write(data)
            os.utime(name, ns=(segment.mtime_ms * 10**6, segment.mtime_ms * 10**6))
        facts.append(
            SegmentFacts(
                base_offset=segment.base_offset,
                log_bytes=len(segment.log),
                log_mtime_ns=segment.mtime_ms * 10**6,
                index_bytes=segment.index_bytes,
                time_index_bytes=segment.time_index_bytes,
                txn_index_bytes=None,
                largest_timestamp_ms=segment.mtime_ms,
                first_batch_timestamp_ms=-1,
            )
        )
    return tuple(facts)


def task_for(path: str, log: RandomLog, facts, now_ms: int, *, first_dirty: int, **fields) -> CleaningTask:
    config = {"segment_bytes": 10**6, "index_interval_bytes": 64, "cleanup_policy": frozenset({"compact"})}
    config |= fields.pop("config", {})
    return CleaningTask(
        topic="t",
        partition=0,
        partition_path=path,
        segments=facts,
        snapshots=fields.pop("snapshots", ()),
        log_start_offset=log.segments[0].base_offset,
        log_end_offset=log.log_end_offset,
        first_dirty_offset=first_dirty,
        first_uncleanable_offset=fields.pop("first_uncleanable", log.segments[-1].base_offset),
        now_ms=now_ms,
        config=CompactionConfig(**config),
        run_id="test",
        **{"grouping": "kafka", "message_format": "v2", **fields},
    )
