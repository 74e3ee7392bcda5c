"""The steps that an executing run takes in place (execution.py) and out of place (out_of_place/driver.py) alike."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from keytail.cli.configuration import Configuration
from keytail.cli.metadata import with_metadata
from keytail.cli.progress import Reporter
from keytail.cli.selection import Chosen, choose
from keytail.compact.command import Request
from keytail.compact.expectation import Expected
from keytail.log.fs import FileSystem
from keytail.log.lock import hold
from keytail.run.engine import Engine
from keytail.run.session import session_of_run
from keytail.run.storage import refuse_shared_storage
from keytail.run.workers import workers_of_run


@dataclass
class Steps:
    """The steps of one run, in the order of its methods. `run` holds its session and its locks until its end; `at_end`,
    set by `lock`, has what is done then: with the locks held, but without the session that the run has started.
    """

    request: Request
    fs: FileSystem
    run: contextlib.ExitStack
    at_end: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    engine: Engine | None = None
    started_s: float = field(default_factory=time.monotonic)

    def submitted_session(self) -> Engine | None:
        """Return the engine of spark-submit's session, if there is one."""
        if self.request.submitted:
            self.engine = session_of_run(self.run, self.request.master, submitted=True)
        return self.engine

    def lock(self, places: Sequence[str]) -> None:
        """Take the locks of these directories, if any."""
        if places:
            if not self.request.shared_storage:
                refuse_shared_storage(self.fs, places)
            self.run.enter_context(hold(places, self.fs))
        self.run.enter_context(self.at_end)

    def choose(self, now_ms: int) -> tuple[Chosen, Configuration]:
        """Return the partitions to decide for, and their settings."""
        chosen = choose(self.fs, self.request.choice)
        return chosen, with_metadata(self.fs, self.request.choice.log_dirs, self.request.configuration, now_ms)

    def start(
        self,
        reporter: Reporter,
        expected: Iterable[Expected | None],
        *,
        copies_s: Sequence[float] = (),
        needs_spark: bool = False,
        extra: Mapping[str, str] | None = None,
    ) -> Engine:
        """Return the engine: that of the submitted session, else Spark, or local processes where they are faster.

        `copies_s` is the expected duration of each copy in seconds, `extra` are settings for a session.
        """
        if self.engine is not None:
            reporter.watch(self.engine.driver_address)
            return self.engine
        known = [one for one in expected if one is not None]
        may_fan_out = self.request.fan_out != "never" and any(one.way == "maybe fan-out" for one in known)
        return workers_of_run(
            self.run,
            reporter,
            self.request.master,
            [*(one.seconds for one in known), *copies_s],
            needs_spark=needs_spark or may_fan_out or self.request.fan_out == "always",
            extra=extra,
        )

    @property
    def deadline_s(self) -> float | None:
        """The time.monotonic() of --deadline."""
        minutes = self.request.deadline_minutes
        return None if minutes is None else self.started_s + minutes * 60
