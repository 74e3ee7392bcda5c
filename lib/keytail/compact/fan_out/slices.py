"""Stages 1 and 2 of a fan-out: slices of segments, their contents, and the outcome of transactions.

A slice is a byte range of a segment that begins at a batch boundary and is at most about `SLICE_BYTES` long. `survey`
reads a slice and yields its transactional and control batches; `settle` processes these batches of all slices in the
order of the log, as compact/map_phase/reading.py processes chunks, and counts the batches and records before each
slice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from keytail.compact.map_phase.reading import active_producers, map_position
from keytail.compact.plan import segments_between
from keytail.compact.producers import ActiveProducers
from keytail.compact.saved_state import save_state
from keytail.compact.task import CleaningTask
from keytail.errors import CorruptLog
from keytail.format import names
from keytail.format.batch import CONTROL, TRANSACTIONAL
from keytail.format.index import parse_offset_index
from keytail.kernels import transactions as kernels
from keytail.log.fs import FileSystem
from keytail.log.records.chunk import CORRUPT_REMEDY, SegmentReader, check_ends_below, refuse_unsupported
from keytail.log.replacement.replace import CleanFile
from keytail.log.transactions import Contradiction, Transactions, TransactionTracker
from keytail.run.shuffle import Cell
from keytail.values import from_bytes, to_bytes

SLICE_BYTES = 256 << 20
_SLICE_SHIFT = 32  # the lower bits of a cell's order are its number within its slice


@dataclass(frozen=True)
class Slice:
    """Part number `part` of segment number `segment`, which is divided into `parts` parts."""

    segment: int
    part: int
    parts: int


@dataclass(frozen=True)
class SliceFacts:
    """The facts of a slice, bytes `start` .. `end` of a segment: the numbers of batches and records in the slice and
    before it in the segment, the base offset of the slice's first batch, and the last offset of the segment up to `end`
    (-1: none)."""

    segment: int
    start: int
    end: int
    batches: int
    records: int
    batches_before: int = 0
    records_before: int = 0
    first_offset: int = -1
    last_offset: int = -1


@dataclass(frozen=True)
class SurveyPart:
    """One slice to be surveyed. `aborted`: the entries of the transaction indexes that are trusted so far."""

    task: CleaningTask
    slice: Slice
    number: int
    aborted: np.ndarray


@dataclass(frozen=True)
class AbortedToMap:
    """Data that the map treats as aborted (CLEANING.md 11.4): ranges of base offsets from `firsts` to `ends` (excluded)
    of `producers` (int64 arrays, one item per range), sorted by producer and first offset.
    """

    producers: np.ndarray
    firsts: np.ndarray
    ends: np.ndarray

    def rows(self, table: np.ndarray) -> np.ndarray:
        out = np.zeros(len(table), np.uint8)
        if len(self.producers):
            kernels.aborted_rows(table, self.producers, self.firsts, self.ends, out)
        return out.view(bool)


@dataclass(frozen=True)
class Settled:
    """The results of stage 2 for the whole log. Stages pass these results as a file, because a log with many
    transactions has large results.
    """

    transactions: Transactions
    aborted_to_map: AbortedToMap
    producers: ActiveProducers


@dataclass(frozen=True)
class Survey:
    """The slices of the whole log, in order, and the file with the results (`Settled`).

    If the log contradicts its transaction indexes, `contradicting` has the entries that the log requires,
    `contradicting_offset` has the offset of the contradiction, and the other fields are not set.
    """

    slices: tuple[SliceFacts, ...] = ()
    settled: CleanFile | None = None
    has_transactions: bool = False
    contradicting: np.ndarray | None = None
    contradicting_offset: int = -1


def slices_of(task: CleaningTask, slice_bytes: int = SLICE_BYTES) -> list[Slice]:
    """Return all slices of the log, in order; a segment of at most `slice_bytes`, or without index, is one slice."""
    slices = []
    for number, segment in enumerate(task.segments):
        parts = max(1, -(-segment.log_bytes // slice_bytes)) if segment.index_bytes else 1
        slices += [Slice(number, part, parts) for part in range(parts)]
    return slices


def bounds(fs: FileSystem, task: CleaningTask, piece: Slice) -> tuple[int, int]:
    """Return the start and the end of the slice in bytes. Except at the ends of the segment, both are positions that
    the offset index contains, so that adjacent slices meet.

    The only slice of a segment is the whole segment. `bounds` does not check that batches begin at these positions.
    Raises CorruptLog if the start is after the end, as in an index that is not sorted.
    """
    segment = task.segments[piece.segment]
    if piece.parts == 1:
        return 0, segment.log_bytes
    data = fs.read_bytes(task.path(segment.base_offset, names.INDEX))
    positions = parse_offset_index(data[: len(data) // 8 * 8])["position"].astype(np.int64)
    wanted = np.array([piece.part, piece.part + 1]) * segment.log_bytes // piece.parts
    at = np.searchsorted(positions, wanted)
    found = np.append(positions, segment.log_bytes)[at]
    start = 0 if piece.part == 0 else int(found[0])
    end = segment.log_bytes if piece.part + 1 == piece.parts else int(found[1])
    if not 0 <= start <= end <= segment.log_bytes:
        raise CorruptLog(
            "the entries of the offset index are not in ascending order",
            path=task.path(segment.base_offset, names.INDEX),
            remedy=CORRUPT_REMEDY,
            slug="unsorted-offset-index",
        )
    return start, end


def survey(fs: FileSystem, part: SurveyPart, attempt: str) -> Iterator[Cell]:
    """Check every batch of a slice. Raises CorruptLog and Refused as a single task does, and CorruptLog for an offset
    index that is not sorted.

    Yields, for shard 0, the table rows of transactional and control batches and of batches that contain a first offset
    or last stable offset of a transaction index, and finally the slice's SliceFacts.
    """
    task, piece = part.task, part.slice
    segment = task.segments[piece.segment]
    start, end = bounds(fs, task, piece)
    is_last = piece.segment + 1 == len(task.segments)
    next_base = None if is_last else task.segments[piece.segment + 1].base_offset
    places = np.unique(np.concatenate([part.aborted["first_offset"], part.aborted["last_stable_offset"]]))
    torn_tail = is_last and piece.part + 1 == piece.parts and not task.clean_shutdown
    facts = SliceFacts(piece.segment, start, end, 0, 0)
    order = part.number << _SLICE_SHIFT
    reader = SegmentReader(fs)
    path = task.path(segment.base_offset, names.LOG)
    for chunk in reader.chunks(path, end, start=start, torn_tail=torn_tail):
        refuse_unsupported(chunk)
        check_ends_below(chunk, next_base)
        table = chunk.table
        facts = replace(
            facts,
            batches=facts.batches + len(table),
            records=facts.records + int(table["record_count"].sum(dtype=np.int64)),
            first_offset=facts.first_offset if facts.batches else int(table["base_offset"][0]),
            last_offset=int(table["last_offset"][-1]),
        )
        special = (table["attributes"] & (CONTROL | TRANSACTIONAL)) != 0
        if len(places):
            at = np.searchsorted(places, table["base_offset"])
            special |= places[np.minimum(at, len(places) - 1)] <= table["last_offset"]
            special &= ((table["attributes"] & (CONTROL | TRANSACTIONAL)) != 0) | (at < len(places))
        if special.any():
            yield Cell(0, order, to_bytes(table[special]))
            order += 1
    yield Cell(0, order, to_bytes(facts))


def settle(
    fs: FileSystem,
    context: tuple[CleaningTask, np.ndarray],
    shard: int,
    cells: Iterable[tuple[int, bytes]],
    attempt: str,
) -> Survey:
    """Return the survey of the log, from `cells` in the order of the log. Writes `Settled` to a scratch file."""
    task, aborted = replace(context[0], attempt=attempt), context[1]
    first, end = segments_between(task.segments, task.first_dirty_offset, task.first_uncleanable_offset)
    tracker = TransactionTracker(aborted, task.log_start_offset)
    mapped = aborted["last_offset"] >= task.segments[first].base_offset
    mapped &= aborted["first_offset"] < task.first_uncleanable_offset
    mapping = TransactionTracker(aborted[mapped], task.log_start_offset)
    from_position = map_position(fs, task, task.segments[first])
    runs: list[np.ndarray] = []
    tables: list[np.ndarray] = []  # tables of the current slice, whose facts come last
    slices: list[SliceFacts] = []
    has_transactions = False
    for _, data in cells:
        value = from_bytes(data)
        if not isinstance(value, SliceFacts):
            tables.append(value)
            tracker.follow(value)
            has_transactions |= bool((value["attributes"] & (CONTROL | TRANSACTIONAL)).any())
            continue
        if first <= value.segment < end:
            for table in tables:
                skipped = int(np.searchsorted(table["position"], from_position)) if value.segment == first else 0
                runs.append(_runs(table[skipped:], mapping.follow(table[skipped:])))
        tables = []
        slices.append(_with_counts_before(task, slices, value))
    try:
        transactions = tracker.finish()
    except Contradiction as contradiction:
        return Survey(contradicting=contradiction.entries, contradicting_offset=contradiction.offset)
    found = np.concatenate([*runs, np.empty((0, 3), np.int64)])
    found = found[np.lexsort((found[:, 1], found[:, 0]))]
    producers, firsts, ends = (np.ascontiguousarray(column) for column in found.T)
    to_map = AbortedToMap(producers, firsts, ends)
    settled = Settled(transactions, to_map, active_producers(fs, task, SegmentReader(fs)))
    return Survey(tuple(slices), save_state(fs, task, names.SURVIVORS, settled), has_transactions)


def _with_counts_before(task: CleaningTask, slices: list[SliceFacts], facts: SliceFacts) -> SliceFacts:
    """Return `facts` with the counts of the batches and records before the slice in its segment. Raises CorruptLog if
    offsets do not ascend."""
    before = slices[-1] if slices else None
    if before is None or before.segment != facts.segment:
        return facts
    if facts.batches and facts.first_offset <= before.last_offset:
        raise CorruptLog(
            "batch begins at or below the last offset of the previous batch",
            path=task.path(task.segments[facts.segment].base_offset, names.LOG),
            byte_position=facts.start,
            offset=facts.first_offset,
            remedy=CORRUPT_REMEDY,
            slug="invalid-batch",
        )
    return replace(
        facts,
        batches_before=before.batches_before + before.batches,
        records_before=before.records_before + before.records,
        last_offset=max(before.last_offset, facts.last_offset),
    )


def _runs(table: np.ndarray, discard: np.ndarray) -> np.ndarray:
    """Return the runs of aborted data batches of each producer: int64[runs, 3] with the columns producer, first base
    offset, last base offset + 1. `discard` (bool) marks the rows of `table` that the map treats as aborted."""
    is_data = (table["attributes"] & (CONTROL | TRANSACTIONAL)) == TRANSACTIONAL
    table, discard = table[is_data], discard[is_data]
    order = np.lexsort((table["base_offset"], table["producer_id"]))
    producers, bases = table["producer_id"][order], table["base_offset"][order]
    discard = discard[order]
    if not len(order):
        return np.empty((0, 3), np.int64)
    changes = np.flatnonzero((producers[1:] != producers[:-1]) | (discard[1:] != discard[:-1])) + 1
    begins, ends = np.append(0, changes), np.append(changes, len(order))
    aborted = discard[begins]
    begins, ends = begins[aborted], ends[aborted]
    return np.stack([producers[begins], bases[begins], bases[ends - 1] + 1], axis=1).astype(np.int64)
