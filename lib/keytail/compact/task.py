"""The input and the output of one pass over one partition. Input and output are small and picklable; the input is the
same for every attempt."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np

from keytail.compact.map_phase.key_counts import KeyCounts
from keytail.compact.out_of_place.output_record import PlacedFile, SeenFile
from keytail.compact.out_of_place.output_tree import writable
from keytail.compact.roll import Rolling
from keytail.config.compaction import CompactionConfig
from keytail.config.message_format import MessageFormat
from keytail.errors import NO_ERROR, ErrorText, KeytailError
from keytail.format import names
from keytail.format.batch import DELETE_HORIZON
from keytail.kernels.native import HASH_NAME
from keytail.kernels.proof.key_hash import SECRET_BYTES
from keytail.log.fs import FileStat, FileSystem
from keytail.log.partition import PartitionFacts, SegmentFacts
from keytail.log.replacement.replace import CleanFile, GroupOutput

if TYPE_CHECKING:
    from keytail.compact.write_phase.counts import Counts

Grouping = Literal["kafka", "measured"]
FanOut = Literal["auto", "never", "always"]

NO_REMOVAL_LIMIT = 2**63 - 1


@dataclass(frozen=True)
class Totals:
    """Totals over all passes of one round so far; bytes are those of `.log` files.

    `keys` is the number of keys put into the map; `groups`, `segments`, `bytes` and `records` are what was written;
    `limits_met` and `large_batches` are as in CleaningResult.
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

    def and_written(
        self, groups: Sequence[GroupOutput], counts: Counts, log_bytes: int, records: int, splits: int
    ) -> Totals:
        """Return the totals plus the written `groups`, with their bytes and records, `splits` at limits, and the counts
        of the rewrite."""
        return Totals(
            keys=self.keys,
            groups=self.groups + len(groups),
            segments=self.segments + sum(len(group.segments) for group in groups),
            bytes=self.bytes + log_bytes,
            records=self.records + records,
            records_read=self.records_read + counts.records_read,
            tombstones_removed=self.tombstones_removed + counts.tombstones_removed,
            markers_removed=self.markers_removed + counts.markers_removed,
            limits_met=self.limits_met + splits,
            large_batches=self.large_batches + counts.large_batches,
        )


@dataclass(frozen=True)
class SavedState:
    """What one pass saves for the next pass: where to continue, and the files with the state that the next pass needs.

    Segments below number `next_segment` are replaced before the next pass begins.
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
    """What one pass of a fan-out saves for the next pass. `ranges` are the remaining ranges of segments, each of which
    becomes a group. `settled` is the file of the survey, `markers` the file of the markers (None: there are none).
    `bits` and `proofs` have the files of each shard; `slices` and `bits` are results of earlier stages.
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
        return (self.settled, *markers, *(item.file for item in self.bits), *self.proofs)


class NeedsFanOut(KeytailError):
    """A partition has more keys than fit into the memory of one task; nothing was written."""

    default_slug = "needs-fan-out"


@dataclass(frozen=True)
class OutOfPlace:
    """Where a task out of place writes, and which files the task copies (out_of_place/OUT_OF_PLACE.md).

    Scratch files are written to directory `path`: the partition's directory in the target or, if the target is an
    object store (`is_local`), a directory of this host. `source_files` are all files that the copied partition must
    have, as listed by the driver. With `only_copies`, nothing is cleaned.
    """

    path: str
    source_files: tuple[SeenFile, ...]
    is_local: bool = False
    only_copies: bool = False

    def like(self, fs: FileSystem, source: str) -> FileStat:
        """Return the attributes for a new file: those of its source with write permission for the owner or, with
        `is_local`, those of `path`.
        """
        if self.is_local:
            return fs.stat(self.path)
        return writable(fs.stat(source))


@dataclass(frozen=True)
class CleaningTask:
    """One cleaning of one partition, or one pass of it, as decided by the plan.

    `segments` are all segments of the partition, as listed by the driver before any segment was replaced. The map takes
    `map_memory_bytes`, and has at most `map_max_entries` keys if that is given. `grouping` "kafka" makes one output of
    each group that Kafka would form; "measured" uses the sizes after cleaning. With `max_scratch_bytes`, groups are
    written in passes of about that many bytes, at least one group per pass, except out of place; `saved_state` is the
    state saved by the previous pass.

    If there are more keys than the map can hold, `fan_out` "auto" makes the task raise NeedsFanOut, whereas Kafka ends
    the round there; "always" uses a fan-out regardless. `throttle_bytes_per_s` is the limit for all tasks of a host
    together. From `removal_limit_offset` on, tombstones and markers are retained even after their retention
    (CLEANING.md 14).

    Messages of magic 0 and 1 are written as version 2 or keep their magic (LEGACY.md 4 and 5); if `message_format` is
    "unknown", a partition that has such messages is refused. With `by_file_time`, tombstones and markers are removed by
    the time of their file, and no delete horizon is written, as in Kafka before 3.1 (CLEANING.md 16).

    With `is_preparation`, the output is left for a later run to commit, and a broker may run (prepared/PREPARED.md):
    only the segments that the output replaces must not change. `prepared` is the output of a preparation that this run
    commits; `run_id` is then the id of the run that prepared it.

    More than one thread (`threads`) changes only the duration and the memory of the task, which needs up to 512 MiB per
    thread.

    With `roll` "due", the last segment does not exist until the driver has rolled the active segment (compact/roll.py).

    With `hottest_keys`, the records of each key are counted, and that many keys with the most records are reported, by
    their hashes or, with `show_keys`, by their bytes. The counts take 4 of 28 bytes of the map's memory.
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
    # Every pass, part and attempt hashes keys for the proof with this secret (kernels/proof/key_hash.py).
    proof_secret: bytes = field(default_factory=partial(os.urandom, SECRET_BYTES), repr=False, compare=False)
    max_scratch_bytes: int | None = None
    saved_state: SavedState | None = None
    fanned_out: FannedOut | None = None
    fan_out: FanOut = "never"
    throttle_bytes_per_s: int | None = None
    removal_limit_offset: int = NO_REMOVAL_LIMIT
    message_format: MessageFormat = "unknown"
    by_file_time: bool = False
    out_of_place: OutOfPlace | None = None
    hottest_keys: int = 0
    show_keys: bool = False
    is_preparation: bool = False
    threads: int = 1
    prepared: Prepared | None = None
    roll: Rolling = "no"
    would: ClassVar[str] = "would-compact"  # the status in a plan

    @property
    def begins_at(self) -> int:
        """The offset at which the section to change begins."""
        return self.first_dirty_offset

    def next_checkpoint(self, end_offset: int) -> int:
        """Return the cleaner's checkpoint after this run, which ended at `end_offset`."""
        return end_offset

    @property
    def scratch_path(self) -> str:
        """The directory for scratch files."""
        return self.out_of_place.path if self.out_of_place else self.partition_path

    def like(self, fs: FileSystem, source: str) -> FileStat:
        """Return the attributes for a file made from `source`."""
        return self.out_of_place.like(fs, source) if self.out_of_place else fs.stat(source)

    @property
    def segments_before(self) -> int:
        """The number of segments before the run."""
        return len(self.segments) - (self.roll != "no")

    @property
    def committing_run_id(self) -> str:
        """The id of the run that puts the output in place."""
        return self.prepared.run_id if self.prepared else self.run_id

    @property
    def continues(self) -> bool:
        """Whether an earlier pass has run."""
        return self.saved_state is not None or self.fanned_out is not None

    @property
    def first_segment(self) -> int:
        """Number of the first segment that is not replaced yet."""
        before = self.saved_state or self.fanned_out
        return before.next_segment if before else 0

    @classmethod
    def of(cls, facts: PartitionFacts, **decided: Any) -> CleaningTask:
        """Return the task for a surveyed partition; `decided` has the fields that are not part of a survey."""
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

    def end_of(self, number: int) -> int:
        """Return the end offset of segment `number`: the base offset of the next segment, or the log end offset."""
        return self.segments[number + 1].base_offset if number + 1 < len(self.segments) else self.log_end_offset

    def path(self, base_offset: int, suffix: str) -> str:
        return os.path.join(self.partition_path, names.segment_file(base_offset, suffix))


class SourceCounts(NamedTuple):
    """The counts of a rewrite for the source segment with number `segment`: its records, and how many of them are
    retained.

    `horizon_batches` is the number of written batches with a delete horizon, the time after which their tombstones or
    marker may be removed; the horizons are between `first_horizon_ms` and `last_horizon_ms` (-1: there are none).
    """

    segment: int
    records: int
    records_kept: int
    horizon_batches: int = 0
    first_horizon_ms: int = -1
    last_horizon_ms: int = -1

    def and_written(self, batches: np.ndarray) -> SourceCounts:
        """Return the counts plus the counts of written batches. `batches` are rows of a batch table, in which a delete
        horizon takes the place of the base timestamp.
        """
        horizons = batches["base_timestamp_ms"][(batches["attributes"] & DELETE_HORIZON) != 0]
        first, last = (int(horizons.min()), int(horizons.max())) if len(horizons) else (-1, -1)
        kept = int(batches["record_count"].sum())
        return self.and_more(SourceCounts(self.segment, 0, kept, len(horizons), first, last))

    def and_more(self, later: SourceCounts) -> SourceCounts:
        """Return the sum of these counts and `later`, the counts of a later part of the segment."""
        if not self.horizon_batches or not later.horizon_batches:
            horizons = later if later.horizon_batches else self
            first, last = horizons.first_horizon_ms, horizons.last_horizon_ms
        else:
            first = min(self.first_horizon_ms, later.first_horizon_ms)
            last = max(self.last_horizon_ms, later.last_horizon_ms)
        return self._replace(
            records=self.records + later.records,
            records_kept=self.records_kept + later.records_kept,
            horizon_batches=self.horizon_batches + later.horizon_batches,
            first_horizon_ms=first,
            last_horizon_ms=last,
        )


@dataclass(frozen=True)
class CleaningResult:
    """What a pass wrote, and the partition's size before and after. All counts are for the whole partition; bytes are
    those of `.log` files.

    `limits_met`: number of outputs that had to end inside a source. `large_batches`: number of batches rebuilt to more
    than `max.message.bytes`. `rest`: the state for the next pass, if groups remain; with such a state, records are
    counted only as far as they were read. Out of place, `placed` are all files that the partition must have in the
    target, or None while only its groups are written; if `refusal` has a reason, all of these files are copies.
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
    rest: SavedState | FannedOut | None = None
    placed: tuple[PlacedFile, ...] | None = None
    refusal: ErrorText = NO_ERROR
    phases_s: dict[str, float] = field(default_factory=dict)
    # Counts of this pass, by number of the segment.
    sources: tuple[SourceCounts, ...] = field(default=(), compare=False)
    # Counts of the first pass, which hold for all passes.
    key_counts: KeyCounts | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Prepared:
    """What an earlier run has prepared for a partition: the result of its task, and the names of all files of the
    preparation. `run_id` is the id of the run that commits the preparation.
    """

    result: CleaningResult
    files: frozenset[str]
    run_id: str


def result_of(
    task: CleaningTask,
    end_offset: int,
    stop: int,
    groups: tuple[GroupOutput, ...],
    totals: Totals,
    untouched_records: int,
) -> CleaningResult:
    """Return the result of a pass that ended before segment number `stop`. `untouched_records` is the number of records
    in the segments that no pass rewrites."""
    untouched = task.segments[stop:]
    return CleaningResult(
        end_offset=end_offset,
        groups=groups,
        segments_before=task.segments_before,
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
