"""Runs all operations that read or write logs on small logs of every kind: batches of every codec, transactions,
messages of old formats, damage. run/kernels.json lists the kernels that these operations call.
"""

from __future__ import annotations

import io
import os
import struct
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from keytail.audit.compare import ReplicaLog, compared_range
from keytail.audit.scan import AuditTask
from keytail.audit.stages import Alone, audit
from keytail.compact.cleaner import clean_partition, install, next_pass
from keytail.compact.one_partition import COMPACTED, compact
from keytail.compact.repack.partition import repack_partition
from keytail.compact.repack.task import Repacking, RepackTask
from keytail.compact.task import CleaningTask
from keytail.config.compaction import CompactionConfig
from keytail.cut.coordinators import commits_of
from keytail.cut.scan import pieces_of, scan
from keytail.dump.files import DumpOptions, dump
from keytail.dump.report import Report
from keytail.erase.finding import find_in_partition
from keytail.erase.keys import read_keys
from keytail.erase.rewriting import RewriteTask, refuse_remaining, rewrite
from keytail.export.latest import LatestTask, find_latest, latest_records, slices_of
from keytail.format import names
from keytail.format.batch import BATCH_HEADER, CONTROL, CRC_START, TRANSACTIONAL
from keytail.format.build import build_batch
from keytail.format.codecs.table import CODECS, GZIP, ZSTD
from keytail.format.compression import compress
from keytail.format.control import ControlType
from keytail.kernels.native import crc32c
from keytail.log.append.partition_log import PartitionLog
from keytail.log.fs import LOCAL
from keytail.log.one_partition import survey
from keytail.log.partition import LogDirFacts, PartitionEntry, PartitionFacts
from keytail.log.records.chunk import SegmentReader
from keytail.lookup.steps import lookup_offset, lookup_time
from keytail.rebuild_index.partition import RebuildSettings, plan_partition
from keytail.rebuild_index.tasks import Rebuild
from keytail.run.kernels import RARE
from keytail.salvage.partition import salvage_partition
from keytail.salvage.write import NewPartition
from keytail.verify.task import verify_partition

_NOW_MS = time.time_ns() // 1_000_000  # of records; the steps may run hours later


def _clock_ms() -> int:
    """Return a time shortly after the segments were written, whose modification times a compaction compares with it."""
    return time.time_ns() // 1_000_000 + 60_000


def run_all() -> None:
    """Run all steps, so that this process and its forks have the kernels."""
    with tempfile.TemporaryDirectory(prefix="keytail-warm-") as home:
        for _, step in steps(home):
            step()


def steps(home: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield (command, function): the function does the work of the command on small logs in `home`. The command is RARE
    for operations that few logs need. Call the functions in this order."""
    paths = [os.path.join(home, f"{topic}-0") for topic in ("warm", "warm-transactions", "warm-old")]
    yield "import", partial(_new_partition, home, "warm")
    yield RARE, partial(_transactional_partition, home)
    yield RARE, partial(_old_partition, home)
    for path in paths:
        yield "audit" if path == paths[0] else RARE, partial(_audit, path, home)
    for path in paths:
        for command, step in {
            "verify": _verify, "lookup": _lookup, "dump": _dump, "export": _export, "rebuild-index": _rebuild,
            "repack": _repack, "erase": _erase, "compact": _compact,
        }.items():  # fmt: skip
            is_rare = path != paths[0] and (command, path) != ("repack", paths[1])  # producers are frequent
            yield RARE if is_rare else command, partial(step, path)
    yield RARE, lambda: _compact_in_passes(_many_keys(home))
    for path in paths[:2]:
        yield "cut" if path == paths[0] else RARE, partial(_cut, path)
    yield "salvage", partial(_salvage, paths[0])


def _records(first: int, count: int) -> list[tuple[int, bytes | None, bytes | None]]:
    """Return records (timestamp, key, value) with 10 different keys, every ninth a tombstone."""
    return [
        (_NOW_MS + n, b"key-%d" % (n * 7 % 10), None if n % 9 == 0 else b"value-%d" % n * 20)
        for n in range(first, first + count)
    ]


def _audit(path: str, home: str) -> None:
    """Audit two different partitions as if they were replicas: nearly all records are missing in one of the two, and
    have to be explained."""
    facts = survey(path)
    other = survey(_new_partition(home, f"other-{os.path.basename(path)[:-2]}"))
    logs = tuple(
        ReplicaLog(
            name, item.path, tuple((s.base_offset, s.log_bytes, s.log_mtime_ns) for s in item.segments),
            item.log_start_offset, item.log_end_offset, None, None,
        )
        for name, item in (("a", facts), ("b", other))
    )  # fmt: skip
    first, end = compared_range(logs)
    audit(AuditTask("warm", 0, logs, end, 2, 1, 1), first, Alone(LOCAL))


def _directory(home: str, topic: str) -> str:
    path = os.path.join(home, names.partition_dir(topic, 0))
    LOCAL.mkdir(path, LOCAL.stat(home))
    return path


def _new_partition(home: str, topic: str) -> str:
    path = _directory(home, topic)
    with PartitionLog.open(path, now_ms=_NOW_MS) as log:
        for codec in range(len(CODECS)):
            for _ in range(4):
                at = log.log_end_offset
                log.append(build_batch(_records(at, 30), codec=codec), leader_epoch=0, now_ms=_NOW_MS)
            log.roll(now_ms=_NOW_MS)
    return path


def _transactional_partition(home: str) -> str:
    """Create a partition with committed and aborted transactions, and batches without a producer; return its path."""
    path = _directory(home, "warm-transactions")
    with PartitionLog.open(path, now_ms=_NOW_MS) as log:
        for n in range(6):
            producer = 1000 + n % 2
            at = log.log_end_offset
            batches = [
                build_batch(_records(at, 5), base_offset=at),
                _of_producer(build_batch(_records(at + 5, 5), base_offset=at + 5), producer, 5 * (n // 2)),
                _marker(at + 10, producer, ControlType.ABORT if n % 3 == 0 else ControlType.COMMIT),
            ]
            for batch in batches:
                log.append_as_follower(batch, now_ms=_NOW_MS)
            if n % 2:
                log.roll(now_ms=_NOW_MS)
    return path


def _of_producer(batch: bytes, producer_id: int, sequence: int, attributes: int = TRANSACTIONAL) -> bytes:
    data = np.frombuffer(batch, np.uint8).copy()
    header = data[: BATCH_HEADER.itemsize].view(BATCH_HEADER)
    header["attributes"] |= attributes
    header["producer_id"], header["producer_epoch"], header["base_sequence"] = producer_id, 0, sequence
    header["crc"] = crc32c(data, CRC_START, len(data) - CRC_START)
    return data.tobytes()


def _marker(offset: int, producer_id: int, kind: ControlType) -> bytes:
    record = (_NOW_MS, struct.pack(">hh", 0, kind), struct.pack(">hi", 0, 0))
    return _of_producer(build_batch([record], base_offset=offset), producer_id, -1, TRANSACTIONAL | CONTROL)


def _old_partition(home: str) -> str:
    """Create a partition with messages of magic 0 and 1, and two segments of batches at its end; without these two
    segments, no segment could lose all its records. Return the path of the partition."""
    path = _directory(home, "warm-old")
    like = LOCAL.stat(home)
    for base in (0, 20):
        magic = base // 20
        messages = b"".join(_message(n, magic) for n in range(base, base + 10))
        inner = (_message(n if magic == 0 else n - base - 10, magic) for n in range(base + 10, base + 20))
        messages += _wrapper(b"".join(inner), base + 19, magic)
        LOCAL.write_file(os.path.join(path, names.segment_file(base, names.LOG)), messages, like)
    for base in (40, 60):
        batch = build_batch(_records(base, 20), base_offset=base)
        LOCAL.write_file(os.path.join(path, names.segment_file(base, names.LOG)), batch, like)
    return path


def _wrapper(messages: bytes, last_offset: int, magic: int) -> bytes:
    """Return a compressed message. In magic 1, the offsets of inner messages are relative to the first of them."""
    return _message(last_offset, magic, value=bytes(compress(GZIP, messages)), key=None, attributes=GZIP)


def _message(
    offset: int, magic: int, *, key: bytes | None = b"key", value: bytes = b"value", attributes: int = 0
) -> bytes:
    body = struct.pack(">bb", magic, attributes) + (struct.pack(">q", _NOW_MS + offset) if magic else b"")
    body += struct.pack(">i", -1 if key is None else len(key)) + (key or b"")
    body += struct.pack(">i", len(value)) + value
    return struct.pack(">qiI", offset, 4 + len(body), zlib.crc32(body)) + body


def _facts(path: str) -> PartitionFacts:
    facts = survey(path)
    return replace(facts, high_watermark=facts.log_end_offset, recovery_point=facts.log_end_offset)


def _verify(path: str) -> None:
    verify_partition(LOCAL, path)


def _repack(path: str) -> None:
    """Repack the partition, and remove the output."""
    facts = _facts(path)
    task = RepackTask.of(
        facts, first_dirty_offset=facts.log_end_offset, first_uncleanable_offset=facts.log_end_offset, now_ms=_NOW_MS,
        config=CompactionConfig(), run_id="warm", repacking=Repacking(1 << 20, ZSTD),
    )  # fmt: skip
    for group in repack_partition(LOCAL, task).groups:
        for output in group.segments:
            for file in output.files:
                LOCAL.unlink(os.path.join(path, file.name))


def _lookup(path: str) -> None:
    facts = _facts(path)
    lookup_offset(LOCAL, facts, facts.log_end_offset // 2)
    lookup_time(LOCAL, facts, _NOW_MS + 15)


def _dump(path: str) -> None:
    for as_json in (False, True):
        nothing = io.BytesIO()
        report = Report(nothing.write, lambda line: None, as_json=as_json)
        dump(LOCAL, [path], DumpOptions(print_data_log=True), report)


def _export(path: str) -> None:
    facts = _facts(path)
    start, end = facts.log_start_offset, facts.log_end_offset
    latest = LatestTask(path, facts.segments, start, start, end, drop_keyless=True, map_memory_bytes=1 << 20)
    for piece in slices_of(latest, find_latest(LOCAL, latest)):
        for table in latest_records(LOCAL, piece):
            table.keys(), table.headers()


def _rebuild(path: str) -> None:
    for rebuild_all in (False, True):
        plan = plan_partition(
            LOCAL,
            _facts(path),
            RebuildSettings(512, 10_485_760, rebuild_all=rebuild_all, execute=True, run_id="warm"),
        )  # fmt: skip
        Rebuild([plan]).run()


def _erase(path: str) -> None:
    """Erase two keys, and check the result."""
    facts = survey(path)
    keys = read_keys(io.BytesIO(b"key-3\nkey-7\n"), "keys", "utf8")
    task = CleaningTask.of(
        facts, first_dirty_offset=facts.log_start_offset, first_uncleanable_offset=facts.log_end_offset,
        now_ms=_NOW_MS, config=COMPACTED, run_id="warm", grouping="kafka", message_format="keep",
    )  # fmt: skip
    found = find_in_partition(LOCAL, task, keys)
    bases = tuple(segment.base_offset for segment in found.segments)
    result = rewrite(LOCAL, RewriteTask(task, keys, bases, found.transactions, found.erased))
    install(LOCAL, task, result)
    refuse_remaining(LOCAL, replace(task, segments=survey(path).segments), keys)


def _compact(path: str) -> None:
    """Compact three times in one task, as `compact` does: the second time with the result of the first time before the
    dirty section, the third time from the start."""
    config = replace(COMPACTED, index_interval_bytes=512, min_cleanable_dirty_ratio=0.0, segment_bytes=1 << 12)
    for checkpoint in (None, -1, None):
        facts = _facts(path)
        if checkpoint is not None and len(facts.segments) > 2:
            facts = replace(facts, cleaner_checkpoint=facts.segments[-2].base_offset)
        compact(facts, config, now_ms=_clock_ms(), message_format="v2")


def _many_keys(home: str) -> str:
    """Create a partition with more keys than the initial table of a map can hold, and return its path."""
    path = _directory(home, "warm-keys")
    with PartitionLog.open(path, now_ms=_NOW_MS) as log:
        for part in range(4):
            records = [(_NOW_MS, b"key-%d" % (n + part * 4000), b"value" * 4) for n in range(6000)]
            log.append(build_batch(records), leader_epoch=0, now_ms=_NOW_MS)
            log.roll(now_ms=_NOW_MS)
    return path


def _compact_in_passes(path: str) -> None:
    facts = _facts(path)
    task = CleaningTask.of(
        facts, first_dirty_offset=0, first_uncleanable_offset=facts.segments[-1].base_offset,
        now_ms=_clock_ms(), config=COMPACTED, run_id="warm", grouping="kafka", max_scratch_bytes=1,
        hottest_keys=2, message_format="v2",
    )  # fmt: skip
    task = replace(task, config=replace(COMPACTED, segment_bytes=1))
    while True:
        result = clean_partition(LOCAL, task)
        install(LOCAL, task, result)
        if result.rest is None:
            return
        task = replace(next_pass(task, result), attempt=task.attempt + "0")


def _cut(path: str) -> None:
    """Read a log as `cut` reads a partition of `__consumer_offsets`, and write it again."""
    reader, facts = SegmentReader(LOCAL), _facts(path)
    found = scan(LOCAL, reader, facts)
    commits_of(reader, found, pieces_of(found.table))
    entry = PartitionEntry(facts.topic, facts.partition, facts.log_dir, facts.path)
    directory = _directory(os.path.dirname(path), f"cut-{facts.topic}")
    settings = RebuildSettings(4096, 10_485_760, execute=True, run_id="cut")
    new = NewPartition(LOCAL, directory, entry, settings, None)
    for segment in facts.segments:
        log = os.path.join(path, names.segment_file(segment.base_offset, names.LOG))
        chunks = reader.chunks(log, segment.log_bytes)
        new.add_segment(segment.base_offset, (chunk.raw for chunk in chunks), LOCAL.stat(log))
    new.finish(())


def _salvage(path: str) -> None:
    """Salvage a log after overwriting one byte."""
    log = os.path.join(path, names.segment_file(_facts(path).segments[0].base_offset, names.LOG))
    fd = LOCAL.open_write(log)
    try:
        LOCAL.write_at(fd, b"?", 100)
    finally:
        LOCAL.close(fd)
    log_dir = LogDirFacts(os.path.dirname(path), (), (), False, {}, {}, {}, {})
    topic, _, partition = os.path.basename(path).rpartition("-")
    entry = PartitionEntry(topic, int(partition), log_dir.path, path)
    salvage_partition(LOCAL, log_dir, entry, None)
