"""Defines `Command`, the declaration of a command. Each command's folder has its declaration in `command.py`.

A declaration has the command's flags (the fields of its request), rows, statuses, exit status, next step and examples.
The command line, its help, completion, and the pages REFERENCE and ROWS are generated from the declarations.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from keytail.cli.output_options import RowsOutput
from keytail.cli.statuses import Status, declare
from keytail.extras import SPARK, Needs

# The flag with which examples name a broker.
BROKER = "--config /etc/kafka/server.properties"


@dataclass(frozen=True)
class Below:
    """Lines below a table. With `--output json` these lines are one message on standard error, with `figures` as its
    facts."""

    lines: tuple[str, ...] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)


def _nothing(rows: Sequence[Any], request: Any) -> Below:
    return Below()


def _empty(rows: Sequence[Any], request: Any) -> str:
    return ""


def extras_of_flags(request: Any) -> Needs:
    """Yield the extras that flags of many commands need: --master and --ledger."""
    has_master = getattr(request, "master", None) is not None
    if has_master:
        yield "--master", SPARK
    if getattr(getattr(request, "ledger", None), "path", None) is not None:
        yield "--ledger", request.ledger.extra(has_master or request.submitted)


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command. `run` names a function by a string; the function is imported when the command runs, so that --help
    is fast.

    The function `run` (`module:function`) is called with a request. The function returns rows, or prints its result
    itself and returns the exit status. With `reports_rows`, the function also has a parameter `on_row`, which it calls
    with each finished row, so that the report of a run that ends early has these rows.

    `show`, `below`, `next_step` and `exit_status` are called with the rows and the request, `extras`, `variant` and
    `log_dirs` with the request.
    """

    name: str
    help: str
    request: type[Any]  # a dataclass whose fields are the flags (flags.py)
    run: str
    extras: Callable[[Any], Needs] = extras_of_flags  # the extras needed, checked before `run` is imported
    only: Collection[str] = ()  # the fields of the request that are flags of this command; if empty, all fields
    examples: tuple[str, ...] = ()  # the most frequent examples first
    also_called: tuple[str, ...] = ()  # words for which this command is suggested
    rows: Mapping[str, type[Any]] = field(default_factory=dict)  # the row types by subject; ROWS.md has their fields
    statuses: Mapping[str, Status] = field(default_factory=dict)
    exits: Mapping[int, str] = field(default_factory=dict)  # exit statuses that have another meaning for this command
    show: Callable[[Sequence[Any], Any], None] | None = None  # prints the rows as a table
    below: Callable[[Sequence[Any], Any], Below] = _nothing  # returns facts that the rows do not contain
    next_step: Callable[[Sequence[Any], Any], str] = _empty
    shows_next_step: bool = False  # `show` prints the next step among the rows, where no flag can suppress it
    exit_status: Callable[[Sequence[Any], Any], int] | None = None
    output: type[Any] | None = RowsOutput  # a class of cli/output_options.py with the flags for the output
    reads_records: bool = False  # the command has --max-record-bytes
    reports_rows: bool = False
    variant: Callable[[Any], str] | None = None  # name of the command in the report; default: `name`
    # Directories in which output files must not be; default: the selected log dirs.
    log_dirs: Callable[[Any], Sequence[str]] | None = None

    def __post_init__(self) -> None:
        declare(self.statuses)
