"""Appends a table of records to a topic's partitions, without a broker.

`keytail import` and jobs/import_logs.py under spark-submit run this code. Without `execute` the records of the source
are counted, nothing is changed and no lock is taken. With `execute`, locks are held from before the survey on which the
plans are based until after the last rename. import_/IMPORT.md describes what an import bypasses, and what is refused.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from keytail.cli.progress import Reporter
from keytail.console import print_message
from keytail.errors import EXPLAINED, NO_ERROR, ErrorText, Refused, in_words, joined
from keytail.format.codecs.table import CODECS
from keytail.import_ import on_spark
from keytail.import_ import source as import_source
from keytail.import_.command import ImportRow, Request
from keytail.import_.here import Here, source_here
from keytail.import_.install import complete_partition, make_partition
from keytail.import_.local_source import LocalSource, files_here, look
from keytail.import_.on_spark import Import, ImportOutcome
from keytail.import_.plan import ImportPlan, plan_import, refusals, survey_replica
from keytail.import_.records import Load
from keytail.import_.rows import Rows
from keytail.import_.segments import SegmentsTask
from keytail.import_.slices import Slices
from keytail.import_.source import SourceFileFacts, refuse_partitions_out_of_range
from keytail.import_.target import Partition, Target, find_target
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.owner import work_as_owner
from keytail.log.partition import survey_partition
from keytail.log.replacement.recover import recover, remove_lost_scratch
from keytail.log.writer import Limits
from keytail.run.ended import sweep
from keytail.run.kernels import compile_kernels, is_on_this_host
from keytail.run.rows import status_of
from keytail.run.spark.delta import session_settings
from keytail.run.spark.session import session_of_run
from keytail.run.storage import hold_local

# Default of --batch-bytes, in bytes. This default is larger than a producer's default of 16 KiB: imported records are
# usually read in bulk, and larger batches compress better.
BATCH_BYTES = 128 << 10


def import_records(request: Request, fs: FileSystem = LOCAL) -> list[ImportRow]:
    """Import the source or, without `execute`, make a dry run. Returns a row for each partition of the topic in the log
    dirs, in ascending order.

    If this process was started as root, it works as the owner of the log dirs from then on.
    """
    work_as_owner(fs, request.all_log_dirs)
    with contextlib.ExitStack() as run:
        target = find_target(fs, request)  # invalid flags are reported before any lock is taken
        local = None if request.submitted else look(request.source)
        if request.execute:
            run.enter_context(hold_local(fs, request.all_log_dirs, request.shared_storage))
            target = find_target(fs, request, is_reported=True)
        # `at_end` is closed after this run's session has stopped, while locks are still held.
        at_end = run.enter_context(contextlib.ExitStack())
        with Reporter("import", [(f"{request.topic}-{item.number}", 0) for item in target.partitions]) as reporter:
            if not request.submitted and is_on_this_host(request.master):
                compile_kernels(["import"], reporter.note)
            records, files = _opened(request, local, target.n_partitions, run, reporter)
            import_id = request.import_id or import_source.import_id_of(
                files, request.source, request.topic, target.n_partitions
            )
            planned = [_plan(fs, request, target, partition, import_id) for partition in target.partitions]
            if not request.execute:
                reporter.note(f"counting {request.source.path}: {records.description}")
                return _dry_run(request, target, planned, records.measure(), import_id)
            reporter.note(f"import id {import_id}; reading {request.source.path}: {records.description}")
            return _execute(request, fs, target, planned, records, import_id, reporter, at_end)


def _opened(
    request: Request, local: LocalSource | None, n_partitions: int, run: contextlib.ExitStack, reporter: Reporter
) -> tuple[Here | Slices | Rows, Sequence[SourceFileFacts]]:
    """Return the source as an object of the strategy that reads it, and the facts about its files. Starts Spark unless
    this process can read the source."""
    here = source_here(local, request.source, n_partitions) if request.master is None else None
    if here is not None and local is not None:
        return here, files_here(local)
    reporter.note("starting Spark")
    spark = session_of_run(
        run,
        request.master,
        submitted=request.submitted,
        extra=session_settings(None) if request.source.format == "delta" else {},
    ).session
    frame = import_source.opened(spark, request.source)
    records = on_spark.source_of(spark, frame, request.source, n_partitions)
    return records, import_source.files_on_spark(spark, frame)


@dataclass(frozen=True)
class _Planned:
    """A partition with its plan, or with the reason why it has no plan. In a dry run, a partition that does not exist
    yet has no plan either.
    """

    partition: Partition
    plan: ImportPlan | None = None
    status: str = ""
    error: ErrorText = NO_ERROR
    notes: tuple[str, ...] = ()

    def row(self, request: Request, **values: Any) -> ImportRow:
        return ImportRow(
            request.topic,
            self.partition.number,
            self.partition.log_dirs[0].path,
            **{"status": self.status, "error": self.error, "notes": self.notes, **values},
        )


def _plan(
    fs: FileSystem, request: Request, target: Target, partition: Partition, import_id: str
) -> _Planned:
    """Return the plan for one partition. With `execute`, a missing partition is created, and leftovers are resolved."""
    notes: list[str] = []
    try:
        target.check_replicas(partition)
        if request.execute and not partition.entries:
            assert target.topic_id is not None
            make_partition(fs, partition.log_dirs[0].path, request.topic, partition.number, target.topic_id)
            partition = target.found_again(fs, partition)
        if not partition.entries:
            return _Planned(partition, status="would-import", notes=("the partition would be created",))
        replicas = []
        for log_dir, entry in zip(partition.log_dirs, partition.entries, strict=True):
            facts = survey_partition(fs, log_dir, entry)
            if request.execute and not entry.problems:
                notes += recover(fs, facts.path) if facts.leftovers else []
                if not facts.segments and target.topic_id is not None:  # the creation of the partition was interrupted
                    complete_partition(fs, facts.path, target.topic_id)
                facts = survey_partition(fs, log_dir, entry)
                fs.refuse_unless_like(fs.stat(facts.path))
            reasons = refusals(facts, target.rules)
            if reasons:
                raise Refused(joined(reasons), slug="partition-not-appendable")
            replicas.append(survey_replica(fs, facts))
        plan = plan_import(replicas, import_id, append=request.append, topic_id=target.topic_id)
    except EXPLAINED as problem:
        return _Planned(partition, None, status_of(problem), in_words(problem), tuple(notes))
    return _Planned(partition, plan, "would-import", NO_ERROR, tuple(notes))


def _dry_run(
    request: Request, target: Target, planned: Sequence[_Planned], loads: Sequence[Load], import_id: str
) -> list[ImportRow]:
    refuse_partitions_out_of_range(loads, request.topic, target.n_partitions)
    if not loads:
        what = "the source has no rows, so there is nothing to import"
        raise Refused(what, path=request.source.path, remedy="Check the source", slug="empty-source")
    by_number = {load.partition: load for load in loads}
    rows = []
    for item in planned:
        load = by_number.pop(item.partition.number, None)
        rows.append(_row_of_load(request, target, item, load, import_id))
    if by_number:
        numbers = ", ".join(str(number) for number in sorted(by_number)[:20])
        raise Refused(
            f"the source has records for partitions of {request.topic} that are not in these log dirs: {numbers}",
            remedy="Give the log dirs that contain these partitions, or remove those records from the source",
            slug="records-for-unavailable-partition",
        )
    return rows


def _row_of_load(request: Request, target: Target, item: _Planned, load: Load | None, import_id: str) -> ImportRow:
    counted: dict[str, Any] = {"import_id": import_id, "replicas": max(len(item.partition.entries), 1)}
    if load is not None:
        counted |= {"records": load.records, "source_bytes": load.key_bytes + load.value_bytes}
    if item.status != "would-import":
        return item.row(request, **counted)
    if item.plan is not None and item.plan.record is not None:
        status = "imported-before" if item.plan.is_done else "would-import"
        done = item.plan.record
        note = "an earlier run committed this import" + ("" if item.plan.is_done else ", but did not complete it")
        counted |= {"records": done.records, "first_offset": done.base_offset, "end_offset": done.end_offset}
        return item.row(request, status=status, notes=(*item.notes, note), **counted)
    if load is None:
        return item.row(request, status="unchanged", **counted)
    if target.rules.compacted and load.keyless:
        error = f"{load.keyless} records have no key, and the topic is compacted: a broker rejects such records"
        return item.row(request, status="refused", error=ErrorText(error), **counted)
    first = item.plan.base_offset if item.plan is not None else 0
    return item.row(request, first_offset=first, end_offset=first + load.records, **counted)


def _execute(
    request: Request,
    fs: FileSystem,
    target: Target,
    planned: Sequence[_Planned],
    records: Any,
    import_id: str,
    reporter: Reporter,
    at_end: contextlib.ExitStack,
) -> list[ImportRow]:
    run_id, now_ms = secrets.token_hex(4), time.time_ns() // 1_000_000
    plans = {item.partition.number: item.plan for item in planned if item.plan is not None}
    at_end.push(partial(_remove_late_scratch, fs, list(plans.values()), run_id, records.is_on_one_host))
    rows = {item.partition.number: item.row(request, import_id=import_id) for item in planned}
    notes = {item.partition.number: item.notes for item in planned}

    def on_result(outcome: ImportOutcome) -> None:
        row = _row_of_outcome(target, outcome, notes[outcome.plan.partition], import_id, now_ms)
        rows[row.partition] = row
        reporter.done(row.name, row.status, row.log_bytes or 0, row.error)

    tasks = {
        number: _task(request, target, plan, run_id, now_ms) for number, plan in plans.items() if plan.record is None
    }
    Import(
        records,
        list(plans.values()),
        tasks,
        import_id,
        run_id,
        {item.partition.number: item.error for item in planned if item.plan is None},
        on_result,
        print_message,
        fs,
    ).run()
    return [rows[number] for number in sorted(rows)]


def _remove_late_scratch(
    fs: FileSystem, plans: Sequence[ImportPlan], run_id: str, is_local: bool, kind: Any, problem: Any, trace: Any
) -> None:
    """Remove scratch files that tasks wrote after the cleanup at the end of a run, before their session had stopped.

    Tasks that write so late belong to a cancelled job; on a cluster, they can also be slower copies of tasks, or tasks
    of a lost executor. After a successful run on one host there are no late scratch files.
    """
    if problem is None and is_local:
        return
    paths = [replica.path for plan in plans for replica in plan.replicas]
    sweep(lambda: sum(remove_lost_scratch(fs, path, run_id) for path in paths))


def _task(request: Request, target: Target, plan: ImportPlan, run_id: str, now_ms: int) -> SegmentsTask:
    rules = target.rules
    codec, level = target.codec(request.codec)
    batch_bytes = BATCH_BYTES if request.batch_bytes is None else request.batch_bytes
    return SegmentsTask(
        partition_path=plan.path,
        base_offset=plan.base_offset,
        leader_epoch=plan.leader_epoch,
        codec=CODECS.index(codec),
        level=level,
        batch_bytes=min(batch_bytes, rules.max_message_bytes, rules.segment_bytes),
        max_message_bytes=min(rules.max_message_bytes, rules.segment_bytes),
        limits=Limits(rules.segment_bytes, rules.segment_index_bytes, rules.index_interval_bytes),
        keys_required=rules.compacted,
        log_append_time=rules.log_append_time,
        now_ms=now_ms,
        run_id=run_id,
    )


def _row_of_outcome(
    target: Target, outcome: ImportOutcome, notes: Iterable[str], import_id: str, now_ms: int
) -> ImportRow:
    plan, record = outcome.plan, outcome.record
    row = ImportRow(
        topic=plan.topic,
        partition=plan.partition,
        log_dir=plan.replicas[0].facts.log_dir,
        status="unchanged",
        replicas=len(plan.replicas),
        import_id=import_id,
        notes=tuple(notes),
        start_ms=outcome.start_ms,
        end_ms=outcome.end_ms,
    )
    if outcome.problem is not None:
        return replace(row, status=status_of(outcome.problem), error=in_words(outcome.problem))
    if record is None:
        return row
    reported = [*notes, *target.notes_on(outcome.largest_timestamp_ms, now_ms)] if not outcome.earlier else [*notes]
    return replace(
        row,
        status="imported-before" if outcome.earlier else "imported",
        records=record.records,
        log_bytes=None if outcome.earlier else outcome.log_bytes,
        segments=len(record.segment_bases),
        first_offset=record.base_offset,
        end_offset=record.end_offset,
        notes=tuple(reported),
    )
