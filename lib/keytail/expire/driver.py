"""Applies retention to the chosen partitions by log start offset, size and time, as a broker does.

`keytail expire` and jobs/expire.py under spark-submit run this code. Segments whose age is needed are read by threads;
Spark is used only to write the ledger. Without `execute` nothing is changed and no lock is taken; with `execute`, locks
are held from before the survey until after the last removal.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from keytail.cli.configuration import Configuration
from keytail.cli.metadata import with_metadata
from keytail.cli.progress import Reporter
from keytail.cli.selection import select_partitions
from keytail.compact.plan import refusals as refusals_of_removal
from keytail.compact.planning import check_clock
from keytail.config.compaction import CompactionConfig
from keytail.errors import EXPLAINED, NO_ERROR, ErrorText, KeytailError, in_words, joined
from keytail.expire import partition as expiry
from keytail.expire.ages import Age, AgeTask, age_tasks, claimed_age, read_age
from keytail.expire.command import ExpireRow, Request, exit_status
from keytail.expire.partition import Decision, Retention
from keytail.expire.settings import unknown_retention
from keytail.ledger.of_run import LedgerFlags, Run, recording, run_id_at
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.lock import LockLost, is_held
from keytail.log.partition import LogDirFacts, PartitionEntry, PartitionFacts, survey_partition
from keytail.log.replacement.recover import recover
from keytail.run.engine import Engine, ThisProcess
from keytail.run.rows import status_of
from keytail.run.spark.session import session_of_run
from keytail.run.storage import hold_local
from keytail.threads import Threads


@dataclass
class _Examined:
    """A surveyed partition. `retention` has the partition's settings, or is None if the partition is not processed, for
    the reason in `error`."""

    facts: PartitionFacts
    retention: Retention | None = None
    status: str = "refused"
    error: ErrorText = NO_ERROR
    notes: tuple[str, ...] = ()
    in_use: bool = False
    start_ms: int = 0
    tasks: tuple[AgeTask, ...] = ()  # one for each segment whose age may be needed, ascending
    reading: list[Future[Age]] = field(default_factory=list)  # ages of the first tasks

    @property
    def bytes_to_read(self) -> int:
        return sum(task.log_bytes for task in self.tasks[: len(self.reading)])


def expire(
    request: Request, fs: FileSystem = LOCAL, on_row: Callable[[ExpireRow], None] = lambda row: None
) -> list[ExpireRow]:
    """Apply retention; without `execute` only report which segments would be removed. Returns a row for each chosen
    partition, in the order of log dirs; `on_row` is called with each row when it is complete."""
    with contextlib.ExitStack() as run:
        now_ms = check_clock(request.now_ms, request.execute, request.unsafe_clock)
        select_partitions(fs, request.partition_filter)  # invalid flags are reported before any lock is taken
        flags = request.ledger.checked(fs, request.partition_filter.log_dirs) if request.execute else LedgerFlags()
        engine: Engine = ThisProcess()
        if request.submitted:
            engine = session_of_run(run, None, submitted=True)
            if request.execute:
                flags = flags.in_session(engine, fs, request.partition_filter.log_dirs)
        if request.execute:
            run.enter_context(hold_local(fs, request.partition_filter.log_dirs, request.shared_storage))
        chosen = select_partitions(fs, request.partition_filter)
        configuration = with_metadata(fs, request.partition_filter.log_dirs, request.configuration, now_ms)
        with Threads(len(os.sched_getaffinity(0)), "ages") as pool:
            examined = [
                _examine(fs, log_dir, entry, configuration, request, now_ms) for log_dir, entry in chosen.partitions
            ]
            for item in examined:
                _begin_reading(fs, pool, item, now_ms)
            rows = []
            sizes = [(os.path.basename(item.facts.path), item.bytes_to_read) for item in examined]
            with Reporter("expire", sizes) as reporter:
                why_spark = "" if request.submitted else flags.why_spark()
                if why_spark:
                    reporter.note(f"starting Spark: {why_spark}")
                    engine = session_of_run(run, None, submitted=False, extra=flags.session_settings())
                run_id = run_id_at(now_ms, secrets.token_hex(4))
                about = Run(
                    "expire", run_id, now_ms, request.partition_filter.log_dirs, configuration, request.shared_storage
                )
                with recording(flags, engine, about, on_note=reporter.note, fs=fs) as record:
                    record.intend([_planned_row(item) for item in examined if item.retention is not None])
                    for item in examined:
                        row = _decide_and_remove(fs, item, request, now_ms)
                        rows.append(row)
                        on_row(row)
                        reporter.done(row.name, row.status, item.bytes_to_read, row.error)
                    record.end(rows, exit_status(rows))
        return record.recorded(rows)


def _planned_row(item: _Examined) -> ExpireRow:
    facts = item.facts
    return ExpireRow(
        facts.topic, facts.partition, facts.log_dir, "begun", segments_before=len(facts.segments),
        bytes_before=facts.log_bytes,
    )  # fmt: skip


def _examine(
    fs: FileSystem,
    log_dir: LogDirFacts,
    entry: PartitionEntry,
    configuration: Configuration,
    request: Request,
    now_ms: int,
) -> _Examined:
    """Survey one partition. With `execute`, an interrupted replacement is resolved, if the partition may be changed."""
    start_ms = time.time_ns() // 1_000_000
    facts = survey_partition(fs, log_dir, entry)
    notes: list[str] = []
    try:
        resolved = configuration.of(entry.topic)
        if configuration.cluster is not None:
            configuration.cluster.refuse_stray(fs, entry)
        config = CompactionConfig.from_values(resolved.values())
        unknown = unknown_retention(configuration, resolved)
        may_resolve = not unknown and not config.remote_storage_enable and not entry.problems
        if request.execute and facts.leftovers and may_resolve:
            notes = recover(fs, facts.path)
            facts = survey_partition(fs, log_dir, entry)
        log_start = log_dir.log_starts.get((entry.topic, entry.partition))
        reasons = refusals_of_removal(
            facts,
            config,
            unknown,
            now_ms,
            high_watermark=request.high_watermark,
            unsafe_clock=request.unsafe_clock,
        )
        reasons += expiry.refusals(facts, log_start)
        if reasons:
            return _Examined(facts, error=joined([*reasons, *resolved.doubts()]), notes=tuple(notes))
        if request.execute:
            fs.refuse_unless_like(fs.stat(facts.path))
    except EXPLAINED as problem:
        return _Examined(facts, None, status_of(problem), in_words(problem), tuple(notes))
    retention = expiry.Retention.from_values(resolved.values())
    candidates = expiry.age_candidates(facts, retention, request.high_watermark)
    in_use = not request.execute and not facts.clean_shutdown and is_held(log_dir.path, fs)
    tasks = tuple(age_tasks(facts, candidates, now_ms, retention.retention_ms))
    return _Examined(facts, retention, "kept", NO_ERROR, tuple(notes), in_use, start_ms, tasks)


def _begin_reading(fs: FileSystem, pool: Threads, item: _Examined, now_ms: int) -> None:
    """Start reading, in threads, the segments that expire if their indexes are right, and the next segment."""
    if item.retention is None:
        return
    by_base = {segment.base_offset: segment for segment in item.facts.segments}
    for task in item.tasks:
        item.reading.append(pool.submit(read_age, fs, task))
        if not item.retention.is_over(claimed_age(by_base[task.base_offset]), now_ms):
            return


def _ages(fs: FileSystem, item: _Examined, now_ms: int) -> dict[int, Age]:
    """Return the ages of segments by base offset, up to the first segment that is too young to expire."""
    assert item.retention is not None
    ages: dict[int, Age] = {}
    for number, task in enumerate(item.tasks):
        age = item.reading[number].result() if number < len(item.reading) else read_age(fs, task)
        ages[task.base_offset] = age
        if not item.retention.is_over(age, now_ms):
            break
    return ages


def _decide_and_remove(fs: FileSystem, item: _Examined, request: Request, now_ms: int) -> ExpireRow:
    """Decide which segments are removed, with `execute` remove them, and return the partition's row."""
    facts = item.facts
    row = ExpireRow(
        topic=facts.topic,
        partition=facts.partition,
        log_dir=facts.log_dir,
        status=item.status,
        error=item.error,
        segments_before=len(facts.segments),
        bytes_before=facts.log_bytes,
        log_start_before=facts.log_start_offset,
        log_end_offset=facts.log_end_offset,
        in_use=item.in_use,
        notes=item.notes,
        start_ms=item.start_ms or None,
    )
    if item.retention is not None:
        source = request.high_watermark
        try:
            ages = _ages(fs, item, now_ms)
            decision = expiry.decide(facts, item.retention, now_ms, ages, high_watermark=source)
            found = expiry.findings(facts, item.retention, now_ms, ages, high_watermark=source)
            notes = [*item.notes, *([_ROLLS] if decision.rolls else [])]
            if request.execute:
                notes += expiry.remove(fs, facts, decision)
            row = _decided(replace(row, notes=tuple(notes), findings=found), decision, request.execute)
        except (LockLost, OSError, MemoryError) as problem:  # possibly raised during the removal
            row = replace(row, status="failed", error=in_words(problem) + "; the next run completes what was begun")
        except KeytailError as problem:
            row = replace(row, status=status_of(problem), error=in_words(problem))
        row = replace(row, end_ms=time.time_ns() // 1_000_000)
    for future in item.reading:  # segments after the first retained segment are not needed
        future.cancel()
    if row.status in ("refused", "corrupt"):  # after a failure, it is not known what remains
        row = replace(row, segments_after=row.segments_before, bytes_after=row.bytes_before)
        row = replace(row, log_start_after=row.log_start_before)
    return row


_ROLLS = (
    "no segment remains: an empty segment is created at the log end offset, and a broker that starts there has no "
    "producer state, as after its own retention and a restart"
)


def _decided(row: ExpireRow, decision: Decision, executed: bool) -> ExpireRow:
    assert row.segments_before is not None
    assert row.bytes_before is not None
    status = "kept"
    if decision.expired:
        status = "expired" if executed else "would-expire"
    return replace(
        row,
        status=status,
        kept=decision.kept,
        segments_after=row.segments_before - len(decision.expired) + decision.rolls,
        bytes_after=row.bytes_before - sum(segment.log_bytes for segment in decision.expired),
        log_start_after=decision.log_start_offset,
        expired=decision.expired,
    )
