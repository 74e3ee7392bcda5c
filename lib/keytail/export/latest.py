"""Finds the latest committed record of each key of a partition, for an export.

Like the map phase of a compaction, the map phase (`find_latest`) hashes the keys of a range of offsets into the offset
map, and returns one bit per record, which is set for the latest record of a key (for a tombstone only if requested).
Aborted data is not mapped. The read phase (`latest_records`) reads the records whose bit is set, in one task per slice
of segments. If the keys do not fit into the map, they are divided into shards by their hashes, and the log is read once
per shard, with a map of the same size.
"""

from __future__ import annotations

import os
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from keytail.compact.map_phase.offset_map import OffsetMap
from keytail.errors import CORRUPT_REMEDY, CorruptLog, Refused
from keytail.format import names
from keytail.format.batch import CONTROL
from keytail.kernels.offset_map import mark_survivors
from keytail.kernels.records import number_records
from keytail.log.fs import FileSystem
from keytail.log.listed import unchanged, whole_bytes
from keytail.log.partition import SegmentFacts
from keytail.log.records.chunk import Chunk, SegmentReader, check_ends_below, refuse_unsupported
from keytail.log.records.scan import Portion, RecordScanner
from keytail.log.records.table import RecordTable
from keytail.log.transactions import Contradiction, TransactionTracker, read_aborted

SLICE_BYTES = 256 << 20
MAX_SHARDS = 64


@dataclass(frozen=True)
class LatestTask:
    """The records to find in a partition, with offsets in [from_offset, end_offset). `segments` are all segments of the
    log, as listed. `tombstones`: whether to set the bits of tombstones that are the latest records of their keys."""

    partition_path: str
    segments: tuple[SegmentFacts, ...]
    log_start_offset: int
    from_offset: int
    end_offset: int
    tombstones: bool = False
    drop_keyless: bool = False
    map_memory_bytes: int = 0
    hash_seed: int = 0

    @property
    def first_segment(self) -> int:
        bases = [segment.base_offset for segment in self.segments]
        return max(bisect_right(bases, self.from_offset) - 1, 0)

    @property
    def sources(self) -> tuple[SegmentFacts, ...]:
        """The segments that may have offsets in the range."""
        of = self.segments[self.first_segment :]
        return tuple(segment for segment in of if segment.base_offset < self.end_offset)


@dataclass(frozen=True)
class Latest:
    """The result of a LatestTask. `bits`: one bit per record of the task's `sources`, compressed by zlib; the bits of
    `sources[i]` begin at bit `first_bits[i]`. `records` is the number of bits that are set.

    `tombstones` is the number of tombstones that are the latest records of their keys, whether or not their bits are
    set. `has_gap`: offsets are missing between or in the batches of the range, as after compaction.
    """

    bits: bytes
    first_bits: tuple[int, ...]
    records: int
    tombstones: int
    keyless: int
    has_gap: bool
    shards: int


def find_latest(fs: FileSystem, task: LatestTask) -> Latest:
    """Find the latest record of each key. Raises CorruptLog for damage; Refused for records without a key (unless
    `drop_keyless`), for too many keys, and if the files differ from the listing before or after they are read.

    The call needs memory for the map, two bits per record, and up to 256 MiB more.
    """
    with unchanged(fs, task.partition_path, task.segments):
        entries = read_aborted(fs, task.partition_path, task.segments, task.log_start_offset)
        first = task.segments[task.first_segment].base_offset if task.segments else 0
        entries = entries[entries["last_offset"] >= first]
        reader, shards = SegmentReader(fs), 1
        while True:
            try:
                found = _Finder(fs, task, reader, entries).find(shards)
            except Contradiction as contradiction:
                # As in cleaning, the transaction indexes are used unless the log contradicts them.
                found = _again(fs, task, reader, contradiction.entries, shards)
            if found is not None:
                return found
            shards *= 2
            if shards > MAX_SHARDS:
                raise Refused(
                    f"the keys do not fit into a map of {task.map_memory_bytes} bytes in {MAX_SHARDS} passes over the "
                    "log",
                    path=task.partition_path,
                    remedy="Increase --map-memory",
                    slug="too-many-keys",
                )


def _again(fs: FileSystem, task: LatestTask, reader: SegmentReader, entries: np.ndarray, shards: int) -> Latest | None:
    try:
        return _Finder(fs, task, reader, entries).find(shards)
    except Contradiction as contradiction:
        raise CorruptLog(
            "the markers and the data of transactions contradict each other",
            path=task.partition_path,
            offset=contradiction.offset,
            remedy=CORRUPT_REMEDY,
            slug="inconsistent-transactions",
        ) from None


class _Finder:
    def __init__(self, fs: FileSystem, task: LatestTask, reader: SegmentReader, entries: np.ndarray) -> None:
        self._fs, self._task, self._reader, self._entries = fs, task, reader, entries
        self._scanner = RecordScanner()
        self._bits, self._nulls = np.zeros(0, np.uint8), np.zeros(0, np.uint8)
        self._first_bits: list[int] = []
        self._records = 0
        self._keyless, self._first_keyless = 0, -1
        self._gaps = _Gaps(task.from_offset, task.end_offset)

    def find(self, shards: int) -> Latest | None:
        """Read the log once per shard. Return the result, or None if the keys of a shard do not fit into the map."""
        for shard in range(shards):
            if not self._map(shard, shards):
                return None
        if self._keyless and not self._task.drop_keyless:
            raise Refused(
                f"{self._keyless} records have no key, so no later record replaces them",
                path=self._task.partition_path,
                offset=self._first_keyless,
                remedy="Check whether the topic is compacted: most topics with such records are not. To leave them "
                "out, use --drop-keyless",
                slug="records-without-key",
            )
        dead = self._bits & self._nulls[: len(self._bits)]
        if not self._task.tombstones:
            self._bits &= ~dead
        return Latest(
            bits=zlib.compress(self._bits, 1),
            first_bits=tuple(self._first_bits),
            records=int(np.bitwise_count(self._bits).sum()),
            tombstones=int(np.bitwise_count(dead).sum()),
            keyless=self._keyless,
            has_gap=self._gaps.found,
            shards=shards,
        )

    def _map(self, shard: int, shards: int) -> bool:
        task, tracker = self._task, TransactionTracker(self._entries, self._task.log_start_offset)
        offset_map = OffsetMap(task.map_memory_bytes)
        self._first_bits, self._records = [], 0
        for number in range(task.first_segment, len(task.segments)):
            is_source = task.segments[number].base_offset < task.end_offset
            if not is_source and shard > 0:
                break  # later segments are read only once, for their markers
            if is_source:
                self._first_bits.append(self._records)
            for chunk in _chunks(self._fs, self._reader, task.partition_path, task.segments, number, task.end_offset):
                aborted = tracker.follow(chunk.table)
                if not is_source:
                    continue
                if shard == 0:
                    self._gaps.look(chunk.table)
                if not self._map_keys(chunk, aborted, number, offset_map, shard, shards):
                    return False
        if shard == 0:
            tracker.finish()
        wanted = (self._records + 7) // 8
        if len(self._bits) < wanted:
            self._bits = np.zeros(wanted, np.uint8)
            self._nulls = _longer(self._nulls, wanted)
        mark_survivors(offset_map.slots, np.array(self._first_bits, np.int64), task.first_segment, self._bits)
        return True

    def _map_keys(
        self, chunk: Chunk, aborted: np.ndarray, number: int, offset_map: OffsetMap, shard: int, shards: int
    ) -> bool:
        task, table = self._task, chunk.table
        counts = table["record_count"].astype(np.int64)
        of_segment = self._records - self._first_bits[-1]
        first_ordinal = (number << 32) + of_segment + np.cumsum(counts) - counts
        wanted = ~aborted & ((table["attributes"] & CONTROL) == 0) & (counts > 0)
        wanted &= (table["last_offset"] >= task.from_offset) & (table["base_offset"] < task.end_offset)
        for opened in self._reader.open_rows(chunk, wanted):
            for portion in self._scanner.portions(chunk, opened):
                ordinals = self._numbered(portion, first_ordinal)
                if shard == 0:
                    self._note(portion, ordinals)
                columns, n = portion.columns, len(portion.records)
                if shards > 1:
                    ordinals[columns.low[:n] % np.uint64(shards) != np.uint64(shard)] = -1
                if offset_map.put_all(columns.low, columns.high, columns.ordinals, n) < n:
                    return False
        self._records += int(counts.sum())
        return True

    def _numbered(self, portion: Portion, first_ordinal: np.ndarray) -> np.ndarray:
        """Return the ordinals (int64) of the portion's records; -1 for records that do not belong in the map."""
        records, columns = portion.records, portion.columns
        portion.hash_keys(self._task.hash_seed)
        number_records(
            records, len(records), portion.opened.from_here(first_ordinal), self._task.from_offset, columns.ordinals,
            np.zeros(2, np.int64),
        )  # fmt: skip
        ordinals = columns.ordinals[: len(records)]
        ordinals[records["offset"] >= self._task.end_offset] = -1
        return ordinals

    def _note(self, portion: Portion, ordinals: np.ndarray) -> None:
        """Count the records without a key, and set the bit of each record without a value."""
        records, task = portion.records, self._task
        in_range = (records["offset"] >= task.from_offset) & (records["offset"] < task.end_offset)
        keyless = records["offset"][in_range & (records["key_bytes"] < 0)]
        if len(keyless):
            self._first_keyless = self._first_keyless if self._keyless else int(keyless[0])
            self._keyless += len(keyless)
        nulls = ordinals[(records["value_bytes"] < 0) & (ordinals >= 0)]
        if len(nulls):
            at = self._first_bits[-1] + (nulls & 0xFFFFFFFF)
            self._nulls = _longer(self._nulls, int(at[-1]) // 8 + 1)
            np.bitwise_or.at(self._nulls, at >> 3, (1 << (at & 7)).astype(np.uint8))


class _Gaps:
    """Detects missing offsets in a range. A log that was never compacted has a record at every offset."""

    def __init__(self, from_offset: int, end_offset: int) -> None:
        self._next, self._end = from_offset, end_offset
        self._is_found = False

    @property
    def found(self) -> bool:
        """Whether offsets are missing in the range. The value is final when `look` has been called with all batches of
        the range."""
        return self._is_found or self._next < self._end

    def look(self, table: np.ndarray) -> None:
        table = table[(table["last_offset"] >= self._next) & (table["base_offset"] < self._end)]
        if not len(table) or self._is_found:
            return
        spans = table["last_offset"] - table["base_offset"] + 1
        self._is_found = bool(
            table["base_offset"][0] > self._next
            or (table["base_offset"][1:] != table["last_offset"][:-1] + 1).any()
            or (spans != table["record_count"]).any()
        )
        self._next = int(table["last_offset"][-1]) + 1


def _longer(bits: np.ndarray, n: int) -> np.ndarray:
    if len(bits) >= n:
        return bits
    longer = np.zeros(max(n, 2 * len(bits)), np.uint8)
    longer[: len(bits)] = bits
    return longer


@dataclass(frozen=True)
class LatestSlice:
    """Some segments of a partition that contain records whose bits are set. The records are below `end_offset`. The
    bits of `segments[i]` begin at bit `first_bits[i]` of `bits`, which are compressed by zlib."""

    partition_path: str
    segments: tuple[SegmentFacts, ...]
    end_offset: int
    is_last: bool  # whether the last of `segments` is the active segment
    bits: bytes
    first_bits: tuple[int, ...]


def slices_of(task: LatestTask, latest: Latest, slice_bytes: int = SLICE_BYTES) -> list[LatestSlice]:
    """Divide the sources into slices of about `slice_bytes` of log. Segments without set bits are omitted."""
    bits = np.frombuffer(zlib.decompress(latest.bits), np.uint8)
    sources, ends = task.sources, [*latest.first_bits[1:], 8 * len(bits)]
    slices: list[LatestSlice] = []
    taken: list[int] = []

    def close() -> None:
        if taken:
            byte, end = latest.first_bits[taken[0]] // 8, -(-ends[taken[-1]] // 8)
            slices.append(
                LatestSlice(
                    task.partition_path,
                    tuple(sources[number] for number in taken),
                    task.end_offset,
                    sources[taken[-1]] == task.segments[-1],
                    zlib.compress(bits[byte:end], 1),
                    tuple(latest.first_bits[number] - 8 * byte for number in taken),
                )
            )
            taken.clear()

    for number, segment in enumerate(sources):
        of_segment = np.unpackbits(bits[latest.first_bits[number] // 8 : -(-ends[number] // 8)], bitorder="little")
        start = latest.first_bits[number] % 8
        if not of_segment[start : start + ends[number] - latest.first_bits[number]].any():
            continue
        if taken and sum(sources[other].log_bytes for other in taken) + segment.log_bytes > slice_bytes:
            close()
        taken.append(number)
    close()
    return slices


def latest_records(fs: FileSystem, piece: LatestSlice) -> Iterator[RecordTable]:
    """Yield tables of some thousands of the records whose bits are set, in order. A table is valid until the next table
    is yielded.

    Raises the same errors as `find_latest`. If the files have changed meanwhile, this may be detected only after the
    last table.
    """
    reader, scanner = SegmentReader(fs), RecordScanner()
    # `bytearray` makes the array writable, like all arrays of bits.
    bits = np.frombuffer(bytearray(zlib.decompress(piece.bits)), np.uint8)
    with unchanged(fs, piece.partition_path, piece.segments, is_last=piece.is_last):
        for number in range(len(piece.segments)):
            bit = piece.first_bits[number]
            of_segment = _chunks(
                fs, reader, piece.partition_path, piece.segments, number, piece.end_offset, is_last=piece.is_last
            )
            for chunk in of_segment:
                counts = chunk.table["record_count"].astype(np.int64)
                ends = bit + np.cumsum(counts)
                first_bit = ends - counts
                of_chunk = _unpacked(bits, bit, int(ends[-1]))
                alive = np.concatenate([[0], np.cumsum(of_chunk)])
                wanted = alive[ends - bit] > alive[first_bit - bit]
                bit = int(ends[-1])
                if not wanted.any():
                    continue
                for opened in reader.open_rows(chunk, wanted):
                    for portion in scanner.portions(chunk, opened, bits, first_bit):
                        if len(portion.records):
                            yield portion.record_table


def _unpacked(bits: np.ndarray, start: int, end: int) -> np.ndarray:
    """Return the bits from `start` to before `end` as an array of int64 (0 or 1). Bits after the last byte are 0."""
    of = np.unpackbits(bits[start // 8 : -(-end // 8)], bitorder="little")[start % 8 :].astype(np.int64)
    return np.pad(of[: end - start], (0, max(end - start - len(of), 0)))


def _chunks(
    fs: FileSystem,
    reader: SegmentReader,
    partition_path: str,
    segments: Sequence[SegmentFacts],
    number: int,
    end_offset: int,
    *,
    is_last: bool = True,
) -> Iterator[Chunk]:
    """Yield the chunks of segment `number`. The active segment may end with an incomplete batch above `end_offset`."""
    segment = segments[number]
    path = os.path.join(partition_path, names.segment_file(segment.base_offset, names.LOG))
    n_bytes = segment.log_bytes
    if is_last and number + 1 == len(segments):
        n_bytes = whole_bytes(fs, path, segment.base_offset, end_offset if segment.base_offset < end_offset else 0)
    for chunk in reader.chunks(path, n_bytes):
        refuse_unsupported(chunk)
        check_ends_below(chunk, segments[number + 1].base_offset if number + 1 < len(segments) else None)
        yield chunk
