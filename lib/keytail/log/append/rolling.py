"""Decides when the active segment ends and when a flush is due, as a broker does. Pure functions.

APPEND.md beside this file specifies the rules.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from keytail.errors import UsageProblem
from keytail.format.index import MAX_RELATIVE_OFFSET, OFFSET_ENTRY, TIME_ENTRY

MAX_LONG = 2**63 - 1
MAX_SEGMENT_BYTES = 2**31 - 1


@dataclass(frozen=True)
class AppendConfig:
    """Kafka's settings that determine what an append leaves on disk, with Kafka's defaults.

    `compact`: `cleanup.policy` contains `compact`, so `max.compaction.lag.ms` also limits the age of a segment.
    `log_append_time`: a leader sets its own time in every batch (`message.timestamp.type`). Raises UsageProblem if a
    segment or an index cannot have the given size.
    """

    segment_bytes: int = 1 << 30
    segment_ms: int = 604_800_000
    segment_jitter_ms: int = 0
    index_bytes: int = 10 << 20
    index_interval_bytes: int = 4096
    max_message_bytes: int = 1_048_588
    max_compaction_lag_ms: int = MAX_LONG
    compact: bool = True
    flush_messages: int = MAX_LONG
    flush_ms: int = MAX_LONG
    preallocate: bool = False
    log_append_time: bool = False
    producer_id_expiration_ms: int = 86_400_000

    def __post_init__(self) -> None:
        if not 0 < self.segment_bytes <= MAX_SEGMENT_BYTES:
            raise UsageProblem(
                f"invalid segment size of {self.segment_bytes} bytes: use 1 to {MAX_SEGMENT_BYTES}",
                slug="invalid-segment-size",
            )
        if self.index_bytes < TIME_ENTRY.itemsize:
            raise UsageProblem(
                f"invalid index size of {self.index_bytes} bytes: use at least {TIME_ENTRY.itemsize}, for the entry "
                "that closes a segment; a broker with less fails at its first roll",
                slug="invalid-index-size",
            )

    @property
    def roll_ms(self) -> int:
        """The age in ms at which a segment ends, if no jitter is subtracted."""
        if self.compact:
            return min(self.max_compaction_lag_ms, self.segment_ms)
        return self.segment_ms

    @property
    def max_offset_entries(self) -> int:
        return self.index_bytes // OFFSET_ENTRY.itemsize

    @property
    def max_time_entries(self) -> int:
        return self.index_bytes // TIME_ENTRY.itemsize


@dataclass(frozen=True)
class RollState:
    """The facts about the active segment that decide whether it is rolled.

    `first_timestamp_ms` is the max timestamp of the segment's first batch, and has no meaning in an empty segment.
    `created_ms` is the time at which this process created or opened the segment.
    """

    base_offset: int
    size_bytes: int
    first_timestamp_ms: int
    created_ms: int
    jitter_ms: int
    indexes_full: bool = False


def batches_before_roll(roll_state: RollState, table: np.ndarray, config: AppendConfig, now_ms: int) -> int:
    """Return how many batches (BATCH_TABLE rows), each appended separately, fit into the segment before it must end.

    A result of 0 means that the segment ends before the first batch. Indexes that the batches would fill are not
    considered. A set that is appended as a whole is one row, with its size, its largest timestamp and its last offset.
    """
    if roll_state.indexes_full:
        return 0
    sizes = table["size_bytes"].astype(np.int64)
    ends = roll_state.size_bytes + np.cumsum(sizes)
    rolls = ends > config.segment_bytes
    times = table["max_timestamp_ms"]
    first_ms = roll_state.first_timestamp_ms if roll_state.size_bytes else int(times[0])
    if first_ms >= 0:
        is_old = times - first_ms > config.roll_ms - roll_state.jitter_ms
    else:
        is_old = np.full(len(table), now_ms - roll_state.created_ms > config.roll_ms - roll_state.jitter_ms)
    rolls |= is_old & (ends - sizes > 0)
    relative = table["last_offset"] - roll_state.base_offset
    rolls |= (relative < 0) | (relative > MAX_RELATIVE_OFFSET)
    return int(np.argmax(rolls)) if rolls.any() else len(table)


def are_full(offset_entries: int, time_entries: int, max_offset_entries: int, max_time_entries: int) -> bool:
    """Return whether one of the indexes is full. The last slot of the time index is for the segment's closing entry."""
    return offset_entries >= max_offset_entries or time_entries >= max_time_entries - 1


def draw_jitter_ms(rng: random.Random, config: AppendConfig) -> int:
    """Return the random time in ms by which a segment ends before its age limit; 0 if no jitter is configured."""
    limit = min(config.segment_jitter_ms, config.segment_ms)
    return rng.randrange(limit) if limit > 0 else 0


def is_flush_due(
    log_end_offset: int, recovery_point: int, last_flush_ms: int, now_ms: int, config: AppendConfig
) -> bool:
    """Return whether a flush is due because of `flush.messages` (counted as offsets not yet durable) or `flush.ms`."""
    unflushed = log_end_offset - recovery_point
    return unflushed >= config.flush_messages or (unflushed > 0 and now_ms - last_flush_ms >= config.flush_ms)
