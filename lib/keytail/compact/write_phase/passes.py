"""Selects the groups that are written in one pass: as many as fit into the scratch space, and at least one.

Output boundaries do not depend on the passes: a pass ends only where an output ends and a source begins. With grouping
"measured", the end of an output is known only when the next output has begun; that next output is then discarded, and
becomes the first output of the next pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from keytail.compact.plan import group_segments, segments_between
from keytail.compact.proof.keys import table_bytes
from keytail.compact.task import CleaningTask, SourceCounts
from keytail.compact.write_phase.counts import Counts
from keytail.log.partition import SegmentFacts
from keytail.log.writer import Appends, OutputWriter, Source

# Room for the entries that are added when index files are closed, and that the sources may not have had.
_MARGIN_BYTES = 1 << 20
# This part of the saved state is not counted: the state has this size even with few keys.
_UNCOUNTED_BYTES = 8 << 20


class Rewrites(Protocol):
    """Rewrites segments in ascending order (Rewriter, RewriterInThreads)."""

    counts: Counts
    sources: dict[int, SourceCounts]

    def rewrite(self, partition_path: str, segment: SegmentFacts, number: int, writer: Appends) -> None:
        """Append to `writer` the survivors of segment `number` of the partition."""

    def close(self) -> None:
        """End all threads that read ahead."""


def source_bytes(segment: SegmentFacts) -> int:
    """Return the approximate maximum number of bytes that rewriting a segment writes: the size of its log, offset index
    and time index."""
    return segment.log_bytes + (segment.index_bytes or 0) + (segment.time_index_bytes or 0)


def scratch_bytes(task: CleaningTask) -> int:
    """Return an upper bound of the bytes that cleaning writes in one pass: everything that is left below the first
    uncleanable offset.

    Out of place, there is only one pass, because nothing is replaced; the bytes of copied files are included, except in
    the scratch directory for an object store.
    """
    if task.out_of_place is not None:
        if not task.out_of_place.is_local:
            return sum(file.size_bytes for file in task.out_of_place.source_files) + _MARGIN_BYTES
        if task.out_of_place.only_copies:  # copies are sent from the source
            return 0
    return sum(map(source_bytes, _left(task))) + _MARGIN_BYTES


def least_scratch_bytes(task: CleaningTask) -> int:
    """Return an upper bound of the space that a pass needs at least: for the largest remaining group and the state
    saved for the next pass.
    """
    if task.out_of_place is not None:
        return scratch_bytes(task)
    saved_state = _saved_bytes(task)
    if task.grouping == "kafka":
        numbers = kafka_groups(task, task.first_uncleanable_offset)
        groups = [task.segments[first:end] for first, end in numbers if first >= task.first_segment]
        largest = max(sum(map(source_bytes, group)) for group in groups)
        return min(scratch_bytes(task), largest + saved_state + _MARGIN_BYTES)
    # An output fills up to segment.bytes; the excess is copied to the next output before it is truncated.
    largest = max(map(source_bytes, _left(task)))
    return min(scratch_bytes(task), task.config.segment_bytes + 2 * largest + saved_state + _MARGIN_BYTES)


def _saved_bytes(task: CleaningTask) -> int:
    """Return an upper bound of the bytes of state that are still to be written for the next pass: the map with one bit
    per record and batch, and the tables of two proofs. The dirty section has at most as many keys as offsets. A map
    memory of 0 means that the map memory is not known yet.
    """
    if task.saved_state is not None:
        return max(0, task.saved_state.proof.size_bytes - _UNCOUNTED_BYTES)
    first, end = segments_between(task.segments, task.first_dirty_offset, task.first_uncleanable_offset)
    if first == end:
        return 0
    offsets = task.first_uncleanable_offset - task.segments[first].base_offset
    table = 2 * table_bytes(offsets)  # a table that has just grown
    if task.map_memory_bytes:
        table = min(table, task.map_memory_bytes)
    return max(0, 3 * table + 2 * offsets // 8 - _UNCOUNTED_BYTES)


def rewrite_groups(
    task: CleaningTask,
    numbers: tuple[int, int],
    end_offset: int,
    rewriter: Rewrites,
    writer: OutputWriter,
    limit_bytes: int | None,
) -> tuple[int, Counts]:
    """Rewrite segments `numbers[0]` .. `numbers[1]`, ascending, into outputs by the task's grouping.

    Returns the number of the segment before which the pass ended for lack of space, or `numbers[1]`, and the counts of
    the segments before that number.
    """
    groups = dict(kafka_groups(task, end_offset)) if task.grouping == "kafka" else {}
    number_of = {segment.base_offset: number for number, segment in enumerate(task.segments)}
    counts_before: dict[int, Counts] = {}
    for number in range(*numbers):
        segment = task.segments[number]
        merged = [task.segments[number_of[base]] for base in writer.current_sources]
        if task.grouping == "kafka":
            begins = number in groups
            needed = sum(map(source_bytes, task.segments[number : groups.get(number, number)]))
        else:
            begins = number == numbers[0] or spans_too_long(task, [*merged, segment])
            needed = _needed_bytes(task, segment, writer.current_bytes)
        counts_before[number] = replace(rewriter.counts)
        if limit_bytes is not None and number > numbers[0] and writer.scratch_bytes + needed > limit_bytes:
            if begins:
                return number, counts_before[number]
            if task.grouping == "measured" and writer.complete_groups:
                stop = number_of[writer.drop_group()]
                return stop, counts_before[stop]
        source = Source(segment.base_offset, segment.log_mtime_ns // 1_000_000)
        if begins:
            writer.start_output(source)
        else:
            writer.start_source(source)
        rewriter.rewrite(task.partition_path, segment, number, writer)
    return numbers[1], rewriter.counts


def _left(task: CleaningTask) -> list[SegmentFacts]:
    segments = task.segments[task.first_segment :]
    return [segment for segment in segments if segment.base_offset < task.first_uncleanable_offset]


def kafka_groups(task: CleaningTask, end_offset: int) -> tuple[tuple[int, int], ...]:
    config = task.config
    return group_segments(
        task.segments,
        end_offset,
        task.first_uncleanable_offset,
        config.segment_bytes,
        config.segment_index_bytes,
    )


def _needed_bytes(task: CleaningTask, segment: SegmentFacts, current_bytes: int) -> int:
    """Return an upper bound of the bytes that rewriting one more source writes. If the output then exceeds
    segment.bytes, the source's part is copied to a new output before the old output is truncated.
    """
    passes = current_bytes + segment.log_bytes > task.config.segment_bytes
    return source_bytes(segment) + (segment.log_bytes if passes else 0)


def spans_too_long(task: CleaningTask, merged: Sequence[SegmentFacts]) -> bool:
    """Return whether the largest timestamps of these segments are too far apart for one output: time retention would
    retain old records longer, or young ones for a shorter time.
    """
    if "delete" not in task.config.cleanup_policy:
        return False
    # A segment without bytes is ignored: it has nothing to delete, and its time is that of the file. If segments
    # without bytes were not ignored, they would accumulate.
    times = [segment.largest_timestamp_ms for segment in merged if segment.log_bytes]
    return bool(times) and max(times) - min(times) > task.config.segment_ms
