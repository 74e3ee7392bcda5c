"""Measures the peak memory of this process during some work, as reported by Linux, without sampling. Linux records the
exact maximum of resident memory (VmHWM), which a process can reset. Memory mapped from files (libraries) and shared
memory is subtracted, so that the result is anonymous, private memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_STATUS = Path("/proc/self/status")
_RESET_PEAK = "5"  # proc(5), clear_refs


@dataclass
class Peak:
    """Private memory of the whole process: `before_bytes` at the start of the work, and the maximum `peak_bytes`."""

    before_bytes: int = 0
    peak_bytes: int = 0

    @property
    def growth_bytes(self) -> int:
        return self.peak_bytes - self.before_bytes


@contextmanager
def peak_private() -> Iterator[Peak]:
    """Measure private memory at the start of the block, and its peak until the end."""
    Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    before = _status()
    peak = Peak(before_bytes=before["RssAnon"])
    try:
        yield peak
    finally:
        # Pages of libraries that are first used during the work are included, so the result may be too large, not too
        # small.
        mapped = before["RssFile"] + before["RssShmem"]
        peak.peak_bytes = _status()["VmHWM"] - mapped


def _status() -> dict[str, int]:
    fields = {}
    for line in _STATUS.read_text().splitlines():
        name, _, text = line.partition(":")
        if text.endswith(" kB"):
            fields[name] = int(text[:-3]) * 1024
    return fields
