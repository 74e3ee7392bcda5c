"""Decides when the next bundle of a compaction begins, and creates the rows of partitions that are not begun."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace

from keytail.compact.running.bundles import Bundle, Waiting
from keytail.compact.running.replacing import planned_row
from keytail.compact.running.state import Rows, Stop
from keytail.errors import ErrorText, in_words
from keytail.log.lock import LockLost
from keytail.run.rows import NOT_BEGUN, status_of


@dataclass
class Schedule:
    """The partitions that have not begun, and counts of the bundles that have begun. Thread-safe.

    `changed` is the lock of the run, which also protects the accounts of scratch space. `next_bundle` returns a bundle
    only if fewer than `most_cleaning` partitions are being cleaned.
    """

    waiting: Waiting
    rows: Rows
    stop: Stop
    changed: threading.Condition
    most_cleaning: int
    cleaning: int = 0  # partitions whose tasks are still running
    in_flight: int = 0  # bundles that have not ended
    begun: int = 0  # number of bundles that have begun

    def next_bundle(self) -> Bundle | None:
        """Wait for room, then return a bundle with its space reserved; None if no further bundle begins. Also creates
        the rows of the partitions that do not begin after the deadline, after the loss of a lock, or because they
        cannot be rewritten even when no other partition is.
        """
        with self.changed:
            while self.waiting and not self.stop.asked:
                if self.stop.lock_lost is not None:
                    self._refuse_waiting(self.stop.lock_lost)
                    break
                if self._is_past_deadline():
                    self._give_up_waiting()
                    break
                bundle = self.waiting.take() if self.cleaning < self.most_cleaning else None
                if bundle is not None:
                    self.cleaning += bundle.cleans
                    self.in_flight += 1
                    return bundle
                if self.in_flight == 0:
                    self._refuse_waiting()
                    break
                self.changed.wait(timeout=1.0)
        return None

    def next_prepared(self) -> Bundle | None:
        """Return a bundle of prepared partitions, or None if no such bundle can begin now. `next_bundle`, which other
        threads call, returns the other partitions.
        """
        with self.changed:
            if self.stop.asked or self.stop.lock_lost is not None or self._is_past_deadline():
                return None
            bundle = self.waiting.take_prepared()
            self.in_flight += bundle is not None
            return bundle

    def begin(self) -> int:
        """Count the bundle that begins, and return its number, from 1."""
        with self.changed:
            self.begun += 1
            return self.begun

    def cleaned(self, bundle: Bundle) -> None:
        """Note that the tasks of `bundle` have ended, so that the next bundle can begin while this one is installed."""
        with self.changed:
            self.cleaning -= bundle.cleans
            self.changed.notify_all()

    def release(self, bundle: Bundle) -> None:
        """Release the space of a bundle that has ended."""
        with self.changed:
            self.in_flight -= 1
            self.waiting.release(bundle)
            self.changed.notify_all()

    def _is_past_deadline(self) -> bool:
        return self.stop.deadline_s is not None and time.monotonic() >= self.stop.deadline_s

    def _refuse_waiting(self, lost: LockLost | None = None) -> None:
        for task in self.waiting.take_all():
            problem = lost or self.waiting.refusal(task)
            row = planned_row(task).unchanged(status_of(problem), in_words(problem))
            self.rows.add(task, replace(row, problem=problem))

    def _give_up_waiting(self) -> None:
        why = ErrorText("--deadline had passed. Run the same command again to compact this partition")
        for task in self.waiting.take_all():
            self.rows.add(task, planned_row(task).unchanged(NOT_BEGUN, why))
