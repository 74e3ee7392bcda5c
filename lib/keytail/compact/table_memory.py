"""Allocates anonymous memory for large tables that are probed at random places."""

from __future__ import annotations

import contextlib
import mmap
import sys
import threading

import numpy as np

_HUGE_PAGE_BYTES = 2 << 20
_lock = threading.Lock()
_UNUSED = [object()]  # an object to which nothing else refers, for its reference count
_kept: list[mmap.mmap] = []  # the memory of an earlier table of this process, if there is one


def zeros(n: int, dtype: np.dtype) -> np.ndarray:
    """Return an array of `n` zeros, in huge pages if Linux provides them: with small pages most probes miss the TLB."""
    n_bytes = n * dtype.itemsize
    if n_bytes < _HUGE_PAGE_BYTES:
        return np.zeros(n, dtype)
    return np.frombuffer(_anonymous(n_bytes), dtype, n)


class TableMemory:
    """Memory for a table that grows: each larger table replaces the one before. Two consecutive tables take at most
    `n_bytes`; beyond that, a table gets memory of its own.

    The memory is that of an earlier TableMemory of this process if no array refers to it any more. New memory is slow:
    if the free memory is fragmented, which it is beside a large page cache, Linux first moves pages to make huge ones
    (100 MB took 0.2 s, and 0.01 s when used again).
    """

    def __init__(self, n_bytes: int) -> None:
        self._n_bytes = n_bytes
        self._memory: mmap.mmap | None = None
        if n_bytes >= _HUGE_PAGE_BYTES:
            with contextlib.suppress(OSError):  # a limit refuses so many bytes at once; the tables may be smaller
                self._memory = _memory_of_process(n_bytes)
        self._begin = self._end = 0  # the place of the current table

    def zeros(self, n: int, dtype: np.dtype) -> np.ndarray:
        """Return an array of `n` zeros. The array before the previous one becomes invalid."""
        n_bytes = n * dtype.itemsize
        last = (self._n_bytes - n_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if self._memory is None or (n_bytes > self._begin and last < self._end):
            self._begin = self._end = 0
            return zeros(n, dtype)
        begin = 0 if n_bytes <= self._begin else last
        self._begin, self._end = begin, begin + n_bytes
        table = np.frombuffer(self._memory, dtype, n, begin)
        table[:] = 0
        return table


def _memory_of_process(n_bytes: int) -> mmap.mmap:
    with _lock:
        if not _kept or len(_kept[0]) < n_bytes or _is_used(_kept):
            _kept[:] = [_anonymous(n_bytes)]
        return _kept[0]


def _is_used(kept: list[mmap.mmap]) -> bool:
    """Return whether an array or a TableMemory refers to the memory."""
    return sys.getrefcount(kept[0]) > sys.getrefcount(_UNUSED[0])


def _anonymous(n_bytes: int) -> mmap.mmap:
    # Python's default is shared memory, for which Linux uses huge pages only if the whole system is configured so.
    memory = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
