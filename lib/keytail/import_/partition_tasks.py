"""Runs the tasks of an import that write partitions, one for each partition, on Spark or in this process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

import pyarrow

from keytail.acting_user import as_caller, on_workers
from keytail.errors import KeytailError, Refused
from keytail.format.encode import RecordColumns
from keytail.import_.cells import Scratch
from keytail.import_.records import Unpack
from keytail.import_.segments import SegmentsTask, SegmentsWriter, Written
from keytail.log.fs import LOCAL
from keytail.run.ended import text_of
from keytail.run.spark.engine import attempt_name, name_jobs
from keytail.run.tasks import Outcome, answer_bytes, run_attempt
from keytail.values import from_bytes

Records = Iterator[tuple[int, RecordColumns]]
# A function of partition number, records and name of the attempt that writes the records of the partition.
WritePartition = Callable[[int, Records, str], Written | None]
_ANSWER_SCHEMA = "partition int, answer binary"


def write_partition(
    number: int, records: Records, attempt: str, *, tasks: Mapping[int, SegmentsTask], refused: Mapping[int, str]
) -> Written | None:
    """Write the records of one partition to scratch files, in order. Return the segments, or None if there are no
    records. Raises Refused for a record of a partition that does not exist or has no task (`refused` has the reason by
    partition)."""
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


def write_on_spark(
    spark: Any,
    by_partition: Callable[[Collection[int], Scratch], tuple[Any, Unpack]],
    write: WritePartition,
    skipped: Collection[int],
    scratch: Scratch,
) -> dict[int, Outcome[Written]]:
    """Call `write` in a Spark task for each partition with records, and return the outcomes by partition.
    `by_partition` returns a DataFrame with one task per partition, and the function that unpacks its Arrow batches.
    Raises KeytailError if a job fails."""
    try:
        name_jobs(spark.sparkContext, "import: records by partition")
        frame, unpack = by_partition(skipped, scratch)
        name_jobs(spark.sparkContext, "import: segments")
        with as_caller():
            rows = frame.mapInArrow(on_workers(partial(_on_worker, unpack=unpack, write=write)), _ANSWER_SCHEMA)
            rows = rows.collect()
    except Exception as lost:
        lines = [line for line in text_of(lost).splitlines() if line.strip()]
        own = (line for line in lines if line.startswith("keytail.errors."))  # errors of tasks that read
        text = next(own, None) or next(
            (line for line in lines if "Exception" in line), lines[0] if lines else type(lost).__name__
        )
        raise KeytailError(
            f"the Spark job that reads the source and writes segments failed: {text.strip()[:500]}",
            remedy="Nothing was imported. Check the source and the memory of the tasks, and run again",
            slug="import-job-failed",
        ) from lost
    except BaseException:  # after a signal, no task may write once scratch files have been removed
        spark.sparkContext.cancelAllJobs()
        raise
    return {row["partition"]: from_bytes(row["answer"]) for row in rows}


def _on_worker(batches: Iterator[Any], *, unpack: Unpack, write: WritePartition) -> Iterator[Any]:
    """Run one Spark task: write the records of one partition, in order, and yield the outcome as an Arrow batch."""
    from pyspark import TaskContext  # noqa: PLC0415 (only where Spark runs)

    context = TaskContext.get()
    assert context is not None
    number = context.partitionId()
    records = (item for batch in batches for item in unpack(batch))
    answer = run_attempt(partial(write, number), records, attempt_name())
    for _ in batches:  # Spark treats a worker that does not consume all its input as dead
        pass
    if answer.value is not None or answer.problem is not None:
        yield pyarrow.RecordBatch.from_pydict(
            {
                "partition": pyarrow.array([number], pyarrow.int32()),
                "answer": pyarrow.array([answer_bytes(answer)], pyarrow.binary()),
            }
        )
