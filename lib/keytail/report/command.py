"""Declares the command `report` and its flags."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Annotated

import typer

from keytail.cli import options as o
from keytail.cli.command import Command
from keytail.extras import REPORT as REPORT_EXTRA
from keytail.extras import Needs
from keytail.ledger.command import LedgerPath, Run, extras_of_reader

ReportFile = Annotated[
    str, typer.Argument(metavar="FILE.html", help="File for the page, outside of every log dir.", show_default=False)
]
Since = Annotated[str | None, o.run_flag(
    "--since MS-OR-TIME",
    "Include all runs that began at or after this time: ms since 1970, or ISO 8601 such as 2023-11-14T22:13:20Z. "
    "Default: only the run of --run or, without --run, only the latest run.",
)]


@dataclass(frozen=True)
class Request:
    """All parameters of `report`, with the defaults of its flags."""

    file: ReportFile
    ledger: LedgerPath
    _: KW_ONLY
    run_id: Run = None
    since: Since = None
    master: o.Master = None
    delta_jars: o.DeltaJars = None


def _extras(request: Request) -> Needs:
    yield "report", REPORT_EXTRA
    yield from extras_of_reader("report", request.ledger, request.master)


REPORT = Command(
    name="report",
    also_called=("html", "page"),
    help="Write the results of one or more runs from their ledger as one HTML page.\n\n"
    "The command reads only the ledger, and without Spark if the Python package deltalake is installed and the ledger "
    "is a directory.",
    request=Request,
    run="keytail.report.of_ledger:write_report",
    extras=_extras,
    examples=("keytail report --ledger /var/lib/keytail/ledger --run 3f2a91c0 /tmp/run.html",),
    output=None,
)
