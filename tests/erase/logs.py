"""Random logs with transactions, and the parts of an erasure as a run carries them out, for tests of single steps."""

from __future__ import annotations

import io
import random
from pathlib import Path

from keytail.compact.cleaner import install
from keytail.compact.task import CleaningResult, CleaningTask
from keytail.config.compaction import CompactionConfig
from keytail.erase.finding import FoundInPartition, find_in_partition
from keytail.erase.keys import ErasedKeys, read_keys
from keytail.erase.rewriting import RewriteTask, rewrite
from keytail.log.fs import LOCAL, FileSystem
from tests.compact.logs import RandomLog, write_log
from tests.reference.batches import Rec, encode_batch, encode_marker
from tests.reference.cleaner import Segment
from tests.reference.indexing import index_files

NOW = 1_750_000_000_000


def keys_of(keys: list[bytes]) -> ErasedKeys:
    lines = b"".join(key.hex().encode() + b"\n" for key in keys)
    return read_keys(io.BytesIO(lines), "keys", "hex")


def transactional_log(rng: random.Random, *, ends_open: bool = False) -> RandomLog:
    """Return a log of interleaved transactions, most of which have ended, and batches of other producers."""
    keys = [b"k%d" % i for i in range(8)] + [bytes(4), b"\0\0\0\1"]  # the last two are also the keys of markers
    offset, made, running = rng.choice([0, 5]), [], set()
    for number in range(rng.randint(1, 4)):
        base, parts = offset, []
        for _ in range(rng.randint(0, 12)):
            producer = rng.randint(1, 3)
            fields = {"producer_id": producer, "producer_epoch": 0}
            if producer in running and rng.random() < 0.4:
                parts.append(encode_marker(offset, NOW, commit=rng.random() < 0.5, **fields))
                running.discard(producer)
                offset += 1
                continue
            count = rng.randint(1, 6)
            records = [
                Rec(offset + i, NOW - rng.randint(0, 999), rng.choice([*keys, None]), rng.choice([None, b"v" * 20]))
                for i in range(count)
            ]
            if rng.random() < 0.8:
                running.add(producer)
                fields |= {"transactional": True, "base_sequence": offset}
            else:
                fields = {}
            parts.append(encode_batch(records, codec=rng.choice(range(5)), **fields))
            offset += count
        if number == 0 or rng.random() < 0.5:
            for producer in sorted(running) if not ends_open else ():
                parts.append(encode_marker(offset, NOW, commit=True, producer_id=producer, producer_epoch=0))
                offset += 1
            running = running if ends_open else set()
        log = b"".join(parts)
        index, time_index = index_files(log, base, 64)
        made.append(Segment(base, log, len(index), len(time_index), NOW - 10**6 + number * 1000))
        offset = max(offset, base + 1)
    if not ends_open and running:
        parts = []
        base = offset
        for producer in sorted(running):
            parts.append(encode_marker(offset, NOW, commit=False, producer_id=producer, producer_epoch=0))
            offset += 1
        made.append(Segment(base, b"".join(parts), 0, 0, NOW - 5))
    made.append(Segment(offset, b"", 0, 0, NOW))
    return RandomLog(made, [], offset, {})


def task_of(path: Path, log: RandomLog, **fields) -> CleaningTask:
    """Write the log, and return the task for it."""
    facts = write_log(str(path), log.segments)
    config = CompactionConfig(index_interval_bytes=64)
    return CleaningTask(
        topic="t",
        partition=0,
        partition_path=str(path),
        segments=facts,
        snapshots=(),
        log_start_offset=log.segments[0].base_offset,
        log_end_offset=log.log_end_offset,
        first_dirty_offset=log.segments[0].base_offset,
        first_uncleanable_offset=log.log_end_offset,
        now_ms=NOW,
        run_id="test",
        **{"config": config, "grouping": "kafka", "message_format": "keep", **fields},
    )


def erase(
    task: CleaningTask, keys: ErasedKeys, fs: FileSystem = LOCAL
) -> tuple[FoundInPartition, CleaningResult | None]:
    """Erase the keys, and return what was found and written."""
    found = find_in_partition(fs, task, keys)
    if not found.segments:
        return found, None
    bases = tuple(segment.base_offset for segment in found.segments)
    result = rewrite(fs, RewriteTask(task, keys, bases, found.transactions, found.erased))
    install(fs, task, result)
    return found, result
