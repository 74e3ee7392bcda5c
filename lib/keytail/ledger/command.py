"""Declares the command `history`: its flags, rows and statuses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from rich.markup import escape

from keytail.cli import options as o
from keytail.cli import rows as show
from keytail.cli.command import Command
from keytail.cli.statuses import Status, exit_status_of
from keytail.cli.table import PARTITION, STATUS, TOOK, Column, print_below, print_line, print_rows
from keytail.durations import time_text
from keytail.errors import NO_ERROR, ErrorText
from keytail.extras import DELTA, Needs
from keytail.extras import HISTORY as HISTORY_EXTRA
from keytail.ledger.of_run import LedgerFlags
from keytail.run.rows import Recorded
from keytail.run.spark.stores import checked_uri, is_remote, is_uri

LedgerPath = Annotated[str, o.run_flag(
    "--ledger PATH", "Path of the ledger that runs have written. A URI such as s3a://bucket/ledger is read by Spark."
)]
Run = Annotated[str | None, o.run_flag("--run ID", "Show one run, given by its id or the end of its id.")]
Partitions = Annotated[list[str] | None, o.run_flag(
    "--partitions T-0,T-1", "Show the results of all runs for these partitions, in the order of time."
)]
Limit = Annotated[int, o.run_flag(
    "--limit N", "Maximum number of runs or rows; the latest are shown.", parser=o.within(1, 1_000_000)
)]
Maintain = Annotated[bool, o.run_flag(
    "--maintain",
    "Remove old rows from the ledger, merge small files, and remove files that have not been part of the ledger for a "
    "week. Without --execute, only print what would be done.",
)]
RetainDays = Annotated[int | None, o.run_flag(
    "--retain-days N",
    "With --maintain: remove rows older than this number of days. Default: remove no rows.",
    parser=o.within(1, 36_500),
)]
Execute = Annotated[bool, o.run_flag("--execute", "Carry out --maintain.")]


def ledger_at(path: str, delta_jars: str | None) -> LedgerFlags:
    """Return the flags of the ledger at `path`, a path or URI. Raises UsageProblem for an unsuitable URI."""
    if is_remote(path):
        return LedgerFlags(checked_uri(path, "--ledger"), delta_jars)
    return LedgerFlags(path if is_uri(path) else str(Path(path).absolute()), delta_jars)


@dataclass(frozen=True)
class Request:
    """All parameters of `history`, with the defaults of its flags."""

    ledger: LedgerPath
    _: KW_ONLY
    run_id: Run = None
    partitions: Partitions = None
    limit: Limit = 100
    maintain: Maintain = False
    retain_days: RetainDays = None
    execute: Execute = False
    master: o.Master = None
    delta_jars: o.DeltaJars = None


@dataclass(frozen=True)
class RunRow:
    """The row of one run, or of a downtime without a run. Times are in ms since 1970."""

    run_id: str
    command: str
    host: str
    status: str
    error: ErrorText
    start_ms: int | None
    end_ms: Annotated[int | None, "`null` if the run recorded no end"]
    log_dirs: Annotated[tuple[str, ...], "log dirs of the run"] = ()
    partitions: Annotated[int | None, "number of chosen partitions"] = None
    counts: Annotated[Mapping[str, int], "number of partitions by status"] = field(default_factory=dict)
    bytes_before: int | None = None
    bytes_after: int | None = None
    records_before: int | None = None
    records_after: int | None = None
    repaired_by: Annotated[str | None, "id of the run that found this run interrupted"] = None
    arguments: Annotated[tuple[str, ...], "the command line, with secrets masked"] = ()
    versions: Annotated[Mapping[str, str], "versions of keytail, Python and packages"] = field(default_factory=dict)
    config: Annotated[Mapping[str, str], "settings that were given, and `--broker-version`"] = field(
        default_factory=dict
    )
    now_ms: Annotated[int | None, "the time on which all decisions of the run are based"] = None
    broker: Annotated[str | None, "the broker that was down during the run; `null` if no downtime was recorded"] = None
    down_at_ms: Annotated[int | None, "when the stop of the broker began"] = None
    reachable_at_ms: Annotated[int | None, "when the broker answered again; `null` if unknown"] = None
    in_sync_at_ms: Annotated[int | None, "when all replicas were in sync again; `null` if unknown"] = None

    @property
    def name(self) -> str:
        return self.run_id

    @property
    def downtime(self) -> str:
        return show.human_seconds(self.down_at_ms, self.reachable_at_ms)


OF_DOWNTIME = ("broker", "down_at_ms", "reachable_at_ms", "in_sync_at_ms")


@dataclass(frozen=True)
class PartitionRow(Recorded):
    """The result of one run for one partition; `end_ms` is `null` if no outcome was recorded."""

    run_id: str = field(kw_only=True)
    command: str = ""
    bundle: Annotated[int | None, "the number of the partition's bundle in the run"] = None
    at_ms: Annotated[int | None, "when the row was written"] = None
    repaired_by: Annotated[str | None, "id of the run that determined a missing outcome"] = None


@dataclass(frozen=True)
class MaintainRow:
    """The row of one table of the ledger. All numbers except `removed_rows` are totals of the table."""

    table: Annotated[str, "name of the table"]
    status: str
    error: ErrorText = NO_ERROR
    oldest_day: Annotated[str | None, "the first day whose rows are retained; `null` if all rows are retained"] = None
    rows: Annotated[int | None, "number of rows before the command"] = None
    removed_rows: Annotated[int | None, "number of rows of days before `oldest_day`"] = None
    files_before: Annotated[int | None, "number of files before the command"] = None
    files_after: Annotated[int | None, "number of files after the command"] = None
    bytes_before: Annotated[int | None, "size of the files before the command"] = None
    bytes_after: Annotated[int | None, "size of the files after the command"] = None

    @property
    def name(self) -> str:
        return self.table


def exit_status(rows: Sequence[Any], request: Request) -> int:
    return exit_status_of(rows, ("failed",)) if request.maintain else 0


def _sizes(row: RunRow | PartitionRow | MaintainRow) -> str:
    return show.change(show.human_bytes(row.bytes_before), show.human_bytes(row.bytes_after))


def _started(run: RunRow) -> str:
    return "" if run.start_ms is None else time_text(run.start_ms)


def _word(heading: str, name: str) -> Column[Any]:
    return Column(heading, lambda row: getattr(row, name), is_number=False)


def _changed(heading: str, before: str, after: str) -> Column[Any]:
    return Column(heading, lambda row: show.change(show.count(getattr(row, before)), show.count(getattr(row, after))))


_OF_RUNS: tuple[Column[RunRow], ...] = (
    _word("run", "run_id"),
    Column("started", _started, is_number=False),
    _word("host", "host"),
    _word("command", "command"),
    STATUS,
    Column("partitions", lambda row: ", ".join(f"{number} {status}" for status, number in row.counts.items())),
    Column("log size", lambda row: _sizes(row) if row.bytes_before else ""),
    TOOK,
    Column("downtime", lambda row: row.downtime),
)
_OF_ONE_RUN: tuple[Column[PartitionRow], ...] = (
    PARTITION,
    STATUS,
    _changed("segments", "segments_before", "segments_after"),
    Column("log size", _sizes),
    _changed("records", "records_before", "records_after"),
    Column("cleaned up to", lambda row: show.count(row.end_dirty_offset) if row.status == "compacted" else ""),
    TOOK,
)
_OVER_TIME: tuple[Column[PartitionRow], ...] = (_word("run", "run_id"), _word("command", "command"), *_OF_ONE_RUN)
_OF_TABLES: tuple[Column[MaintainRow], ...] = (
    _word("table", "table"),
    Column("days kept from", lambda row: row.oldest_day or "all", is_number=False),
    STATUS,
    Column("rows", lambda row: show.count(row.rows)),
    Column("to remove", lambda row: show.count(row.removed_rows)),
    _changed("files", "files_before", "files_after"),
    Column("size", _sizes),
)


def show_rows(rows: Sequence[Any], request: Request) -> None:
    """Print a line for each run, partition or table, then the reasons. With --run, print the facts of the run first."""
    if request.maintain:
        title = f"Ledger {request.ledger}" if request.execute else f"Dry run: nothing was changed in {request.ledger}"
        _print(title, _OF_TABLES, rows)
    elif request.run_id is not None:
        _print_run(rows[0])
        _print("Partitions of the run", _OF_ONE_RUN, rows[1:], "row")
    elif request.partitions:
        _print(f"Results of the runs in {request.ledger}", _OVER_TIME, rows, "row")
    else:
        columns = _OF_RUNS if any(row.broker is not None for row in rows) else _OF_RUNS[:-1]
        _print(f"Runs in {request.ledger}", columns, rows, "run")


def _print(title: str, columns: Sequence[Column[Any]], rows: Sequence[Any], counted: str = "") -> None:
    print_rows(title, columns, rows)
    print_below(rows)
    if counted:
        print_line(f"\n{len(rows)} {counted}{'s' if len(rows) != 1 else ''}.")


def _print_run(run: RunRow) -> None:
    lines = {
        "run": run.run_id,
        "started": _started(run),
        "took": show.human_seconds(run.start_ms, run.end_ms),
        "status": run.status,
        "host": run.host,
        "command line": " ".join(run.arguments),
        "log dirs": ", ".join(run.log_dirs),
        "versions": ", ".join(f"{name} {value}" for name, value in run.versions.items()),
        "settings given": ", ".join(f"{name}={value}" for name, value in sorted(run.config.items())),
        "recorded by run": run.repaired_by or "",
        "downtime": _downtime(run),
    }
    for name, value in lines.items():
        if value:
            print_line(f"{name}: {escape(value)}")
    print_line("")


def _downtime(run: RunRow) -> str:
    if run.broker is None:
        return ""
    in_sync = show.human_seconds(run.down_at_ms, run.in_sync_at_ms)
    until = f"in sync after {in_sync}" if in_sync else "it is unknown when all replicas were in sync again"
    down = run.downtime or "for an unknown time"
    return f"{down}, broker {run.broker}, {until}"


def extras_of_reader(command: str, ledger: str, master: str | None) -> Needs:
    """Yield the extra that a command needs to read a ledger, with the reason: deltalake, or Spark with Delta."""
    if master is not None:
        yield "--master", DELTA
    elif is_remote(ledger):
        yield "--ledger with a URI", DELTA
    elif HISTORY_EXTRA.missing() and DELTA.missing():
        yield command, HISTORY_EXTRA


def _extras(request: Request) -> Needs:
    if request.maintain:
        yield "--maintain", DELTA
    yield from extras_of_reader("history", request.ledger, request.master)


HISTORY = Command(
    name="history",
    also_called=("runs", "ledger", "log", "logs"),
    help="Show the results of runs from their ledger: all runs, one run, or partitions over time.\n\n"
    "The command reads only the ledger, and without Spark if the Python package deltalake is installed and the ledger "
    "is a directory.",
    request=Request,
    run="keytail.ledger.history:history",
    extras=_extras,
    examples=(
        "keytail history --ledger /var/lib/keytail/ledger",
        "keytail history --ledger /var/lib/keytail/ledger --run 3f2a91c0",
    ),
    rows={
        "each run": RunRow,
        "each partition, after the row of one run or over time": PartitionRow,
        "each table, with `--maintain`": MaintainRow,
    },
    statuses={
        "done": Status("the run completed all its work", "done"),
        "partly": Status("some partitions were not done, or the ledger lacks some of their results", "notable"),
        "failed": Status("the run did no partition, or the maintenance of the table failed", "failed"),
        "interrupted": Status("the run recorded no outcome: it was stopped or killed, or is still running", "not done"),
        "would-maintain": Status("dry run: with --execute, the table would be maintained", "notable"),
        "maintained": Status("the table was maintained", "done"),
    },
    show=show_rows,
    exit_status=exit_status,
)
