"""What the command lines of all verbs share: errors as messages, selection, rows as output, the exit status."""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import typer
from rich.markup import escape

from keytail.app import options as o
from keytail.app import rows as show
from keytail.app.selection import Choice, Configuration, chosen_log_dirs
from keytail.app.stopping import Stopped, stoppable
from keytail.errors import KeytailError, UsageProblem, in_words
from keytail.spark.rows import ResultRow, exit_status

SUBMITTED = "under spark-submit"


def reported(verb: Callable[..., None]) -> Callable[..., None]:
    """Turn an error that ends the whole run into a message on standard error and an exit status."""

    @functools.wraps(verb)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            with stoppable():
                verb(*args, **kwargs)
        except (KeytailError, OSError) as problem:
            show.error_console().print(f"[bold red]keytail:[/] {escape(in_words(problem))}", soft_wrap=True)
            usage = isinstance(problem, UsageProblem)
            if not usage and kwargs.get("output") == o.Output.json:
                show.print_json([])
            raise typer.Exit(2 if usage else 1) from problem
        except Stopped as stop:
            show.error_console().print(f"\n[bold red]keytail:[/] {_interrupted(stop)}", soft_wrap=True)
            if stop.rows is not None and kwargs.get("output") == o.Output.json:
                _print_if_heard(stop.rows)
            raise typer.Exit(stop.exit_status) from None

    return run


def _print_if_heard(rows: Sequence[Any]) -> None:
    """Under spark-submit standard output goes through a JVM that the same signal has ended."""
    try:
        show.print_json(rows)
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # for what is flushed at the end
        os.close(nowhere)


def _interrupted(stop: Stopped) -> str:
    counts = Counter(row.status for row in stop.rows or ())
    done = ", ".join(f"{number} {status}" for status, number in counts.most_common())
    return (
        f"interrupted by {signal.Signals(stop.number).name}{f': {done}' if done else ''}. What is reported as done is "
        "done, nothing is half replaced, and a broker may start. To go on, run the same command again"
    )


def choice_of(
    configuration: Configuration,
    log_dirs: list[str] | None,
    topic: list[str] | None,
    topic_list: list[str] | None,
    partitions: list[str] | None,
) -> Choice:
    return Choice(
        log_dirs=chosen_log_dirs(o.comma_lists(log_dirs), configuration),
        topic_patterns=tuple(topic or ()),
        topics=o.comma_lists(topic_list),
        partitions=o.comma_lists(partitions),
    )


def finish(rows: list[ResultRow], output: o.Output, title: str, next_step: str, named: Sequence[str]) -> None:
    if output is o.Output.json:
        show.print_json(rows)
    else:
        show.print_table(rows, title)
    if next_step:
        show.error_console().print(f"\n{next_step}", soft_wrap=True)
    raise typer.Exit(exit_status(rows, frozenset(named)))


def refuse_master(submitted: bool, master: str | None) -> None:
    if submitted and master is not None:
        raise UsageProblem(
            "--master after the job's name has no effect under spark-submit",
            remedy="Give it to spark-submit, before the job's name",
        )
