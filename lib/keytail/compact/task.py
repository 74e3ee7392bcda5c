"""One round over one partition: what it is given, and what it wrote. Small, picklable, the same for every attempt."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from keytail.compact.key_counts import KeyCounts
from keytail.compact.out_of_place.output_record import PlacedFile, SeenFile
from keytail.compact.out_of_place.output_tree import writable
from keytail.config.compaction import CompactionConfig
from keytail.config.message_format import MessageFormat
from keytail.errors import KeytailError
from keytail.format import names
from keytail.format.batch import DELETE_HORIZON
from keytail.kernels.native import HASH_NAME
from keytail.log.fs import FileStat, FileSystem
from keytail.log.partition import PartitionFacts, SegmentFacts
from keytail.log.replace import CleanFile, GroupOutput

Grouping = Literal["kafka", "measured"]
FanOut = Literal["auto", "never", "always"]

NO_REMOVAL_LIMIT = 2**63 - 1


@dataclass(frozen=True)
class Totals:
    """What was written and counted so far, over the rounds of one cleaning; bytes of `.log` files.

    `keys` were put into the map.
    """

    keys: int = 0
    groups: int = 0
    segments: int = 0
    bytes: int = 0
    records: int = 0
    records_read: int = 0
    tombstones_removed: int = 0
    markers_removed: int = 0
    limits_met: int = 0
    large_batches: int = 0


@dataclass(frozen=True)
class HandedOn:
    """What one round of writing hands to the next: where to go on, and the files with what it needs to know.

    Segments below number `next_segment` are replaced, or will be before the next round begins.
    """

    next_segment: int
    survivors: CleanFile
    proof: CleanFile
    totals: Totals

    @property
    def files(self) -> tuple[CleanFile, ...]:
        return self.survivors, self.proof


@dataclass(frozen=True)
class FannedOut:
    """The same of a cleaning by fan-out: `ranges` of segments that become a group each, those that are left; the files
    of the survey, of the markers (None: there are none), of the survivors, and of the proof, by shard; `slices` and
    `bits` as the stages before left them.
    """

    next_segment: int
    ranges: tuple[tuple[int, int], ...]
    settled: CleanFile
    markers: CleanFile | None
    slices: tuple[Any, ...]
    bits: tuple[Any, ...]
    proofs: tuple[CleanFile, ...]
    totals: Totals

    @property
    def files(self) -> tuple[CleanFile, ...]:
        markers = (self.markers,) if self.markers else ()
        return (self.settled, *markers, *(one.file for one in self.bits), *self.proofs)


class NeedsFanOut(KeytailError):
    """A partition with more keys than the memory of one task takes; nothing was written."""


@dataclass(frozen=True)
class OutOfPlace:
    """Where a task writes that leaves its sources alone (out_of_place/OUT_OF_PLACE.md), and what it takes there.

    Scratch files go to directory `path`: that of the partition in the target, or, where the target is an object store
    (`is_local`), one of this host. `source_files` are all that the partition has to take over, as the driver saw them.
    With `only_copies` nothing is cleaned.
    """

    path: str
    source_files: tuple[SeenFile, ...]
    is_local: bool = False
    only_copies: bool = False

    def like(self, fs: FileSystem, source: str) -> FileStat:
        """What a file is made like: its source, with room for its owner to write; of this host's, the directory."""
        if self.is_local:
            return fs.stat(self.path)
        return writable(fs.stat(source))


@dataclass(frozen=True)
class CleaningTask:
    """One cleaning of one partition, as the plan decided it; small, picklable, and the same for every attempt.

    `segments` are all of the partition, as the driver saw them before the first was replaced. The map takes
    `map_memory_bytes`, and holds at most `map_max_entries` keys where that is given. `grouping` "kafka" makes one
    output of each group that Kafka would; "measured" goes by what survived. With `max_scratch_bytes` groups are
    written in rounds of about so many bytes, at least one group a round; `handed_on` is what the round before left.
    Where the keys are more than the map takes, `fan_out` "auto" has the task say so (NeedsFanOut) instead of ending the
    round there as Kafka's does; "always" does not ask. `throttle_bytes_per_s` is for all tasks of a host together.
    From `removal_limit_offset` on tombstones and markers stay, though their time is over (CLEANING.md 14).
    Messages of magic 0 and 1 are written as version 2 or keep their magic (LEGACY.md 4 and 5); where `message_format`
    is "unknown", a partition that has some is refused.
    With `by_file_time` tombstones and markers are removed by the time of their file, and no delete horizon is written,
    as by the cleaners before Kafka 3.1 (CLEANING.md 16).
    With `hottest_keys` the records of each key are counted, and so many of those with most are told, by their hashes,
    or with `show_keys` as they are. That takes 4 of 28 bytes of the map's memory.
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
    max_scratch_bytes: int | None = None
    handed_on: HandedOn | None = None
    fanned_out: FannedOut | None = None
    fan_out: FanOut = "never"
    throttle_bytes_per_s: int | None = None
    removal_limit_offset: int = NO_REMOVAL_LIMIT
    message_format: MessageFormat = "unknown"
    by_file_time: bool = False
    out_of_place: OutOfPlace | None = None
    hottest_keys: int = 0
    show_keys: bool = False

    @property
    def scratch_path(self) -> str:
        """The directory in which files are made."""
        return self.out_of_place.path if self.out_of_place else self.partition_path

    def like(self, fs: FileSystem, source: str) -> FileStat:
        """What a file is made like that comes of this one."""
        return self.out_of_place.like(fs, source) if self.out_of_place else fs.stat(source)

    @property
    def goes_on(self) -> bool:
        """Whether a round has been before."""
        return self.handed_on is not None or self.fanned_out is not None

    @property
    def first_segment(self) -> int:
        """Number of the first segment that is not replaced yet."""
        before = self.handed_on or self.fanned_out
        return before.next_segment if before else 0

    @classmethod
    def of(cls, facts: PartitionFacts, **decided: Any) -> CleaningTask:
        """The cleaning of a surveyed partition; `decided` are the fields that a survey does not know."""
        return cls(
            topic=facts.topic,
            partition=facts.partition,
            partition_path=facts.path,
            segments=facts.segments,
            snapshots=facts.snapshots,
            log_start_offset=facts.log_start_offset,
            log_end_offset=facts.log_end_offset,
            clean_shutdown=facts.clean_shutdown,
            **decided,
        )

    def path(self, base_offset: int, suffix: str) -> str:
        return os.path.join(self.partition_path, names.segment_file(base_offset, suffix))


class SourceCounts(NamedTuple):
    """What a rewrite found in one source segment, by its number: records, and how many of them stay.

    `horizon_batches` of those that are written have a time from which on tombstones or markers in them may go, between
    `first_horizon_ms` and `last_horizon_ms` (-1: there are none).
    """

    segment: int
    records: int
    records_kept: int
    horizon_batches: int = 0
    first_horizon_ms: int = -1
    last_horizon_ms: int = -1

    def and_written(self, batches: np.ndarray) -> SourceCounts:
        """With these rows of a batch table; one with a horizon has it in the place of its base timestamp."""
        kept = self.records_kept + int(batches["record_count"].sum())
        horizons = batches["base_timestamp_ms"][(batches["attributes"] & DELETE_HORIZON) != 0]
        if not len(horizons):
            return self._replace(records_kept=kept)
        first, last = int(horizons.min()), int(horizons.max())
        return self._replace(
            records_kept=kept,
            horizon_batches=self.horizon_batches + len(horizons),
            first_horizon_ms=min(first, self.first_horizon_ms) if self.horizon_batches else first,
            last_horizon_ms=max(last, self.last_horizon_ms),
        )


@dataclass(frozen=True)
class CleaningResult:
    """What a round wrote and what it would leave; numbers are of the whole partition, sizes of `.log` files.

    `limits_met`: outputs that had to end inside a source. `large_batches`: rebuilt to more than `max.message.bytes`.
    `rest`: groups are left for another round; records are counted then only as far as they were read. Out of place,
    `placed` are all files that the partition is to have there, None as long as only its groups are written; with a
    `refusal` they are copies, and it says why.
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
    rest: HandedOn | FannedOut | None = None
    placed: tuple[PlacedFile, ...] | None = None
    refusal: str = ""
    phases_s: dict[str, float] = field(default_factory=dict)
    sources: tuple[SourceCounts, ...] = field(default=(), compare=False)  # of this round, by number
    key_counts: KeyCounts | None = field(default=None, compare=False)  # of the first round, for all


def result_of(
    task: CleaningTask,
    end_offset: int,
    stop: int,
    groups: tuple[GroupOutput, ...],
    totals: Totals,
    untouched_records: int,
) -> CleaningResult:
    """Of a round that took the segments up to `stop`; the others have `untouched_records`."""
    untouched = task.segments[stop:]
    return CleaningResult(
        end_offset=end_offset,
        groups=groups,
        segments_before=len(task.segments),
        segments_after=totals.segments + len(untouched),
        bytes_before=sum(segment.log_bytes for segment in task.segments),
        bytes_after=totals.bytes + sum(segment.log_bytes for segment in untouched),
        records_before=totals.records_read + untouched_records,
        records_after=totals.records + untouched_records,
        tombstones_removed=totals.tombstones_removed,
        markers_removed=totals.markers_removed,
        keys=totals.keys,
        limits_met=totals.limits_met,
        large_batches=totals.large_batches,
    )
