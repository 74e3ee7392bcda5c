"""Run payloads on Spark's Python workers, one per task, and return one small answer for each.

Answers are data (values.py): a worker sends the driver no code to run. Any exception of a task is returned as a value,
so one bad partition never ends the job of the others. A worker that dies (killed, out of memory) does end its job: the
payloads of that job are run again, one per job, and only a payload whose worker dies again has failed.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

from keytail.acting_user import as_caller, on_workers
from keytail.errors import REPORT_IT, KeytailError, of_system, out_of_memory
from keytail.log.heap import keep_freed_memory
from keytail.run.ended import raise_if_ended, text_of
from keytail.run.processes import Processes
from keytail.run.watching import Channel, current_channel, send_to
from keytail.values import from_bytes, to_bytes

P = TypeVar("P")
R = TypeVar("R")

answer_schema = "id bigint, answer binary"


@dataclass(frozen=True)
class Outcome(Generic[R]):
    """The result for one payload: a value or a problem, never both.

    `trace` is the traceback of an error that keytail did not expect, for standard error.
    """

    value: R | None
    problem: KeytailError | None
    host: str = ""
    start_ms: int = 0
    end_ms: int = 0
    trace: str = ""


def run_bundle(
    spark: Any,
    payloads: Sequence[P],
    function: Callable[[P, str], R],
    *,
    name: str = "keytail",
    stopped: Callable[[], bool] = lambda: False,
    before_again: Callable[[P], object] = lambda payload: None,
) -> list[Outcome[R]]:
    """Run `function(payload, attempt)` for each payload on the workers; return outcomes in the order of the payloads.

    `spark` is a session, or Processes in its place. `attempt` differs between any two runs of a task in it, so files
    named by it never collide. `function` is a module-level function of an installed package (or picklable); it runs
    where the files are mounted. Once `stopped()` is true a lost job is not run again. `before_again(payload)` is called
    before each payload of a lost job is run again: its earlier attempt may have left scratch files. Raises SparkEnded
    if no more jobs can be run.
    """
    if not payloads:
        return []
    if isinstance(spark, Processes):
        answers = spark.run(payloads, partial(_heard_attempt, function, current_channel()), before_again)
        return [Outcome(None, _gone(stopped())) if answer is None else answer for answer in answers]
    try:
        return _run_job(spark, payloads, function, name)
    except Exception as problem:
        if stopped():
            return [Outcome(None, lost(problem)) for _ in payloads]
        raise_if_ended(spark, problem)
    outcomes = []
    for payload in payloads:
        before_again(payload)
        try:
            outcomes += _run_job(spark, [payload], function, f"{name}, again")
        except Exception as problem:
            if not stopped():
                raise_if_ended(spark, problem)
            outcomes.append(Outcome(None, lost(problem)))
    return outcomes


@as_caller()
def _run_job(spark: Any, payloads: Sequence[P], function: Callable[[P, str], R], name: str) -> list[Outcome[R]]:
    """Run one Spark job: one partition with one id for each payload, started in order."""
    context = spark.sparkContext
    name_jobs(context, name)
    shared = context.broadcast(list(payloads))
    try:
        ids = spark.range(0, len(payloads), 1, len(payloads))
        rows = ids.mapInArrow(on_workers(_task_of(shared, function, current_channel())), answer_schema).collect()
    finally:
        shared.destroy()
    answers = {row["id"]: from_bytes(row["answer"]) for row in rows}
    return [answers[number] for number in range(len(payloads))]


def name_jobs(context: Any, name: str) -> None:
    """Set the name that Spark's UI shows for the subsequent jobs of this thread and their stages.

    Interruption ends the workers of an abandoned job, which would otherwise run on beside the next attempt.
    """
    context.setJobGroup(f"keytail-{time.monotonic_ns()}", name, interruptOnCancel=True)


def _task_of(
    shared: Any, function: Callable[[P, str], R], channel: Channel | None
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    def task(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow  # noqa: PLC0415 (on the worker, where Spark itself has imported it)

        send_to(channel)
        attempt = attempt_name()
        with as_caller():
            payloads = shared.value
        for batch in batches:
            for number in batch.column(0).to_pylist():
                answer = answer_bytes(attempt_one(function, payloads[number], attempt))
                yield pyarrow.RecordBatch.from_pydict(
                    {
                        "id": pyarrow.array([number], pyarrow.int64()),
                        "answer": pyarrow.array([answer], pyarrow.binary()),
                    }
                )

    return task


def attempt_name() -> str:
    """Return a name for the task attempt that runs here, on a worker; it is unique in the session."""
    from pyspark import TaskContext  # noqa: PLC0415

    context = TaskContext.get()
    assert context is not None
    return f"s{context.stageId()}p{context.partitionId()}n{context.attemptNumber()}t{context.taskAttemptId()}"


def _heard_attempt(function: Callable[[P, str], R], channel: Channel | None, payload: P, attempt: str) -> Outcome[R]:
    send_to(channel)
    return attempt_one(function, payload, attempt)


def attempt_one(function: Callable[[P, str], R], payload: P, attempt: str) -> Outcome[R]:
    """Run `function` here and return its result or error as an Outcome."""
    keep_freed_memory()
    start_ms = time.time_ns() // 1_000_000
    value, problem, trace = None, None, ""
    try:
        value = function(payload, attempt)
    except KeytailError as expected:
        problem = expected
    except (OSError, MemoryError) as refused:  # an error of the machine, not of this program: no traceback
        problem = explained(refused)
    except Exception as surprise:
        problem, trace = explained(surprise), traceback.format_exc()
    return Outcome(value, problem, os.uname().nodename, start_ms, time.time_ns() // 1_000_000, trace)


def answer_bytes(outcome: Outcome[Any]) -> bytes:
    """Return the outcome encoded for the driver; a value that is not data becomes a problem."""
    try:
        return to_bytes(outcome)
    except TypeError as surprise:
        return to_bytes(replace(outcome, value=None, problem=explained(surprise), trace=traceback.format_exc()))


def explained(surprise: Exception) -> KeytailError:
    """Return a KeytailError for an error of the system or of the program itself."""
    if isinstance(surprise, OSError):
        return of_system(surprise, f" on host {os.uname().nodename}")
    if isinstance(surprise, MemoryError):
        return out_of_memory()
    return KeytailError(
        f"internal error: {type(surprise).__name__}: {surprise}", remedy=REPORT_IT, slug="internal-error"
    )


def _gone(stopped: bool) -> KeytailError:
    if stopped:
        return KeytailError("interrupted", slug="run-interrupted")
    return KeytailError(
        "the worker process of this partition was killed twice",
        remedy="Check the kernel's log: the usual cause is a lack of memory. Lower --map-memory, or run fewer tasks "
        "at a time with --master 'local[1]'",
        slug="worker-killed",
    )


def lost(problem: Exception) -> KeytailError:
    text = text_of(problem)
    if "worker exited unexpectedly" in text or "crashed" in text or "EOFException" in text:
        return _gone(stopped=False)
    lines = [line for line in text.splitlines() if line.strip()]
    reason = next((line for line in lines if "SparkException" in line or "Exception:" in line), None)
    reason = (reason or (lines[0] if lines else type(problem).__name__)).strip()
    return KeytailError(
        f"the Spark job of this partition failed twice: {reason[:500]}",
        remedy="Check the logs of Spark's executors: the usual cause is a lack of memory. Lower --map-memory, or run "
        "fewer tasks at a time",
        slug="spark-job-failed",
    )
