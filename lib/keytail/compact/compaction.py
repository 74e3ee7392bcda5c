"""The driver of a compaction: schedules partitions, installs the output of tasks, and moves checkpoints.

Tasks only write scratch files; this module, in the driver, renames them and moves checkpoints. It guarantees that a
partition's checkpoint moves only after its new segments are durable, and that scratch space in flight stays within its
limit. The caller holds the locks and has decided what is to be cleaned.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from keytail.compact.bundles import Bundle, BundleSize, Waiting, bundles_in_flight, for_next_round
from keytail.compact.cleaner import next_round
from keytail.compact.fan_out.on_spark import fan_out_on_spark
from keytail.compact.keeper import Keeper
from keytail.compact.out_of_place.partition import uncleaned
from keytail.compact.replacing import (
    Interrupted,
    PastDeadline,
    Replacing,
    planned_row,
    remove_lost_scratch,
    written,
)
from keytail.compact.task import CleaningResult, CleaningTask, NeedsFanOut
from keytail.compact.worker import clean_on_worker
from keytail.errors import REPORT_IT, KeytailError, Refused
from keytail.format import names
from keytail.log.checkpoint import update_offsets
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.lock import LockLost
from keytail.run.ended import SparkEnded, await_signal, sweep
from keytail.run.engine import Engine, end_tasks
from keytail.run.hosts import refuse_unseen
from keytail.run.rows import ResultRow, status_of
from keytail.run.storage import ScratchSpace
from keytail.run.tasks import Outcome, explained
from keytail.threads import inheriting

if TYPE_CHECKING:
    from keytail.compact.out_of_place.placing import Placing
    from keytail.ledger.write import Ledger


@dataclass
class Compaction:
    """One run over many partitions. `on_row` is called with the row of each partition when it ends, from any thread,
    one call at a time.

    `on_note` is called with further messages about a partition, `on_trace` with the Python traceback of a task,
    `on_phase` with what the driver does with a partition. A `ledger` is notified of each bundle before it begins, and
    after its last commit; a bundle does not begin if the ledger cannot be written.

    `hosted` names the partitions of each log dir: the entries that its checkpoint keeps. `deadline_s` is a
    time.monotonic() after which no bundle and no round begins; none begins either once a lock is lost. `shared_storage`
    asserts that no broker can access log dirs that are on a network file system.

    Partitions run in bundles (bundles.py), one Spark job each. The groups of a bundle are installed, then its
    checkpoints move together, in one replacement of the file of each log dir. A run that is killed before that cleans
    those partitions again. A partition that does not fit into the scratch space is written in rounds, alone on its file
    system: one job per round, whose groups are installed before the next. Its checkpoint moves after the last.

    Out of place (`place`, compact/out_of_place/placing.py), nothing is replaced and no checkpoint moves: the output of
    tasks is put in the target, one partition after the other.
    """

    engine: Engine
    tasks: Sequence[CleaningTask]
    space: ScratchSpace
    hosted: Mapping[str, Collection[tuple[str, int]]]
    on_row: Callable[[ResultRow], None] = lambda row: None
    on_trace: Callable[[str], None] = lambda text: None
    on_note: Callable[[str], None] = lambda text: None
    on_phase: Callable[[str, str], None] = lambda name, phase: None
    shared_storage: bool = False
    deadline_s: float | None = None
    fs: FileSystem = LOCAL
    clean: Callable[[CleaningTask, str], CleaningResult] | None = None
    keeper: Keeper | None = None
    ledger: Ledger | None = None
    place: Callable[[CleaningTask, ResultRow], Placing] | None = None
    _rows: dict[str, ResultRow] = field(default_factory=dict)
    _waiting: Waiting = field(init=False)
    _cleaning: int = 0  # partitions whose tasks have not returned
    _bundles: int = 0  # bundles that have not ended
    _begun: int = 0  # number of bundles begun, for the ledger
    _stopped: bool = False
    _crash: BaseException | None = None
    _ended: SparkEnded | None = None
    _lost: LockLost | None = None
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def run(self) -> list[ResultRow]:
        """Compact, install and checkpoint every task's partition; return one row each, in the order of the tasks."""
        cores = self.engine.concurrent_tasks
        parallel = self.engine.parallel_tasks
        size = BundleSize.of(len(self.tasks), parallel, jobs_cost=self.engine.session is not None)
        if self.clean is None:
            self.clean = partial(clean_on_worker, cores, shared_storage=self.shared_storage)
        self._waiting = Waiting(self.tasks, size, self.space, self.fs, self.keeper)
        # Not joined: if a signal interrupts a join, Python 3.11 marks a thread that still runs as finished.
        ends: list[threading.Event] = []
        try:
            for number in range(bundles_in_flight(len(self.tasks), parallel)):
                ends.append(threading.Event())
                work = inheriting(partial(self._work, 2 * parallel, ends[-1]))
                threading.Thread(target=work, name=f"bundles-{number}", daemon=True).start()
            for end in ends:
                end.wait()
            if self._ended is not None:
                await_signal()
                raise self._ended
        except BaseException:  # a signal: the group that is being installed is finished, nothing else begins
            self._stopped = True
            end_tasks(self.engine, lambda: not all(end.is_set() for end in ends))
            if self._crash is not None:
                self.on_trace("".join(traceback.format_exception(self._crash)))
            raise
        if self._crash is not None:
            raise self._crash
        return [self._rows[task.partition_path] for task in self.tasks]

    def rows_so_far(self) -> list[ResultRow]:
        """Return a row for each task of a stopped run, in the order of the tasks."""
        not_done = "interrupted before anything was replaced"
        return [
            self._rows.get(task.partition_path) or planned_row(task).unchanged("skipped", not_done)
            for task in self.tasks
        ]

    def remove_scratch(self) -> None:
        """Remove the scratch files that tasks of a stopped run have left."""
        sweep(lambda: sum(remove_lost_scratch(self.fs, task) for task in self.tasks))

    def _work(self, most_cleaning: int, end: threading.Event) -> None:
        try:
            while bundle := self._next_bundle(most_cleaning):
                try:
                    self._run(bundle.tasks)
                finally:
                    with self._changed:
                        self._bundles -= 1
                        self._waiting.release(bundle)
                        self._changed.notify_all()
        except SparkEnded as ended:
            self._end_early(ended)
        except BaseException as crash:  # an error of this program, not of a partition: raised again by run()
            self._stopped = True
            self._crash = crash
        finally:
            end.set()

    def _end_early(self, ended: SparkEnded) -> None:
        self._stopped = True
        self._ended = ended

    def _run_tasks(self, bundle: list[CleaningTask], name: str) -> list[Outcome[CleaningResult]]:
        if bundle[0].fan_out == "always" or bundle[0].fanned_out is not None:  # such a bundle has one task
            return [self._fan_out(task) for task in bundle]
        return self.engine.run_bundle(
            bundle,
            self._clean(),
            name=name,
            stopped=lambda: self._stopped,
            before_again=lambda task: remove_lost_scratch(self.fs, task, again=True),
        )

    def _run(self, bundle: list[CleaningTask]) -> None:
        with self._changed:
            self._begun += 1
            number = self._begun
        label = f"compact {os.path.basename(bundle[0].partition_path)}"
        label += f" and {len(bundle) - 1} more" if len(bundle) > 1 else ""
        try:
            problem = self._intend(number, bundle)
            outcomes = [Outcome(None, problem) for _ in bundle] if problem else self._run_tasks(bundle, label)
        finally:
            with self._changed:  # the next bundle may begin while this one is installed
                self._cleaning -= len(bundle)
                self._changed.notify_all()
        answers = list(zip(bundle, outcomes, strict=True))
        self._finish_and_add(number, [one for one in answers if not isinstance(one[1].problem, NeedsFanOut)])
        for task, outcome in answers:
            if isinstance(outcome.problem, NeedsFanOut) and not self._stopped:
                self._finish_and_add(number, [(task, self._in_place_of_one_task(task, outcome.problem))])

    def _in_place_of_one_task(self, task: CleaningTask, reason: NeedsFanOut) -> Outcome[CleaningResult]:
        name = planned_row(task).name
        if self.engine.session is None:
            with_spark = "with --master, or --fan-out always, Spark compacts all of it"
            self.on_note(f"{name}: {reason.what}: it is compacted as far as they fit; {with_spark}")
            [outcome] = self._run_tasks([replace(task, fan_out="never")], f"compact {name}, a part")
            return outcome
        self.on_note(f"{name}: {reason.what}: all tasks share this partition (fan-out)")
        return self._fan_out(task)

    def _fan_out(self, task: CleaningTask) -> Outcome[CleaningResult]:
        outcome = fan_out_on_spark(
            self.engine,
            task,
            shared_storage=self.shared_storage,
            on_trace=self.on_trace,
            stopped=lambda: self._stopped,
        )
        if self.place is not None and isinstance(outcome.problem, Refused):  # as with one task: it is copied
            refused = replace(uncleaned(task), refusal=str(outcome.problem))
            return replace(outcome, value=refused, problem=None)
        return outcome

    def _next_bundle(self, most_cleaning: int) -> Bundle | None:
        """Wait for room, then return a bundle with its space reserved, or None if nothing is left to begin.

        Partitions that cannot be rewritten even alone get their rows here.
        """
        with self._changed:
            while self._waiting and not self._stopped:
                if self._lost is not None:
                    self._refuse_waiting(self._lost)
                    break
                if self.deadline_s is not None and time.monotonic() >= self.deadline_s:
                    self._give_up_waiting()
                    break
                bundle = self._waiting.take() if self._cleaning < most_cleaning else None
                if bundle is not None:
                    self._cleaning += len(bundle.tasks)
                    self._bundles += 1
                    return bundle
                if self._bundles == 0:
                    self._refuse_waiting()
                    break
                self._changed.wait(timeout=1.0)
        return None

    def _refuse_waiting(self, lost: LockLost | None = None) -> None:
        for task in self._waiting.take_all():
            problem = lost or self._waiting.refusal(task)
            row = planned_row(task).unchanged(status_of(problem), str(problem))
            self._add(task, replace(row, problem=problem))

    def _give_up_waiting(self) -> None:
        for task in self._waiting.take_all():
            self._add(task, planned_row(task).unchanged("skipped", "not started: --deadline had passed"))

    def _add(self, task: CleaningTask, row: ResultRow) -> None:
        with self._changed:  # a re-entrant lock
            self._rows[task.partition_path] = row
            self.on_row(row)

    def _intend(self, number: int, bundle: Sequence[CleaningTask]) -> KeytailError | None:
        try:
            if self.ledger is not None:
                self.ledger.intend(number, [planned_row(task) for task in bundle])
        except KeytailError as problem:
            return problem
        return None

    def _finish_and_add(self, number: int, answers: Sequence[tuple[CleaningTask, Outcome[CleaningResult]]]) -> None:
        for (task, _), row in zip(answers, self._finish(answers, number), strict=False):
            self._add(task, row)

    def _finish(
        self, answers: Sequence[tuple[CleaningTask, Outcome[CleaningResult]]], number: int | None = None
    ) -> list[ResultRow]:
        """Install the output of tasks, one partition after the other, then move the checkpoints of all that succeeded.

        Returns a row for each partition that was begun, with how far it got; a stopped run begins no more of them.
        """
        begun: list[Replacing | Placing] = []
        for task, outcome in answers:
            if self._stopped:
                break
            row = replace(planned_row(task), start_ms=outcome.start_ms or None, end_ms=outcome.end_ms or None)
            self.on_phase(row.name, "replace" if self.place is None else "put in place")
            begun.append(self.place(task, row) if self.place else Replacing(self.fs, self.keeper, task, row))
            self._replace(begun[-1], outcome)
        self._move_checkpoints([one for one in begun if one.problem is None and isinstance(one, Replacing)])
        for one in begun:
            if one.problem is None:
                remove_lost_scratch(self.fs, one.task)
                for oddity in one.oddities():
                    self.on_note(oddity)
                one.row = one.compacted_row()
        rows = [one.row for one in begun]
        if self.ledger is not None:
            self.ledger.conclude(number, rows, {one.row.name: one.made for one in begun})
        return rows

    def _replace(self, one: Replacing | Placing, outcome: Outcome[CleaningResult]) -> None:
        """Install the result and run the next rounds until none is left. An error ends the partition."""
        try:
            while True:
                if self._stopped and one.task.goes_on:
                    raise Interrupted("interrupted")
                result = self._result_of(one.task, outcome)
                one.install(result, lambda: self._stopped)
                if result.rest is None:
                    return
                one.task = self._prepare_next(one.task, result)
                [outcome] = self._run_tasks([one.task], f"compact {one.row.name}, next round")
        except (KeytailError, OSError) as problem:
            if isinstance(problem, SparkEnded):
                self._end_early(problem)
            self._fail(one, problem)

    def _fail(self, one: Replacing | Placing, problem: KeytailError | OSError) -> None:
        if isinstance(problem, LockLost):  # the lock of one log dir: the run begins nothing more
            self._lost = problem
        one.fail(_known(problem))

    def _move_checkpoints(self, done: Sequence[Replacing]) -> None:
        """Move the checkpoints of partitions whose segments are durably installed: one file replacement per log dir."""
        by_log_dir: dict[str, list[Replacing]] = {}
        for one in done:
            by_log_dir.setdefault(os.path.dirname(one.task.partition_path), []).append(one)
        for log_dir, there in by_log_dir.items():
            offsets = {(one.task.topic, one.task.partition): one.end_offset for one in there}
            try:
                move_checkpoints(self.fs, log_dir, offsets, self.hosted[log_dir])
            except (KeytailError, OSError) as problem:
                for one in there:
                    self._fail(one, problem)

    def _clean(self) -> Callable[[CleaningTask, str], CleaningResult]:
        assert self.clean is not None
        return self.clean

    def _result_of(self, task: CleaningTask, outcome: Outcome[CleaningResult]) -> CleaningResult:
        if outcome.trace:
            self.on_trace(outcome.trace)
        result = outcome.value
        if outcome.problem is not None or result is None:
            raise outcome.problem or KeytailError(
                "internal error: a task returned no result", remedy=REPORT_IT, slug="task-without-result"
            )
        refuse_unseen(self.fs, task.scratch_path, sorted(written(result)), outcome.host)
        remove_lost_scratch(self.fs, task, result)
        return result

    def _prepare_next(self, task: CleaningTask, result: CleaningResult) -> CleaningTask:
        if self._stopped:
            raise Interrupted("interrupted")
        if self.deadline_s is not None and time.monotonic() >= self.deadline_s:
            raise PastDeadline("--deadline has passed")
        with self._changed:
            return for_next_round(next_round(task, result), self.space)


def _known(problem: KeytailError | OSError) -> KeytailError:
    return problem if isinstance(problem, KeytailError) else explained(problem)


def move_checkpoints(
    fs: FileSystem,
    log_dir: str,
    offsets: Mapping[tuple[str, int], int],
    hosted: Collection[tuple[str, int]],
) -> None:
    """Set where the next rounds begin, in the checkpoint file that a broker also reads."""
    update_offsets(fs, os.path.join(log_dir, names.CLEANER_CHECKPOINT), offsets, hosted=hosted)
