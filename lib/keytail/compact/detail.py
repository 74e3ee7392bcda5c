"""What is known of a partition beside the numbers of its row: for a page that draws it, and too much for a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from keytail.compact.plan import segments_between

if TYPE_CHECKING:
    from keytail.compact.key_counts import KeyCounts
    from keytail.compact.plan import Selection
    from keytail.compact.task import CleaningResult, CleaningTask, SourceCounts
    from keytail.config.compaction import CompactionConfig
    from keytail.log.partition import SegmentFacts

MOST_PARTS = 48


class Part(NamedTuple):
    """Neighbouring segments. `records` and `records_kept` are None where nobody has counted."""

    base_offset: int
    segments: int
    log_bytes: int
    largest_timestamp_ms: int
    records: int | None = None
    records_kept: int | None = None


@dataclass(frozen=True)
class Detail:
    """Of one partition, before a round and, where one was done, by it.

    `clean_bytes`, `dirty_bytes` and `minimum_dirty_ratio` decide whether a round is due. `parts` are its segments, in
    order, merged into at most MOST_PARTS. `keys` were in the map, of `dirty_records` (of whole segments,
    with their markers). Horizons are the times from which on tombstones and markers of so many batches may go, by a
    round later than that. `key_counts`, where keys were counted, are of the records in the map.
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
    """Of a round that is done: `sources` and `phases_s` of all its rounds of writing, `key_counts` of the first one,
    `result` of the last one."""
    known = {one.segment: one for one in sources}
    dirty = segments_between(task.segments, task.first_dirty_offset, max(result.end_offset, task.first_dirty_offset))
    # By file time a horizon that is left of an earlier cleaner means nothing.
    having = [one for one in known.values() if one.horizon_batches and not task.by_file_time]
    return Detail(
        delete_retention_ms=task.config.delete_retention_ms,
        first_dirty_offset=task.first_dirty_offset,
        end_dirty_offset=result.end_offset,
        parts=parts_of(task.segments, known),
        keys=result.keys,
        dirty_records=sum(known[number].records for number in range(*dirty) if number in known),
        horizon_batches=sum(one.horizon_batches for one in having),
        first_horizon_ms=min((one.first_horizon_ms for one in having), default=None),
        last_horizon_ms=max((one.last_horizon_ms for one in having), default=None),
        phases_s=dict(phases_s),
        key_counts=key_counts,
    )


def parts_of(segments: Sequence[SegmentFacts], known: Mapping[int, SourceCounts] | None = None) -> tuple[Part, ...]:
    """At most MOST_PARTS, of about as many segments each. One of which not all were counted is not counted."""
    a_part = max(1, -(-len(segments) // MOST_PARTS))
    parts = []
    for first in range(0, len(segments), a_part):
        some = segments[first : first + a_part]
        counts = [(known or {}).get(number) for number in range(first, first + len(some))]
        counted = [one for one in counts if one is not None]
        are_all = len(counted) == len(some)
        parts.append(
            Part(
                some[0].base_offset,
                len(some),
                sum(segment.log_bytes for segment in some),
                max(segment.largest_timestamp_ms for segment in some),
                sum(one.records for one in counted) if are_all else None,
                sum(one.records_kept for one in counted) if are_all else None,
            )
        )
    return tuple(parts)
