"""Copies a whole file durably."""

from __future__ import annotations

from keytail.errors import WRITTEN_TO, KeytailError
from keytail.log.fs import FileStat, FileSystem

_BUFFER_BYTES = 4 << 20


def copy_file(fs: FileSystem, source: str, target: str, like: FileStat | None) -> int:
    """Copy `source` to a new file, with the mtime of the source and the owner and mode of `like`; return its size in
    bytes. The contents of the copy are durable, its name is not. Raises KeytailError if the source becomes shorter
    during the copy."""
    stat = fs.stat(source)
    buffer = memoryview(bytearray(min(_BUFFER_BYTES, max(stat.size_bytes, 1))))
    reading = fs.open_read(source)
    try:
        writing = fs.create(target, like)
        try:
            position = 0
            while position < stat.size_bytes:
                count = fs.read_into(reading, buffer[: stat.size_bytes - position], position)
                if count == 0:
                    raise KeytailError(
                        "the file became shorter while it was copied",
                        path=source,
                        remedy=WRITTEN_TO,
                        slug="file-became-shorter",
                    )
                fs.write(writing, buffer[:count])
                position += count
            fs.set_mtime_ns(target, stat.mtime_ns)
            fs.fsync(writing)
        finally:
            fs.close(writing)
    finally:
        fs.close(reading)
    return position
