"""Prepares compactions: does all steps of a compaction except the commit, while the broker may be running or stopped.

A preparing run takes keytail's own lock, not the broker's, so that only one run at a time prepares in a log dir. In
partitions a preparing run writes only scratch files, which brokers ignore (PREPARED.md in this directory).
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from keytail.cli.configuration import Configuration
from keytail.cli.progress import READ_IN_A_COMPACTION, Reporter
from keytail.cli.selection import select_partitions
from keytail.compact.command import Request
from keytail.compact.planned_rows import row_of, with_detail, with_limits
from keytail.compact.planning import ATTEMPTS, Planned, plan_beside_a_broker, report_assumptions, report_version_rules
from keytail.compact.prepared.committing import basis_of, discard, read_record, reason_against_commit
from keytail.compact.prepared.preparing import AGAIN, Found, Prepare, SourcesChanged
from keytail.compact.prepared.record import see_sources
from keytail.compact.prepared.scratch import RUN_ID_PREFIX, is_prepared
from keytail.compact.removal_limit import report_unhosted
from keytail.compact.rules import Rules
from keytail.compact.running.compaction import Compaction
from keytail.compact.running.replacing import with_numbers
from keytail.compact.running.state import Events
from keytail.compact.steps import Steps, cleaning_tasks
from keytail.compact.task import CleaningTask
from keytail.compact.worker import clean_on_worker
from keytail.errors import ErrorText, KeytailError, in_words
from keytail.format import names
from keytail.ledger.of_run import set_run_id
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.lock import refuse_other_run
from keytail.log.partition import LogDirFacts, PartitionEntry
from keytail.run.engine import Engine
from keytail.run.rows import ResultRow
from keytail.run.storage import ScratchSpace

_Chosen = tuple[LogDirFacts, PartitionEntry]


def prepare(request: Request, fs: FileSystem = LOCAL) -> list[ResultRow]:
    """Prepare the chosen partitions that are due for compaction; return a row for each chosen partition."""
    with contextlib.ExitStack() as run:
        steps = Steps(request, fs, run)
        rules = request.rules(fs)
        select_partitions(fs, request.partition_filter)  # invalid flags are reported before locks are taken
        steps.submitted_session()
        steps.lock(request.partition_filter.log_dirs, names.PREPARE_LOCK)
        # A run that holds Kafka's lock removes scratch files, and may have begun before the prepare lock existed.
        refuse_other_run(request.partition_filter.log_dirs, fs)
        chosen, configuration = steps.select_partitions(rules.now_ms)
        rows: dict[str, ResultRow] = {}
        left: Sequence[_Chosen] = chosen.partitions
        for attempt in range(ATTEMPTS):
            planned = [_plan(fs, *item, configuration, rules) for item in left]
            if attempt == 0:
                due = [plan.facts.topic for plan in planned if plan.wanted]
                report_assumptions(configuration, due)
                report_version_rules(configuration, due)
                limits = [(row_of(plan).name, plan.removal_limit) for plan in planned]
                report_unhosted([name for name, limit in limits if limit is not None and limit.replica is None])
            found = _prepare(steps, rules, planned)
            rows.update(found)
            left = [item for item in left if isinstance(found[item[1].path].problem, SourcesChanged)]
            if not left:
                break
            try:
                chosen_again, configuration = steps.select_partitions(rules.now_ms)
            except (KeytailError, OSError):  # for example, a chosen topic was deleted; the rows have the status skipped
                break
            wanted = {entry.path for _, entry in left}
            left = [item for item in chosen_again.partitions if item[1].path in wanted]
        return [rows[entry.path] for _, entry in chosen.partitions]


def _plan(
    fs: FileSystem, log_dir: LogDirFacts, entry: PartitionEntry, configuration: Configuration, rules: Rules
) -> Planned:
    """Return the plan of a partition, after discarding an earlier preparation that is not kept. A preparation is kept
    if the partition is refused. Otherwise it is kept only if it can still be committed, and if it ends where this run
    would end or no round is due.
    """
    planned = plan_beside_a_broker(fs, log_dir, entry, configuration, rules)
    prepared = [name for name in planned.facts.leftovers if is_prepared(name)]
    if not prepared or planned.decision.status == "refused":
        return planned
    record, reason = read_record(fs, entry.path, prepared)
    if record is not None:
        reason = reason_against_commit(fs, record, planned, rules)
        selection = planned.decision.selection
        if not reason and selection is not None:
            if selection.first_uncleanable_offset == record.result.end_offset or not planned.wanted:
                discard(fs, entry.path, record.files)
                return replace(planned, prepared=record)
            reason = ErrorText(
                f"the partition was prepared up to offset {record.result.end_offset}, but cleaning now reaches offset "
                f"{selection.first_uncleanable_offset}"
            )
    with contextlib.suppress(OSError):  # after an error, the committing run discards the preparation
        discard(fs, entry.path)
    return replace(planned, discarded=reason)


def _prepare(steps: Steps, rules: Rules, planned: Sequence[Planned]) -> Mapping[str, ResultRow]:
    """Prepare the partitions that are due and not prepared yet; return the rows of all planned partitions, by path."""
    fs, request = steps.fs, steps.request
    rows = {plan.facts.path: _row(plan) for plan in planned}
    found: dict[str, Found] = {}
    for plan in planned:
        if plan.prepared is not None or not plan.wanted:
            continue
        facts = plan.facts
        assert plan.decision.selection is not None
        end = plan.decision.selection.first_uncleanable_offset
        try:
            found[facts.path] = Found(
                basis_of(fs, plan, rules),
                see_sources(fs, facts.path, [segment for segment in facts.segments if segment.base_offset < end]),
            )
        except (KeytailError, OSError) as problem:
            changed = SourcesChanged(
                "segments changed while they were listed: " + in_words(problem),
                remedy=AGAIN,
            )
            rows[facts.path] = replace(row_of(plan).unchanged("skipped", in_words(changed)), problem=changed)
    run_id = RUN_ID_PREFIX + secrets.token_hex(4)
    due = [plan for plan in planned if plan.facts.path in found]
    tasks = [replace(task, is_preparation=True) for task in cleaning_tasks(due, rules, request.task_settings(), run_id)]
    if not tasks:
        return rows
    set_run_id(run_id)
    sizes = [(os.path.basename(task.partition_path), sum(item.log_bytes for item in task.segments)) for task in tasks]
    with Reporter("prepare", sizes, READ_IN_A_COMPACTION) as reporter:
        engine = steps.engine = steps.start(reporter, [plan.expected(request.map_memory()) for plan in due])
        space = ScratchSpace(fs, request.max_scratch_bytes, output_stays=True)
        for plan in planned:
            if plan.prepared is not None:
                space.count_as_used(plan.facts.log_dir, sum(output.size_bytes for output in plan.prepared.outputs))
        compaction = Compaction(
            engine,
            tasks,
            space,
            _destination(steps, engine, found),
            Events.reported_by(reporter),
            steps.deadline_s,
        )
        done = compaction.run_or_leave(steps.at_end, lambda some: _all_rows(rows, tasks, some))
    for plan, result in zip(due, done, strict=True):
        row = with_limits(result, plan)
        rows[plan.facts.path] = with_detail(row, plan) if request.in_detail else row
    return rows


def _destination(steps: Steps, engine: Engine, found: Mapping[str, Found]) -> Prepare:
    shared_storage = steps.request.shared_storage
    clean = partial(clean_on_worker, engine.concurrent_tasks, shared_storage=shared_storage)
    return Prepare(steps.fs, found, clean, shared_storage)


def _row(plan: Planned) -> ResultRow:
    if plan.prepared is None:
        return row_of(plan)
    record = plan.prepared
    row = replace(row_of(plan), status="would-compact", first_dirty_offset=record.first_dirty_offset)
    return replace(with_numbers(row, record.result), status="prepared", end_ms=None)


def _all_rows(
    rows: Mapping[str, ResultRow], tasks: Sequence[CleaningTask], done: Sequence[ResultRow]
) -> list[ResultRow]:
    """Return all rows of a run that ended early: the rows `done` of its `tasks`, and `rows` for all other partitions.
    """
    known = dict(rows)
    known.update((task.partition_path, row) for task, row in zip(tasks, done, strict=True))
    return list(known.values())
