"""Runs a declared command: builds its request from the flags, shows its rows, and converts errors to messages and an
exit status."""

from __future__ import annotations

import contextvars
import inspect
import pkgutil
import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import typer
from rich.markup import escape

from keytail import acting_user
from keytail.cli import rows as show
from keytail.cli.command import Command
from keytail.cli.envelope import EnvelopeError, error_of, now_ms, print_envelope
from keytail.cli.flags import flags_of, request_of
from keytail.cli.output_options import JSON_V1, MessageFlags, RecordFlags
from keytail.cli.quarantine import writing_row_files
from keytail.cli.stopping import Stopped, stoppable
from keytail.cli.streams import end_of_output
from keytail.cli.table import print_line
from keytail.cli.whole_file import refuse_one_file_for_two
from keytail.console import print_message
from keytail.errors import EXPLAINED, UsageProblem, in_words
from keytail.extras import require
from keytail.ledger.of_run import current_run_id, set_run_id
from keytail.report.writing import Page, reporting
from keytail.run.ended import SparkEnded

SUBMITTED = "under spark-submit"

# Flags for files that a run writes, and the names of their parameters.
_FILES = {"--report": "report_file", "--rows-file": "rows_file", "--quarantine-report": "quarantine_report"}


def function_of(command: Command) -> Callable[..., None]:
    """Return the function from whose parameters Typer makes the command line."""
    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    parameters = {"context": context}
    parameters |= flags_of(command.request, command.only)
    for source in (command.output, RecordFlags if command.reads_records else None, MessageFlags):
        if source is not None:
            parameters |= {name: flag for name, flag in flags_of(source).items() if name not in parameters}

    def function(context: typer.Context, **flags: Any) -> None:
        try:
            given = {"submitted": context.obj == SUBMITTED}
            # Context variables that the run sets do not outlive it (threads.py).
            status = contextvars.copy_context().run(_status_of, command, flags, given)
        finally:
            acting_user.give_back()
        raise typer.Exit(end_of_output(status, changes=_changes_log_dirs(flags)))

    function.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]  # unknown to mypy
    function.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
    return function


@dataclass
class _Result:
    """What `--output json-v1` prints of a run: all rows, or those that the run has reported so far."""

    rows: Sequence[Any] = ()
    is_printed: bool = False  # the object of --output json-v1, or a part of it, has been printed


def _status_of(command: Command, flags: Mapping[str, Any], given: Mapping[str, Any]) -> int:
    """Run the command and return its exit status; report the error or the signal that ends it.

    `given` are values of the request that are not flags.
    """
    result, start_ms = _Result(), now_ms()
    set_run_id(None)  # a process may run several commands

    def print_result(status: int, rows: Sequence[Any] | None = None, error: EnvelopeError | None = None) -> None:
        if flags.get("output") == JSON_V1 and not result.is_printed:
            result.is_printed = True
            run_id = current_run_id() if _changes_log_dirs(flags) else None
            print_envelope(command.name, run_id, start_ms, status, result.rows if rows is None else rows, error)

    # A signal may also arrive while an error message is printed: that message, or the message about the signal, is
    # printed completely.
    with stoppable():
        try:
            try:
                request_of(MessageFlags, flags).apply()
                request_of(RecordFlags, flags).apply()
                refuse_one_file_for_two({flag: flags.get(name) for flag, name in _FILES.items()})
                _run(command, flags, given, result)
            except typer.Exit as ended:
                print_result(ended.exit_code)
                return ended.exit_code
            except SparkEnded as ended:
                what, then = _report_stop(ended.what, ended.rows, flags, command)
                print_result(1, ended.rows, EnvelopeError(ended.slug, what, then))
                return 1
            except EXPLAINED as problem:
                show.print_error(in_words(problem))
                status = 2 if isinstance(problem, UsageProblem) else 1
                if status == 1 and flags.get("output") == "json":
                    show.print_json([])
                print_result(status, error=error_of(problem))
                return status
        except Stopped as stop:
            what = f"interrupted by {signal.Signals(stop.number).name}"
            what, then = _report_stop(what, stop.rows, flags, command)
            print_result(stop.exit_status, stop.rows, EnvelopeError(None, what, then))
            return stop.exit_status
    return 0


def _run(command: Command, flags: Mapping[str, Any], given: Mapping[str, Any], result: _Result) -> None:
    """Run the command, print its rows, and raise typer.Exit with its status; the context managers then write the report
    and the files of rows, which can change the status. With --output json-v1, the rows are returned in `result`."""
    if given.get("submitted") and flags.get("master") is not None:
        raise UsageProblem(
            "--master after the job's name has no effect under spark-submit",
            remedy="Give --master to spark-submit, before the job's name",
            slug="master-under-spark-submit",
        )
    request = request_of(command.request, flags, given)
    for for_what, extra in command.extras(request):
        require(for_what, extra)
    facts = ("execute", "now_ms", "configuration")
    page_facts = {name: getattr(request, name) for name in facts if hasattr(request, name)}
    page = Page(command.variant(request) if command.variant else command.name, **page_facts)
    log_dirs = command.log_dirs(request) if command.log_dirs else _log_dirs(request)
    with reporting(flags.get("report_file"), page, log_dirs), writing_row_files(
        flags.get("quarantine_report"), log_dirs, flags.get("rows_file")
    ) as quarantine_rows:
        run = pkgutil.resolve_name(command.run)
        result.rows = page.rows
        try:
            rows = run(request, on_row=page.add_row) if command.reports_rows else run(request)
        except (Stopped, SparkEnded) as ended:
            if ended.rows is None and page.rows:
                ended.rows = list(page.rows)
            if ended.rows and flags["output"] == "table" and command.show is not None:
                command.show(ended.rows, request)
            raise
        if isinstance(rows, int):
            raise typer.Exit(rows)
        assert command.show is not None
        assert command.exit_status is not None
        quarantine_rows.extend(rows)
        page.done(rows, command.next_step(rows, request))
        result.rows = rows
        if flags["output"] == "table":
            command.show(rows, request)
        elif flags["output"] == "json":
            show.print_json(rows)
        below = command.below(rows, request)
        if flags["output"] == "table":
            for line in below.lines:
                print_line(escape(line))
        elif below.lines:
            print_message(f"keytail: {' '.join(below.lines)}", **below.figures)
        if page.next_step and not command.shows_next_step:
            show.print_note(f"\n{page.next_step}")
        raise typer.Exit(command.exit_status(rows, request))


def _changes_log_dirs(flags: Mapping[str, Any]) -> bool:
    return bool(flags.get("execute") or flags.get("prepare"))


def _log_dirs(request: Any) -> Sequence[str]:
    return request.partition_filter.log_dirs if hasattr(request, "partition_filter") else ()


def _report_stop(
    why: str, rows: Sequence[Any] | None, flags: Mapping[str, Any], command: Command
) -> tuple[str, str]:
    """Report what a run that ended early has done, and how to continue, and return these two sentences."""
    counts = Counter(row.status for row in rows or ())
    done = ", ".join(f"{number} {status}" for status, number in counts.most_common())
    left = "partitions without a row were not finished, " if rows and command.reports_rows else ""
    if flags.get("warm"):
        then = "Kernels that are compiled are kept. To compile the other kernels, run the same command again"
    elif _changes_log_dirs(flags):
        then = f"Partitions that are reported as done are complete, {left}no file is partly replaced, and a broker may "
        then += "start. To continue, run the same command again"
    else:
        then = f"Nothing in a log dir was changed{left and '; '}{left.removesuffix(', ')}. Run the same command again"
    what = f"{why}{f': {done}' if done else ''}"
    show.print_note("", "error")
    show.print_error(f"{what}. {then}")
    if rows is not None and flags.get("output") == "json":
        show.print_json(rows)
    return what, then
