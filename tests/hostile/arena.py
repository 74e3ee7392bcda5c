"""Memory that ends, or begins, where nothing may be touched, used again and again: a copy an array, no system call."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np

_PAGE = mmap.PAGESIZE
_OURS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # not of processes that are forked
_libc = ctypes.CDLL(None, use_errno=True)


class Arena:
    """Room for `size_bytes` between two pages that cannot be read or written. One array at a time lies in it."""

    def __init__(self, size_bytes: int) -> None:
        self._bytes = -(-size_bytes // _PAGE) * _PAGE
        self._memory = np.frombuffer(mmap.mmap(-1, self._bytes + 2 * _PAGE, flags=_OURS), np.uint8)
        for at in (0, self._bytes + _PAGE):
            address = ctypes.c_void_p(self._memory.ctypes.data + at)
            if _libc.mprotect(address, ctypes.c_size_t(_PAGE), 0) != 0:
                raise OSError(ctypes.get_errno(), "mprotect")

    def put(self, data: Any, *, in_front: bool = False) -> np.ndarray:
        """`data` as uint8; the byte behind it (`in_front`: before it) cannot be touched."""
        source = np.frombuffer(data, np.uint8)
        array = self._span(len(source), in_front)
        array[:] = source
        return array

    def room(self, dtype: Any, n: int) -> np.ndarray:
        """`n` items, filled with a pattern, that end where nothing may be touched."""
        kind = np.dtype(dtype)
        array = self._span(n * kind.itemsize, False)
        array[:] = 0xA5
        return array.view(kind)

    def _span(self, n: int, in_front: bool) -> np.ndarray:
        if n > self._bytes:
            raise ValueError(f"{n} bytes where {self._bytes} fit")
        start = _PAGE if in_front else _PAGE + self._bytes - n
        return self._memory[start : start + n]
