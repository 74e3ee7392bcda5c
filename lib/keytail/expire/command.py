"""The command `expire`: applies retention to the chosen partitions by log start offset, size and time, like a broker.

`keytail expire` and jobs/expire.py under spark-submit run this code. Segments whose age is needed are read by threads;
no Spark is required. Without `execute` nothing is changed and no lock is taken; with it, locks are held from before the
first survey until after the last removal.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from keytail.cli import rows as show
from keytail.cli.configuration import Configuration
from keytail.cli.metadata import with_metadata
from keytail.cli.progress import Reporter
from keytail.cli.selection import Choice, choose
from keytail.compact.plan import HighWatermarkSource
from keytail.compact.plan import refusals as refusals_of_removal
from keytail.compact.planning import check_clock
from keytail.config.compaction import CompactionConfig
from keytail.errors import KeytailError
from keytail.expire.settings import unknown_retention
from keytail.ledger.of_run import LedgerFlags, Run, recording, run_id_at
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.lock import LockLost, hold, is_held
from keytail.log.partition import LogDirFacts, PartitionEntry, PartitionFacts, survey_partition
from keytail.run.rows import status_of
from keytail.run.session import session_of_run
from keytail.run.storage import refuse_shared_storage

if TYPE_CHECKING:
    from keytail.expire.ages import Age, AgeTask
    from keytail.expire.partition import Decision, ExpiredSegment, Finding, Retention

_BAD = ("refused", "corrupt", "failed")


@dataclass(frozen=True)
class Request:
    """All parameters of `expire`, with the defaults of its flags."""

    choice: Choice
    configuration: Configuration = field(default_factory=Configuration)
    execute: bool = False
    now_ms: int | None = None
    unsafe_clock: bool = False
    high_watermark: HighWatermarkSource = "checkpoint"
    shared_storage: bool = False
    ledger: LedgerFlags = field(default_factory=LedgerFlags)
    submitted: bool = False  # under spark-submit, which has chosen the master


@dataclass(frozen=True)
class ExpireRow:
    """One partition. Sizes are of `.log` files; unknown values are None.

    `status`: `would-expire`, `expired`, `kept` (nothing to remove), `refused`, `corrupt`, `failed`. `kept` is the
    reason why the first remaining segment is retained. `expired` are the segments to remove or removed, ascending,
    each with its reason, and `findings` those for which a broker would decide differently, because of a wrong index.
    `in_use`: a broker has the log dir open. `notes` are sentences on other changes.
    """

    topic: str
    partition: int
    log_dir: str
    status: str
    error: str = ""
    kept: str = ""
    segments_before: int | None = None
    segments_after: int | None = None
    bytes_before: int | None = None
    bytes_after: int | None = None
    log_start_before: int | None = None
    log_start_after: int | None = None
    log_end_offset: int | None = None
    in_use: bool = False
    expired: tuple[ExpiredSegment, ...] = ()
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    start_ms: int | None = None
    end_ms: int | None = None
    recorded: bool = field(default=True, compare=False, repr=False)  # False: it is missing from the ledger

    @property
    def name(self) -> str:
        return f"{self.topic}-{self.partition}"


@dataclass
class _LookedAt:
    """A partition with the facts for its decision, or with the reason why there is none."""

    facts: PartitionFacts
    retention: Retention | None = None
    status: str = "refused"
    error: str = ""
    notes: tuple[str, ...] = ()
    in_use: bool = False
    start_ms: int = 0
    tasks: tuple[AgeTask, ...] = ()  # for segments whose ages may be needed, ascending
    reading: list[Future[Age]] = field(default_factory=list)  # ages of the first tasks

    @property
    def bytes_to_read(self) -> int:
        return sum(task.log_bytes for task in self.tasks[: len(self.reading)])


def expire(request: Request, fs: FileSystem = LOCAL) -> list[ExpireRow]:
    """Apply retention, or report it only without `execute`. Returns a row for each chosen partition, by log dir."""
    with contextlib.ExitStack() as run:
        now_ms = check_clock(request.now_ms, request.execute, request.unsafe_clock)
        choose(fs, request.choice)  # reports mistakes in flags before any lock is taken
        flags = request.ledger.checked(fs, request.choice.log_dirs) if request.execute else LedgerFlags()
        spark = session_of_run(run, None, submitted=True) if request.submitted else None
        if spark is not None and request.execute:
            flags = flags.in_session(spark, fs, request.choice.log_dirs)
        if request.execute:
            if not request.shared_storage:
                refuse_shared_storage(fs, request.choice.log_dirs)
            run.enter_context(hold(request.choice.log_dirs, fs))
        chosen = choose(fs, request.choice)
        configuration = with_metadata(fs, request.choice.log_dirs, request.configuration, now_ms)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "ages") as pool:
            looked_at = [
                _look(fs, log_dir, entry, configuration, request, now_ms) for log_dir, entry in chosen.partitions
            ]
            for one in looked_at:
                _begin_reading(fs, pool, one, now_ms)
            rows = []
            sizes = [(os.path.basename(one.facts.path), one.bytes_to_read) for one in looked_at]
            with Reporter("expire", sizes) as reporter:
                if spark is None and flags.path is not None:
                    reporter.note("starting Spark, for the ledger")
                    spark = session_of_run(run, None, submitted=False, extra=flags.session_settings())
                about = Run("expire", run_id_at(now_ms, secrets.token_hex(4)), now_ms, request.choice.log_dirs,
                            configuration, request.shared_storage)  # fmt: skip
                with recording(flags, spark, about, on_note=reporter.note, fs=fs) as record:
                    record.intend([_planned_row(one) for one in looked_at if one.retention is not None])
                    for one in looked_at:
                        row = _settle(fs, one, request, now_ms)
                        rows.append(row)
                        reporter.done(row.name, row.status, one.bytes_to_read, row.error)
                    record.end(rows, exit_status(rows))
        return record.recorded(rows)


def _planned_row(one: _LookedAt) -> ExpireRow:
    facts = one.facts
    size = sum(segment.log_bytes for segment in facts.segments)
    return ExpireRow(
        facts.topic, facts.partition, facts.log_dir, "begun", segments_before=len(facts.segments), bytes_before=size
    )


def _look(
    fs: FileSystem,
    log_dir: LogDirFacts,
    entry: PartitionEntry,
    configuration: Configuration,
    request: Request,
    now_ms: int,
) -> _LookedAt:
    """Survey one partition. An executing run first resolves leftovers of an interrupted one."""
    from keytail.expire import partition as expire  # noqa: PLC0415 (brings in the kernels)
    from keytail.expire.ages import age_tasks  # noqa: PLC0415 (the same)

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
            from keytail.log.recover import recover  # noqa: PLC0415 (only runs that execute need it)

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
        reasons += expire.refusals(facts, log_start)
        if reasons:
            return _LookedAt(facts, error="; ".join([*reasons, *resolved.doubts()]), notes=tuple(notes))
        if request.execute:
            fs.refuse_unless_like(fs.stat(facts.path))
    except KeytailError as problem:
        return _LookedAt(facts, None, status_of(problem), str(problem), tuple(notes))
    except OSError as problem:
        return _LookedAt(facts, None, "failed", str(problem), tuple(notes))
    retention = expire.Retention.from_values(resolved.values())
    candidates = expire.age_candidates(facts, retention, request.high_watermark)
    in_use = not request.execute and not facts.clean_shutdown and is_held(log_dir.path, fs)
    tasks = tuple(age_tasks(facts, candidates, now_ms, retention.retention_ms))
    return _LookedAt(facts, retention, "kept", "", tuple(notes), in_use, start_ms, tasks)


def _begin_reading(fs: FileSystem, pool: ThreadPoolExecutor, one: _LookedAt, now_ms: int) -> None:
    """Start to read, in parallel, the segments that expire if their indexes are right, and the next one."""
    from keytail.expire.ages import claimed_age, read_age  # noqa: PLC0415 (brings in the kernels)

    if one.retention is None:
        return
    by_base = {segment.base_offset: segment for segment in one.facts.segments}
    for task in one.tasks:
        one.reading.append(pool.submit(read_age, fs, task))
        if not one.retention.is_over(claimed_age(by_base[task.base_offset]), now_ms):
            return


def _ages(fs: FileSystem, one: _LookedAt, now_ms: int) -> dict[int, Age]:
    """Return the ages by base offset, up to the first segment that is too young to expire."""
    from keytail.expire.ages import read_age  # noqa: PLC0415 (brings in the kernels)

    assert one.retention is not None
    ages: dict[int, Age] = {}
    for number, task in enumerate(one.tasks):
        age = one.reading[number].result() if number < len(one.reading) else read_age(fs, task)
        ages[task.base_offset] = age
        if not one.retention.is_over(age, now_ms):
            break
    return ages


def _settle(fs: FileSystem, one: _LookedAt, request: Request, now_ms: int) -> ExpireRow:
    """Decide, and in an executing run remove segments."""
    facts = one.facts
    row = ExpireRow(
        topic=facts.topic,
        partition=facts.partition,
        log_dir=facts.log_dir,
        status=one.status,
        error=one.error,
        segments_before=len(facts.segments),
        bytes_before=sum(segment.log_bytes for segment in facts.segments),
        log_start_before=facts.log_start_offset,
        log_end_offset=facts.log_end_offset,
        in_use=one.in_use,
        notes=one.notes,
        start_ms=one.start_ms or None,
    )
    if one.retention is not None:
        from keytail.expire import partition as expire  # noqa: PLC0415 (brings in the kernels)

        source = request.high_watermark
        try:
            ages = _ages(fs, one, now_ms)
            decision = expire.decide(facts, one.retention, now_ms, ages, high_watermark=source)
            found = expire.findings(facts, one.retention, now_ms, ages, high_watermark=source)
            notes = [*one.notes, *([_ROLLS] if decision.rolls else [])]
            if request.execute:
                notes += expire.remove(fs, facts, decision)
            row = _decided(replace(row, notes=tuple(notes), findings=found), decision, request.execute)
        except LockLost as problem:  # possibly during the removal
            row = replace(row, status="failed", error=f"{problem}; the next run completes what was begun")
        except KeytailError as problem:
            row = replace(row, status=status_of(problem), error=str(problem))
        except OSError as problem:
            row = replace(row, status="failed", error=f"{problem}; the next run completes what was begun")
        row = replace(row, end_ms=time.time_ns() // 1_000_000)
    for future in one.reading:  # those after a segment that is retained
        future.cancel()
    if row.status in ("refused", "corrupt"):
        row = replace(row, segments_after=row.segments_before, bytes_after=row.bytes_before)
        row = replace(row, log_start_after=row.log_start_before)
    return row


_ROLLS = (
    "no segment remains: an empty one is created at the log end offset, and a broker that starts there has no producer "
    "state, as after its own retention and a restart"
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


def exit_status(rows: Iterable[ExpireRow]) -> int:
    """Return 3 if some partitions failed, or changes are missing from the ledger; 1 if all failed, or a broker that
    starts would delete segments that must be retained; else 0."""
    rows = list(rows)
    bad = sum(row.status in _BAD for row in rows)
    if bad:
        return 3 if bad < len(rows) else 1
    if any(finding.broker_deletes for row in rows for finding in row.findings):
        return 1
    return 0 if all(row.recorded for row in rows) else 3


def print_table(rows: Sequence[ExpireRow], title: str) -> None:
    """Print a line for each partition, then one for each removed segment, with its reason, then totals."""
    console = show.output_console()
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("partition", overflow="fold")
    table.add_column("status")
    for name in ("segments", "log size", "log start", "reason", "took"):
        table.add_column(name, justify="right", overflow="fold")
    for row in rows:
        by_reason = Counter(segment.reason for segment in row.expired)
        table.add_row(
            escape(row.name),
            show.styled(row.status) + (" (in use)" if row.in_use else ""),
            show.change(_text(row.segments_before), _text(row.segments_after)),
            show.change(show.human_bytes(row.bytes_before), show.human_bytes(row.bytes_after)),
            show.change(_text(row.log_start_before), _text(row.log_start_after)),
            ", ".join(f"{reason} {count}" for reason, count in by_reason.items()),
            show.human_seconds(row.start_ms, row.end_ms),
        )
    console.print(table)
    show.print_reasons([(row.name, row.status, row.error) for row in rows if row.error])
    for row in rows:
        for segment in row.expired:
            size = show.human_bytes(segment.log_bytes)
            text = f"{row.name} segment {segment.base_offset} (offsets to {segment.end_offset - 1}, {size})"
            console.print(f"{escape(text)} {segment.reason}: {escape(segment.why)}", soft_wrap=True)
        if row.kept and row.status not in _BAD:
            console.print(f"{escape(row.name)}: {escape(row.kept)}", soft_wrap=True)
        for note in row.notes:
            console.print(f"{escape(row.name)}: {escape(note)}", soft_wrap=True)
        for finding in row.findings:
            severity = "[bold red]error[/]" if finding.broker_deletes else "[yellow]warning[/]"
            text = f"{finding.what}. {finding.remedy}"
            console.print(f"{escape(row.name)} {severity}: {escape(text)}", soft_wrap=True)
    counts = Counter(row.status for row in rows)
    found = ", ".join(f"{number} {show.styled(status)}" for status, number in counts.most_common())
    text = f"{len(rows)} partition{'s' if len(rows) != 1 else ''}: {found or 'none'}."
    for status, begin in (("would-expire", "To remove"), ("expired", "Removed")):
        if counts[status]:
            of_status = [segment for row in rows if row.status == status for segment in row.expired]
            text += f" {begin}: {show.human_bytes(sum(segment.log_bytes for segment in of_status))}."
    console.print(f"\n{text}", soft_wrap=True)


def _text(number: int | None) -> str:
    return "" if number is None else str(number)


def next_step(rows: Sequence[ExpireRow], execute: bool) -> str:
    if any(finding.broker_deletes for row in rows for finding in row.findings):
        return (
            "Before you start the broker, run `keytail rebuild-index --execute`; otherwise the broker deletes segments "
            "that must be retained."
        )
    if any(row.status == "would-expire" for row in rows):
        return "This was a dry run. To do it: stop the broker, and run the same command with --execute."
    if any(row.status in _BAD for row in rows):
        return "What was not done is unchanged; the reasons and remedies are given above."
    return "Next: start the broker." if execute and any(row.status == "expired" for row in rows) else ""
