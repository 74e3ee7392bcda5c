"""Draws batches of a partition, and determines which of their records a compaction would retain.

The log is divided into parts of equal size, and in each part the batch at a random byte is drawn. Whether a record is
retained depends on all later records with its key, so the dirty section is read completely, but only the keys of drawn
batches are kept in memory. The drawn batches are then processed as if they were a log (MEASURE.md in this directory).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from keytail.compact.map_phase.offset_map import OffsetMap
from keytail.compact.map_phase.reading import checked_chunks, refuse_keyless, trackers_of
from keytail.compact.map_phase.survivors import Survivors
from keytail.compact.plan import segments_between
from keytail.compact.task import CleaningTask
from keytail.compact.write_phase.rewrite import refuse_old
from keytail.errors import Refused
from keytail.format import names
from keytail.format.batch import BATCH_TABLE, CONTROL
from keytail.kernels.offset_map import mark_survivors
from keytail.log.fs import FileSystem
from keytail.log.records.chunk import CHUNK_BYTES, Chunk, SegmentReader
from keytail.log.records.key_scan import KeyPortion, KeyScanner
from keytail.log.transactions import Transactions, TransactionTracker

# For a record that was not drawn, this is added to the ordinal of the next drawn record.
_NOT_DRAWN = 1 << 62
# The number of the first record of a segment in the sample: ordinal 0 is for keys that are only watched.
_FIRST_NUMBER = 1


@dataclass
class _Drawn:
    """The drawn batches of one segment, ascending: BATCH_TABLE rows, whether each contains a null value (uint8), and
    the number of the next drawn record.
    """

    tables: list[np.ndarray] = field(default_factory=list)
    has_null: list[np.ndarray] = field(default_factory=list)
    records: int = _FIRST_NUMBER

    @property
    def table(self) -> np.ndarray:
        return np.concatenate([*self.tables, np.empty(0, BATCH_TABLE)])


@dataclass
class Sample:
    """The drawn batches of the section that is cleaned, by segment number, and figures of the section.

    `watched` maps the keys of drawn batches to the place of their last record in the dirty section. The place of a
    drawn record is twice its ordinal plus 1, the place of another record is twice the ordinal of the next drawn record;
    0 means that the dirty section has no record of the key. `draws` are the base offsets of the drawn batches (int64),
    one for each draw: a large batch is drawn several times. `records` is the number of records in the section,
    `unread_records` the number of records above the section, `most_records_per_byte` the largest number of records per
    byte of any batch in the section.
    """

    watched: OffsetMap
    drawn: list[_Drawn]
    draws: list[np.ndarray] = field(default_factory=list)
    records: int = 0
    unread_records: int = 0
    most_records_per_byte: float = 0.0
    keyless: int = 0
    first_keyless_offset: int = -1


def draw_positions(sizes: list[int], draws: int, chance: random.Random) -> list[np.ndarray]:
    """Return the drawn byte positions of each segment (int64, ascending): one position in each of `draws` equal parts
    of the log.
    """
    total = sum(sizes)
    places = np.array([(number + chance.random()) * total / draws for number in range(draws)])
    positions = np.minimum(places.astype(np.int64), max(total - 1, 0))
    found = []
    for start, end in pairwise(np.cumsum([0, *sizes])):
        a, b = np.searchsorted(positions, [start, end])
        found.append(positions[a:b] - start)
    return found


def follow_sampled(
    fs: FileSystem, task: CleaningTask, reader: SegmentReader, aborted: np.ndarray, positions: list[np.ndarray]
) -> tuple[Sample, Transactions]:
    """Read the log once, in order; return the sample at these positions (by segment) and the outcome of transactions.

    Raises Contradiction as TransactionTracker does, and CorruptLog; raises Refused for records without a key in the
    dirty section that may not be dropped, for messages of magic 0 and 1 of unknown format, and if the keys of the
    sample do not fit into the map's memory.
    """
    tracker = TransactionTracker(aborted, task.log_start_offset)
    first, end = segments_between(task.segments, task.first_dirty_offset, task.first_uncleanable_offset)
    trackers = trackers_of(fs, task, tracker, aborted, first)
    sample = Sample(OffsetMap(task.map_memory_bytes), [_Drawn() for _ in positions])
    keys = _SampledKeys(task, reader, sample)
    for number in range(end):
        for chunk in checked_chunks(task, reader, (number, number + 1)):
            if task.message_format == "unknown":
                refuse_old(chunk)
            is_drawn = _draw(sample, chunk, positions[number])
            if number < first:
                tracker.follow(chunk.table)
                keys.draw(chunk, number, is_drawn, is_drawn & False)
            else:
                is_aborted = trackers.follow(chunk.table, number == first)
                keys.draw(chunk, number, is_drawn, ~is_aborted & _has_keys(chunk.table))
    for chunk in checked_chunks(task, reader, (end, len(task.segments))):
        tracker.follow(chunk.table)
        sample.unread_records += int(chunk.table["record_count"].sum(dtype=np.int64))
    refuse_keyless(task, sample.keyless, sample.first_keyless_offset)
    return sample, tracker.finish()


def _has_keys(table: np.ndarray) -> np.ndarray:
    return ((table["attributes"] & CONTROL) == 0) & (table["record_count"] > 0)


def _draw(sample: Sample, chunk: Chunk, positions: np.ndarray) -> np.ndarray:
    """Return for each batch of the chunk (bool) whether it is drawn; add the chunk's figures to `sample`."""
    table = chunk.table
    sample.records += int(table["record_count"].sum(dtype=np.int64))
    sample.most_records_per_byte = max(
        sample.most_records_per_byte, float((table["record_count"] / table["size_bytes"]).max(initial=0.0))
    )
    a, b = np.searchsorted(positions, [chunk.position, chunk.position + len(chunk.raw)])
    rows = np.searchsorted(table["position"], positions[a:b], side="right") - 1
    sample.draws.append(table["base_offset"][rows])
    is_drawn = np.zeros(len(table), bool)
    is_drawn[rows] = True
    return is_drawn


class _SampledKeys:
    """Notes, for each key of the drawn batches, the place of its last record in the dirty section."""

    def __init__(self, task: CleaningTask, reader: SegmentReader, sample: Sample) -> None:
        self._task, self._reader, self._sample = task, reader, sample
        self._scanner = KeyScanner(task.hash_seed)

    def draw(self, chunk: Chunk, number: int, is_drawn: np.ndarray, is_mapped: np.ndarray) -> None:
        """Add the drawn batches of a chunk of segment `number`, and their keys; note the places of all watched keys in
        the mapped batches. `is_drawn` and `is_mapped` have a bool for each batch."""
        table, drawn = chunk.table, self._sample.drawn[number]
        self._watch(chunk, is_drawn & _has_keys(table))
        counts = table["record_count"].astype(np.int64)
        of_drawn = np.where(is_drawn, counts, 0)
        ordinals = (number << 32) + drawn.records + np.cumsum(of_drawn) - of_drawn
        has_null = np.zeros((len(table) + 7) // 8, np.uint8)
        from_offset = self._task.first_dirty_offset
        is_mapped = is_mapped & (table["last_offset"] >= from_offset)
        if is_mapped.any():
            first_ordinal = np.where(is_drawn, ordinals, ordinals + _NOT_DRAWN)
            for opened in self._reader.open_rows(chunk, is_mapped):
                for portion in self._scanner.portions(chunk, opened, from_offset, first_ordinal, has_null, 0):
                    self._sample.watched.update_all(portion.low, portion.high, _places(portion), len(portion.ordinals))
                    if portion.keyless and not self._sample.keyless:
                        self._sample.first_keyless_offset = portion.first_keyless_offset
                    self._sample.keyless += portion.keyless
        if is_drawn.any():
            drawn.tables.append(table[is_drawn])
            drawn.has_null.append(np.unpackbits(has_null, bitorder="little")[: len(table)][is_drawn])
            drawn.records += int(of_drawn.sum())

    def _watch(self, chunk: Chunk, wanted: np.ndarray) -> None:
        if not wanted.any():
            return
        n, watched = len(chunk.table), self._sample.watched
        numbers, nulls = np.zeros(n, np.int64), np.zeros((n + 7) // 8, np.uint8)
        for opened in self._reader.open_rows(chunk, wanted):
            for portion in self._scanner.portions(chunk, opened, -1, numbers, nulls, 0):
                if watched.watch(portion.low, portion.high, portion.ordinals, len(portion.ordinals)) < len(
                    portion.ordinals
                ):
                    raise Refused(
                        f"no estimate: the keys of the sample do not fit into the {self._task.map_memory_bytes} bytes "
                        "of map memory",
                        path=self._task.partition_path,
                        remedy="Raise --map-memory",
                        slug="sample-too-large",
                    )


def _places(portion: KeyPortion) -> np.ndarray:
    """Return the place of each record of the portion, as in `Sample.watched` (int64), or -1 if the map lacks it."""
    first = portion.of_each_record(portion.first_ordinal)
    places = np.where(first < _NOT_DRAWN, 2 * portion.ordinals + 1, 2 * (first - _NOT_DRAWN))
    places[portion.ordinals < 0] = -1
    return places


def survivors_of(task: CleaningTask, sample: Sample) -> Survivors:
    """Return the same survivors as the map phase would for a log with only the drawn batches of the sample. Places in
    `sample.watched` become ordinals: a record that was not drawn gets the ordinal of the next drawn record, since a
    record that was not put into the map is retained if its ordinal is not below the map's ordinal of its key
    (CLEANING.md 5.5).
    """
    first, end = segments_between(task.segments, task.first_dirty_offset, task.first_uncleanable_offset)
    is_inside = task.first_dirty_offset > task.segments[first].base_offset
    survivors = Survivors(sample.watched, first, is_inside, latest_offset=task.first_uncleanable_offset - 1)
    has_null = [np.empty(0, np.uint8)]
    for drawn in sample.drawn[first:end]:
        survivors.record_start.append(survivors.records)
        survivors.batch_start.append(survivors.batches)
        survivors.segment_records.append(drawn.records)
        survivors.batches += sum(map(len, drawn.tables))
        has_null += drawn.has_null
    survivors.null_bits = np.packbits(np.concatenate(has_null), bitorder="little")
    survivors.bits = np.zeros((survivors.records + 7) // 8, np.uint8)
    slots = sample.watched.slots
    places = slots["value"] - 1
    slots["value"] = np.where(places > 0, places // 2 + 1, slots["value"])
    of_drawn = slots[(places > 0) & (places % 2 == 1)]
    mark_survivors(of_drawn, np.array(survivors.record_start, np.int64), first, survivors.bits)
    return survivors


def drawn_chunks(
    fs: FileSystem, task: CleaningTask, sample: Sample
) -> Iterator[tuple[int, int, int, Chunk]]:
    """Read the drawn batches again; yield tuples of segment number, number of records and number of batches drawn
    before in the segment, and a chunk of drawn batches."""
    for number, drawn in enumerate(sample.drawn):
        table = drawn.table
        if not len(table):
            continue
        path = task.path(task.segments[number].base_offset, names.LOG)
        sizes = table["size_bytes"].astype(np.int64)
        edges = np.flatnonzero(np.diff(np.cumsum(sizes) // CHUNK_BYTES)) + 1
        records = _FIRST_NUMBER
        fd = fs.open_read(path)
        try:
            for a, b in zip([0, *edges], [*edges, len(table)], strict=True):
                rows = table[a:b].copy()
                places = np.concatenate(([0], np.cumsum(sizes[a:b])))
                raw = np.empty(int(places[-1]), np.uint8)
                for position, start, stop in zip(rows["position"], places[:-1], places[1:], strict=True):
                    fs.read_into(fd, raw[start:stop], int(position))
                rows["position"] = places[:-1]
                yield number, records, int(a), Chunk(path, 0, raw, rows)
                records += int(rows["record_count"].sum(dtype=np.int64))
        finally:
            fs.close(fd)
