"""Applies retention to one partition: decides which segments to remove and why, then removes them.

The decisions are pure functions, with the time as a parameter, and follow Kafka 4.3's UnifiedLog.deleteOldSegments.
The removal may be interrupted at any moment. EXPIRE.md beside this file has the rules and every state on disk. The
caller decides whether a partition may be changed at all, holds the locks and has resolved leftovers.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from keytail.durations import duration_text
from keytail.errors import ErrorText, refusal
from keytail.expire.ages import Age, claimed_age, segment_ends
from keytail.expire.command import ExpiredSegment, Finding, Reason
from keytail.format import names
from keytail.log.checkpoint import read_epochs, update_offset, write_epochs
from keytail.log.empty_segment import make_empty_segment
from keytail.log.fs import FileSystem
from keytail.log.lock import refuse_lost
from keytail.log.partition import PartitionFacts, SegmentFacts, refuse_changed

HighWatermarkSource = Literal["checkpoint", "log-end"]


_BY_AGE_AND_SIZE = ("retention.ms", "retention.bytes")


def settings_of_retention(policy: Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of the topic settings that must be known to remove segments; `policy` is None if unknown.

    Without `delete` in the policy, only segments below the log start offset are removed, whatever their age and size.
    """
    always = ("cleanup.policy", "remote.storage.enable")
    return always if policy is not None and "delete" not in policy else (*always, *_BY_AGE_AND_SIZE)


@dataclass(frozen=True)
class Retention:
    """The settings of retention, by Kafka's names with underscores for dots. Values below 0 mean no limit."""

    cleanup_policy: frozenset[str] = frozenset({"delete"})
    retention_ms: int = 604_800_000
    retention_bytes: int = -1

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Retention:
        policy = frozenset(values["cleanup.policy"])
        return cls(policy, int(values["retention.ms"]), int(values["retention.bytes"]))

    @property
    def by_size(self) -> bool:
        return "delete" in self.cleanup_policy and self.retention_bytes >= 0

    @property
    def by_time(self) -> bool:
        return "delete" in self.cleanup_policy and self.retention_ms >= 0

    def is_over(self, age: Age, now_ms: int) -> bool:
        """Return whether a segment of this age is past `retention.ms`."""
        return now_ms - age.timestamp_ms > self.retention_ms


@dataclass(frozen=True)
class Decision:
    """The segments to be removed, ascending, and the resulting `log_start_offset`.

    `rolls`: no segment would be left, so an empty segment is first created at the log end offset. `kept` is the reason
    why the first remaining segment is retained.
    """

    expired: tuple[ExpiredSegment, ...]
    log_start_offset: int
    rolls: bool
    kept: str


def refusals(facts: PartitionFacts, log_start_checkpoint: int | None) -> list[ErrorText]:
    """Return the reasons against removing segments, with remedies, in addition to `reasons_against_change`."""
    if log_start_checkpoint is None or not facts.segments or log_start_checkpoint >= facts.segments[0].base_offset:
        return []
    text = (
        f"the log start offset {log_start_checkpoint} in {names.LOG_START_CHECKPOINT} is below the first segment "
        f"({facts.segments[0].base_offset}): the offsets in between are in remote storage, or a broker was killed "
        "during its own retention; start the broker and stop it cleanly, which corrects the entry"
    )
    return [refusal(text, slug="log-start-below-segments")]


def removable(facts: PartitionFacts, high_watermark: HighWatermarkSource = "checkpoint") -> tuple[int, str]:
    """Return how many of the oldest segments may be removed at most, under any settings, and why no further segment may
    be removed."""
    marked = facts.high_watermark
    if marked is None and high_watermark == "log-end":
        marked = facts.log_end_offset
    # A broker that starts without a high watermark, or with one below the log start offset, uses the log start offset.
    marked = max(facts.log_start_offset, marked if marked is not None else 0)
    for number, (segment, end) in enumerate(zip(facts.segments, segment_ends(facts), strict=True)):
        is_last = number + 1 == len(facts.segments)
        if is_last and segment.log_bytes == 0:
            return number, "it is the last segment and is empty"
        if is_last and facts.tail_bytes:
            return number, f"it is the last segment and ends with {facts.tail_bytes} bytes that are not a batch"
        if is_last and not facts.clean_shutdown:
            return number, "it is the last segment, which a broker recovers after an unclean shutdown"
        if marked < end:
            return number, f"its end offset {end} is above the high watermark {marked}"
        if not facts.clean_shutdown and facts.recovery_point < end:
            point = facts.recovery_point
            return number, f"its end offset {end} is above the recovery point {point}, and the shutdown was unclean"
    return len(facts.segments), ""


def before_time(
    facts: PartitionFacts, retention: Retention, high_watermark: HighWatermarkSource = "checkpoint"
) -> tuple[int, int]:
    """Return how many segments are removed by log start, and how many by log start and size."""
    limit, _ = removable(facts, high_watermark)
    by_start = _by_log_start(facts, limit)
    return by_start, _by_size(facts.segments, retention, by_start, limit)


def age_candidates(
    facts: PartitionFacts, retention: Retention, high_watermark: HighWatermarkSource = "checkpoint"
) -> tuple[SegmentFacts, ...]:
    """Return the segments, ascending, whose ages may be needed: those that only the pass by time may remove."""
    if not retention.by_time:
        return ()
    limit, _ = removable(facts, high_watermark)
    return facts.segments[before_time(facts, retention, high_watermark)[1] : limit]


def decide(
    facts: PartitionFacts,
    retention: Retention,
    now_ms: int,
    ages: Mapping[int, Age],
    *,
    high_watermark: HighWatermarkSource = "checkpoint",
) -> Decision:
    """Decide which segments are removed at `now_ms`. `ages` has the ages of `age_candidates` by base offset, up to the
    first segment that is too young.

    There are three passes from the oldest segment on, each of which ends at the first segment that does not qualify: by
    log start offset, by size, by time; by size and by time only if `cleanup.policy` has `delete`.
    """
    segments, ends = facts.segments, segment_ends(facts)
    limit, what_keeps = removable(facts, high_watermark)
    by_start, by_size = before_time(facts, retention, high_watermark)
    count = by_size
    while retention.by_time and count < limit and retention.is_over(ages[segments[count].base_offset], now_ms):
        count += 1
    left = sum(segment.log_bytes for segment in segments)
    expired: list[ExpiredSegment] = []
    for number, segment in enumerate(segments[:count]):
        reason: Reason = "log-start" if number < by_start else "size" if number < by_size else "time"
        age = ages.get(segment.base_offset) if reason == "time" else None
        left -= segment.log_bytes
        why = _why(facts, retention, now_ms, reason, age, left)
        timestamp_ms = None if age is None else age.timestamp_ms
        expired.append(ExpiredSegment(segment.base_offset, ends[number], segment.log_bytes, reason, why, timestamp_ms))
    if count == len(segments):
        return Decision(tuple(expired), facts.log_end_offset, True, "")
    first_kept = segments[count]
    if count < limit:
        age = ages.get(first_kept.base_offset)
        what_keeps = _why_kept(facts, retention, now_ms, age, first_kept, left, ends[count])
    return Decision(
        tuple(expired),
        max(facts.log_start_offset, first_kept.base_offset),
        False,
        f"segment {first_kept.base_offset} is retained: {what_keeps}",
    )


def _by_log_start(facts: PartitionFacts, limit: int) -> int:
    count = 0
    for following in facts.segments[1 : limit + 1]:
        if following.base_offset > facts.log_start_offset:
            break
        count += 1
    return count


def _by_size(segments: Sequence[SegmentFacts], retention: Retention, count: int, limit: int) -> int:
    """Return the number of segments to remove after the pass by size, which leaves at least `retention.bytes`."""
    if not retention.by_size:
        return count
    excess = sum(segment.log_bytes for segment in segments[count:]) - retention.retention_bytes
    while count < limit and excess - segments[count].log_bytes >= 0:
        excess -= segments[count].log_bytes
        count += 1
    return count


def _why(
    facts: PartitionFacts, retention: Retention, now_ms: int, reason: Reason, age: Age | None, left_bytes: int
) -> str:
    if reason == "log-start":
        return f"below the log start offset {facts.log_start_offset}"
    if reason == "size":
        return f"{left_bytes:,} bytes remain without it, and retention.bytes is {retention.retention_bytes:,}"
    assert age is not None
    return f"{_age_text(age, now_ms)}, and retention.ms is {duration_text(retention.retention_ms)}"


def _age_text(age: Age, now_ms: int) -> str:
    old = now_ms - age.timestamp_ms
    text = f"{duration_text(old)} old" if old >= 0 else f"dated {duration_text(-old)} in the future"
    subject = "its newest record" if age.of == "record" else "no record has a timestamp, and its file"
    return f"{subject} is {text}"


def _why_kept(
    facts: PartitionFacts,
    retention: Retention,
    now_ms: int,
    age: Age | None,
    first_kept: SegmentFacts,
    left_bytes: int,
    end: int,
) -> str:
    if "delete" not in retention.cleanup_policy:
        policy = ",".join(sorted(retention.cleanup_policy))
        return f"cleanup.policy is [{policy}], and its end offset {end} is above the log start {facts.log_start_offset}"
    parts = []
    if retention.by_size:
        parts.append(
            f"without it, {left_bytes - first_kept.log_bytes:,} bytes would remain, fewer than retention.bytes "
            f"{retention.retention_bytes:,}"
        )
    if age is not None:
        # A young segment was read only up to its first timestamp within the limit.
        parts.append(f"it has records within retention.ms ({duration_text(retention.retention_ms)})"
                     if age.of == "record" else f"{_age_text(age, now_ms)}, within retention.ms")  # fmt: skip
    return "; ".join(parts) or "neither retention.bytes nor retention.ms sets a limit"


def findings(
    facts: PartitionFacts,
    retention: Retention,
    now_ms: int,
    ages: Mapping[int, Age],
    *,
    high_watermark: HighWatermarkSource = "checkpoint",
) -> tuple[Finding, ...]:
    """Return a finding for each segment with a known age that a broker, by its time index, would treat differently."""
    by_base = {segment.base_offset: segment for segment in facts.segments}
    claims = {base: claimed_age(segment) for base, segment in by_base.items()}
    ours = decide(facts, retention, now_ms, ages, high_watermark=high_watermark).expired
    removed = {segment.base_offset for segment in ours}
    of_broker = {base: ages[base] if base in removed and base in ages else claims[base] for base in by_base}
    more = len(decide(facts, retention, now_ms, of_broker, high_watermark=high_watermark).expired) - len(ours) - 1
    found = []
    for base, age in ages.items():
        deletes = retention.is_over(claims[base], now_ms)
        # A broker that finds no `.index` rebuilds all indexes of the segment.
        if by_base[base].index_bytes is None or retention.is_over(age, now_ms) == deletes:
            continue
        what = f"{_claim_text(by_base[base])}, but according to its log the time is {age.timestamp_ms} ms: "
        if deletes:
            what += "a broker that starts deletes it, although it must be retained"
            what += f", and {more} segment{'s' if more > 1 else ''} after it" if more > 0 else ""
        else:
            what += "a broker retains it, although it is to be removed"
        found.append(Finding(base, deletes, what, "Run `keytail rebuild-index --execute`, which rebuilds the index"))
    return tuple(found)


def _claim_text(segment: SegmentFacts) -> str:
    if segment.time_index_bytes:
        return f"the time index of segment {segment.base_offset} ends with {segment.largest_timestamp_ms} ms"
    return f"segment {segment.base_offset} has no time index, so a broker uses the modification time of its file"


def remove(fs: FileSystem, facts: PartitionFacts, decision: Decision) -> list[str]:
    """Remove the expired segments, in the order of EXPIRE.md, and leftovers of an interrupted removal.

    If no segment is expired, only leftovers are removed, and a sentence for each change is returned; in other cases the
    result is an empty list. The log start offset is moved first: from then on a broker or keytail removes all files
    below it that still exist.
    """
    refuse_lost(fs, facts.path)
    for segment in facts.segments[: len(decision.expired)]:
        refuse_changed(fs, _path(facts, segment.base_offset, names.LOG), segment.log_bytes, segment.log_mtime_ns)
    try:
        _commit(fs, facts, decision)
    except OSError as problem:
        if problem.errno != errno.ENOSPC or len(decision.expired) < 1 + decision.rolls:
            raise
        # On a full disk only the oldest segment is removed at first: the remaining log is complete, too.
        _remove_below(fs, facts.path, decision.expired[:1], decision.expired[0].end_offset)
        _commit(fs, facts, decision)
    first = decision.expired[-1].end_offset if decision.expired else facts.segments[0].base_offset
    done = []
    if _truncate_epochs(fs, facts.path, decision.log_start_offset):
        done.append(f"truncated {names.LEADER_EPOCHS} at the log start offset {decision.log_start_offset}")
    removed = _remove_below(fs, facts.path, decision.expired, first)
    done += [f"removed {name}, below the first segment" for name in removed]
    return [] if decision.expired else done


def _commit(fs: FileSystem, facts: PartitionFacts, decision: Decision) -> None:
    """Move the log start offset. Afterwards expired segments are not served; the next broker or run removes them."""
    # The empty segment may exist from the first attempt, which failed on a full disk.
    if decision.rolls and not fs.exists(_path(facts, facts.log_end_offset, names.LOG)):
        like = fs.stat(_path(facts, facts.segments[-1].base_offset, names.LOG))
        make_empty_segment(fs, facts.path, facts.log_end_offset, like)
    if decision.log_start_offset > facts.log_start_offset:
        checkpoint = os.path.join(facts.log_dir, names.LOG_START_CHECKPOINT)
        # The file may have entries of partitions that are being moved to this log dir, so all entries are kept.
        update_offset(fs, checkpoint, (facts.topic, facts.partition), decision.log_start_offset, hosted=None)


def _path(facts: PartitionFacts, base_offset: int, suffix: str) -> str:
    return os.path.join(facts.path, names.segment_file(base_offset, suffix))


def _truncate_epochs(fs: FileSystem, path: str, log_start_offset: int) -> bool:
    """Remove the epochs before the epoch that contains the log start, and let this epoch begin at the log start. Return
    whether the file changed."""
    file = os.path.join(path, names.LEADER_EPOCHS)
    entries = read_epochs(fs, file)
    wanted = epochs_from(entries, log_start_offset)
    if wanted != entries:
        write_epochs(fs, file, wanted)
    return wanted != entries


def epochs_from(entries: Sequence[tuple[int, int]], log_start_offset: int) -> list[tuple[int, int]]:
    """Return the leader epochs, with their start offsets, for a log that begins at `log_start_offset`."""
    below = list(itertools.takewhile(lambda entry: entry[1] <= log_start_offset, entries))
    rest = list(entries[len(below) :])
    return [(below[-1][0], log_start_offset), *rest] if below else rest


def _remove_below(fs: FileSystem, path: str, expired: Sequence[ExpiredSegment], first_base: int) -> list[str]:
    """Remove expired segments, and snapshots and index files without a log below `first_base`. Returns their names.

    Files are removed in ascending order, the `.log` of each segment first: without a `.log`, index files have no
    effect.
    """
    bases = {segment.base_offset for segment in expired}
    removed = [
        (file.base_offset, file.suffix != names.LOG, file.name)
        for file in (names.parse_file_name(entry.name) for entry in fs.scan(path))
        if file.kind == "live"
        and file.base_offset is not None
        and file.base_offset < first_base
        and (file.suffix != names.LOG or file.base_offset in bases)
    ]
    if removed:
        refuse_lost(fs, path)
    for _, _, name in sorted(removed):
        fs.unlink(os.path.join(path, name))
    if removed:
        fs.fsync_dir(path)
    return [name for _, _, name in sorted(removed)]
