"""Reads and writes an index file of one segment, which is preallocated while the segment is active.

The offset and the time index share this code; log/index/files.py and format/INDEX.md define their entries.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from mmap import mmap
from types import TracebackType
from typing import ClassVar, NoReturn, Self

import numpy as np

from keytail.errors import CorruptLog, KeytailError
from keytail.format.index import MAX_RELATIVE_OFFSET, parse_entries
from keytail.log.fs import FileStat, FileSystem

REBUILD = "Rebuild the indexes of the segment with `keytail rebuild-index`"
CLOSE_FIRST = "Nothing was written; close the segment and start the next one"


class PresizedIndex:
    """Base class of the offset and the time index: a preallocated file of fixed-size entries, ascending by their first
    field.

    Created by `open` (read-only) or `open_for_append`; a context manager that closes the file.
    """

    _kind: ClassVar[str]
    _layout: ClassVar[struct.Struct]
    _columns: ClassVar[tuple[str, str]]
    _dtype: ClassVar[np.dtype]

    def __init__(self, fs: FileSystem, path: str, base_offset: int) -> None:
        self.path = path
        self.base_offset = base_offset
        self._fs = fs
        self._fd = -1
        self._view: mmap | bytes = b""
        self._count = 0
        self._odd_bytes = 0
        self._max_entries = 0

    @classmethod
    def open(cls, fs: FileSystem, path: str, base_offset: int, *, active: bool = False) -> Self:
        """Open the file for look-ups: all whole entries are mapped, without validation.

        `active`: a broker may be writing to the segment. In this case the zeros after the entries are left out, and the
        file is read, not mapped, since the broker truncates the file when the segment is closed.
        """
        index = cls(fs, path, base_offset)
        fd = fs.open_read(path)
        try:
            size_bytes = fs.fd_stat(fd).size_bytes
            index._count, index._odd_bytes = divmod(size_bytes, cls._layout.size)
            if active:
                index._read_used(fd)
            elif index._count:
                index._view = fs.map_read(fd, index._count * cls._layout.size)
        finally:
            fs.close(fd)
        return index

    @classmethod
    def open_for_append(cls, fs: FileSystem, path: str, base_offset: int, max_index_bytes: int, like: FileStat) -> Self:
        """Open the index of the active segment and extend it to its full size; a missing file is created with the owner
        and mode of `like`.

        The full size is `segment.index.bytes`, rounded down to whole entries; the zeros after the entries take no
        space. The name of a new file is not durable yet. Raises CorruptLog if the file cannot be continued, because the
        file was not trimmed (zeros cannot be distinguished from entries) or fails `sanity_check`.
        """
        index = cls(fs, path, base_offset)
        if not fs.exists(path):
            fs.close(fs.create(path, like))
        index._fd = fs.open_write(path)
        try:
            size_bytes = fs.fd_stat(index._fd).size_bytes
            index._count, index._odd_bytes = divmod(size_bytes, cls._layout.size)
            index._map(size_bytes)
            index.sanity_check()
            index._max_entries = max(max_index_bytes // cls._layout.size, index._count)
            full_bytes = index._max_entries * cls._layout.size
            fs.truncate(index._fd, full_bytes)
            index._map(full_bytes)
        except BaseException:
            index.close()
            raise
        return index

    def __len__(self) -> int:
        return self._count

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def max_entries(self) -> int:
        """The number of entries that the file has room for; 0 if the index is read-only."""
        return self._max_entries

    @property
    def used(self) -> int:
        """The number of entries, without the zeros at the end of a file that was not trimmed."""
        return _before_zeros(self._count, lambda slot: self._fields(slot) == (0, 0))

    def entries(self) -> np.ndarray:
        """Return a copy of the entries, with the fields of `_dtype` in native byte order."""
        return parse_entries(self._view[: self._count * self._layout.size], self._dtype)

    def append_rows(self, rows: np.ndarray) -> None:
        """Append entries (int64[n, 2]: the columns as stored) in one write.

        Raises KeytailError, and writes nothing, if the entries do not all fit or do not ascend, or if the index is
        read-only.
        """
        self._refuse_read_only()
        if not len(rows):
            return
        if self._count + len(rows) > self._max_entries:
            self._refuse_full(None)
        first, second = rows[:, 0], rows[:, 1]
        if self._count:
            last = self._fields(self._count - 1)
            first, second = np.append(last[0], first), np.append(last[1], second)
        bad = (first[1:] <= first[:-1]) | self._goes_back(second)
        if bad.any():
            slot = int(np.argmax(bad))
            self._refuse_order(f"{first[slot + 1]} cannot follow {first[slot]}", None)
        packed = np.empty(len(rows), self._dtype)
        for column, name in enumerate(self._columns):
            packed[name] = rows[:, column]
        self._fs.write_at(self._fd, packed.tobytes(), self._count * self._layout.size)
        self._count += len(rows)

    def flush(self) -> None:
        """Make the entries durable."""
        self._refuse_read_only()
        self._fs.fsync(self._fd)

    def trim(self) -> None:
        """Truncate the file of a closed segment to its entries, durably. The index then serves look-ups only."""
        self._refuse_read_only()
        size_bytes = self._count * self._layout.size
        self._map(size_bytes)
        self._fs.truncate(self._fd, size_bytes)
        self._fs.fsync(self._fd)
        self._max_entries = 0
        self._close_file()

    def close(self) -> None:
        """Close the file without a change; the file of an active segment keeps its full size."""
        self._map(0)
        self._count = self._max_entries = 0
        if self._fd >= 0:
            self._close_file()

    def sanity_check(self) -> None:
        """Raise CorruptLog at the first slot that cannot follow the previous slot, or at an incomplete last entry."""
        if self._odd_bytes:
            at = self._count * self._layout.size
            self._corrupt(f"{self._odd_bytes} bytes after slot {self._count - 1} are not a complete entry", at)
        entries = self.entries()
        first, second = (entries[name] for name in self._columns)
        bad = (first < 0) | (second < 0)
        bad[1:] |= (first[1:] <= first[:-1]) | self._goes_back(second)
        if not bad.any():
            return
        # The first slot that does not ascend is the first zero, or slot 1 if all are zeros: the file was not trimmed.
        slot = int(np.argmax(bad))
        used = self.used
        if 0 < used == slot or (used == 0 and slot == 1):
            self._corrupt(
                f"{self._count - used} entries from slot {used} on are zeros: the file was not trimmed",
                used * self._layout.size,
            )
        text = f"slot {slot} has {self._spell(slot)}"
        self._corrupt(f"{text} after {self._spell(slot - 1)}" if slot else text, slot * self._layout.size)

    def _goes_back(self, second: np.ndarray) -> np.ndarray:
        """Return for each entry but the first whether its second field cannot follow the second field of the previous
        entry."""
        raise NotImplementedError

    def _fields(self, slot: int) -> tuple[int, int]:
        first, second = self._layout.unpack_from(self._view, slot * self._layout.size)
        return first, second

    def _floor(self, first_field: int) -> int:
        """Return the last slot whose first field is not above `first_field`; -1 if there is none."""
        return bisect_right(range(self._count), first_field, key=lambda slot: self._fields(slot)[0]) - 1

    def _read_used(self, fd: int) -> None:
        """Read the entries before the zeros without reading the zeros, which are megabytes."""
        item = bytearray(self._layout.size)

        def is_zero(slot: int) -> bool:
            item[:] = bytes(len(item))  # bytes that the broker has just truncated were unused
            self._fs.read_into(fd, item, slot * len(item))
            return not any(item)

        self._count = _before_zeros(self._count, is_zero)
        data = bytearray(self._count * self._layout.size)
        self._view = bytes(data[: self._fs.read_into(fd, data, 0)])
        self._count = len(self._view) // self._layout.size

    def _append(self, first: int, second: int) -> None:
        self._fs.write_at(self._fd, self._layout.pack(first, second), self._count * self._layout.size)
        self._count += 1

    def _relative(self, offset: int) -> int:
        relative = offset - self.base_offset
        if not 0 <= relative <= MAX_RELATIVE_OFFSET:
            self._refuse(
                f"offset {offset} is out of range: an entry holds offsets up to {MAX_RELATIVE_OFFSET} above the base "
                f"offset {self.base_offset}",
                offset,
                CLOSE_FIRST,
            )
        return relative

    def _refuse_read_only(self) -> None:
        if self._fd < 0:
            self._refuse("this index is read-only", None, "Append to the index of the active segment")

    def _refuse_full(self, offset: int | None) -> NoReturn:
        self._refuse(f"the index is full: {self._count} of {self._max_entries} entries", offset, CLOSE_FIRST)

    def _refuse_order(self, what: str, offset: int | None) -> NoReturn:
        self._refuse(what, offset, "Nothing was written; append each batch once, in the order of offsets")

    def _refuse(self, what: str, offset: int | None, remedy: str) -> NoReturn:
        raise KeytailError(
            f"{self._kind}: {what}", path=self.path, offset=offset, remedy=remedy, slug="index-append-failed"
        )

    def _corrupt(self, what: str, byte_position: int) -> NoReturn:
        raise CorruptLog(
            f"{self._kind}: {what}",
            path=self.path,
            byte_position=byte_position,
            remedy=REBUILD,
            slug="invalid-index",
        )

    def _spell(self, slot: int) -> str:
        return ", ".join(
            f"{name.replace('_', ' ')} {value}"
            for name, value in zip(self._columns, self._fields(slot), strict=True)
        )

    def _close_file(self) -> None:
        """Close the file, even if the system reports an error."""
        fd, self._fd = self._fd, -1
        self._fs.close(fd)

    def _map(self, size_bytes: int) -> None:
        view, self._view = self._view, b""
        if isinstance(view, mmap):
            view.close()
        if size_bytes >= self._layout.size:
            self._view = self._fs.map_read(self._fd, size_bytes)


def _before_zeros(count: int, is_zero: Callable[[int], bool]) -> int:
    """Return how many of `count` entries precede the zeros at the end. Only slot 0 may be an entry of zeros."""
    if not count or not is_zero(count - 1):
        return count
    used = bisect_left(range(1, count), True, key=is_zero) + 1
    return 0 if used == 1 and is_zero(0) else used
