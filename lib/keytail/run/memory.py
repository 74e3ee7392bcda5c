"""How much memory one task's offset map may take on this host."""

from __future__ import annotations

import os
from pathlib import Path

_LIMIT_FILES = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_SMALLEST_MAP_BYTES = 16 << 20


def physical_bytes() -> int:
    """Memory of the host, or of the container when that has less."""
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in _LIMIT_FILES:
        try:
            text = Path(name).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            size = min(size, int(text))
    return size


def map_memory_bytes(tasks_a_host: int) -> int:
    """Half of the memory, over the tasks that run at a time; the other half is for all else."""
    return max(physical_bytes() // 2 // max(tasks_a_host, 1), _SMALLEST_MAP_BYTES)
