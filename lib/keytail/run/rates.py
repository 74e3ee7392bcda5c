"""Estimates from the sizes in listings how long work takes, and whether starting Spark is worthwhile.

The functions are pure, the estimates rough on purpose. All rates are defined here. The rates were measured on one core
of the benchmark machine, with files in the page cache (`python -m tests.bench.run`, figure 2, also with
`--batch-records 1` and with `--codec zstd`). Depending on the codec and the batch size, which no listing shows, the
fastest log takes a tenth of the time of the slowest one: estimates may be off by a factor of three either way, and more
on a slow disk. The estimates are used only to order the work and to choose a strategy.
"""

from __future__ import annotations

from collections.abc import Iterable

# Bytes of `.log` files per second.
DIRTY_BYTES_PER_S = 120e6
CLEAN_BYTES_PER_S = 200e6
VERIFIED_BYTES_PER_S = 200e6
INDEXED_BYTES_PER_S = 600e6
# Seconds for opening files, fsyncs and renames: for a partition, and for each segment file that is read.
PARTITION_S = 0.03
SEGMENT_S = 0.002


def commit_seconds(segments: int) -> float:
    """Return the seconds that a prepared partition's commit takes, which reads no records (tests/bench/prepared.py)."""
    return PARTITION_S + SEGMENT_S * segments


def run_seconds(each_s: Iterable[float], cores: int) -> float:
    """Return the time of a run over partitions, largest first, on `cores`: at least the time of the longest partition
    alone."""
    seconds = list(each_s)
    return max(sum(seconds) / max(cores, 1), max(seconds, default=0.0))


# Seconds of a command that reads a few small partitions: Python, its modules and compiled kernels
# (`python -m tests.bench.start`).
COMMAND_S = 1.0
# Seconds to the first task, minus the seconds that a run without Spark needs (`python -m tests.bench.start`).
SPARK_START_S = 4.0
# Spark is started for work expected to take longer: its start is then negligible, and its UI shows the progress.
SPARK_FROM_S = 10 * SPARK_START_S


# Reading at most this many bytes takes little memory, and less time than starting a process that loads the kernels.
HERE_BYTES = 64 << 20


def is_worth_spark(each_s: Iterable[float], cores: int) -> bool:
    """Return whether a run on this many cores of this host takes long enough for Spark."""
    return run_seconds(each_s, cores) >= SPARK_FROM_S
