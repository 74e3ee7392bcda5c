"""Decides whether the active segment of a partition is rolled before its compaction (`--roll-active`).

The segment is rolled only if a round that cleans it is then due, as on a broker that rolled by `segment.ms`.
ROLL_ACTIVE.md in this directory has the reasons and the states on disk; log/append/roll_closed.py rolls segments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from keytail.format import names

if TYPE_CHECKING:
    from keytail.compact.plan import Decision
    from keytail.log.partition import PartitionFacts

Rolling: TypeAlias = Literal["no", "due", "done"]

# Values, or the beginning and end of values, of the row field `active_segment`.
ROLLED, WOULD_ROLL, EMPTY, NOT_ROLLED = "rolled", "would-roll", "empty", "not rolled: "
NOT_DUE = "no compaction is due"
NOT_COMPACTED = "the partition is not compacted"
PREPARED = "what was prepared is committed; to compact the active segment too, run the same command again"


@dataclass(frozen=True)
class Roll:
    """Whether the active segment is rolled; if not, `why_not` is the reason."""

    why_not: str = ""

    @property
    def is_due(self) -> bool:
        return not self.why_not

    def text(self, status: str) -> str:
        """Return the field `active_segment` for the row, with status `status`, of a partition that has not been
        rolled."""
        if self.is_due:
            return WOULD_ROLL if status == "would-compact" else NOT_ROLLED + NOT_COMPACTED
        return EMPTY if self.why_not == EMPTY else NOT_ROLLED + self.why_not


def is_shown(text: str | None) -> bool:
    """Return whether a table shows this value of `active_segment`: a value that the rest of the row implies is not
    shown."""
    return text is not None and text.startswith(NOT_ROLLED) and not text.endswith((NOT_DUE, NOT_COMPACTED))


def after_roll(facts: PartitionFacts) -> PartitionFacts:
    """Return the facts of the same log with a new active segment, which is empty."""
    last = facts.segments[-1]
    new = last._replace(
        base_offset=facts.log_end_offset,
        log_bytes=0,
        index_bytes=0,
        time_index_bytes=0,
        txn_index_bytes=None,
        first_batch_timestamp_ms=-1,
    )
    return replace(facts, segments=(*facts.segments, new))


def as_stopped(facts: PartitionFacts) -> PartitionFacts:
    """Return the facts that a running broker's log would have if the broker were stopped cleanly now and all replicas
    had the same records."""
    segments = facts.segments
    if segments:  # the indexes of an active segment are padded with zeros, and do not show the largest timestamp
        last = segments[-1]
        segments = (*segments[:-1], last._replace(largest_timestamp_ms=last.log_mtime_ns // 1_000_000))
    high_watermark = None if facts.high_watermark is None else facts.log_end_offset
    return replace(facts, segments=segments, clean_shutdown=True, high_watermark=high_watermark, tail_bytes=0)


def reason_against(facts: PartitionFacts) -> str:
    """Return why the active segment must not or need not be rolled; "" if nothing in the facts forbids a roll."""
    if not facts.segments or facts.segments[-1].log_bytes == 0:
        return EMPTY
    end = facts.log_end_offset
    if not facts.clean_shutdown:
        return (
            "the broker was not stopped cleanly, so it recovers this segment first, and may truncate it: start the "
            "broker and stop it cleanly"
        )
    if facts.tail_bytes:
        return f"the {facts.tail_bytes} bytes after the last batch are not a batch"
    if facts.recovery_point > end:
        return f"the recovery point {facts.recovery_point} is above the log end offset {end}: run `keytail verify`"
    if end >= names.MAX_OFFSET:
        return f"no record can follow the log end offset {end}"
    return ""


def with_roll(
    facts: PartitionFacts, plain: Decision, decide_on: Callable[[PartitionFacts], Decision]
) -> tuple[Decision, Roll]:
    """Return the decision with `--roll-active`, and whether the active segment is rolled. Without a roll, the decision
    is `plain`. `decide_on` returns the decision for given facts.
    """
    if why := reason_against(facts):
        return plain, Roll(why)
    rolled = decide_on(after_roll(facts))
    selection = rolled.selection
    if selection is None:
        return plain, Roll(NOT_DUE)
    if selection.first_uncleanable_offset < facts.log_end_offset:
        if plain.status != "would-compact" and plain.selection is not None and plain.selection.limit == selection.limit:
            return plain, Roll(NOT_DUE)  # the decision has the reason
        return plain, Roll(f"{selection.why}, and the log end offset is {facts.log_end_offset}")
    return rolled, Roll("" if rolled.status == "would-compact" else NOT_DUE)
