"""The command line of `report`: the page of runs that are in a ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keytail.cli import options as o
from keytail.cli.command import reported
from keytail.cli.whole_file import refuse_file
from keytail.errors import UsageProblem
from keytail.ledger.of_run import LedgerFlags, is_uri
from keytail.log.fs import LOCAL
from keytail.main.ledger import Ledger, Run
from keytail.telling import say

ReportFile = Annotated[
    str, typer.Argument(metavar="FILE.html", help="File for the page, outside of every log dir.", show_default=False)
]
Since = Annotated[
    str | None,
    typer.Option(
        "--since",
        metavar="MS-OR-TIME",
        help="Include all runs that began at or after this time: ms since 1970, or ISO 8601 such as "
        "2023-11-14T22:13:20Z. Default, if --run is not given either: the latest run.",
        rich_help_panel=o.RUN,
    ),
]


@reported
def report(
    file: ReportFile,
    ledger: Ledger,
    run: Run = None,
    since: Since = None,
    master: o.Master = None,
    delta_jars: o.DeltaJars = None,
) -> None:
    """Write what one or more runs did as one HTML page, from the ledger that was given to them.

    Reads only the ledger. Does not start Spark if the Python package deltalake is installed.
    """
    from keytail.lookup.command import parse_time  # noqa: PLC0415 (--help stays fast)
    from keytail.report.of_ledger import report_of_ledger  # noqa: PLC0415 (the same)
    from keytail.report.page import refuse_without_packages  # noqa: PLC0415 (the same)
    from keytail.report.writing import write_page  # noqa: PLC0415 (the same)

    if run is not None and since is not None:
        raise UsageProblem(
            "--run and --since exclude each other", remedy="Give only one of them", slug="conflicting-flags"
        )
    since_ms = None if since is None else parse_time(since, "--since")
    refuse_file(LOCAL, file, (), "FILE.html")
    refuse_without_packages()
    flags = LedgerFlags(ledger if is_uri(ledger) else str(Path(ledger).absolute()), delta_jars)
    write_page(file, report_of_ledger(flags, run, since_ms, master=master))
    say(f"keytail: the report is {file}")
    raise typer.Exit(0)
