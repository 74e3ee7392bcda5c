"""Who does the tasks of a run: Spark, or, where the work is small, processes beside this one.

The tasks are the same functions, and what is done with their answers is the same code. Spark is used where it has been
asked for, by spark-submit or `--master`, and where the work is long or of a kind that needs it
(run/rates.py).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from keytail.run.processes import Processes
from keytail.run.rates import is_worth_spark, run_seconds
from keytail.run.session import session_of_run
from keytail.run.watching import DriverAddress, address_of_driver


class Reporter(Protocol):
    """What a person hears of a run (cli/progress.py)."""

    def note(self, text: str, /) -> None: ...

    def watch(self, driver: DriverAddress, /) -> None: ...


def cores() -> int:
    """How many tasks run at a time on this host, as with Spark's `local[*]`: the memory of each depends on it."""
    return len(os.sched_getaffinity(0))


def workers_of_run(
    run: contextlib.ExitStack,
    reporter: Reporter,
    master: str | None,
    each_s: Sequence[float],
    *,
    submitted: bool = False,
    needs_spark: bool = False,
    extra: Mapping[str, str] | None = None,
) -> Any:
    """A session, or Processes in its place, that ends with `run`; `each_s` is what each task is expected to take,
    `extra` are settings of a session that is started."""
    if not submitted and master is None and not needs_spark and not is_worth_spark(each_s, cores()):
        seconds = run_seconds(each_s, cores())
        reporter.note(f"about {seconds:.0f} s of work, without Spark" if seconds >= 1 else "a short run, without Spark")
        workers: Any = run.enter_context(Processes(cores()))
    else:
        if not submitted:
            reporter.note("starting Spark")
        workers = session_of_run(run, master, submitted=submitted, extra=extra)
    reporter.watch(address_of_driver(workers))
    return workers
