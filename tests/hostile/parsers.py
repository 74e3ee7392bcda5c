"""All parsers of bytes, each as a function of damaged bytes that returns normally or raises `Defect`.

A result must be correct, or the damage must be reported with its position. The correct result comes from a reference
model (the plain readers of tests/reference), or from comparing keytail's two readers with each other.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from keytail.compact.cleaner import clean_partition
from keytail.dump.files import DumpOptions, dump
from keytail.dump.index import IndexChecks
from keytail.dump.report import Report
from keytail.errors import CorruptLog, KeytailError, Refused
from keytail.format import compression, control, coordinator, index, metadata, names, producers
from keytail.format.codecs.errors import TooLarge
from keytail.log.checkpoint import read_epochs, read_offsets
from keytail.log.cluster.metadata import read_metadata, read_topic_id
from keytail.log.fs import FileSystem
from keytail.log.log_end import log_end
from keytail.log.partition import PartitionFacts, SegmentFacts
from keytail.log.producers import newest_snapshot
from keytail.log.records.chunk import SegmentReader
from keytail.log.records.scan import RecordScanner
from keytail.lookup.steps import lookup_offset, lookup_time
from keytail.rebuild_index.indexes import SegmentTask, index_segment
from keytail.verify.task import verify_partition
from tests.compact.logs import random_log, task_for, write_log
from tests.hostile import kernels as kernel_drive
from tests.hostile.corpus import NOW, Corpus
from tests.hostile.in_memory import MTIME_NS, InMemory
from tests.hostile.mutator import Mutator, spoil_entries, spoil_message_bytes, spoil_snapshot, spoil_text
from tests.log.invariants import check_chunk
from tests.reference import codecs
from tests.reference.batches import Rec, all_records, decode_log

DIR = "/logs/t-0"
LOG = f"{DIR}/{0:020d}.log"
# The kinds of an inspection's findings that concern the batches themselves.
BATCH_FINDINGS = frozenset(
    {"cut", "cut-active", "size", "zeros", "magic", "checksum", "offset-order", "codec", "record-count", "record",
     "record-offset", "decompress", "legacy"}
)  # fmt: skip


class Defect(AssertionError):
    """A parser did not behave as required."""


def expect(holds: bool, what: str) -> None:
    if not holds:
        raise Defect(what)


def check_position(problem: KeytailError) -> None:
    """Check that a problem has a file and a position."""
    expect(problem.path is not None, f"the error has no file: {problem}")
    expect(problem.byte_position is not None or problem.offset is not None, f"the error has no position: {problem}")


# Logs


_CHUNK_BYTES = 4096  # a log has several chunks
_reader = SegmentReader(InMemory({}), _CHUNK_BYTES, arena_bytes=2 * _CHUNK_BYTES)
_scanner = RecordScanner(64)


def read_log(data: bytes) -> list[Rec] | CorruptLog | TooLarge:
    """Return all records as the cleaner reads them, or the reason why it does not read them."""
    _reader._fs = InMemory({LOG: data})
    found: list[Rec] = []
    try:
        for chunk in _reader.chunks_without_prefetch(LOG, len(data)):
            check_chunk(chunk)
            for opened in _reader.open_rows(chunk, np.ones(len(chunk.table), bool)):
                for part in _scanner.portions(chunk, opened):
                    part.hash_keys(7)
                    found += _as_recs(part.record_table)
    except (CorruptLog, TooLarge) as problem:
        check_position(problem)
        return problem
    return found


def _as_recs(table: Any) -> list[Rec]:
    headers = table.headers()
    names, values = headers.keys.to_list(), headers.values.to_list()
    ends = headers.offsets.tolist()
    return [
        Rec(offset, at, key, value, tuple(zip(names[a:b], values[a:b], strict=True)))
        for offset, at, key, value, a, b in zip(
            table.records["offset"].tolist(), table.records["timestamp_ms"].tolist(), table.keys().to_list(),
            table.values().to_list(), ends, ends[1:], strict=False,
        )
    ]  # fmt: skip


def chunk_reader(data: bytes, rng: random.Random) -> None:
    found = read_log(data)
    if not isinstance(found, list):
        return
    expect([rec.offset for rec in found] == sorted({rec.offset for rec in found}), "offsets do not increase")
    if any(batch[16] != 2 or batch[22] & 7 for batch in kernel_drive.batches_of(data)):
        return  # compressed and old batches are compared with the other reader
    try:
        expected = all_records(decode_log(data))
    except ValueError as reason:
        raise Defect(f"the log was read, but the reference model finds damage: {reason}") from reason
    wrapped = [Rec(r.offset, (r.timestamp + 2**63) % 2**64 - 2**63, r.key, r.value, r.headers) for r in expected]
    expect(wrapped == found, "the reference model reads other records")


def inspection(data: bytes, rng: random.Random) -> None:
    """Check that the two readers agree on whether the batches of a log are valid."""
    first = read_log(data)
    report = verify_partition(InMemory({LOG: data}), DIR)
    kinds = {finding.kind for finding in report.findings} & BATCH_FINDINGS
    for finding in report.findings:
        expect(bool(finding.path and finding.what), f"a finding without a file or a text: {finding}")
    if isinstance(first, TooLarge):
        return
    if isinstance(first, CorruptLog):
        expect(bool(kinds), f"cleaning finds damage that verify does not find: {first}")
    else:
        if any(
            batch[16] == 2 and batch[22] & 7 > 4 and not any(batch[57:61]) for batch in kernel_drive.batches_of(data)
        ):
            kinds -= {"codec"}  # the codec of a batch without records is invalid, but the batch is never decompressed
        expect(not kinds, f"verify finds {sorted(kinds)}, cleaning finds nothing")
        expect(report.counts.records == len(first), f"{report.counts.records} records, and {len(first)}")


def dumped(data: bytes, rng: random.Random) -> None:
    lines = bytearray()
    report = Report(lines.extend, lambda text: None, as_json=rng.random() < 0.5)
    decoder = rng.choice((None, None, coordinator.OFFSETS.text, coordinator.TRANSACTIONS.text))
    options = DumpOptions(print_data_log=rng.random() < 0.8, deep_iteration=True, decoder=decoder)
    dump(InMemory({LOG: data}), [LOG], options, report)
    if not report.wrong:
        found = read_log(data)
        # A dump reads batches one by one, and does not check the order of their offsets.
        reported = isinstance(found, CorruptLog) and ("offset" not in found.what)
        expect(not reported, f"the dump reports nothing about a log that cannot be read: {found}")


def facts_of(files: dict[str, bytes], base: int = 0) -> PartitionFacts:
    sizes = [len(files[f"{DIR}/{base:020d}{suffix}"]) if f"{DIR}/{base:020d}{suffix}" in files else None
             for suffix in (".log", ".index", ".timeindex", ".txnindex")]  # fmt: skip
    segment = SegmentFacts(base, sizes[0] or 0, MTIME_NS, sizes[1], sizes[2], sizes[3], NOW, NOW)
    end = log_end(InMemory(files), f"{DIR}/{base:020d}.log", base)
    return PartitionFacts("t", 0, "/logs", DIR, (segment,), (), base, end.next_offset, None, 0, True, None, ())


def survey(data: bytes, rng: random.Random) -> None:
    end = log_end(InMemory({LOG: data}), LOG, 0)
    expect(0 <= end.end_position <= len(data), f"{end}")
    expect(end.end_position + end.tail_bytes == len(data), f"{end}")
    expect(0 <= end.next_offset <= 2**63, f"{end}")


def rebuilt(data: bytes, rng: random.Random) -> None:
    task = SegmentTask(DIR, 0, len(data), MTIME_NS, 2**63 - 1, 0, 100, 10_485_760)
    try:
        result = index_segment(InMemory({LOG: data}), task)
    except (CorruptLog, Refused) as problem:
        check_position(problem)
        return
    expect(0 <= result.end_position <= len(data), f"{result}")


def looked_up(files: dict[str, bytes], base: int, rng: random.Random) -> None:
    facts = facts_of(files, base)
    offset = rng.choice(
        (facts.log_start_offset, facts.log_end_offset, (facts.log_start_offset + facts.log_end_offset) // 2)
    )
    for look in (
        lambda: lookup_offset(InMemory(files), facts, offset),
        lambda: lookup_time(InMemory(files), facts, NOW - 9_990),
    ):
        try:
            look()
        except CorruptLog as damage:
            check_position(damage)


def looked_up_log(data: bytes, rng: random.Random) -> None:
    looked_up({LOG: data}, 0, rng)


# Output that a disk damaged between the write and the proof


class FailingDisk(FileSystem):
    """Damages one scratch file when it is synced."""

    def __init__(self, rng: random.Random, logs: Mutator) -> None:
        super().__init__()
        self._rng, self._logs = rng, logs
        self.spoiled = ""

    def fsync(self, fd: int) -> None:
        super().fsync(fd)
        path = self._path_of.get(fd, "")
        if self.spoiled or not path.endswith(names.SCRATCH) or self._rng.random() < 0.3:
            return
        with open(path, "r+b") as file:
            data = file.read()
            if names.LOG + "." in os.path.basename(path):
                spoiled = self._logs.spoil(self._rng, data) if data else data
            else:
                spoiled = spoil_entries(self._rng, data, 8 if names.INDEX + "." in path else 12)
            if spoiled != data and _meaning(spoiled) != _meaning(data):
                self.spoiled = path
                file.seek(0)
                file.truncate()
                file.write(spoiled)


def _meaning(log: bytes) -> Any:
    """Return the contents of a log, because gzip headers may have other bytes with the same contents."""
    try:
        return [replace(batch, size=0, crc=0, position=0) for batch in decode_log(log)]
    except Exception:  # the plain reader has no exception type for damage
        return log


def proof(logs: Mutator, rng: random.Random) -> None:
    """Check that a compaction refuses its damaged output."""
    place = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="hostile-", dir=place) as work:
        log = random_log(rng, NOW, codecs=(0, 0, 0, 1, 2, 3, 4))
        facts = write_log(f"{work}/t-0", log.segments)
        dirty = rng.choice([log.segments[0].base_offset] * 2 + [segment.base_offset for segment in log.segments])
        task = task_for(f"{work}/t-0", log, facts, NOW, first_dirty=dirty, map_memory_bytes=1 << 20)
        if dirty == log.segments[-1].base_offset or not any(segment.log for segment in log.segments):
            return
        disk = FailingDisk(rng, logs)
        try:
            result = clean_partition(disk, task)
        except KeytailError as problem:
            expect(bool(disk.spoiled), f"an undamaged log was refused: {problem}")
            expect(problem.path is not None, f"the error has no file: {problem}")
            return
        expect(not disk.spoiled, f"{os.path.basename(disk.spoiled)} was damaged, but the proof passed: {result}")


# Other files


def indexes(material: tuple[bytes, bytes, bytes, bytes], rng: random.Random) -> None:
    """Check a log with one or two of its indexes damaged."""
    log, offsets, times, txns = material
    spoiled = [spoil_entries(rng, offsets, 8), times, txns]
    if rng.random() < 0.6:
        spoiled = [offsets, spoil_entries(rng, times, 12), spoil_entries(rng, txns, 34)]
    base = int.from_bytes(log[:8], "big")
    stem = f"{DIR}/{base:020d}"
    files = {
        f"{stem}.log": log,
        f"{stem}.index": spoiled[0],
        f"{stem}.timeindex": spoiled[1],
        f"{stem}.txnindex": spoiled[2],
    }
    index.parse_offset_index(spoiled[0])
    index.parse_time_index(spoiled[1])
    index.parse_txn_index(spoiled[2])
    for finding in verify_partition(InMemory(files), DIR).findings:
        expect(bool(finding.path and finding.what), f"a finding without a file or a text: {finding}")
    lines = bytearray()
    reported = Report(lines.extend, lambda text: None, as_json=rng.random() < 0.5)
    checks = IndexChecks(rng.random() < 0.5, rng.random() < 0.5)
    for name in list(files)[1:]:
        dump(InMemory(files), [name], DumpOptions(index_checks=checks), reported)
    looked_up(files, base, rng)


def snapshot(data: bytes, rng: random.Random) -> None:
    path = f"{DIR}/{9:020d}.snapshot"
    fs = InMemory({path: data})
    try:
        entries = producers.parse_snapshot(data)
    except ValueError:
        expect(newest_snapshot(fs, DIR, [9], 10) is None, "a snapshot that cannot be parsed was loaded")
        return
    expect(producers.encode_snapshot(entries) == data, "the bytes differ when written again")


def text(data: bytes, rng: random.Random) -> None:
    """Check that checkpoints are read, or refused with file and line, and `partition.metadata` with its file."""
    fs = InMemory({f"{DIR}/checkpoint": data, f"{DIR}/partition.metadata": data})
    for read in (read_offsets, read_epochs):
        try:
            read(fs, f"{DIR}/checkpoint")
        except CorruptLog as damage:
            expect("line" in damage.what and damage.path is not None, f"the error has no line: {damage}")
    try:
        read_topic_id(fs, DIR)
    except CorruptLog as damage:
        expect(damage.path is not None, f"the error has no file: {damage}")


def metadata_log(data: bytes, rng: random.Random) -> None:
    path = f"/logs/__cluster_metadata-0/{0:020d}.log"
    try:
        read_metadata(InMemory({path: data}), "/logs/__cluster_metadata-0", 1, ("cleanup.policy",))
    except Refused as problem:
        expect(problem.path is not None, f"the error has no file: {problem}")


def coordinator_records(record: tuple[bytes | None, bytes | None], rng: random.Random) -> None:
    for decode in (coordinator.OFFSETS.text, coordinator.TRANSACTIONS.text):
        try:
            decode(record[0], record[1], 5)
        except ValueError:
            continue


def metadata_records(data: bytes, rng: random.Random) -> None:
    for parse in (metadata.parse_record, metadata.parse_snapshot_header, metadata.parse_topic_id):
        try:
            parse(data)
        except ValueError:
            continue
    try:
        control.parse_control_record(data, data)
    except ValueError:
        pass


LIMIT_BYTES = 1 << 20


def codec(material: tuple[int, bytes], rng: random.Random) -> None:
    """Decompress a block that ends at an inaccessible page, which also tests the libraries."""
    number, data = material
    where = kernel_drive.RAW.put(data, in_front=rng.random() < 0.3)
    try:
        opened = bytes(compression.decompress(number, memoryview(where), LIMIT_BYTES))
    except (ValueError, TooLarge):
        return
    expect(len(opened) <= LIMIT_BYTES, f"{len(opened)} bytes, {LIMIT_BYTES} allowed")
    try:
        expected = codecs.decompress(number, data)
    except Exception:  # the other library accepts less than Kafka does
        return
    expect(
        opened == expected or opened.startswith(expected) or expected.startswith(opened),
        "another library returns other bytes",
    )


# Called with an input and a generator of random numbers.

Parser = Callable[[Any, random.Random], None]


def targets(of: Corpus) -> dict[str, tuple[int, Callable[[random.Random], Any], Parser]]:
    """Return by name: the share of the inputs in percent, the function that makes an input, and the parser."""
    logs, metadata_logs = Mutator(list(of.logs)), Mutator(list(of.metadata_logs))

    def damaged_block(rng: random.Random) -> tuple[int, bytes]:
        number, packed, _ = rng.choice(of.blocks)
        for _ in range(rng.choice((1, 1, 3))):
            packed = spoil_message_bytes(rng, packed)
        return (number if rng.random() < 0.9 else rng.randrange(8)), packed[: 200 << 10]

    def damaged_record(rng: random.Random) -> tuple[bytes | None, bytes | None]:
        key, value = rng.choice(rng.choice((of.offsets_records, of.transaction_records)))
        if rng.random() < 0.5 or value is None:
            return spoil_message_bytes(rng, key or b""), value
        return key, spoil_message_bytes(rng, value)

    return {
        "kernels": (30, logs.log, kernel_drive.drive),
        "chunk reader": (10, logs.log, chunk_reader),
        "inspection": (10, logs.log, inspection),
        "dump": (4, logs.log, dumped),
        "survey": (8, logs.log, survey),
        "rebuild": (5, logs.log, rebuilt),
        "lookup": (2, logs.log, looked_up_log),
        "indexes": (3, lambda rng: rng.choice(of.indexes), indexes),
        "snapshot": (5, lambda rng: spoil_snapshot(rng, rng.choice(of.snapshots)), snapshot),
        "text": (6, lambda rng: spoil_text(rng, rng.choice(of.texts)), text),
        "metadata log": (3, metadata_logs.log, metadata_log),
        "coordinator": (5, damaged_record, coordinator_records),
        "metadata": (5, lambda rng: spoil_message_bytes(rng, rng.choice(of.metadata_records)), metadata_records),
        "proof": (1, lambda rng: logs, proof),
        "codec": (4, damaged_block, codec),
    }
