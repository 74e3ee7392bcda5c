"""Declares the command `cut`: its flags, rows, statuses and next step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any

from keytail.cli import options as o
from keytail.cli import rows as show
from keytail.cli.command import Command
from keytail.cli.flags import FromFlags
from keytail.cli.replicas import directories_of
from keytail.cli.statuses import Status
from keytail.cli.table import PARTITION, STATUS, Column, about_each, print_below, print_line, print_rows, total
from keytail.errors import NO_ERROR, ErrorText
from keytail.log.fs import LOCAL
from keytail.log.owner import work_as_owner
from keytail.run.rows import OfPartition

_MAX_GROUPS = 20  # maximum number of groups that are printed below the table for one partition
_LATEST_MS = 2**62

Replicas = Annotated[list[str] | None, o.select_flag(
    "--replica [NAME=]DIR[,DIR]",
    "All log dirs of one broker or controller, in its snapshot. Give the flag once for each broker and controller.",
)]
OutputDir = Annotated[str, o.flag(
    "--output-dir DIR", "Directory for the new log dirs: empty or new, and outside of every log dir."
)]
Execute = Annotated[bool, o.run_flag(
    "--execute",
    "Write the new log dirs. Without --execute the command only prints the cut. The given log dirs are only read.",
)]
CompleteBefore = Annotated[int | None, o.run_flag(
    "--complete-before MS",
    "Time in ms since 1970, some minutes before the first snapshot: transactions that were decided before this time "
    "are complete in all snapshots.",
    parser=o.within(0, _LATEST_MS),
)]


def _replicas(replica: Replicas = None) -> tuple[str, ...]:
    """Return the values of --replica. A process that was started as root then works as the owner of the log dirs."""
    work_as_owner(LOCAL, (), directories_of(replica or ()))
    return tuple(replica or ())


@dataclass(frozen=True)
class Request:
    """All parameters of `cut`, with the defaults of its flags."""

    replicas: Annotated[tuple[str, ...], FromFlags(_replicas)]
    output_dir: OutputDir
    _: KW_ONLY
    complete_before_ms: CompleteBefore = None
    execute: Execute = False


@dataclass(frozen=True)
class GroupOffset:
    """The committed offset of a group for the partition, before and after the cut."""

    group: Annotated[str, "name of the group"]
    before: Annotated[int | None, "committed offset in the logs; `null` if the offset was deleted"]
    after: Annotated[int | None, "committed offset after the cut; `null` if there is none"]


@dataclass(frozen=True)
class CutRow(OfPartition):
    """The row of one partition."""

    topic: str
    partition: int
    status: str
    error: ErrorText = NO_ERROR
    replicas: Annotated[
        tuple[dict[str, Any], ...],
        "each with `name`, `path`, `in_sync`, `log_start_offset`, `log_end_offset`, `new_log_end_offset`, and `torn`, "
        "a sentence about an incomplete end of its log",
    ] = ()
    cut_offset: Annotated[int | None, "log end offset of all in-sync replicas after the cut"] = None
    log_end_offset: Annotated[int | None, "largest log end offset of an in-sync replica"] = None
    records_cut: Annotated[int, "number of records, without markers, above the cut in the longest in-sync replica"] = 0
    transactions_cut: Annotated[int, "number of transactions above the cut"] = 0
    reason: Annotated[str, "why the cut is not at a higher offset; empty if nothing is cut"] = ""
    groups: Annotated[tuple[GroupOffset, ...], "groups that committed offsets of the partition"] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_cut(self) -> bool:
        return self.cut_offset != self.log_end_offset


def exit_status(rows: Sequence[CutRow], request: Request | None = None) -> int:
    """Return 0 if all partitions were or would be written, else 1: no broker may start on an incomplete output."""
    return 0 if all(row.status in ("whole", "would-cut", "cut") for row in rows) else 1


_COLUMNS: tuple[Column[CutRow], ...] = (
    PARTITION,
    STATUS,
    Column("replicas end", lambda row: ", ".join(sorted({str(each["log_end_offset"]) for each in row.replicas}))),
    Column("cut", lambda row: show.plain(row.cut_offset)),
    Column("records cut", lambda row: f"{row.records_cut:,}" if row.records_cut else ""),
    Column("transactions cut", lambda row: f"{row.transactions_cut:,}" if row.transactions_cut else ""),
)


def show_rows(rows: Sequence[CutRow], request: Request) -> None:
    """Print a line for each partition, then the reasons and the groups whose offsets change, then totals."""
    print_rows("Cut" if request.execute else "Dry run: nothing was written", _COLUMNS, rows)
    print_below(rows, about_each((row.name, line) for row in rows for line in _lines(row)))
    groups = {item.group for row in rows for item in row.groups if item.before != item.after}
    records = sum(row.records_cut for row in rows)
    print_line(f"\n{total(rows)} {records:,} records are above the cut; {len(groups):,} groups get earlier offsets.")


def _lines(row: CutRow) -> list[str]:
    changed = [item for item in row.groups if item.before != item.after]
    lines = [f"cut at offset {row.cut_offset}: {row.reason}"] if row.reason else []
    for item in changed[:_MAX_GROUPS]:
        after = "none" if item.after is None else item.after
        lines.append(f"group {item.group}: committed offset before the cut {item.before}, after the cut {after}")
    if len(changed) > _MAX_GROUPS:
        lines.append(f"{len(changed) - _MAX_GROUPS} more groups; --output json shows all groups")
    return [*lines, *(each["torn"] for each in row.replicas if each["torn"]), *row.notes]


def next_step(rows: Sequence[CutRow], request: Request) -> str:
    """Return what the operator should do next."""
    if exit_status(rows):
        return ""
    if not request.execute:
        return (
            "This was a dry run: nothing was written. To write the new log dirs, run the same command with --execute."
        )
    return (
        f"What to do now: give each broker and controller its new log dirs, which are in {request.output_dir}/node-ID "
        "for the node.id ID. Make the broker's user the owner of the log dirs (chown -R). Check the log dirs with "
        "keytail verify and keytail audit. Start all nodes, and restart producers and consumers."
    )


def _log_dirs(request: Request) -> Sequence[str]:
    return directories_of(request.replicas)


CUT = Command(
    name="cut",
    also_called=("consistent", "snapshot", "restore", "point-in-time"),
    help="Write consistent log dirs of a cluster from snapshots that were taken at different moments.\n\n"
    "Give the log dirs of all brokers and controllers of a KRaft cluster. Every partition is cut at an offset that all "
    "in-sync replicas have, so that no transaction is divided and no committed offset is beyond the end. The log dirs "
    "are only read. Without --execute the command lists what would be cut.",
    request=Request,
    run="keytail.cut.driver:cut",
    examples=(
        "keytail cut --replica 1=/snap/1 --replica 2=/snap/2 --replica 3=/snap/3 --output-dir /restore",
        "keytail cut --replica 1=/snap/1 --replica 2=/snap/2 --replica 3=/snap/3 --output-dir /restore --execute",
    ),
    rows={"": CutRow},
    statuses={
        "whole": Status("nothing is above the cut"),
        "would-cut": Status("dry run: with --execute, records would be left out", "notable"),
        "cut": Status("the new log dirs have the partition, without the records above the cut", "done"),
        "not-written": Status("another partition is refused or failed, so the output is not complete", "not done"),
        "corrupt": Status("the log of a replica is damaged", "failed"),
        "refused": Status("keytail does not process this state; nothing was written", "not done"),
        "failed": Status("another error occurred: remove the output, then run again", "failed"),
    },
    show=show_rows,
    next_step=next_step,
    exit_status=exit_status,
    reads_records=True,
    reports_rows=True,
    log_dirs=_log_dirs,
)
