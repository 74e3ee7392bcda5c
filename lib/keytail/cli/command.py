"""Code shared by all commands: errors as messages, selection, rows as output, the exit status."""

from __future__ import annotations

import contextvars
import functools
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from rich.markup import escape

from keytail import acting_user
from keytail.cli import options as o
from keytail.cli import rows as show
from keytail.cli.output_options import spoken
from keytail.cli.stopping import Stopped, stoppable
from keytail.cli.streams import end_of_output
from keytail.cli.whole_file import refuse_one_file_for_two
from keytail.errors import KeytailError, UsageProblem, in_words
from keytail.run.ended import SparkEnded
from keytail.run.rows import ResultRow, exit_status

if TYPE_CHECKING:
    from keytail.cli.configuration import Configuration
    from keytail.cli.selection import Choice

SUBMITTED = "under spark-submit"


# Flags for files that a run writes, and the names of their parameters in command functions.
_FILES = {"--report": "report_file", "--rows-file": "rows_file", "--quarantine-report": "quarantine_report"}


def reported(verb: Callable[..., None]) -> Callable[..., None]:
    """Turn an error that ends the whole run into a message on standard error and an exit status.

    The command also gets the flags that all commands have for output on standard error.
    """
    verb = spoken(verb)

    @functools.wraps(verb)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            contextvars.copy_context().run(told, *args, **kwargs)  # what it sets ends with it (threads.py)
        finally:
            acting_user.give_back()

    def told(*args: Any, **kwargs: Any) -> None:
        as_json = kwargs.get("output") == o.Output.json
        with stoppable():  # also during an error message: one of the two is printed in full
            try:
                try:
                    refuse_one_file_for_two({flag: kwargs.get(name) for flag, name in _FILES.items()})
                    verb(*args, **kwargs)
                    status = 0
                except typer.Exit as ended:
                    status = ended.exit_code
                except SparkEnded as ended:
                    status = _tell_stopped(ended.what, ended.rows, 1, as_json)
                except (KeytailError, OSError, MemoryError) as problem:
                    _say(in_words(problem))
                    status = 2 if isinstance(problem, UsageProblem) else 1
                    if status == 1 and as_json:
                        show.print_json([])
            except Stopped as stop:
                name = signal.Signals(stop.number).name
                status = _tell_stopped(f"interrupted by {name}", stop.rows, stop.exit_status, as_json)
        raise typer.Exit(end_of_output(status, changes=bool(kwargs.get("execute"))))

    return run


def _say(text: str) -> None:
    show.tell(f"[bold red]keytail:[/] {escape(text)}", "error")


def _tell_stopped(why: str, rows: Sequence[Any] | None, status: int, as_json: bool) -> int:
    """Report what a run that ended early has done, and how to continue. Returns `status`."""
    counts = Counter(row.status for row in rows or ())
    done = ", ".join(f"{number} {status}" for status, number in counts.most_common())
    show.tell("", "error")
    _say(
        f"{why}{f': {done}' if done else ''}. What is reported as done is complete, no file is partly replaced, and a "
        "broker may start. To continue, run the same command again"
    )
    if rows is not None and as_json:
        show.print_json(rows)
    return status


def configuration_of(
    config: str | None,
    topic_config: list[str] | None = None,
    topics_have_no_overrides: bool = False,
    topic_configs: str | None = None,
    metadata_is_current: bool = False,
) -> Configuration:
    from keytail.cli.configuration import read_configuration  # noqa: PLC0415 (--help and --version stay fast)

    return read_configuration(
        config, topic_config or (), topics_have_no_overrides, topic_configs, metadata_is_current
    )


def choice_of(
    configuration: Configuration,
    log_dirs: list[str] | None,
    topic: list[str] | None,
    topic_list: list[str] | None,
    partitions: list[str] | None,
    also_read: Sequence[str] = (),
) -> Choice:
    """Return the selection that the flags describe. If started as root, this process works as the owner of the log dirs
    from here on; `also_read` are log dirs of other brokers."""
    from keytail.cli.selection import Choice, chosen_log_dirs  # noqa: PLC0415 (--help and --version stay fast)
    from keytail.log.fs import LOCAL  # noqa: PLC0415 (as the line above)
    from keytail.log.owner import work_as_owner  # noqa: PLC0415 (as the line above)

    paths = chosen_log_dirs(o.comma_lists(log_dirs), configuration)
    work_as_owner(LOCAL, paths, also_read)
    return Choice(
        log_dirs=paths,
        topic_patterns=tuple(topic or ()),
        topics=o.comma_lists(topic_list),
        partitions=o.comma_lists(partitions),
    )


def finish(rows: list[ResultRow], output: o.Output, title: str, next_step: str, named: Sequence[str]) -> NoReturn:
    if output is o.Output.json:
        show.print_json(rows)
    else:
        show.print_table(rows, title)
    if next_step:
        show.tell(f"\n{next_step}")
    raise typer.Exit(exit_status(rows, frozenset(named)))


def refuse_master(submitted: bool, master: str | None) -> None:
    if submitted and master is not None:
        raise UsageProblem(
            "--master after the job's name has no effect under spark-submit",
            remedy="Give it to spark-submit, before the job's name",
            slug="master-under-spark-submit",
        )
