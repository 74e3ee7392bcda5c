"""Defines the protocol of engines, which run tasks: Spark (run/spark/engine.py), child processes (run/processes.py), or
this process.

The code of commands uses only the protocol `Engine`. Code that needs Spark's DataFrames is an exception: it takes the
session from the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from keytail.run.tasks import Outcome, run_attempt
from keytail.run.watching import HERE, DriverAddress

P = TypeVar("P")
R = TypeVar("R")

# Maximum wait for tasks at a stop, in seconds. A replacement in progress ends after milliseconds, and a disk that does
# not respond must not prevent the end of a run.
_LONGEST_STOP_S = 20.0


class Engine(Protocol):
    """Runs tasks. Any thread may call the methods."""

    @property
    def session(self) -> Any:
        """The Spark session; None if the engine is not Spark."""

    @property
    def has_workers(self) -> bool:
        """Whether tasks run in other processes, so that the driver can work at the same time."""

    @property
    def concurrent_tasks(self) -> int:
        """The number of tasks that run at a time on one host or, on a Spark cluster, in one executor."""

    @property
    def parallel_tasks(self) -> int:
        """The number of tasks that run at a time on all hosts together; an estimate if the engine does not know it."""

    @property
    def driver_address(self) -> DriverAddress:
        """The address at which tasks reach the driver."""

    def run_bundle(
        self,
        payloads: Sequence[P],
        function: Callable[[P, str], R],
        *,
        name: str = "keytail",
        stopped: Callable[[], bool] = lambda: False,
        before_again: Callable[[P], object] = lambda payload: None,
    ) -> list[Outcome[R]]:
        """Run `function(payload, attempt)` for each payload; return outcomes in the order of the payloads.

        `attempt` differs between any two attempts of this engine, so files of a run that are named by it never collide.
        `function` must be picklable, for example a module-level function of an installed package; it runs on hosts
        where the files are mounted. If a worker dies, its payload (on Spark, all payloads of the job) is run once more;
        `before_again(payload)` is called first, because the first attempt may have left scratch files. After
        `stopped()` returns True, a lost payload is not run again, and its problem is that of `interrupted`. `name` is
        the name of the job. Raises SparkEnded if no more jobs can be run.
        """

    def cancel(self) -> None:
        """End the running tasks, if the engine can do so. Raises no error if the engine has ended."""

    def has_ended(self) -> bool:
        """Return whether the engine can no longer run tasks, although this program has not ended it."""


class ThisProcess:
    """Runs tasks in the thread that calls it, one after the other."""

    session: Any = None
    has_workers = False
    concurrent_tasks = parallel_tasks = 1
    driver_address = HERE

    def __init__(self) -> None:
        self._numbers = iter(range(2**63))

    def run_bundle(self, payloads: Sequence[P], function: Callable[[P, str], R], **_: object) -> list[Outcome[R]]:
        return [run_attempt(function, payload, f"h{next(self._numbers)}") for payload in payloads]

    def cancel(self) -> None:
        """Do nothing: the caller waits until the running task ends."""

    def has_ended(self) -> bool:
        return False


def end_tasks(engine: Engine, is_one_alive: Callable[[], bool]) -> None:
    """Cancel tasks until no thread waits for a task, as `is_one_alive()` reports, for 20 s at most. The waiting threads
    must not start other tasks."""
    last_s = time.monotonic() + _LONGEST_STOP_S
    engine.cancel()
    while is_one_alive() and time.monotonic() < last_s:
        engine.cancel()
        time.sleep(0.1)
