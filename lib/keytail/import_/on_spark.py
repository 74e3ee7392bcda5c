"""Runs an import: a strategy reads the source, one task writes each target partition, the driver commits.

Three strategies pass records to the tasks that write: in this process (here.py), on Spark bypassing the JVM (slices.py)
and through Spark's rows (rows.py). With each strategy, a task gets the records of its partition as columns, in the same
order. Tasks write only scratch files, with names unique to the attempt; the driver renames these files after every task
has succeeded. The caller holds the locks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from keytail.acting_user import as_caller
from keytail.errors import EXPLAINED, KeytailError, Refused
from keytail.import_.cells import Scratch
from keytail.import_.here import Here
from keytail.import_.install import finish, install
from keytail.import_.partition_tasks import write_partition
from keytail.import_.plan import ImportPlan
from keytail.import_.rows import Rows, with_partitions
from keytail.import_.segments import SegmentsTask, Written
from keytail.import_.slices import Slices, slices_of
from keytail.import_.source import Source, records_of
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.import_record import ImportRecord
from keytail.log.replacement.recover import remove_lost_scratch
from keytail.run.tasks import Outcome, as_problem
from keytail.threads import Threads


@dataclass(frozen=True)
class ImportOutcome:
    """The result for one partition. `record` is None if the partition received no records or has a `problem`.

    `earlier`: an earlier run had committed the import.
    """

    plan: ImportPlan
    record: ImportRecord | None
    problem: KeytailError | None
    log_bytes: int = 0
    largest_timestamp_ms: int = -1
    earlier: bool = False
    start_ms: int = 0
    end_ms: int = 0


@as_caller()
def source_of(spark: Any, frame: Any, source: Source, n_partitions: int) -> Slices | Rows:
    """Return the source as an object of the strategy that reads it. `frame` is the DataFrame of `source.opened`."""
    rows = records_of(frame, source)  # this also detects faults of the columns, with either strategy
    found = slices_of(spark, frame, source, n_partitions)
    if isinstance(found, Slices):
        return found
    return Rows(spark, with_partitions(rows, n_partitions), source, n_partitions, why=found)


@dataclass
class Import:
    """One import. `tasks` has the parameters of each partition to write. `plans` also has partitions where the import
    was committed before; `refused` has, for other partitions, the reason why they cannot be written. `on_outcome` is
    called with each outcome, `on_trace` with the Python tracebacks of tasks."""

    records: Here | Slices | Rows
    plans: Sequence[ImportPlan]
    tasks: Mapping[int, SegmentsTask]
    import_id: str
    run_id: str
    refused: Mapping[int, str] = field(default_factory=dict)
    on_outcome: Callable[[ImportOutcome], None] = lambda outcome: None
    on_trace: Callable[[str], None] = lambda text: None
    fs: FileSystem = LOCAL

    def run(self) -> list[ImportOutcome]:
        """Import the records, and return the outcome of each plan, in the order of `plans`. If a partition cannot be
        written, no partition is committed."""
        outcomes = []
        try:
            answers = self._write()
            problem = next((item.problem for item in answers.values() if item.problem is not None), None)
            is_empty = not any(answer.value is not None for answer in answers.values())
            if problem is None and is_empty and not any(plan.record for plan in self.plans):
                what = "the source has no rows, so there is nothing to import"
                raise Refused(what, remedy="Check the source", slug="empty-source")
            # Commits run in a separate thread: signals are delivered to this thread, so they do not interrupt a commit.
            with Threads(1, "commits") as commits:
                for plan in self.plans:
                    outcome = commits.submit(self._install, plan, answers.get(plan.partition), problem).result()
                    self.on_outcome(outcome)
                    outcomes.append(outcome)
        finally:
            for plan in self.plans:
                for replica in plan.replicas:
                    remove_lost_scratch(self.fs, replica.path, self.run_id)
        return outcomes

    def _write(self) -> dict[int, Outcome[Written]]:
        """Return the outcome of each task by partition. Partitions without records are absent."""
        if not self.tasks:
            return {}
        # Only partitions that already have the import are skipped: tasks have to refuse records of partitions that do
        # not exist.
        skipped = [plan.partition for plan in self.plans if plan.record is not None]
        scratch = Scratch([task.partition_path for task in self.tasks.values()], self.run_id)
        write = partial(write_partition, tasks=dict(self.tasks), refused=dict(self.refused))
        answers = self.records.write(write, skipped, scratch)
        for answer in answers.values():
            if answer.trace:
                self.on_trace(answer.trace)
        return answers

    def _install(
        self, plan: ImportPlan, answer: Outcome[Written] | None, elsewhere: KeytailError | None
    ) -> ImportOutcome:
        start_ms = answer.start_ms if answer else time.time_ns() // 1_000_000
        record, problem, written = plan.record, answer.problem if answer else None, answer.value if answer else None
        if problem is None and elsewhere is not None:
            what = f"nothing was imported, because another partition could not be written: {elsewhere}"
            problem = KeytailError(
                what, remedy="Solve the problem of that partition, and run again", slug="other-partition-failed"
            )
        try:
            if problem is None and plan.record is not None:
                finish(self.fs, plan, self.run_id)
            elif problem is None and written is not None:
                record = install(self.fs, plan, written, self.import_id, self.run_id)
        except EXPLAINED as error:
            problem = as_problem(error)
        return ImportOutcome(
            plan,
            record if problem is None else None,
            problem,
            written.log_bytes if written else 0,
            written.largest_timestamp_ms if written else -1,
            plan.record is not None,
            start_ms,
            time.time_ns() // 1_000_000,
        )
