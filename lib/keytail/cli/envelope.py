"""Defines the object that `--output json-v1` prints: the rows of a command with the facts about its run, or its error.

The schemas beside this module (`schemas/`) are generated from this declaration and from the rows of the commands. A
new field does not change the version; removing a field, or changing its meaning, would need a new format, `json-v2`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Annotated, Any, Literal

from keytail import __version__
from keytail.cli.rows import write_json
from keytail.errors import Explained, UsageProblem, explained


@dataclass(frozen=True)
class EnvelopeError:
    """The error that ended a run."""

    slug: Annotated[str | None, "the error's name for programs; `null` if a signal ended the run"]
    message: Annotated[str, "what is wrong, and where"]
    remedy: Annotated[str, "what to do next, or empty"]


@dataclass(frozen=True)
class Envelope:
    """The object that is printed for one run."""

    version: Annotated[Literal[1], "version of this object"]
    keytail: Annotated[str, "version of keytail"]
    command: Annotated[str, "name of the command"]
    run_id: Annotated[
        str | None,
        "id of a run that changes files, as in the ledger; the part after `-` is its id for `undo`. With `--prepare`, "
        "the id that `prepared` lists. `null` for dry runs, and for commands whose runs have no id",
    ]
    start_ms: Annotated[int, "when the command began"]
    end_ms: Annotated[int, "when this object was printed"]
    exit_status: Annotated[int, "exit status of the process"]
    error: Annotated[EnvelopeError | None, "the error or signal that ended the run; errors of partitions are in `rows`"]
    rows: Annotated[tuple[dict[str, Any], ...], "the rows of `--output json`; empty if none were known"]


def error_of(problem: Explained) -> EnvelopeError:
    known = explained(problem)
    return EnvelopeError(known.slug, known.what_and_where, known.remedy or "")


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def print_envelope(
    command: str,
    run_id: str | None,
    start_ms: int,
    exit_status: int,
    rows: Sequence[Any],
    error: EnvelopeError | None = None,
) -> None:
    """Print the object of `--output json-v1` on standard output."""
    head = Envelope(1, __version__, command, run_id, start_ms, now_ms(), exit_status, error, ())
    write_json(rows, sys.stdout, {item.name: getattr(head, item.name) for item in fields(head) if item.name != "rows"})


def print_syntax_error(command: str, message: str) -> None:
    """Print the object for a command line that the parser of flags has refused with the message."""
    problem = UsageProblem(
        f"the command line is invalid: {message}",
        remedy=f"Run `keytail {command} -h`, which lists the flags",
        slug="invalid-command-line",
    )
    print_envelope(command, None, now_ms(), 2, (), error_of(problem))


def last_output(arguments: Sequence[str]) -> str:
    """Return the value of the last --output among arguments that may be invalid; "" without one."""
    found = ""
    for argument, following in pairwise([*arguments, ""]):
        flag, _, value = argument.partition("=")
        if flag == "--output":
            found = value or following
    return found
