"""Spark may end beneath a run: its JVM is killed or told to stop, or somebody stops its session.

What the driver then asks of Spark fails, with one of many errors, at any call. All of them become one, SparkEnded:
where a job is lost (run/tasks.py), and for any other call where the session is let go of (run/session.py).
"""

from __future__ import annotations

import logging
import os
import socketserver
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from keytail.errors import KeytailError

# A JVM that is told to stop first stops its session, which a driver notices, and only then ends.
_LONGEST_END_S = 20.0
# What a JVM writes while it runs is passed on so much later: by then it is known whether a stop has begun.
HELD_BACK_S = 0.2
_LONGEST_SWEEP_S = 3.0


class SparkEnded(KeytailError):
    """Spark's JVM or session has ended beneath the run. `rows` are what the run has to say for itself, where it got
    so far."""

    def __init__(self) -> None:
        super().__init__(
            "Spark has ended beneath the run: its JVM was killed, told to stop or out of memory, or its session was "
            "stopped"
        )
        self.rows: Sequence[Any] | None = None


def has_ended(spark: Any) -> bool:
    """Whether this session can run nothing any more."""
    try:
        return bool(spark.sparkContext._jsc.sc().isStopped())
    except Exception:  # nobody answers
        return True


def raise_if_ended(spark: Any, problem: BaseException) -> None:
    """SparkEnded in place of `problem`, which some call of Spark raised, where that is the reason."""
    if has_ended(spark):
        time.sleep(2 * HELD_BACK_S)  # its last words come first
        raise SparkEnded from problem


def is_of_spark(problem: BaseException | None) -> bool:
    """Whether it, or what it was raised from, is an error of pyspark's or py4j's."""
    while problem is not None:
        if type(problem).__module__.partition(".")[0] in ("py4j", "pyspark"):
            return True
        problem = problem.__cause__ or problem.__context__
    return False


def signal_of(problem: BaseException | None) -> KeyboardInterrupt | None:
    """The signal that `problem` came of: where one interrupts a call, what the client then asks of Spark can fail."""
    while problem is not None and not isinstance(problem, KeyboardInterrupt):
        problem = problem.__cause__ or problem.__context__
    return problem


def await_signal() -> None:
    """Under spark-submit the end of its JVM also comes as a signal (cli/stopping.py), soon after what fails by it.

    The signal says who ended the run: in the main thread it is raised in here. Returns where none comes.
    """
    if "PYSPARK_GATEWAY_PORT" not in os.environ or threading.current_thread() is not threading.main_thread():
        return
    last_s = time.monotonic() + _LONGEST_END_S
    while time.monotonic() < last_s:
        time.sleep(0.05)


def text_of(problem: BaseException) -> str:
    """Its text. That of a Java exception is asked of the JVM, which may have ended."""
    try:
        return str(problem)
    except Exception:
        return type(problem).__name__


def sweep(remove: Callable[[], int]) -> None:
    """`remove` scratch, which says how much there was, until nothing new comes: a worker may outlive its JVM for a
    moment."""
    quiet, last_s = 0, time.monotonic() + _LONGEST_SWEEP_S
    while quiet < 2 and time.monotonic() < last_s:
        quiet = 0 if remove() else quiet + 1
        time.sleep(0.1)


def quiet_py4j() -> None:
    """Keep py4j and pyspark from printing a traceback of their own for each connection that the JVM's end breaks.

    What fails by it is raised all the same.
    """
    import pyspark.accumulators as of_accumulators  # noqa: PLC0415 (0.2 s that `plan` and `--help` do not pay)

    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    root = logging.getLogger()  # some of it is logged there
    if _is_not_of_py4j not in root.filters:
        root.addFilter(_is_not_of_py4j)
    for server in (of_accumulators.AccumulatorTCPServer, of_accumulators.AccumulatorUnixServer):
        server.handle_error = _say_nothing


def _is_not_of_py4j(record: logging.LogRecord) -> bool:
    return os.path.basename(os.path.dirname(record.pathname)) != "py4j"


def _say_nothing(server: socketserver.BaseServer, request: Any, client_address: Any) -> None:
    """In place of a traceback on standard error."""
