"""Measures what a compaction of one partition would leave: reads, decides and compresses as a compaction does, and
writes nothing.

So the numbers of a measurement equal those of a compaction at the same time, whatever the codecs, formats and
transactions of the log.
"""

from __future__ import annotations

from dataclasses import dataclass

from keytail.compact.cleaner import check_hash, check_sources, findings_of, make_rewriter, output_writer
from keytail.compact.map_phase.reading import PhaseClock, refuse_keyless
from keytail.compact.measure.counting import CountingFileSystem, CountingRewriter, CountingWriter
from keytail.compact.measure.intervals import Interval
from keytail.compact.plan import segments_between
from keytail.compact.task import CleaningTask, Totals, result_of
from keytail.compact.write_phase.passes import rewrite_groups
from keytail.log.records.chunk import SegmentReader


@dataclass(frozen=True)
class Measurement:
    """What a compaction would leave of a partition. `bytes_after` (of `.log` files) and `records_after` cover all
    segments, `tombstones_after` only the cleaned segments. In an estimate, the last three counts are None.
    """

    method: str
    end_offset: int
    bytes_after: Interval
    records_after: Interval
    tombstones_after: Interval
    records_before: int
    segments_after: int | None = None
    tombstones_removed: int | None = None
    markers_removed: int | None = None


def measure_partition(fs: CountingFileSystem, task: CleaningTask) -> Measurement:
    """Return the measurement of a partition. Raises what `clean_partition` raises: CorruptLog, Refused, NeedsFanOut."""
    clock = PhaseClock()
    check_sources(fs, task)
    check_hash(task)
    reader = SegmentReader(fs)
    findings = findings_of(fs, task, reader, clock)
    survivors = findings.survivors
    _, end = segments_between(task.segments, task.segments[0].base_offset, survivors.end_offset)
    writer = output_writer(fs, task, findings.transactions, CountingWriter)
    with clock.phase("count"):
        rewriter = make_rewriter(task, reader, findings, kind=CountingRewriter)
        _, counts = rewrite_groups(task, (0, end), survivors.end_offset, rewriter, writer, None)
        refuse_keyless(task, counts.keyless, counts.first_keyless_offset)
        groups = writer.finish(task.end_of(end - 1))
    totals = Totals().and_written(groups, counts, writer.size_bytes, writer.records, writer.splits)
    untouched_records = findings.unread_records + survivors.records_from(end)
    result = result_of(task, survivors.end_offset, end, groups, totals, untouched_records)
    return Measurement(
        method="measured",
        end_offset=result.end_offset,
        bytes_after=Interval.exactly(result.bytes_after),
        records_after=Interval.exactly(result.records_after),
        tombstones_after=Interval.exactly(rewriter.tombstones),
        records_before=result.records_before,
        segments_after=result.segments_after,
        tombstones_removed=result.tombstones_removed,
        markers_removed=result.markers_removed,
    )
