"""A file system in a dictionary, for parsers that open files by name: it allows thousands of logs per second, without a
disk.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

from keytail.log.fs import DirEntry, FileStat, FileSystem

MTIME_NS = 1_700_000_000_000 * 10**6


class InMemory(FileSystem):
    """A read-only file system. `files` has bytes by path; directories are the prefixes of paths."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__()
        self.files = files
        self._open: dict[int, bytes] = {}
        self._next = 1000

    def unreadable(self, path: str) -> list[str]:
        return []

    def scan(self, path: str) -> list[DirEntry]:
        inside = [(name, data) for name, data in self.files.items() if os.path.dirname(name) == path]
        return [
            DirEntry(os.path.basename(name), False, len(data), MTIME_NS, 1, True, uid=0, gid=0, mode=0o644)
            for name, data in inside
        ]

    def stat(self, path: str) -> FileStat:
        if path not in self.files:
            raise FileNotFoundError(2, "No such file or directory", path)
        return FileStat(path, len(self.files[path]), MTIME_NS, 0, 0, 0o644, 1, 1, False, True)

    def size(self, path: str) -> int:
        return self.stat(path).size_bytes

    def exists(self, path: str) -> bool:
        return path in self.files

    def open_read(self, path: str) -> int:
        if path not in self.files:
            raise FileNotFoundError(2, "No such file or directory", path)
        self._next += 1
        self._open[self._next] = self.files[path]
        self._path_of[self._next] = path
        return self._next

    def read_into(self, fd: int, buffer: Any, position: int) -> int:
        view = memoryview(buffer).cast("B")
        data = self._open[fd][position : position + len(view)]
        view[: len(data)] = data
        return len(data)

    def read_bytes(self, path: str, *, whole: bool = False) -> bytes:
        fd = self.open_read(path)
        try:
            return self._open[fd]
        finally:
            self.close(fd)

    def fd_stat(self, fd: int) -> FileStat:
        return self.stat(self._path_of[fd])

    def fd_size(self, fd: int) -> int:
        return len(self._open[fd])

    def map_read(self, fd: int, size_bytes: int) -> mmap.mmap:
        view = mmap.mmap(-1, size_bytes)
        view[:] = self._open[fd][:size_bytes]
        return view

    def close(self, fd: int) -> None:
        self._path_of.pop(fd, None)
        del self._open[fd]
