"""The command line of `history`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keytail.cli import options as o
from keytail.cli import rows as show
from keytail.cli.command import reported
from keytail.errors import UsageProblem
from keytail.ledger.of_run import LedgerFlags, is_uri

Ledger = Annotated[
    str,
    typer.Option("--ledger", metavar="PATH", help="Ledger that was given to the runs.", rich_help_panel=o.RUN),
]
Run = Annotated[
    str | None,
    typer.Option("--run", metavar="ID", help="Select one run, by its id or the end of its id.", rich_help_panel=o.RUN),
]
HistoryPartitions = Annotated[
    list[str] | None,
    typer.Option(
        "--partitions", metavar="T-0,T-1", rich_help_panel=o.RUN,
        help="Show what runs did to these partitions, over time.",
    ),
]  # fmt: skip
Limit = Annotated[
    int,
    typer.Option(
        "--limit", metavar="N", parser=o.within(1, 1_000_000), help="Maximum number of runs or rows, latest first.",
        rich_help_panel=o.RUN,
    ),
]  # fmt: skip
Maintain = Annotated[
    bool,
    typer.Option(
        "--maintain",
        help="Keep the ledger small: remove old rows, merge small files, and remove files that are no longer part of "
        "it after a week. Without --execute it prints what it would do.",
        rich_help_panel=o.RUN,
    ),
]
RetainDays = Annotated[
    int | None,
    typer.Option(
        "--retain-days",
        metavar="N",
        parser=o.within(1, 36_500),
        help="With --maintain: remove rows older than this number of days. Default: remove none.",
        rich_help_panel=o.RUN,
    ),
]
ExecuteMaintain = Annotated[
    bool, typer.Option("--execute", help="Carry out --maintain.", rich_help_panel=o.RUN)
]


@reported
def history(
    ledger: Ledger,
    run: Run = None,
    partitions: HistoryPartitions = None,
    limit: Limit = 100,
    maintain: Maintain = False,
    retain_days: RetainDays = None,
    execute: ExecuteMaintain = False,
    master: o.Master = None,
    delta_jars: o.DeltaJars = None,
    output: o.OutputFlag = o.Output.table,
) -> None:
    """Show what runs did, from the ledger that was given to them: all runs, one run, or partitions over time.

    Reads only the ledger. Does not start Spark if the Python package deltalake is installed.
    """
    from keytail.ledger import history as verb  # noqa: PLC0415 (--help stays fast)
    from keytail.ledger import history_table as table  # noqa: PLC0415 (--help stays fast)

    if (run is not None) + bool(partitions) + maintain > 1:
        raise UsageProblem(
            "--run, --partitions and --maintain exclude each other",
            remedy="Give only one of them",
            slug="conflicting-flags",
        )
    if (execute or retain_days is not None) and not maintain:
        raise UsageProblem(
            "--execute and --retain-days require --maintain",
            remedy="Give --maintain, or neither of the two",
            slug="missing-flag",
        )
    flags = LedgerFlags(ledger if is_uri(ledger) else str(Path(ledger).absolute()), delta_jars)
    if maintain:
        rows = verb.maintain(flags, retain_days, execute=execute, master=master)
        if output is o.Output.json:
            show.print_json(rows)
        else:
            table.print_maintained(rows, ledger, execute=execute)
        failed = [row for row in rows if row.status == "failed"]
        raise typer.Exit(0 if not failed else 1 if len(failed) == len(rows) else 3)
    if run is not None:
        one, of_run = verb.run(flags, run, master=master)
        if output is o.Output.json:
            show.print_json([one, *of_run])
        else:
            table.print_run(one, of_run)
    elif partitions:
        found = verb.partitions(flags, o.comma_lists(partitions), master=master, limit=limit)
        if output is o.Output.json:
            show.print_json(found)
        else:
            table.print_partitions(found, f"Results of the runs in {ledger}")
    else:
        known = verb.runs(flags, master=master, limit=limit)
        if output is o.Output.json:
            show.print_json(known)
        else:
            table.print_runs(known, ledger)
    raise typer.Exit(0)
