"""The steps of a run with --execute before its tasks, both in place (execution.py) and out of place
(out_of_place/driver.py).
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from keytail.cli.configuration import Configuration
from keytail.cli.metadata import with_metadata
from keytail.cli.progress import Reporter
from keytail.cli.selection import SelectedPartitions, select_partitions
from keytail.compact.command import Request
from keytail.compact.expectation import Expected
from keytail.compact.plan import Decision
from keytail.compact.planning import Planned, plan_partition_of, plan_to_compact, refused_unless_owner
from keytail.compact.prepared.committing import (
    commit_or_discard,
    read_record,
    reason_against_commit,
    without_compaction,
)
from keytail.compact.prepared.record import Record
from keytail.compact.roll import PREPARED, Roll
from keytail.compact.rules import Rules, TaskSettings
from keytail.compact.task import NO_REMOVAL_LIMIT, CleaningTask, Prepared
from keytail.errors import EXPLAINED, NO_ERROR, ErrorText, in_words
from keytail.extras import SPARK
from keytail.format import names
from keytail.log.fs import FileSystem
from keytail.log.lock import LockName
from keytail.log.partition import LogDirFacts, PartitionEntry
from keytail.log.replacement.recover import recover
from keytail.run.engine import Engine, ThisProcess
from keytail.run.spark.session import session_of_run
from keytail.run.storage import hold_local
from keytail.run.workers import workers_of_run


@dataclass
class Steps:
    """The steps of one run, in the order of the methods.

    `run` holds the session and the locks of the run, and is closed when the run ends. `at_end`, which `lock` adds to
    `run`, is closed after the session that the run started, and before the locks are released.
    """

    request: Request
    fs: FileSystem
    run: contextlib.ExitStack
    at_end: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    engine: Engine | None = None
    started_s: float = field(default_factory=time.monotonic)

    def submitted_session(self) -> Engine | None:
        """Return the engine of spark-submit's session, if there is one."""
        if self.request.submitted:
            self.engine = session_of_run(self.run, self.request.master, submitted=True, kernels="compact")
        return self.engine

    def lock(self, places: Sequence[str], name: LockName = names.LOCK) -> None:
        """Take the locks of this name of the directories `places`."""
        if places:
            self.run.enter_context(hold_local(self.fs, places, self.request.shared_storage, name))
        self.run.enter_context(self.at_end)

    def select_partitions(self, now_ms: int) -> tuple[SelectedPartitions, Configuration]:
        """Return the selected partitions and their settings."""
        chosen = select_partitions(self.fs, self.request.partition_filter)
        return chosen, with_metadata(
            self.fs, self.request.partition_filter.log_dirs, self.request.configuration, now_ms
        )

    def start(
        self,
        reporter: Reporter,
        expected: Iterable[Expected | None],
        *,
        copy_seconds: Sequence[float] = (),
        needs_spark: bool = False,
        kernels: str = "compact",
        extra: Callable[[], Mapping[str, str]] | None = None,
    ) -> Engine:
        """Return the engine of the submitted session. If there is none, start Spark or, if they are faster, local
        processes; if no task is to run, return this process.

        `copy_seconds` is the expected duration of each copy in seconds, `extra` returns settings for a session.
        """
        if self.engine is not None:
            reporter.watch(self.engine.driver_address)
            return self.engine
        known = [item for item in expected if item is not None]
        if not known and not copy_seconds and not needs_spark and self.request.master is None:
            return ThisProcess()  # preparations are only committed: no task runs
        may_fan_out = self.request.fan_out == "auto" and any(item.strategy == "maybe fan-out" for item in known)
        if may_fan_out and self.request.master is None and SPARK.missing():
            may_fan_out = False
            reporter.note(
                "Spark is not installed: a partition with more keys than fit into --map-memory is compacted as far as "
                f"its map reaches, and the next run continues. To compact it in one run: {SPARK.install}"
            )
        return workers_of_run(
            self.run,
            reporter,
            self.request.master,
            [*(item.seconds for item in known), *copy_seconds],
            kernels=kernels,
            needs_spark=needs_spark or may_fan_out or self.request.fan_out == "always",
            extra=extra,
        )

    @property
    def deadline_s(self) -> float | None:
        """The time.monotonic() of --deadline."""
        minutes = self.request.deadline_minutes
        return None if minutes is None else self.started_s + minutes * 60


@dataclass(frozen=True)
class Found:
    """A planned partition. `record` is its preparation, unless there are other leftovers too; `reason` is the reason if
    the preparation cannot be committed.
    """

    planned: Planned
    record: Record | None = None
    reason: ErrorText = NO_ERROR


def find_prepared(
    fs: FileSystem, log_dir: LogDirFacts, entry: PartitionEntry, configuration: Configuration, rules: Rules
) -> Found:
    """Plan a partition, and check its preparation; change nothing. With --roll-active, the preparation is checked
    later, against the log before the roll.
    """
    planned = plan_to_compact(fs, log_dir, entry, configuration, rules)
    leftovers = planned.facts.leftovers
    if not leftovers or rules.roll_active or entry.problems or not planned.is_compacted_topic:
        return Found(planned)
    record, _ = read_record(fs, entry.path, leftovers)
    if record is None or not record.files.issuperset(leftovers):
        return Found(planned)
    return Found(planned, record, reason_against_commit(fs, record, planned, rules))


def resolve_leftovers(
    fs: FileSystem,
    found: Found,
    log_dir: LogDirFacts,
    entry: PartitionEntry,
    configuration: Configuration,
    rules: Rules,
) -> tuple[Planned, list[str]]:
    """Finish or undo what an interrupted run or broker left, commit or discard a preparation, and plan the partition
    again.

    A refused partition is left unchanged, and so is a partition whose topic is not known to be compacted, except that
    its preparation is discarded if the topic is known not to be. A partition is refused before it is changed if this
    process cannot create files with the owner of its files. Returns the plan, and a sentence for each action.
    """
    planned = found.planned
    allowed = refused_unless_owner(fs, planned)
    if allowed is not planned:
        return allowed, []
    facts = planned.facts
    if not facts.leftovers or entry.problems:
        return planned, []
    if not planned.is_compacted_topic:
        return without_compaction(fs, planned), []
    if found.record is not None:
        return commit_or_discard(fs, planned, found.record, found.reason), []
    record, reason = read_record(fs, facts.path, facts.leftovers)
    try:
        done = recover(fs, facts.path, record.files if record else ())
    except EXPLAINED as problem:
        text = "an interrupted replacement of segments cannot be finished or undone: " + in_words(problem)
        return replace(planned, decision=Decision("refused", text, None)), []
    if record is not None:  # the preparation does not include the active segment
        rules_of_record = replace(rules, roll_active=False)
        planned = plan_partition_of(fs, log_dir, entry, configuration, rules_of_record)
        reason = reason_against_commit(fs, record, planned, rules_of_record)
        planned = commit_or_discard(fs, planned, record, reason)
        if not rules.roll_active:
            return planned, done
        if planned.prepared is not None or planned.decision.status == "refused":
            return replace(planned, roll=Roll(PREPARED) if planned.prepared is not None else None), done
        reason = planned.discarded
    planned = plan_partition_of(fs, log_dir, entry, configuration, rules)
    return replace(planned, discarded=reason), done


def cleaning_tasks(planned: Iterable[Planned], rules: Rules, settings: TaskSettings, run_id: str) -> list[CleaningTask]:
    """Return the tasks of the partitions to be compacted, all with the same hash seed. A preparation that is to be
    committed keeps its own run id and time."""
    hash_seed = secrets.randbits(63)
    tasks = []
    for plan in planned:
        selection = plan.decision.selection
        if not plan.wanted or selection is None or plan.config is None:
            continue
        facts = plan.facts
        limit = plan.removal_limit.offset if plan.removal_limit else None
        record = plan.prepared
        task = CleaningTask.of(
            facts,
            first_dirty_offset=record.first_dirty_offset if record else selection.first_dirty_offset,
            first_uncleanable_offset=record.result.end_offset if record else selection.first_uncleanable_offset,
            now_ms=record.prepared_ms if record else rules.now_ms,
            config=plan.config,
            run_id=record.run_id if record else run_id,
            hash_seed=hash_seed,
            prepared=Prepared(record.result, record.files, run_id) if record else None,
            removal_limit_offset=NO_REMOVAL_LIMIT if limit is None else limit,
            message_format=plan.message_format,
            roll="due" if plan.is_to_roll else "no",
            **asdict(settings),
        )
        tasks.append(task)
    return tasks
