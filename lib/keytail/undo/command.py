"""Declares the command `undo`: flags, rows, statuses, next step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated, Literal

from rich.markup import escape

from keytail.cli import options as o
from keytail.cli import rows as show
from keytail.cli.command import Command
from keytail.cli.flags import FromFlags
from keytail.cli.statuses import FAILURES, Status, exit_status_of
from keytail.cli.table import (
    PARTITION,
    STATUS,
    TOOK,
    Column,
    about,
    notes_of,
    print_line,
    print_paragraph,
    print_rows,
    total,
)
from keytail.console import listed
from keytail.durations import time_text
from keytail.errors import NO_ERROR, ErrorText
from keytail.run.rows import OfPartition

State = Literal["kept", "undone", "partly undone", "unfinished"]

_MAX_LINES = 40  # maximum number of differences that are printed for one partition
_MAX_NAMES = 5  # maximum number of partitions that are listed for one run

OriginalsDirectory = Annotated[str, o.flag("--originals DIR", "Directory that was given with --keep-originals.")]
Run = Annotated[str | None, o.flag("--run ID", "Id of the run, as printed by `compact` and by --list.")]
ListRuns = Annotated[bool, o.flag("--list", "List the runs that have a backup. This is the default without --run.")]
MovedLogDirs = Annotated[list[str] | None, o.flag(
    "--log-dirs DIR[,DIR]", "Current log dirs of the partitions. Default: the log dirs that the partitions had in the "
    "run."
)]
Forget = Annotated[bool, o.flag(
    "--forget", "Remove the backup of the run, which frees its space. The run can then no longer be undone."
)]
Execute = Annotated[bool, o.flag(
    "--execute",
    "Change files. Without this flag the command prints what it would do. The broker must be stopped, except for "
    "--forget.",
)]


def _moved(log_dirs: MovedLogDirs = None) -> tuple[str, ...]:
    return tuple(str(Path(path).absolute()) for path in o.comma_lists(log_dirs))


def _partitions(partitions: o.Partitions = None) -> tuple[str, ...]:
    return o.comma_lists(partitions)


@dataclass(frozen=True)
class Request:
    """All parameters of `undo`, with the defaults of its flags.

    `log_dirs` are the current log dirs of partitions that were moved since the run.
    """

    originals: OriginalsDirectory
    run_id: Run = None
    _: KW_ONLY
    list_runs: ListRuns = False
    log_dirs: Annotated[tuple[str, ...], FromFlags(_moved)] = ()
    partitions: Annotated[tuple[str, ...], FromFlags(_partitions)] = ()
    forget: Forget = False
    execute: Execute = False
    shared_storage: o.SharedStorage = False

    @property
    def is_list(self) -> bool:
        """Whether runs are to be listed, and no run is to be undone or forgotten."""
        return self.run_id is None or self.list_runs


@dataclass(frozen=True)
class UndoRow(OfPartition):
    """The result for one partition of a run."""

    run_id: str
    topic: str
    partition: int
    log_dir: str
    status: str
    error: ErrorText = NO_ERROR
    differences: Annotated[tuple[str, ...], "the reasons for a refusal, one sentence each"] = ()
    segments_before: int | None = None
    segments_after: int | None = None
    bytes_before: Annotated[int | None, "size of the `.log` files"] = None
    bytes_after: Annotated[int | None, "size of the `.log` files after the undo"] = None
    cleaner_checkpoint_before: int | None = None
    cleaner_checkpoint_after: int | None = None
    held_bytes: Annotated[int, "space that `--forget` frees"] = 0
    notes: tuple[str, ...] = ()
    start_ms: int | None = None
    end_ms: int | None = None


@dataclass(frozen=True)
class BackedUpRun:
    """A run that has a backup."""

    run_id: str
    kept_ms: Annotated[int | None, "when the backup was created"]
    state: Annotated[State, "`unfinished`: the backup of one of the run's partitions is incomplete or cannot be read"]
    partitions: Annotated[tuple[str, ...], "names of the partitions"]
    held_bytes: Annotated[int, "space that `--forget` frees"]


def exit_status(rows: Sequence[UndoRow] | Sequence[BackedUpRun], request: Request) -> int:
    return 0 if request.is_list else exit_status_of(rows)


def _cleaned(row: UndoRow) -> str:
    """Return the new cleaner checkpoint as text, `-` for no entry; empty if it is not changed."""
    changes = row.status in ("undone", "would-undo")
    return (show.plain(row.cleaner_checkpoint_after) or "-") if changes else ""


_COLUMNS: tuple[Column[UndoRow], ...] = (
    PARTITION,
    STATUS,
    Column("segments", lambda row: show.change(show.plain(row.segments_before), show.plain(row.segments_after))),
    Column("log size", lambda row: show.change(show.human_bytes(row.bytes_before), show.human_bytes(row.bytes_after))),
    Column("cleaned up to", lambda row: show.change(show.plain(row.cleaner_checkpoint_before), _cleaned(row))),
    Column("held", lambda row: show.human_bytes(row.held_bytes)),
    TOOK,
)
_COLUMNS_OF_RUNS: tuple[Column[BackedUpRun], ...] = (
    Column("run", lambda run: run.run_id, is_number=False),
    Column("created", lambda run: "" if run.kept_ms is None else time_text(run.kept_ms), is_number=False),
    Column("state", lambda run: run.state, is_number=False),
    Column("held", lambda run: show.human_bytes(run.held_bytes), is_number=False),
    Column("partitions", lambda run: listed(run.partitions, _MAX_NAMES), is_number=False),
)


def show_rows(rows: Sequence[UndoRow] | Sequence[BackedUpRun], request: Request) -> None:
    """Print a line for each run of a list; for an undo, a line for each partition, then the reasons, a line for each
    difference, and totals."""
    kept = [row for row in rows if isinstance(row, BackedUpRun)]
    if request.is_list and not kept:
        print_line(escape(f"No backups in {request.originals}."))
        return
    if request.is_list:
        print_rows(f"Backups in {request.originals}", _COLUMNS_OF_RUNS, kept)
        return
    undone = [row for row in rows if isinstance(row, UndoRow)]
    title = f"Undo of run {request.run_id}" if request.execute else "Dry run: nothing was changed"
    print_rows(title, _COLUMNS, undone)
    reasons = [
        (row.name, row.status, f"the partition has changed since run {row.run_id}:" if row.differences else row.error)
        for row in undone if row.error
    ]  # fmt: skip
    differences = [about(f"  {row.name}", text) for row in undone for text in _some_differences(row)]
    print_paragraph(reasons, [*differences, *notes_of(undone)])
    print_line(f"\n{total(undone)}")


def _some_differences(row: UndoRow) -> list[str]:
    texts = list(row.differences)
    if len(texts) > _MAX_LINES:
        texts[_MAX_LINES:] = [f"and {len(texts) - _MAX_LINES} more"]
    return texts


def next_step(rows: Sequence[UndoRow] | Sequence[BackedUpRun], request: Request) -> str:
    statuses = {row.status for row in rows if isinstance(row, UndoRow)}
    if statuses & {"would-undo", "would-forget"}:
        todo = "remove the backup, " if request.forget else "undo the run, stop the broker, and "
        return f"This was a dry run. To {todo}run the same command with --execute."
    if statuses & FAILURES.keys():
        return "The reasons why partitions were not processed, and the remedies, are given above."
    if "undone" in statuses:
        return "Next, run `keytail verify`, then start the broker. `--forget` removes the backup of the run."
    return ""


UNDO = Command(
    name="undo",
    also_called=("revert", "rollback", "restore", "reset", "backup", "backups"),
    help="Restore partitions to the state before a compaction with --keep-originals.\n\n"
    "This is possible only if everything that the run wrote is unchanged; records that were appended later are "
    "retained.\n"
    "Without --execute the command prints what it would do, and what prevents it.",
    request=Request,
    run="keytail.undo.driver:run",
    examples=(
        "keytail undo --originals /var/lib/originals",
        "keytail undo --originals /var/lib/originals --run 3f2a91c0 --execute",
    ),
    rows={"each partition of the run": UndoRow, "each run, in the list": BackedUpRun},
    statuses={
        "would-undo": Status("dry run: with --execute, the partition would be restored", "done"),
        "undone": Status("the partition was restored", "done"),
        "clean": Status("there is nothing to undo"),
        "would-forget": Status("dry run: with --execute, the backup would be removed", "notable"),
        "forgotten": Status("the backup was removed", "done"),
        **FAILURES,
        "corrupt": Status("a file of the backup or its manifest is damaged", "failed"),
    },
    show=show_rows,
    next_step=next_step,
    exit_status=exit_status,
    reports_rows=True,
)
