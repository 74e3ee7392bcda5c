"""The details of a partition that only the page of a report shows, and not the row of a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from keytail.compact.plan import segments_between

if TYPE_CHECKING:
    from keytail.compact.map_phase.key_counts import KeyCounts
    from keytail.compact.plan import Selection
    from keytail.compact.task import CleaningResult, CleaningTask, SourceCounts
    from keytail.config.compaction import CompactionConfig
    from keytail.log.partition import SegmentFacts

MAX_PARTS = 48


class Part(NamedTuple):
    """Some adjacent segments: the first base offset, the number of segments, the bytes of their logs, the largest
    timestamp, and the numbers of records before and after a round, which are None if records were not counted."""

    base_offset: int
    segments: int
    log_bytes: int
    largest_timestamp_ms: int
    records: int | None = None
    records_kept: int | None = None


@dataclass(frozen=True)
class Detail:
    """Details of one partition before a round and, if a round was done, of that round.

    `clean_bytes`, `dirty_bytes` and `minimum_dirty_ratio` decide whether a round is due. `parts` are at most MAX_PARTS
    parts, each of adjacent segments, in order. `keys` is the number of keys in the map; `dirty_records` is the number
    of records, including control records, in the segments of the mapped section. The horizons are the earliest and the
    latest time after which a round may remove tombstones or markers of `horizon_batches` batches. `key_counts` (None:
    keys were not counted) are the KeyCounts of the mapped records.
    """

    clean_bytes: int | None = None
    dirty_bytes: int | None = None
    minimum_dirty_ratio: float | None = None
    delete_retention_ms: int | None = None
    first_dirty_offset: int | None = None
    end_dirty_offset: int | None = None
    parts: tuple[Part, ...] = ()
    keys: int | None = None
    dirty_records: int | None = None
    horizon_batches: int | None = None
    first_horizon_ms: int | None = None
    last_horizon_ms: int | None = None
    phases_s: Mapping[str, float] = field(default_factory=dict)
    key_counts: KeyCounts | None = None


def detail_of_plan(
    segments: Sequence[SegmentFacts], selection: Selection | None, config: CompactionConfig | None
) -> Detail:
    return Detail(
        clean_bytes=selection.clean_bytes if selection else None,
        dirty_bytes=selection.cleanable_bytes if selection else None,
        minimum_dirty_ratio=config.min_cleanable_dirty_ratio if config else None,
        delete_retention_ms=config.delete_retention_ms if config else None,
        first_dirty_offset=selection.first_dirty_offset if selection else None,
        end_dirty_offset=selection.first_uncleanable_offset if selection else None,
        parts=parts_of(segments),
    )


def detail_of_result(
    task: CleaningTask,
    result: CleaningResult,
    sources: Iterable[SourceCounts],
    phases_s: Mapping[str, float],
    key_counts: KeyCounts | None = None,
) -> Detail:
    """Return the details of a finished round. `sources` and `phases_s` cover all passes, `key_counts` is from the first
    pass, `result` from the last pass.
    """
    known = {source.segment: source for source in sources}
    dirty = segments_between(task.segments, task.first_dirty_offset, max(result.end_offset, task.first_dirty_offset))
    # If tombstones are removed by file time, a delete horizon left by an earlier cleaner has no meaning.
    having = [item for item in known.values() if item.horizon_batches and not task.by_file_time]
    return Detail(
        delete_retention_ms=task.config.delete_retention_ms,
        first_dirty_offset=task.first_dirty_offset,
        end_dirty_offset=result.end_offset,
        parts=parts_of(task.segments, known),
        keys=result.keys,
        dirty_records=sum(known[number].records for number in range(*dirty) if number in known),
        horizon_batches=sum(item.horizon_batches for item in having),
        first_horizon_ms=min((item.first_horizon_ms for item in having), default=None),
        last_horizon_ms=max((item.last_horizon_ms for item in having), default=None),
        phases_s=dict(phases_s),
        key_counts=key_counts,
    )


def parts_of(segments: Sequence[SegmentFacts], known: Mapping[int, SourceCounts] | None = None) -> tuple[Part, ...]:
    """Return the segments divided into at most MAX_PARTS parts, all but the last with the same number of segments. A
    part has counts if all of its segments have counts in `known`, by number of the segment.
    """
    a_part = max(1, -(-len(segments) // MAX_PARTS))
    parts = []
    for first in range(0, len(segments), a_part):
        some = segments[first : first + a_part]
        counts = [(known or {}).get(number) for number in range(first, first + len(some))]
        counted = [item for item in counts if item is not None]
        are_all = len(counted) == len(some)
        parts.append(
            Part(
                some[0].base_offset,
                len(some),
                sum(segment.log_bytes for segment in some),
                max(segment.largest_timestamp_ms for segment in some),
                sum(item.records for item in counted) if are_all else None,
                sum(item.records_kept for item in counted) if are_all else None,
            )
        )
    return tuple(parts)
