"""Defines the command line `keytail COMMAND`, and runs the same commands for jobs under spark-submit.

Each command is declared in `command.py` of its folder, and is run by running.py. Exit statuses: 0 done, 3 some
partitions were done or the ledger lacks a result, 1 no partition was done, an error ended the run or a check found
something, 2 wrong usage, 130 and 143 stopped by SIGINT and SIGTERM, 141 the reader of standard output has ended.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, NoReturn

import typer
from rich.markup import escape

from keytail import __version__
from keytail.audit.command import AUDIT
from keytail.cli.command import Command
from keytail.cli.stopping import exit_without_trace, stop_with_parent
from keytail.cli.streams import end_of_output, guard
from keytail.compact.command import COMPACT, PLAN
from keytail.cut.command import CUT
from keytail.describe.command import DESCRIBE
from keytail.doctor.command import DOCTOR
from keytail.downtime.command import DOWNTIME
from keytail.dump.command import DUMP
from keytail.erase.command import ERASE
from keytail.expire.command import EXPIRE
from keytail.export.command import EXPORT
from keytail.import_.command import IMPORT
from keytail.jobs_dir.command import JOBS_DIR
from keytail.ledger.command import HISTORY
from keytail.lookup.command import LOOKUP
from keytail.main.running import SUBMITTED, function_of
from keytail.main.suggestions import Group, OneCommand
from keytail.prepared.command import PREPARED
from keytail.rebuild_index.command import REBUILD_INDEX
from keytail.report.command import REPORT
from keytail.salvage.command import SALVAGE
from keytail.undo.command import UNDO
from keytail.verify.command import VERIFY

_CONTEXT: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(
    name="keytail",
    cls=Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings=_CONTEXT,
)

COMMANDS: dict[str, Command] = {
    command.name: command
    for command in (
        PLAN, COMPACT, PREPARED, VERIFY, DESCRIBE, REBUILD_INDEX, EXPIRE, ERASE, LOOKUP, DUMP, AUDIT, IMPORT, EXPORT,
        CUT, SALVAGE, UNDO, HISTORY, DOWNTIME, REPORT, DOCTOR, JOBS_DIR,
    )
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command line and exit with its status."""
    _exit_with(partial(app, args=arguments, prog_name="keytail"))


def _exit_with(run: Callable[[], object]) -> NoReturn:
    guard()
    exit_without_trace()
    try:
        run()
    except SystemExit as ended:
        if isinstance(ended.code, int):  # after help or wrong usage; commands have ended their output themselves
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

    Run [bold]plan[/]; stop the broker; run [bold]compact --execute[/] and [bold]verify[/]; start the broker.
    """


def _epilog(command: Command) -> str:
    """Return the text below the flags in `--help`; each paragraph there is printed as a line."""
    return "\n\n".join(["[bold]Examples:[/]", *map(escape, command.examples)])


Group.also_called = {name: command.also_called for name, command in COMMANDS.items()}
for _command in COMMANDS.values():
    app.command(_command.name, cls=OneCommand, help=_command.help, epilog=_epilog(_command))(function_of(_command))


def _separate_standard_error(parent: int) -> None:
    """Restore a separate standard error: spark-submit sends both streams of its Python driver to standard output.

    Standard output must have only rows. If the parent's standard error cannot be opened, the streams stay together.
    """
    with contextlib.suppress(OSError):
        fd = os.open(f"/proc/{parent}/fd/2", os.O_WRONLY | os.O_APPEND)
        os.dup2(fd, 2)
        os.close(fd)


def run_as_job(command: str) -> NoReturn:
    """Run the command with the flags of this process, in the Spark session of spark-submit, and exit with its status.
    Usage lines have the name of the job's file."""
    parent = os.getppid()  # read only once, because the parent may end at any moment
    _separate_standard_error(parent)
    stop_with_parent(parent)
    group: Any = typer.main.get_command(app)
    run = group.commands[command]
    _exit_with(partial(run, args=sys.argv[1:], prog_name=f"spark-submit {sys.argv[0]}", obj=SUBMITTED, **_CONTEXT))


if __name__ == "__main__":  # without this, python -m keytail.main.main would end with status 0 and do nothing
    raise SystemExit("Run `python -m keytail`")
