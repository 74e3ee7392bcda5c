"""The map phase: puts the dirty section into the offset map, and marks its surviving records with one bit each.

Bits are numbered by the records of the dirty segments, not by offsets, because compacted logs have gaps of billions of
offsets. The map phase also records which batches contain a null value, so that the write phase need not open them to
determine this, and where the mapped range ends (format/CLEANING.md, "Building the map").
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from keytail.compact.map_phase.offset_map import OffsetMap
from keytail.format import names
from keytail.format.batch import CONTROL
from keytail.kernels.offset_map import mark_survivors
from keytail.log.partition import SegmentFacts
from keytail.log.records.chunk import Chunk, SegmentReader, check_ends_below, refuse_unsupported
from keytail.log.records.key_scan import KeyPortion, KeyScanner
from keytail.log.records.prefetch import prefetched
from keytail.log.transactions import TransactionTracker

# A chunk: the number of its segment, the byte positions of its start and end, and the numbers of records and batches
# before it in the segment.
Span = tuple[int, int, int, int, int]


def span_of(number: int, chunk: Chunk, records: int, batches: int) -> Span:
    return number, chunk.position, chunk.position + len(chunk.raw), records, batches


@dataclass
class Survivors:
    """The findings of the map phase. Offsets up to `latest_offset` were mapped; the round ends at `end_offset`, the
    next offset.

    `batches` is the number of batches read in dirty segments. `segment_records[i]` is the number of records in dirty
    segment `first_segment` + i, as far as the map phase read it; `record_start[i]` and `batch_start[i]` are the bit
    numbers of that segment's first record in `bits`, and of its first batch in `null_bits`. If keys are counted,
    `places` has the ordinal of the first record and the byte position of each chunk. `spans` are the chunks of the log,
    as they were read, up to the last segment that was read for the map.
    """

    offset_map: OffsetMap
    first_segment: int
    starts_inside_segment: bool = False
    latest_offset: int = -1
    full: bool = False
    keyless: int = 0
    first_keyless_offset: int = -1
    batches: int = 0
    segment_records: list[int] = field(default_factory=list)
    record_start: list[int] = field(default_factory=list)
    batch_start: list[int] = field(default_factory=list)
    bits: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint8))
    null_bits: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint8))
    places: list[tuple[int, int]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    @property
    def records(self) -> int:
        """The number of records in the dirty segments, as far as they were read."""
        return self.record_start[-1] + self.segment_records[-1] if self.segment_records else 0

    @property
    def end_offset(self) -> int:
        return self.latest_offset + 1

    @property
    def size_bytes(self) -> int:
        return self.bits.nbytes + self.null_bits.nbytes + self.offset_map.slots.nbytes

    def forget_map(self) -> None:
        """Free the map, where only segments of the dirty section are left to be rewritten, if it can be freed there."""
        if self.can_forget_map:
            self.offset_map = OffsetMap(0)

    @property
    def can_forget_map(self) -> bool:
        """Whether the write phase needs no map in the dirty section, because bits decide there. If the map was full, or
        the dirty section starts inside a segment, it needs the map there, too."""
        return not (self.full or self.starts_inside_segment)

    def records_from(self, number: int) -> int:
        """Return the number of records in the segments that the map phase read, starting with segment `number`."""
        return sum(self.segment_records[max(0, number - self.first_segment) :])

    def reserve_nulls(self, batches: int) -> None:
        """Make room in `null_bits` for `batches` batches."""
        needed = (batches + 7) // 8
        if len(self.null_bits) < needed:
            larger = np.zeros(max(needed, 2 * len(self.null_bits)), np.uint8)
            larger[: len(self.null_bits)] = self.null_bits
            self.null_bits = larger

    def check(self) -> None:
        """Assert that there is exactly one surviving bit per key of the map."""
        self.offset_map.check()
        assert int(np.unpackbits(self.bits).sum()) == self.offset_map.used
        assert self.record_start == sorted(self.record_start)
        assert self.batch_start == sorted(self.batch_start)


class TransactionTrackers:
    """Two trackers of the batches of the dirty section: one for all transactions, the other for the transactions
    visible to the map.

    As in Kafka, the map's own tracker starts at the batch that the offset index names for the first dirty offset, and
    does not see the markers before that batch (format/CLEANING.md, "Aborted data and the map").
    """

    def __init__(self, whole_log: TransactionTracker, mapping: TransactionTracker, map_position: int) -> None:
        self._whole_log = whole_log
        self._mapping = mapping
        self._map_position = map_position

    def follow(self, table: np.ndarray, is_first_segment: bool) -> np.ndarray:
        """Return for each batch (bool) whether the map treats it as data of an aborted transaction."""
        self._whole_log.follow(table)
        skipped = int(np.searchsorted(table["position"], self._map_position)) if is_first_segment else 0
        aborted = np.zeros(len(table), bool)
        aborted[skipped:] = self._mapping.follow(table[skipped:])
        return aborted


@dataclass(frozen=True)
class DirtyChunk:
    """A chunk of the dirty section. `wanted`: whether each batch is to be mapped (bool; None: the map is full);
    `first_ordinal`: the ordinal of each batch's first record (int64); `batches`: the number of batches before the chunk
    in the dirty section.
    """

    chunk: Chunk
    wanted: np.ndarray | None
    first_ordinal: np.ndarray
    batches: int


class SurvivorBuilder:
    """Reads the dirty segments of a partition and builds its Survivors.

    In a segment of several chunks, a thread reads the next chunk and hashes its keys while the keys of the previous
    chunk are put into the map.
    """

    def __init__(self, reader: SegmentReader, scanner: KeyScanner, offset_map: OffsetMap) -> None:
        self._reader = reader
        self._scanner = scanner
        self._map = offset_map

    def build(
        self,
        partition_path: str,
        segments: Sequence[SegmentFacts],
        dirty: tuple[int, int],
        first_dirty_offset: int,
        first_uncleanable_offset: int,
        trackers: TransactionTrackers,
    ) -> Survivors:
        """Return the Survivors of segments `dirty` (first, end). Raises CorruptLog, or Refused for batches that this
        version does not clean.

        The segment in which the map becomes full is read to its end, because `trackers` need all of its batches.
        """
        first, end = dirty
        survivors = Survivors(self._map, first, first_dirty_offset > segments[first].base_offset)
        number = first
        while number < end and not survivors.full:
            number = self._map_from(
                number, end, survivors, partition_path, segments, first_dirty_offset, trackers
            )
            if not survivors.full:
                behind = segments[number].base_offset if number < end else first_uncleanable_offset
                survivors.latest_offset = behind - 1
        survivors.bits = np.zeros((survivors.records + 7) // 8, np.uint8)
        starts = np.array(survivors.record_start, np.int64)
        mark_survivors(self._map.slots, starts, first, survivors.bits)
        return survivors

    def _map_from(
        self,
        number: int,
        end: int,
        survivors: Survivors,
        partition_path: str,
        segments: Sequence[SegmentFacts],
        from_offset: int,
        trackers: TransactionTrackers,
    ) -> int:
        """Put the keys of segment `number` into the map, and return the number of the next segment to be mapped."""
        chunks = self._chunks(survivors, partition_path, segments, number, from_offset, trackers)
        found = self._find_keys(survivors, chunks, from_offset)
        is_long = self._reader.is_longer_than_a_chunk(segments[number].log_bytes)
        for portion in prefetched(found) if is_long else found:
            if portion is not None and not survivors.full:
                self._put(survivors, portion, from_offset)
        return number + 1

    def _chunks(
        self,
        survivors: Survivors,
        partition_path: str,
        segments: Sequence[SegmentFacts],
        number: int,
        from_offset: int,
        trackers: TransactionTrackers,
    ) -> Generator[DirtyChunk, None, None]:
        """Yield the chunks of segment `number` with the batches to be mapped, and count the segment's records in
        `survivors`."""
        path = os.path.join(partition_path, names.segment_file(segments[number].base_offset, names.LOG))
        survivors.record_start.append(survivors.records)
        survivors.batch_start.append(survivors.batches)
        survivors.segment_records.append(0)
        next_base = segments[number + 1].base_offset if number + 1 < len(segments) else None
        for chunk in self._reader.chunks_without_prefetch(path, segments[number].log_bytes):
            refuse_unsupported(chunk)
            check_ends_below(chunk, next_base)
            table = chunk.table
            aborted = trackers.follow(table, number == survivors.first_segment)
            counts = table["record_count"].astype(np.int64)
            first_ordinal = (number << 32) + survivors.segment_records[-1] + np.cumsum(counts) - counts
            if self._map.is_counting:
                survivors.places.append((int(first_ordinal[0]), chunk.position))
            before = survivors.batches - survivors.batch_start[-1]
            survivors.spans.append(span_of(number, chunk, survivors.segment_records[-1], before))
            wanted = None
            if not survivors.full:
                wanted = ~aborted & (table["last_offset"] >= from_offset)
                wanted &= ((table["attributes"] & CONTROL) == 0) & (counts > 0)
            yield DirtyChunk(chunk, wanted, first_ordinal, survivors.batches)
            survivors.segment_records[-1] += int(counts.sum())
            survivors.batches += len(table)

    def _find_keys(
        self, survivors: Survivors, chunks: Iterable[DirtyChunk], from_offset: int
    ) -> Generator[KeyPortion | None, None, None]:
        """Yield the keys of the wanted data batches of `chunks`, in portions.

        One portion is put into the map while the next portion is produced, so keys produced after the map was full are
        ignored. Once the map is full, None is yielded for each chunk, so that this generator does not overwrite the
        buffers of a chunk that is still being put into the map.
        """
        for item in chunks:
            if item.wanted is None:
                yield None
                continue
            survivors.reserve_nulls(item.batches + len(item.chunk.table))
            for opened in self._reader.open_rows(item.chunk, item.wanted):
                yield from self._scanner.portions(
                    item.chunk, opened, from_offset, item.first_ordinal, survivors.null_bits, item.batches
                )

    def _put(self, survivors: Survivors, portion: KeyPortion, from_offset: int) -> None:
        done = self._map.put_all(portion.low, portion.high, portion.ordinals, len(portion.ordinals))
        if done < len(portion.ordinals):
            self._stop_in_front_of(int(portion.ordinals[done]), survivors, portion, from_offset)
            return
        self._note_put(survivors, portion, from_offset)

    def _note_put(self, survivors: Survivors, portion: KeyPortion, from_offset: int) -> None:
        self._note_keyless(survivors, portion.keyless, portion.first_keyless_offset)
        if portion.opened.is_end:
            self._advance(survivors, portion, portion.end_row, from_offset)
        else:  # if a later piece of the batch does not fit, only the records that were put are mapped, as for any batch
            records, _ = portion.records_up_to(portion.first_row)
            self._advance_to_put(survivors, records, from_offset)

    @staticmethod
    def _note_keyless(survivors: Survivors, count: int, first_offset: int) -> None:
        if count and not survivors.keyless:
            survivors.first_keyless_offset = first_offset
        survivors.keyless += count

    @staticmethod
    def _advance(survivors: Survivors, portion: KeyPortion, end_row: int, from_offset: int) -> None:
        """Move `latest_offset` to the end of the batches of the portion before `end_row`."""
        if end_row > portion.first_row:
            last = int(portion.chunk.table["last_offset"][end_row - 1])
            if last >= from_offset:
                survivors.latest_offset = last

    @staticmethod
    def _advance_to_put(survivors: Survivors, records: np.ndarray, from_offset: int) -> None:
        """Move `latest_offset` to the last of these records that was put."""
        put = records["offset"][(records["key_bytes"] >= 0) & (records["offset"] >= from_offset)]
        if len(put):
            survivors.latest_offset = int(put[-1])

    def _stop_in_front_of(self, ordinal: int, survivors: Survivors, portion: KeyPortion, from_offset: int) -> None:
        """Note that the map was full at the record with this ordinal: that record and all later records are retained,
        even without a key."""
        survivors.full = True
        row = portion.row_of(ordinal)
        self._advance(survivors, portion, row, from_offset)
        records, ordinals = portion.records_up_to(row)
        before = records[(ordinals < ordinal) & (records["offset"] >= from_offset)]
        keyless = before["offset"][before["key_bytes"] < 0]
        self._note_keyless(survivors, len(keyless), int(keyless[0]) if len(keyless) else -1)
        self._advance_to_put(survivors, before[before["row"] == row], from_offset)
