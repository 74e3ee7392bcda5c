"""Runs one attempt of a task on any engine (run/engine.py), and returns its outcome.

Any exception of a task is returned as a value, so an error of one partition never ends the work on other partitions.
Memory that a task frees is kept in its process, so that the next chunk reuses the buffers of the last one. If the C
library returned large blocks to the system, as by default, each page of the next block would cause a page fault, which
takes longer than filling the page.
"""

from __future__ import annotations

import ctypes
import functools
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar

from keytail.errors import EXPLAINED, REPORT_IT, KeytailError, of_system, out_of_memory
from keytail.run.watching import Channel, send_to
from keytail.values import to_bytes

P = TypeVar("P")
R = TypeVar("R")
# The number of attempts that have failed.
Times = Literal["once", "twice"]


@dataclass(frozen=True)
class Outcome(Generic[R]):
    """The result of a task for one payload: a value or a problem, never both.

    `host` is the host of the task. `trace` is the traceback of an unexpected error, which the driver prints.
    """

    value: R | None
    problem: KeytailError | None
    host: str = ""
    start_ms: int = 0
    end_ms: int = 0
    trace: str = ""


def watched_attempt(function: Callable[[P, str], R], channel: Channel | None, payload: P, attempt: str) -> Outcome[R]:
    """Return the outcome of `run_attempt` in this worker process; the progress is sent to `channel`."""
    send_to(channel)
    return run_attempt(function, payload, attempt)


def run_attempt(function: Callable[[P, str], R], payload: P, attempt: str) -> Outcome[R]:
    """Call `function` in this process, and return its result or error as an Outcome."""
    keep_freed_memory()
    start_ms = time.time_ns() // 1_000_000
    value, problem, trace = None, None, ""
    try:
        value = function(payload, attempt)
    except EXPLAINED as error:  # only unexpected errors need a traceback
        problem = as_problem(error)
    except Exception as error:
        problem, trace = as_problem(error), traceback.format_exc()
    return Outcome(value, problem, os.uname().nodename, start_ms, time.time_ns() // 1_000_000, trace)


def answer_bytes(outcome: Outcome[Any]) -> bytes:
    """Return the outcome as bytes for the driver. A value that cannot be encoded is replaced by a problem."""
    try:
        return to_bytes(outcome)
    except TypeError as error:
        return to_bytes(replace(outcome, value=None, problem=as_problem(error), trace=traceback.format_exc()))


def as_problem(error: Exception) -> KeytailError:
    """Return the error itself if it is a KeytailError, otherwise a KeytailError that describes the error."""
    if isinstance(error, KeytailError):
        return error
    if isinstance(error, OSError):
        return of_system(error, f" on host {os.uname().nodename}")
    if isinstance(error, MemoryError):
        return out_of_memory()
    return KeytailError(
        f"internal error: {type(error).__name__}: {error}", remedy=REPORT_IT, slug="internal-error"
    )


def interrupted() -> KeytailError:
    """Return the problem of a task that was ended because its run was interrupted."""
    return KeytailError("interrupted", slug="run-interrupted")


def killed(times: Times) -> KeytailError:
    """Return the problem of a task whose worker process died in each attempt."""
    return KeytailError(
        f"the worker process of this partition was killed {times}",
        remedy="Check the kernel's log: the usual cause is a lack of memory. Lower --map-memory, or run fewer tasks "
        "at a time with --master 'local[1]'",
        slug="worker-killed",
    )


_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # parameters of glibc's mallopt
_LARGEST_KEPT_BYTES = 32 << 20  # size of the largest blocks that are reused; glibc accepts no larger value
_KEPT_BYTES = 256 << 20  # maximum bytes of free memory that a process keeps


@functools.cache
def keep_freed_memory() -> bool:
    """Let this process reuse freed blocks of up to 32 MiB and keep up to 256 MiB of free memory; return whether it can.

    If the C library is not glibc, no setting is changed, and the result is False.
    """
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018 (in other libraries, mallopt has another meaning)
        mallopt = library.mallopt
    except (AttributeError, OSError, TypeError):
        return False
    # All threads share one heap: a short-lived thread with its own heap would return its freed memory to the system.
    settings = ((_ARENA_MAX, 1), (_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES), (_TRIM_THRESHOLD, _KEPT_BYTES))
    return sum(mallopt(parameter, value) for parameter, value in settings) == len(settings)
