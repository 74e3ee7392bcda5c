"""Rewrites segments as scratch files without the erased records, and proves the result.

Each source segment becomes one output segment. The code of the compaction is used (`compact/write_phase`), with three
different decisions: only the key decides whether a record is removed; an emptied batch is retained; no delete horizon
is set.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from keytail.compact.cleaner import check_hash, check_sources, output_writer, proof_spec
from keytail.compact.map_phase.offset_map import OffsetMap
from keytail.compact.map_phase.reading import PhaseClock, active_producers
from keytail.compact.map_phase.survivors import Survivors
from keytail.compact.producers import ActiveProducers
from keytail.compact.proof.prove import find_erased, prove
from keytail.compact.proof.state import ProofSpec
from keytail.compact.task import CleaningResult, CleaningTask
from keytail.compact.write_phase.rewrite import Rewriter, RowDecisions
from keytail.erase.finding import Finder, erased_of_rows
from keytail.erase.keys import ErasedKeys
from keytail.errors import KeytailError
from keytail.format.batch import CONTROL, NOT_COPIED
from keytail.kernels.rewriting.records import BEYOND, COPY, EMPTY, OPEN
from keytail.log.fs import FileSystem
from keytail.log.partition import SegmentFacts
from keytail.log.records.chunk import Chunk, SegmentReader
from keytail.log.replacement.replace import GroupOutput
from keytail.log.transactions import Transactions
from keytail.log.writer import Appends, OutputWriter, Source

_NO_PRODUCERS = ActiveProducers(*(np.empty(0, np.int64) for _ in range(3)))


@dataclass(frozen=True)
class RewriteTask:
    """The rewrite of those segments of a partition that have the base offsets `bases`, ascending.

    `cleaning` has `grouping` "kafka" (outputs have only the limits of the file format) and `message_format` "keep".
    `transactions` determine the transaction indexes. `erased` is the number of records that must be removed.
    """

    cleaning: CleaningTask
    keys: ErasedKeys
    bases: tuple[int, ...]
    transactions: Transactions
    erased: int


class EraseRewriter(Rewriter):
    """Rewrites segments without the records that have erased keys."""

    def __init__(self, task: RewriteTask, reader: SegmentReader, producers: ActiveProducers) -> None:
        nothing_mapped = Survivors(OffsetMap(0), 0)
        super().__init__(
            task.cleaning, reader, nothing_mapped, task.transactions, producers,
            first_dirty_offset=0, file_horizon_ms=-1,
        )  # fmt: skip
        self._horizon_ms = -1
        self._finder = Finder(reader, task.keys)
        self._newest_ms = -1  # largest timestamp of the batches with records so far, in this segment
        self.erased = 0

    def rewrite(self, partition_path: str, segment: SegmentFacts, number: int, writer: Appends) -> None:
        """Append to `writer` the remaining batches of segment `number` of the partition."""
        self._newest_ms = -1
        super().rewrite(partition_path, segment, number, writer)

    def _decide_rows(self, chunk: Chunk, number: int, records: int, batches: int, file_is_old: bool) -> RowDecisions:
        """Return the decisions for the batches of the chunk, which depend only on the keys of their records."""
        table = chunk.table
        n, counts = len(table), table["record_count"].astype(np.int64)
        erased = self._finder.erased(chunk)
        of_rows = erased_of_rows(table, erased)
        self.erased += int(of_rows.sum())
        self._survivors.bits = np.packbits(erased == 0, bitorder="little")
        first = np.cumsum(counts) - counts
        opened = (of_rows > 0) | ((table["magic"] < 2) & ((table["attributes"] & NOT_COPIED) != 0))
        action = np.where(opened, OPEN, COPY).astype(np.int8)
        action[(of_rows > 0) & (of_rows == counts)] = EMPTY
        return RowDecisions(
            decided_by=np.full(n, BEYOND, np.int8),
            first_bit=first,
            first_ordinal=first,
            retain_empty=np.ones(n, bool),
            marker_horizon=np.zeros(n, bool),
            tombstones_expired=np.zeros(n, bool),
            action=action,
            kept=np.zeros(n, np.int64),
            kept_nulls=np.zeros(n, np.int64),
        )

    def _append(
        self,
        chunk: Chunk,
        part: tuple[int, int],
        rows: RowDecisions,
        rebuilt: np.ndarray,
        packed: np.ndarray,
        number: int,
        writer: Appends,
    ) -> None:
        """Append the batches, after lowering the max timestamp of each batch that is emptied now or was empty before.

        A broker looks up a time only in the first segment whose largest timestamp reaches it. If only an emptied batch
        reached it, the broker would find no record there. The timestamp of an active producer's last batch is retained,
        because the producer's expiration depends on it.
        """
        table, action = chunk.table[slice(*part)], rows.action[slice(*part)]
        was_empty = (action == COPY) & (table["record_count"] == 0)
        newest_ms = np.where((action == COPY) & ~was_empty, table["max_timestamp_ms"], -1)
        newest_ms[rebuilt["row"] - part[0]] = rebuilt["max_timestamp_ms"]
        before_ms = np.maximum.accumulate(np.concatenate([[max(self._newest_ms, 0)], newest_ms]))
        lowered = (action == EMPTY) | (was_empty & ((table["attributes"] & CONTROL) == 0))
        lowered &= (table["max_timestamp_ms"] > before_ms[:-1]) & ~self._producers.ends_a_producer(table)
        table["max_timestamp_ms"][lowered] = before_ms[:-1][lowered]
        action[lowered] = EMPTY
        self._newest_ms = int(before_ms[-1])
        super()._append(chunk, part, rows, rebuilt, packed, number, writer)


def rewrite(fs: FileSystem, task: RewriteTask) -> CleaningResult:
    """Write the segments without the erased records, prove the new segments, and return the result.

    On any error, all scratch files of this attempt are removed. Raises CorruptLog, Refused or KeytailError.
    """
    cleaning, clock = task.cleaning, PhaseClock()
    check_sources(fs, cleaning)
    check_hash(cleaning)
    reader = SegmentReader(fs)
    producers = active_producers(fs, cleaning, reader)
    rewriter = EraseRewriter(task, reader, producers)
    writers: list[OutputWriter] = []
    groups: list[GroupOutput] = []
    try:
        with clock.phase("write"):
            for number, segment in enumerate(cleaning.segments):
                if segment.base_offset not in task.bases:
                    continue
                writers.append(output_writer(fs, cleaning, task.transactions))
                writers[-1].start_output(Source(segment.base_offset, segment.log_mtime_ns // 1_000_000))
                rewriter.rewrite(cleaning.partition_path, segment, number, writers[-1])
                groups += writers[-1].finish(cleaning.end_of(number))
        if rewriter.erased != task.erased:
            raise KeytailError(
                f"the rewrite found {rewriter.erased} records to be erased; the first reading found {task.erased}",
                path=cleaning.partition_path,
                remedy="Nothing was replaced. Make sure that nothing writes to the directory, then run again",
                slug="erased-records-differ",
            )
        with clock.phase("prove"):
            prove(fs, _spec(cleaning, task.keys, producers, groups))
    except BaseException:  # scratch files are removed after every kind of error
        for writer in writers:
            writer.discard()
        raise
    return _result(task, rewriter, groups, sum(writer.size_bytes for writer in writers), clock)


def _spec(
    cleaning: CleaningTask, keys: ErasedKeys, producers: ActiveProducers, groups: list[GroupOutput]
) -> ProofSpec:
    spec = proof_spec(cleaning, groups, producers, cleaning.log_end_offset, (0, 0))
    return replace(spec, pass_segments=None, secret=keys.secret, erased_keys=keys.hashes)


def _result(
    task: RewriteTask, rewriter: EraseRewriter, groups: list[GroupOutput], written_bytes: int, clock: PhaseClock
) -> CleaningResult:
    cleaning = task.cleaning
    before = sum(segment.log_bytes for segment in cleaning.segments)
    replaced = sum(segment.log_bytes for segment in cleaning.segments if segment.base_offset in task.bases)
    n_written = sum(len(group.segments) for group in groups)
    return CleaningResult(
        end_offset=cleaning.log_end_offset,
        groups=tuple(groups),
        segments_before=cleaning.segments_before,
        segments_after=len(cleaning.segments) - len(task.bases) + n_written,
        bytes_before=before,
        bytes_after=before - replaced + written_bytes,
        records_before=rewriter.counts.records_read,
        records_after=rewriter.counts.records_read - rewriter.erased,
        tombstones_removed=0,
        markers_removed=0,
        keys=0,
        large_batches=rewriter.counts.large_batches,
        phases_s=clock.seconds,
        sources=tuple(rewriter.sources.values()),
    )


def refuse_remaining(fs: FileSystem, cleaning: CleaningTask, keys: ErasedKeys) -> int:
    """Read all segments from the disk, and return the number of bytes read. Raises KeytailError for a record with an
    erased key.

    The reader, the parser, the hash and the search of the proof are used.
    """
    return find_erased(fs, _spec(cleaning, keys, _NO_PRODUCERS, []))
