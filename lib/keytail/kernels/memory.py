"""Allocates anonymous memory for large tables that are probed at random places."""

from __future__ import annotations

import mmap

import numpy as np

_HUGE_PAGE_BYTES = 2 << 20


def zeros(n: int, dtype: np.dtype) -> np.ndarray:
    """Return an array of `n` zeros, in huge pages if Linux provides them: with small pages most probes miss the TLB."""
    n_bytes = n * dtype.itemsize
    if n_bytes < _HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.zeros(n, dtype)
    # Python's default is shared memory, for which Linux uses huge pages only if the whole system is configured so.
    memory = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype)
