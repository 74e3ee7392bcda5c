"""How long work takes, by the bytes that listings tell, and whether it is worth a start of Spark.

Pure, and rough on purpose. All rates stand here. They are those of one core of the machine of the benchmark, with
files in the page cache (`python -m tests.bench.run`, figure 2, and with `--batch-records 1`, with `--codec zstd`).
What no listing tells, the codec and the size of batches, makes a factor of ten between the fastest and the slowest
log: seconds may be off by three times either way, and a slow disk comes on top. They are good for an order of work and
for the choice of a way, and promise nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

# Bytes of `.log` files a second.
DIRTY_BYTES_PER_S = 120e6
CLEAN_BYTES_PER_S = 200e6
VERIFIED_BYTES_PER_S = 200e6
INDEXED_BYTES_PER_S = 600e6
# Opening, fsyncs, renames: of a partition, and of each file of a segment that is read.
PARTITION_S = 0.03
SEGMENT_S = 0.002


def run_seconds(each_s: Iterable[float], cores: int) -> float:
    """Of a run over partitions, largest first on so many cores: no less than the longest takes alone."""
    seconds = list(each_s)
    return max(sum(seconds) / max(cores, 1), max(seconds, default=0.0))


# From command to first task, less what a run without Spark takes there (`python -m tests.bench.start`).
SPARK_START_S = 4.0
# Of a run that takes ten times as long nobody notices it, and Spark shows what is going on.
SPARK_FROM_S = 10 * SPARK_START_S


# What is read of so few bytes takes no memory to speak of, and less time than a process that loads the kernels anew.
HERE_BYTES = 64 << 20


def is_worth_spark(each_s: Iterable[float], cores: int) -> bool:
    """Whether a run on so many cores of this host is long enough."""
    return run_seconds(each_s, cores) >= SPARK_FROM_S
