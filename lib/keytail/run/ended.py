"""Handles the end of Spark during a run: Spark's JVM is killed or receives a signal, or the session is stopped.

After the end of Spark, the driver's calls of Spark fail with many different errors, which are replaced by SparkEnded:
errors of lost jobs in run/spark/engine.py, and errors of other calls in run/spark/session.py, before the session is
stopped.
"""

from __future__ import annotations

import logging
import os
import socketserver
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from keytail.errors import KeytailError

# Maximum wait for the signal in seconds. A JVM that receives a signal first stops its session, which the driver
# notices, and ends only later.
_LONGEST_END_S = 20.0
# Seconds by which the JVM's output is delayed: after this time it is known whether a stop of the run has begun.
HELD_BACK_S = 0.2
_LONGEST_SWEEP_S = 3.0
_PY4J_CALL = "An error occurred while calling "


class SparkEnded(KeytailError):
    """The error that Spark's JVM or session ended during the run. `rows` are the result rows so far; None if the run
    had no rows yet."""

    default_slug = "spark-ended"

    def __init__(self) -> None:
        super().__init__(
            "Spark ended during the run: its JVM was killed, was stopped or ran out of memory, or its session was "
            "stopped"
        )
        self.rows: Sequence[Any] | None = None


class _Engine(Protocol):
    def has_ended(self) -> bool: ...


def raise_if_ended(engine: _Engine, problem: BaseException) -> None:
    """Raise SparkEnded if Spark has ended. `problem` is the error that a call of Spark raised."""
    if engine.has_ended():
        time.sleep(2 * HELD_BACK_S)  # lets the JVM's last output be printed first
        raise SparkEnded from problem


def is_of_spark(problem: BaseException | None) -> bool:
    """Return whether the error, or an error that caused it, is of a class of pyspark or py4j."""
    while problem is not None:
        if type(problem).__module__.partition(".")[0] in ("py4j", "pyspark"):
            return True
        problem = problem.__cause__ or problem.__context__
    return False


def signal_of(problem: BaseException | None) -> KeyboardInterrupt | None:
    """Return the KeyboardInterrupt that `problem` is or that caused it; None if there is none. After a signal has
    interrupted a call of Spark, later calls can fail with other errors."""
    while problem is not None and not isinstance(problem, KeyboardInterrupt):
        problem = problem.__cause__ or problem.__context__
    return problem


def await_signal() -> None:
    """Wait for the signal that follows the end of spark-submit's JVM (cli/stopping.py).

    The end of the JVM causes failures, and the signal, which shows what ended the run, arrives soon after them. The
    signal is raised here, in the main thread. Returns if no signal arrives within 20 s; at once in another thread, or
    without spark-submit.
    """
    if "PYSPARK_GATEWAY_PORT" not in os.environ or threading.current_thread() is not threading.main_thread():
        return
    last_s = time.monotonic() + _LONGEST_END_S
    while time.monotonic() < last_s:
        time.sleep(0.05)


def text_of(problem: BaseException) -> str:
    """Return the error's text, or the name of its class if the text is lost: the text of a Java exception is requested
    from the JVM, which may have ended."""
    try:
        return str(problem)
    except Exception:
        return type(problem).__name__


def first_line(problem: BaseException) -> str:
    """Return the first informative line of the error's text, or the name of its class if there is none. py4j's first
    line has only the name of the call that failed; the Java exception follows after a colon."""
    lines = [line for line in text_of(problem).strip().splitlines() if not line.startswith(_PY4J_CALL)]
    return lines[0].removeprefix(": ").strip() if lines else type(problem).__name__


def sweep(remove: Callable[[], int]) -> None:
    """Call `remove`, which removes scratch files and returns their number, until it has removed none twice in
    succession, for 3 s at most. A worker may outlive its JVM for a moment and write more files."""
    quiet, last_s = 0, time.monotonic() + _LONGEST_SWEEP_S
    while quiet < 2 and time.monotonic() < last_s:
        quiet = 0 if remove() else quiet + 1
        time.sleep(0.1)


def silence_py4j() -> None:
    """Prevent py4j and pyspark from printing a traceback for each connection that the JVM's end breaks.

    The driver's calls over broken connections still raise errors.
    """
    import pyspark.accumulators as of_accumulators  # noqa: PLC0415 (0.2 s that `plan` and `--help` do not pay)

    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    root = logging.getLogger()  # some tracebacks are logged by the root logger
    if _is_not_of_py4j not in root.filters:
        root.addFilter(_is_not_of_py4j)
    for server in (of_accumulators.AccumulatorTCPServer, of_accumulators.AccumulatorUnixServer):
        server.handle_error = _ignore


def _is_not_of_py4j(record: logging.LogRecord) -> bool:
    return os.path.basename(os.path.dirname(record.pathname)) != "py4j"


def _ignore(server: socketserver.BaseServer, request: Any, client_address: Any) -> None:
    """Handle an error of a server without printing a traceback."""
