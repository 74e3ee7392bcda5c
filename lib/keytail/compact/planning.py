"""Decides about the chosen partitions: `plan` prints the decisions, and `compact` executes them.

Planning changes nothing. Of batches, planning reads more than the headers only above the latest producer snapshot, to
find open transactions. compact/plan.py makes the decisions; the first steps of a run with --execute are in
compact/steps.py.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from keytail.cli.configuration import Configuration
from keytail.compact.expectation import Expected, expect
from keytail.compact.plan import Decision, decide, settings_of_compaction
from keytail.compact.removal_limit import RemovalLimit, removal_limit
from keytail.compact.roll import Roll, after_roll, as_stopped, with_roll
from keytail.compact.rules import Rules
from keytail.config.compaction import CompactionConfig
from keytail.config.message_format import MessageFormat
from keytail.config.resolve import CLEANUP_POLICY
from keytail.console import print_message
from keytail.durations import duration_text
from keytail.errors import (
    EXPLAINED,
    NO_ERROR,
    CorruptLog,
    ErrorText,
    Explained,
    KeytailError,
    Refused,
    in_words,
    joined,
)
from keytail.format import names
from keytail.log.fs import FileSystem
from keytail.log.missing_segments import refuse_missing_segments
from keytail.log.partition import (
    LogDirFacts,
    PartitionEntry,
    PartitionFacts,
    list_partition,
    refuse_damaged_end,
    survey_partition,
)

if TYPE_CHECKING:
    from keytail.compact.prepared.record import Record
    from keytail.log.producers import Unstable

NOW_TOLERANCE_MS = 60_000
# The last 1,000 records of the metadata log may be uncommitted, and controllers append an empty record every 500 ms
# (metadata.max.idle.interval.ms).
_IF_IN_DOUBT = (
    "Plan again when the broker has run for ten minutes more, after which it is certain which value applies; or give "
    "that value with --topic-config"
)
# A broker renames the `.swap` files of a segment within milliseconds.
_RENAMING_S = 0.5
# A broker's cleaner replaces a few segments a minute: a cleaner that interferes twice is at work on this partition.
ATTEMPTS = 3
NO_MAX_LAG_MS = 2**63 - 1


@dataclass(frozen=True)
class Planned:
    """One partition with its facts, its configuration if known, and the decision."""

    facts: PartitionFacts
    config: CompactionConfig | None
    decision: Decision
    corrupt: bool = False
    settings_known: bool = False  # all settings that a round needs are known
    problem: KeytailError | None = None
    counted: tuple[int, int] | None = None  # number of segments and their bytes, if `facts` has no segments any more
    removal_limit: RemovalLimit | None = None  # the limit for a due partition, if other replicas were named
    message_format: MessageFormat = "unknown"
    by_listing: bool = False  # `facts` come from `list_partition`
    prepared: Record | None = None  # the preparation of an earlier run, which this run commits
    discarded: ErrorText = NO_ERROR  # why the preparation of an earlier run was discarded
    roll: Roll | None = None  # set with --roll-active; if a roll is due, `facts` are those after the roll

    @property
    def segments_and_bytes(self) -> tuple[int, int]:
        """The number of segments before the run, and the bytes of their logs."""
        return self.counted or (len(self.facts.segments) - self.is_to_roll, self.facts.log_bytes)

    @property
    def is_to_roll(self) -> bool:
        return self.roll is not None and self.roll.is_due

    def without_segments(self) -> Planned:
        """Return a copy with only the facts that a row needs: a large broker has millions of segments."""
        return replace(self, facts=replace(self.facts, segments=(), snapshots=()), counted=self.segments_and_bytes)

    @property
    def wanted(self) -> bool:
        return self.decision.status == "would-compact"

    @property
    def is_compacted_topic(self) -> bool:
        """Whether cleanup.policy is known and includes `compact`."""
        return self.settings_known and self.config is not None and "compact" in self.config.cleanup_policy

    @property
    def repaired_checkpoint(self) -> int | None:
        """The offset to which a run with --execute sets a checkpoint that is outside the log; None if the checkpoint is
        inside the log, if a due round moves it, or if the partition is refused or not compacted."""
        selection = self.decision.selection
        if selection is None or self.wanted or not self.is_compacted_topic or not selection.rewrite_checkpoint:
            return None
        return selection.first_dirty_offset

    def expected(self, map_memory_bytes: int) -> Expected | None:
        """Return the estimate for a due partition; None if the partition is not due."""
        selection = self.decision.selection
        if selection is None or not self.wanted:
            return None
        return expect(self.facts.segments, selection, map_memory_bytes=map_memory_bytes)


def check_clock(now_ms: int | None, execute: bool, unsafe_clock: bool) -> int:
    """Return the time for decisions: `now_ms` or, if that is None, the time of the clock. Raises Refused if an
    executing run would use a time that differs from the clock.
    """
    clock_ms = time.time_ns() // 1_000_000
    if now_ms is None:
        return clock_ms
    if execute and not unsafe_clock and abs(now_ms - clock_ms) > NOW_TOLERANCE_MS:
        raise Refused(
            f"--now {now_ms} differs by {duration_text(abs(now_ms - clock_ms))} from the clock ({clock_ms}): with a "
            "wrong time, records are removed too early",
            remedy="Omit --now, or confirm with --unsafe-clock that this time is intended",
            slug="now-differs-from-clock",
        )
    return now_ms


def plan_partition_of(
    fs: FileSystem,
    log_dir: LogDirFacts,
    entry: PartitionEntry,
    configuration: Configuration,
    rules: Rules,
    *,
    by_listing: bool = False,
    as_if: Callable[[PartitionFacts], PartitionFacts] | None = None,
) -> Planned:
    """Survey a partition and return the decision; on an error of the partition or its settings, the decision is a
    refusal.

    `as_if` maps the facts that were found to the facts that are used for the decision. `by_listing`: use the facts of
    `list_partition` if they suffice. A listing reads only the end of the last segment, so only a task detects damage at
    the start of a segment.
    """
    facts = listed = None
    try:
        resolved, config = configuration.for_compaction(entry.topic)
        if by_listing and not _needs_times(config):
            facts = listed = list_partition(fs, log_dir, entry)
        facts = facts or survey_partition(fs, log_dir, entry)
        if configuration.cluster is not None:
            configuration.cluster.refuse_stray(fs, entry)
        unknown = configuration.unknown(entry.topic, settings_of_compaction(force=rules.force))
        policy_known = not resolved.unknown([CLEANUP_POLICY])
        decide_on = partial(decide, config=config, unknown=unknown, rules=rules, policy_known=policy_known)
        unstable = _first_unstable(fs, facts, config, rules.now_ms)
        decision = decide_on(as_if(facts) if as_if else facts, unstable=unstable)
        roll = None
        if rules.roll_active and decision.status != "refused" and "compact" in config.cleanup_policy:
            decision, roll = _with_roll(fs, facts, config, rules, decision, partial(decide_on, unstable=unstable))
        due = decision.status == "would-compact"
        if due and by_listing and fs.unreadable(entry.path):  # the survey reports unreadable files
            return plan_partition_of(fs, log_dir, entry, configuration, rules, as_if=as_if)
        if due:
            refuse_incomplete(fs, facts, rules)
        held = removal_limit(fs, rules.replicas, facts) if rules.replicas and due else None
        if roll is not None and roll.is_due:
            facts = after_roll(facts)
    except EXPLAINED as problem:
        return refused(facts or survey_partition(fs, log_dir, entry), problem)
    if decision.error and (doubts := resolved.doubts()):
        error = joined([decision.error, *doubts])
        decision = replace(decision, error=error, remedy=_IF_IN_DOUBT if decision.remedy else "")
    of_old = configuration.message_format_of(entry.topic)
    return Planned(
        facts,
        config,
        decision,
        settings_known=not unknown,
        removal_limit=held,
        message_format=of_old,
        by_listing=listed is not None,
        roll=roll,
    )


def refused(facts: PartitionFacts, problem: Explained) -> Planned:
    """Return a plan that refuses the partition because of an error."""
    decision = Decision("refused", in_words(problem), None)
    known = problem if isinstance(problem, KeytailError) else None
    return Planned(facts, None, decision, corrupt=isinstance(problem, CorruptLog), problem=known)


def refuse_incomplete(fs: FileSystem, facts: PartitionFacts, rules: Rules) -> None:
    """Raise KeytailError if a segment of a due partition is missing, or the end of its log is damaged."""
    refuse_missing_segments(fs, facts)
    if facts.clean_shutdown:  # without a clean shutdown, a broker recovers the log when it starts
        by_checkpoint = rules.high_watermark == "checkpoint"
        refuse_damaged_end(facts if by_checkpoint else replace(facts, high_watermark=None))


def _with_roll(
    fs: FileSystem,
    facts: PartitionFacts,
    config: CompactionConfig,
    rules: Rules,
    plain: Decision,
    decide_on: Callable[..., Decision],
) -> tuple[Decision, Roll]:
    """Return what `roll.with_roll` returns, or `plain` if the active segment's files forbid a roll. Beside a running
    broker, decide as if the broker were stopped cleanly now, without a check of the files.
    """
    is_running = not facts.clean_shutdown and facts.log_dir in rules.running
    if is_running:
        stopped = as_stopped(facts)
        settled = replace(facts, high_watermark=stopped.high_watermark)
        decide_on = partial(decide_on, unstable=_first_unstable(fs, settled, config, rules.now_ms))
        facts = stopped
    decision, roll = with_roll(facts, plain, decide_on)
    if roll.is_due and not is_running:
        from keytail.log.append.roll_closed import why_not_closed  # noqa: PLC0415 (brings in the kernels)

        if why := why_not_closed(fs, facts):
            return plain, Roll(why)
    return decision, roll


def refused_unless_owner(fs: FileSystem, planned: Planned) -> Planned:
    """Return `planned`, or a refusal if a run would change the partition but cannot create files with the owner of its
    files."""
    facts = planned.facts
    if planned.is_compacted_topic and (planned.wanted or facts.leftovers or planned.repaired_checkpoint is not None):
        try:
            fs.refuse_unless_like(fs.stat(facts.path))
        except (Refused, OSError) as problem:
            return replace(planned, decision=Decision("refused", in_words(problem), None))
    return planned


# Settings for which an assumed value that is too short removes records earlier than the broker's cleaner.
_REMOVE_SOONER = ("delete.retention.ms", "min.compaction.lag.ms")


def report_assumptions(configuration: Configuration, topics: Iterable[str]) -> None:
    """Report on standard error the settings of the due `topics` for which Kafka's default is assumed, because no broker
    file was given.
    """
    by_setting = Counter(name for topic in set(topics) for name in configuration.of(topic).assumed(_REMOVE_SOONER))
    if by_setting:
        listed = " and ".join(f"{name} (topics: {number})" for name, number in sorted(by_setting.items()))
        print_message(
            f"keytail: Kafka's default is assumed for {listed}, because no broker file was given. If the broker has "
            "other values, give its file with --config"
        )


def report_version_rules(configuration: Configuration, due: Sequence[str]) -> None:
    """Report on standard error, for the topics of the `due` partitions, whether messages of magic 0 and 1 keep their
    magic or are refused, and whether tombstones and markers are removed by the time of their file.
    """
    formats = Counter(configuration.message_format_of(topic) for topic in set(due))
    if formats["keep"]:
        print_message(f"keytail: messages of magic 0 and 1 keep their magic (topics: {formats['keep']})")
    if formats["unknown"]:
        print_message(
            f"keytail: the message format is unknown (topics: {formats['unknown']}). Partitions with messages of magic "
            "0 or 1 are refused: if there are any, give the broker's file with --config, or --message-format"
        )
    if due and configuration.by_file_time:
        print_message(
            "keytail: tombstones and transaction markers are removed based on the times of their files, without "
            f"delete horizons, as by Kafka {configuration.broker_version} (--broker-version)"
        )


def _needs_times(config: CompactionConfig) -> bool:
    """Return whether a decision depends on the timestamps of segments."""
    return config.min_compaction_lag_ms > 0 or config.max_compaction_lag_ms < NO_MAX_LAG_MS


def plan_to_compact(
    fs: FileSystem, log_dir: LogDirFacts, entry: PartitionEntry, configuration: Configuration, rules: Rules
) -> Planned:
    """Return the plan of a partition, with all facts if a run may have something to do in the partition, else without
    segments."""
    planned = plan_partition_of(fs, log_dir, entry, configuration, rules, by_listing=True)
    if planned.wanted and planned.by_listing:
        planned = plan_partition_of(fs, log_dir, entry, configuration, rules)
    return planned if planned.wanted or planned.facts.leftovers else planned.without_segments()


def plan_beside_a_broker(
    fs: FileSystem, log_dir: LogDirFacts, entry: PartitionEntry, configuration: Configuration, rules: Rules
) -> Planned:
    """Return what `plan_partition_of` returns, but wait and plan again, at most twice, while a running broker renames
    new segments of its cleaner."""
    planned = plan_partition_of(fs, log_dir, entry, configuration, rules)
    for _ in range(ATTEMPTS - 1):
        if not any(names.parse_file_name(name).kind == "swap" for name in planned.facts.leftovers):
            break
        # Perhaps a running broker's cleaner is at work. If not, the `.swap` files remain, and the row reports these
        # files.
        time.sleep(_RENAMING_S)
        planned = plan_partition_of(fs, log_dir, entry, configuration, rules)
    return planned


def _first_unstable(fs: FileSystem, facts: PartitionFacts, config: CompactionConfig, now_ms: int) -> Unstable | None:
    """Return where the first undecided transaction begins, from the latest producer snapshot; None if there is none or
    if it does not matter. Read batches only if the snapshot does not reach the log end.
    """
    if "compact" not in config.cleanup_policy or facts.problems:
        return None
    from keytail.log.producers import first_unstable  # noqa: PLC0415 (brings in the kernels)

    return first_unstable(fs, facts, now_ms=now_ms)
