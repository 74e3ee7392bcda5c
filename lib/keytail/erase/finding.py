"""Finds the records whose keys are to be erased: in a chunk for the rewrite, and in a whole partition for the plan."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from keytail.compact.map_phase.reading import with_aborted
from keytail.compact.task import CleaningTask
from keytail.erase.keys import ErasedKeys
from keytail.erase.other_directories import may_have_records
from keytail.errors import Refused
from keytail.format import names
from keytail.format.batch import CONTROL, TRANSACTIONAL
from keytail.kernels.erase import mark_erased
from keytail.log import meter
from keytail.log.fs import FileSystem
from keytail.log.partition import PartitionFacts, SegmentFacts, refuse_changed
from keytail.log.records.chunk import Chunk, SegmentReader, check_ends_below, refuse_unsupported
from keytail.log.records.key_scan import KeyPortion, KeyScanner
from keytail.log.transactions import Transactions, TransactionTracker


class Finder:
    """Finds records with erased keys in chunks; each task has its own finder. `found` (bool, one item per key) is True
    for each key that was found. `first_offset` is the offset of the first record that was found, or -1.
    """

    def __init__(self, reader: SegmentReader, keys: ErasedKeys) -> None:
        self._reader, self._keys = reader, keys
        self._scanner = KeyScanner(keys.seed)
        self.found = np.zeros(keys.count, bool)
        self.first_offset = -1

    def erased(self, chunk: Chunk) -> np.ndarray:
        """Return for each record of the chunk (uint8), in order, 1 if it is to be erased, else 0 (as for control
        records).

        Raises CorruptLog or Refused for a batch that cannot be opened.
        """
        table = chunk.table
        counts = table["record_count"].astype(np.int64)
        first = np.cumsum(counts) - counts
        erased = np.zeros(int(counts.sum()), np.uint8)
        wanted = ((table["attributes"] & CONTROL) == 0) & (counts > 0)
        nulls = np.zeros((len(table) + 7) // 8, np.uint8)
        for opened in self._reader.open_rows(chunk, wanted):
            for part in self._scanner.portions(chunk, opened, -(2**63), first, nulls, 0):
                n = mark_erased(part.low, part.high, part.ordinals, self._keys.table, erased, self.found)
                if n and self.first_offset < 0:
                    self.first_offset = _offset_of(part, int(np.argmax(erased)))
        return erased


def _offset_of(part: KeyPortion, ordinal: int) -> int:
    records, ordinals = part.records_up_to(part.row_of(ordinal))
    return int(records["offset"][ordinals == ordinal][0])


def erased_of_rows(table: np.ndarray, erased: np.ndarray) -> np.ndarray:
    """Return the number of erased records (int64) of each row of a chunk's table. `erased` (uint8) has an item for each
    record of the chunk."""
    ends = np.cumsum(table["record_count"], dtype=np.int64)
    sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(erased, dtype=np.int64)])
    return sums[ends] - sums[ends - table["record_count"]]


@dataclass(frozen=True)
class FoundInSegment:
    """A segment with records to be erased: its base offset, the number of its records, and how many are to be erased.
    """

    base_offset: int
    records: int
    erased: int


@dataclass(frozen=True)
class FoundInPartition:
    """The records to be erased in a partition. `segments` are to be rewritten. `keys` (packed uint8) has a bit for each
    key, 1 if it was found.

    `transactions` determine the transaction indexes. `records` is the number of records of the partition.
    """

    segments: tuple[FoundInSegment, ...]
    records: int
    keys: np.ndarray
    transactions: Transactions

    @property
    def erased(self) -> int:
        return sum(segment.erased for segment in self.segments)

    @property
    def keys_found(self) -> int:
        return int(np.unpackbits(self.keys).sum())


def longest_without_records(bases: Sequence[int], segments: Iterable[FoundInSegment]) -> int:
    """Return the largest number of adjacent segments of which the erasure removes every record. `bases` are the base
    offsets of all segments, ascending."""
    emptied = {segment.base_offset for segment in segments if segment.erased == segment.records}
    longest = run = 0
    for base in bases:
        run = run + 1 if base in emptied else 0
        longest = max(longest, run)
    return longest


@dataclass
class _Open:
    """By producer id: the base offset of the last transactional batch with a record to be erased (`data`), and of the
    last marker (`markers`)."""

    data: dict[int, int] = field(default_factory=dict)
    markers: dict[int, int] = field(default_factory=dict)

    def follow(self, table: np.ndarray, erased: np.ndarray) -> None:
        """Process the next batches. `erased` has the number of erased records of each batch."""
        kind = table["attributes"] & (TRANSACTIONAL | CONTROL)
        for into, which in (
            (self.data, (kind == TRANSACTIONAL) & (erased > 0)),
            (self.markers, ((kind & CONTROL) != 0) & (table["record_count"] > 0)),
        ):
            rows = table[which]
            into.update(zip(rows["producer_id"].tolist(), rows["base_offset"].tolist(), strict=True))

    def refuse(self, partition_path: str) -> None:
        """Raise Refused if a transaction with a record to be erased has no marker."""
        left = [(offset, producer) for producer, offset in self.data.items() if self.markers.get(producer, -1) < offset]
        if left:
            offset, producer = min(left)
            raise Refused(
                f"producer {producer} has an open transaction with a record to be erased",
                path=partition_path,
                offset=offset,
                remedy="Start the broker and wait until the transaction ends, or abort it (kafka-transactions.sh)",
                slug="open-transaction",
            )


def find_in_partition(fs: FileSystem, task: CleaningTask, keys: ErasedKeys) -> FoundInPartition:
    """Read the whole log and return the records to be erased. Raises CorruptLog for damage, and Refused for an open
    transaction with a record to be erased."""

    def follow(aborted: np.ndarray) -> FoundInPartition:
        return _find(fs, task, keys, aborted)

    with meter.during("find"):
        return with_aborted(fs, task, follow)


def _find(fs: FileSystem, task: CleaningTask, keys: ErasedKeys, aborted: np.ndarray) -> FoundInPartition:
    reader = SegmentReader(fs)
    finder, tracker, is_open = Finder(reader, keys), TransactionTracker(aborted, task.log_start_offset), _Open()
    records = dict.fromkeys((segment.base_offset for segment in task.segments), 0)
    erased = dict(records)
    for base, chunk in _chunks(reader, task.partition_path, task.segments, torn_tail=not task.clean_shutdown):
        of_rows = erased_of_rows(chunk.table, finder.erased(chunk))
        tracker.follow(chunk.table)
        is_open.follow(chunk.table, of_rows)
        records[base] += int(chunk.table["record_count"].sum(dtype=np.int64))
        erased[base] += int(of_rows.sum())
    is_open.refuse(task.partition_path)
    found = tuple(FoundInSegment(base, records[base], n) for base, n in erased.items() if n)
    return FoundInPartition(found, sum(records.values()), np.packbits(finder.found), tracker.finish())


def _chunks(
    reader: SegmentReader, path: str, segments: Sequence[SegmentFacts], *, torn_tail: bool
) -> Iterator[tuple[int, Chunk]]:
    """Yield the chunks of all segments, each with the base offset of its segment. `torn_tail` is True if the active
    segment may end with an unfinished write."""
    bases = [segment.base_offset for segment in segments]
    for segment, next_base in zip(segments, [*bases[1:], None], strict=True):
        log = os.path.join(path, names.segment_file(segment.base_offset, names.LOG))
        for chunk in reader.chunks(log, segment.log_bytes, torn_tail=torn_tail and next_base is None):
            refuse_unsupported(chunk)
            check_ends_below(chunk, next_base)
            yield segment.base_offset, chunk


@dataclass(frozen=True)
class Left:
    """The records with erased keys in a directory: their number, and the offset of the first one, or -1. `not_read` has
    the names of files that were not read, but may have such records."""

    records: int
    first_offset: int
    not_read: tuple[str, ...]


def find_remaining(fs: FileSystem, facts: PartitionFacts, keys: ErasedKeys) -> Left:
    """Return the records with erased keys in all segments of a partition, whose broker may run. Raises CorruptLog for
    damage, and Refused if a closed segment has changed during the reading."""
    reader = SegmentReader(fs)
    finder, records, read_bytes = Finder(reader, keys), 0, {facts.segments[-1].base_offset: 0}
    for base, chunk in _chunks(reader, facts.path, facts.segments, torn_tail=not facts.clean_shutdown):
        records += int(finder.erased(chunk).sum(dtype=np.int64))
        read_bytes[base] = chunk.position + len(chunk.raw)
    for segment in facts.segments[:-1]:
        log = os.path.join(facts.path, names.segment_file(segment.base_offset, names.LOG))
        refuse_changed(fs, log, segment.log_bytes, segment.log_mtime_ns)
    not_read = [entry.name for entry in fs.scan(facts.path) if may_have_records(entry.name)]
    active = facts.segments[-1]
    if (end := read_bytes[active.base_offset]) < active.log_bytes:
        not_read.append(f"{names.segment_file(active.base_offset, names.LOG)} from byte {end} on")
    return Left(records, finder.first_offset, tuple(sorted(not_read)))
