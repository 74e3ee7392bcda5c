"""Declares what a compaction requires of the destination of its output. The output replaces the segments, is put into
the target of a run out of place, or remains beside the segments for a later run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from keytail.compact.keeper import Keeper
from keytail.compact.task import CleaningResult, CleaningTask
from keytail.errors import Explained, KeytailError
from keytail.log.fs import FileSystem
from keytail.run.rows import ResultRow


class Installation(Protocol):
    """The installation of one partition's output, over all passes. `task` is the task of the latest pass; `row` has the
    results so far; if `problem` is set, the partition has failed. The methods are called in the order of their
    declaration, `install` once per pass, `fail` at any time.
    """

    task: CleaningTask
    row: ResultRow
    problem: KeytailError | None

    @property
    def made(self) -> list[int]:
        """The base offsets of the segments that have been installed so far."""

    def install(self, result: CleaningResult, is_stopped: Callable[[], bool]) -> None:
        """Put the output of one pass into the destination, durably. Raises Interrupted if `is_stopped` returns true
        before all of it is in place, and another KeytailError or OSError if an operation fails; the caller then calls
        `fail`."""

    @property
    def result(self) -> CleaningResult:
        """The result of the last pass."""

    def remove_unneeded(self) -> None:
        """Remove all scratch files of a finished partition, including those of lost attempts."""

    def warnings(self) -> Iterator[str]:
        """Return the warnings about a finished partition."""

    def final_row(self) -> ResultRow:
        """Return the row of a finished partition."""

    def fail(self, problem: KeytailError) -> None:
        """End a partition that is not done: finish or undo what was begun, and set `problem` and `row`."""


class Destination(Protocol):
    """The destination of the output of a run. `clean` is the function that a task runs; `keeper`, if not None, backs up
    files that are replaced. `shared_storage` asserts that no broker can access log dirs on a network file system.
    `phase` is the name of an installation in the run's progress.
    """

    @property
    def fs(self) -> FileSystem: ...
    @property
    def clean(self) -> Callable[[CleaningTask, str], CleaningResult]: ...
    @property
    def keeper(self) -> Keeper | None: ...
    @property
    def shared_storage(self) -> bool: ...
    @property
    def phase(self) -> str: ...

    def begin(self, task: CleaningTask, row: ResultRow) -> Installation:
        """Return the installation of a partition whose task has ended; change nothing."""

    def move_checkpoints(self, done: Sequence[Installation]) -> Iterator[tuple[Installation, Explained]]:
        """Set the first dirty offsets of the next rounds for partitions whose last pass is installed, if this kind of
        run moves checkpoints; yield each partition for which this failed, with the reason."""
