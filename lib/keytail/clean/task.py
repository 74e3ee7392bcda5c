"""One round over one partition: what it is given, and what it wrote. Small, picklable, the same for every attempt."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Literal

from keytail.clean.plan import CompactionConfig
from keytail.format import names
from keytail.kernels.native import HASH_NAME
from keytail.log.partition import SegmentFacts
from keytail.log.replace import GroupOutput

Grouping = Literal["kafka", "measured"]


@dataclass(frozen=True)
class CleaningTask:
    """One round over one partition, as the plan decided it; small, picklable, and the same for every attempt.

    `segments` are all of the partition, as the driver saw them. The map takes `map_memory_bytes`, and holds at
    most `map_max_entries` keys where that is given. `grouping` "kafka" makes one output of each group that Kafka
    would; "measured" goes by what survived.
    """

    topic: str
    partition: int
    partition_path: str
    segments: tuple[SegmentFacts, ...]
    snapshots: tuple[int, ...]
    log_start_offset: int
    log_end_offset: int
    first_dirty_offset: int
    first_uncleanable_offset: int
    now_ms: int
    config: CompactionConfig
    run_id: str
    attempt: str = "0"
    clean_shutdown: bool = True
    drop_keyless: bool = False
    grouping: Grouping = "measured"
    map_memory_bytes: int = 128 << 20
    map_max_entries: int | None = None
    hash_name: str = HASH_NAME
    hash_seed: int = 0

    def path(self, base_offset: int, suffix: str) -> str:
        return os.path.join(self.partition_path, names.segment_file(base_offset, suffix))


@dataclass(frozen=True)
class CleaningResult:
    """What a round wrote and what it would leave; numbers are of the whole partition, sizes of `.log` files.

    `limits_met`: outputs that had to end inside a source. `large_batches`: rebuilt to more than `max.message.bytes`.
    """

    end_offset: int
    groups: tuple[GroupOutput, ...]
    segments_before: int
    segments_after: int
    bytes_before: int
    bytes_after: int
    records_before: int
    records_after: int
    tombstones_removed: int
    markers_removed: int
    keys: int
    limits_met: int = 0
    large_batches: int = 0
    phases_s: dict[str, float] = field(default_factory=dict)
