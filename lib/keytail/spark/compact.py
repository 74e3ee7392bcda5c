"""The driver of a compaction: which partitions run when, and what is done with what comes back.

Tasks only write scratch files; this module, in the driver, gives them their names and moves checkpoints. It
promises that a partition's checkpoint moves only after its new segments are durable, and that scratch space
in flight stays within what was allowed. The caller holds the locks and has decided what is to be cleaned.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from keytail.clean.cleaner import clean_partition, install
from keytail.clean.task import CleaningResult, CleaningTask
from keytail.errors import KeytailError
from keytail.format import names
from keytail.log.checkpoint import update_offset
from keytail.log.fs import LOCAL, FileSystem
from keytail.spark.memory import map_memory_bytes
from keytail.spark.rows import ResultRow, status_of
from keytail.spark.session import concurrent_tasks
from keytail.spark.storage import ScratchSpace
from keytail.spark.tasks import Outcome, explained, run_bundle

# A killed run loses the bundles in flight: small enough not to regret, large enough to hide a job's 0.1 s.
BUNDLE_BYTES = 1 << 30
BUNDLE_PARTITIONS = 64
MOST_THREADS = 64
# What a rewritten segment may hold beyond its source: index files, and batches that compress a little worse.
_MARGIN_BYTES = 1 << 20


@dataclass
class Compaction:
    """One run over many partitions. `on_row` hears of each as it ends, from any thread but one at a time.

    `on_note` hears in words what else there is to say of one, `on_trace` of a task's Python traceback.

    `hosted` names the partitions of each log dir: the entries that its checkpoint keeps. `deadline_s` is a
    time.monotonic() after which no bundle begins.
    """

    spark: Any
    tasks: Sequence[CleaningTask]
    space: ScratchSpace
    hosted: Mapping[str, Collection[tuple[str, int]]]
    on_row: Callable[[ResultRow], None] = lambda row: None
    on_trace: Callable[[str], None] = lambda text: None
    on_note: Callable[[str], None] = lambda text: None
    deadline_s: float | None = None
    fs: FileSystem = LOCAL
    clean: Callable[[CleaningTask, str], CleaningResult] | None = None
    _rows: dict[str, ResultRow] = field(default_factory=dict)
    _waiting: list[CleaningTask] = field(default_factory=list)
    _in_flight: int = 0
    _stopped: bool = False
    _crash: BaseException | None = None
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def run(self) -> list[ResultRow]:
        """Compact, install and checkpoint every task's partition; one row each, in the order of the tasks."""
        cores = concurrent_tasks(self.spark)
        parallel = max(cores, self.spark.sparkContext.defaultParallelism)
        if self.clean is None:
            self.clean = partial(clean_on_worker, cores)
        self._waiting = sorted(self.tasks, key=scratch_bytes, reverse=True)
        threads = [
            threading.Thread(target=self._work, args=(2 * parallel,), name=f"bundles-{number}", daemon=True)
            for number in range(min(parallel + 1, len(self.tasks), MOST_THREADS))
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException:  # Ctrl-C: what is being installed is finished, nothing else begins
            self._stopped = True
            self.spark.sparkContext.cancelAllJobs()
            for thread in threads:
                thread.join()
            raise
        if self._crash is not None:
            raise self._crash
        return [self._rows[task.partition_path] for task in self.tasks]

    def _work(self, most_in_flight: int) -> None:
        try:
            while bundle := self._next_bundle(most_in_flight):
                try:
                    self._run(bundle)
                finally:
                    with self._changed:
                        self._in_flight -= len(bundle)
                        self.space.release(self._needs(bundle))
                        self._changed.notify_all()
        except BaseException as crash:  # of this program, not of a partition: raised again by run()
            self._stopped = True
            self._crash = crash

    def _run(self, bundle: list[CleaningTask]) -> None:
        assert self.clean is not None
        label = f"compact {os.path.basename(bundle[0].partition_path)}"
        label += f" and {len(bundle) - 1} more" if len(bundle) > 1 else ""
        outcomes = run_bundle(self.spark, bundle, self.clean, name=label, stopped=lambda: self._stopped)
        for task, outcome in zip(bundle, outcomes, strict=True):
            if not self._stopped:
                self._add(task, self._finish(task, outcome))

    def _next_bundle(self, most_in_flight: int) -> list[CleaningTask]:
        """Wait for room, then take one large partition or many small ones, with their space reserved.

        Partitions that cannot be rewritten even alone get their rows here. Empty: nothing is left to begin.
        """
        with self._changed:
            while self._waiting and not self._stopped:
                if self.deadline_s is not None and time.monotonic() >= self.deadline_s:
                    self._give_up_waiting()
                    break
                bundle = self._fitting() if self._in_flight < most_in_flight else []
                if bundle:
                    self._waiting = [task for task in self._waiting if task not in bundle]
                    self._in_flight += len(bundle)
                    self.space.reserve(self._needs(bundle))
                    return bundle
                if self._in_flight == 0:
                    self._refuse_waiting()
                    break
                self._changed.wait(timeout=1.0)
        return []

    def _fitting(self) -> list[CleaningTask]:
        bundle: list[CleaningTask] = []
        size = 0
        for task in self._waiting:
            need = scratch_bytes(task)
            if bundle and size + need > BUNDLE_BYTES:
                continue
            if self.space.fits(self._needs([*bundle, task])):
                bundle.append(task)
                size += need
            if size >= BUNDLE_BYTES or len(bundle) == BUNDLE_PARTITIONS:
                break
        return bundle

    def _needs(self, bundle: Sequence[CleaningTask]) -> dict[int, int]:
        needs: dict[int, int] = {}
        for task in bundle:
            device = self.space.device(os.path.dirname(task.partition_path))
            needs[device] = needs.get(device, 0) + scratch_bytes(task)
        return needs

    def _refuse_waiting(self) -> None:
        for task in self._waiting:
            device = self.space.device(os.path.dirname(task.partition_path))
            problem = self.space.refusal(device, scratch_bytes(task))
            self._add(task, planned_row(task).unchanged(status_of(problem), str(problem)))
        self._waiting = []

    def _give_up_waiting(self) -> None:
        for task in self._waiting:
            self._add(task, planned_row(task).unchanged("skipped", "not begun: --deadline had passed"))
        self._waiting = []

    def _add(self, task: CleaningTask, row: ResultRow) -> None:
        with self._changed:  # its lock is re-entrant
            self._rows[task.partition_path] = row
            self.on_row(row)

    def _finish(self, task: CleaningTask, outcome: Outcome[CleaningResult]) -> ResultRow:
        """Install what a task wrote and move its checkpoint; the row says how far that went."""
        row = replace(planned_row(task), start_ms=outcome.start_ms or None, end_ms=outcome.end_ms or None)
        if outcome.trace:
            self.on_trace(outcome.trace)
        if outcome.worker_died:
            # A worker that died has left scratch files behind; the attempt that succeeded owns the others.
            self._remove_scratch_of_dead(task, outcome)
        if outcome.problem is not None or outcome.value is None:
            problem = outcome.problem or KeytailError("internal error: a task gave no answer")
            return row.unchanged(status_of(problem), str(problem))
        result = outcome.value
        try:
            install(self.fs, task, result)
            log_dir = os.path.dirname(task.partition_path)
            key = (task.topic, task.partition)
            move_checkpoint(self.fs, log_dir, key, result.end_offset, self.hosted[log_dir])
        except KeytailError as problem:
            return self._row_after_failed_install(row, problem)
        except OSError as problem:
            return self._row_after_failed_install(row, explained(problem))
        if result.limits_met:
            self.on_note(
                f"{row.name}: {result.limits_met} segments ended at a limit inside of what they were made from: "
                f"segment.bytes, segment.index.bytes or 2^31 - 1 offsets"
            )
        if result.large_batches:
            self.on_note(
                f"{row.name}: {result.large_batches} rebuilt batches are larger than max.message.bytes: consumers and "
                f"replicas fetch them all the same, but sent again they would not be taken"
            )
        return replace(
            row,
            status="compacted",
            end_dirty_offset=result.end_offset,
            segments_before=result.segments_before,
            segments_after=result.segments_after,
            bytes_before=result.bytes_before,
            bytes_after=result.bytes_after,
            records_before=result.records_before,
            records_after=result.records_after,
            tombstones_removed=result.tombstones_removed,
            markers_removed=result.markers_removed,
            end_ms=time.time_ns() // 1_000_000,
        )

    def _row_after_failed_install(self, row: ResultRow, problem: KeytailError) -> ResultRow:
        """How much was replaced is not known here; the next run finishes or undoes it before it begins."""
        text = f"{problem}. Replacing stopped; the next run finishes or undoes the group it stopped in"
        return replace(row, status=status_of(problem), error=text, end_ms=time.time_ns() // 1_000_000)

    def _remove_scratch_of_dead(self, task: CleaningTask, outcome: Outcome[CleaningResult]) -> None:
        groups = outcome.value.groups if outcome.value else ()
        kept = {file.name for group in groups for segment in group.segments for file in segment.files}
        for entry in self.fs.scan(task.partition_path):
            name = names.parse_file_name(entry.name)
            if name.kind == "scratch" and name.run_id == task.run_id and name.name not in kept:
                self.fs.unlink(os.path.join(task.partition_path, name.name))


def move_checkpoint(
    fs: FileSystem, log_dir: str, key: tuple[str, int], offset: int, hosted: Collection[tuple[str, int]]
) -> None:
    """Set where the next round begins, in the file from which a broker takes it too."""
    update_offset(fs, os.path.join(log_dir, names.CLEANER_CHECKPOINT), key, offset, hosted=hosted)


def clean_on_worker(tasks_a_host: int, task: CleaningTask, attempt: str) -> CleaningResult:
    """What one Spark task does; a map memory of 0 means this host's share."""
    memory = task.map_memory_bytes or map_memory_bytes(tasks_a_host)
    return clean_partition(LOCAL, replace(task, attempt=attempt, map_memory_bytes=memory))


def scratch_bytes(task: CleaningTask) -> int:
    """Upper bound of what cleaning writes: all segments below the first uncleanable offset, with indexes."""
    rewritten = [s for s in task.segments if s.base_offset < task.first_uncleanable_offset]
    files = sum(s.log_bytes + (s.index_bytes or 0) + (s.time_index_bytes or 0) for s in rewritten)
    return files + _MARGIN_BYTES


def planned_row(task: CleaningTask) -> ResultRow:
    return ResultRow(
        topic=task.topic,
        partition=task.partition,
        log_dir=os.path.dirname(task.partition_path),
        status="would-compact",
        first_dirty_offset=task.first_dirty_offset,
        end_dirty_offset=task.first_uncleanable_offset,
        segments_before=len(task.segments),
        bytes_before=sum(segment.log_bytes for segment in task.segments),
    )
