"""Checks whether index files of a segment that differ from those of a recovery are nevertheless valid for its log.

A broker that was restarted while a segment was active, or that ran with another `index.interval.bytes`, leaves other
entries than a recovery does, and so does Kafka before 4.0; all of these entries are valid (format/INDEX.md, 2 and 8).
An index is wrong if look-ups give wrong results, or have to read much of the log.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from keytail.errors import CorruptLog, Refused
from keytail.format.index import OFFSET_ENTRY, TIME_ENTRY, parse_offset_index, parse_time_index
from keytail.log.records.chunk import SegmentReader
from keytail.log.records.opening import Chunk
from keytail.log.records.scan import RecordScanner

# An index is incomplete if more consecutive bytes of the log than this have no entry, and more than _INTERVALS times
# the sum of the interval and the largest batch.
UNINDEXED_BYTES = 1 << 20
_INTERVALS = 4


def why_wrong(
    offset_index: bytes,
    time_index: bytes,
    chunks: Iterable[Chunk],
    reader: SegmentReader,
    *,
    base_offset: int,
    index_interval_bytes: int,
    is_in_use: bool,
) -> tuple[str, str]:
    """Return what is wrong with the offset index and the time index, according to the batches of the segment; "" for a
    valid file. `reader` reads `chunks`.

    `is_in_use`: a broker writes to the segment, so its index files have room after their entries, and the time index
    lacks the closing entry.
    """
    offsets = _OffsetEntries(
        parse_offset_index(_used(offset_index, OFFSET_ENTRY, is_in_use)), "position", "relative_offset"
    )
    times = _TimeEntries(parse_time_index(_used(time_index, TIME_ENTRY, is_in_use)), "relative_offset", "timestamp_ms")
    offsets.why = _why_not_whole(offset_index, OFFSET_ENTRY) or offsets.why_not_rising()
    times.why = _why_not_whole(time_index, TIME_ENTRY) or times.why_not_rising()
    largest_ms, largest_batch_bytes, end = -1, 0, 0
    for chunk in chunks:
        table = chunk.table
        reached = np.maximum.accumulate(np.maximum(table["max_timestamp_ms"], largest_ms))
        rises = np.diff(reached, prepend=largest_ms) > 0
        batches = _Batches(chunk, base_offset, reached, rises)
        offsets.take(batches)
        times.take(batches)
        batches.open(reader, np.concatenate([offsets.inside, times.inside]))
        offsets.compare(batches)
        times.compare(batches)
        largest_ms = int(reached[-1])
        largest_batch_bytes = max(largest_batch_bytes, int(table["size_bytes"].max()))
        end = chunk.position + len(chunk.raw)
    offsets.finish()
    times.finish()
    if not offsets.why:
        gap = int(np.diff([0, *offsets.keys.tolist(), end]).max())
        if gap > max(UNINDEXED_BYTES, _INTERVALS * (index_interval_bytes + largest_batch_bytes)):
            offsets.why = f"{gap} bytes of the log have no entry"
    if not times.why and not is_in_use:
        last_ms = int(times.values[-1]) if len(times.values) else -1
        if last_ms != largest_ms:
            times.why = f"its last timestamp is {last_ms}, but the largest timestamp of the log is {largest_ms}"
    return offsets.why, times.why


class _Batches:
    """The batches of a chunk with relative offsets, and the records inside of batches to which index entries refer.

    `reached`: the largest timestamp up to each batch; `rises`: whether the batch reached it first.
    """

    def __init__(self, chunk: Chunk, base_offset: int, reached: np.ndarray, rises: np.ndarray) -> None:
        table = chunk.table
        self.chunk, self.reached, self.rises = chunk, reached, rises
        self.positions = table["position"]
        self.first = table["base_offset"] - base_offset
        self.last = table["last_offset"] - base_offset
        self._base_offset = base_offset
        self._is_open = False
        self._last_record = self.last.copy()
        self._offsets = self._times_ms = np.empty(0, np.int64)

    def rows_of(self, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the row that contains or follows each offset (the last row if there is none), and whether the offset
        is inside the batch, not at its end.

        An index entry for a message of magic 0 or 1 has the message's last offset, never an offset inside.
        """
        rows = np.minimum(np.searchsorted(self.last, offsets), len(self.last) - 1)
        is_inside = (self.first[rows] <= offsets) & (offsets < self.last[rows])
        return rows, is_inside & (self.chunk.table["magic"][rows] == 2)

    def open(self, reader: SegmentReader, offsets: np.ndarray) -> None:
        """Find the records at these offsets. If a batch cannot be opened, no offset inside of a batch is checked."""
        if not len(offsets):
            return
        wanted = np.zeros(len(self.last), bool)
        wanted[self.rows_of(offsets)[0]] = True
        found, times_ms, scanner = [self._offsets], [self._offsets], RecordScanner()
        try:
            for opened in reader.open_rows(self.chunk, wanted):
                for portion in scanner.portions(self.chunk, opened):
                    at = portion.records["offset"] - self._base_offset
                    # Of several records of a batch, the last assignment counts.
                    self._last_record[portion.records["row"]] = at
                    named = np.isin(at, offsets)
                    found.append(at[named])
                    times_ms.append(portion.records["timestamp_ms"][named])
        except (CorruptLog, Refused):
            return
        self._offsets, self._times_ms, self._is_open = np.concatenate(found), np.concatenate(times_ms), True

    def end_with(self, offsets: np.ndarray) -> np.ndarray:
        """Return whether each offset is the last offset of a batch, or of the records in a batch (bool array)."""
        rows, inside = self.rows_of(offsets)
        if self._is_open:
            inside &= self._last_record[rows] == offsets
        return (self.last[rows] == offsets) | inside

    def have(self, offsets: np.ndarray, times_ms: np.ndarray) -> np.ndarray:
        """Return for each offset whether it is the last offset of a batch, or of a record with its item of `times_ms`
        as timestamp (bool array). If batches could not be opened, no record is compared."""
        rows, inside = self.rows_of(offsets)
        if self._is_open and len(self._offsets):
            at = np.minimum(np.searchsorted(self._offsets, offsets), len(self._offsets) - 1)
            inside &= (self._offsets[at] == offsets) & (self._times_ms[at] == times_ms)
        elif self._is_open:
            inside &= False
        return (self.last[rows] == offsets) | inside


class _Entries:
    """The entries of one index. `take` selects the entries for a chunk, and of these the offsets inside of a batch, not
    at its end (`inside`); `compare` sets `why` to the problem of the first wrong entry."""

    def __init__(self, entries: np.ndarray, key: str, value: str) -> None:
        self.keys = entries[key].astype(np.int64)
        self.values = entries[value].astype(np.int64)
        self.why = ""
        self.inside = np.empty(0, np.int64)
        self._own = slice(0, 0)

    def why_not_rising(self) -> str:
        falls = np.zeros(len(self.keys), bool)
        for column in (self.keys, self.values):
            falls |= np.diff(column, prepend=-1) <= 0
        # The first entry may have relative offset 0 or timestamp 0.
        return f"entry {int(np.argmax(falls))} is not in ascending order" if falls.any() else ""

    def _advance(self, last_key: int) -> None:
        end = int(np.searchsorted(self.keys, last_key, side="right"))
        self._own = slice(self._own.stop, max(end, self._own.stop))

    def _note_wrong(self, wrong: np.ndarray, first: int, what: str) -> None:
        """Set `why` for the first true element of `wrong`, which covers the entries from number `first` on."""
        if not self.why and wrong.any():
            number = first + int(np.argmax(wrong))
            key, value = int(self.keys[number]), int(self.values[number])
            self.why = f"entry {number} is wrong: {what.format(key=key, value=value)}"

    def finish(self) -> None:
        if not self.why and self._own.stop < len(self.keys):
            self.why = f"entry {self._own.stop} is after the last batch"


class _OffsetEntries(_Entries):
    """Offset index entries, by position. Each entry has the last offset of the batch at its position, or of a later
    batch before the next entry's position."""

    def __init__(self, entries: np.ndarray, key: str, value: str) -> None:
        super().__init__(entries, key, value)
        self._waits = False  # whether the last entry so far has an offset after the batches so far

    def take(self, batches: _Batches) -> None:
        self._advance(int(batches.positions[-1]))
        offsets = self.values[self._own.start - self._waits : self._own.stop]
        self.inside = offsets[batches.rows_of(offsets)[1]][: 0 if self.why else None]

    def compare(self, batches: _Batches) -> None:
        if self.why:
            return
        begins = np.searchsorted(batches.positions, self.keys[self._own])
        misplaced = batches.positions[begins] != self.keys[self._own]
        self._note_wrong(misplaced, self._own.start, "no batch begins at byte position {key}")
        first = self._own.start - self._waits
        offsets = self.values[first : self._own.stop]
        if self._waits:
            begins = np.concatenate([[0], begins])
        ends = np.append(begins[1:], len(batches.last))
        rows = np.searchsorted(batches.last, offsets)
        waits = rows == len(batches.last)
        waits[:-1] = False
        wrong = (rows < begins) | (rows >= ends) | ~batches.end_with(offsets)
        what = "no batch from byte position {key} to the next entry ends with relative offset {value}"
        self._note_wrong(wrong & ~waits, first, what)
        self._waits = bool(waits.any())

    def finish(self) -> None:
        super().finish()
        if not self.why and self._waits:
            self.why = f"entry {len(self.keys) - 1} has a relative offset after the last batch: {self.values[-1]}"


class _TimeEntries(_Entries):
    """Time index entries, by offset. Each entry has the largest timestamp so far, and the last offset of the batch in
    which that timestamp first occurs, or the offset of the record that has it."""

    def take(self, batches: _Batches) -> None:
        self._advance(int(batches.last[-1]))
        offsets = self.keys[self._own]
        self.inside = offsets[batches.rows_of(offsets)[1]][: 0 if self.why else None]

    def compare(self, batches: _Batches) -> None:
        if self.why:
            return
        offsets, times_ms = self.keys[self._own], self.values[self._own]
        rows, _ = batches.rows_of(offsets)
        wrong = (batches.reached[rows] != times_ms) | ~batches.rises[rows] | ~batches.have(offsets, times_ms)
        self._note_wrong(wrong, self._own.start, "the largest timestamp up to relative offset {key} is not {value}")


def _used(data: bytes, entry: np.dtype, is_in_use: bool) -> bytes:
    if not is_in_use or len(data) <= entry.itemsize:
        return data
    return data[: -(-len(data.rstrip(b"\0")) // entry.itemsize) * entry.itemsize]


def _why_not_whole(data: bytes, entry: np.dtype) -> str:
    rest = len(data) % entry.itemsize
    return f"its size of {len(data)} bytes is not a multiple of {entry.itemsize}" if rest else ""
