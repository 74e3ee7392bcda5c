"""The driver of a compaction: runs the partitions in bundles, each on its own thread.

Tasks only write scratch files; the driver renames them and moves checkpoints (installing.py). A partition's checkpoint
advances only after its new segments are durable. The partitions in flight together stay within the limit of scratch
space. The caller holds the locks and has decided which partitions are cleaned.
"""

from __future__ import annotations

import contextlib
import os
import threading
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from keytail.cli.stopping import Stopped
from keytail.compact.running.bundles import (
    Bundle,
    BundleSize,
    Waiting,
    bundles_in_flight,
    commits_in_flight,
    space_limits,
)
from keytail.compact.running.destination import Destination
from keytail.compact.running.installing import Answer, Installer, TaskRunner
from keytail.compact.running.replacing import planned_row, remove_unneeded
from keytail.compact.running.schedule import Schedule
from keytail.compact.running.state import SILENT, Events, Rows, Stop
from keytail.compact.running.threads import with_threads
from keytail.compact.task import CleaningTask, NeedsFanOut
from keytail.errors import KeytailError
from keytail.run.ended import SparkEnded, await_signal, sweep
from keytail.run.engine import Engine, end_tasks
from keytail.run.rows import ResultRow
from keytail.run.storage import ScratchSpace
from keytail.run.tasks import Outcome
from keytail.threads import Threads, inheriting

if TYPE_CHECKING:
    from keytail.ledger.write import Ledger


_ROLLS_AT_ONCE = 16


class Compaction:
    """One run over many partitions, with its output in `destination`.

    Partitions run in bundles (bundles.py), with Spark in one job each. The groups of a bundle are installed, then its
    checkpoints move together, in one replacement of each log dir's checkpoint file. If a run is killed before the
    checkpoints of a bundle move, the next run cleans the partitions of that bundle again. Bundles of prepared
    partitions need no job, so more of them are in flight. A partition that does not fit into the scratch space is
    written in passes, alone on its file system: one job per pass, whose groups are installed before the next pass. The
    partition's checkpoint moves after the last pass.

    The ledger is written before a bundle begins and after the bundle's last commit; the partitions of a bundle fail
    unchanged if the ledger cannot be written before. `deadline_s`: see `Stop`.
    """

    def __init__(
        self,
        engine: Engine,
        tasks: Sequence[CleaningTask],
        space: ScratchSpace,
        destination: Destination,
        events: Events = SILENT,
        deadline_s: float | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self.tasks, self.destination, self.events = with_threads(tasks, engine), destination, events
        self.ledger = ledger
        self.stop = Stop(deadline_s)
        self.changed = threading.Condition()
        self.rows = Rows(events.on_row, self.changed)
        self.runner = TaskRunner(engine, destination, events, self.stop)
        self.installer = Installer(destination, space, self.changed, self.runner, events, self.stop)

    def run(self) -> list[ResultRow]:
        """Compact and install all partitions, move their checkpoints, and return their rows in the order of tasks."""
        engine = self.runner.engine
        parallel = engine.parallel_tasks
        size = BundleSize.of(len(self.tasks), parallel, jobs_cost=engine.session is not None)
        space = self.installer.space
        has_deadline = self.stop.deadline_s is not None
        by_gain = has_deadline or space_limits(self.tasks, parallel, space)
        keeper = self.destination.keeper
        waiting = Waiting(self.tasks, size, space, keeper, by_gain=by_gain, in_order=has_deadline)
        schedule = Schedule(waiting, self.rows, self.stop, self.changed, most_cleaning=2 * parallel)
        # Threads are not joined: if a signal interrupts a join, Python 3.11 marks a running thread as finished.
        ends: list[threading.Event] = []
        try:
            bundles = bundles_in_flight(len(self.tasks), parallel)
            for number in range(max(bundles, commits_in_flight(self.tasks))):
                ends.append(threading.Event())
                following = schedule.next_bundle if number < bundles else schedule.next_prepared
                work = inheriting(partial(self._work, schedule, following, ends[-1]))
                threading.Thread(target=work, name=f"bundles-{number}", daemon=True).start()
            for end in ends:
                end.wait()
            if self.stop.spark_ended is not None:
                await_signal()
                raise self.stop.spark_ended
        except BaseException:  # after a signal, the group that is being installed is finished, and nothing else begins
            self.stop.asked = True
            end_tasks(engine, lambda: not all(end.is_set() for end in ends))
            if self.stop.crash is not None:
                self.events.on_trace("".join(traceback.format_exception(self.stop.crash)))
            raise
        if self.stop.crash is not None:
            raise self.stop.crash
        return [self.rows.by_path[task.partition_path] for task in self.tasks]

    def run_or_leave(
        self, at_end: contextlib.ExitStack, rows_of_run: Callable[[Sequence[ResultRow]], list[ResultRow]]
    ) -> list[ResultRow]:
        """Return what `run` returns. If a signal or the end of Spark ends the run early, set the error's `rows` to
        `rows_of_run` of the tasks' rows, and remove the scratch files `at_end`.
        """
        try:
            return self.run()
        except (Stopped, SparkEnded) as stop:
            stop.rows = rows_of_run(self.rows.of_stopped_run(self.tasks))
            at_end.callback(self.remove_scratch)
            raise

    def remove_scratch(self) -> None:
        """Remove the scratch files that tasks of a stopped run have left; prepared files are retained."""
        left = [task for task in self.tasks if task.prepared is None and not self._is_prepared(task)]
        sweep(lambda: sum(remove_unneeded(self.destination.fs, task) for task in left))

    def _is_prepared(self, task: CleaningTask) -> bool:
        row = self.rows.by_path.get(task.partition_path)
        return row is not None and row.status == "prepared"

    def _work(self, schedule: Schedule, following: Callable[[], Bundle | None], end: threading.Event) -> None:
        try:
            while bundle := following():
                try:
                    self._run(schedule, bundle)
                finally:
                    schedule.release(bundle)
        except SparkEnded as ended:
            self.stop.because_spark_ended(ended)
        except BaseException as crash:  # raised again by run()
            self.stop.because_of_crash(crash)
        finally:
            end.set()

    def _run(self, schedule: Schedule, bundle: Bundle) -> None:
        number, tasks = schedule.begin(), bundle.tasks
        self.rows.begin(tasks)
        label = f"compact {os.path.basename(tasks[0].partition_path)}"
        label += f" and {len(tasks) - 1} more" if len(tasks) > 1 else ""
        try:
            problem = self._intend(number, tasks)
            begun = [(task, problem) for task in tasks] if problem else self._rolled(tasks)
            self.rows.begin(task for task, _ in begun)
            ready = [task for task, problem in begun if problem is None]
            outcomes = iter(self.runner.run(ready, label) if ready else ())
        finally:
            schedule.cleaned(bundle)
        answers = [(task, Outcome(None, problem) if problem else next(outcomes)) for task, problem in begun]
        self._finish(number, [item for item in answers if not isinstance(item[1].problem, NeedsFanOut)])
        for task, outcome in answers:
            if isinstance(outcome.problem, NeedsFanOut) and not self.stop.asked:
                self._finish(number, [(task, self.runner.in_place_of_one_task(task, outcome.problem))])

    def _rolled(self, tasks: Sequence[CleaningTask]) -> list[tuple[CleaningTask, KeytailError | None]]:
        """Roll the active segments that are due, concurrently, since syncs take most of the time; return each task with
        its problem, or with None."""
        if all(task.roll == "no" for task in tasks):
            return [(task, None) for task in tasks]
        with Threads(min(len(tasks), _ROLLS_AT_ONCE)) as pool:
            return list(pool.map(self.installer.rolled, tasks))

    def _intend(self, number: int, tasks: Sequence[CleaningTask]) -> KeytailError | None:
        try:
            if self.ledger is not None:
                self.ledger.intend(number, [planned_row(task) for task in tasks])
        except KeytailError as problem:
            return problem
        return None

    def _finish(self, number: int, answers: Sequence[Answer]) -> None:
        done = self.installer.finish(answers)
        if self.ledger is not None:
            self.ledger.conclude(number, [item.row for item in done], {item.row.name: item.made for item in done})
        for (task, _), item in zip(answers, done, strict=False):
            self.rows.add(task, item.row)
