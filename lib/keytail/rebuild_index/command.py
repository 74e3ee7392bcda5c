"""Declares the command `rebuild-index`: flags, rows, statuses, next step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Annotated

from keytail.cli import options as o
from keytail.cli import rows as show
from keytail.cli.command import BROKER, Command
from keytail.cli.configuration import Configuration, WithoutAssertions
from keytail.cli.output_options import RowsAndFiles
from keytail.cli.quarantine import Place
from keytail.cli.selection import PartitionFilterFlags
from keytail.cli.statuses import FAILURES, Status, exit_status_of, styled
from keytail.cli.table import (
    PARTITION,
    STATUS,
    TOOK,
    Column,
    about,
    notes_of,
    print_below,
    print_line,
    print_remarkable,
    total,
)
from keytail.errors import KeytailError, without_corrupt_remedy
from keytail.ledger.of_run import LedgerByFlags, LedgerFlags
from keytail.run.rows import RowOfPartition

RebuildAll = Annotated[bool, o.run_flag(
    "--all",
    "Rebuild every index file that differs from what a recovering broker writes, even if it is valid. Valid files "
    "differ after a restart of the broker, or if index.interval.bytes was changed.",
)]
Truncate = Annotated[bool, o.safety_flag(
    "--truncate",
    "Truncate the invalid end of a log after a crash, as a broker would at startup, and print what is lost. "
    "Truncation is possible only above the recovery point, and only if the broker did not stop cleanly.",
)]


@dataclass(frozen=True)
class Request:
    """All parameters of `rebuild-index`, with the defaults of its flags."""

    partition_filter: PartitionFilterFlags
    configuration: WithoutAssertions = field(default_factory=Configuration)
    _: KW_ONLY
    execute: o.Execute = False
    rebuild_all: RebuildAll = False
    truncate: Truncate = False
    master: o.Master = None
    shared_storage: o.SharedStorage = False
    ledger: LedgerByFlags = field(default_factory=LedgerFlags)
    submitted: bool = False  # spark-submit runs this process and sets the master


@dataclass(frozen=True)
class SegmentRow:
    """The result for one segment. The state of an index file is empty if the file neither exists nor is needed."""

    base_offset: int
    status: Annotated[str, "`sound`, `would-rebuild`, `rebuilt`, or `damaged` (bytes that are not batches)"]
    log_bytes: int
    batches: int | None = None
    index: Annotated[str, "`sound`, `missing`, `wrong`, or empty"] = ""
    time_index: Annotated[str, "like `index`"] = ""
    txn_index: Annotated[str, "like `index`"] = ""
    error: str = ""


@dataclass(frozen=True)
class RebuildRow(RowOfPartition):
    """The result for one partition and its segments."""

    bytes: Annotated[int, "size of the `.log` files"] = 0
    batches: int | None = None
    files_wrong: Annotated[
        int | None, "number of index files, producer snapshots and leader epoch files that were missing or wrong"
    ] = None
    in_use: Annotated[
        bool, "a broker is running: the end of the last segment, snapshots and epochs were not checked"
    ] = False
    segments: Annotated[tuple[SegmentRow, ...], "the segments, an object each"] = ()
    notes: Annotated[tuple[str, ...], "other findings and actions, a sentence each"] = ()
    start_ms: int | None = None
    end_ms: int | None = None
    problem: KeytailError | None = field(default=None, compare=False, repr=False)  # the error whose text is in `error`
    places: tuple[Place, ...] = field(default=(), compare=False, repr=False)  # places of the damage that was found
    recorded: bool = field(default=True, compare=False, repr=False)  # False: the ledger lacks the row


def exit_status(rows: Sequence[RebuildRow], request: Request | None = None) -> int:
    """Return 0 if nothing is wrong any more; 1 if something is still wrong or no partition could be processed; 3 if
    some partitions could not be processed, or the ledger lacks the results of some partitions."""
    if status := exit_status_of(rows):
        return status
    if any(row.status == "would-rebuild" or row.error for row in rows):
        return 1
    return 0 if all(row.recorded for row in rows) else 3


_COLUMNS: tuple[Column[RebuildRow], ...] = (
    PARTITION,
    STATUS,
    Column("segments", lambda row: show.count(len(row.segments) or None)),
    Column("log size", lambda row: show.human_bytes(row.bytes)),
    Column("batches", lambda row: show.count(row.batches)),
    Column("files wrong", lambda row: show.plain(row.files_wrong)),
    TOOK,
)


def show_rows(rows: Sequence[RebuildRow], request: Request) -> None:
    """Print a line for each partition, then a line for each segment with a finding, then totals. If many partitions are
    sound, they are only counted."""
    title = "Index files" if request.execute else "Dry run: nothing was changed"
    shown = print_remarkable(
        title, _COLUMNS, rows, lambda row: row.status == "sound" and not (row.error or row.notes)
    )
    segments = [
        about(
            f"{row.name} segment {segment.base_offset}", without_corrupt_remedy(segment.error), styled(segment.status)
        )
        for row in shown for segment in row.segments if segment.status != "sound"
    ]  # fmt: skip
    print_below(rows, [*notes_of(shown), *segments])
    if shown or not rows:  # if all rows were only counted, the line above has the same sum
        print_line(f"\n{total(rows)}")


def next_step(rows: Sequence[RebuildRow], request: Request) -> str:
    if any(row.status == "would-rebuild" for row in rows):
        return "This was a dry run. To rebuild, stop the broker, and run the same command with --execute."
    if any(row.status in FAILURES for row in rows):
        return "The reasons why partitions were not rebuilt, and the remedies, are given above."
    if any(row.status == "rebuilt" and row.error for row in rows):
        return "Next: run again with --truncate, or start the broker; both truncate the invalid ends of the logs."
    return "Next: start the broker." if any(row.status == "rebuilt" for row in rows) else ""


REBUILD_INDEX = Command(
    name="rebuild-index",
    also_called=("repair", "fix", "recover", "recovery", "index", "indexes", "reindex", "truncate", "rebuild"),
    help="Rebuild missing and wrong index files, as a broker does after a crash, but before its start and on all cores."
    "\n\n"
    "Without --execute the command lists what is missing or wrong, and the exit status is 1 if anything is missing or "
    "wrong.",
    request=Request,
    run="keytail.rebuild_index.driver:rebuild",
    examples=(f"keytail rebuild-index {BROKER}", f"keytail rebuild-index {BROKER} --truncate --execute"),
    rows={"": RebuildRow},
    statuses={
        "sound": Status("nothing is wrong", "done"),
        "would-rebuild": Status("dry run: with --execute, files would be rebuilt", "notable"),
        "rebuilt": Status("files were rebuilt", "done"),
        **FAILURES,
        "refused": Status("something cannot be repaired; `segments` and `notes` list what was rebuilt", "not done"),
    },
    exits={0: "if nothing is wrong any more", 1: "also if a dry run found something wrong"},
    show=show_rows,
    next_step=next_step,
    exit_status=exit_status,
    output=RowsAndFiles,
    reads_records=True,
    reports_rows=True,
)
