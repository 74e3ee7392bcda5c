"""What a run is expected to take, from what listings tell: its way, its seconds, its scratch space; and whether that
is worth a start of Spark.

Pure, and rough on purpose. All rates stand here. They are those of one core of the machine of the benchmark, with
files in the page cache (`python -m tests.bench.run`, figure 2, and with `--batch-records 1`, with `--codec zstd`).
What no listing tells, the codec and the size of batches, makes a factor of ten between the fastest and the slowest
log: seconds may be off by three times either way, and a slow disk comes on top. They are good for an order of work and
for the choice of a way, and promise nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from keytail.compact.plan import Selection
    from keytail.log.partition import SegmentFacts

Way = Literal["one task", "packed", "maybe fan-out"]

# Bytes of `.log` files a second.
DIRTY_BYTES_PER_S = 120e6
CLEAN_BYTES_PER_S = 200e6
VERIFIED_BYTES_PER_S = 200e6
INDEXED_BYTES_PER_S = 600e6
# Opening, fsyncs, renames: of a partition, and of each file of a segment that is read.
PARTITION_S = 0.03
SEGMENT_S = 0.002

# A key takes a slot of 24 bytes at a load of 0.9, and while the map doubles half as much again.
MAP_BYTES_A_KEY = 24 * 1.5 / 0.9
# Index entries, of 8 and 12 bytes, each index.interval.bytes of 4096, and closing ones.
_INDEX_SHARE = 1.005
_MARGIN_BYTES = 1 << 20
# Half of a bundle (compact/bundles.py).
PACKED_BYTES = 1 << 29


@dataclass(frozen=True)
class Expected:
    """Of one partition. `scratch_bytes` is at most written beside the sources, where it is done in one round."""

    way: Way
    seconds: float
    scratch_bytes: int


def expect(segments: Sequence[SegmentFacts], selection: Selection, *, map_memory_bytes: int) -> Expected:
    """Of a partition whose `selection` is due.

    "maybe fan-out": its dirty section has more offsets than the map has room for keys; mostly it has fewer keys than
    offsets, and one task does it. "packed": it is small, and shares a job with others.
    """
    below = [segment for segment in segments if segment.base_offset < selection.first_uncleanable_offset]
    scratch_bytes = int(sum(segment.log_bytes for segment in below) * _INDEX_SHARE) + _MARGIN_BYTES
    seconds = PARTITION_S + SEGMENT_S * len(below)
    seconds += selection.cleanable_bytes / DIRTY_BYTES_PER_S + selection.clean_bytes / CLEAN_BYTES_PER_S
    way: Way = "packed" if scratch_bytes <= PACKED_BYTES else "one task"
    if most_keys(selection) * MAP_BYTES_A_KEY > map_memory_bytes:
        way = "maybe fan-out"
    return Expected(way, seconds, scratch_bytes)


def most_keys(selection: Selection) -> int:
    """Each offset of the dirty section a key of its own: no listing tells a lower bound that always holds."""
    return max(selection.first_uncleanable_offset - selection.first_dirty_offset, 0)


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
