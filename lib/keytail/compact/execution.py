"""Compacts the chosen partitions that are due, or does other work in their place (`Kind`).

`keytail compact` and jobs/compact.py under spark-submit run the same code; the only difference is what creates the
Spark session. Locks are held from before the first decision until after the last checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from keytail.cli.configuration import Configuration
from keytail.cli.progress import READ_IN_A_COMPACTION, Reporter
from keytail.cli.selection import SelectedPartitions, select_partitions
from keytail.cli.stopping import Stopped
from keytail.compact.cleaner import clean_partition
from keytail.compact.command import Request
from keytail.compact.expectation import Expected
from keytail.compact.keeper import Keeper
from keytail.compact.plan import Decision
from keytail.compact.planned_rows import row_of, with_active_segment, with_detail, with_limits, with_preparation
from keytail.compact.planning import Planned, report_assumptions, report_version_rules
from keytail.compact.removal_limit import report_unhosted
from keytail.compact.rules import Rules
from keytail.compact.running.compaction import Compaction
from keytail.compact.running.replacing import InPlace, move_checkpoints
from keytail.compact.running.state import Events, not_begun_row
from keytail.compact.steps import Steps, cleaning_tasks, find_prepared, resolve_leftovers
from keytail.compact.task import CleaningResult, CleaningTask
from keytail.compact.worker import clean_on_worker
from keytail.console import print_message
from keytail.errors import ErrorText, joined
from keytail.ledger.of_run import Run, recording, run_id_at
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.lock import hold_off_preparations
from keytail.log.log_dirs import hosted
from keytail.run.each_partition import of_each
from keytail.run.engine import Engine
from keytail.run.rows import ResultRow, exit_status
from keytail.run.storage import ScratchSpace
from keytail.undo.options import backup_of, make_directory, report_backup


@dataclass(frozen=True)
class Kind:
    """What a run in place does with partitions. `name` is the name of the command in the ledger; the bytes of a
    partition are read `times_read` times; `kernels` is the command's name in run/kernels.json.

    `plan` returns the decisions about all partitions, after resolving leftovers; `tasks` returns the tasks of the due
    partitions, with the id of the run; `expected` returns the estimate for one due partition. `in_place` is the class
    of the destination, and `clean` does the work of a task. `rows` combines the decisions with the rows of the
    partitions that were due, in order.
    """

    name: str
    times_read: float
    kernels: str
    plan: Callable[[FileSystem, SelectedPartitions, Configuration, Rules, Request], list[Planned]]
    tasks: Callable[[list[Planned], Rules, Request, str], Sequence[CleaningTask]]
    expected: Callable[[Planned, Request], Expected | None]
    in_place: type[InPlace]
    clean: Callable[[FileSystem, Any], CleaningResult]
    rows: Callable[[Iterable[Planned], Iterable[ResultRow], Request], list[ResultRow]]


def compact(request: Request, fs: FileSystem = LOCAL) -> list[ResultRow]:
    """Compact the chosen partitions that are due; return a row for each chosen partition."""
    return run_in_place(request, COMPACTION, fs)


def run_in_place(request: Request, kind: Kind, fs: FileSystem = LOCAL) -> list[ResultRow]:
    """Plan and execute a run, with the locks of the log dirs held; return a row for each chosen partition."""
    with contextlib.ExitStack() as run:
        steps = Steps(request, fs, run)
        rules = request.rules(fs)
        log_dirs = request.partition_filter.log_dirs
        select_partitions(fs, request.partition_filter)  # report invalid flags before taking locks
        backup = backup_of(fs, request.keep_originals, request.copy_originals, log_dirs)
        flags = request.ledger.checked(fs, log_dirs)
        submitted = steps.submitted_session()
        if submitted is not None:
            flags = flags.in_session(submitted, fs, log_dirs)
        steps.lock(log_dirs)
        run.enter_context(hold_off_preparations(log_dirs, fs))
        chosen, configuration = steps.select_partitions(rules.now_ms)
        planned = kind.plan(fs, chosen, configuration, rules, request)
        run_id = secrets.token_hex(4)
        tasks = kind.tasks(planned, rules, request, run_id)
        if not tasks and flags.path is None:
            return kind.rows(planned, (), request)
        sizes = [(os.path.basename(task.partition_path), sum(s.log_bytes for s in task.segments)) for task in tasks]
        why_spark = "" if submitted else flags.why_spark()
        not_begun = [not_begun_row(task) for task in tasks]
        with Reporter("compact", sizes, kind.times_read) as reporter, _rows_of_stop(
            lambda: kind.rows(planned, not_begun, request)
        ):
            if why_spark and request.master is None:
                reporter.note(why_spark)
            engine = steps.start(
                reporter,
                (kind.expected(plan, request) for plan in planned if plan.prepared is None),
                needs_spark=bool(why_spark),
                kernels=kind.kernels,
                extra=None if submitted else flags.session_settings,
            )
            run_id_of_ledger = run_id_at(rules.now_ms, run_id)
            about = Run(kind.name, run_id_of_ledger, rules.now_ms, log_dirs, configuration, request.shared_storage)
            with recording(flags, engine, about, on_note=reporter.note, fs=fs) as record:
                keeper = None
                if backup is not None and tasks:
                    make_directory(fs, backup, log_dirs[0])
                    keeper = Keeper(fs, backup)
                    steps.at_end.callback(report_backup, fs, backup, run_id)
                compaction = Compaction(
                    engine,
                    tasks,
                    ScratchSpace(fs, request.max_scratch_bytes),
                    _in_place(kind, steps, engine, chosen, keeper),
                    Events.reported_by(reporter),
                    steps.deadline_s,
                    record.ledger,
                )
                rows = compaction.run_or_leave(steps.at_end, lambda rows: kind.rows(planned, rows, request))
                record.rows = kind.rows(planned, rows, request)
                record.exit_status = exit_status(record.rows)
        return record.recorded(record.rows)


def _plan(
    fs: FileSystem, chosen: SelectedPartitions, configuration: Configuration, rules: Rules, request: Request
) -> list[Planned]:
    """Return the decisions of a compaction, print what they assume, and correct checkpoints that are outside their
    logs."""
    planned = _plan_resolved(fs, chosen, configuration, rules)
    if request.prepared_only:
        planned = [p if p.prepared or not p.wanted else _not_prepared(p) for p in planned]
    report_unhosted(
        [row_of(p).name for p in planned if p.removal_limit is not None and p.removal_limit.replica is None]
    )
    _repair_checkpoints(fs, chosen, planned)
    due = [p.facts.topic for p in planned if p.wanted]
    report_assumptions(configuration, due)
    report_version_rules(configuration, due)
    return planned


@contextlib.contextmanager
def _rows_of_stop(rows: Callable[[], list[ResultRow]]) -> Iterator[None]:
    """Add the rows of all partitions to a signal that stops the run before any partition has begun."""
    try:
        yield
    except Stopped as stop:
        if stop.rows is None:
            stop.rows = rows()
        raise


def _not_prepared(planned: Planned) -> Planned:
    text = ErrorText("not prepared (--prepared-only)")
    decision = Decision("skipped", joined([text, planned.discarded]), planned.decision.selection)
    return replace(planned, decision=decision).without_segments()


def _plan_resolved(
    fs: FileSystem, chosen: SelectedPartitions, configuration: Configuration, rules: Rules
) -> list[Planned]:
    """Return the decisions, after resolving leftovers of interrupted runs in partitions of compacted topics."""
    found = of_each(
        chosen.partitions,
        lambda log_dir, entry: find_prepared(fs, log_dir, entry, configuration, rules),
        fs,
    )
    planned = []
    for (log_dir, entry), before in zip(chosen.partitions, found, strict=True):
        now, done = resolve_leftovers(fs, before, log_dir, entry, configuration, rules)
        for sentence in done:
            print_message(f"keytail: {row_of(now).name}: {sentence}")
        planned.append(now)
    return planned


def _repair_checkpoints(fs: FileSystem, chosen: SelectedPartitions, planned: Iterable[Planned]) -> None:
    """Set the entries of the cleaner's checkpoint that are outside of their logs to the first dirty offset, even if no
    round is due."""
    repaired: dict[str, dict[tuple[str, int], int]] = {}
    for plan in planned:
        if plan.repaired_checkpoint is not None:
            key = (plan.facts.topic, plan.facts.partition)
            repaired.setdefault(plan.facts.log_dir, {})[key] = plan.repaired_checkpoint
    for log_dir in chosen.log_dirs:
        if log_dir.path in repaired:
            move_checkpoints(fs, log_dir.path, repaired[log_dir.path], hosted([log_dir]))


def _in_place(
    kind: Kind, steps: Steps, engine: Engine, chosen: SelectedPartitions, keeper: Keeper | None
) -> InPlace:
    shared_storage = steps.request.shared_storage
    return kind.in_place(
        steps.fs,
        hosted={log_dir.path: hosted([log_dir]) for log_dir in chosen.log_dirs},
        clean=partial(clean_on_worker, engine.concurrent_tasks, shared_storage=shared_storage, clean=kind.clean),
        keeper=keeper,
        shared_storage=shared_storage,
    )


def _in_order(planned: Iterable[Planned], rows: Iterable[ResultRow], request: Request) -> list[ResultRow]:
    done: Iterator[ResultRow] = iter(rows)
    found = [
        (p, with_preparation(with_limits(next(done), p) if p.wanted else row_of(p, executed=True), p))
        for p in planned
    ]
    found = [(p, with_active_segment(row, p)) for p, row in found]
    return [with_detail(row, p) if request.in_detail else row for p, row in found]


COMPACTION = Kind(
    "compact",
    READ_IN_A_COMPACTION,
    "compact",
    plan=_plan,
    tasks=lambda planned, rules, request, run_id: cleaning_tasks(planned, rules, request.task_settings(), run_id),
    expected=lambda planned, request: planned.expected(request.map_memory()),
    in_place=InPlace,
    clean=clean_partition,
    rows=_in_order,
)
