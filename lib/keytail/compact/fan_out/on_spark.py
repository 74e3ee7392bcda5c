"""Runs the stages of a fan-out as Spark jobs; a Spark shuffle transfers the cells from one stage to the next.

compact/fan_out/stages.py defines the stages; this module sends payloads to tasks, cells to shards, and errors to the
driver. A task returns its exceptions as values, so that Spark does not retry the task because of a corrupt batch.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from keytail.acting_user import as_caller, on_workers
from keytail.compact.fan_out.bits import ShardBits
from keytail.compact.fan_out.proof import Verdict
from keytail.compact.fan_out.slices import Survey
from keytail.compact.fan_out.stages import Merging, Sizes, fan_out
from keytail.compact.fan_out.write import Written
from keytail.compact.task import CleaningResult, CleaningTask
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.pace import Pace, PacedFileSystem
from keytail.log.replacement.replace import CleanFile
from keytail.run.ended import raise_if_ended
from keytail.run.engine import Engine
from keytail.run.hosts import refuse_network_here, refuse_unseen
from keytail.run.memory import map_memory_bytes
from keytail.run.shuffle import Cell
from keytail.run.spark.engine import answer_schema, attempt_name, lost, name_jobs
from keytail.run.tasks import Outcome, answer_bytes, interrupted, run_attempt
from keytail.run.watching import Channel, current_channel, send_to, sending_progress
from keytail.values import from_bytes, to_bytes

P = TypeVar("P")
R = TypeVar("R")

_CELL_SCHEMA = "shard int, place bigint, data binary"
_PROBLEM = -1  # the order of an error, before all cells of shard 0
_BATCH_BYTES = 4 << 20  # an Arrow batch is sent once its cells have this many bytes
_SETTINGS = {
    # A row can have megabytes, and without this limit an Arrow batch could contain 10,000 rows.
    "spark.sql.execution.arrow.maxBytesPerBatch": str(16 << 20),
}


@dataclass(frozen=True)
class Workers:
    """The settings of the run that every task of a fan-out needs."""

    scratch_path: str
    tasks_per_host: int
    throttle_bytes_per_s: int | None
    shared_storage: bool

    def file_system(self) -> FileSystem:
        if not self.shared_storage:
            refuse_network_here(LOCAL, os.path.dirname(self.scratch_path))
        if self.throttle_bytes_per_s is None:
            return LOCAL
        return PacedFileSystem(Pace(max(1, self.throttle_bytes_per_s // self.tasks_per_host)))


@dataclass(frozen=True)
class Place:
    """The context of a task in a fan-out: the settings of the run, the channel for progress reports, and the name of
    the stage."""

    workers: Workers
    channel: Channel | None
    stage: str

    def sending_progress(self, attempt: str) -> contextlib.AbstractContextManager[None]:
        send_to(self.channel)
        return sending_progress(self.workers.scratch_path, f"{self.stage} {attempt}", self.stage)


@dataclass
class StagesOnSpark:
    """Runs the stages of one partition. `on_trace` is called with the tracebacks of unexpected errors."""

    engine: Engine
    workers: Workers
    label: str
    on_trace: Callable[[str], None] = lambda text: None
    stopped: Callable[[], bool] = lambda: False

    def run(self, name: str, function: Callable[[FileSystem, P, str], R], payloads: Sequence[P]) -> list[R]:
        outcomes = self.engine.run_bundle(
            payloads,
            partial(_one, self.workers, name, function),
            name=f"{self.label}: {name}",
            stopped=self.stopped,
        )
        return self._values(outcomes)

    def shuffle(
        self,
        name: str,
        emit: Callable[[FileSystem, P, str], Iterator[Cell]],
        payloads: Sequence[P],
        shards: int,
        take: Merging[R],
        context: Any,
    ) -> list[R]:
        job = partial(self._shuffle, name, emit, payloads, shards, take, context)
        try:
            outcomes = job()
        except Exception as problem:
            if self.stopped():
                raise interrupted() from problem
            raise_if_ended(self.engine, problem)
            try:
                outcomes = job()  # a local master does not retry a task whose worker died
            except Exception as again:
                if self.stopped():
                    raise interrupted() from again
                raise_if_ended(self.engine, again)
                raise lost(again, "twice") from again
        return self._values(outcomes)

    @as_caller()
    def _shuffle(
        self,
        name: str,
        emit: Callable[[FileSystem, P, str], Iterator[Cell]],
        payloads: Sequence[P],
        shards: int,
        take: Merging[R],
        context: Any,
    ) -> list[Outcome[R]]:
        session = self.engine.session.newSession()  # a session of the same application, with its own settings
        for key, value in _SETTINGS.items():
            session.conf.set(key, value)
        sc = session.sparkContext
        name_jobs(sc, f"{self.label}: {name}")
        here = Place(self.workers, current_channel(), name)
        shared = sc.broadcast((list(payloads), context))
        try:
            n = len(payloads)
            emitting = on_workers(_emitting(shared, here, emit))
            cells = session.range(0, n, 1, max(n, 1)).mapInArrow(emitting, _CELL_SCHEMA)
            by_shard = cells.repartitionById(shards, "shard").sortWithinPartitions("place")
            rows = by_shard.mapInArrow(on_workers(_taking(shared, here, take)), answer_schema).collect()
        finally:
            shared.destroy()
        answers = {row["id"]: from_bytes(row["answer"]) for row in rows}
        return [answers[shard] for shard in range(shards)]

    def _values(self, outcomes: Sequence[Outcome[R]]) -> list[R]:
        """Return the values of the outcomes, or raise the first error. Raises Refused if a host has written files that
        the driver does not see: without this check, the next stage would fail on other hosts, which are not the cause.
        """
        values = []
        for outcome in outcomes:
            if outcome.trace:
                self.on_trace(outcome.trace)
            if outcome.problem is not None:
                raise outcome.problem
            refuse_unseen(LOCAL, self.workers.scratch_path, _written(outcome.value), outcome.host)
            values.append(outcome.value)
        return values  # type: ignore[return-value]  # without a problem there is a value


def fan_out_on_spark(
    engine: Engine,
    task: CleaningTask,
    *,
    shared_storage: bool = False,
    on_trace: Callable[[str], None] = lambda text: None,
    stopped: Callable[[], bool] = lambda: False,
    sizes: Sizes | None = None,
) -> Outcome[CleaningResult]:
    """Compact one partition, or do one pass of it, with tasks on all hosts; return the outcome that one task would
    have."""
    start_ms = time.time_ns() // 1_000_000
    cores = engine.concurrent_tasks
    workers = Workers(task.scratch_path, cores, task.throttle_bytes_per_s, shared_storage)
    label = f"compact {os.path.basename(task.partition_path)} by fan-out"
    stages = StagesOnSpark(engine, workers, label, on_trace, stopped)

    def work(payload: CleaningTask, attempt: str) -> CleaningResult:
        # The default is a share of a host's memory; one host's value is used for all hosts
        if not payload.map_memory_bytes:
            [memory] = stages.run("memory", _memory, [cores])
            payload = replace(payload, map_memory_bytes=memory)
        return fan_out(LOCAL, payload, stages, sizes)

    outcome = run_attempt(work, task, "driver")
    return replace(outcome, start_ms=start_ms)


def _written(answer: object) -> list[str]:
    """Return the names of the scratch files in the answer of a stage."""
    files: list[CleanFile | None] = []
    if isinstance(answer, CleanFile):
        files = [answer]
    elif isinstance(answer, Survey):
        files = [answer.settled]
    elif isinstance(answer, ShardBits):
        files = [answer.file]
    elif isinstance(answer, Verdict):
        files = [answer.table]
    elif isinstance(answer, Written):
        files = [file for group in answer.groups for segment in group.segments for file in segment.files]
    return [file.name for file in files if file is not None]


def _memory(fs: FileSystem, tasks_per_host: int, attempt: str) -> int:
    return map_memory_bytes(tasks_per_host)


def _one(workers: Workers, stage: str, function: Callable[[FileSystem, P, str], R], payload: P, attempt: str) -> R:
    with sending_progress(workers.scratch_path, f"{stage} {attempt}", stage):
        return function(workers.file_system(), payload, attempt)


def _emitting(
    shared: Any, here: Place, emit: Callable[[FileSystem, P, str], Iterator[Cell]]
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    def task(batches: Iterator[Any]) -> Iterator[Any]:
        with as_caller():
            payloads, _ = shared.value
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from _batches(_cells(here, emit, payloads[number], number))

    return task


def _cells(
    here: Place, emit: Callable[[FileSystem, P, str], Iterator[Cell]], payload: P, number: int
) -> Iterator[Cell]:
    """Yield the cells of one payload; an exception becomes the last cell."""
    attempt = attempt_name()
    try:
        with here.sending_progress(attempt):
            yield from emit(here.workers.file_system(), payload, attempt)
    except Exception as problem:
        outcome: Outcome[Any] = run_attempt(_raise, problem, attempt)
        yield Cell(0, _PROBLEM, to_bytes((number, outcome)))


def _raise(problem: Exception, attempt: str) -> None:
    raise problem


def _batches(cells: Iterable[Cell]) -> Iterator[Any]:
    """Yield cells as Arrow batches of about `_BATCH_BYTES`."""
    waiting: list[Cell] = []
    size = 0
    for cell in cells:
        waiting.append(cell)
        size += len(cell.data)
        if size >= _BATCH_BYTES:
            yield _batch(waiting)
            waiting, size = [], 0
    if waiting:
        yield _batch(waiting)


def _batch(cells: Sequence[Cell]) -> Any:
    import pyarrow  # noqa: PLC0415 (only where Spark runs)

    return pyarrow.RecordBatch.from_pydict(
        {
            "shard": pyarrow.array([cell.shard for cell in cells], pyarrow.int32()),
            "place": pyarrow.array([cell.order for cell in cells], pyarrow.int64()),
            "data": pyarrow.array([cell.data for cell in cells], pyarrow.binary()),
        }
    )


def _taking(shared: Any, here: Place, take: Merging[R]) -> Callable[[Iterator[Any]], Iterator[Any]]:
    def task(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow  # noqa: PLC0415 (only where Spark runs)
        from pyspark import TaskContext  # noqa: PLC0415 (only where Spark runs)

        context = TaskContext.get()
        assert context is not None
        shard = context.partitionId()  # after repartitionById, the number of a partition is its shard's number
        cells = _arrived(batches)
        first = next(cells, None)
        problems: list[tuple[int, Outcome[Any]]] = []
        while first is not None and first[0] == _PROBLEM:
            problems.append(from_bytes(first[1]))
            first = next(cells, None)
        if problems:  # the first problem of the previous stage's tasks is returned instead of an answer
            answer = min(problems, key=lambda item: item[0])[1]
        else:
            some = iter(()) if first is None else itertools.chain([first], cells)
            with as_caller():
                _, of_stage = shared.value
            answer = run_attempt(partial(_take, here, take, of_stage, shard), some, attempt_name())
        yield pyarrow.RecordBatch.from_pydict(
            {
                "id": pyarrow.array([shard], pyarrow.int64()),
                "answer": pyarrow.array([answer_bytes(answer)], pyarrow.binary()),
            }
        )

    return task


def _take(here: Place, take: Merging[R], context: Any, shard: int, cells: Iterable[tuple[int, Any]], attempt: str) -> R:
    with here.sending_progress(attempt):
        return take(here.workers.file_system(), context, shard, cells, attempt)


def _arrived(batches: Iterator[Any]) -> Iterator[tuple[int, Any]]:
    for batch in batches:
        places, data = batch.column(1), batch.column(2)
        for row in range(batch.num_rows):
            yield places[row].as_py(), memoryview(data[row].as_buffer())
