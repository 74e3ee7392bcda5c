"""Anonymous memory for large tables that are probed at random places."""

from __future__ import annotations

import mmap

import numpy as np

_HUGE_PAGE_BYTES = 2 << 20


def zeros(n: int, dtype: np.dtype) -> np.ndarray:
    """`n` zeroed items; in huge pages where the kernel gives them, since each probe would else miss the TLB too."""
    n_bytes = n * dtype.itemsize
    if n_bytes < _HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.zeros(n, dtype)
    # Python's default is memory to be shared, of which Linux makes no huge pages unless told so for the whole system.
    memory = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype)
