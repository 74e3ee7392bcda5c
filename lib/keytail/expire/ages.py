"""Determines the ages of segments by the largest timestamp of their checked batches or, without a timestamp, by the
mtime.

The time index is not used: if it is missing or full of zeros, a young segment appears old (EXPIRE.md beside this file).
`partition.py` decides what an age means for a segment.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from keytail.format import names
from keytail.log.fs import FileSystem
from keytail.log.partition import PartitionFacts, SegmentFacts
from keytail.log.records.chunk import SegmentReader, check_inside


@dataclass(frozen=True, slots=True)
class Age:
    """The time from which a segment's age is counted: its largest timestamp, or the mtime of its `.log` file."""

    timestamp_ms: int
    of: Literal["record", "file"] = "record"


@dataclass(frozen=True, slots=True)
class AgeTask:
    """One segment to be read, up to the first batch with a timestamp of at least `young_from_ms`."""

    partition_path: str
    base_offset: int
    end_offset: int  # base offset of the next segment, or the log end offset
    log_bytes: int
    log_mtime_ns: int
    young_from_ms: int

    @property
    def log_path(self) -> str:
        return os.path.join(self.partition_path, names.segment_file(self.base_offset, names.LOG))


def age_tasks(
    facts: PartitionFacts, segments: Iterable[SegmentFacts], now_ms: int, retention_ms: int
) -> list[AgeTask]:
    """Return a task for each of `segments`, which belong to the partition, in the same order."""
    ends = dict(zip((s.base_offset for s in facts.segments), segment_ends(facts), strict=True))
    return [
        AgeTask(
            facts.path, s.base_offset, ends[s.base_offset], s.log_bytes, s.log_mtime_ns, now_ms - retention_ms
        )
        for s in segments
    ]


def segment_ends(facts: PartitionFacts) -> list[int]:
    """Return the end offset of each segment: the base offset of the next segment or, for the last segment, the log end
    offset."""
    return [*(segment.base_offset for segment in facts.segments[1:]), facts.log_end_offset]


def read_age(fs: FileSystem, task: AgeTask) -> Age:
    """Read the batches of a segment, checking every CRC, and return its age.

    The age is exact unless the segment is young: the age of a young segment is any timestamp of at least
    `young_from_ms`. Raises CorruptLog for bytes that are not a batch and for offsets outside of the segment.
    """
    largest_ms = -1
    for chunk in SegmentReader(fs).chunks_without_prefetch(task.log_path, task.log_bytes):
        check_inside(chunk, task.base_offset, task.end_offset - 1)
        largest_ms = max(largest_ms, int(chunk.table["max_timestamp_ms"].max()))
        if largest_ms >= task.young_from_ms:
            break
    return Age(largest_ms) if largest_ms >= 0 else file_age(task)


def file_age(segment: AgeTask | SegmentFacts) -> Age:
    return Age(segment.log_mtime_ns // 1_000_000, "file")


def claimed_age(segment: SegmentFacts) -> Age:
    """Return the age that a broker assumes: by the last entry of the time index, or else by the mtime."""
    return Age(segment.largest_timestamp_ms)
