"""Defines the object that `--output json-v1` prints: the rows of a command with the facts about its run, or its error.

The schemas beside this module (`schemas/`) are generated from this declaration and from the rows of the commands. A
new field does not change the version; removing a field, or changing its meaning, would need a new format, `json-v2`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from keytail import __version__
from keytail.cli.rows import write_json
from keytail.errors import KeytailError, explained


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
    exit_status: Annotated[int, "exit status of the process"]
    error: Annotated[EnvelopeError | None, "the error or signal that ended the run; errors of partitions are in `rows`"]
    rows: Annotated[tuple[dict[str, Any], ...], "the rows of `--output json`; empty if none were known"]


def error_of(problem: KeytailError | OSError | MemoryError) -> EnvelopeError:
    known = explained(problem)
    return EnvelopeError(known.slug, known.what_and_where, known.remedy or "")


def print_envelope(
    command: str, run_id: str | None, exit_status: int, rows: Sequence[Any], error: EnvelopeError | None = None
) -> None:
    """Print the object of `--output json-v1` on standard output."""
    head = Envelope(1, __version__, command, run_id, exit_status, error, ())
    write_json(rows, sys.stdout, {item.name: getattr(head, item.name) for item in fields(head) if item.name != "rows"})
