"""Runs the tasks of a compaction, installs their output, and moves checkpoints."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from keytail.compact.cleaner import next_pass
from keytail.compact.fan_out.on_spark import fan_out_on_spark
from keytail.compact.out_of_place.partition import uncleaned
from keytail.compact.running.bundles import for_next_pass
from keytail.compact.running.destination import Destination, Installation
from keytail.compact.running.replacing import (
    Interrupted,
    PastDeadline,
    planned_row,
    remove_unneeded,
    value_of,
    written,
)
from keytail.compact.running.state import Events, Stop
from keytail.compact.task import CleaningResult, CleaningTask, NeedsFanOut
from keytail.errors import EXPLAINED, Explained, KeytailError, Refused, in_words
from keytail.log.append.roll_closed import roll
from keytail.log.lock import LockLost
from keytail.run.ended import SparkEnded
from keytail.run.engine import Engine
from keytail.run.hosts import refuse_unseen
from keytail.run.storage import ScratchSpace
from keytail.run.tasks import Outcome, as_problem

Answer = tuple[CleaningTask, Outcome[CleaningResult]]


@dataclass
class TaskRunner:
    """Runs cleaning tasks, which only write scratch files. Any thread may call the methods."""

    engine: Engine
    destination: Destination
    events: Events
    stop: Stop

    def run(self, bundle: Sequence[CleaningTask], name: str) -> list[Outcome[CleaningResult]]:
        """Return the outcomes of the tasks, in their order. `name` is the name of the job."""
        if bundle[0].prepared is not None:  # then all partitions of the bundle are prepared
            return [Outcome(task.prepared.result if task.prepared else None, None) for task in bundle]
        if bundle[0].fan_out == "always" or bundle[0].fanned_out is not None:  # then the bundle has one task
            return [self._fan_out(task) for task in bundle]
        return self.engine.run_bundle(
            bundle,
            self.destination.clean,
            name=name,
            stopped=self.stop.is_asked,
            before_again=lambda task: remove_unneeded(self.destination.fs, task, again=True),
        )

    def in_place_of_one_task(self, task: CleaningTask, reason: NeedsFanOut) -> Outcome[CleaningResult]:
        """Return the outcome of compacting a partition whose keys do not fit into the memory of one task: by a fan-out
        if the engine supports fan-outs, else by one task as far as the keys fit.
        """
        name = planned_row(task).name
        if self.engine.session is None:
            with_spark = "with --master, or --fan-out always, Spark compacts all of it"
            self.events.on_note(f"{name}: {reason.what}: it is compacted as far as they fit; {with_spark}")
            [outcome] = self.run([replace(task, fan_out="never")], f"compact {name}, a part")
            return outcome
        self.events.on_note(f"{name}: {reason.what}: all tasks share this partition (fan-out)")
        return self._fan_out(task)

    def _fan_out(self, task: CleaningTask) -> Outcome[CleaningResult]:
        outcome = fan_out_on_spark(
            self.engine,
            task,
            shared_storage=self.destination.shared_storage,
            on_trace=self.events.on_trace,
            stopped=self.stop.is_asked,
        )
        if task.out_of_place is not None and isinstance(outcome.problem, Refused):  # it is copied, as with one task
            return replace(outcome, value=replace(uncleaned(task), refusal=in_words(outcome.problem)), problem=None)
        return outcome


@dataclass
class Installer:
    """Installs what tasks have written, one partition after the other. `lock` protects `space`."""

    destination: Destination
    space: ScratchSpace
    lock: threading.Condition
    runner: TaskRunner
    events: Events
    stop: Stop

    def rolled(self, task: CleaningTask) -> tuple[CleaningTask, KeytailError | None]:
        """Roll the active segment if a roll is due. Return the task with the new segment, or the unchanged task and the
        problem.
        """
        if task.roll != "due":
            return task, None
        if self.stop.asked:
            return task, Interrupted("interrupted")
        active, new = task.segments[-2:]
        try:
            new = roll(self.destination.fs, task.partition_path, active, new.base_offset)
        except LockLost as problem:
            self.stop.lock_lost = problem
            return task, problem
        except EXPLAINED as problem:
            return task, as_problem(problem)
        return replace(task, segments=(*task.segments[:-1], new), roll="done"), None

    def finish(self, answers: Sequence[Answer]) -> list[Installation]:
        """Install the output of tasks, then move the checkpoints of all partitions that succeeded.

        Returns each partition whose installation was begun, with its row; a stopped run begins no further installation.
        """
        started: list[Installation] = []
        for task, outcome in answers:
            if self.stop.asked:
                break
            row = replace(planned_row(task), start_ms=outcome.start_ms or None, end_ms=outcome.end_ms or None)
            self.events.on_phase(row.name, self.destination.phase)
            started.append(self.destination.begin(task, row))
            self._install(started[-1], outcome)
        for item, problem in self.destination.move_checkpoints([item for item in started if item.problem is None]):
            self._fail(item, problem)
        for item in started:
            if item.problem is None:
                item.remove_unneeded()
                for warning in item.warnings():
                    self.events.on_note(warning)
                item.row = item.final_row()
        return started

    def _install(self, item: Installation, outcome: Outcome[CleaningResult]) -> None:
        """Install the result of a pass, and run and install the next passes until none is left. An error ends the
        partition."""
        try:
            while True:
                if self.stop.asked and item.task.continues:
                    raise Interrupted("interrupted")
                result = self._result_of(item.task, outcome)
                item.install(result, self.stop.is_asked)
                if result.rest is None:
                    return
                item.task = self._prepare_next(item.task, result)
                [outcome] = self.runner.run([item.task], f"compact {item.row.name}, next pass")
        except EXPLAINED as problem:
            if isinstance(problem, SparkEnded):
                self.stop.because_spark_ended(problem)
            self._fail(item, problem)

    def _fail(self, item: Installation, problem: Explained) -> None:
        if isinstance(problem, LockLost):
            self.stop.lock_lost = problem
        item.fail(as_problem(problem))

    def _result_of(self, task: CleaningTask, outcome: Outcome[CleaningResult]) -> CleaningResult:
        if outcome.trace:
            self.events.on_trace(outcome.trace)
        result = value_of(outcome)
        if task.prepared is not None:  # no task has run; the prepared files have been compared with their record
            return result
        refuse_unseen(self.destination.fs, task.scratch_path, sorted(written(result)), outcome.host)
        remove_unneeded(self.destination.fs, task, result)
        return result

    def _prepare_next(self, task: CleaningTask, result: CleaningResult) -> CleaningTask:
        if self.stop.asked:
            raise Interrupted("interrupted")
        if self.stop.deadline_s is not None and time.monotonic() >= self.stop.deadline_s:
            raise PastDeadline("--deadline has passed")
        with self.lock:
            return for_next_pass(next_pass(task, result), self.space)
