"""Looks up entries in the index files of one segment in place, and appends to them while the segment is active.

format/INDEX.md defines the meaning of the entries, when a batch gets one, and what a look-up may conclude from the
entries. `sanity_check` checks a file by itself; whether its entries match the log is not checked here.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple, NoReturn

import numpy as np

from keytail.errors import CorruptLog, KeytailError
from keytail.format.index import OFFSET_ENTRY, TIME_ENTRY, TXN_ENTRY, parse_txn_index
from keytail.log.fs import FileStat, FileSystem
from keytail.log.index.presized import REBUILD, PresizedIndex


class OffsetEntry(NamedTuple):
    """An entry of an offset index: a batch begins at byte `position`, and `offset` is in that batch or in a later batch
    before the next entry (format/INDEX.md). `slot` is -1 before the first entry."""

    slot: int
    offset: int
    position: int


class TimeEntry(NamedTuple):
    """An entry of a time index: up to the batch that ends with `offset`, no batch has a timestamp above `timestamp_ms`.
    `slot` is -1 before the first entry."""

    slot: int
    timestamp_ms: int
    offset: int


class OffsetIndex(PresizedIndex):
    """The `.index` of the segment with `base_offset`: maps an offset to a batch at or before it."""

    _kind = "offset index"
    _layout = struct.Struct(">ii")
    _columns = ("relative_offset", "position")
    _dtype = OFFSET_ENTRY

    def entry(self, slot: int) -> OffsetEntry:
        """Return the entry of a slot; slot -1 is the start of the segment."""
        if slot < 0:
            return OffsetEntry(-1, self.base_offset, 0)
        relative, position = self._fields(slot)
        return OffsetEntry(slot, self.base_offset + relative, position)

    def lookup(self, offset: int) -> OffsetEntry:
        """Return the entry with the largest offset not above `offset`; (base offset, 0) before the first entry."""
        return self.entry(self._floor(offset - self.base_offset))

    @property
    def last(self) -> OffsetEntry:
        return self.entry(self._count - 1)

    @property
    def is_full(self) -> bool:
        return self._count >= self._max_entries

    def append(self, offset: int, position: int) -> None:
        """Add an entry: the batch that ends with `offset` begins at `position`. Raises KeytailError if the index is
        full or read-only, or if the entry does not ascend or is out of range."""
        self._refuse_read_only()
        if self.is_full:
            self._refuse_full(offset)
        relative = self._relative(offset)
        last = self.last
        if self._count and (offset <= last.offset or position <= last.position):
            self._refuse_order(f"{offset} at {position} cannot follow {last.offset} at {last.position}", offset)
        self._append(relative, position)

    def _goes_back(self, second: np.ndarray) -> np.ndarray:
        return second[1:] <= second[:-1]


class TimeIndex(PresizedIndex):
    """The `.timeindex` of the segment with `base_offset`: maps a timestamp to an offset at which a search begins."""

    _kind = "time index"
    _layout = struct.Struct(">qi")
    _columns = ("timestamp_ms", "relative_offset")
    _dtype = TIME_ENTRY

    def entry(self, slot: int) -> TimeEntry:
        """Return the entry of a slot; slot -1 is the start of the segment, with timestamp -1."""
        if slot < 0:
            return TimeEntry(-1, -1, self.base_offset)
        timestamp_ms, relative = self._fields(slot)
        return TimeEntry(slot, timestamp_ms, self.base_offset + relative)

    def lookup(self, timestamp_ms: int) -> TimeEntry:
        """Return the entry with the largest timestamp not above `timestamp_ms`; (-1, base offset) before the first
        entry."""
        return self.entry(self._floor(timestamp_ms))

    @property
    def last(self) -> TimeEntry:
        return self.entry(self._count - 1)

    @property
    def is_full(self) -> bool:
        """Whether there is room only for the entry that closes the segment, for which the last slot is reserved."""
        return self._count >= self._max_entries - 1

    def maybe_append(self, timestamp_ms: int, offset: int, *, closing: bool = False) -> bool:
        """Write an entry if its timestamp is above that of the last entry; return whether the entry was written.

        Raises KeytailError if the timestamp or offset is below that of the last entry or out of range, or if the index
        is full or read-only; the `closing` entry of the segment may use the last slot.
        """
        self._refuse_read_only()
        if self.is_full and not closing:
            self._refuse_full(offset)
        last = self.last
        if self._count and (offset < last.offset or timestamp_ms < last.timestamp_ms):
            self._refuse_order(
                f"{timestamp_ms} at offset {offset} cannot follow {last.timestamp_ms} at offset {last.offset}", offset
            )
        if timestamp_ms <= last.timestamp_ms:
            return False
        if self._count >= self._max_entries:
            self._refuse_full(offset)
        self._append(timestamp_ms, self._relative(offset))
        return True

    def _goes_back(self, second: np.ndarray) -> np.ndarray:
        return second[1:] < second[:-1]


assert (OffsetIndex._layout.size, TimeIndex._layout.size) == (OFFSET_ENTRY.itemsize, TIME_ENTRY.itemsize)


class AbortedTransaction(NamedTuple):
    """An entry of a transaction index."""

    producer_id: int
    first_offset: int
    last_offset: int  # offset of the ABORT marker
    last_stable_offset: int


class TransactionIndex:
    """The `.txnindex` of the segment with `base_offset`: the transactions whose ABORT marker is in the segment.

    The file is read as a whole, since it is small and never presized. The file is created with the first entry, with
    the attributes of `like`; without `like` the index can only be used for look-ups.
    """

    def __init__(self, fs: FileSystem, path: str, base_offset: int, like: FileStat | None = None) -> None:
        """Read the file if it exists."""
        self.path = path
        self.base_offset = base_offset
        self._fs = fs
        self._like = like
        self._data = bytearray(fs.read_bytes(path)) if fs.exists(path) else bytearray()

    def __len__(self) -> int:
        return len(self._data) // TXN_ENTRY.itemsize

    def entries(self) -> np.ndarray:
        """Return a copy of the entries, as `format.index.parse_txn_index` does."""
        return parse_txn_index(bytes(self._data))

    @property
    def last_offset(self) -> int:
        """The last offset of the last entry; -1 if there is none."""
        end = len(self) * TXN_ENTRY.itemsize
        last = parse_txn_index(bytes(self._data[max(end - TXN_ENTRY.itemsize, 0) : end]))
        return int(last["last_offset"][0]) if end else -1

    def append(self, aborted: AbortedTransaction) -> None:
        """Append an entry to the file. Raises KeytailError if the entry's marker is not above the marker of the last
        entry, or if there is no `like`."""
        last_offset = self.last_offset
        if aborted.last_offset <= last_offset:
            self._refuse(f"marker {aborted.last_offset} cannot follow {last_offset}", aborted.last_offset)
        if self._like is None:
            self._refuse("this index is read-only", aborted.last_offset)
        if not self._fs.exists(self.path):
            self._fs.close(self._fs.create(self.path, self._like))
        entry = np.array([(0, *aborted)], TXN_ENTRY).tobytes()
        self._change(lambda fd: self._fs.write_at(fd, entry, len(self) * TXN_ENTRY.itemsize))
        self._data[len(self) * TXN_ENTRY.itemsize :] = entry

    def collect(self, fetch_from: int, upper: int) -> tuple[list[AbortedTransaction], bool]:
        """Return the aborted transactions that a consumer needs for the offsets from `fetch_from` to `upper` - 1.

        Also return whether the list is complete; if the list is not complete, the search continues in the next segment
        (format/INDEX.md, "Look-ups").
        """
        entries = self.entries()
        beyond = np.flatnonzero(entries["last_stable_offset"] >= upper)
        if len(beyond):
            entries = entries[: beyond[0] + 1]
        needed = entries[(entries["last_offset"] >= fetch_from) & (entries["first_offset"] < upper)]
        return [AbortedTransaction(*entry[1:]) for entry in needed.tolist()], bool(len(beyond))

    def flush(self) -> None:
        """Make the entries durable."""
        if self._data:
            self._change(self._fs.fsync)

    def sanity_check(self) -> None:
        """Raise CorruptLog at the first slot that cannot belong to this segment or cannot follow the previous slot."""
        entries = self.entries()
        last = entries["last_offset"]
        bad = (entries["version"] != 0) | (last < self.base_offset) | (entries["first_offset"] > last)
        bad[1:] |= last[1:] <= last[:-1]
        slot = int(np.argmax(bad)) if bad.any() else len(self)
        if slot == len(self) and len(self._data) % TXN_ENTRY.itemsize == 0:
            return
        what = f"{len(self._data) % TXN_ENTRY.itemsize} bytes after slot {slot - 1} are not a complete entry"
        if slot < len(self):
            values = zip(entries.dtype.names or (), entries[slot].tolist(), strict=True)
            what = f"slot {slot} has " + ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in values)
            before = f" after last offset {last[slot - 1]}" if slot else ""
            what += before or f" in a segment with base offset {self.base_offset}"
        raise CorruptLog(
            f"transaction index: {what}",
            path=self.path,
            byte_position=slot * TXN_ENTRY.itemsize,
            remedy=REBUILD,
            slug="invalid-index",
        )

    def _change(self, action: Callable[[int], object]) -> None:
        fd = self._fs.open_write(self.path)
        try:
            action(fd)
        finally:
            self._fs.close(fd)

    def _refuse(self, what: str, offset: int) -> NoReturn:
        raise KeytailError(
            f"transaction index: {what}",
            path=self.path,
            offset=offset,
            remedy="Nothing was written",
            slug="index-append-failed",
        )
