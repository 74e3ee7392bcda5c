"""Determines the memory and the cores of this host, and the memory for the offset map of one task."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

_LIMIT_FILES = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_SMALLEST_MAP_BYTES = 16 << 20


@cache  # a plan calls this function twice for each partition
def physical_bytes() -> int:
    """Return the memory of the host in bytes, or the memory limit of the container if that is lower."""
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
    """Return the memory of one task's offset map, in bytes: half of the host's memory divided by the number of
    concurrent tasks, but at least 16 MiB."""
    return max(physical_bytes() // 2 // max(tasks_per_host, 1), _SMALLEST_MAP_BYTES)


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))
