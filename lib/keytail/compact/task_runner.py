"""Runs the cleaning tasks of a run on its engine: each partition as one task, or as a fan-out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from keytail.compact.destination import Destination
from keytail.compact.fan_out.on_spark import fan_out_on_spark
from keytail.compact.replacing import planned_row, remove_lost_scratch
from keytail.compact.run_state import Events, Stop
from keytail.compact.task import CleaningResult, CleaningTask, NeedsFanOut
from keytail.run.engine import Engine
from keytail.run.tasks import Outcome


@dataclass
class TaskRunner:
    """Runs cleaning tasks, which only write scratch files. Any thread may call it."""

    engine: Engine
    destination: Destination
    events: Events
    stop: Stop

    def run(self, bundle: Sequence[CleaningTask], name: str) -> list[Outcome[CleaningResult]]:
        """Return the outcomes of the tasks, in their order; `name` is shown where the engine shows jobs."""
        if bundle[0].fan_out == "always" or bundle[0].fanned_out is not None:  # such a bundle has one task
            return [self._fan_out(task) for task in bundle]
        return self.engine.run_bundle(
            bundle,
            self.destination.clean,
            name=name,
            stopped=self.stop.is_asked,
            before_again=lambda task: remove_lost_scratch(self.destination.fs, task, again=True),
        )

    def in_place_of_one_task(self, task: CleaningTask, reason: NeedsFanOut) -> Outcome[CleaningResult]:
        """Run a task whose keys do not fit into its memory: as a fan-out if the engine can, else as far as they fit."""
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
        return self.destination.of_fan_out(task, outcome)
