"""Decides when the bundles of a run begin: when there is a thread, a task and scratch space for them."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace

from keytail.compact.bundles import Bundle, Waiting
from keytail.compact.replacing import planned_row
from keytail.compact.run_state import Rows, Stop
from keytail.log.lock import LockLost
from keytail.run.rows import status_of


@dataclass
class Schedule:
    """The partitions that have not begun, and the number of those that have. Thread-safe.

    `changed` is the lock of the run, which also protects its scratch space. At most `most_cleaning` partitions are
    cleaned at a time, or those of one bundle more.
    """

    waiting: Waiting
    rows: Rows
    stop: Stop
    changed: threading.Condition
    most_cleaning: int
    cleaning: int = 0  # partitions whose tasks have not returned
    in_flight: int = 0  # bundles that have not ended
    begun: int = 0  # bundles

    def next_bundle(self) -> Bundle | None:
        """Wait for room, then return a bundle with its space reserved, or None if nothing is left to begin.

        Partitions that cannot be rewritten even alone get their rows here.
        """
        with self.changed:
            while self.waiting and not self.stop.asked:
                if self.stop.lock_lost is not None:
                    self._refuse_waiting(self.stop.lock_lost)
                    break
                if self.stop.deadline_s is not None and time.monotonic() >= self.stop.deadline_s:
                    self._give_up_waiting()
                    break
                bundle = self.waiting.take() if self.cleaning < self.most_cleaning else None
                if bundle is not None:
                    self.cleaning += len(bundle.tasks)
                    self.in_flight += 1
                    return bundle
                if self.in_flight == 0:
                    self._refuse_waiting()
                    break
                self.changed.wait(timeout=1.0)
        return None

    def begin(self) -> int:
        """Return the number of a bundle that begins, from 1."""
        with self.changed:
            self.begun += 1
            return self.begun

    def cleaned(self, bundle: Bundle) -> None:
        """Let the next bundle begin, while this one is installed."""
        with self.changed:
            self.cleaning -= len(bundle.tasks)
            self.changed.notify_all()

    def release(self, bundle: Bundle) -> None:
        """Release the space of a bundle that has ended."""
        with self.changed:
            self.in_flight -= 1
            self.waiting.release(bundle)
            self.changed.notify_all()

    def _refuse_waiting(self, lost: LockLost | None = None) -> None:
        for task in self.waiting.take_all():
            problem = lost or self.waiting.refusal(task)
            row = planned_row(task).unchanged(status_of(problem), str(problem))
            self.rows.add(task, replace(row, problem=problem))

    def _give_up_waiting(self) -> None:
        for task in self.waiting.take_all():
            self.rows.add(task, planned_row(task).unchanged("skipped", "not started: --deadline had passed"))
