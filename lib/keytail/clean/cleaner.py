"""The story of one partition: map the dirty section, decide, write new segments, prove them, replace.

`clean_partition` reads and writes scratch files only and may run anywhere that sees the directory, as often
as it likes; `install` gives what it wrote the names that a broker reads, and is the driver's alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from keytail.clean.offset_map import OffsetMap
from keytail.clean.plan import CompactionConfig, group_segments, segments_between
from keytail.clean.producers import ActiveProducers
from keytail.clean.proof import prove
from keytail.clean.rewrite import Counts, Rewriter
from keytail.clean.survivors import Followers, Progress, SurvivorBuilder, Survivors
from keytail.errors import CorruptLog, Refused
from keytail.format import names
from keytail.format.index import parse_offset_index
from keytail.kernels.native import HASH_NAME
from keytail.log.fs import FileSystem
from keytail.log.partition import SegmentFacts
from keytail.log.producers import load_producers
from keytail.log.replace import GroupOutput, commit_group
from keytail.log.scan import RecordScanner
from keytail.log.stride import CORRUPT_REMEDY, SegmentReader, Stride, refuse_unsupported
from keytail.log.transactions import (
    Contradiction,
    Transactions,
    TransactionTracker,
    read_aborted,
)
from keytail.log.writer import MAX_SEGMENT_BYTES, Limits, OutputWriter, Source

# Those of a stride of records of 64 bytes: waking the thread that finds them takes as long as finding thousands.
_STRIDE_RECORDS = 1 << 17

Grouping = Literal["kafka", "measured"]


@dataclass(frozen=True)
class CleaningTask:
    """One round over one partition, as the plan decided it; small, picklable, and the same for every attempt.

    `segments` are all of the partition, as the driver saw them. The map takes `map_memory_bytes`, and holds at
    most `map_max_entries` keys where that is given. `grouping` "kafka" makes one output of each group that Kafka
    would; "measured" goes by what survived.
    """

    topic: str
    partition: int
    partition_path: str
    segments: tuple[SegmentFacts, ...]
    snapshots: tuple[int, ...]
    log_start_offset: int
    log_end_offset: int
    first_dirty_offset: int
    first_uncleanable_offset: int
    now_ms: int
    config: CompactionConfig
    run_id: str
    attempt: str = "0"
    clean_shutdown: bool = True
    drop_keyless: bool = False
    grouping: Grouping = "measured"
    map_memory_bytes: int = 128 << 20
    map_max_entries: int | None = None
    hash_name: str = HASH_NAME
    hash_seed: int = 0

    def path(self, base_offset: int, suffix: str) -> str:
        return os.path.join(self.partition_path, names.segment_file(base_offset, suffix))


@dataclass(frozen=True)
class CleaningResult:
    """What a round wrote and what it would leave; numbers are of the whole partition, sizes of `.log` files.

    `limits_met`: outputs that had to end inside a source. `large_batches`: rebuilt to more than `max.message.bytes`.
    """

    end_offset: int
    groups: tuple[GroupOutput, ...]
    segments_before: int
    segments_after: int
    bytes_before: int
    bytes_after: int
    records_before: int
    records_after: int
    tombstones_removed: int
    markers_removed: int
    keys: int
    limits_met: int = 0
    large_batches: int = 0
    phases_s: dict[str, float] = field(default_factory=dict)


def clean_partition(
    fs: FileSystem, task: CleaningTask, on_progress: Progress | None = None
) -> CleaningResult:
    """Write what is to replace the segments below the round's end offset, and prove it.

    `on_progress(phase, bytes)` hears of bytes read. Raises CorruptLog or Refused with every scratch file of
    this attempt gone again. Memory: the map, and less than 512 MiB beside it whatever the segments' size.
    """
    progress = on_progress or (lambda phase, n: None)
    clock = _PhaseClock()
    _check_sources(fs, task)
    _check_hash(task)
    reader = SegmentReader(fs)

    survivors, transactions, untouched_records = _read_log(fs, task, reader, clock, progress)
    numbers = segments_between(task.segments, task.segments[0].base_offset, survivors.end_offset)
    writer = _output_writer(fs, task, transactions)
    try:
        with clock.phase("write"):
            producers = _active_producers(fs, task, reader)
            rewriter = _make_rewriter(task, reader, survivors, transactions, producers)
            groups = _rewrite(task, numbers, survivors.end_offset, rewriter, writer, progress)
            _refuse_keyless(task, rewriter.counts.keyless, rewriter.counts.first_keyless_offset)
        untouched_records += survivors.records_from(numbers[1])
        result = _result(task, survivors, rewriter.counts, numbers, groups, writer, untouched_records)
        # The proof needs a table as large as the map: one of them at a time.
        del survivors, rewriter
        with clock.phase("prove"):
            _prove(fs, task, result, producers)
    except BaseException:
        writer.discard()
        raise
    return replace(result, phases_s=clock.seconds)


def install(fs: FileSystem, task: CleaningTask, result: CleaningResult) -> None:
    """Replace the sources by what `clean_partition` wrote, group by group, in ascending order.

    The first group that fails stops the later ones, so that a tombstone never leaves before what it deletes.
    """
    _check_sources(fs, task)
    for group in result.groups:
        commit_group(fs, task.partition_path, group)


class _PhaseClock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def _check_sources(fs: FileSystem, task: CleaningTask) -> None:
    """Refuse when a segment is not the file that was planned with: another host's view, or a writer at work."""
    for segment in task.segments:
        path = task.path(segment.base_offset, names.LOG)
        facts = fs.stat(path) if fs.exists(path) else None
        if facts is None or (facts.size_bytes, facts.mtime_ns) != (segment.log_bytes, segment.log_mtime_ns):
            seen = f"{facts.size_bytes} bytes, mtime {facts.mtime_ns} ns" if facts else "no such file"
            raise Refused(
                f"segment changed since it was planned: {seen} on host {os.uname().nodename}, planned with "
                f"{segment.log_bytes} bytes, mtime {segment.log_mtime_ns} ns",
                path=path,
                remedy="Make sure that nothing writes to the directory and every host sees the same files",
            )


def _check_hash(task: CleaningTask) -> None:
    if task.hash_name != HASH_NAME:
        raise Refused(
            f"the run was planned with hash {task.hash_name}, but host {os.uname().nodename} has {HASH_NAME}",
            remedy="Install the same versions of keytail and xxhash on every host",
        )


def _read_log(
    fs: FileSystem,
    task: CleaningTask,
    reader: SegmentReader,
    clock: _PhaseClock,
    progress: Progress,
) -> tuple[Survivors, Transactions, int]:
    """Every batch of the log once, in order: the map of the dirty section, what became of the transactions, and
    the number of records in segments that the map did not reach.

    The transaction indexes are believed until the log contradicts them; then it is read again, with the entries
    that they should have had.
    """
    aborted = read_aborted(fs, task.partition_path, task.segments, task.log_start_offset)
    try:
        return _follow_log(fs, task, reader, aborted, clock, progress)
    except Contradiction as contradiction:
        aborted = contradiction.entries
    try:
        return _follow_log(fs, task, reader, aborted, clock, progress)
    except Contradiction as contradiction:
        raise CorruptLog(
            "the markers and the data of transactions contradict each other",
            path=task.partition_path,
            offset=contradiction.offset,
            remedy=CORRUPT_REMEDY,
        ) from None


def _follow_log(
    fs: FileSystem,
    task: CleaningTask,
    reader: SegmentReader,
    aborted: np.ndarray,
    clock: _PhaseClock,
    progress: Progress,
) -> tuple[Survivors, Transactions, int]:
    tracker = TransactionTracker(aborted, task.log_start_offset)
    first, end = segments_between(task.segments, task.first_dirty_offset, task.first_uncleanable_offset)
    with clock.phase("check"):
        for stride in _strides(task, reader, (0, first), progress):
            tracker.follow(stride.table)
    with clock.phase("map"):
        # The indexes of the dirty section's segments and those above; an entry lies where its marker lies.
        mapped = aborted["last_offset"] >= task.segments[first].base_offset
        mapped &= aborted["first_offset"] < task.first_uncleanable_offset
        mapping = TransactionTracker(aborted[mapped], task.log_start_offset)
        followers = Followers(tracker, mapping, _map_position(fs, task, task.segments[first]))
        builder = SurvivorBuilder(
            reader,
            RecordScanner(_STRIDE_RECORDS),
            OffsetMap(task.map_memory_bytes, task.map_max_entries),
            task.hash_seed,
        )
        survivors = builder.build(
            task.partition_path,
            task.segments,
            (first, end),
            task.first_dirty_offset,
            task.first_uncleanable_offset,
            followers,
            progress,
        )
    unread_records = 0
    with clock.phase("check"):
        for stride in _strides(task, reader, (first + len(survivors.segment_records), len(task.segments)), progress):
            tracker.follow(stride.table)
            unread_records += int(stride.table["record_count"].sum())
    transactions = tracker.finish()
    _refuse_keyless(task, survivors.keyless, survivors.first_keyless_offset)  # aborted data is no reason to
    return survivors, transactions, unread_records


def _map_position(fs: FileSystem, task: CleaningTask, segment: SegmentFacts) -> int:
    """Byte position in the first dirty segment of the batch that its index names for the first dirty offset."""
    if task.first_dirty_offset <= segment.base_offset or not segment.index_bytes:
        return 0
    entries = parse_offset_index(fs.read_bytes(task.path(segment.base_offset, names.INDEX)))
    at = np.searchsorted(entries["relative_offset"], task.first_dirty_offset - segment.base_offset, side="right")
    return int(entries["position"][at - 1]) if at else 0


def _strides(
    task: CleaningTask, reader: SegmentReader, numbers: tuple[int, int], progress: Progress
) -> Iterator[Stride]:
    """Checked headers of whole segments; Refused for a batch that forbids cleaning the others."""
    for number in range(*numbers):
        segment = task.segments[number]
        is_last = number + 1 == len(task.segments)
        path = task.path(segment.base_offset, names.LOG)
        torn_tail = is_last and not task.clean_shutdown
        for stride in reader.strides(path, segment.log_bytes, torn_tail=torn_tail):
            refuse_unsupported(stride)
            progress("check", len(stride.raw))
            yield stride


def _refuse_keyless(task: CleaningTask, count: int, first_offset: int) -> None:
    if count and not task.drop_keyless:
        raise Refused(
            f"{count} records without a key lie in the range to be cleaned",
            path=task.partition_path,
            offset=first_offset,
            remedy="Compaction would drop them, which usually means a wrong cleanup.policy; --drop-keyless does it",
        )


def _active_producers(fs: FileSystem, task: CleaningTask, reader: SegmentReader) -> ActiveProducers:
    producers = load_producers(
        fs,
        reader,
        task.partition_path,
        task.segments,
        task.snapshots,
        task.log_start_offset,
        task.log_end_offset,
        clean_shutdown=task.clean_shutdown,
        expiration_ms=task.config.producer_id_expiration_ms,
        now_ms=task.now_ms,
    )
    return ActiveProducers.of(producers)


def _make_rewriter(
    task: CleaningTask,
    reader: SegmentReader,
    survivors: Survivors,
    transactions: Transactions,
    producers: ActiveProducers,
) -> Rewriter:
    return Rewriter(
        reader,
        RecordScanner(),
        survivors,
        transactions,
        producers,
        seed=task.hash_seed,
        first_dirty_offset=task.first_dirty_offset,
        first_uncleanable_offset=task.first_uncleanable_offset,
        now_ms=task.now_ms,
        delete_retention_ms=task.config.delete_retention_ms,
        old_horizon_ms=_old_horizon_ms(task),
        max_message_bytes=task.config.max_message_bytes,
    )


def _old_horizon_ms(task: CleaningTask) -> int:
    """The file time up to which tombstones of magic 0 and 1 go: they have no horizon of their own."""
    a, b = segments_between(task.segments, 0, task.first_dirty_offset)
    if a == b:
        return 0
    return task.segments[b - 1].log_mtime_ns // 1_000_000 - task.config.delete_retention_ms


def _output_writer(fs: FileSystem, task: CleaningTask, transactions: Transactions) -> OutputWriter:
    config = task.config
    # Kafka sizes groups before cleaning and takes what comes; measured outputs keep the limit.
    segment_bytes = config.segment_bytes if task.grouping == "measured" else MAX_SEGMENT_BYTES
    limits = Limits(segment_bytes, config.segment_index_bytes, config.index_interval_bytes)
    return OutputWriter(
        fs, task.partition_path, task.run_id, task.attempt, limits, transactions.index_bytes
    )


def _rewrite(
    task: CleaningTask,
    numbers: tuple[int, int],
    end_offset: int,
    rewriter: Rewriter,
    writer: OutputWriter,
    progress: Progress,
) -> tuple[GroupOutput, ...]:
    """Rewrite segments `numbers[0]` .. `numbers[1]`, ascending, into outputs by the grouping asked for."""
    starts = {0}
    if task.grouping == "kafka":
        config = task.config
        starts = {
            first
            for first, _ in group_segments(
                task.segments,
                end_offset,
                task.first_uncleanable_offset,
                config.segment_bytes,
                config.segment_index_bytes,
            )
        }
    by_base = {segment.base_offset: segment for segment in task.segments}
    for number in range(*numbers):
        segment = task.segments[number]
        source = Source(segment.base_offset, segment.log_mtime_ns // 1_000_000)
        merged = [by_base[base] for base in writer.current_sources]
        if number in starts or (task.grouping == "measured" and _spans_too_long(task, [*merged, segment])):
            writer.start_output(source)
        else:
            writer.start_source(source)
        rewriter.rewrite(task.partition_path, segment, number, writer, progress)
    is_last = numbers[1] == len(task.segments)
    return writer.finish(task.log_end_offset if is_last else task.segments[numbers[1]].base_offset)


def _spans_too_long(task: CleaningTask, merged: Sequence[SegmentFacts]) -> bool:
    """Would one output of these make time retention keep old records longer, or young ones shorter?"""
    if "delete" not in task.config.cleanup_policy:
        return False
    # Without bytes there is nothing to delete, and the time is the file's: such a segment must not pile up.
    times = [segment.largest_timestamp_ms for segment in merged if segment.log_bytes]
    return bool(times) and max(times) - min(times) > task.config.segment_ms


def _result(
    task: CleaningTask,
    survivors: Survivors,
    counts: Counts,
    numbers: tuple[int, int],
    groups: tuple[GroupOutput, ...],
    writer: OutputWriter,
    untouched_records: int,
) -> CleaningResult:
    untouched = task.segments[numbers[1] :]
    return CleaningResult(
        end_offset=survivors.end_offset,
        groups=groups,
        segments_before=len(task.segments),
        segments_after=sum(len(group.segments) for group in groups) + len(untouched),
        bytes_before=sum(segment.log_bytes for segment in task.segments),
        bytes_after=writer.size_bytes + sum(segment.log_bytes for segment in untouched),
        records_before=counts.records_read + untouched_records,
        records_after=writer.records + untouched_records,
        tombstones_removed=counts.tombstones_removed,
        markers_removed=counts.markers_removed,
        keys=survivors.offset_map.used,
        limits_met=writer.splits,
        large_batches=counts.large_batches,
    )


def _prove(fs: FileSystem, task: CleaningTask, result: CleaningResult, producers: ActiveProducers) -> None:
    prove(
        fs,
        task.partition_path,
        task.segments,
        result.groups,
        first_dirty_offset=task.first_dirty_offset,
        end_offset=result.end_offset,
        first_uncleanable_offset=task.first_uncleanable_offset,
        now_ms=task.now_ms,
        delete_retention_ms=task.config.delete_retention_ms,
        index_interval_bytes=task.config.index_interval_bytes,
        drop_keyless=task.drop_keyless,
        memory_bytes=task.map_memory_bytes,
        log_start_offset=task.log_start_offset,
        segment_index_bytes=task.config.segment_index_bytes,
        active_producers=(producers.ids, producers.last_data_offsets, producers.epochs),
    )
