"""Chooses the engine of a run: Spark or, for small work, child processes.

The tasks and the handling of their answers are the same for both engines. Spark is used if spark-submit or `--master`
requests it, or if the work requires it. Spark is also used for long work (run/rates.py) if it is installed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from keytail.extras import SPARK
from keytail.run.engine import Engine
from keytail.run.kernels import compile_kernels, is_on_this_host
from keytail.run.memory import cores
from keytail.run.processes import Processes
from keytail.run.rates import is_worth_spark, run_seconds
from keytail.run.spark.session import session_of_run
from keytail.run.watching import DriverAddress


class Reporter(Protocol):
    """Reports a run's progress to the user (cli/progress.py)."""

    def note(self, text: str, /) -> None: ...

    def watch(self, driver: DriverAddress, /) -> None: ...


def starts_spark(each_s: Sequence[float], *, is_asked: bool) -> bool:
    """Return whether a run on this host starts Spark: if Spark is requested or required (`is_asked`), or if the work
    takes long and Spark is installed."""
    return is_asked or (is_worth_spark(each_s, cores()) and not SPARK.missing())


def workers_of_run(
    run: contextlib.ExitStack,
    reporter: Reporter,
    master: str | None,
    each_s: Sequence[float],
    *,
    kernels: str,
    submitted: bool = False,
    needs_spark: bool = False,
    extra: Callable[[], Mapping[str, str]] | None = None,
) -> Engine:
    """Return the engine of a run; it is closed when the stack `run` is closed. `each_s` has the expected seconds of
    each task. `extra` returns additional settings for a session that is started here.

    The kernels of the command `kernels` are compiled before the tasks: at once if keytail itself starts the engine on
    this host, otherwise by the first tasks of each host.
    """
    if not submitted and is_on_this_host(master):
        compile_kernels([kernels], reporter.note)
    if not starts_spark(each_s, is_asked=submitted or master is not None or needs_spark):
        seconds = run_seconds(each_s, cores())
        expected = f"about {seconds:.0f} s of work" if seconds >= 1 else "a short run"
        lacks = ", which is not installed" if is_worth_spark(each_s, cores()) else ""
        reporter.note(f"running without Spark{lacks}: {expected}")
        engine: Engine = run.enter_context(Processes(cores()))
    else:
        if not submitted:
            reporter.note("starting Spark")
        engine = session_of_run(run, master, submitted=submitted, extra=extra and extra(), kernels=kernels)
    reporter.watch(engine.driver_address)
    return engine
