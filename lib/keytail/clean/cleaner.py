"""The story of one partition: map the dirty section, decide, write new segments, prove them, replace.

`clean_partition` reads and writes scratch files only and may run anywhere that sees the directory, as often
as it likes; `install` gives what it wrote the names that a broker reads, and is the driver's alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from keytail.clean.plan import group_segments, segments_between
from keytail.clean.producers import ActiveProducers
from keytail.clean.proof import prove
from keytail.clean.reading import PhaseClock, read_log, refuse_keyless
from keytail.clean.rewrite import Counts, Rewriter
from keytail.clean.survivors import Progress, Survivors
from keytail.clean.task import CleaningResult, CleaningTask
from keytail.errors import Refused
from keytail.format import names
from keytail.kernels.native import HASH_NAME
from keytail.log.fs import FileSystem
from keytail.log.partition import SegmentFacts, refuse_changed
from keytail.log.producers import load_producers
from keytail.log.replace import GroupOutput, commit_group
from keytail.log.scan import RecordScanner
from keytail.log.stride import SegmentReader
from keytail.log.transactions import Transactions
from keytail.log.writer import MAX_SEGMENT_BYTES, Limits, OutputWriter, Source


def clean_partition(
    fs: FileSystem, task: CleaningTask, on_progress: Progress | None = None
) -> CleaningResult:
    """Write what is to replace the segments below the round's end offset, and prove it.

    `on_progress(phase, bytes)` hears of bytes read. Raises CorruptLog or Refused with every scratch file of
    this attempt gone again. Memory: the map, and less than 512 MiB beside it whatever the segments' size.
    """
    progress = on_progress or (lambda phase, n: None)
    clock = PhaseClock()
    _check_sources(fs, task)
    _check_hash(task)
    reader = SegmentReader(fs)

    survivors, transactions, untouched_records = read_log(fs, task, reader, clock, progress)
    numbers = segments_between(task.segments, task.segments[0].base_offset, survivors.end_offset)
    writer = _output_writer(fs, task, transactions)
    try:
        with clock.phase("write"):
            producers = _active_producers(fs, task, reader)
            rewriter = _make_rewriter(task, reader, survivors, transactions, producers)
            groups = _rewrite(task, numbers, survivors.end_offset, rewriter, writer, progress)
            refuse_keyless(task, rewriter.counts.keyless, rewriter.counts.first_keyless_offset)
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


def _check_sources(fs: FileSystem, task: CleaningTask) -> None:
    for segment in task.segments:
        path = task.path(segment.base_offset, names.LOG)
        refuse_changed(fs, path, segment.log_bytes, segment.log_mtime_ns)


def _check_hash(task: CleaningTask) -> None:
    if task.hash_name != HASH_NAME:
        raise Refused(
            f"the run was planned with hash {task.hash_name}, but host {os.uname().nodename} has {HASH_NAME}",
            remedy="Install the same versions of keytail and xxhash on every host",
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
