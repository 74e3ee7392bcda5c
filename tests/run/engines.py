"""An engine for tests, which runs tasks in the process of the test, on the driver's thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from keytail.run.engine import ThisProcess
from keytail.run.tasks import Outcome


class LikeSpark(ThisProcess):
    """Runs tasks in this process, but is treated like Spark with that many cores. `run` replaces the function that runs
    a bundle.
    """

    session = object()
    has_workers = True

    def __init__(self, cores: int = 2, run: Callable[..., list[Outcome[Any]]] | None = None) -> None:
        super().__init__()
        self.concurrent_tasks = self.parallel_tasks = cores
        self._run = run

    def run_bundle(self, payloads: Sequence[Any], function: Any, **more: Any) -> list[Outcome[Any]]:
        return (self._run or super().run_bundle)(payloads, function, **more)
