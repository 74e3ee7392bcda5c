"""Installs the groups of one partition in the driver, finishes or undoes an unfinished group after an error, and
creates the partition's row.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from keytail.compact.cleaner import install
from keytail.compact.detail import detail_of_result
from keytail.compact.keeper import Keeper
from keytail.compact.roll import ROLLED
from keytail.compact.running.destination import Installation
from keytail.compact.task import CleaningResult, CleaningTask
from keytail.errors import EXPLAINED, NO_ERROR, REPORT_IT, ErrorText, Explained, KeytailError, in_words, joined
from keytail.format import names
from keytail.log.checkpoint import update_offsets
from keytail.log.fs import FileSystem
from keytail.log.lock import LockLost, refuse_lost
from keytail.log.replacement.recover import recover, remove_lost_scratch, remove_scratch
from keytail.log.replacement.replace import GroupOutput
from keytail.run.ended import SparkEnded
from keytail.run.rows import ResultRow, status_of
from keytail.run.tasks import Outcome

_SAFE = "safe to start the broker"
R = TypeVar("R")


class Interrupted(KeytailError):
    """The run was asked to stop."""

    default_slug = "run-interrupted"


class PastDeadline(KeytailError):
    """--deadline has passed."""

    default_slug = "past-deadline"


@dataclass
class Replacing:
    """The installation of one partition's output in place of its segments."""

    fs: FileSystem
    keeper: Keeper | None
    task: CleaningTask
    row: ResultRow
    problem: KeytailError | None = None
    _results: list[CleaningResult] = field(default_factory=list)  # results of the passes whose installation has begun
    _waiting: list[GroupOutput] = field(default_factory=list)  # groups of the last pass that are not installed
    _replace_s: float = 0.0

    def install(self, result: CleaningResult, is_stopped: Callable[[], bool]) -> None:
        """Replace the segments group by group; a stop takes effect between two groups. If there are several passes,
        remove the scratch files that no later pass needs."""
        if self.keeper is not None:
            self.keeper.keep(self.task, result)
        self._results.append(result)
        self._waiting = list(result.groups)
        start_s = time.perf_counter()
        install(self.fs, self.task, result, lambda: self._waiting.pop(0), is_stopped)
        self._replace_s += time.perf_counter() - start_s
        if self._waiting:
            raise Interrupted("interrupted")
        if self.task.continues or result.rest:
            remove_scratch(self.fs, self.task.scratch_path, self.task.run_id, written(result))

    @property
    def result(self) -> CleaningResult:
        return self._results[-1]

    @property
    def _groups(self) -> list[GroupOutput]:
        """The groups of all passes; the groups that are not installed yet are last."""
        return [group for result in self._results for group in result.groups]

    @property
    def made(self) -> list[int]:
        groups = self._groups
        return [out.base_offset for group in groups[: len(groups) - len(self._waiting)] for out in group.segments]

    def final_row(self) -> ResultRow:
        sources = [source for result in self._results for source in result.sources]
        phases_s: dict[str, float] = {}
        for result in self._results:
            for phase, seconds in result.phases_s.items():
                phases_s[phase] = phases_s.get(phase, 0.0) + seconds
        phases_s["replace"] = self._replace_s
        detail = detail_of_result(self.task, self.result, sources, phases_s, self._results[0].key_counts)
        return replace(with_numbers(self.row, self.result), detail=detail)

    def fail(self, problem: KeytailError) -> None:
        self.problem = problem
        left = ErrorText("the next run finishes or undoes what was started")
        try:
            refuse_lost(self.fs, self.task.partition_path)
            if self._waiting:
                recovered = recover(self.fs, self.task.partition_path, self._still_prepared())
                if _is_replaced(self.fs, self.task, self._waiting[0], recovered):
                    self._waiting.pop(0)
            else:
                remove_scratch(self.fs, self.task.scratch_path, self.task.run_id, self._still_prepared())
            if self.keeper is not None:
                self.keeper.remove_unused(self.task)
            left = NO_ERROR
        except LockLost:
            pass  # The other partitions of the log dir will fail in the same way. Nothing more is changed.
        except EXPLAINED as also:
            left = left + " (" + in_words(also) + ")"
        status = "skipped" if isinstance(problem, Interrupted | PastDeadline | SparkEnded) else status_of(problem)
        if not self._groups:
            text = in_words(problem) + (f". Nothing was replaced, {_SAFE}" if status == "failed" else "")
            self.row = replace(unreplaced(self.task, self.row, status, joined([text, left])), problem=problem)
            return
        text = in_words(problem) + f". {self._how_far()}, {_SAFE}; the next run continues from there"
        segments, size = self._present()
        self.row = replace(
            self.row,
            status=status,
            error=joined([text, left]),
            segments_after=segments,
            bytes_after=size,
            end_ms=_now_ms(),
            problem=problem,
        )

    def _still_prepared(self) -> frozenset[str]:
        """Return the names of the files that the next run may commit: the files of a preparation of which no group is
        in place, else none."""
        prepared = self.task.prepared
        return prepared.files if prepared is not None and len(self._waiting) == len(self._groups) else frozenset()

    def remove_unneeded(self) -> None:
        remove_unneeded(self.fs, self.task)

    def warnings(self) -> Iterator[str]:
        return warnings_of(self.row.name, self.result)

    def _how_far(self) -> str:
        """Return a text such as "2 of 5 groups done". The number of groups of further passes is unknown."""
        groups, continues = len(self._groups), self.result.rest is not None
        return f"{groups - len(self._waiting)} of {'at least ' if continues else ''}{groups + continues} groups done"

    def _present(self) -> tuple[int | None, int | None]:
        """Return the number and the bytes of the current segments; None for both if they cannot be listed."""
        try:
            entries = [(names.parse_file_name(entry.name), entry) for entry in self.fs.scan(self.task.partition_path)]
        except OSError:
            return None, None
        logs = [entry.size_bytes for name, entry in entries if name.kind == "live" and name.suffix == names.LOG]
        return len(logs), sum(logs)


@dataclass(frozen=True)
class InPlace:
    """The destination of a run that replaces segments with the outputs of its tasks. `hosted` has the partitions of
    each log dir: a checkpoint file retains only the entries of these partitions.
    """

    fs: FileSystem
    hosted: Mapping[str, Collection[tuple[str, int]]]
    clean: Callable[[CleaningTask, str], CleaningResult]
    keeper: Keeper | None = None
    shared_storage: bool = False
    phase: str = "replace"

    def begin(self, task: CleaningTask, row: ResultRow) -> Replacing:
        return Replacing(self.fs, self.keeper, task, row)

    def move_checkpoints(self, done: Sequence[Installation]) -> Iterator[tuple[Installation, Explained]]:
        """Replace the checkpoint file of each log dir once; yield the partitions for which this failed, with the
        reason."""
        by_log_dir: dict[str, list[Installation]] = {}
        for item in done:
            by_log_dir.setdefault(os.path.dirname(item.task.partition_path), []).append(item)
        for log_dir, there in by_log_dir.items():
            offsets = {(item.task.topic, item.task.partition): item.result.end_offset for item in there}
            try:
                move_checkpoints(self.fs, log_dir, offsets, self.hosted[log_dir])
            except EXPLAINED as problem:
                yield from ((item, problem) for item in there)


def move_checkpoints(
    fs: FileSystem,
    log_dir: str,
    offsets: Mapping[tuple[str, int], int],
    hosted: Collection[tuple[str, int]],
) -> None:
    """Set the first dirty offsets of the next rounds (`offsets`) in the checkpoint file, which a broker also reads."""
    update_offsets(fs, os.path.join(log_dir, names.CLEANER_CHECKPOINT), offsets, hosted=hosted)


def warnings_of(name: str, result: CleaningResult) -> Iterator[str]:
    if result.limits_met:
        yield (
            f"{name}: {result.limits_met} new segments ended before the end of their source segments, at a limit: "
            "segment.bytes, segment.index.bytes or 2^31 - 1 offsets"
        )
    if result.large_batches:
        yield (
            f"{name}: {result.large_batches} rebuilt batches are larger than max.message.bytes: consumers and replicas "
            "can fetch them, but a broker would reject them from a producer"
        )


def with_numbers(row: ResultRow, result: CleaningResult) -> ResultRow:
    """Return the row of a compacted partition, with the numbers of its result."""
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
        end_ms=_now_ms(),
    )


def planned_row(task: CleaningTask) -> ResultRow:
    return ResultRow(
        topic=task.topic,
        partition=task.partition,
        log_dir=os.path.dirname(task.partition_path),
        status=task.would,
        first_dirty_offset=task.begins_at,
        end_dirty_offset=task.first_uncleanable_offset,
        segments_before=task.segments_before,
        active_segment=ROLLED if task.roll == "done" else None,
        bytes_before=sum(segment.log_bytes for segment in task.segments),
    )


def unreplaced(task: CleaningTask, row: ResultRow, status: str, error: ErrorText) -> ResultRow:
    """Return the row, with this status, of a partition of which no segment was replaced."""
    if task.roll != "done":
        return row.unchanged(status, error)
    rolled = joined([error, "the active segment was rolled before, and a broker accepts the rolled log"])
    return replace(row.unchanged(status, rolled), segments_after=len(task.segments))


def remove_unneeded(
    fs: FileSystem, task: CleaningTask, result: CleaningResult | None = None, *, again: bool = False
) -> int:
    """Remove the scratch files of task attempts that were lost with their executor, or that a duplicate attempt
    overtook: Spark does not report such attempts. The files of `result` are retained and, with `again`, the saved state
    with which the task can run again. Return the number of removed files.

    An attempt that is still running loses its files and fails, or writes more files, which are removed when the
    partition is done. Each attempt has its own names of files.
    """
    kept = set() if result is None else written(result)
    if result is not None and task.prepared is not None:
        kept |= task.prepared.files
    if again and task.saved_state is not None:
        kept |= {file.name for file in task.saved_state.files}
    return remove_lost_scratch(fs, task.scratch_path, task.run_id, kept)


def written(result: CleaningResult) -> set[str]:
    """Return the names of the scratch files of a pass: its outputs, and the state that it saves for the next pass."""
    files = {file.name for group in result.groups for segment in group.segments for file in segment.files}
    files |= {file.scratch_name for file in result.placed or () if file.scratch_name}
    return files | ({file.name for file in result.rest.files} if result.rest else set())


def value_of(outcome: Outcome[R]) -> R:
    """Return the result of a task, or raise its problem."""
    if outcome.problem is not None or outcome.value is None:
        raise outcome.problem or KeytailError(
            "internal error: a task returned no result", remedy=REPORT_IT, slug="task-without-result"
        )
    return outcome.value


def _is_replaced(fs: FileSystem, task: CleaningTask, group: GroupOutput, recovered: Sequence[str]) -> bool:
    """Return whether recovery finished the whole group, and not only some of its replacements."""
    if not any(sentence.startswith("finished the replacement") for sentence in recovered):
        return False
    sizes = {entry.name: entry.size_bytes for entry in fs.scan(task.partition_path)}
    wanted = {
        names.segment_file(out.base_offset, names.LOG): file.size_bytes
        for out in group.segments
        for file in out.files
        if file.suffix == names.LOG
    }
    removed = {names.segment_file(base, names.LOG) for base in group.source_bases} - set(wanted)
    return all(sizes.get(name) == size for name, size in wanted.items()) and not removed & set(sizes)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
