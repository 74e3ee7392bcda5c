"""Implements `--report FILE.html`: writes the page of a run when its command ends, even after an error or a signal.

If the page cannot be written, the error is reported, and the exit status becomes 1 if it would have been 0; the results
of the run are not affected.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import typer

from keytail.acting_user import as_caller, caller_name
from keytail.cli import rows as show
from keytail.cli.stopping import Stopped
from keytail.cli.whole_file import refuse_file, write_whole
from keytail.console import print_message
from keytail.errors import EXPLAINED, KeytailError, UsageProblem, in_words
from keytail.extras import REPORT, require
from keytail.ledger.of_run import given_settings, versions
from keytail.log.fs import LOCAL, FileSystem
from keytail.run.ended import SparkEnded

if TYPE_CHECKING:
    from keytail.cli.configuration import Configuration
    from keytail.report.facts import Report


@dataclass
class Page:
    """The facts that a command provides about its run. `rows` are the rows that are known at present."""

    command: str
    execute: bool = False
    now_ms: int | None = None
    configuration: Configuration | None = None
    next_step: str = ""
    rows: list[Any] = field(default_factory=list)

    def add_row(self, row: Any) -> None:
        """Add a finished row. Called by commands that report their rows one by one."""
        self.rows.append(row)

    def done(self, rows: Sequence[Any], next_step: str = "") -> None:
        """Set all rows, in their final order, and the next step."""
        self.rows, self.next_step = list(rows), next_step


@contextlib.contextmanager
def reporting(path: str | None, page: Page, log_dirs: Sequence[str], fs: FileSystem = LOCAL) -> Iterator[Page]:
    """Yield the page, and write it when the context ends: the command exits, is stopped, or ends with a KeytailError
    or OSError.

    Raises UsageProblem at the beginning if the path is in a log dir, no file can be created there, or packages are
    missing. A run that ends with a usage error has no page.
    """
    if path is None:
        yield page
        return
    refuse_file(fs, path, log_dirs, "--report")
    require("--report", REPORT)
    start_ms = _now_ms()
    try:
        yield page
    except typer.Exit as ended:
        if not _write(path, page, start_ms, ended.exit_code) and not ended.exit_code:
            raise typer.Exit(1) from None
        raise
    except Stopped as stop:
        page.rows = list(stop.rows) if stop.rows is not None else page.rows
        _write(path, page, start_ms, stop.exit_status, f"interrupted by {signal.Signals(stop.number).name}")
        raise
    except SparkEnded as ended:
        page.rows = list(ended.rows) if ended.rows is not None else page.rows
        _write(path, page, start_ms, 1, ended.what)
        raise
    except UsageProblem:
        raise
    except EXPLAINED as problem:
        _write(path, page, start_ms, 1, in_words(problem))
        raise


def _write(path: str, reported: Page, start_ms: int, exit_status: int, ended_early: str = "") -> bool:
    """Write the page, and return whether it was written. An error is only reported."""
    try:
        write_page(path, report_of(reported, start_ms, exit_status, ended_early))
    except Exception as problem:  # an error of the page must not end the run
        what = repr(problem)
        if isinstance(problem, KeytailError):
            what = in_words(problem)
        elif isinstance(problem, OSError):
            what = problem.strerror or str(problem)
        show.print_error(f"the report could not be written ({path}): " + what)
        return False
    print_message(f"keytail: the report is {path}")
    return True


@as_caller()
def report_of(page: Page, start_ms: int, exit_status: int | None, ended_early: str = "") -> Report:
    from keytail.report.facts import Report  # noqa: PLC0415 (--help stays fast)
    from keytail.report.of_rows import partitions  # noqa: PLC0415 (the same)

    again = "Run the same command again to continue." if ended_early else ""
    return Report(
        title=page.command,
        command=page.command,
        execute=page.execute,
        partitions=partitions(page.rows),
        start_ms=start_ms,
        end_ms=_now_ms(),
        now_ms=page.now_ms or start_ms,
        arguments=(os.path.basename(sys.argv[0]), *sys.argv[1:]),
        settings=given_settings(page.configuration) if page.configuration is not None else {},
        host=os.uname().nodename,
        user=caller_name(),
        versions=_versions(),
        exit_status=exit_status,
        ended_early=ended_early,
        next_step=page.next_step.replace("given above", "given below") or again,  # the reasons follow
    )


@as_caller()
def write_page(path: str, report: Report) -> None:
    """Write the page of the report to the file, completely or not at all."""
    from keytail.report.page import page  # noqa: PLC0415 (--help stays fast)

    text = page(report)
    write_whole(path, lambda file: file.write(text))


def _versions() -> Mapping[str, str]:
    return {**versions(), "system": f"{platform.system()} {platform.release()}"}


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
