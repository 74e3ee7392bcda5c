"""Leaves the output of a run that prepares compactions beside the segments until a later run commits it, and writes a
record of each preparation (PREPARED.md in this directory).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from keytail.compact.detail import detail_of_result
from keytail.compact.prepared.record import Basis, Record, Source, encode_record, record_name, see_outputs, see_sources
from keytail.compact.running.destination import Installation
from keytail.compact.running.replacing import (
    Interrupted,
    PastDeadline,
    remove_unneeded,
    warnings_of,
    with_numbers,
    written,
)
from keytail.compact.task import CleaningResult, CleaningTask, Prepared
from keytail.errors import Explained, KeytailError, Refused, in_words
from keytail.format import names
from keytail.log.fs import FileSystem
from keytail.log.lock import refuse_lost
from keytail.log.partition import SegmentFacts
from keytail.run.ended import SparkEnded
from keytail.run.rows import ResultRow, status_of
from keytail.run.tasks import as_problem

AGAIN = "Run the command again, or run `compact --execute` without a preparation while the broker is stopped"


class SourcesChanged(Refused):
    """The error that a broker has replaced, removed or truncated segments since they were listed."""

    default_slug = "segments-changed-meanwhile"


@dataclass(frozen=True)
class Found:
    """The state of a partition before its task began. `sources` are the segments that may be replaced."""

    basis: Basis
    sources: tuple[Source, ...]


def refuse_changed_sources(fs: FileSystem, task: CleaningTask, sources: Sequence[Source]) -> None:
    """Raise SourcesChanged if a broker has replaced, removed or truncated segments since the task was planned."""
    last = task.segments[-1]
    try:
        kept = see_sources(fs, task.partition_path, [*_of(task, sources), last])
    except OSError as problem:
        raise SourcesChanged("a segment was removed after it was listed: " + in_words(problem), remedy=AGAIN) from None
    for before, now in zip(sources, kept, strict=False):
        if before != now:
            path = task.path(now.base_offset, names.LOG)
            raise SourcesChanged("a segment was replaced after it was listed", path=path, remedy=AGAIN)
    if kept[-1].log_bytes < last.log_bytes:
        path = task.path(last.base_offset, names.LOG)
        raise SourcesChanged("the log was truncated after it was listed", path=path, remedy=AGAIN)


def _of(task: CleaningTask, sources: Sequence[Source]) -> list[SegmentFacts]:
    bases = {source.base_offset for source in sources}
    return [segment for segment in task.segments if segment.base_offset in bases]


@dataclass
class Preparing:
    """The installation of one partition, which writes only the record of its preparation."""

    target: Prepare
    task: CleaningTask
    row: ResultRow
    problem: KeytailError | None = None
    made: list[int] = field(default_factory=list)  # always empty: a preparation replaces no segments
    _result: CleaningResult | None = None
    _record_name: str = ""

    def install(self, result: CleaningResult, is_stopped: Callable[[], bool]) -> None:
        """Write the record of the preparation durably. Raises Interrupted after a signal, and SourcesChanged if the
        sources have changed."""
        if is_stopped():
            raise Interrupted("interrupted")
        assert result.rest is None, "a preparation has one pass"
        fs, path, found = self.target.fs, self.task.partition_path, self.target.found[self.task.partition_path]
        replaced = {base for group in result.groups for base in group.source_bases}
        sources = tuple(source for source in found.sources if source.base_offset in replaced)
        fs.fsync_dir(path)  # the names of the outputs must be durable before the record that lists them
        record = Record(
            run_id=self.task.run_id,
            topic=self.task.topic,
            partition=self.task.partition,
            prepared_ms=self.task.now_ms,
            first_dirty_offset=self.task.first_dirty_offset,
            basis=found.basis,
            sources=sources,
            outputs=see_outputs(fs, path, frozenset(written(result))),
            result=result,
        )
        refuse_changed_sources(fs, self.task, found.sources)
        refuse_lost(fs, path)
        name = record_name(sources[0].base_offset, self.task.run_id)
        temporary = names.scratch_file(sources[0].base_offset, self.task.run_id, "new", names.PREPARED)
        like = self.task.like(fs, self.task.path(sources[0].base_offset, names.LOG))
        fs.put_file(os.path.join(path, name), encode_record(record), like, os.path.join(path, temporary))
        fs.fsync_dir(path)
        self._result, self._record_name = result, name

    @property
    def result(self) -> CleaningResult:
        assert self._result is not None
        return self._result

    def final_row(self) -> ResultRow:
        result = self.result
        detail = detail_of_result(self.task, result, result.sources, result.phases_s, result.key_counts)
        return replace(with_numbers(self.row, result), status="prepared", detail=detail)

    def remove_unneeded(self) -> None:
        """Remove the scratch files of lost attempts, but retain the prepared files."""
        prepared = Prepared(self.result, frozenset({self._record_name}), self.task.run_id)
        remove_unneeded(self.target.fs, replace(self.task, prepared=prepared), self.result)

    def warnings(self) -> Iterator[str]:
        return warnings_of(self.row.name, self.result)

    def fail(self, problem: KeytailError) -> None:
        """Discard the preparation of a partition, and set the partition's row. If a broker has changed the log since it
        was listed, the row reports this change, because it may have caused `problem`.
        """
        remove_unneeded(self.target.fs, self.task)
        try:
            refuse_changed_sources(self.target.fs, self.task, self.target.found[self.task.partition_path].sources)
        except (SourcesChanged, OSError) as changed:
            problem = as_problem(changed)
        self.problem = problem
        skipped = isinstance(problem, SourcesChanged | Interrupted | PastDeadline | SparkEnded)
        status = "skipped" if skipped else status_of(problem)
        self.row = replace(self.row.unchanged(status, in_words(problem)), problem=problem)


@dataclass(frozen=True)
class Prepare:
    """The destination of a run that only prepares. `found` has the state of each partition before its task, by path."""

    fs: FileSystem
    found: Mapping[str, Found]
    clean: Callable[[CleaningTask, str], CleaningResult]
    shared_storage: bool = False
    keeper: None = None
    phase: str = "record"

    def begin(self, task: CleaningTask, row: ResultRow) -> Preparing:
        return Preparing(self, task, row)

    def move_checkpoints(self, done: Sequence[Installation]) -> Iterator[tuple[Installation, Explained]]:
        """Return an empty iterator: the checkpoints are moved by the run that commits."""
        return iter(())

