"""Lookups by offset and by time in plain Python, from the bytes of logs and time indexes alone.

No offset index is used: reading from the start of a segment must have the same result as reading from an index entry.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from tests.reference.batches import Batch, Rec, decode_log


@lru_cache(64)
def batches_of(log: bytes) -> tuple[Batch, ...]:
    return tuple(decode_log(log))


@dataclass(frozen=True)
class Files:
    """A segment: its log, its time index, and when the log was last written."""

    base_offset: int
    log: bytes
    time_index: bytes
    mtime_ms: int

    @property
    def largest_ms(self) -> int:
        """Return the largest timestamp as a broker determines it."""
        whole = len(self.time_index) // 12 * 12
        last = struct.unpack_from(">q", self.time_index, whole - 12)[0] if whole else -1
        return last if last >= 0 else self.mtime_ms


def at_offset(segments: Sequence[Files], log_start: int, log_end: int, offset: int) -> tuple[Batch, Rec] | str | None:
    """Return the first record at or after `offset`, None if there is none, or `out-of-range` if a broker refuses the
    offset.
    """
    if not log_start <= offset <= log_end:
        return "out-of-range"
    for segment in segments:
        for batch in batches_of(segment.log):
            for record in batch.records:
                if record.offset >= offset:
                    return batch, record
    return None


def at_time(segments: Sequence[Files], log_start: int, timestamp_ms: int) -> tuple[Batch, Rec] | None:
    """Return the answer of `offsetsForTimes`, from the first segment that may have it, or None."""
    for segment in segments:
        if segment.largest_ms >= timestamp_ms:
            for batch in batches_of(segment.log):
                for record in batch.records:
                    if record.timestamp >= timestamp_ms and record.offset >= log_start:
                        return batch, record
            return None
    return None
