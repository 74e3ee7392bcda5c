"""The command line: `keytail COMMAND`, and the same commands for jobs under spark-submit.

Each command's flags are in a module of its group, its implementation in a module named after it. Exit statuses: 0 done,
3 partly, 1 nothing or a finding, 2 wrong usage, 130 and 143 stopped by SIGINT and SIGTERM.
"""

from __future__ import annotations

import sys

# `python -m` puts the current directory first: files in it must not be imported instead of packages.
if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]

import contextlib
import os
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from keytail import __version__
from keytail.cli.command import SUBMITTED
from keytail.cli.stopping import die_quietly, stop_with_parent
from keytail.cli.streams import end_of_output, guard
from keytail.main import cleaning as cli_cleaning
from keytail.main import doctor as cli_doctor
from keytail.main import inspection as cli_inspection
from keytail.main import ledger as cli_ledger
from keytail.main import maintenance as cli_maintenance
from keytail.main import moving as cli_moving
from keytail.main import report as cli_report
from keytail.main import rescue as cli_rescue
from keytail.main.examples import epilog

app = typer.Typer(
    name="keytail",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

VERBS = {
    "plan": cli_cleaning.plan,
    "compact": cli_cleaning.compact,
    "verify": cli_inspection.verify,
    "describe": cli_inspection.describe,
    "rebuild-index": cli_maintenance.rebuild_index,
    "expire": cli_maintenance.expire,
    "lookup": cli_inspection.lookup,
    "dump": cli_inspection.dump,
    "audit": cli_inspection.audit,
    "import": cli_moving.import_logs,
    "export": cli_moving.export,
    "salvage": cli_rescue.salvage,
    "undo": cli_rescue.undo,
    "history": cli_ledger.history,
    "report": cli_report.report,
    "doctor": cli_doctor.doctor,
}


def main(arguments: Sequence[str] | None = None, *, submitted: bool = False) -> NoReturn:
    """Run a command line and exit with its status. `submitted`: spark-submit started the driver."""
    program = "spark-submit jobs/" if submitted else "keytail"
    guard()
    die_quietly()
    try:
        app(args=arguments, prog_name=program, obj=SUBMITTED if submitted else None)
    except SystemExit as ended:
        if isinstance(ended.code, int):  # help or wrong usage: commands have ended their output
            ended.code = end_of_output(ended.code, changes=False)
        raise
    sys.exit(0)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"keytail {__version__}")
        raise typer.Exit


@app.callback()
def keytail(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Offline compaction, indexing and audit of Kafka partition logs, on Spark.

    Run [bold]plan[/], stop the broker, run [bold]compact --execute[/], check the result with
    [bold]verify[/], start the broker.
    """


for name, verb in VERBS.items():
    app.command(name, epilog=epilog(name))(verb)


def _separate_standard_error(parent: int) -> None:
    """Restore a separate standard error: spark-submit sends both streams of its Python driver to standard output.

    Standard output must have only rows. If the parent's standard error cannot be opened, the streams stay together.
    """
    with contextlib.suppress(OSError):
        fd = os.open(f"/proc/{parent}/fd/2", os.O_WRONLY | os.O_APPEND)
        os.dup2(fd, 2)
        os.close(fd)


def run_as_job(verb: str) -> NoReturn:
    """Run the command `verb` with the flags of this process, in the Spark session of spark-submit."""
    parent = os.getppid()  # read once: the parent may end at any moment
    _separate_standard_error(parent)
    stop_with_parent(parent)
    main([verb, *sys.argv[1:]], submitted=True)


if __name__ == "__main__":
    main()
