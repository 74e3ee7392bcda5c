"""The output of a benchmark run, as text and as JSON: the machine, versions, and one table."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from keytail.kernels.native import HASH_NAME, NATIVE

_PACKAGES = ("keytail", "numpy", "numba", "llvmlite", "xxhash", "crc32c", "pyspark")


@dataclass
class Figure:
    """The seconds of each run of one measured program, also by phase if it has phases."""

    name: str
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    phases: list[dict[str, float]] = field(default_factory=list)
    file_operations: list[dict[str, float]] = field(default_factory=list)

    def forget(self) -> None:
        """Discard the runs so far, which were warm-up runs."""
        self.seconds, self.cpu_seconds, self.phases, self.file_operations = [], [], [], []

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    def ratio(self, base: Figure) -> float:
        """Return the median of `base` divided by that of this program."""
        return base.median_s / self.median_s

    def best_ratio(self, base: Figure) -> float:
        """Return the minimum of `base` divided by that of this program; other processes affect minimums least."""
        return min(base.seconds) / min(self.seconds)

    def as_json(self, base: Figure) -> dict[str, Any]:
        return {
            "name": self.name,
            "median_s": self.median_s,
            "min_s": min(self.seconds),
            "max_s": max(self.seconds),
            "seconds": self.seconds,
            "cpu_seconds": self.cpu_seconds,
            "times_kafka": self.ratio(base),
            "times_kafka_best_runs": self.best_ratio(base),
            "phases_median_s": medians(self.phases),
            "file_operations_median_s": medians(self.file_operations),
        }


def medians(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    names = parts[0] if parts else ()
    return {name: statistics.median(part[name] for part in parts) for name in names}


def machine() -> dict[str, str]:
    """Return the machine and the versions; the load is the average number of running processes in the last minute."""
    with Path("/proc/cpuinfo").open() as lines:
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": str(os.cpu_count()),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": ", ".join(f"{name} {version(name)}" for name in _PACKAGES),
        "hash": f"{HASH_NAME}, native {'yes' if NATIVE else 'no'}",
        "load_at_start": f"{os.getloadavg()[0]:.1f}",
    }


def table(figures: Sequence[Figure], base: Figure, records: int, log_bytes: int) -> str:
    """Return one row per figure, then the phases of figures that have them. Speeds are those of the median run."""
    head = f"{'':34}{'median s':>9}{'min..max s':>15}{'M records/s':>13}{'MB/s':>8}{'times Kafka':>13}{'best':>7}"
    lines = [head, "-" * len(head)]
    for figure in figures:
        spread = f"{min(figure.seconds):.2f}..{max(figure.seconds):.2f}"
        speed, rate = records / figure.median_s / 1e6, log_bytes / figure.median_s / 1e6
        lines.append(
            f"{figure.name:34}{figure.median_s:>9.3f}{spread:>15}{speed:>13.2f}{rate:>8.0f}"
            f"{figure.ratio(base):>13.2f}{figure.best_ratio(base):>7.2f}"
        )
    for figure in figures:
        for title, parts in (
            ("phases", figure.phases),
            ("of that in file operations", figure.file_operations),
        ):
            text = "  ".join(f"{name} {seconds:.3f}" for name, seconds in medians(parts).items())
            if text:
                lines.append(f"{figure.name[:3]} {title}, median s: {text}")
    return "\n".join(lines)
