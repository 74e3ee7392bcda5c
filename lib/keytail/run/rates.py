"""Estimates the duration of work from the sizes in listings, and whether starting Spark is worthwhile.

The functions are pure, and the estimates are rough by design. The rates were measured on one core of the benchmark
machine, with files in the page cache (`python -m tests.bench.run`, figure 2, also with `--batch-records 1` and with
`--codec zstd`). The time depends on the codec and the batch size, which no listing shows: the fastest log takes a tenth
of the time of the slowest one. So an estimate may be wrong by a factor of three, and more on a slow disk. The estimates
only order the work, select a strategy or an engine, and are shown in plans.
"""

from __future__ import annotations

from collections.abc import Iterable

# Bytes of `.log` files that one core processes per second: dirty or clean segments of a compaction, verify, indexes.
DIRTY_BYTES_PER_S = 120e6
CLEAN_BYTES_PER_S = 200e6
VERIFIED_BYTES_PER_S = 200e6
INDEXED_BYTES_PER_S = 600e6
# Seconds for opening files, fsyncs and renames: for each partition, and for each segment that is read.
PARTITION_S = 0.03
SEGMENT_S = 0.002


def commit_seconds(segments: int) -> float:
    """Return the estimated seconds for the commit of a prepared partition, which reads no records
    (tests/bench/prepared.py)."""
    return PARTITION_S + SEGMENT_S * segments


def run_seconds(each_s: Iterable[float], cores: int) -> float:
    """Return the estimated seconds of a run on `cores` cores that begins with the largest partitions. `each_s` has the
    seconds of each partition; the result is at least the largest of these."""
    seconds = list(each_s)
    return max(sum(seconds) / max(cores, 1), max(seconds, default=0.0))


# Seconds of a command that reads a few small partitions: start of Python, import of modules, loading of kernels
# (`python -m tests.bench.start`).
COMMAND_S = 1.0
# Seconds by which the first task begins later with Spark than without it (`python -m tests.bench.start`).
SPARK_START_S = 4.0
# Minimum expected seconds of work for which Spark is started: its start is then negligible, and its UI shows progress.
SPARK_FROM_S = 10 * SPARK_START_S


# Maximum bytes that the driver reads itself: reading them takes less time than starting a process with the kernels.
HERE_BYTES = 64 << 20


def is_worth_spark(each_s: Iterable[float], cores: int) -> bool:
    """Return whether a run on `cores` cores of this host takes long enough to start Spark."""
    return run_seconds(each_s, cores) >= SPARK_FROM_S
