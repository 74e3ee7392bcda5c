"""Decides which offsets to clean, whether a round is due, which segments are merged, and what forbids a round.

All functions are pure (the time is an argument, no file is accessed). Sections and groups are chosen as by Kafka 4.3's
LogCleanerManager, LogToClean and Cleaner.groupSegmentsBySize. Other modules list the files and read the user's choices.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Literal

from keytail.config.compaction import CompactionConfig
from keytail.durations import duration_text
from keytail.errors import NO_ERROR, ErrorText, joined, refusal
from keytail.format import names
from keytail.log.partition import reasons_against_change

if TYPE_CHECKING:
    from keytail.cli.options import HighWatermark
    from keytail.compact.rules import Rules
    from keytail.log.partition import PartitionFacts, SegmentFacts
    from keytail.log.producers import Unstable

MAX_OFFSET_SPAN = 2**31 - 1  # an index stores offsets relative to the segment's base offset, as int32
INDEX_ENTRY_BYTES = 8
TIME_INDEX_ENTRY_BYTES = 12
NEWEST_SEGMENT_TOLERANCE_MS = 3_600_000

# The settings that determine what a round removes; then the settings that determine whether a round is due.
_REMOVES_BY = ("cleanup.policy", "delete.retention.ms", "min.compaction.lag.ms", "remote.storage.enable")
_DUE_BY = ("max.compaction.lag.ms", "min.cleanable.dirty.ratio")

Limit = Literal["active segment", "high watermark", "open transaction", "recovery point", "min.compaction.lag.ms"]
Status = Literal["would-compact", "clean", "skipped", "refused"]

# The remedy for each rule that ends the section.
_LIFTED_BY: dict[Limit, str] = {
    "active segment": "Nothing to do: only --roll-active cleans the active segment",
    "high watermark": "Let the followers catch up while the broker runs, then stop it",
    "open transaction": "Let the transaction end, or abort it (kafka-transactions.sh), while the broker runs",
    "recovery point": "Start the broker, which recovers the log, and stop it cleanly",
    "min.compaction.lag.ms": "Nothing to do: the segment is cleaned when it is old enough",
}


@dataclass(frozen=True)
class Selection:
    """The section of one partition that a round would clean, and whether a round is due.

    `limit` is the rule that ends the section; `why` describes the rule with numbers. `blocker` is the reason, with
    numbers, why no round is due ("" if `eligible`); `remedy` states what to do about that reason, or that there is
    nothing to do. `rewrite_checkpoint`: the entry of the cleaner's checkpoint is outside the log, and is corrected even
    if no round runs.
    """

    first_dirty_offset: int
    first_uncleanable_offset: int
    clean_bytes: int
    cleanable_bytes: int
    total_bytes: int
    dirty_ratio: float
    must_compact_now: bool
    rewrite_checkpoint: bool
    eligible: bool
    blocker: str
    limit: Limit = "active segment"
    why: str = ""
    remedy: str = ""

    @property
    def is_clean(self) -> bool:
        """Whether only the active segment is left to clean."""
        return self.cleanable_bytes == 0 and self.limit == "active segment"

    @property
    def held_back(self) -> str:
        """The rule that ends the section of a due round before the active segment, with a remedy; "" without such a
        rule."""
        if not self.eligible or self.limit == "active segment":
            return ""
        return f"cleaned only up to offset {self.first_uncleanable_offset}: {self.why}. {_LIFTED_BY[self.limit]}"


@dataclass(frozen=True)
class Decision:
    """The decision for one partition: its status in a plan, the reason, and the section if there is one."""

    status: Status
    error: ErrorText
    selection: Selection | None
    remedy: str = ""  # remedy for a skipped or clean partition; if refused, `error` includes the remedy


def settings_of_compaction(*, force: bool = False) -> tuple[str, ...]:
    """Return Kafka's names of the settings that must be known to compact a topic; with `force`, only the settings that
    determine what is removed.
    """
    return _REMOVES_BY if force else (*_REMOVES_BY, *_DUE_BY)


_base_offset = attrgetter("base_offset")


def segments_between(segments: Sequence[SegmentFacts], from_offset: int, to_offset: int) -> tuple[int, int]:
    """Return the index range [a, b) from the segment that contains `from_offset` to the last segment with a base offset
    below `to_offset`.

    Equal offsets give an empty range, even inside a segment. If no base offset is at or below `from_offset`, the range
    starts at the first segment. Kafka's LogSegments.values returns the same segments. Raises ValueError if the range
    ends before its start.
    """
    if to_offset < from_offset:
        raise ValueError(f"segment range ends at {to_offset}, before its start {from_offset}")
    end = bisect_left(segments, to_offset, key=_base_offset)
    if from_offset == to_offset:
        return end, end
    return max(bisect_right(segments, from_offset, key=_base_offset) - 1, 0), end


def group_segments(
    segments: Sequence[SegmentFacts],
    end_offset: int,
    first_uncleanable_offset: int,
    segment_bytes: int,
    segment_index_bytes: int,
) -> tuple[tuple[int, int], ...]:
    """Return the groups of segments to merge, as index ranges [a, b), of the segments that begin below `end_offset`.

    Groups are formed greedily, in ascending order, by sizes before cleaning, as in Kafka's Cleaner.groupSegmentsBySize:
    a sum may equal its limit, and a segment of 0 bytes is merged whatever the span of offsets.
    """
    _, end = segments_between(segments, 0, end_offset)
    groups = []
    start = 0
    while start < end:
        stop = start + 1
        log, index, time_index = _sizes(segments[start])
        while stop < end:
            more_log, more_index, more_time_index = _sizes(segments[stop])
            log, index, time_index = log + more_log, index + more_index, time_index + more_time_index
            next_base = segments[stop + 1].base_offset if stop + 1 < end else first_uncleanable_offset
            fits_span = more_log == 0 or next_base - 1 - segments[start].base_offset <= MAX_OFFSET_SPAN
            fits_indexes = index <= segment_index_bytes and time_index <= segment_index_bytes
            if not (log <= segment_bytes and fits_indexes and fits_span):
                break
            stop += 1
        groups.append((start, stop))
        start = stop
    return tuple(groups)


def _sizes(segment: SegmentFacts) -> tuple[int, int, int]:
    """Return the bytes of the log, the offset index and the time index; for indexes, only whole entries count, as on a
    broker."""
    index = segment.index_bytes or 0
    time_index = segment.time_index_bytes or 0
    return (
        segment.log_bytes,
        index - index % INDEX_ENTRY_BYTES,
        time_index - time_index % TIME_INDEX_ENTRY_BYTES,
    )


def select(
    facts: PartitionFacts,
    config: CompactionConfig,
    now_ms: int,
    *,
    force: bool = False,
    from_log_start: bool = False,
    high_watermark: HighWatermark = "checkpoint",
    unstable: Unstable | None = None,
) -> Selection:
    """Return the section that a round at `now_ms` would clean, and whether a round is due.

    With `force`, the dirty ratio and the maximum lag are ignored; with `from_log_start`, the checkpoint is ignored. A
    partition without a checkpointed high watermark has nothing to clean, unless `high_watermark` is "log-end" (a
    checkpointed high watermark always takes precedence). `unstable`: the offset at which the first undecided
    transaction begins.
    """
    if not facts.segments:
        blocker = "the partition has no segments"
        start = facts.log_start_offset
        return Selection(start, start, 0, 0, 0, 0.0, False, False, False, blocker, remedy="Nothing to do")
    first_dirty, rewrite_checkpoint = _first_dirty(facts, from_log_start)
    first_uncleanable, limit, why = _first_uncleanable(
        facts,
        config,
        now_ms,
        first_dirty,
        high_watermark=high_watermark,
        unstable=unstable,
    )

    clean_bytes = sum(s.log_bytes for s in facts.segments if s.base_offset < first_dirty)
    a, b = segments_between(facts.segments, min(first_dirty, first_uncleanable), first_uncleanable)
    cleanable_bytes = sum(s.log_bytes for s in facts.segments[a:b])
    total_bytes = clean_bytes + cleanable_bytes
    ratio = cleanable_bytes / total_bytes if total_bytes else 0.0
    overdue = _is_overdue(facts.segments, first_dirty, config.max_compaction_lag_ms, now_ms)

    remedy = ""
    if "compact" not in config.cleanup_policy:
        blocker = f"cleanup.policy is [{','.join(sorted(config.cleanup_policy))}], without compact"
        remedy = "Nothing to do: such a topic is not compacted"
    elif cleanable_bytes == 0:
        blocker = f"nothing to clean from first dirty offset {first_dirty} on: {why}"
        remedy = _LIFTED_BY[limit]
    elif force or overdue or ratio > config.min_cleanable_dirty_ratio:
        blocker = ""
    else:
        minimum = config.min_cleanable_dirty_ratio
        blocker = f"dirty ratio {ratio:.4g} is not above min.cleanable.dirty.ratio {minimum:g}"
        remedy = "Nothing to do: a round becomes due when more is written; --force compacts the partition now"
    return Selection(
        first_dirty_offset=first_dirty,
        first_uncleanable_offset=first_uncleanable,
        clean_bytes=clean_bytes,
        cleanable_bytes=cleanable_bytes,
        total_bytes=total_bytes,
        dirty_ratio=ratio,
        must_compact_now=overdue,
        rewrite_checkpoint=rewrite_checkpoint,
        eligible=not blocker,
        blocker=blocker,
        limit=limit,
        why=why,
        remedy=remedy,
    )


def _first_dirty(facts: PartitionFacts, from_log_start: bool) -> tuple[int, bool]:
    """Return the offset to clean from, and whether the checkpoint is outside the log and must be rewritten."""
    checkpoint = facts.cleaner_checkpoint
    if checkpoint is None:
        return facts.log_start_offset, False
    outside = checkpoint < facts.log_start_offset or checkpoint > facts.log_end_offset
    return (facts.log_start_offset if outside or from_log_start else checkpoint), outside


def _first_uncleanable(
    facts: PartitionFacts,
    config: CompactionConfig,
    now_ms: int,
    first_dirty: int,
    *,
    high_watermark: HighWatermark,
    unstable: Unstable | None,
) -> tuple[int, Limit, str]:
    """Return the base offset of the segment before which cleaning ends, the rule that ends cleaning, and a description
    of this rule with numbers.

    If several rules end at the same segment, the active segment takes precedence, because waiting does not move the end
    beyond it.
    """
    active_base = facts.segments[-1].base_offset
    start = facts.log_start_offset
    bounds: list[tuple[int, Limit, str]] = [
        (active_base, "active segment", f"the active segment starts at offset {active_base}")
    ]
    # A broker first limits the high watermark to the offsets of the log; here, the high watermark is limited by the
    # first dirty offset and the base of the active segment.
    if facts.high_watermark is not None:
        why = f"the high watermark is {facts.high_watermark}"
        bounds.append((facts.high_watermark, "high watermark", why))
    elif high_watermark == "checkpoint":
        bounds.append((start, "high watermark", "the partition has no high watermark"))
    if unstable is not None:
        bounds.append((max(unstable.offset, start), "open transaction", unstable.why))
    if not facts.clean_shutdown:
        point = facts.recovery_point
        bounds.append((point, "recovery point", f"the recovery point after an unclean shutdown is {point}"))
    if config.min_compaction_lag_ms > 0:
        a, b = _inactive_from(facts.segments, first_dirty)
        for segment in facts.segments[a:b]:
            age_ms = now_ms - segment.largest_timestamp_ms
            lag_ms = config.min_compaction_lag_ms
            if age_ms < lag_ms:
                why = (
                    f"the segment at offset {segment.base_offset} is {duration_text(age_ms)} old, younger than "
                    f"min.compaction.lag.ms {lag_ms} ({duration_text(lag_ms)})"
                )
                bounds.append((segment.base_offset, "min.compaction.lag.ms", why))
                break
    rounded = [(_round_down(facts.segments, max(at, first_dirty)), limit, why) for at, limit, why in bounds]
    return min(rounded, key=lambda bound: bound[0])


def _inactive_from(segments: Sequence[SegmentFacts], from_offset: int) -> tuple[int, int]:
    """Return the index range of the inactive segments, from the segment that contains `from_offset` on."""
    active_base = segments[-1].base_offset
    return segments_between(segments, min(from_offset, active_base), active_base)


def _round_down(segments: Sequence[SegmentFacts], offset: int) -> int:
    """Return the base of the inactive segment that contains `offset`, or the base of the active segment."""
    a, b = _inactive_from(segments, offset)
    return segments[a].base_offset if a < b else segments[-1].base_offset


def _is_overdue(segments: Sequence[SegmentFacts], first_dirty: int, max_compaction_lag_ms: int, now_ms: int) -> bool:
    """Return whether the first batch of a dirty inactive segment, if its time is above 0, is older than the maximum
    lag.
    """
    cut_ms = now_ms - max(max_compaction_lag_ms, 0)
    if cut_ms <= 0:
        return False
    a, b = _inactive_from(segments, first_dirty)
    return any(0 < segment.first_batch_timestamp_ms < cut_ms for segment in segments[a:b])


def refusals(
    facts: PartitionFacts,
    config: CompactionConfig,
    unknown: ErrorText,
    now_ms: int,
    *,
    high_watermark: HighWatermark = "checkpoint",
    unsafe_clock: bool = False,
) -> list[ErrorText]:
    """Return the reasons why no record of this partition may be removed, each with a remedy; empty if there are none.

    `unknown` names the settings needed for removal that were neither read nor given; it is empty if all are known. A
    policy without `compact` and an open transaction are no reasons to refuse a partition: such partitions are skipped.
    """
    reasons = list(facts.problems)
    if unknown:
        reasons.append(unknown)
    is_unread = names.HIGH_WATERMARK_CHECKPOINT in facts.unread  # the unread checkpoint may have an entry
    if facts.high_watermark is None and high_watermark == "checkpoint" and not is_unread:
        reasons.append(
            refusal(
                "no high watermark: replication-offset-checkpoint has no entry for the partition; give "
                "--high-watermark log-end if this copy never rejoins a cluster or all replicas were stopped",
                slug="no-high-watermark",
            )
        )
    reasons += reasons_against_change(facts, config.remote_storage_enable)
    newest_ms = max(s.log_mtime_ns for s in facts.segments) // 1_000_000 if facts.segments else now_ms
    if not unsafe_clock and newest_ms - now_ms > NEWEST_SEGMENT_TOLERANCE_MS:
        reasons.append(
            refusal(
                f"the clock ({now_ms} ms) is {duration_text(newest_ms - now_ms)} behind the newest segment "
                f"(modified at {newest_ms} ms): correct the clock",
                slug="clock-behind-segments",
            )
        )
    return reasons


def decide(
    facts: PartitionFacts,
    config: CompactionConfig,
    unknown: ErrorText,
    rules: Rules,
    *,
    policy_known: bool,
    unstable: Unstable | None = None,
) -> Decision:
    """Return the decision for a partition. A partition with a known policy without `compact` is "skipped", even if it
    has reasons to be refused.

    `unknown` is as in `refusals`. `policy_known`: cleanup.policy was read or given.
    """
    source = rules.high_watermark
    reasons = refusals(
        facts, config, unknown, rules.now_ms, high_watermark=source, unsafe_clock=rules.unsafe_clock
    )  # fmt: skip
    skipped = policy_known and "compact" not in config.cleanup_policy
    if reasons and not skipped:
        return Decision("refused", joined(reasons), None)
    selection = select(
        facts, config, rules.now_ms, force=rules.force, from_log_start=rules.from_log_start, high_watermark=source,
        unstable=unstable,
    )  # fmt: skip
    if selection.eligible:
        return Decision("would-compact", NO_ERROR, selection)
    status: Status = "clean" if selection.is_clean and not skipped else "skipped"
    return Decision(status, ErrorText(selection.blocker), selection, selection.remedy)
