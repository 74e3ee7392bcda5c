"""Stages 5 and 7 of a fan-out: groups of segments, each rewritten by a separate task.

Kafka's groups depend on sizes only. Measured groups depend on how much of each segment remains: `measure` rewrites a
segment without keeping the output, `ranges_of` groups the segments as one task would, and the number of groups that
`write` returns shows whether that was correct. Only limits that depend on the position of segments in an output
(index.bytes, 2^31 offsets) can make measured groups wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from keytail.compact.cleaner import Findings, check_sources, make_rewriter, output_writer
from keytail.compact.fan_out.bits import ShardBits, load_survivors
from keytail.compact.fan_out.slices import Settled, SliceFacts
from keytail.compact.measure.counting import CountingFileSystem
from keytail.compact.saved_state import load_state
from keytail.compact.task import CleaningTask, SourceCounts
from keytail.compact.write_phase.counts import Counts
from keytail.compact.write_phase.passes import kafka_groups, rewrite_groups, spans_too_long
from keytail.compact.write_phase.rewrite import Rewriter
from keytail.log.fs import FileSystem
from keytail.log.partition import SegmentFacts
from keytail.log.records.chunk import SegmentReader
from keytail.log.replacement.replace import CleanFile, GroupOutput
from keytail.log.writer import OutputWriter


@dataclass(frozen=True)
class WritePart:
    """The numbers (first, end) of the segments to be rewritten, and the results of the earlier stages."""

    task: CleaningTask
    numbers: tuple[int, int]
    slices: tuple[SliceFacts, ...]
    settled: CleanFile
    bits: tuple[ShardBits, ...]


@dataclass(frozen=True)
class Measured:
    """The bytes that remain of a segment, and how many of these bytes are in the last output that the segment fills."""

    bytes: int
    last_bytes: int


@dataclass(frozen=True)
class Written:
    """The groups that the task of a range wrote, with the counts of records, bytes and splits."""

    groups: tuple[GroupOutput, ...]
    counts: Counts
    bytes: int
    records: int
    splits: int
    sources: tuple[SourceCounts, ...] = ()


def parts_of(
    task: CleaningTask,
    ranges: Sequence[tuple[int, int]],
    slices: Sequence[SliceFacts],
    settled: CleanFile,
    bits: tuple[ShardBits, ...],
) -> list[WritePart]:
    """Return one part per range, each with the slices of its own segments."""
    of_segment: dict[int, list[SliceFacts]] = {}
    for facts in slices:
        of_segment.setdefault(facts.segment, []).append(facts)
    return [
        WritePart(task, item, tuple(facts for k in range(*item) for facts in of_segment.get(k, ())), settled, bits)
        for item in ranges
    ]


def measure(fs: FileSystem, part: WritePart, attempt: str) -> Measured:
    """Rewrite one segment by itself without writing output; return how much of the segment remains."""
    task = replace(part.task, grouping="measured")
    written = _rewrite(fs, CountingFileSystem(), part, task)
    sizes = [file.size_bytes for group in written.groups for out in group.segments for file in out.files[:1]]
    return Measured(written.bytes, sizes[-1])


def write(fs: FileSystem, part: WritePart, attempt: str) -> Written:
    """Rewrite the segments of the range into one group, or into several if an output reached a limit at the start of a
    segment.

    The scratch files of this attempt are removed on an exception.
    """
    check_sources(fs, part.task)
    return _rewrite(fs, fs, part, replace(part.task, attempt=attempt))


def _rewrite(fs: FileSystem, to: FileSystem, part: WritePart, task: CleaningTask) -> Written:
    settled: Settled = load_state(fs, task, part.settled)
    survivors = load_survivors(fs, task, part.bits, part.slices, part.numbers)
    findings = Findings(survivors, settled.transactions, settled.producers, 0)
    rewriter: Rewriter = make_rewriter(task, SegmentReader(fs), findings, bits_from_offset=0)
    writer: OutputWriter = output_writer(to, task, settled.transactions)
    try:
        _, counts = rewrite_groups(task, part.numbers, task.first_uncleanable_offset, rewriter, writer, None)
        groups = writer.finish(task.end_of(part.numbers[1] - 1))
    except BaseException:
        writer.discard()
        raise
    sources = tuple(rewriter.sources.values())
    return Written(groups, counts, writer.size_bytes, writer.records, writer.splits, sources)


def ranges_of(task: CleaningTask, first: int, end: int, measured: Sequence[Measured] | None) -> list[tuple[int, int]]:
    """Return the segment numbers (first, end) of each group, ascending. `measured` has the results of `measure` for
    segments `first` .. `end`; it is None if segments are grouped by their size before cleaning.
    """
    if measured is None:
        groups = kafka_groups(task, task.first_uncleanable_offset)
        return [(a, b) for a, b in groups if a >= first]
    starts = [first]
    current = 0  # bytes of the current output; `merged` are its sources, empty while it has no bytes
    merged: list[SegmentFacts] = []
    for number in range(first, end):
        segment, size = task.segments[number], measured[number - first]
        begins = number > first and (
            spans_too_long(task, [*merged, segment])
            or (current > 0 and size.bytes > 0 and current + size.bytes > task.config.segment_bytes)
        )
        if begins:
            starts.append(number)
            current, merged = 0, []
        fits = current + size.bytes <= task.config.segment_bytes or size.bytes == 0
        current = current + size.bytes if fits else size.last_bytes
        merged = [*(merged if fits else []), segment] if current else []
    return list(zip(starts, [*starts[1:], end], strict=True))
