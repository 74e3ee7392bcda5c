"""The state that all threads of a compaction share: callbacks, the reason to stop, and the rows of its partitions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from keytail.cli.progress import Reporter
from keytail.compact.running.replacing import planned_row, unreplaced
from keytail.compact.task import CleaningTask
from keytail.console import print_message
from keytail.errors import ErrorText
from keytail.log.lock import LockLost
from keytail.run.ended import SparkEnded
from keytail.run.rows import NOT_BEGUN, ResultRow


@dataclass(frozen=True)
class Events:
    """The callbacks of a run, called from any thread: `on_row` with the row of each partition when the partition ends,
    one call at a time; `on_note` with further messages about a partition; `on_trace` with the Python traceback of a
    task or of the driver; `on_phase` with the name of a partition and of the driver's current phase for it.
    """

    on_row: Callable[[ResultRow], None] = lambda row: None
    on_note: Callable[[str], None] = lambda text: None
    on_trace: Callable[[str], None] = lambda text: None
    on_phase: Callable[[str, str], None] = lambda name, phase: None

    @classmethod
    def reported_by(cls, reporter: Reporter) -> Events:
        return cls(
            on_row=lambda row: reporter.done(row.name, row.status, row.bytes_before or 0, row.error),
            on_note=reporter.note,
            on_trace=lambda trace: print_message(trace, "error"),
            on_phase=reporter.phase,
        )


SILENT = Events()


@dataclass
class Stop:
    """Whether a run has to stop, and why. Any thread may set a field; nothing resets it.

    Once `asked` is true, only groups that are already being installed are finished. `deadline_s` is the
    time.monotonic() after which no bundle and no pass begins. After a lock is lost, no bundle begins.
    """

    deadline_s: float | None = None
    asked: bool = False
    crash: BaseException | None = None  # an error of this program, not of a partition
    spark_ended: SparkEnded | None = None
    lock_lost: LockLost | None = None  # the lock of one log dir was lost

    def is_asked(self) -> bool:
        return self.asked

    def because_spark_ended(self, problem: SparkEnded) -> None:
        self.asked = True
        self.spark_ended = problem

    def because_of_crash(self, crash: BaseException) -> None:
        self.asked = True
        self.crash = crash


@dataclass
class Rows:
    """The rows of the partitions that have ended, and the tasks of those that have begun, by path. `lock` is the lock
    of the run; a caller of a method may already hold it.
    """

    on_row: Callable[[ResultRow], None]
    lock: threading.Condition
    by_path: dict[str, ResultRow] = field(default_factory=dict)
    begun: dict[str, CleaningTask] = field(default_factory=dict)

    def begin(self, tasks: Iterable[CleaningTask]) -> None:
        """Record that the partitions of `tasks` have begun. Called again when a task has been changed, such as by a
        roll."""
        with self.lock:
            self.begun.update((task.partition_path, task) for task in tasks)

    def add(self, task: CleaningTask, row: ResultRow) -> None:
        with self.lock:
            self.by_path[task.partition_path] = row
            self.on_row(row)

    def of_stopped_run(self, tasks: Iterable[CleaningTask]) -> list[ResultRow]:
        """Return a row for each task, also for partitions that have not ended or not begun."""
        return [self.by_path.get(task.partition_path) or self._of_stopped(task) for task in tasks]

    def _of_stopped(self, task: CleaningTask) -> ResultRow:
        if (begun := self.begun.get(task.partition_path)) is not None:
            text = ErrorText("interrupted before anything was replaced")
            return unreplaced(begun, planned_row(begun), NOT_BEGUN, text)
        return not_begun_row(task)


def not_begun_row(task: CleaningTask) -> ResultRow:
    return planned_row(task).unchanged(NOT_BEGUN, ErrorText("the run was interrupted before this partition was begun"))
