"""Keeps what a task frees: the buffers of one stride are those of the next.

The C library gives large blocks back to the system as soon as they are freed, and each page of the next one is faulted
in anew, which takes longer than filling it.
"""

from __future__ import annotations

import ctypes
import functools

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # of glibc's mallopt
_LARGEST_KEPT_BYTES = 32 << 20  # the largest that it takes
_KEPT_BYTES = 256 << 20


@functools.cache
def keep_freed_memory() -> bool:
    """For this process from now on: blocks up to 32 MiB are used again, and up to 256 MiB that are free stay.

    False, with nothing changed, where the C library is not glibc.
    """
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018 (others have a mallopt that means something else)
        mallopt = library.mallopt
    except (AttributeError, OSError, TypeError):
        return False
    # One heap for all threads: what a short-lived one freed is otherwise given back with its own.
    settings = ((_ARENA_MAX, 1), (_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES), (_TRIM_THRESHOLD, _KEPT_BYTES))
    return sum(mallopt(parameter, value) for parameter, value in settings) == len(settings)
