"""One attempt of a task, on any engine (run/engine.py), and its outcome.

Any exception of a task is returned as a value, so one bad partition never ends the work on other partitions.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar

from keytail.errors import REPORT_IT, KeytailError, of_system, out_of_memory
from keytail.run.heap import keep_freed_memory
from keytail.run.watching import Channel, send_to
from keytail.values import to_bytes

P = TypeVar("P")
R = TypeVar("R")
# The number of failed attempts.
Times = Literal["once", "twice"]


@dataclass(frozen=True)
class Outcome(Generic[R]):
    """The result for one payload: a value or a problem, never both.

    `trace` is the traceback of an unexpected error, for standard error.
    """

    value: R | None
    problem: KeytailError | None
    host: str = ""
    start_ms: int = 0
    end_ms: int = 0
    trace: str = ""


def watched_attempt(function: Callable[[P, str], R], channel: Channel | None, payload: P, attempt: str) -> Outcome[R]:
    """Call `run_attempt` in a worker process, with progress sent to `channel`."""
    send_to(channel)
    return run_attempt(function, payload, attempt)


def run_attempt(function: Callable[[P, str], R], payload: P, attempt: str) -> Outcome[R]:
    """Run `function` here and return its result or error as an Outcome."""
    keep_freed_memory()
    start_ms = time.time_ns() // 1_000_000
    value, problem, trace = None, None, ""
    try:
        value = function(payload, attempt)
    except KeytailError as expected:
        problem = expected
    except (OSError, MemoryError) as error:  # an error of the machine, not of this program, needs no traceback
        problem = as_problem(error)
    except Exception as error:
        problem, trace = as_problem(error), traceback.format_exc()
    return Outcome(value, problem, os.uname().nodename, start_ms, time.time_ns() // 1_000_000, trace)


def answer_bytes(outcome: Outcome[Any]) -> bytes:
    """Return the outcome encoded for the driver; a value that cannot be encoded is replaced by a problem."""
    try:
        return to_bytes(outcome)
    except TypeError as error:
        return to_bytes(replace(outcome, value=None, problem=as_problem(error), trace=traceback.format_exc()))


def as_problem(error: Exception) -> KeytailError:
    """Return a KeytailError for an error of the system or of the program itself."""
    if isinstance(error, OSError):
        return of_system(error, f" on host {os.uname().nodename}")
    if isinstance(error, MemoryError):
        return out_of_memory()
    return KeytailError(
        f"internal error: {type(error).__name__}: {error}", remedy=REPORT_IT, slug="internal-error"
    )


def interrupted() -> KeytailError:
    """Return the problem of a task that was ended with its run."""
    return KeytailError("interrupted", slug="run-interrupted")


def killed(times: Times) -> KeytailError:
    """Return the problem of a task whose worker died each time that it ran."""
    return KeytailError(
        f"the worker process of this partition was killed {times}",
        remedy="Check the kernel's log: the usual cause is a lack of memory. Lower --map-memory, or run fewer tasks "
        "at a time with --master 'local[1]'",
        slug="worker-killed",
    )
