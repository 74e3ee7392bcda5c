"""Runs tasks on Spark's Python workers, with one payload per task, and returns one small answer for each payload.

Answers are data (values.py): a worker never sends code to the driver. If a worker dies (killed, out of memory), its
whole job fails, and each payload of the job is run again in its own job. A payload whose worker dies again has failed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from keytail.acting_user import as_caller, on_workers
from keytail.errors import KeytailError
from keytail.run.ended import raise_if_ended, text_of
from keytail.run.kernels import compile_on_worker
from keytail.run.spark.jvm_log import JvmLog
from keytail.run.tasks import Outcome, Times, answer_bytes, interrupted, killed, run_attempt
from keytail.run.watching import HERE, LOOPBACK, Channel, DriverAddress, current_channel, send_to
from keytail.values import from_bytes

P = TypeVar("P")
R = TypeVar("R")

answer_schema = "id bigint, answer binary"


class SparkEngine:
    """The engine (run/engine.py) of a Spark session, which run/spark/session.py starts and stops.

    `log` is the output of the session's JVM. `kernels` is the name of the command whose kernels each worker compiles
    before its first task; None if workers compile none.
    """

    has_workers = True

    def __init__(self, session: Any, log: JvmLog | None = None, kernels: str | None = None) -> None:
        self.session = session
        self.log = JvmLog() if log is None else log
        self.kernels = kernels

    @property
    def concurrent_tasks(self) -> int:
        """The number of cores of `local[n]`, or of one executor: 1 if spark.executor.cores is not set."""
        context = self.session.sparkContext
        if context.master.startswith("local"):
            return max(1, context.defaultParallelism)
        return max(1, int(context.getConf().get("spark.executor.cores", "1")))

    @property
    def parallel_tasks(self) -> int:
        return max(self.concurrent_tasks, self.session.sparkContext.defaultParallelism)

    @property
    def driver_address(self) -> DriverAddress:
        context = self.session.sparkContext
        if context.master.startswith("local"):
            return HERE
        settings = context.getConf()
        host = str(settings.get("spark.driver.host", LOOPBACK))
        return DriverAddress(host.strip("[]"), str(settings.get("spark.driver.bindAddress", host)).strip("[]"))

    def run_bundle(
        self,
        payloads: Sequence[P],
        function: Callable[[P, str], R],
        *,
        name: str = "keytail",
        stopped: Callable[[], bool] = lambda: False,
        before_again: Callable[[P], object] = lambda payload: None,
    ) -> list[Outcome[R]]:
        """Run `function` for each payload in one Spark job, as described in `Engine.run_bundle`. If the job is lost,
        run one more job for each payload."""
        if not payloads:
            return []
        try:
            return self._run_job(payloads, function, name)
        except Exception as problem:
            if not stopped():
                raise_if_ended(self, problem)
        outcomes: list[Outcome[R]] = []
        for payload in payloads:
            if not stopped():
                before_again(payload)
                try:
                    outcomes += self._run_job([payload], function, f"{name}, again")
                    continue
                except Exception as problem:
                    if not stopped():
                        raise_if_ended(self, problem)
                        outcomes.append(Outcome(None, lost(problem, "twice")))
                        continue
            outcomes.append(Outcome(None, interrupted()))
        return outcomes

    def _run_job(self, payloads: Sequence[P], function: Callable[[P, str], R], name: str) -> list[Outcome[R]]:
        return _run_job(self.session, payloads, partial(_prepared, self.kernels, function), name)

    def cancel(self) -> None:
        self.log.silence()
        with contextlib.suppress(Exception):  # the JVM may have ended
            self.session.sparkContext.setLogLevel("OFF")  # otherwise cancelled jobs print long messages
            self.session.sparkContext.cancelAllJobs()

    def has_ended(self) -> bool:
        try:
            return bool(self.session.sparkContext._jsc.sc().isStopped())
        except Exception:  # the JVM does not answer
            return True


@as_caller()
def _run_job(session: Any, payloads: Sequence[P], function: Callable[[P, str], R], name: str) -> list[Outcome[R]]:
    """Run one Spark job with one task for each payload, started in order; return the outcomes in this order."""
    context = session.sparkContext
    name_jobs(context, name)
    shared = context.broadcast(list(payloads))
    try:
        ids = session.range(0, len(payloads), 1, len(payloads))
        rows = ids.mapInArrow(on_workers(_task_of(shared, function, current_channel())), answer_schema).collect()
    finally:
        shared.destroy()
    answers = {row["id"]: from_bytes(row["answer"]) for row in rows}
    return [answers[number] for number in range(len(payloads))]


def _prepared(kernels: str | None, function: Callable[[P, str], R], payload: P, attempt: str) -> R:
    """Compile the kernels of the command `kernels` if this worker lacks them; then call `function`, and return its
    result."""
    if kernels is not None:
        compile_on_worker(kernels)
    return function(payload, attempt)


def name_jobs(context: Any, name: str) -> None:
    """Set the name that Spark's UI shows for the next jobs of this thread.

    The cancellation of such a job interrupts its workers, which would otherwise continue during the next attempt.
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
                answer = answer_bytes(run_attempt(function, payloads[number], attempt))
                yield pyarrow.RecordBatch.from_pydict(
                    {
                        "id": pyarrow.array([number], pyarrow.int64()),
                        "answer": pyarrow.array([answer], pyarrow.binary()),
                    }
                )

    return task


def attempt_name() -> str:
    """Return a name of the task attempt that runs in this worker. The name is unique in the session."""
    from pyspark import TaskContext  # noqa: PLC0415 (as above)

    context = TaskContext.get()
    assert context is not None
    return f"s{context.stageId()}p{context.partitionId()}n{context.attemptNumber()}t{context.taskAttemptId()}"


def lost(problem: Exception, times: Times) -> KeytailError:
    """Return the problem of a task whose job failed in each attempt, and in the last one with the error `problem`."""
    text = text_of(problem)
    if "worker exited unexpectedly" in text or "crashed" in text or "EOFException" in text:
        return killed(times)
    lines = [line for line in text.splitlines() if line.strip()]
    reason = next((line for line in lines if "SparkException" in line or "Exception:" in line), None)
    reason = (reason or (lines[0] if lines else type(problem).__name__)).strip()
    return KeytailError(
        f"the Spark job of this partition failed {times}: {reason[:500]}",
        remedy="Check the logs of Spark's executors: the usual cause is a lack of memory. Lower --map-memory, or run "
        "fewer tasks at a time",
        slug="spark-job-failed",
    )
