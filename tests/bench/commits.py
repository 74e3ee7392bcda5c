"""Measures how duration and file system calls of `compact` grow with the number of tiny segments of a partition.

    .venv/bin/python -m tests.bench.commits 400 800 3200 10000

Each segment has one batch of two records and is a separate group, because the offsets of the next segment are too far
away. Prints, for each number of segments, the seconds of the run and of its phases, and how often directories were
listed and synced.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keytail.cli.configuration import read_configuration
from keytail.cli.selection import PartitionFilter
from keytail.compact import execution as compaction
from keytail.log.fs import FileSystem
from tests.log_dirs import BASE_MS, write_log_dir
from tests.reference.batches import Rec

SETTINGS = ("orders:cleanup.policy=compact", "orders:min.cleanable.dirty.ratio=0")
KEYS = 50
# operations of the driver; each task also syncs every file that it writes
COUNTED = ("scan", "stat", "fsync_dir", "rename", "unlink")
APART = 1 << 31  # the offsets between two segments are more than a group may span


class Counting(FileSystem):
    """A file system that counts its operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def _look(self, operation: str, arguments: tuple[Any, ...], action: Callable[[], Any]) -> Any:
        self.counts[operation] += 1
        return super()._look(operation, arguments, action)

    def _change(self, operation: str, arguments: tuple[Any, ...], action: Callable[[], Any]) -> Any:
        self.counts[operation] += 1
        return super()._change(operation, arguments, action)


def make(path: Path, segments: int) -> Path:
    """Write a log dir with one partition. Each segment has a record with one of a few keys, and one that is not
    superseded.
    """
    records = []
    for number in range(segments):
        at = number * APART
        records += [Rec(at, BASE_MS + at, b"key-%d" % (number % KEYS), b"v%d" % at)]
        records += [Rec(at + 1, BASE_MS + at + 1, b"own-%d" % number, b"v%d" % at)]
    return write_log_dir(path, {"orders-0": records}, segments=segments)


def compact(log_dir: Path, fs: FileSystem) -> dict[str, Any]:
    """Run once with --execute in this process, and return the row and the seconds."""
    configuration = read_configuration(None, SETTINGS, True)
    partition_filter = PartitionFilter(log_dirs=(str(log_dir),))
    request = compaction.Request(partition_filter, configuration, execute=True, in_detail=True, fan_out="never")
    start_s = time.monotonic()
    [row] = compaction.compact(request, fs)
    assert row.status == "compacted", row
    phases = dict(row.detail.phases_s) if row.detail is not None else {}
    return {"seconds": time.monotonic() - start_s, "phases": phases, "row": row}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("segments", type=int, nargs="+")
    arguments.add_argument("--directory", default=None, help="directory for the log dirs (default: temporary)")
    given = arguments.parse_args()
    for segments in given.segments:
        with tempfile.TemporaryDirectory(dir=given.directory) as directory:
            log_dir, fs = make(Path(directory, "logs"), segments), Counting()
            found = compact(log_dir, fs)
            row, phases = found["row"], found["phases"]
            parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in phases.items())
            asked = ", ".join(f"{name} {fs.counts[name]:,}" for name in COUNTED)
            print(f"{segments:,} segments -> {row.segments_after:,}: {found['seconds']:.1f} s ({parts}); {asked}")


if __name__ == "__main__":
    main()
