"""Finds the end of a log file by reading batch headers from the last index entry's position on. Reads no records."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, field

from keytail.errors import CorruptLog
from keytail.format import names
from keytail.format.batch import BATCH_HEADER, HEADER_BYTES, LENGTH_PREFIX_BYTES, MIN_RECORD_OVERHEAD_BYTES
from keytail.format.index import OFFSET_ENTRY
from keytail.log.fs import FileSystem

_WALK_WINDOW_BYTES = 1 << 16
_PREFIX, _INT32, _INDEX_ENTRY = struct.Struct(">qi"), struct.Struct(">i"), struct.Struct(">ii")
_MAGIC_AT, _DELTA_AT = 16, 23
assert BATCH_HEADER.fields is not None
assert BATCH_HEADER.fields["magic"][1] == _MAGIC_AT
assert BATCH_HEADER.fields["last_offset_delta"][1] == _DELTA_AT
assert _INDEX_ENTRY.size == OFFSET_ENTRY.itemsize


@dataclass(frozen=True, slots=True)
class LogEnd:
    """The end of the whole batches of a log file, of which only headers are read: the next offset, and the byte
    position."""

    next_offset: int
    end_position: int
    tail_bytes: int  # bytes after the last whole batch
    last_position: int = field(default=-1, compare=False)  # position of the last whole batch; -1 if there is none


def log_end(fs: FileSystem, log_path: str, base_offset: int, index_path: str | None = None) -> LogEnd:
    """Return the end of a log file, found by reading headers from the position of its last index entry to the end of
    the file.

    The index (by default that of this log) only saves reading: if no batch begins at the position of its last entry, or
    the batches from that position on end below the entry's offset, headers are read from the start of the file.
    `tail_bytes` includes an incomplete last batch, and bytes that are not a batch.
    """
    if index_path is None:
        index_path = os.path.join(os.path.dirname(log_path), names.segment_file(base_offset, names.INDEX))
    fd = fs.open_read(log_path)
    try:
        size_bytes = fs.fd_size(fd)
        entry = _last_index_entry(fs, index_path)
        if entry is not None and 0 < entry[1] < size_bytes:
            end = _walk(fs, log_path, fd, size_bytes, entry[1], base_offset, entry_offset=base_offset + entry[0])
            if end is not None:
                return end
        return _walk(fs, log_path, fd, size_bytes, 0, base_offset) or LogEnd(base_offset, 0, size_bytes)
    finally:
        fs.close(fd)


def _last_index_entry(fs: FileSystem, path: str) -> tuple[int, int] | None:
    """Return the relative offset and the position of the last entry of an offset index, or None if there is none."""
    try:
        fd = fs.open_read(path)
    except FileNotFoundError:
        return None
    try:
        count, data = fs.fd_size(fd) // _INDEX_ENTRY.size, bytearray(_INDEX_ENTRY.size)
        if count == 0 or fs.read_into(fd, data, (count - 1) * _INDEX_ENTRY.size) != _INDEX_ENTRY.size:
            return None
    finally:
        fs.close(fd)
    return _INDEX_ENTRY.unpack(data)


def _walk(
    fs: FileSystem,
    log_path: str,
    fd: int,
    size_bytes: int,
    position: int,
    base_offset: int,
    *,
    entry_offset: int | None = None,
) -> LogEnd | None:
    """Follow the headers from `position` on and return the end of the whole batches. Return None if the first batch
    begins above the index entry's offset, or all batches end below it. (The batch with the entry's offset may follow
    the batch at the entry's position: format/INDEX.md, 8.)"""
    window, window_at, got = bytearray(min(_WALK_WINDOW_BYTES, size_bytes - position)), 0, 0
    next_offset, first, last_position = base_offset, True, -1
    while position + LENGTH_PREFIX_BYTES + MIN_RECORD_OVERHEAD_BYTES <= size_bytes:
        if not window_at <= position <= window_at + got - HEADER_BYTES:
            window_at, got = position, fs.read_into(fd, window, position)
            if got < min(len(window), size_bytes - position):
                raise CorruptLog(
                    f"the file became shorter while it was read: {position + got} of {size_bytes} bytes",
                    path=log_path,
                    byte_position=position + got,
                    remedy="Another process writes to this directory: stop it, then run again",
                    slug="file-became-shorter",
                )
        at = position - window_at
        offset, length = _PREFIX.unpack_from(window, at)
        end = position + LENGTH_PREFIX_BYTES + length
        if length < MIN_RECORD_OVERHEAD_BYTES or end > size_bytes or offset < next_offset:
            break
        last_offset = offset
        if window[at + _MAGIC_AT] >= 2:
            if length + LENGTH_PREFIX_BYTES < HEADER_BYTES:
                break
            last_offset += _INT32.unpack_from(window, at + _DELTA_AT)[0]
        if not offset <= last_offset < names.MAX_OFFSET:
            break
        if first and entry_offset is not None and offset > entry_offset:
            break
        next_offset, last_position, position, first = last_offset + 1, position, end, False
    if entry_offset is not None and (first or next_offset <= entry_offset):
        return None
    return LogEnd(next_offset, position, size_bytes - position, last_position)
