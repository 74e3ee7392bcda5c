"""Estimates what a compaction of one partition would leave, from a sample of its batches (MEASURE.md)."""

from __future__ import annotations

import random

import numpy as np

from keytail.compact.cleaner import Findings, check_hash, check_sources, make_rewriter
from keytail.compact.map_phase.reading import PhaseClock, active_producers, refuse_keyless, with_aborted
from keytail.compact.measure.counting import CountingFileSystem, CountingRewriter
from keytail.compact.measure.intervals import interval_of_total
from keytail.compact.measure.measuring import Measurement, measure_partition
from keytail.compact.measure.sampling import Sample, draw_positions, drawn_chunks, follow_sampled, survivors_of
from keytail.compact.plan import segments_between
from keytail.compact.task import CleaningTask, SourceCounts
from keytail.compact.write_phase.rewrite import RowDecisions
from keytail.format.batch import CONTROL
from keytail.kernels.rewriting import records as record_kernels
from keytail.log.records.chunk import Chunk, SegmentReader
from keytail.log.transactions import Transactions

DRAWS = 2048
# A partition whose segments to rewrite have at most this many bytes is measured: drawn batches would be a large part of
# these bytes.
MEASURED_BYTES = 128 << 20


def estimate_partition(
    fs: CountingFileSystem,
    task: CleaningTask,
    chance: random.Random,
    *,
    draws: int = DRAWS,
    measured_bytes: int = MEASURED_BYTES,
) -> Measurement:
    """Return an estimate from `draws` draws, or a measurement if the segments to rewrite have at most `measured_bytes`.

    The estimate assumes that the keys of the dirty section fit into the map of the compaction, or that the compaction
    uses a fan-out. Raises what reading the log raises, and Refused if no estimate is possible.
    """
    _, end = segments_between(task.segments, task.segments[0].base_offset, task.first_uncleanable_offset)
    section = task.segments[:end]
    section_bytes = sum(segment.log_bytes for segment in section)
    if section_bytes <= measured_bytes:
        return measure_partition(fs, task)
    clock = PhaseClock()
    check_sources(fs, task)
    check_hash(task)
    reader = SegmentReader(fs)
    positions = draw_positions([segment.log_bytes for segment in section], draws, chance)
    with clock.phase("draw"):
        sample, transactions = with_aborted(
            fs, task, lambda aborted: follow_sampled(fs, task, reader, aborted, positions)
        )
    with clock.phase("count"):
        sizes, left = rewrite_sample(fs, task, reader, sample, transactions)
    untouched_bytes = sum(segment.log_bytes for segment in task.segments[end:])
    shares = left / sizes[:, None]
    # Assumed as the maximum: no other batch grows more than those of the sample (MEASURE.md).
    most_bytes = max(1.0, float(shares[:, 0].max()))
    records = interval_of_total(shares[:, 1], sample.most_records_per_byte, section_bytes, (0, sample.records))
    tombstones = interval_of_total(shares[:, 2], sample.most_records_per_byte, section_bytes, (0, sample.records))
    most = int(most_bytes * section_bytes) + 1
    return Measurement(
        method="estimated",
        end_offset=task.first_uncleanable_offset,
        bytes_after=interval_of_total(shares[:, 0], most_bytes, section_bytes, (0, most)).plus(untouched_bytes),
        records_after=records.plus(sample.unread_records),
        tombstones_after=tombstones,
        records_before=sample.records + sample.unread_records,
    )


class _SampleRewriter(CountingRewriter):
    """A CountingRewriter that keeps the number of retained tombstones of each batch instead of the sum."""

    def __init__(self, task: CleaningTask, *arguments: object, **named: object) -> None:
        super().__init__(task, *arguments, **named)
        self.tombstones_of: list[tuple[np.ndarray, np.ndarray]] = []

    def _count_tombstones(self, chunk: Chunk, part: slice, rows: RowDecisions) -> None:
        retained = (rows.action[part] == record_kernels.COPY) | (rows.action[part] == record_kernels.REBUILD)
        retained &= (chunk.table["attributes"][part] & CONTROL) == 0
        counts = np.where(retained, rows.kept_nulls[part], 0)
        self.tombstones_of.append((chunk.table["base_offset"][part].copy(), counts))


class _Collected:
    """A writer that keeps offset, size and record count of all batches, and writes nothing."""

    def __init__(self) -> None:
        self.tables: list[np.ndarray] = []

    def append(self, data: np.ndarray, table: np.ndarray) -> None:
        self.tables.append(table[["base_offset", "size_bytes", "record_count"]].copy())


def rewrite_sample(
    fs: CountingFileSystem,
    task: CleaningTask,
    reader: SegmentReader,
    sample: Sample,
    transactions: Transactions,
) -> tuple[np.ndarray, np.ndarray]:
    """Return for each draw the size in bytes of the drawn batch (float64[draws]), and what remains of it
    (float64[draws, 3]: bytes, records, tombstones).
    """
    findings = Findings(survivors_of(task, sample), transactions, active_producers(fs, task, reader), 0)
    rewriter = make_rewriter(task, reader, findings, kind=_SampleRewriter)
    collected = _Collected()
    batches = []
    for number, records, before, chunk in drawn_chunks(fs, task, sample):
        rewriter.sources.setdefault(number, SourceCounts(number, 0, 0))
        is_old = rewriter.is_old(task.segments[number])
        rewriter.rewrite_chunk(chunk, number, records, before, is_old, collected)
        batches.append(chunk.table[["base_offset", "size_bytes"]].copy())
    rewriter.take_counts()
    refuse_keyless(task, rewriter.counts.keyless, rewriter.counts.first_keyless_offset)
    table = np.concatenate(batches)
    left = np.zeros((len(table), 3))

    def add(column: int, base_offsets: np.ndarray, numbers: np.ndarray) -> None:
        at = np.searchsorted(table["base_offset"], base_offsets, side="right") - 1
        np.add.at(left[:, column], at, numbers)

    for rows in collected.tables:
        add(0, rows["base_offset"], rows["size_bytes"])
        add(1, rows["base_offset"], rows["record_count"])
    for base_offsets, counts in rewriter.tombstones_of:
        add(2, base_offsets, counts)
    drawn = np.searchsorted(table["base_offset"], np.concatenate(sample.draws))
    return table["size_bytes"][drawn].astype(np.float64), left[drawn]
