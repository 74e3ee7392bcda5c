"""Adds to the rows of a plan what a compaction would leave (`--measure`, `--estimate`).

A measurement takes no lock and writes nothing, so a broker may run. A partition whose segments change during the
measurement is planned and read again, at most twice.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from keytail.cli.configuration import Configuration
from keytail.cli.progress import Reporter
from keytail.cli.selection import SelectedPartitions, select_partitions
from keytail.cli.stopping import Stopped
from keytail.compact.command import Request
from keytail.compact.measure.measuring import Measurement
from keytail.compact.measure.worker import measure_on_worker
from keytail.compact.planned_rows import refused_row, row_of_plan
from keytail.compact.planning import ATTEMPTS, Planned, plan_beside_a_broker
from keytail.compact.prepared.preparing import AGAIN, SourcesChanged, refuse_changed_sources
from keytail.compact.prepared.record import Source, see_sources
from keytail.compact.rules import Rules
from keytail.compact.steps import cleaning_tasks
from keytail.compact.task import CleaningTask, NeedsFanOut
from keytail.console import print_message
from keytail.errors import EXPLAINED, KeytailError, in_words
from keytail.log.fs import FileSystem
from keytail.log.partition import LogDirFacts, PartitionEntry
from keytail.run.ended import SparkEnded
from keytail.run.engine import Engine
from keytail.run.every_task import run_every
from keytail.run.rates import commit_seconds
from keytail.run.rows import Measured, ResultRow
from keytail.run.tasks import Outcome, as_problem
from keytail.run.workers import workers_of_run

# The number of times that a measurement reads the bytes of a partition.
_READS = 2.0
_ONLY_MEASURED = "measured"  # a run id that no file has, because nothing is written


def measured(
    request: Request,
    fs: FileSystem,
    run: contextlib.ExitStack,
    chosen: SelectedPartitions,
    configuration: Configuration,
    rules: Rules,
    rows: Sequence[ResultRow],
) -> list[ResultRow]:
    """Return the `rows` of a plan of the `chosen` partitions by descending gain; rows of due partitions also have what
    a compaction would leave, or why that was not measured.
    """
    paths = [entry.path for _, entry in chosen.partitions]
    found = dict(zip(paths, rows, strict=True))
    due = [path for path in paths if found[path].status == "would-compact"]
    if not due:
        return list(rows)
    verb = "estimate" if request.measure == "from a sample" else "measure"
    sizes = [(os.path.basename(path), found[path].bytes_before or 0) for path in due]
    try:
        with Reporter(verb, sizes, _READS) as reporter:
            seconds = [found[path].expected_s or 0.0 for path in due]
            engine = workers_of_run(run, reporter, request.master, seconds, kernels="compact")
            _Measuring(request, fs, configuration, rules, engine, reporter, found).run(chosen, due)
    except (Stopped, SparkEnded) as stop:
        stop.rows = largest_gain_first([found[path] for path in paths])
        raise
    return largest_gain_first([found[path] for path in paths])


def largest_gain_first(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """Return the rows by descending number of reclaimed bytes, followed by the rows without a measurement, in their
    given order."""
    return sorted(rows, key=lambda row: -row.measured.reclaimed_bytes if row.measured is not None else float("inf"))


@dataclass
class _Measuring:
    """One run over the due partitions. `rows` has a row for each chosen partition, by path."""

    request: Request
    fs: FileSystem
    configuration: Configuration
    rules: Rules
    engine: Engine
    reporter: Reporter
    rows: dict[str, ResultRow]
    changed: dict[str, SourcesChanged] = field(default_factory=dict)

    def run(self, chosen: SelectedPartitions, due: Sequence[str]) -> None:
        """Measure the partitions with the paths `due`. Measure partitions whose segments change meanwhile again, at
        most twice.
        """
        for _ in range(ATTEMPTS):
            left = [item for item in chosen.partitions if item[1].path in due]
            self.changed = {}
            self._run(left)
            due = list(self.changed)
            if not due:
                return
            try:
                chosen = select_partitions(self.fs, self.request.partition_filter)
            except (KeytailError, OSError):  # a chosen topic has been deleted
                break
        for path, problem in self.changed.items():
            self._end(path, self._not_measured(self.rows[path], problem))

    def _run(self, left: Sequence[tuple[LogDirFacts, PartitionEntry]]) -> None:
        sources: dict[str, tuple[Source, ...]] = {}
        planned: dict[str, Planned] = {}
        for log_dir, entry in left:
            plan = plan_beside_a_broker(self.fs, log_dir, entry, self.configuration, self.rules)
            row = row_of_plan(plan, self.request.map_memory(), in_detail=self.request.in_detail)
            self.rows[entry.path] = row
            selection = plan.decision.selection
            if not plan.wanted or selection is None:
                self._end(entry.path, row)
                continue
            below = [item for item in plan.facts.segments if item.base_offset < selection.first_uncleanable_offset]
            try:
                sources[entry.path] = see_sources(self.fs, entry.path, below)
            except (KeytailError, OSError) as problem:
                self.changed[entry.path] = SourcesChanged(
                    "segments changed while they were listed: " + in_words(problem), remedy=AGAIN
                )
            else:
                planned[entry.path] = plan
        tasks = cleaning_tasks(planned.values(), self.rules, self.request.task_settings(), _ONLY_MEASURED)
        run_every(
            self.engine,
            [replace(task, is_preparation=True) for task in tasks],
            partial(
                measure_on_worker,
                self.engine.concurrent_tasks,
                from_a_sample=self.request.measure == "from a sample",
            ),
            lambda task, outcome: self._on_result(task, sources[task.partition_path], outcome),
            name="measure",
            size_of=lambda task: sum(segment.log_bytes for segment in task.segments),
        )

    def _on_result(self, task: CleaningTask, sources: Sequence[Source], outcome: Outcome[Measurement]) -> None:
        path = task.partition_path
        row = self.rows[path]
        if outcome.trace:
            print_message(outcome.trace, "error")
        try:
            refuse_changed_sources(self.fs, task, sources)
        except SourcesChanged as changed:
            self.changed[path] = changed
            return
        except EXPLAINED as problem:
            self._end(path, refused_row(row, as_problem(problem)))
            return
        row = replace(row, start_ms=outcome.start_ms or None, end_ms=outcome.end_ms or None)
        if outcome.value is not None:
            self._end(path, measured_row(row, task, outcome.value))
        elif isinstance(outcome.problem, NeedsFanOut):
            self._end(path, self._not_measured(row, outcome.problem))
        elif outcome.problem is not None:
            self._end(path, refused_row(row, outcome.problem))

    def _not_measured(self, row: ResultRow, problem: KeytailError) -> ResultRow:
        """Return the row of a due partition that was not measured."""
        return replace(row, error="not measured: " + in_words(problem), shown=None)

    def _end(self, path: str, row: ResultRow) -> None:
        self.rows[path] = row
        self.reporter.done(row.name, row.status, row.bytes_before or 0, row.error)


def measured_row(row: ResultRow, task: CleaningTask, found: Measurement) -> ResultRow:
    """Return the row of a plan with the measurement added."""
    below = [item for item in task.segments if item.base_offset < found.end_offset]
    bytes_after = found.bytes_after.estimate
    return replace(
        row,
        end_dirty_offset=found.end_offset,
        segments_after=found.segments_after,
        bytes_after=bytes_after,
        records_before=found.records_before,
        records_after=found.records_after.estimate,
        tombstones_removed=found.tombstones_removed,
        markers_removed=found.markers_removed,
        measured=Measured(
            method=found.method,
            reclaimed_bytes=(row.bytes_before or 0) - bytes_after,
            tombstones_after=found.tombstones_after.estimate,
            prepare_s=row.expected_s or 0.0,
            commit_s=round(commit_seconds(len(below)), 2),
            bytes_after_low=found.bytes_after.low,
            bytes_after_high=found.bytes_after.high,
            records_after_low=found.records_after.low,
            records_after_high=found.records_after.high,
            tombstones_after_low=found.tombstones_after.low,
            tombstones_after_high=found.tombstones_after.high,
        ),
    )
