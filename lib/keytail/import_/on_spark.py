"""Runs an import on Spark: Spark reads a source, one task writes each target partition, and the driver commits.

There are two strategies to bring records to the tasks that write: bypassing the JVM (slices.py) and through Spark's
rows (rows.py). Both give a task the records of its partition as columns, in the same order. Tasks write only scratch
files, with names unique to the attempt; the driver renames them after every task has succeeded. The caller holds the
locks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyarrow

from keytail.acting_user import as_caller, on_workers
from keytail.errors import KeytailError, Refused
from keytail.format.encode import RecordColumns
from keytail.import_.cells import Scratch
from keytail.import_.install import finish, install
from keytail.import_.plan import ImportPlan
from keytail.import_.records import Unpack
from keytail.import_.rows import Rows, with_partitions
from keytail.import_.segments import SegmentsTask, SegmentsWriter, Written
from keytail.import_.slices import Slices, slices_of
from keytail.import_.source import Source, records_of
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.import_record import ImportRecord
from keytail.log.recover import remove_lost_scratch
from keytail.run.spark_engine import attempt_name, name_jobs
from keytail.run.tasks import Outcome, answer_bytes, as_problem, run_attempt
from keytail.threads import Threads
from keytail.values import from_bytes

_ANSWER_SCHEMA = "partition int, answer binary"


@dataclass(frozen=True)
class ImportOutcome:
    """The result for one partition. `record` is None if the partition received no records or has a `problem`.

    `earlier`: an earlier run had committed it.
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
    """Return the source with the strategy that suits it. `frame` is the DataFrame that `source.opened` returned."""
    rows = records_of(frame, source)  # in either strategy this detects faults of the columns
    found = slices_of(spark, frame, source, n_partitions)
    if isinstance(found, Slices):
        return found
    return Rows(spark, with_partitions(rows, n_partitions), source, n_partitions, why=found)


@dataclass
class Import:
    """One run. `tasks` has the partitions to write, with the settings for each; `plans` has these and those that an
    earlier run has committed; `refused` gives for other partitions why records for them cannot be written. `on_trace`
    is called with the Python tracebacks of tasks."""

    records: Slices | Rows
    plans: Sequence[ImportPlan]
    tasks: Mapping[int, SegmentsTask]
    import_id: str
    run_id: str
    refused: Mapping[int, str] = field(default_factory=dict)
    on_outcome: Callable[[ImportOutcome], None] = lambda outcome: None
    on_trace: Callable[[str], None] = lambda text: None
    fs: FileSystem = LOCAL

    def run(self) -> list[ImportOutcome]:
        """Return an outcome for each plan, in their order. If one partition cannot be written, none is committed."""
        outcomes = []
        try:
            answers = self._write()
            problem = next((item.problem for item in answers.values() if item.problem is not None), None)
            is_empty = not any(answer.value is not None for answer in answers.values())
            if problem is None and is_empty and not any(plan.record for plan in self.plans):
                what = "the source has no rows, so there is nothing to import"
                raise Refused(what, remedy="Check the source", slug="empty-source")
            # In a separate thread: signals are delivered to this one, so they do not interrupt a commit.
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
        # Partitions that already have their records are skipped; one that does not exist must reach a task.
        skipped = [plan.partition for plan in self.plans if plan.record is not None]
        scratch = Scratch([task.partition_path for task in self.tasks.values()], self.run_id)
        try:
            name_jobs(self.records.spark.sparkContext, "import: records by partition")
            frame, unpack = self.records.by_partition(skipped, scratch)
            task = partial(_write_partition, unpack=unpack, tasks=dict(self.tasks), refused=dict(self.refused))
            name_jobs(self.records.spark.sparkContext, "import: segments")
            with as_caller():
                rows = frame.mapInArrow(on_workers(task), _ANSWER_SCHEMA).collect()
        except Exception as lost:
            lines = [line for line in str(lost).splitlines() if line.strip()]
            own = (line for line in lines if line.startswith("keytail.errors."))  # raised by a task that reads
            text = next(own, None) or next(
                (line for line in lines if "Exception" in line), lines[0] if lines else type(lost).__name__
            )
            raise KeytailError(
                f"the Spark job that reads the source and writes segments failed: {text.strip()[:500]}",
                remedy="Nothing was imported. Check the source and the memory of the tasks, and run again",
                slug="import-job-failed",
            ) from lost
        except BaseException:  # a signal: no task may write after scratch has been removed
            self.records.spark.sparkContext.cancelAllJobs()
            raise
        answers = {row["partition"]: from_bytes(row["answer"]) for row in rows}
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
        except KeytailError as known:
            problem = known
        except OSError as system:
            problem = as_problem(system)
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


def _write_partition(
    batches: Iterator[Any], *, unpack: Unpack, tasks: Mapping[int, SegmentsTask], refused: Mapping[int, str]
) -> Iterator[Any]:
    """Run a Spark task: write the records of one partition, in order."""
    from pyspark import TaskContext  # noqa: PLC0415 (only where Spark runs)

    context = TaskContext.get()
    assert context is not None
    number, attempt = context.partitionId(), attempt_name()
    records = (item for batch in batches for item in unpack(batch))
    answer = run_attempt(partial(_written, tasks=tasks, refused=refused, number=number), records, attempt)
    for _ in batches:  # Spark treats a worker that does not consume all its input as dead
        pass
    if answer.value is not None or answer.problem is not None:
        yield pyarrow.RecordBatch.from_pydict(
            {
                "partition": pyarrow.array([number], pyarrow.int32()),
                "answer": pyarrow.array([answer_bytes(answer)], pyarrow.binary()),
            }
        )


def _written(
    records: Iterator[tuple[int, RecordColumns]], attempt: str, *, tasks: Mapping[int, SegmentsTask],
    refused: Mapping[int, str], number: int,
) -> Written | None:  # fmt: skip
    writer = None
    try:
        for partition, columns in records:
            if partition != number:
                raise Refused(
                    f"a record is for partition {partition}, which the topic does not have",
                    remedy="Check the partition column of the source",
                    slug="partition-out-of-range",
                )
            if number not in tasks:
                raise Refused(
                    f"the source has records for partition {number}, which cannot be written: "
                    f"{refused.get(number, 'it is not in these log dirs')}",
                    slug="records-for-unavailable-partition",
                )
            if writer is None:
                writer = SegmentsWriter(LOCAL, tasks[number], attempt)
            writer.append(columns)
        return writer.finish() if writer is not None else None
    except BaseException:
        if writer is not None:
            writer.discard()
        raise
