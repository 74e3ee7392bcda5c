"""Declares the flags for the output of commands: rows, files beside the rows, and messages on standard error."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Annotated, Literal

from keytail.cli import options as o
from keytail.console import Level, OutputStyle, print_message, set_output_style
from keytail.errors import UsageProblem
from keytail.limits import MAX_RECORD_VARIABLE

JSON_V1 = "json-v1"
Format = Literal["table", "json", "json-v1"]
LogFormat = Literal["text", "json"]

_message_flag = o.panel("Output on standard error")

QuarantineReport = Annotated[str | None, o.run_flag(
    "--quarantine-report FILE",
    "Write a JSON array of the refused, corrupt, damaged and failed partitions: what is wrong, where, and what to "
    "do. The file must be outside of every log dir.",
)]
RowsFile = Annotated[str | None, o.run_flag(
    "--rows-file FILE",
    "Write the rows of --output json to a file too, for callers that cannot separate standard output. The file is "
    "written whole or not at all, and must be outside of every log dir.",
)]
ReportFile = Annotated[str | None, o.run_flag(
    "--report FILE.html",
    "Write what the run did as one HTML page, even if it ends early. The file must be outside of every log dir. "
    "Requires keytail\\[report].",
)]
OutputFlag = Annotated[Format, o.run_flag(
    "--output",
    "Output format. json: an array of rows on standard output, and all other output on standard error. json-v1: an "
    "object with these rows, and the run's id, exit status and error.",
    Format,
)]


@dataclass(frozen=True)
class MessageFlags:
    """The flags of every command, for messages on standard error."""

    quiet: Annotated[bool, _message_flag("--quiet -q", "Print only warnings and errors.")] = False
    verbose: Annotated[bool, _message_flag(
        "--verbose -v", "Print a line for each partition and each of its phases, for any number of partitions."
    )] = False
    log_format: Annotated[LogFormat, _message_flag(
        "--log-format",
        "Message format. json: one object per line with time, level, message and figures, for log collectors.",
        LogFormat,
    )] = "text"

    def apply(self) -> None:
        """Set the output style of this run. Raises UsageProblem if the flags contradict each other."""
        set_output_style(OutputStyle(self.quiet and not self.verbose, self.verbose, self.log_format == "json"))
        if self.quiet and self.verbose:
            raise UsageProblem(
                "--quiet and --verbose cannot be combined", remedy="Give only one of them", slug="conflicting-flags"
            )
        if self.verbose:
            _pass_on_logging()


@dataclass(frozen=True)
class RecordFlags:
    """The flag of commands that decompress records."""

    max_record_bytes: Annotated[int | None, o.run_flag(
        "--max-record-bytes SIZE",
        "Largest uncompressed record that is read into memory; larger records are refused, except those of at most 8m "
        "and those in batches of at most 32m. A task uses up to five times this size. Default: 64m.",
    )] = None

    def apply(self) -> None:
        """Set the limit for a record's size in this process and in the processes that it starts."""
        if self.max_record_bytes is not None:
            os.environ[MAX_RECORD_VARIABLE] = str(max(self.max_record_bytes, 1))


@dataclass(frozen=True)
class RowsOutput:
    """Rows on standard output only."""

    output: OutputFlag = "table"


@dataclass(frozen=True)
class RowsAndReport:
    """Rows on standard output, and a report."""

    report_file: ReportFile = None
    output: OutputFlag = "table"


@dataclass(frozen=True)
class RowsAndFiles:
    """Rows on standard output, a report, and files with the rows."""

    quarantine_report: QuarantineReport = None
    rows_file: RowsFile = None
    report_file: ReportFile = None
    output: OutputFlag = "table"


class _LoggingHandler(logging.Handler):
    """Prints messages of the standard library's logging in the format that the flags of the run require."""

    def emit(self, record: logging.LogRecord) -> None:
        level: Level = "warning" if record.levelno >= logging.WARNING else "detail"
        print_message(f"keytail: {record.getMessage()}", level, logger=record.name)


def _pass_on_logging() -> None:
    logger = logging.getLogger("keytail")
    logger.setLevel(logging.DEBUG)
    if not any(isinstance(item, _LoggingHandler) for item in logger.handlers):
        logger.addHandler(_LoggingHandler())
