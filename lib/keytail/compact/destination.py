"""Where a compaction puts the output of its tasks: in place of their sources, or in another tree."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from keytail.compact.keeper import Keeper
from keytail.compact.replacing import Replacing
from keytail.compact.task import CleaningResult, CleaningTask
from keytail.errors import KeytailError
from keytail.format import names
from keytail.log.checkpoint import update_offsets
from keytail.log.fs import FileSystem
from keytail.run.rows import ResultRow
from keytail.run.tasks import Outcome


class Installation(Protocol):
    """The installation of one partition's output, over all its rounds: `task` is that of the last round begun, `made`
    are the base offsets of installed segments. With a `problem` the partition has ended.
    """

    task: CleaningTask
    row: ResultRow
    problem: KeytailError | None
    made: list[int]

    @property
    def result(self) -> CleaningResult:
        """The result of the last round."""

    def install(self, result: CleaningResult, is_stopped: Callable[[], bool]) -> None:
        """Install the output of one round. Raises Interrupted between two groups."""

    def fail(self, problem: KeytailError) -> None:
        """End a partition that is not done."""

    def compacted_row(self) -> ResultRow:
        """Return the row of a partition that is done."""

    def oddities(self) -> Iterator[str]:
        """Return the warnings about a partition that is done."""


class Destination(Protocol):
    """`InPlace`, or out_of_place/placing.py's `InTarget`.

    `clean` is the function of a task. `shared_storage` asserts that no broker can access log dirs that are on a network
    file system. `phase` names an installation in the progress of the run.
    """

    @property
    def fs(self) -> FileSystem: ...
    @property
    def clean(self) -> Callable[[CleaningTask, str], CleaningResult]: ...
    @property
    def shared_storage(self) -> bool: ...
    @property
    def keeper(self) -> Keeper | None: ...
    @property
    def phase(self) -> str: ...

    def begin(self, task: CleaningTask, row: ResultRow) -> Installation:
        """Return the installation of one partition, with nothing done."""

    def of_fan_out(self, task: CleaningTask, outcome: Outcome[CleaningResult]) -> Outcome[CleaningResult]:
        """Return what the outcome of a fan-out means here."""

    def move_checkpoints(self, done: Sequence[Installation]) -> Iterator[tuple[Installation, KeytailError | OSError]]:
        """Move the checkpoints of partitions that are durably installed, and return those for which it failed."""


@dataclass(frozen=True)
class InPlace:
    """Replaces segments by what tasks have made of them. `hosted` names the partitions of each log dir: the entries
    that its checkpoint keeps.
    """

    fs: FileSystem
    hosted: Mapping[str, Collection[tuple[str, int]]]
    clean: Callable[[CleaningTask, str], CleaningResult]
    keeper: Keeper | None = None
    shared_storage: bool = False
    phase: str = "replace"

    def begin(self, task: CleaningTask, row: ResultRow) -> Installation:
        return Replacing(self.fs, self.keeper, task, row)

    def of_fan_out(self, task: CleaningTask, outcome: Outcome[CleaningResult]) -> Outcome[CleaningResult]:
        return outcome

    def move_checkpoints(self, done: Sequence[Installation]) -> Iterator[tuple[Installation, KeytailError | OSError]]:
        """One replacement of the file per log dir."""
        by_log_dir: dict[str, list[Installation]] = {}
        for one in done:
            by_log_dir.setdefault(os.path.dirname(one.task.partition_path), []).append(one)
        for log_dir, there in by_log_dir.items():
            offsets = {(one.task.topic, one.task.partition): one.result.end_offset for one in there}
            try:
                move_checkpoints(self.fs, log_dir, offsets, self.hosted[log_dir])
            except (KeytailError, OSError) as problem:
                yield from ((one, problem) for one in there)


def move_checkpoints(
    fs: FileSystem,
    log_dir: str,
    offsets: Mapping[tuple[str, int], int],
    hosted: Collection[tuple[str, int]],
) -> None:
    """Set where the next rounds begin, in the checkpoint file that a broker also reads."""
    update_offsets(fs, os.path.join(log_dir, names.CLEANER_CHECKPOINT), offsets, hosted=hosted)
