"""The peak memory of some work in this process, as reported by Linux, without sampling.

The kernel keeps the exact maximum of resident memory (VmHWM), and lets a process reset its own. Memory mapped from
files (libraries) and shared memory is subtracted, so that anonymous, private memory is left.
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
    """Private memory of the whole process: `before_bytes` when the work began, and `peak_bytes` as the maximum during
    it.
    """

    before_bytes: int = 0
    peak_bytes: int = 0

    @property
    def growth_bytes(self) -> int:
        return self.peak_bytes - self.before_bytes


@contextmanager
def peak_private() -> Iterator[Peak]:
    """Measure private memory at the start, and its peak until the end of the block."""
    Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    before = _status()
    peak = Peak(before_bytes=before["RssAnon"])
    try:
        yield peak
    finally:
        # Pages of libraries that are first used during the work are included, so the result is never too small.
        mapped = before["RssFile"] + before["RssShmem"]
        peak.peak_bytes = _status()["VmHWM"] - mapped


def _status() -> dict[str, int]:
    fields = {}
    for line in _STATUS.read_text().splitlines():
        name, _, text = line.partition(":")
        if text.endswith(" kB"):
            fields[name] = int(text[:-3]) * 1024
    return fields
