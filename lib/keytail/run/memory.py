"""Limits the memory of one task's offset map on this host."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

_LIMIT_FILES = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_SMALLEST_MAP_BYTES = 16 << 20


@cache  # a plan needs the result twice for each partition
def physical_bytes() -> int:
    """Return the memory in bytes of the host, or of the container if it has less."""
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in _LIMIT_FILES:
        try:
            text = Path(name).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            size = min(size, int(text))
    return size


def map_memory_bytes(tasks_per_host: int) -> int:
    """Return half of the memory, in bytes, divided by the number of concurrent tasks, but at least 16 MiB; the other
    half is for everything else."""
    return max(physical_bytes() // 2 // max(tasks_per_host, 1), _SMALLEST_MAP_BYTES)


def cores() -> int:
    """Return how many tasks run at a time on this host, as with Spark's `local[*]`."""
    return len(os.sched_getaffinity(0))
