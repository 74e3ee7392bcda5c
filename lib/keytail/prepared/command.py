"""Declares the command `prepared`: its flags, rows, statuses and next step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Annotated

from keytail.cli import options as o
from keytail.cli import rows as show
from keytail.cli.command import BROKER, Command
from keytail.cli.configuration import Configuration, ConfigurationByFlags
from keytail.cli.selection import PartitionFilterFlags
from keytail.cli.statuses import FAILURES, Status, exit_status_of
from keytail.cli.table import PARTITION, STATUS, Column, print_below, print_line, print_rows, total
from keytail.durations import time_text
from keytail.errors import NO_ERROR, ErrorText
from keytail.run.rows import RowOfPartition

Discard = Annotated[bool, o.run_flag("--discard", "With --execute: remove the preparations of the chosen partitions.")]


@dataclass(frozen=True)
class Request:
    """All parameters of `prepared`, with the defaults of its flags."""

    partition_filter: PartitionFilterFlags
    configuration: ConfigurationByFlags = field(default_factory=Configuration)
    _: KW_ONLY
    discard: Discard = False
    execute: o.Execute = False
    now_ms: o.Now = None
    high_watermark: o.HighWatermarkFlag = "checkpoint"


@dataclass(frozen=True)
class PreparedRow(RowOfPartition):
    """The row of one partition with a preparation."""

    error: Annotated[ErrorText, "why the preparation cannot be committed, or was not discarded"] = NO_ERROR
    run_id: Annotated[str | None, "id of the run that prepared the partition"] = None
    prepared_ms: Annotated[int | None, "the time on which the decisions of the preparation are based"] = None
    end_dirty_offset: Annotated[int | None, "offset below which the log was compacted"] = None
    bytes_before: Annotated[int | None, "size of the partition's `.log` files at the time of the preparation"] = None
    bytes_after: Annotated[int | None, "size of the `.log` files after the commit"] = None
    disk_bytes: Annotated[int | None, "size of the new files, until they are committed or discarded"] = None


_COLUMNS: tuple[Column[PreparedRow], ...] = (
    PARTITION,
    STATUS,
    Column("prepared at", lambda row: "" if row.prepared_ms is None else time_text(row.prepared_ms)),
    Column("end offset", lambda row: show.plain(row.end_dirty_offset)),
    Column("log size", lambda row: show.change(show.human_bytes(row.bytes_before), show.human_bytes(row.bytes_after))),
    Column("on disk", lambda row: show.human_bytes(row.disk_bytes)),
)


def _show(rows: Sequence[PreparedRow], request: Request) -> None:
    if not rows:
        print_line("Nothing is prepared.")
        return
    print_rows("Prepared", _COLUMNS, rows)
    print_below(rows)
    print_line(f"\n{total(rows)}")


def _next_step(rows: Sequence[PreparedRow], request: Request) -> str:
    if request.discard and not request.execute and rows:
        return "This was a dry run. To remove the preparations, run the same command with --execute."
    if any(row.status == "ready" for row in rows):
        return "Next: stop the broker, then run `keytail compact --execute`, which commits the ready preparations."
    return ""


PREPARED = Command(
    name="prepared",
    also_called=("preparations", "discard", "pending"),
    help="List or discard the preparations of `compact --prepare`, which `compact --execute` would commit.",
    request=Request,
    run="keytail.prepared.driver:prepared",
    examples=(f"keytail prepared {BROKER}", f"keytail prepared {BROKER} --discard --execute"),
    rows={"": PreparedRow},
    statuses={
        "ready": Status("`compact --execute` commits the preparation", "done"),
        "stale": Status("`compact --execute` discards the preparation, for the reason in `error`", "skipped"),
        "discarded": Status("with `--discard`: the files of the preparation were removed", "done"),
        **FAILURES,
    },
    show=_show,
    next_step=_next_step,
    exit_status=lambda rows, request: exit_status_of(rows),
)
