"""Keeps the memory that a task frees in the process, so that the buffers of one chunk are reused for the next.

The C library returns large blocks to the system as soon as they are freed, and each page of the next block causes a
page fault, which takes longer than filling it.
"""

from __future__ import annotations

import ctypes
import functools

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # parameters of glibc's mallopt
_LARGEST_KEPT_BYTES = 32 << 20  # larger blocks are returned to the system; the maximum that glibc accepts
_KEPT_BYTES = 256 << 20


@functools.cache
def keep_freed_memory() -> bool:
    """Make this process reuse freed blocks of up to 32 MiB from now on, and keep up to 256 MiB of free memory.

    Returns False, with nothing changed, if the C library is not glibc.
    """
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018 (others have a mallopt that means something else)
        mallopt = library.mallopt
    except (AttributeError, OSError, TypeError):
        return False
    # One heap for all threads: with its own heap, a short-lived thread would return its memory to the system.
    settings = ((_ARENA_MAX, 1), (_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES), (_TRIM_THRESHOLD, _KEPT_BYTES))
    return sum(mallopt(parameter, value) for parameter, value in settings) == len(settings)
