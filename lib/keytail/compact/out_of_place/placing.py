"""The driver of a compaction out of place: puts the output of tasks into the target, and creates each partition's row.

Tasks write scratch files in the target or send the files to an object store. The driver renames scratch files and
writes the record of the contents. The source is never changed (compact/out_of_place/OUT_OF_PLACE.md).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from keytail.compact.detail import detail_of_result
from keytail.compact.out_of_place.object_store import Store, local_scratch
from keytail.compact.out_of_place.output_record import Entries, OutputRecord, PlacedFile
from keytail.compact.out_of_place.output_tree import TargetEntry
from keytail.compact.out_of_place.partition import (
    clean_or_not,
    copy_rest,
    outputs_of,
    place_partition,
    refuse_other_files,
    remove,
)
from keytail.compact.running.destination import Installation
from keytail.compact.running.replacing import (
    Interrupted,
    PastDeadline,
    remove_unneeded,
    value_of,
    warnings_of,
    with_numbers,
    written,
)
from keytail.compact.task import CleaningResult, CleaningTask
from keytail.compact.worker import on_worker
from keytail.errors import NO_ERROR, Explained, KeytailError, in_words
from keytail.log.fs import LOCAL, FileSystem
from keytail.run.ended import SparkEnded
from keytail.run.engine import Engine
from keytail.run.hosts import refuse_network_here, refuse_unseen
from keytail.run.rows import ResultRow, status_of
from keytail.run.tasks import Outcome
from keytail.run.watching import sending_progress


class Tree(Protocol):
    """A log dir of the target, on a mounted path or in an object store."""

    def partition_path(self, name: str) -> str: ...
    def entries(self) -> dict[str, TargetEntry]: ...
    def other_files(self) -> list[str]: ...
    def make(self) -> None: ...
    def make_partition(self, name: str, source: str) -> None: ...
    def commit(self, record: OutputRecord, placed: Sequence[PlacedFile]) -> OutputRecord: ...
    def read(self, name: str) -> bytes | None: ...
    def put(self, name: str, data: bytes) -> None: ...
    def remove(self, root_files: Sequence[str]) -> None: ...


@dataclass(frozen=True)
class Intended:
    """The driver's decision for one partition: where it is placed, and its row, with the reason if it is copied.

    `entries` are the entries of the source's checkpoints; in a copy, `repaired` replaces the entry of the cleaner's
    checkpoint if this entry is outside the log. `notes` are messages that are printed when the partition has been
    placed.
    """

    tree: Tree
    row: ResultRow
    entries: Entries
    repaired: int | None = None
    notes: tuple[str, ...] = ()


@dataclass
class Placing:
    """The installation of one partition's output in the target."""

    target: InTarget
    task: CleaningTask
    row: ResultRow
    intended: Intended
    problem: KeytailError | None = None
    made: list[int] = field(default_factory=list)
    _result: CleaningResult | None = None
    _started: bool = False

    def install(self, result: CleaningResult, is_stopped: Callable[[], bool]) -> None:
        if result.placed is None:
            outcome = self.target.finish(self.task, result)
            result = value_of(outcome)
            refuse_unseen(self.target.fs, self.task.scratch_path, sorted(written(result)), outcome.host)
        if is_stopped():
            raise Interrupted("interrupted")
        refuse_other_files(self.target.fs, self.task)
        assert result.placed is not None
        self._started = True
        record = self.intended.tree.commit(self._record(result), result.placed)
        self.target.placed[self.task.partition_path] = record
        self._result = result
        self.made = [out.base_offset for group in result.groups for out in group.segments]

    def _record(self, result: CleaningResult) -> OutputRecord:
        assert self.task.out_of_place is not None
        is_copy = self.task.out_of_place.only_copies or bool(result.refusal)
        entries = self.intended.entries
        if not is_copy:
            entries = entries._replace(cleaner=result.end_offset)
        elif self.intended.repaired is not None:
            entries = entries._replace(cleaner=self.intended.repaired)
        return replace(
            unfinished(self.task),
            is_finished=True,
            written_ms=time.time_ns() // 1_000_000,
            source_files=self.task.out_of_place.source_files,
            source_entries=self.intended.entries,
            entries=entries,
            copied_for=(result.refusal or self.intended.row.error) if is_copy else NO_ERROR,
            clean_to=None if is_copy else result.end_offset,
        )

    @property
    def result(self) -> CleaningResult:
        assert self._result is not None
        return self._result

    def final_row(self) -> ResultRow:
        """Return the row of a partition that has been placed, compacted or copied."""
        assert self.task.out_of_place is not None
        if self.result.refusal:
            row = self.row.unchanged("refused", "copied unchanged: " + self.result.refusal)
        elif self.task.out_of_place.only_copies:
            row = self.intended.row.with_reason_after("copied unchanged: ")
        else:
            result = self.result
            detail = detail_of_result(self.task, result, result.sources, result.phases_s, result.key_counts)
            return replace(with_numbers(self.row, result), detail=detail)
        return replace(row, start_ms=self.row.start_ms, end_ms=time.time_ns() // 1_000_000)

    def remove_unneeded(self) -> None:
        remove_unneeded(self.target.fs, self.task)

    def warnings(self) -> Iterator[str]:
        yield from warnings_of(self.row.name, self.result)
        yield from self.intended.notes

    def fail(self, problem: KeytailError) -> None:
        """Set the row of a partition that was not placed, and remove its scratch files."""
        self.problem = problem
        remove_unneeded(self.target.fs, self.task)
        status = "skipped" if isinstance(problem, Interrupted | PastDeadline | SparkEnded) else status_of(problem)
        assert self.task.out_of_place is not None
        left = "the source and its copy in the target, if there is one, are unchanged"
        if self._started or self.task.out_of_place.is_local:
            left = "the source is unchanged; the copy in the target may be incomplete, and the next run writes it again"
        self.row = replace(self.row.unchanged(status, in_words(problem) + f". Not placed: {left}"), problem=problem)


def unfinished(task: CleaningTask) -> OutputRecord:
    """Return the record of a partition whose files are about to be replaced."""
    return OutputRecord(
        run_id=task.run_id,
        topic=task.topic,
        partition=task.partition,
        source=task.partition_path,
        written_ms=0,
        is_finished=False,
        clean_shutdown=task.clean_shutdown,
        source_files=(),
        source_entries=Entries(),
        entries=Entries(),
        files=(),
    )


@dataclass(frozen=True)
class Worker:
    """The settings of the run that every task needs. `stores`: each log dir's store; empty if the target is mounted."""

    tasks_per_host: int
    shared_storage: bool = False
    stores: Mapping[str, Store] = field(default_factory=dict)

    def store_of(self, task: CleaningTask) -> Store | None:
        return self.stores.get(os.path.dirname(task.partition_path))

    def place(self, task: CleaningTask, attempt: str) -> CleaningResult:
        """Clean one partition, in a task; write or send all files of the partition, and return the result."""
        fs, task = on_worker(self.tasks_per_host, task, attempt)
        store = self.store_of(task)
        with sending_progress(task.partition_path, attempt, "copy"):
            if store is None:
                self._refuse_network(task)
                return place_partition(fs, task)
            with local_scratch(task.scratch_path):
                return self._send(fs, store, task, clean_or_not(fs, task))

    def finish(self, work: tuple[CleaningTask, CleaningResult], attempt: str) -> CleaningResult:
        """Copy or send the remaining files of a partition whose groups were written by a fan-out; return the result
        with all placed files."""
        given, result = work
        fs, task = on_worker(self.tasks_per_host, given, attempt)
        store = self.store_of(task)
        if store is not None:
            with local_scratch(task.scratch_path):
                return self._send(fs, store, task, result)
        self._refuse_network(task)
        copies = copy_rest(fs, task, result.groups)
        try:
            refuse_other_files(fs, task)
        except BaseException:
            remove(fs, task, (file.scratch_name for file in copies))
            raise
        return replace(result, placed=(*outputs_of(result.groups), *copies))

    def _send(self, fs: FileSystem, store: Store, task: CleaningTask, result: CleaningResult) -> CleaningResult:
        """Send the files to the store; return a result without groups, since no file has a scratch name in the
        store."""
        placed = store.send(fs, task, result.groups, unfinished(task))
        refuse_other_files(fs, task)
        return replace(result, groups=(), placed=placed)

    def _refuse_network(self, task: CleaningTask) -> None:
        if not self.shared_storage:
            refuse_network_here(LOCAL, os.path.dirname(task.scratch_path))


@dataclass
class InTarget:
    """The destination of a run that does not change its source. `intended` returns the driver's decision for a task;
    `placed` maps the path of a source partition to its record in the target.
    """

    fs: FileSystem
    engine: Engine
    worker: Worker
    intended: Callable[[CleaningTask], Intended]
    placed: dict[str, OutputRecord]
    keeper: None = None
    phase: str = "put in place"

    @property
    def clean(self) -> Callable[[CleaningTask, str], CleaningResult]:
        return self.worker.place

    @property
    def shared_storage(self) -> bool:
        return self.worker.shared_storage

    def begin(self, task: CleaningTask, row: ResultRow) -> Placing:
        return Placing(self, task, row, self.intended(task))

    def move_checkpoints(self, done: Sequence[Installation]) -> Iterator[tuple[Installation, Explained]]:
        """Do nothing: output_root.py writes the checkpoints of the target when the run has ended."""
        return iter(())

    def finish(self, task: CleaningTask, result: CleaningResult) -> Outcome[CleaningResult]:
        """Run a task that copies or sends the files that a fan-out did not write; return its outcome."""
        name = f"copy the rest of {os.path.basename(task.partition_path)}"
        [outcome] = self.engine.run_bundle([(task, result)], self.worker.finish, name=name)
        return outcome
