"""Memory that ends, or begins, at an inaccessible page, and is reused, so that an array costs one copy and no system
call.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np

_PAGE = mmap.PAGESIZE
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # forked processes do not share the memory
_libc = ctypes.CDLL(None, use_errno=True)


class Arena:
    """Memory of `size_bytes` between two pages that cannot be read or written. It contains one array at a time."""

    def __init__(self, size_bytes: int) -> None:
        self._bytes = -(-size_bytes // _PAGE) * _PAGE
        self._memory = np.frombuffer(mmap.mmap(-1, self._bytes + 2 * _PAGE, flags=_PRIVATE), np.uint8)
        for at in (0, self._bytes + _PAGE):
            address = ctypes.c_void_p(self._memory.ctypes.data + at)
            if _libc.mprotect(address, ctypes.c_size_t(_PAGE), 0) != 0:
                raise OSError(ctypes.get_errno(), "mprotect")

    def put(self, data: Any, *, in_front: bool = False) -> np.ndarray:
        """Return `data` as uint8; the byte after it, or with `in_front` the byte before it, is inaccessible."""
        source = np.frombuffer(data, np.uint8)
        array = self._span(len(source), in_front)
        array[:] = source
        return array

    def room(self, dtype: Any, n: int) -> np.ndarray:
        """Return `n` items, filled with a pattern, that end at an inaccessible page."""
        kind = np.dtype(dtype)
        array = self._span(n * kind.itemsize, False)
        array[:] = 0xA5
        return array.view(kind)

    def _span(self, n: int, in_front: bool) -> np.ndarray:
        if n > self._bytes:
            raise ValueError(f"{n} bytes do not fit into {self._bytes}")
        start = _PAGE if in_front else _PAGE + self._bytes - n
        return self._memory[start : start + n]
