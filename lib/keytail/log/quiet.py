"""Reads and writes beside a running broker: keeps the page cache as it was, and yields to other disk requests.

A broker serves most fetches from the page cache. A preparation reads each segment several times, and would replace the
pages that the broker's consumers need by pages of old segments. Therefore, pages that were not cached when a file was
first read are dropped after each read, and pages of written files are dropped once the files are durable. So each of
these reads is from the disk.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from typing import Any

import numpy as np

from keytail.log.fs import FileSystem
from keytail.log.pace import Pace, PacedFileSystem

PAGE_BYTES = mmap.PAGESIZE
_UNLIMITED = 1 << 62
_MAX_BLOCK_PAGES = 512  # the largest block of the page cache, in Linux with pages of 4 KiB

# ioprio_set(2): the number of the system call, the threads to which the priority applies, and the class of processes
# that get the disk only when no other process wants it.
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_OF_THIS_THREAD = (1, 0)
_IDLE_CLASS = 3 << 13


class QuietFileSystem(PacedFileSystem):
    """The real file system, with `read_into` and writes that leave the page cache as it was; with a rate limit if there
    is a `pace`."""

    def __init__(self, pace: Pace | None = None) -> None:
        super().__init__(pace or Pace(_UNLIMITED))
        self._cached: dict[int, np.ndarray] = {}  # pages that were cached before the first read, by descriptor

    def read_into(self, fd: int, buffer: Any, position: int) -> int:
        before = self._cached.get(fd)
        if before is None:
            # The whole file is examined, because the system may read ahead in spite of the advice below, if an earlier
            # reader marked a page for read-ahead: such pages would count as cached before the next read.
            before = self._cached[fd] = cached_pages(fd, 0, os.fstat(fd).st_size)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        count = super().read_into(fd, buffer, position)
        # Pages that were read ahead are in blocks, which are dropped only as a whole; a block may begin before
        # `position`.
        first = max(0, position // PAGE_BYTES - _MAX_BLOCK_PAGES)
        end = -(-(position + count) // PAGE_BYTES)
        _drop(fd, first * PAGE_BYTES, ~before[first:end])
        return count

    def close(self, fd: int) -> None:
        self._cached.pop(fd, None)
        super().close(fd)

    def fsync(self, fd: int) -> None:
        super().fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def cached_pages(fd: int, position: int, size_bytes: int) -> np.ndarray:
    """Return a bool array: for each page of the range of `size_bytes` bytes at `position`, whether the page is in the
    page cache.

    Pages beyond the end of the file are not cached. All pages count as cached if the system does not report cached
    pages: mincore(2) reports them only to users who may write to the file.
    """
    start = position - position % PAGE_BYTES
    end = min(position + size_bytes, os.fstat(fd).st_size)
    pages = -(-(position + size_bytes - start) // PAGE_BYTES)
    found = np.zeros(max(pages, 0), np.uint8)
    if end <= start:
        return found.astype(bool)
    within = -(-(end - start) // PAGE_BYTES)
    with mmap.mmap(fd, end - start, mmap.MAP_SHARED, mmap.PROT_READ, offset=start) as mapping:
        view = np.frombuffer(mapping, np.uint8)  # only the address of the view is used: its bytes are not read
        status = ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(end - start), ctypes.c_void_p(found.ctypes.data)
        )
        del view
    if status:
        found[:within] = 1
    return (found & 1).astype(bool)


def cached_share(fs: FileSystem, path: str, most_bytes: int) -> float:
    """Return the share of the first `most_bytes` of a file that is in the page cache; 1 for an empty file, and where
    the system does not tell, as on file systems whose files cannot be mapped."""
    fd = fs.open_read(path)
    try:
        size_bytes = min(most_bytes, os.fstat(fd).st_size)
        return float(cached_pages(fd, 0, size_bytes).mean()) if size_bytes else 1.0
    except (OSError, ValueError):  # ValueError: the file became shorter
        return 1.0
    finally:
        fs.close(fd)


def _drop(fd: int, start: int, pages: np.ndarray) -> None:
    """Drop from the page cache those pages of a file, from byte `start` on, for which `pages` (bool) is true."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], pages, [False])).astype(np.int8)))
    for first, end in edges.reshape(-1, 2):
        length = int(end - first) * PAGE_BYTES
        os.posix_fadvise(fd, start + int(first) * PAGE_BYTES, length, os.POSIX_FADV_DONTNEED)


def let_others_go_first() -> bool:
    """Set the idle disk priority for this thread and threads that it starts; return whether the system supports it.
    Some I/O schedulers ignore this priority."""
    number = _IOPRIO_SET.get(platform.machine())
    if number is None:
        return False
    return ctypes.CDLL(None, use_errno=True).syscall(number, *_OF_THIS_THREAD, _IDLE_CLASS) == 0
