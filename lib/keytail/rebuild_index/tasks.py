"""Drives an index rebuild: processes segments and slices of many partitions in tasks, then completes each partition.

Tasks only read logs and write scratch files. The driver computes the results that depend on all segments of a
partition, and renames the new files. With `--execute`, the caller holds the locks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from keytail.errors import EXPLAINED, CorruptLog, KeytailError
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.replacement.recover import remove_lost_scratch, remove_scratch
from keytail.rebuild_index.indexes import (
    Scan,
    SegmentResult,
    SegmentTask,
    Slice,
    finish,
    index_segment,
    scan,
    slices_of,
)
from keytail.rebuild_index.partition import (
    PartitionPlan,
    PartitionResult,
    Rest,
    install,
    repair_rest,
    segment_tasks,
    settle,
    truncate,
)
from keytail.rebuild_index.tail import Truncation
from keytail.run.batching import in_bundles
from keytail.run.ended import sweep
from keytail.run.engine import Engine, ThisProcess, end_tasks
from keytail.run.hosts import refuse_network_here, refuse_unseen
from keytail.run.tasks import Outcome, as_problem, run_attempt
from keytail.run.watching import sending_progress
from keytail.threads import Threads

# Maximum size of the logs, and maximum number of partitions, in a bundle: large enough to use all cores of a cluster,
# small enough that a killed run loses little work.
BUNDLE_BYTES = 16 << 30
BUNDLE_PARTITIONS = 256
# Bytes of log per slice. Reading a slice from memory takes some tenths of a second, many times the overhead of a task.
SLICE_BYTES = 256 << 20
_TASKS_PER_CORE = 3  # with fewer segments per core than this, large segments are divided into slices
_CHUNKS_PER_CORE = 8  # approximate number of tasks per core into which the work of a bundle is divided


@dataclass(frozen=True)
class Work:
    """A piece of work: index a whole segment, scan one slice, or join the scans of all slices."""

    task: SegmentTask
    slice: Slice | None = None
    scans: tuple[Scan, ...] = ()

    @property
    def size_bytes(self) -> int:
        return self.slice.end - self.slice.start if self.slice else self.task.log_bytes


@dataclass(frozen=True)
class PartitionOutcome:
    """The outcome for one partition. `result` is None if it was not determined; `problem` is the first error, which may
    also have occurred after the result. `installed`: the new files have their final names.

    `done_truncation`: the truncation that was made before `result` was determined.
    """

    plan: PartitionPlan
    result: PartitionResult | None
    rest: Rest
    problem: KeytailError | None
    start_ms: int
    end_ms: int
    installed: bool = False
    done_truncation: Truncation | None = None


@dataclass
class Rebuild:
    """One run over many partitions. `on_outcome` is called with each outcome when it is known, one at a time;
    `on_trace` with a task's Python traceback. By default everything runs in this process. `hosted` contains the
    partitions of each log dir, whose entries are retained in its checkpoints. `shared_storage` states that no broker
    can reach log dirs that are on a network file system."""

    plans: Sequence[PartitionPlan]
    engine: Engine = field(default_factory=ThisProcess)
    hosted: Mapping[str, Collection[tuple[str, int]]] = field(default_factory=dict)
    on_outcome: Callable[[PartitionOutcome], None] = lambda outcome: None
    on_trace: Callable[[str], None] = lambda text: None
    fs: FileSystem = LOCAL
    slice_bytes: int = SLICE_BYTES
    shared_storage: bool = False
    _cores: int = field(default=1, init=False)
    _stopped: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        truncated = {plan.facts.log_dir for plan in self.plans if plan.settings.truncate}
        assert truncated <= self.hosted.keys(), "a truncation needs the partitions of its log dir"

    def run(self) -> list[PartitionOutcome]:
        """Return an outcome for each plan, in the order of the plans."""
        done: dict[str, PartitionOutcome] = {}
        largest_first = sorted(self.plans, key=lambda plan: plan.facts.log_bytes, reverse=True)
        bundles = list(in_bundles(largest_first, lambda plan: plan.facts.log_bytes, BUNDLE_BYTES, BUNDLE_PARTITIONS))
        self._cores = self.engine.parallel_tasks
        # While the driver completes one bundle, the tasks of the next bundle run.
        threads = 2 if self.engine.has_workers else 1
        with Threads(threads, "bundles") as pool:
            started = [pool.submit(self._run_bundle, bundle) for bundle in bundles]
            try:
                for future in started:
                    for outcome in future.result():
                        done[outcome.plan.facts.path] = outcome
                        self.on_outcome(outcome)
            except BaseException:  # after a signal, an installation in progress is completed, and nothing else starts
                self._stopped = True
                pool.shutdown(wait=False, cancel_futures=True)
                end_tasks(self.engine, lambda: any(future.running() for future in started))
                self._remove_scratch()
                raise
        return [done[plan.facts.path] for plan in self.plans]

    def _remove_scratch(self) -> None:
        """Remove scratch files of a stopped run's tasks."""
        changed = [plan for plan in self.plans if plan.settings.execute]
        sweep(lambda: sum(remove_lost_scratch(self.fs, plan.facts.path, plan.settings.run_id) for plan in changed))

    def _run_bundle(self, plans: Sequence[PartitionPlan]) -> list[PartitionOutcome]:
        start_ms = time.time_ns() // 1_000_000
        tasks = [task for plan in plans for task in segment_tasks(plan)]
        work = [Work(task, part) for task in tasks for part in self._slices(task, len(tasks))]
        outcomes: dict[tuple[str, int], Outcome[SegmentResult | Scan]] = {}
        scans: dict[tuple[str, int], list[Outcome[SegmentResult | Scan]]] = {}
        for item, outcome in self._do(work, "rebuild-index"):
            if item.slice is None:
                outcomes[_key(item.task)] = outcome
            else:
                scans.setdefault(_key(item.task), []).append(outcome)
        joins = []
        for task in tasks:
            if parts := scans.get(_key(task)):
                failed = next((part for part in parts if part.problem is not None), None)
                if failed is not None:
                    outcomes[_key(task)] = failed
                else:
                    scanned: Any = tuple(part.value for part in parts)  # without a problem there is a value
                    joins.append(Work(task, scans=scanned))
        for item, outcome in self._do(joins, "rebuild-index: slices together"):
            outcomes[_key(item.task)] = outcome
        return [self._finish(plan, [outcomes[_key(task)] for task in segment_tasks(plan)], start_ms) for plan in plans]

    def _slices(self, task: SegmentTask, n_tasks: int) -> Sequence[Slice | None]:
        """Return the slices of the segment, or (None,) if it is not divided. Segments are divided only if there are too
        few for all cores, because a join processes entries a second time."""
        if n_tasks >= _TASKS_PER_CORE * self._cores or self._cores == 1:
            return (None,)
        slices = slices_of(self.fs, task, self.slice_bytes)
        return slices if len(slices) > 1 else (None,)

    def _do(self, work: Sequence[Work], name: str) -> Iterator[tuple[Work, Outcome[Any]]]:
        """Run the largest work first; yield the outcomes in the order of `work`."""
        order = sorted(range(len(work)), key=lambda number: work[number].size_bytes, reverse=True)
        payloads = [work[number] for number in order]
        if self.engine.has_workers:
            found = self._on_workers(payloads, name)
        else:
            found = self.engine.run_bundle(payloads, self._here)
        by_number = dict(zip(order, found, strict=True))
        for number, item in enumerate(work):
            if by_number[number].trace:
                self.on_trace(by_number[number].trace)
            yield item, by_number[number]

    def _here(self, work: Work, attempt: str) -> SegmentResult | Scan:
        self._refuse_stopped()
        return do(self.fs, work, attempt)

    def _refuse_stopped(self) -> None:
        if self._stopped:
            raise KeytailError("interrupted", slug="run-interrupted")

    def _on_workers(self, work: Sequence[Work], name: str) -> list[Outcome[Any]]:
        """Run several pieces of work per task, since one piece may take less time than a task's overhead. If a worker
        dies, the pieces of its task are run again, each in its own task."""
        target = sum(item.size_bytes for item in work) // (_CHUNKS_PER_CORE * self._cores)
        portions = list(in_bundles(work, lambda item: item.size_bytes, target))
        found: list[Outcome[Any]] = []
        function = partial(do_on_worker, shared_storage=self.shared_storage)
        run = partial(self.engine.run_bundle, function=function, stopped=lambda: self._stopped)
        for portion, outcome in zip(portions, run(portions, name=name), strict=True):
            if outcome.value is not None:
                found += outcome.value
                continue
            if self._stopped:
                found += [Outcome(None, outcome.problem) for _ in portion]
                continue
            alone = run([[item] for item in portion], name=f"{name}, one by one")
            found += [item.value[0] if item.value is not None else Outcome(None, item.problem) for item in alone]
        return found

    def _finish(
        self, plan: PartitionPlan, outcomes: Sequence[Outcome[Any]], start_ms: int
    ) -> PartitionOutcome:
        result, rest, installed = None, Rest(), False
        problems = (outcome.problem for outcome in outcomes if outcome.problem is not None)
        # Damage is more important than other failures.
        problem = min(problems, key=lambda problem: not isinstance(problem, CorruptLog), default=None)
        try:
            self._refuse_stopped()
            if problem is None:
                for outcome in outcomes:
                    files = outcome.value.files if outcome.value is not None else ()
                    written = [verdict.clean.name for verdict in files if verdict.clean is not None]
                    refuse_unseen(self.fs, plan.facts.path, written, outcome.host)
                done: list[Any] = [outcome.value for outcome in outcomes]  # without a problem there is a value
                result = settle(self.fs, plan, done)
                if result.torn is not None and plan.settings.execute and plan.settings.truncate:
                    return self._truncate(plan, result.torn, start_ms)
                if plan.settings.execute:
                    install(self.fs, plan, result)
                    installed = True
                rest = repair_rest(self.fs, plan, result)
        except EXPLAINED as error:
            problem = as_problem(error)
        if plan.settings.execute:
            try:
                remove_scratch(self.fs, plan.facts.path, plan.settings.run_id)
            except EXPLAINED as error:
                problem = problem or as_problem(error)
        return PartitionOutcome(plan, result, rest, problem, start_ms, time.time_ns() // 1_000_000, installed)

    def _truncate(self, plan: PartitionPlan, torn: Truncation, start_ms: int) -> PartitionOutcome:
        """Truncate the log, then process the partition, which is then intact, again."""
        remove_scratch(self.fs, plan.facts.path, plan.settings.run_id)
        again = truncate(self.fs, plan, torn, self.hosted[plan.facts.log_dir])
        [outcome] = self._run_bundle([replace(again, settings=replace(again.settings, truncate=False))])
        return replace(outcome, start_ms=start_ms, done_truncation=torn)


def do(fs: FileSystem, work: Work, attempt: str) -> SegmentResult | Scan:
    """Do a piece of work, and return its result."""
    task = replace(work.task, attempt=attempt)
    with sending_progress(task.partition_path, f"{attempt} {task.base_offset} {work.slice}", "index"):
        if work.scans:
            return finish(fs, task, work.scans)
        return index_segment(fs, task) if work.slice is None else scan(fs, task, work.slice)


def do_on_worker(
    portion: Sequence[Work], attempt: str, *, shared_storage: bool = False
) -> list[Outcome[SegmentResult | Scan]]:
    """Do the work of one task of a worker; return the outcome of each piece of work."""

    def one(work: Work, attempt: str) -> SegmentResult | Scan:
        if work.task.execute and not shared_storage:
            refuse_network_here(LOCAL, os.path.dirname(work.task.partition_path))
        return do(LOCAL, work, attempt)

    return [run_attempt(one, work, attempt) for work in portion]


def _key(task: SegmentTask) -> tuple[str, int]:
    return task.partition_path, task.base_offset
