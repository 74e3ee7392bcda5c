"""The driver of a compaction: which partitions run when, and what is done with what comes back.

Tasks only write scratch files; this module, in the driver, gives them their names and moves checkpoints. It
promises that a partition's checkpoint moves only after its new segments are durable, and that scratch space
in flight stays within what was allowed. The caller holds the locks and has decided what is to be cleaned.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from keytail.clean.cleaner import clean_partition, install, next_round
from keytail.clean.rounds import least_scratch_bytes, scratch_bytes
from keytail.clean.task import CleaningResult, CleaningTask, NeedsFanOut
from keytail.errors import KeytailError
from keytail.format import names
from keytail.log.checkpoint import update_offset
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.pace import Pace, PacedFileSystem
from keytail.log.recover import recover
from keytail.log.replace import GroupOutput
from keytail.spark.ended import SparkEnded, await_signal, sweep
from keytail.spark.fan_out import fan_out_on_spark
from keytail.spark.hosts import refuse_network_here, refuse_unseen
from keytail.spark.memory import map_memory_bytes
from keytail.spark.originals import Keeper
from keytail.spark.processes import Processes
from keytail.spark.rows import ResultRow, status_of
from keytail.spark.session import concurrent_tasks, end_jobs, parallel_tasks
from keytail.spark.storage import ScratchSpace
from keytail.spark.tasks import Outcome, explained, run_bundle

# A killed run loses the bundles in flight: small enough not to regret, large enough to hide a job's 0.1 s.
BUNDLE_BYTES = 1 << 30
BUNDLE_PARTITIONS = 64
MOST_THREADS = 64
_SAFE = "safe to start the broker"


class _Interrupted(KeytailError):
    """The run was told to stop."""


class _PastDeadline(KeytailError):
    """--deadline has passed."""


@dataclass
class Compaction:
    """One run over many partitions. `on_row` hears of each as it ends, from any thread but one at a time.

    `on_note` hears in words what else there is to say of one, `on_trace` of a task's Python traceback.

    `hosted` names the partitions of each log dir: the entries that its checkpoint keeps. `deadline_s` is a
    time.monotonic() after which no bundle and no round begins. `shared_storage` states that no broker can reach log
    dirs that are on a network file system.

    A partition that does not fit into the scratch space is written in rounds, alone on its file system: a Spark job
    each, whose groups are installed before the next. Its checkpoint moves after the last.
    """

    spark: Any
    tasks: Sequence[CleaningTask]
    space: ScratchSpace
    hosted: Mapping[str, Collection[tuple[str, int]]]
    on_row: Callable[[ResultRow], None] = lambda row: None
    on_trace: Callable[[str], None] = lambda text: None
    on_note: Callable[[str], None] = lambda text: None
    shared_storage: bool = False
    deadline_s: float | None = None
    fs: FileSystem = LOCAL
    clean: Callable[[CleaningTask, str], CleaningResult] | None = None
    keeper: Keeper | None = None
    _rows: dict[str, ResultRow] = field(default_factory=dict)
    _waiting: list[CleaningTask] = field(default_factory=list)
    _in_flight: int = 0
    _most_in_bundle: int = BUNDLE_PARTITIONS
    _stopped: bool = False
    _crash: BaseException | None = None
    _ended: SparkEnded | None = None
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def run(self) -> list[ResultRow]:
        """Compact, install and checkpoint every task's partition; one row each, in the order of the tasks."""
        cores = concurrent_tasks(self.spark)
        parallel = parallel_tasks(self.spark)
        if isinstance(self.spark, Processes):
            self._most_in_bundle = 1  # a job costs nothing there
        if self.clean is None:
            self.clean = partial(clean_on_worker, cores, shared_storage=self.shared_storage)
        self._waiting = sorted(self.tasks, key=scratch_bytes, reverse=True)
        # Not joined: a signal that interrupts a join makes Python 3.11 take a thread for dead that runs on.
        ends: list[threading.Event] = []
        try:
            for number in range(min(parallel + 1, len(self.tasks), MOST_THREADS)):
                ends.append(threading.Event())
                arguments = (2 * parallel, ends[-1])
                threading.Thread(target=self._work, args=arguments, name=f"bundles-{number}", daemon=True).start()
            for end in ends:
                end.wait()
            if self._ended is not None:
                await_signal()
                raise self._ended
        except BaseException:  # a signal: the group that is being installed is finished, nothing else begins
            self._stopped = True
            end_jobs(self.spark, lambda: not all(end.is_set() for end in ends))
            if self._crash is not None:
                self.on_trace("".join(traceback.format_exception(self._crash)))
            raise
        if self._crash is not None:
            raise self._crash
        return [self._rows[task.partition_path] for task in self.tasks]

    def rows_so_far(self) -> list[ResultRow]:
        """Of a run that was stopped: a row for each task, in their order."""
        not_done = "interrupted before anything was replaced"
        return [
            self._rows.get(task.partition_path) or planned_row(task).unchanged("skipped", not_done)
            for task in self.tasks
        ]

    def remove_scratch(self) -> None:
        """What tasks of a stopped run have left."""
        sweep(lambda: sum(map(self._remove_lost_scratch, self.tasks)))

    def _work(self, most_in_flight: int, end: threading.Event) -> None:
        try:
            while bundle := self._next_bundle(most_in_flight):
                try:
                    self._run(bundle)
                finally:
                    with self._changed:
                        self._in_flight -= len(bundle)
                        self.space.release(self._needs(bundle))
                        self._changed.notify_all()
        except SparkEnded as ended:
            self._end_early(ended)
        except BaseException as crash:  # of this program, not of a partition: raised again by run()
            self._stopped = True
            self._crash = crash
        finally:
            end.set()

    def _end_early(self, ended: SparkEnded) -> None:
        self._stopped = True
        self._ended = ended

    def _run_tasks(self, bundle: list[CleaningTask], name: str) -> list[Outcome[CleaningResult]]:
        if bundle[0].fan_out == "always" or bundle[0].fanned_out is not None:  # then it is one
            return [self._fan_out(task) for task in bundle]
        return run_bundle(
            self.spark,
            bundle,
            self._clean(),
            name=name,
            stopped=lambda: self._stopped,
            before_again=lambda task: self._remove_lost_scratch(task, again=True),
        )

    def _run(self, bundle: list[CleaningTask]) -> None:
        assert self.clean is not None
        label = f"compact {os.path.basename(bundle[0].partition_path)}"
        label += f" and {len(bundle) - 1} more" if len(bundle) > 1 else ""
        large = []
        for task, outcome in zip(bundle, self._run_tasks(bundle, label), strict=True):
            if isinstance(outcome.problem, NeedsFanOut):
                large.append((task, outcome.problem))
            elif not self._stopped:
                self._add(task, self._finish(task, outcome))
        for task, reason in large:
            if not self._stopped:
                self._add(task, self._finish(task, self._in_place_of_one_task(task, reason)))

    def _in_place_of_one_task(self, task: CleaningTask, reason: NeedsFanOut) -> Outcome[CleaningResult]:
        name = planned_row(task).name
        if isinstance(self.spark, Processes):
            self.on_note(f"{name}: {reason.what}: it is compacted as far as they do; --fan-out always takes all of it")
            [outcome] = self._run_tasks([replace(task, fan_out="never")], f"compact {name}, a part")
            return outcome
        self.on_note(f"{name}: {reason.what}: all tasks share it (fan-out)")
        return self._fan_out(task)

    def _fan_out(self, task: CleaningTask) -> Outcome[CleaningResult]:
        return fan_out_on_spark(
            self.spark,
            task,
            shared_storage=self.shared_storage,
            on_trace=self.on_trace,
            stopped=lambda: self._stopped,
        )

    def _next_bundle(self, most_in_flight: int) -> list[CleaningTask]:
        """Wait for room, then take one large partition or many small ones, with their space reserved.

        Partitions that cannot be rewritten even alone get their rows here. Empty: nothing is left to begin.
        """
        with self._changed:
            while self._waiting and not self._stopped:
                if self.deadline_s is not None and time.monotonic() >= self.deadline_s:
                    self._give_up_waiting()
                    break
                bundle = (self._fitting() or self._in_rounds()) if self._in_flight < most_in_flight else []
                if bundle:
                    begun = {task.partition_path for task in bundle}
                    self._waiting = [task for task in self._waiting if task.partition_path not in begun]
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
            if bundle and (size + need > BUNDLE_BYTES or "always" in (task.fan_out, bundle[0].fan_out)):
                continue
            if self.space.fits(self._needs([*bundle, task])):
                bundle.append(task)
                size += need
            if size >= BUNDLE_BYTES or len(bundle) == self._most_in_bundle:
                break
        return bundle

    def _needs(self, bundle: Sequence[CleaningTask]) -> dict[int, int]:
        needs: dict[int, int] = {}
        for task in bundle:
            device = self._device(task)
            needs[device] = needs.get(device, 0) + min(scratch_bytes(task), task.max_scratch_bytes or 2**63)
            if self.keeper is not None:
                device = self.space.device(self.keeper.originals.directory)
                needs[device] = needs.get(device, 0) + self.keeper.copy_bytes(task)
        return needs

    def _in_rounds(self) -> list[CleaningTask]:
        """The largest partition whose file system no other takes room of; it gets all that there is."""
        for task in self._waiting:
            device = self._device(task)
            bound = self.space.for_rounds(device, self._least(task))
            if bound is None or self.space.reserved_bytes.get(device) or not self._has_room_for_copies(task):
                continue
            if self.keeper is not None and self.space.device(self.keeper.originals.directory) == device:
                bound = min(bound, self.fs.free_bytes(task.partition_path) - self.keeper.copy_bytes(task))
            return [replace(task, max_scratch_bytes=bound)]
        return []

    def _has_room_for_copies(self, task: CleaningTask) -> bool:
        if self.keeper is None:
            return True
        device = self.space.device(self.keeper.originals.directory)
        scratch = self._least(task) if device == self._device(task) else 0
        return self.keeper.has_room(task, self.space.reserved_bytes.get(device, 0), scratch)

    def _least(self, task: CleaningTask) -> int:
        memory = task.map_memory_bytes or map_memory_bytes(1)  # a host's share is less
        return least_scratch_bytes(replace(task, map_memory_bytes=memory))

    def _device(self, task: CleaningTask) -> int:
        return self.space.device(os.path.dirname(task.partition_path))

    def _refuse_waiting(self) -> None:
        for task in self._waiting:
            problem = self.space.refusal(self._device(task), self._least(task))
            if self.keeper is not None and not self._has_room_for_copies(task):
                problem = self.keeper.refusal(task)
            row = planned_row(task).unchanged(status_of(problem), str(problem))
            self._add(task, replace(row, problem=problem))
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
        """Install what a task wrote, round by round, and move its checkpoint; the row says how far that went."""
        row = replace(planned_row(task), start_ms=outcome.start_ms or None, end_ms=outcome.end_ms or None)
        progress = _Progress()
        try:
            while True:
                if self._stopped and task.goes_on:
                    raise _Interrupted("interrupted")
                result = self._result_of(task, outcome)
                self._install(task, result, progress)
                if result.rest is None:
                    break
                task = self._prepare_next(task, result)
                [outcome] = self._run_tasks([task], f"compact {row.name}, next round")
            log_dir = os.path.dirname(task.partition_path)
            key = (task.topic, task.partition)
            move_checkpoint(self.fs, log_dir, key, result.end_offset, self.hosted[log_dir])
        except KeytailError as problem:
            if isinstance(problem, SparkEnded):
                self._end_early(problem)
            return replace(self._row_after(problem, row, task, progress), problem=problem)
        except OSError as problem:
            known = explained(problem)
            return replace(self._row_after(known, row, task, progress), problem=known)
        self._remove_lost_scratch(task)
        self._tell_oddities(row, result)
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

    def _clean(self) -> Callable[[CleaningTask, str], CleaningResult]:
        assert self.clean is not None
        return self.clean

    def _result_of(self, task: CleaningTask, outcome: Outcome[CleaningResult]) -> CleaningResult:
        if outcome.trace:
            self.on_trace(outcome.trace)
        result = outcome.value
        if outcome.problem is not None or result is None:
            raise outcome.problem or KeytailError("internal error: a task gave no answer")
        refuse_unseen(self.fs, task.partition_path, sorted(_written(result)), outcome.host)
        self._remove_lost_scratch(task, result)
        return result

    def _install(self, task: CleaningTask, result: CleaningResult, progress: _Progress) -> None:
        """The groups of one round; the files that it needed go with it."""
        if self.keeper is not None:
            self.keeper.keep(task, result)
        progress.begin(result)
        install(self.fs, task, result, progress.one_more, lambda: self._stopped)
        if progress.waiting:
            raise _Interrupted("interrupted")
        if task.goes_on or result.rest:
            self._remove_scratch(task, result)

    def _prepare_next(self, task: CleaningTask, result: CleaningResult) -> CleaningTask:
        """The task of the next round, with the space that there is now; replacing has mostly freed some."""
        if self._stopped:
            raise _Interrupted("interrupted")
        if self.deadline_s is not None and time.monotonic() >= self.deadline_s:
            raise _PastDeadline("--deadline has passed")
        task = next_round(task, result)
        with self._changed:
            device, least = self._device(task), self._least(task)
            bound = self.space.for_rounds(device, least)
            if bound is None:
                raise self.space.refusal(device, least)
            return replace(task, max_scratch_bytes=bound)

    def _row_after(
        self, problem: KeytailError, row: ResultRow, task: CleaningTask, progress: _Progress
    ) -> ResultRow:
        """The row of a partition that is not done. What the group it stopped in has begun is finished or undone."""
        left = "what it has begun is finished or undone by the next run"
        try:
            if progress.waiting:
                recovered = recover(self.fs, task.partition_path)
                if _is_replaced(self.fs, task, progress.waiting[0], recovered):
                    progress.one_more()
            else:
                self._remove_scratch(task)
            if self.keeper is not None:
                self.keeper.let_go(task)
            left = ""
        except (KeytailError, OSError) as also:
            left = f"{left} ({also})"
        status = "skipped" if isinstance(problem, _Interrupted | _PastDeadline | SparkEnded) else status_of(problem)
        if progress.groups == 0:
            text = f"{problem}. Nothing was replaced, {_SAFE}" if status == "failed" else str(problem)
            return row.unchanged(status, "; ".join(filter(None, (text, left))))
        text = f"{problem}. {progress}, {_SAFE}; the next run goes on from there"
        segments, size = self._present(task)
        return replace(
            row,
            status=status,
            error="; ".join(filter(None, (text, left))),
            segments_after=segments,
            bytes_after=size,
            end_ms=time.time_ns() // 1_000_000,
        )

    def _present(self, task: CleaningTask) -> tuple[int | None, int | None]:
        """Number and bytes of the segments that are there now, where that can be told."""
        try:
            entries = [(names.parse_file_name(entry.name), entry) for entry in self.fs.scan(task.partition_path)]
        except OSError:
            return None, None
        logs = [entry.size_bytes for name, entry in entries if name.kind == "live" and name.suffix == names.LOG]
        return len(logs), sum(logs)

    def _tell_oddities(self, row: ResultRow, result: CleaningResult) -> None:
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

    def _remove_lost_scratch(
        self, task: CleaningTask, result: CleaningResult | None = None, *, again: bool = False
    ) -> int:
        """What attempts have left whose worker or executor was lost, or that a copy overtook: Spark tells of none.

        One that is not dead yet loses what it has written and fails by that, or writes more, which goes when the
        partition is done: names of attempts differ.
        """
        with contextlib.suppress(OSError):  # the next run removes it too
            return self._remove_scratch(task, result, again=again)
        return 0

    def _remove_scratch(
        self, task: CleaningTask, result: CleaningResult | None = None, *, again: bool = False
    ) -> int:
        """Of this run, but for what `result` has written and hands on, and what a task to run `again` was handed; how
        many files."""
        removed = 0
        kept = set() if result is None else _written(result)
        if again and task.handed_on is not None:
            kept |= {task.handed_on.survivors.name, task.handed_on.proof.name}
        for entry in self.fs.scan(task.partition_path):
            name = names.parse_file_name(entry.name)
            if name.kind == "scratch" and name.run_id == task.run_id and name.name not in kept:
                self.fs.unlink(os.path.join(task.partition_path, name.name))
                removed += 1
        return removed


def _written(result: CleaningResult) -> set[str]:
    """Names of the scratch files that a round hands over."""
    files = {file.name for group in result.groups for segment in group.segments for file in segment.files}
    return files | ({file.name for file in result.rest.files} if result.rest else set())


@dataclass
class _Progress:
    """How far the replacement of one partition's groups has come. `more`: rounds follow, of nobody knows how many."""

    done: int = 0
    groups: int = 0
    more: bool = False
    waiting: list[GroupOutput] = field(default_factory=list)  # of this round

    def begin(self, result: CleaningResult) -> None:
        self.waiting = list(result.groups)
        self.groups += len(result.groups)
        self.more = result.rest is not None

    def one_more(self) -> None:
        self.waiting.pop(0)
        self.done += 1

    def __str__(self) -> str:
        return f"{self.done} of {'at least ' if self.more else ''}{self.groups + self.more} groups done"


def _is_replaced(fs: FileSystem, task: CleaningTask, group: GroupOutput, recovered: Sequence[str]) -> bool:
    """Whether a recovery has finished the whole group: one of several replacements that it is made of may be done."""
    if not any(sentence.startswith("finished the replacement") for sentence in recovered):
        return False
    sizes = {entry.name: entry.size_bytes for entry in fs.scan(task.partition_path)}
    wanted = {
        names.segment_file(out.base_offset, names.LOG): file.size_bytes
        for out in group.segments
        for file in out.files
        if file.suffix == names.LOG
    }
    gone = {names.segment_file(base, names.LOG) for base in group.source_bases} - set(wanted)
    return all(sizes.get(name) == size for name, size in wanted.items()) and not gone & set(sizes)


def move_checkpoint(
    fs: FileSystem, log_dir: str, key: tuple[str, int], offset: int, hosted: Collection[tuple[str, int]]
) -> None:
    """Set where the next round begins, in the file from which a broker takes it too."""
    update_offset(fs, os.path.join(log_dir, names.CLEANER_CHECKPOINT), key, offset, hosted=hosted)


def clean_on_worker(
    tasks_a_host: int, task: CleaningTask, attempt: str, *, shared_storage: bool = False
) -> CleaningResult:
    """What one Spark task does; a map memory of 0 means this host's share."""
    if not shared_storage:
        refuse_network_here(LOCAL, os.path.dirname(task.partition_path))
    memory = task.map_memory_bytes or map_memory_bytes(tasks_a_host)
    fs = LOCAL
    if task.throttle_bytes_per_s is not None:
        fs = PacedFileSystem(Pace(max(1, task.throttle_bytes_per_s // tasks_a_host)))
    return clean_partition(fs, replace(task, attempt=attempt, map_memory_bytes=memory))


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
