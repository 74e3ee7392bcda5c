"""Writes the latest state of topics as Delta tables, from their logs, without a broker.

`keytail export` and jobs/export.py under spark-submit run this code. An export only reads log dirs and takes no lock,
so it works on copies, on stopped brokers and beside a running broker. Records are read up to the last stable offset, by
the checkpointed high watermark or, if requested, the log end. Without `execute` the plan is only reported, without
starting Spark unless tables are at a URI. export/EXPORT.md describes the contents of tables, when everything is
exported again, and what is atomic.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from keytail.acting_user import as_caller
from keytail.cli.options import parse_time
from keytail.cli.outside import refuse_unsuitable
from keytail.cli.progress import READ_IN_AN_EXPORT, Reporter
from keytail.cli.selection import SelectedPartitions, select_partitions
from keytail.cli.stopping import Stopped
from keytail.console import print_message
from keytail.errors import EXPLAINED, ErrorText, KeytailError, Refused, UsageProblem, in_words, joined
from keytail.export.columns import table_columns
from keytail.export.command import ExportRow, Request
from keytail.export.delta_table import TableState, read_state
from keytail.export.latest import LatestTask
from keytail.export.on_spark import Export, Exporting, ExportOutcome, Work
from keytail.export.plan import NO_PARTITION, NO_TABLE, ExportPlan, LogNow, plan_export, why_exported
from keytail.format import names
from keytail.log.checkpoint import read_epochs
from keytail.log.cluster.metadata import read_topic_id
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.listed import retry_beside_broker
from keytail.log.partition import LogDirFacts, PartitionEntry, PartitionFacts, survey_partition
from keytail.log.readable import readable
from keytail.lookup.steps import lookup_time
from keytail.run.ended import SparkEnded
from keytail.run.kernels import compile_kernels, is_on_this_host
from keytail.run.rows import status_of
from keytail.run.spark.delta import require_delta, session_settings
from keytail.run.spark.engine import SparkEngine
from keytail.run.spark.session import session_of_run
from keytail.run.spark.stores import checked_uri, is_remote, is_uri, local_path, require_store


@dataclass(frozen=True)
class _Planned:
    row: ExportRow
    work: Work | None = None


class _Session:
    """The Spark session of an export, which ends with `run`. A dry run starts no session, unless its tables are at a
    URI."""

    def __init__(self, request: Request, run: contextlib.ExitStack) -> None:
        self._request, self._run = request, run
        self._engine: SparkEngine | None = None

    @property
    def is_started(self) -> bool:
        return self._engine is not None

    def start(self) -> SparkEngine:
        """Return the engine of the session, which is started by the first call. Raises UsageProblem if the session
        cannot access the tables."""
        if self._engine is None:
            request = self._request
            extra = session_settings(request.delta_jars, place=request.target)
            engine = session_of_run(
                self._run, request.master, submitted=request.submitted, extra=extra, rows_in_jvm=True
            )
            if request.submitted:
                require_delta(engine.session)
            require_store(engine.session, request.target, writes=request.execute)
            self._engine = engine
        return self._engine


def export(request: Request, fs: FileSystem = LOCAL) -> list[ExportRow]:
    """Export the chosen partitions; without `execute`, only plan the export. Returns a row for each partition, sorted
    by topic and partition."""
    target = checked_target(fs, request)
    chosen = select_partitions(fs, request.partition_filter)
    request = replace(request, target=target)
    with contextlib.ExitStack() as run:
        session = _Session(request, run)
        if is_remote(target):
            print_message("keytail: starting Spark, which reads the tables")
            session.start()
        return _export(fs, request, chosen, session)


def _export(fs: FileSystem, request: Request, chosen: SelectedPartitions, session: _Session) -> list[ExportRow]:
    of_topic: dict[str, list[tuple[LogDirFacts, PartitionEntry]]] = {}
    for log_dir, entry in chosen.partitions:
        of_topic.setdefault(entry.topic, []).append((log_dir, entry))
    seed, planned, states = secrets.randbits(63), {}, {}
    for topic, entries in sorted(of_topic.items()):
        states[topic], planned[topic] = _plan_topic(fs, request, topic, entries, seed, session)
    rows = {plan.row.name: plan.row for plans in planned.values() for plan in plans}
    if request.execute and any(plan.work for plans in planned.values() for plan in plans):
        try:
            _execute(request, planned, states, rows, session)
        except (Stopped, SparkEnded) as stop:
            left = {name: replace(row, status="failed", error=ErrorText("interrupted")) for name, row in rows.items()
                    if row.status == "would-export"}  # fmt: skip
            stop.rows = _in_order({**rows, **left})
            raise
    return _in_order(rows)


def _in_order(rows: Mapping[str, ExportRow]) -> list[ExportRow]:
    return sorted(rows.values(), key=lambda row: (row.topic, row.partition))


@as_caller()
def checked_target(fs: FileSystem, request: Request) -> str:
    """Return the absolute path or the URI of the tables' directory. Raises UsageProblem if --to or an --as-of flag is
    invalid."""
    if request.as_of_offset is not None and request.as_of_timestamp is not None:
        raise UsageProblem(
            "--as-of-offset and --as-of-timestamp cannot be combined",
            remedy="Give only one of the two",
            slug="conflicting-flags",
        )
    if request.as_of_timestamp is not None:
        parse_time(request.as_of_timestamp)
    local = local_path(request.target)
    if local is None:
        return checked_uri(request.target, "--to")
    target = os.path.realpath(local)
    refuse_unsuitable(fs, target, request.partition_filter.log_dirs, "--to")
    return f"file://{target}" if is_uri(request.target) else target


def _plan_topic(
    fs: FileSystem,
    request: Request,
    topic: str,
    entries: Iterable[tuple[LogDirFacts, PartitionEntry]],
    seed: int,
    session: _Session,
) -> tuple[TableState | None, list[_Planned]]:
    state, problem = None, None
    try:
        state = _state(request, topic, session)
    except KeytailError as refused:
        problem = refused
    planned = []
    for log_dir, entry in entries:
        row = ExportRow(topic, entry.partition, entry.log_dir, "refused", table=os.path.join(request.target, topic))
        try:
            if problem is not None:
                raise problem
            plan = partial(_plan, fs, request, log_dir, entry, state, seed, row)
            planned.append(retry_beside_broker(plan, clean_shutdown=log_dir.clean_shutdown))
        except EXPLAINED as refused:
            planned.append(_Planned(replace(row, status=status_of(refused), error=in_words(refused))))
    return state, planned


def _state(request: Request, topic: str, session: _Session) -> TableState | None:
    """Return the state of the topic's table; None if there is no table. Raises Refused if the export does not match the
    table."""

    path = os.path.join(request.target, topic)
    local = local_path(path)
    state = read_state(path, session.start().session) if local is None else read_state(local)
    if state is None:
        return None
    if state.topic != topic:
        raise Refused(
            f"the table is an export of topic {state.topic}",
            path=path,
            remedy="Give another --to",
            slug="table-of-another-topic",
        )
    if state.formats != request.formats.as_json():
        raise Refused(
            f"the table was exported with {_in_words(state.formats)}, but {_in_words(request.formats.as_json())} was "
            "requested",
            path=path,
            remedy="Give the same formats, or another --to",
            slug="export-format-mismatch",
        )
    if differing := set(state.columns) ^ set(table_columns()):
        raise Refused(
            f"the table was exported by another version of keytail, and only one of the two has the columns "
            f"{', '.join(sorted(differing))}",
            path=path,
            remedy="Use that version of keytail, or give another --to, which exports everything again",
            slug="export-column-mismatch",
        )
    if state.as_of != request.as_of:
        both = (state.as_of, request.as_of)
        shown, asked = (f"the state as of {as_of}" if as_of else "the latest state" for as_of in both)
        raise Refused(
            f"the table contains {shown}, but {asked} was requested",
            path=path,
            remedy="Give another --to",
            slug="export-as-of-mismatch",
        )
    return state


def _in_words(formats: Mapping[str, str]) -> str:
    return " and ".join(f"--{what}-format {name}" for what, name in formats.items())


def _plan(
    fs: FileSystem,
    request: Request,
    log_dir: LogDirFacts,
    entry: PartitionEntry,
    state: TableState | None,
    seed: int,
    row: ExportRow,
) -> _Planned:

    facts = survey_partition(fs, log_dir, entry)
    if facts.problems:
        raise Refused(
            joined(facts.problems),
            remedy="Run `keytail verify`, which lists what is wrong with the partition",
            slug="unexpected-partition-state",
        )
    log, notes = _log_now(fs, request, facts)
    known = state.partitions.get(entry.partition) if state is not None and not request.as_of else None
    plan = plan_export(known, log, no_state=_no_state(request, state))
    if request.full and known is not None:
        plan = ExportPlan("full", "--full", log.log_start_offset)
    task = LatestTask(
        facts.path, facts.segments, log.log_start_offset, plan.from_offset, log.stable_offset,
        tombstones=plan.strategy == "incremental", drop_keyless=request.drop_keyless,
        map_memory_bytes=request.map_memory_bytes or 0, hash_seed=seed,
    )  # fmt: skip
    row = replace(
        row,
        status="clean" if plan.strategy == "none" else "would-export",
        strategy="" if plan.strategy == "none" else plan.strategy,
        why=plan.why,
        from_offset=plan.from_offset,
        end_offset=max(log.stable_offset, plan.from_offset),
        log_bytes=sum(segment.log_bytes for segment in task.sources) if plan.strategy != "none" else 0,
        notes=tuple(notes),
    )
    work = None if plan.strategy == "none" else Work(entry.partition, plan, task, log.exported())
    return _Planned(row, work)


def _no_state(request: Request, state: TableState | None) -> str:
    if request.as_of:
        return f"the state as of {request.as_of}"
    if state is None:
        return NO_TABLE
    return state.changed or NO_PARTITION


def _log_now(fs: FileSystem, request: Request, facts: PartitionFacts) -> tuple[LogNow, list[str]]:
    """Return the current state of the log and notes for the row. An --as-of flag lowers `stable_offset` to the
    requested offset."""

    now_ms = time.time_ns() // 1_000_000
    stable = readable(fs, facts, committed=True, log_end=request.high_watermark == "log-end", now_ms=now_ms)
    limit, notes = stable.end_offset, list(stable.notes)
    as_of = _as_of(fs, request, facts)
    if as_of is not None:
        limit = _limited(facts, limit, as_of, notes)
    epochs = tuple(read_epochs(fs, os.path.join(facts.path, names.LEADER_EPOCHS)))
    now = LogNow(
        facts.log_start_offset,
        facts.log_end_offset,
        max(limit, facts.log_start_offset),
        facts.cleaner_checkpoint,
        read_topic_id(fs, facts.path),
        epochs,
    )
    return now, notes


def _as_of(fs: FileSystem, request: Request, facts: PartitionFacts) -> int | None:
    if request.as_of_timestamp is None:
        return request.as_of_offset

    found = lookup_time(fs, facts, parse_time(request.as_of_timestamp)).record
    return facts.log_end_offset if found is None else found.offset


def _limited(facts: PartitionFacts, limit: int, as_of: int, notes: list[str]) -> int:
    if as_of < facts.log_start_offset:
        raise Refused(
            f"the log starts at offset {facts.log_start_offset}, after the requested offset {as_of}, so the state as "
            "of the requested offset cannot be determined",
            remedy="Give a later offset or time",
            path=facts.path,
            slug="offset-before-log-start",
        )
    if facts.cleaner_checkpoint is not None and facts.cleaner_checkpoint > as_of:
        raise Refused(
            f"the log was compacted up to offset {facts.cleaner_checkpoint}: records that were the latest of their "
            f"keys as of offset {as_of} may have been removed",
            path=facts.path,
            remedy="Request a later state, or use a copy of the log from before the compaction",
            slug="compacted-past-offset",
        )
    if facts.cleaner_checkpoint is None:
        notes.append(
            "no cleaner-offset-checkpoint has an entry for this partition, so it is unknown whether the log was "
            f"compacted beyond offset {as_of}"
        )
    if as_of > limit:
        notes.append(f"the state is exported as of the last stable offset {limit}, which is below the requested offset")
    return min(limit, as_of)


def _execute(
    request: Request,
    planned: Mapping[str, Sequence[_Planned]],
    states: Mapping[str, TableState | None],
    rows: dict[str, ExportRow],
    session: _Session,
) -> None:

    works = [plan.work for plans in planned.values() for plan in plans if plan.work is not None]
    sizes = [(os.path.basename(work.task.partition_path), work.log_bytes) for work in works]
    with Reporter("export", sizes, READ_IN_AN_EXPORT) as reporter:
        if not request.submitted and is_on_this_host(request.master):
            compile_kernels(["export"], reporter.note)
        if not session.is_started:
            reporter.note("starting Spark")
        engine = session.start()
        reporter.watch(engine.driver_address)
        for topic, plans in planned.items():
            of = {plan.work.partition: plan for plan in plans if plan.work is not None}

            def on_result(outcome: ExportOutcome, of: Mapping[int, _Planned] = of) -> None:
                row = _row_of(of[outcome.work.partition].row, outcome)
                rows[row.name] = row
                if outcome.trace:
                    print_message(outcome.trace, "error")
                reporter.done(row.name, row.status, row.log_bytes or 0, row.error)

            if of:
                path, works = os.path.join(request.target, topic), [item.work for item in of.values() if item.work]
                exporting = Exporting(topic, path, request.formats, states[topic], request.as_of, works)
                Export(engine, on_result).run(replace(exporting, change_feed=request.change_feed))


def _row_of(row: ExportRow, outcome: ExportOutcome) -> ExportRow:
    plan, latest = outcome.work.plan, outcome.latest
    row = replace(
        row,
        strategy=plan.strategy,
        why=plan.why,
        from_offset=plan.from_offset,
        log_bytes=outcome.work.log_bytes,
        start_ms=outcome.start_ms or None,
        end_ms=outcome.end_ms or None,
    )
    if outcome.problem is not None:
        return replace(row, status=status_of(outcome.problem), error=in_words(outcome.problem))
    if latest is None:
        return row
    notes = list(row.notes)
    if latest.keyless:
        notes.append(f"{latest.keyless} records without a key were left out, because of --drop-keyless")
    if latest.shards > 1:
        notes.append(f"the log was read {latest.shards} times: its keys do not fit into --map-memory at once")
    records = latest.records - (latest.tombstones if plan.strategy == "incremental" else 0)
    return replace(
        row,
        status="exported",
        why=why_exported(plan.why),
        records=records,
        tombstones=latest.tombstones,
        keyless=latest.keyless,
        notes=tuple(notes),
    )
