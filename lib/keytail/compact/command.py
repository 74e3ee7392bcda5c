"""The commands `plan` and `compact`: decide for every chosen partition, and with --execute compact on Spark.

`keytail compact` and jobs/compact.py under spark-submit run the same code; they differ only in what creates the Spark
session. Locks are held from before the first decision until after the last checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from keytail.cli.configuration import Configuration
from keytail.cli.metadata import with_metadata
from keytail.cli.progress import READ_IN_A_COMPACTION, Reporter
from keytail.cli.replicas import replicas_of
from keytail.cli.selection import Choice, Chosen, choose
from keytail.cli.stopping import Stopped
from keytail.compact.first_pass.key_counts import HOTTEST
from keytail.compact.gate import tell_unhosted
from keytail.compact.plan import Rules
from keytail.compact.planning import (
    Planned,
    TaskSettings,
    check_clock,
    cleaning_tasks,
    plan_one,
    plan_to_compact,
    resolve_leftovers,
    say_how_old_messages_become,
    say_what_goes_by_file_time,
    say_what_is_assumed,
)
from keytail.ledger.of_run import LedgerFlags, recording, run_id_at
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.lock import hold
from keytail.log.partition import hosted
from keytail.run.each_partition import of_each
from keytail.run.ended import SparkEnded
from keytail.run.memory import map_memory_bytes
from keytail.run.rows import ResultRow, exit_status
from keytail.run.session import session_of_run
from keytail.run.storage import ScratchSpace, refuse_shared_storage
from keytail.run.watching import address_of_driver
from keytail.run.workers import cores, workers_of_run
from keytail.telling import say
from keytail.undo.options import make_directory, originals_of, tell, tell_kept

if TYPE_CHECKING:
    from keytail.compact.driver import Compaction
    from keytail.compact.keeper import Keeper
    from keytail.compact.task import CleaningTask, FanOut
    from keytail.undo.originals import Originals


@dataclass(frozen=True)
class Request:
    """The arguments of `plan` and `compact`; defaults are those of the flags."""

    choice: Choice
    configuration: Configuration = field(default_factory=Configuration)
    execute: bool = False
    now_ms: int | None = None
    unsafe_clock: bool = False
    force: bool = False
    from_log_start: bool = False
    high_watermark: str = "checkpoint"
    deadline_minutes: float | None = None
    master: str | None = None
    grouping: str = "measured"
    map_memory_bytes: int | None = None
    fan_out: FanOut = "auto"
    max_scratch_bytes: int | None = None
    throttle_bytes_per_s: int | None = None
    drop_keyless: bool = False
    shared_storage: bool = False
    keep_originals: str | None = None
    copy_originals: bool = False
    replicas: tuple[str, ...] = ()
    ledger: LedgerFlags = field(default_factory=LedgerFlags)
    output_dirs: tuple[str, ...] = ()
    scratch_dir: str | None = None
    submitted: bool = False  # under spark-submit, which has chosen the master
    in_detail: bool = False  # the rows are for a report
    show_keys: bool = False  # in the report

    def rules(self, fs: FileSystem) -> Rules:
        return Rules(
            now_ms=check_clock(self.now_ms, self.execute, self.unsafe_clock),
            force=self.force,
            from_log_start=self.from_log_start,
            high_watermark="log-end" if self.high_watermark == "log-end" else "checkpoint",
            unsafe_clock=self.unsafe_clock,
            replicas=replicas_of(fs, self.replicas, self.choice.log_dirs),
        )

    def task_settings(self) -> TaskSettings:
        return TaskSettings(
            map_memory_bytes=self.map_memory_bytes or 0,
            drop_keyless=self.drop_keyless,
            grouping="kafka" if self.grouping == "kafka" else "measured",
            throttle_bytes_per_s=self.throttle_bytes_per_s or None,
            fan_out=self.fan_out,
            hottest_keys=HOTTEST if self.in_detail else 0,
            show_keys=self.show_keys,
            by_file_time=self.configuration.by_file_time,
        )

    def map_memory(self) -> int:
        """Return the map memory of one task in bytes, as far as it is known before there is a session."""
        return self.map_memory_bytes or map_memory_bytes(cores())

    def originals(self, fs: FileSystem) -> Originals | None:
        return originals_of(fs, self.keep_originals, self.copy_originals, self.choice.log_dirs)


def plan(request: Request, fs: FileSystem = LOCAL) -> list[ResultRow]:
    """Return a row for each chosen partition: what `compact --execute` would do. Changes and locks nothing."""
    rules = request.rules(fs)
    chosen = choose(fs, request.choice)
    if (originals := request.originals(fs)) is not None:
        tell(originals)
    with contextlib.ExitStack() as run:
        if request.submitted:
            session_of_run(run, request.master, submitted=request.submitted)
        configuration = with_metadata(fs, request.choice.log_dirs, request.configuration, rules.now_ms)
        map_memory = request.map_memory()
        rows = of_each(
            chosen.partitions,
            lambda log_dir, entry: plan_one(
                fs, log_dir, entry, configuration, rules, by_listing=not request.in_detail
            ).planned_row(map_memory, in_detail=request.in_detail),
            fs,
        )
        due = [row for row in rows if row.status == "would-compact"]
        say_what_is_assumed(configuration, (row.topic for row in due))
        say_how_old_messages_become(configuration, (row.topic for row in due))
        say_what_goes_by_file_time(configuration, len(due))
        if rules.replicas:
            tell_unhosted([row.name for row in due if row.removal_limit_replica is None])
        return rows


def compact(request: Request, fs: FileSystem = LOCAL) -> list[ResultRow]:
    """Compact the chosen partitions that are due; return a row for each chosen partition."""
    started_s = time.monotonic()
    with contextlib.ExitStack() as run:
        rules = request.rules(fs)
        choose(fs, request.choice)  # report invalid flags before taking locks
        originals = request.originals(fs)
        flags = request.ledger.checked(fs, request.choice.log_dirs)
        spark = session_of_run(run, request.master, submitted=request.submitted) if request.submitted else None
        if spark is not None:
            flags = flags.in_session(spark, fs, request.choice.log_dirs)
        if not request.shared_storage:
            refuse_shared_storage(fs, request.choice.log_dirs)
        run.enter_context(hold(request.choice.log_dirs, fs))
        at_end = run.enter_context(contextlib.ExitStack())  # with the locks held, own session stopped
        chosen = choose(fs, request.choice)
        configuration = with_metadata(fs, request.choice.log_dirs, request.configuration, rules.now_ms)
        planned = _plan_resolved(fs, chosen, configuration, rules)
        tell_unhosted([p.row().name for p in planned if p.gate is not None and p.gate.replica is None])
        _mend_checkpoints(fs, chosen, planned)
        say_what_is_assumed(configuration, (p.facts.topic for p in planned if p.wanted))
        say_how_old_messages_become(configuration, (p.facts.topic for p in planned if p.wanted))
        say_what_goes_by_file_time(configuration, sum(p.wanted for p in planned))
        run_id = secrets.token_hex(4)
        tasks = cleaning_tasks(planned, rules, request.task_settings(), run_id)
        if not tasks and flags.path is None:
            return _in_order(planned, (), request)
        deadline_s = None
        if request.deadline_minutes is not None:
            deadline_s = started_s + request.deadline_minutes * 60
        sizes = [(os.path.basename(task.partition_path), _log_bytes(task)) for task in tasks]
        with Reporter("compact", sizes, READ_IN_A_COMPACTION) as reporter:
            if spark is None:
                spark = _workers(run, reporter, planned, request, flags)
            else:
                reporter.watch(address_of_driver(spark))
            recorded = recording(
                flags, spark, run_id_at(rules.now_ms, run_id), command="compact", log_dirs=request.choice.log_dirs,
                now_ms=rules.now_ms, configuration=configuration, shared_storage=request.shared_storage,
                on_note=reporter.note, fs=fs,
            )  # fmt: skip
            with recorded as record:
                compaction = _compaction(spark, fs, chosen, tasks, request, reporter, deadline_s)
                compaction.ledger = record.ledger
                if originals is not None and tasks:
                    make_directory(fs, originals, request.choice.log_dirs[0])
                    compaction.keeper = _keeper(fs, originals)
                    at_end.callback(tell_kept, fs, originals, run_id)
                try:
                    rows = compaction.run()
                except (Stopped, SparkEnded) as stop:
                    stop.rows = _in_order(planned, compaction.rows_so_far(), request)
                    at_end.callback(compaction.remove_scratch)
                    raise
                record.rows = _in_order(planned, rows, request)
                record.exit_status = exit_status(record.rows)
        return record.recorded(record.rows)


def _log_bytes(task: CleaningTask) -> int:
    return sum(segment.log_bytes for segment in task.segments)


def _workers(
    run: contextlib.ExitStack, reporter: Reporter, planned: Iterable[Planned], request: Request, flags: LedgerFlags
) -> Any:
    """Return the Spark session, or local processes where they are faster."""
    expected = [one for plan in planned if (one := plan.expected(request.map_memory())) is not None]
    may_fan_out = request.fan_out != "never" and any(one.way == "maybe fan-out" for one in expected)
    needs_spark = may_fan_out or request.fan_out == "always" or flags.path is not None
    seconds = [one.seconds for one in expected]
    extra = flags.session_settings()
    return workers_of_run(run, reporter, request.master, seconds, needs_spark=needs_spark, extra=extra)


def _plan_resolved(fs: FileSystem, chosen: Chosen, configuration: Configuration, rules: Rules) -> list[Planned]:
    """Return the decisions, after resolving leftovers of interrupted runs in partitions of compacted topics."""
    found = of_each(
        chosen.partitions, lambda log_dir, entry: plan_to_compact(fs, log_dir, entry, configuration, rules), fs
    )
    planned = []
    for (log_dir, entry), before in zip(chosen.partitions, found, strict=True):
        now, done = resolve_leftovers(fs, before, log_dir, entry, configuration, rules)
        for sentence in done:
            say(f"keytail: {now.row().name}: {sentence}")
        planned.append(now)
    return planned


def _mend_checkpoints(fs: FileSystem, chosen: Chosen, planned: Iterable[Planned]) -> None:
    """Set checkpoints outside their logs to the first dirty offset, also of partitions where no round is due."""
    from keytail.compact.driver import move_checkpoints  # noqa: PLC0415 (--help and --version stay fast)

    mended: dict[str, dict[tuple[str, int], int]] = {}
    for plan in planned:
        if plan.mended_checkpoint is not None:
            key = (plan.facts.topic, plan.facts.partition)
            mended.setdefault(plan.facts.log_dir, {})[key] = plan.mended_checkpoint
    for log_dir in chosen.log_dirs:
        if log_dir.path in mended:
            move_checkpoints(fs, log_dir.path, mended[log_dir.path], hosted([log_dir]))


def _compaction(
    spark: Any,
    fs: FileSystem,
    chosen: Chosen,
    tasks: list[Any],
    request: Request,
    reporter: Reporter,
    deadline_s: float | None,
) -> Compaction:
    from keytail.compact.driver import Compaction  # noqa: PLC0415 (brings in the kernels)

    return Compaction(
        spark=spark,
        tasks=tasks,
        space=ScratchSpace(fs, request.max_scratch_bytes),
        hosted={log_dir.path: hosted([log_dir]) for log_dir in chosen.log_dirs},
        on_row=lambda row: reporter.done(row.name, row.status, row.bytes_before or 0, row.error),
        on_phase=reporter.phase,
        on_trace=lambda trace: say(trace, "error"),
        on_note=reporter.note,
        shared_storage=request.shared_storage,
        deadline_s=deadline_s,
        fs=fs,
    )


def _keeper(fs: FileSystem, originals: Originals) -> Keeper:
    from keytail.compact.keeper import Keeper  # noqa: PLC0415 (brings in the kernels)

    return Keeper(fs, originals)


def _in_order(planned: Iterable[Planned], rows: Iterable[ResultRow], request: Request) -> list[ResultRow]:
    done: Iterator[ResultRow] = iter(rows)
    found = [(p, p.gated(next(done)) if p.wanted else p.row(executed=True)) for p in planned]
    return [p.detailed(row) if request.in_detail else row for p, row in found]
