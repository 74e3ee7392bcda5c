"""The command `rebuild-index`: compare the index files of the chosen partitions with their logs, and rebuild them.

`keytail rebuild-index` and jobs/rebuild_indexes.py under spark-submit run the same code here. Without `execute` nothing
is changed and no lock is taken. With it, locks are held from before the first read until after the last rename.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from keytail.cli import rows as show
from keytail.cli.configuration import Configuration
from keytail.cli.metadata import with_metadata
from keytail.cli.progress import Reporter
from keytail.cli.quarantine import Place
from keytail.cli.selection import Choice, choose
from keytail.errors import KeytailError, in_words
from keytail.format import names
from keytail.ledger.of_run import LedgerFlags, Run, recording, run_id_at
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.lock import hold, is_held
from keytail.log.log_dirs import hosted
from keytail.log.partition import LogDirFacts, PartitionEntry, PartitionFacts, survey_partition
from keytail.run.rates import HERE_BYTES, INDEXED_BYTES_PER_S
from keytail.run.rows import status_of
from keytail.run.session import session_of_run
from keytail.run.storage import refuse_shared_storage
from keytail.run.watching import address_of_driver
from keytail.run.workers import workers_of_run
from keytail.telling import say

if TYPE_CHECKING:
    from keytail.rebuild_index.driver import PartitionOutcome
    from keytail.rebuild_index.partition import PartitionPlan

_BAD = ("refused", "corrupt", "failed")


@dataclass(frozen=True)
class Request:
    """The parameters of `rebuild-index`; defaults are those of the flags."""

    choice: Choice
    configuration: Configuration = field(default_factory=Configuration)
    execute: bool = False
    rebuild_all: bool = False
    truncate: bool = False
    master: str | None = None
    shared_storage: bool = False
    ledger: LedgerFlags = field(default_factory=LedgerFlags)
    submitted: bool = False  # under spark-submit, which has chosen the master


@dataclass(frozen=True)
class SegmentRow:
    """One segment. `status`: `sound`, `would-rebuild`, `rebuilt`, or `damaged`, if it contains bytes that are no
    batches.

    The state of each index file is `sound`, `missing`, `wrong`, or "" if there is none and none is needed.
    """

    base_offset: int
    status: str
    log_bytes: int
    batches: int | None = None
    index: str = ""
    time_index: str = ""
    txn_index: str = ""
    error: str = ""


@dataclass(frozen=True)
class RebuildRow:
    """One partition, with its segments. `status`: `sound`, `would-rebuild`, `rebuilt`, `refused`, `corrupt`, `failed`.

    `files_wrong` counts missing and wrong files: index files, producer snapshots, the leader epochs. `in_use`: a broker
    has the log dir open, so the end of the last segment, snapshots and epochs are not checked. `notes` are sentences on
    other findings and actions.
    """

    topic: str
    partition: int
    log_dir: str
    status: str
    error: str = ""
    bytes: int = 0
    batches: int | None = None
    files_wrong: int | None = None
    in_use: bool = False
    segments: tuple[SegmentRow, ...] = ()
    notes: tuple[str, ...] = ()
    start_ms: int | None = None
    end_ms: int | None = None
    problem: KeytailError | None = field(default=None, compare=False, repr=False)  # the error in `error`, as an object
    places: tuple[Place, ...] = field(default=(), compare=False, repr=False)  # damage that was found, likewise
    recorded: bool = field(default=True, compare=False, repr=False)  # False: missing in the ledger

    @property
    def name(self) -> str:
        return f"{self.topic}-{self.partition}"


def rebuild(
    request: Request, fs: FileSystem = LOCAL, on_row: Callable[[RebuildRow], None] = lambda row: None
) -> list[RebuildRow]:
    """Return a row for each chosen partition, in the order of the log dirs. `on_row` is called with the row of each
    examined partition, as it ends."""
    from keytail.rebuild_index.driver import Rebuild  # noqa: PLC0415 (brings in the kernels)

    with contextlib.ExitStack() as run:
        choose(fs, request.choice)  # mistakes in flags, before any lock
        flags = request.ledger.checked(fs, request.choice.log_dirs) if request.execute else LedgerFlags()
        spark = session_of_run(run, request.master, submitted=request.submitted) if request.submitted else None
        if spark is not None and request.execute:
            flags = flags.in_session(spark, fs, request.choice.log_dirs)
        if request.execute:
            if not request.shared_storage:
                refuse_shared_storage(fs, request.choice.log_dirs)
            run.enter_context(hold(request.choice.log_dirs, fs))
        chosen = choose(fs, request.choice)
        configuration = with_metadata(fs, request.choice.log_dirs, request.configuration)
        run_id = secrets.token_hex(4)
        looked_at = [_plan(fs, log_dir, entry, configuration, request, run_id) for log_dir, entry in chosen.partitions]
        plans = [one.plan for one in looked_at if one.plan is not None]
        size = sum(plan.log_bytes for plan in plans)
        sizes = [(os.path.basename(plan.facts.path), plan.log_bytes) for plan in plans]
        with Reporter("rebuild-index", sizes) as reporter:
            if spark is None and (request.master or size > HERE_BYTES or flags.path) and fs is LOCAL:
                seconds = [plan.log_bytes / INDEXED_BYTES_PER_S for plan in plans]
                spark = workers_of_run(
                    run, reporter, request.master, seconds, needs_spark=flags.path is not None,
                    extra=flags.session_settings(),
                )  # fmt: skip
            else:
                reporter.watch(address_of_driver(spark))
            notes = {one.facts.path: one.notes for one in looked_at}
            rows: dict[str, RebuildRow] = {}

            def heard(outcome: PartitionOutcome) -> None:
                row = _row(outcome, notes[outcome.plan.facts.path])
                rows[outcome.plan.facts.path] = row
                on_row(row)
                reporter.done(row.name, row.status, row.bytes, row.error)

            of_dirs = {facts.path: hosted([facts]) for facts in chosen.log_dirs}
            now_ms = time.time_ns() // 1_000_000
            about = Run("rebuild-index", run_id_at(now_ms, run_id), now_ms, request.choice.log_dirs, configuration,
                        request.shared_storage)  # fmt: skip
            with recording(flags, spark, about, on_note=reporter.note, fs=fs) as record:
                record.intend([replace(one.refused_row(), status="begun") for one in looked_at if one.plan is not None])
                Rebuild(
                    plans, spark, of_dirs, heard, lambda trace: say(trace, "error"), fs,
                    shared_storage=request.shared_storage,
                ).run()  # fmt: skip
                done = [rows[one.facts.path] if one.plan is not None else one.refused_row() for one in looked_at]
                made = {row.name: [one.base_offset for one in row.segments if one.status == "rebuilt"] for row in done}
                record.end(done, exit_status(done), made)
        return record.recorded(done)


@dataclass(frozen=True)
class _LookedAt:
    """A partition with its plan, or with the reason why it has none."""

    facts: PartitionFacts
    plan: PartitionPlan | None
    status: str = "refused"
    error: str = ""
    notes: tuple[str, ...] = ()
    problem: KeytailError | None = None

    def refused_row(self) -> RebuildRow:
        facts = self.facts
        size = sum(segment.log_bytes for segment in facts.segments)
        return RebuildRow(
            facts.topic, facts.partition, facts.log_dir, self.status, self.error, size, notes=self.notes,
            problem=self.problem,
        )  # fmt: skip


def _plan(
    fs: FileSystem,
    log_dir: LogDirFacts,
    entry: PartitionEntry,
    configuration: Configuration,
    request: Request,
    run_id: str,
) -> _LookedAt:
    """Survey and plan one partition; an executing run first resolves what an interrupted run left in it."""
    from keytail.rebuild_index.partition import plan_partition, refusals  # noqa: PLC0415 (brings in the kernels)

    facts = survey_partition(fs, log_dir, entry)
    notes: list[str] = []
    try:
        if configuration.cluster is not None:
            configuration.cluster.refuse_stray(fs, entry)
        if request.execute and facts.leftovers and not entry.problems:
            from keytail.log.recover import recover  # noqa: PLC0415 (only runs that execute need it)

            notes = recover(fs, facts.path)
            facts = survey_partition(fs, log_dir, entry)
        values = configuration.of(entry.topic).values()
        reasons = refusals(facts, bool(values["remote.storage.enable"]))
        if reasons:
            return _LookedAt(facts, None, "refused", "; ".join(reasons), tuple(notes))
        if request.execute:
            fs.refuse_unless_like(fs.stat(facts.path))
        plan = plan_partition(
            fs,
            facts,
            index_interval_bytes=int(values["index.interval.bytes"]),  # type: ignore[arg-type]
            segment_index_bytes=int(values["segment.index.bytes"]),  # type: ignore[arg-type]
            rebuild_all=request.rebuild_all,
            execute=request.execute,
            truncate=request.truncate,
            is_in_use=not request.execute and not facts.clean_shutdown and is_held(log_dir.path, fs),
            run_id=run_id,
        )
    except KeytailError as problem:
        return _LookedAt(facts, None, status_of(problem), str(problem), tuple(notes), problem)
    except OSError as problem:
        return _LookedAt(facts, None, "failed", in_words(problem), tuple(notes))
    return _LookedAt(facts, plan, notes=tuple(notes))


def _row(outcome: PartitionOutcome, notes: Sequence[str]) -> RebuildRow:
    from keytail.rebuild_index.partition import cut_sentence  # noqa: PLC0415 (brings in the kernels)

    plan, result = outcome.plan, outcome.result
    facts = plan.facts
    segments: tuple[SegmentRow, ...] = ()
    batches = files_wrong = None
    status, error = "sound", ""
    told = [*notes, *outcome.rest.wrong]
    if outcome.done_cut is not None:
        told.insert(0, cut_sentence(outcome.done_cut, True))
    if result is not None:
        log_bytes = {segment.base_offset: segment.log_bytes for segment in facts.segments}
        segments = tuple(_segment_row(one, log_bytes[one.base_offset], outcome) for one in result.segments)
        batches = sum(segment.batches for segment in result.segments)
        files_wrong = len(result.wrong) + outcome.rest.files
        if files_wrong or result.torn is not None or outcome.done_cut is not None:
            status = "rebuilt" if outcome.installed else "would-rebuild"
        if result.torn is not None:
            error = cut_sentence(result.torn, False)
    if outcome.rest.refused:
        status, error = "refused", "; ".join(outcome.rest.refused)
    if outcome.problem is not None:
        status, error = status_of(outcome.problem), str(outcome.problem)
    return RebuildRow(
        topic=facts.topic,
        partition=facts.partition,
        log_dir=facts.log_dir,
        status=status,
        error=error,
        bytes=plan.log_bytes,
        batches=batches,
        files_wrong=files_wrong,
        in_use=plan.is_in_use,
        segments=segments,
        notes=tuple(told),
        start_ms=outcome.start_ms,
        end_ms=outcome.end_ms,
        problem=outcome.problem,
        places=_torn_places(outcome),
    )


def _torn_places(outcome: PartitionOutcome) -> tuple[Place, ...]:
    """Return what a truncation removes, or would remove."""
    torn = outcome.done_cut or (outcome.result.torn if outcome.result else None)
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


def exit_status(rows: Sequence[RebuildRow]) -> int:
    """Return 0 if nothing is wrong any more; 1 if something is, or if nothing could be done; 3 if some partitions could
    not be done, or the ledger lacks some that were."""
    bad = [row for row in rows if row.status in _BAD]
    if bad:
        return 3 if len(bad) < len(rows) else 1
    if any(row.status == "would-rebuild" or row.error for row in rows):
        return 1
    return 0 if all(row.recorded for row in rows) else 3


def print_table(rows: Sequence[RebuildRow], title: str) -> None:
    """Print a line for each partition, then one for each segment with a finding, then totals."""
    console = show.output_console()
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("partition", overflow="fold")
    table.add_column("status")
    for name in ("segments", "log size", "batches", "files wrong", "took"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            escape(row.name),
            show.styled(row.status),
            f"{len(row.segments):,}" if row.segments else "",
            show.human_bytes(row.bytes),
            "" if row.batches is None else f"{row.batches:,}",
            "" if row.files_wrong is None else str(row.files_wrong),
            show.human_seconds(row.start_ms, row.end_ms),
        )
    console.print(table)
    show.print_reasons([(row.name, row.status, row.error) for row in rows if row.error])
    for row in rows:
        for note in row.notes:
            console.print(f"{escape(row.name)}: {escape(note)}", soft_wrap=True)
        told = [segment for segment in row.segments if segment.status != "sound"]
        for segment in told:
            text = f"{row.name} segment {segment.base_offset} "
            console.print(f"{escape(text)}{show.styled(segment.status)}: {escape(segment.error)}", soft_wrap=True)
    counts = Counter(row.status for row in rows)
    found = ", ".join(f"{number} {show.styled(status)}" for status, number in counts.most_common())
    plural = "s" if len(rows) != 1 else ""
    console.print(f"\n{len(rows)} partition{plural}: {found or 'none'}.", soft_wrap=True)


def next_step(rows: Sequence[RebuildRow], execute: bool) -> str:
    if any(row.status == "would-rebuild" for row in rows):
        return "This was a dry run. To do it: stop the broker, and run the same command with --execute."
    if any(row.status in _BAD for row in rows):
        return "What was not done is unchanged; the reasons and remedies are listed above."
    return "Next: start the broker." if execute and any(row.status == "rebuilt" for row in rows) else ""
