"""Compares the index files of the chosen partitions with their logs, and rebuilds them.

`keytail rebuild-index` and jobs/rebuild_indexes.py under spark-submit run this code. Without `execute` nothing is
changed and no lock is taken; with `execute`, locks are held from before the first read until after the last rename.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from keytail.cli.configuration import Configuration
from keytail.cli.metadata import with_metadata
from keytail.cli.progress import Reporter
from keytail.cli.quarantine import Place
from keytail.cli.selection import select_partitions
from keytail.console import print_message
from keytail.errors import EXPLAINED, NO_ERROR, ErrorText, KeytailError, in_words, joined
from keytail.format import names
from keytail.ledger.of_run import LedgerFlags, Run, recording, run_id_at
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.lock import is_held
from keytail.log.log_dirs import hosted
from keytail.log.partition import LogDirFacts, PartitionEntry, PartitionFacts, reasons_against_change, survey_partition
from keytail.log.replacement.recover import recover
from keytail.rebuild_index.command import RebuildRow, Request, SegmentRow, exit_status
from keytail.rebuild_index.partition import PartitionPlan, RebuildSettings, plan_partition, truncation_text
from keytail.rebuild_index.tasks import PartitionOutcome, Rebuild
from keytail.run.engine import Engine, ThisProcess
from keytail.run.kernels import compile_kernels
from keytail.run.rates import HERE_BYTES, INDEXED_BYTES_PER_S
from keytail.run.rows import status_of
from keytail.run.spark.session import session_of_run
from keytail.run.storage import hold_local
from keytail.run.workers import workers_of_run


def rebuild(
    request: Request, fs: FileSystem = LOCAL, on_row: Callable[[RebuildRow], None] = lambda row: None
) -> list[RebuildRow]:
    """Compare and, with `execute`, rebuild. Returns a row for each chosen partition, in the order of the log dirs.
    `on_row` is called with the row of each partition that is read, when it is done."""
    with contextlib.ExitStack() as run:
        select_partitions(fs, request.partition_filter)  # invalid flags are reported before any lock is taken
        flags = request.ledger.checked(fs, request.partition_filter.log_dirs) if request.execute else LedgerFlags()
        engine: Engine = ThisProcess()
        if request.submitted:
            engine = session_of_run(run, request.master, submitted=True, kernels="rebuild-index")
            if request.execute:
                flags = flags.in_session(engine, fs, request.partition_filter.log_dirs)
        if request.execute:
            run.enter_context(hold_local(fs, request.partition_filter.log_dirs, request.shared_storage))
        chosen = select_partitions(fs, request.partition_filter)
        configuration = with_metadata(fs, request.partition_filter.log_dirs, request.configuration)
        run_id = secrets.token_hex(4)
        examined = [_plan(fs, log_dir, entry, configuration, request, run_id) for log_dir, entry in chosen.partitions]
        plans = [item.plan for item in examined if item.plan is not None]
        size = sum(plan.facts.log_bytes for plan in plans)
        sizes = [(os.path.basename(plan.facts.path), plan.facts.log_bytes) for plan in plans]
        with Reporter("rebuild-index", sizes) as reporter:
            why_spark = "" if request.submitted else flags.why_spark()
            if not request.submitted and (request.master or size > HERE_BYTES or why_spark) and fs is LOCAL:
                if why_spark and request.master is None:
                    reporter.note(why_spark)
                seconds = [plan.facts.log_bytes / INDEXED_BYTES_PER_S for plan in plans]
                engine = workers_of_run(
                    run, reporter, request.master, seconds, kernels="rebuild-index",
                    needs_spark=bool(why_spark), extra=flags.session_settings,
                )  # fmt: skip
            else:
                if plans and not request.submitted:
                    compile_kernels(["rebuild-index"], reporter.note)
                reporter.watch(engine.driver_address)
            notes = {item.facts.path: item.notes for item in examined}
            rows: dict[str, RebuildRow] = {}

            def on_result(outcome: PartitionOutcome) -> None:
                row = _row(outcome, notes[outcome.plan.facts.path])
                rows[outcome.plan.facts.path] = row
                on_row(row)
                reporter.done(row.name, row.status, row.bytes, row.error)

            of_dirs = {facts.path: hosted([facts]) for facts in chosen.log_dirs}
            now_ms = time.time_ns() // 1_000_000
            run_id = run_id_at(now_ms, run_id)
            about = Run(
                "rebuild-index",
                run_id,
                now_ms,
                request.partition_filter.log_dirs,
                configuration,
                request.shared_storage,
            )
            with recording(flags, engine, about, on_note=reporter.note, fs=fs) as record:
                record.intend(
                    [replace(item.refused_row(), status="begun") for item in examined if item.plan is not None]
                )
                Rebuild(
                    plans, engine, of_dirs, on_result, lambda trace: print_message(trace, "error"), fs,
                    shared_storage=request.shared_storage,
                ).run()  # fmt: skip
                done = [rows[item.facts.path] if item.plan is not None else item.refused_row() for item in examined]
                made = {
                    row.name: [segment.base_offset for segment in row.segments if segment.status == "rebuilt"]
                    for row in done
                }
                record.end(done, exit_status(done), made)
        return record.recorded(done)


@dataclass(frozen=True)
class _Examined:
    """A partition with its plan, or with the reason why it has no plan."""

    facts: PartitionFacts
    plan: PartitionPlan | None
    status: str = "refused"
    error: ErrorText = NO_ERROR
    notes: tuple[str, ...] = ()
    problem: KeytailError | None = None

    def refused_row(self) -> RebuildRow:
        facts = self.facts
        return RebuildRow(
            facts.topic, facts.partition, facts.log_dir, self.status, self.error, facts.log_bytes,
            notes=self.notes, problem=self.problem,
        )  # fmt: skip


def _plan(
    fs: FileSystem,
    log_dir: LogDirFacts,
    entry: PartitionEntry,
    configuration: Configuration,
    request: Request,
    run_id: str,
) -> _Examined:
    """Survey and plan one partition. With `execute`, leftovers of an interrupted run in it are resolved first."""
    facts = survey_partition(fs, log_dir, entry)
    notes: list[str] = []
    try:
        if configuration.cluster is not None:
            configuration.cluster.refuse_stray(fs, entry)
        if request.execute and facts.leftovers and not entry.problems:
            notes = recover(fs, facts.path)
            facts = survey_partition(fs, log_dir, entry)
        values = configuration.of(entry.topic).values()
        reasons = [*facts.problems, *reasons_against_change(facts, bool(values["remote.storage.enable"]))]
        if reasons:
            return _Examined(facts, None, "refused", joined(reasons), tuple(notes))
        if request.execute:
            fs.refuse_unless_like(fs.stat(facts.path))
        plan = plan_partition(
            fs,
            facts,
            RebuildSettings(
                index_interval_bytes=int(values["index.interval.bytes"]),  # type: ignore[arg-type]  # an int
                segment_index_bytes=int(values["segment.index.bytes"]),  # type: ignore[arg-type]  # the same
                rebuild_all=request.rebuild_all,
                execute=request.execute,
                truncate=request.truncate,
                is_in_use=not request.execute and not facts.clean_shutdown and is_held(log_dir.path, fs),
                run_id=run_id,
            ),
        )
    except EXPLAINED as problem:
        known = problem if isinstance(problem, KeytailError) else None
        return _Examined(facts, None, status_of(problem), in_words(problem), tuple(notes), known)
    return _Examined(facts, plan, notes=tuple(notes))


def _row(outcome: PartitionOutcome, notes: Sequence[str]) -> RebuildRow:
    plan, result = outcome.plan, outcome.result
    facts = plan.facts
    segments: tuple[SegmentRow, ...] = ()
    batches = files_wrong = None
    status, error = "sound", NO_ERROR
    reported = [*notes, *outcome.rest.wrong]
    if outcome.done_truncation is not None:
        reported.insert(0, truncation_text(outcome.done_truncation))
    if result is not None:
        log_bytes = {segment.base_offset: segment.log_bytes for segment in facts.segments}
        segments = tuple(_segment_row(item, log_bytes[item.base_offset], outcome) for item in result.segments)
        batches = sum(segment.batches for segment in result.segments)
        files_wrong = len(result.wrong) + outcome.rest.files
        if files_wrong or result.torn is not None or outcome.done_truncation is not None:
            status = "rebuilt" if outcome.installed else "would-rebuild"
        if result.torn is not None:
            remedy = "With --execute, this run truncates" if plan.settings.truncate else "Use --truncate to truncate"
            error = ErrorText(truncation_text(result.torn, f"{remedy} the log before a broker starts"))
    if outcome.rest.refused:
        status, error = "refused", joined(outcome.rest.refused)
    if outcome.problem is not None:
        status, error = status_of(outcome.problem), in_words(outcome.problem)
    return RebuildRow(
        topic=facts.topic,
        partition=facts.partition,
        log_dir=facts.log_dir,
        status=status,
        error=error,
        bytes=facts.log_bytes,
        batches=batches,
        files_wrong=files_wrong,
        in_use=plan.settings.is_in_use,
        segments=segments,
        notes=tuple(reported),
        start_ms=outcome.start_ms,
        end_ms=outcome.end_ms,
        problem=outcome.problem,
        places=_torn_places(outcome),
    )


def _torn_places(outcome: PartitionOutcome) -> tuple[Place, ...]:
    """Return the places of the bytes that a truncation has removed, or would remove; empty if there is no torn tail."""
    torn = outcome.done_truncation or (outcome.result.torn if outcome.result else None)
    if torn is None:
        return ()
    path = os.path.join(outcome.plan.facts.path, names.segment_file(torn.tail.base_offset, names.LOG))
    tail = torn.tail
    return (Place(tail.what, path, tail.byte_position, tail.log_bytes, torn.next_offset, torn.lost_end),)


def _segment_row(segment: Any, log_bytes: int, outcome: PartitionOutcome) -> SegmentRow:
    by_suffix = {verdict.suffix: verdict for verdict in segment.files}
    wrong = [verdict for verdict in segment.files if verdict.state != "sound"]
    status = "sound"
    if wrong:
        status = "rebuilt" if outcome.installed else "would-rebuild"
    error = "; ".join(f"{verdict.suffix}: {verdict.why}" for verdict in wrong)
    if segment.damage is not None:
        status, error = "damaged", "; ".join([str(segment.damage), *([error] if error else [])])
    states = {suffix: verdict.state for suffix, verdict in by_suffix.items()}
    return SegmentRow(
        base_offset=segment.base_offset,
        status=status,
        log_bytes=log_bytes,
        batches=segment.batches,
        index=states.get(names.INDEX, ""),
        time_index=states.get(names.TIME_INDEX, ""),
        txn_index=states.get(names.TXN_INDEX, ""),
        error=error,
    )


