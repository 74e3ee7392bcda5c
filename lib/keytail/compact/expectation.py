"""The expected strategy, seconds and scratch space of compacting one partition, estimated from its listing.

The functions are pure; the estimates are rough by design (run/rates.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from keytail.run.rates import CLEAN_BYTES_PER_S, DIRTY_BYTES_PER_S, PARTITION_S, SEGMENT_S

if TYPE_CHECKING:
    from keytail.compact.plan import Selection
    from keytail.log.partition import SegmentFacts

Strategy = Literal["one task", "packed", "maybe fan-out"]

# A key takes a slot of 24 bytes at a load factor of 0.9, and half as much again while the map doubles.
MAP_BYTES_PER_KEY = 24 * 1.5 / 0.9
# Bytes of logs with indexes per byte of logs: entries of 8 and 12 bytes for each 4096 bytes (index.interval.bytes).
_INDEX_SHARE = 1.005
_MARGIN_BYTES = 1 << 20
# Maximum scratch bytes of a partition with strategy "packed": half of a bundle (compact/running/bundles.py).
PACKED_BYTES = 1 << 29


@dataclass(frozen=True)
class Expected:
    """The estimate for one partition. `scratch_bytes` is an upper bound of the bytes that one pass writes beside the
    sources.
    """

    strategy: Strategy
    seconds: float
    scratch_bytes: int


def expect(segments: Sequence[SegmentFacts], selection: Selection, *, map_memory_bytes: int) -> Expected:
    """Return the estimate for a partition whose `selection` is due.

    Strategy "maybe fan-out": the dirty section has more offsets than the map has room for keys; usually a section has
    fewer keys than offsets, and one task suffices. "packed": the partition is small, and shares a job with other
    partitions.
    """
    below = [segment for segment in segments if segment.base_offset < selection.first_uncleanable_offset]
    scratch_bytes = int(sum(segment.log_bytes for segment in below) * _INDEX_SHARE) + _MARGIN_BYTES
    seconds = _seconds(len(below), selection.cleanable_bytes, selection.clean_bytes)
    strategy: Strategy = "packed" if scratch_bytes <= PACKED_BYTES else "one task"
    if most_keys(selection) * MAP_BYTES_PER_KEY > map_memory_bytes:
        strategy = "maybe fan-out"
    return Expected(strategy, seconds, scratch_bytes)


def _seconds(segments: int, dirty_bytes: int, clean_bytes: int) -> float:
    return PARTITION_S + SEGMENT_S * segments + dirty_bytes / DIRTY_BYTES_PER_S + clean_bytes / CLEAN_BYTES_PER_S


def gain_per_s(sizes: Sequence[tuple[int, int]], first_dirty_offset: int) -> float:
    """Return the bytes that compacting a partition is expected to reclaim per second, as far as that is known without
    reading the log. `sizes` has pairs of base offset and bytes of the segments that are cleaned.

    The size of the dirty section is taken as the gain: a topic whose keys are overwritten is as large after a round as
    its clean section was before. For a partition that was never compacted, no better estimate is known.
    """
    dirty = [base for base, _ in sizes if base <= first_dirty_offset]
    begin = max(dirty, default=0)  # the segment that contains the first dirty offset
    dirty_bytes = sum(size for base, size in sizes if base >= begin)
    clean_bytes = sum(size for base, size in sizes) - dirty_bytes
    return dirty_bytes / _seconds(len(sizes), dirty_bytes, clean_bytes)


def fits_with_any_indexes(expected: Expected, segments: int, segment_index_bytes: int, room_bytes: int) -> bool:
    """Return whether the partition fits into `room_bytes` even if each of its index files has the maximum size,
    `segment_index_bytes`: a listing does not show the actual sizes."""
    return expected.scratch_bytes + 2 * segments * segment_index_bytes <= room_bytes


def most_keys(selection: Selection) -> int:
    """Return an upper bound of the number of keys: the number of offsets in the dirty section. A listing gives no
    tighter bound that always holds.
    """
    return max(selection.first_uncleanable_offset - selection.first_dirty_offset, 0)
