"""Random partitions to measure, with all codecs, idempotent producers, delete horizons, transactions and old formats.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from keytail.compact.cleaner import clean_partition
from keytail.compact.task import NO_REMOVAL_LIMIT, CleaningResult, CleaningTask
from keytail.errors import KeytailError
from keytail.log.fs import LOCAL
from tests.compact.logs import RandomLog, random_log, task_for, write_log
from tests.compact.test_cleaner import snapshot_entry, write_snapshot
from tests.compact.test_keep_magic import log_of
from tests.reference.batches import Rec, encode_batch, encode_marker
from tests.reference.cleaner import Segment
from tests.reference.indexing import index_files
from tests.reference.legacy import decode_any_log

NOW = 1_750_000_000_000
CODECS = ((0,), (0, 1, 2, 3, 4), (1,), (2,), (3,), (4,))


def random_task(rng: random.Random, path: Path) -> CleaningTask | None:
    """Write a random log to `path`, and return its task; None if the log has no closed segment."""
    kind = rng.choice(["plain", "plain", "transactions", "old"])
    if kind == "plain":
        log = random_log(rng, NOW, codecs=rng.choice(CODECS), keyless=rng.choice([0, 0, 0.1]))
    else:
        log = transactional_log(rng) if kind == "transactions" else log_of(rng)
    if len(log.segments) < 2:
        return None
    facts = write_log(str(path), log.segments)
    if kind != "old":  # write_log writes empty indexes, but the map phase begins at an index entry
        for segment in log.segments:
            index, _ = index_files(segment.log, segment.base_offset, 64)
            (path / f"{segment.base_offset:020d}.index").write_bytes(index)
    base, end = log.segments[0].base_offset, log.segments[-1].base_offset
    first_dirty = min(rng.choice([base, base, *log.batch_ends, rng.randint(base, end)]), end - 1)
    first_uncleanable = rng.choice([s.base_offset for s in log.segments if s.base_offset > first_dirty])
    active = {pid: state for pid, state in log.producers.items() if rng.random() < 0.7}
    snapshots = write_snapshot(str(path), log, [snapshot_entry(p, *state) for p, state in active.items()])
    return task_for(
        str(path), log, facts, NOW, first_dirty=first_dirty, first_uncleanable=first_uncleanable, snapshots=snapshots,
        config={
            "segment_bytes": rng.choice([1, 500, 3000, 10**6]),
            "index_interval_bytes": rng.choice([0, 1, 200, 4096]),
            "segment_index_bytes": rng.choice([24, 100, 10**6]),
            "delete_retention_ms": rng.choice([0, 1000, 2**63 - 1]),
        },
        drop_keyless=rng.random() < 0.8, hash_seed=rng.randrange(2**64), grouping=rng.choice(["kafka", "measured"]),
        removal_limit_offset=rng.choice([NO_REMOVAL_LIMIT, rng.randint(base, end)]),
        by_file_time=rng.random() < 0.3, message_format=rng.choice(["keep", "v2", "v2"]),
    )  # fmt: skip


def compact(task: CleaningTask) -> CleaningResult | None:
    """Return the result of the task; None if a tombstone that is due would be removed before an older record of its
    key, as in Kafka, because the round begins inside a segment (DECISIONS.md 17). A measurement does not find this.
    """
    try:
        return clean_partition(LOCAL, task)
    except KeytailError as problem:
        if not problem.what.startswith("a tombstone was removed before an older record of its key"):
            raise
        assert task.first_dirty_offset not in [segment.base_offset for segment in task.segments]
        clean_partition(LOCAL, replace(task, first_dirty_offset=task.log_start_offset))
        return None


def transactional_log(rng: random.Random, segments: int | None = None) -> RandomLog:
    """Return a log of several transactional producers and a plain one, with aborted transactions and tombstones."""
    keys = [b"k%d" % i for i in range(rng.choice([2, 10, 40]))]
    codec = rng.choice([0, 0, 1, 4])
    offset, made, ends = 0, [], []
    sequences = {1: 0, 2: 0, 3: 0}
    is_open: set[int] = set()
    for number in range(segments or rng.randint(1, 5)):
        base, parts = offset, []
        for _ in range(rng.choice([2, 4, 12])):
            pid = rng.choice([0, 1, 2, 3])
            if pid in is_open and rng.random() < 0.4:
                parts.append(
                    encode_marker(offset, NOW - 5000, commit=rng.random() < 0.5, producer_id=pid, producer_epoch=0)
                )
                is_open.discard(pid)
                offset += 1
            else:
                n = rng.choice([1, 2, 5])
                records = [
                    Rec(offset + i, NOW - 5000, rng.choice(keys), rng.choice([None, b"v" * rng.randint(0, 60)]))
                    for i in range(n)
                ]
                own = {}
                if pid:
                    own = {"producer_id": pid, "producer_epoch": 0, "base_sequence": sequences[pid],
                           "transactional": True}  # fmt: skip
                    sequences[pid] += n
                    is_open.add(pid)
                parts.append(encode_batch(records, codec=codec, **own))
                offset += n
            ends.append(offset)
        log = b"".join(parts)
        index, time_index = index_files(log, base, 64)
        made.append(Segment(base, log, len(index), len(time_index), NOW - 10**6 + number * 1000))
    for pid in sorted(is_open):  # transactions end in the active segment, so that they do not limit the round
        marker = encode_marker(offset, NOW - 4000, commit=True, producer_id=pid, producer_epoch=0)
        last = made[-1]
        log = last.log + marker
        index, time_index = index_files(log, last.base_offset, 64)
        made[-1] = Segment(last.base_offset, log, len(index), len(time_index), last.mtime_ms)
        offset += 1
        ends.append(offset)
    made.append(Segment(offset, b"", 0, 0, NOW))
    return RandomLog(made, ends, offset, {})


def task_of_many_batches(rng: random.Random, path: Path) -> CleaningTask:
    """Write a random log of some hundred batches, and return its task. Sizes of batches and values, and records per
    key, differ by orders of magnitude.
    """
    keys = rng.choice([1, 10, 300, 3000])
    skew = rng.choice([0.0, 1.0, 3.0])  # with a higher value, fewer keys have most of the records
    fresh = rng.random()  # the share of records with keys that occur once
    codec = rng.choice([0, 0, 1, 4])
    nulls, largest = rng.choice([0, 0.01, 0.3, 0.9]), rng.choice([1, 4, 30])
    offset, segments, ends = 0, [], []
    for number in range(rng.randint(2, 5)):
        base, parts = offset, []
        for _ in range(rng.randint(10, 100)):
            records = []
            for _ in range(max(1, int(largest * rng.random() ** 3))):
                key = b"once-%d" % offset if rng.random() < fresh else b"k%d" % int(keys * rng.random() ** (1 + skew))
                value = None if rng.random() < nulls else rng.randbytes(int(2 ** (10 * rng.random() ** 2)))
                records.append(Rec(offset, NOW - 10**6, key, value))
                offset += 1
            horizon = {"delete_horizon_ms": NOW + rng.choice([-1, 1000])} if rng.random() < 0.2 else {}
            parts.append(encode_batch(records, codec=codec, **horizon))
            ends.append(offset)
        segments.append(Segment(base, b"".join(parts), 0, 0, NOW - 10**6 + number))
        if rng.random() < 0.2:  # later batches have only a few keys; earlier ones are like a clean section
            keys, fresh = rng.choice([1, 20]), fresh / 10
    segments.append(Segment(offset, b"", 0, 0, NOW))
    log = RandomLog(segments, ends, offset, {})
    facts = write_log(str(path), segments)
    return task_for(
        str(path), log, facts, NOW, first_dirty=rng.choice([0, 0, ends[len(ends) // 3]]), hash_seed=rng.randrange(2**64)
    )


def outputs_of(path: Path, result) -> bytes:
    """Return the bytes of the `.log` files that a compaction has written."""
    files = [file for group in result.groups for segment in group.segments for file in segment.files]
    return b"".join((path / file.name).read_bytes() for file in files if file.suffix == ".log")


def tombstones_in(log: bytes) -> int:
    found = [batch for batch in decode_any_log(log) if not batch.attributes & 0x20]
    return sum(record.value is None for batch in found for record in batch.records)
