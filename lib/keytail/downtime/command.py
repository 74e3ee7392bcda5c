"""Declares the command `downtime`: its flags, row and statuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Annotated

from keytail.cli import options as o
from keytail.cli import rows as show
from keytail.cli.command import Command
from keytail.cli.statuses import Status
from keytail.cli.table import STATUS, Column, print_below, print_rows
from keytail.durations import time_text
from keytail.errors import NO_ERROR, ErrorText
from keytail.extras import Needs
from keytail.ledger.command import ledger_at

LedgerPath = Annotated[str, o.run_flag("--ledger PATH", "Ledger to which the downtime is appended.")]
Broker = Annotated[str, o.run_flag("--broker NAME", "Name of the broker that is shown in the ledger and in reports.")]
_TIME = "ms since 1970, or ISO 8601 such as 2023-11-14T22:13:20Z"
DownAt = Annotated[str, o.run_flag("--down-at MS-OR-TIME", f"When the stop of the broker began: {_TIME}.")]
ReachableAt = Annotated[str | None, o.run_flag(
    "--reachable-at MS-OR-TIME", "When the broker answered again. Default: unknown; then no downtime is shown."
)]
InSyncAt = Annotated[str | None, o.run_flag(
    "--in-sync-at MS-OR-TIME", "When all replicas were in sync again. Default: unknown."
)]
Run = Annotated[str | None, o.run_flag(
    "--run ID",
    "Id of the run during the downtime, or the end of this id. Default: the downtime is shown without a run.",
)]


@dataclass(frozen=True)
class Request:
    """All parameters of `downtime`, with the defaults of its flags."""

    ledger: LedgerPath
    broker: Broker
    down_at: DownAt
    _: KW_ONLY
    reachable_at: ReachableAt = None
    in_sync_at: InSyncAt = None
    run_id: Run = None
    master: o.Master = None
    delta_jars: o.DeltaJars = None


@dataclass(frozen=True)
class DowntimeRow:
    """The row of one downtime of a broker. Times are in ms since 1970; `null` if unknown."""

    run_id: Annotated[str, "id of the run during the downtime, or of the downtime itself"]
    broker: str
    status: str
    error: ErrorText = NO_ERROR
    down_at_ms: int | None = None
    reachable_at_ms: int | None = None
    in_sync_at_ms: int | None = None

    @property
    def name(self) -> str:
        return self.broker


_COLUMNS: tuple[Column[DowntimeRow], ...] = (
    Column("run", lambda row: row.run_id, is_number=False),
    Column("broker", lambda row: row.broker, is_number=False),
    STATUS,
    Column("down at", lambda row: "" if row.down_at_ms is None else time_text(row.down_at_ms), is_number=False),
    Column("downtime", lambda row: show.human_seconds(row.down_at_ms, row.reachable_at_ms)),
    Column("until in sync", lambda row: show.human_seconds(row.down_at_ms, row.in_sync_at_ms)),
)


def _show(rows: Sequence[DowntimeRow], request: Request) -> None:
    print_rows(f"Recorded in {request.ledger}", _COLUMNS, rows)
    print_below(rows)


def _extras(request: Request) -> Needs:
    yield "--ledger", ledger_at(request.ledger, request.delta_jars).extra(request.master is not None)


DOWNTIME = Command(
    name="downtime",
    also_called=("outage", "restart", "record"),
    help="Record in a ledger how long a broker was down, for `history` and `report`.\n\n"
    "The command is meant for programs that stop and start brokers, such as the DAG keytail_rolling_maintenance of "
    "airflow_dags.",
    request=Request,
    run="keytail.downtime.driver:downtime",
    extras=_extras,
    examples=(
        "keytail downtime --ledger /var/lib/keytail/ledger --broker b1 --down-at 2026-01-02T03:04:05Z "
        "--reachable-at 2026-01-02T03:04:47Z --run 3f2a91c0",
    ),
    rows={"": DowntimeRow},
    statuses={"recorded": Status("the downtime was appended to the ledger", "done")},
    show=_show,
    exit_status=lambda rows, request: 0,
)
