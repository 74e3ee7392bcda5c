"""Memory next to an inaccessible page, so that a kernel that reads one byte too many crashes.

Bounds checks are off in kernels and absent from C functions, so a read past the end would otherwise not be detected.
"""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

_PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)
_PROT_NONE = 0


def _pages(data: bytes, guard_in_front: bool) -> np.ndarray:
    body = max(1, -(-len(data) // _PAGE)) * _PAGE
    memory = mmap.mmap(-1, body + _PAGE)
    array = np.frombuffer(memory, dtype=np.uint8)
    start = _PAGE if guard_in_front else body - len(data)
    array[start : start + len(data)] = np.frombuffer(data, dtype=np.uint8)
    guard = array.ctypes.data + (0 if guard_in_front else body)
    if _libc.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(_PAGE), _PROT_NONE) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")
    return array[start : start + len(data)]


def guarded(data: bytes) -> np.ndarray:
    """Return `data` as uint8; the byte after the last one is inaccessible."""
    return _pages(data, guard_in_front=False)


def guarded_front(data: bytes) -> np.ndarray:
    """Return `data` as uint8; the byte before the first one is inaccessible."""
    return _pages(data, guard_in_front=True)
