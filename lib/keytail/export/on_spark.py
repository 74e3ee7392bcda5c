"""Writes the records of one topic to its Delta table. EXPORT.md explains what is atomic, and why.

There are two Spark jobs. The first job finds the latest record of each key in each partition, and returns only bits. In
the second job, each task reads the latest records of a slice of a log, and Delta writes them. A partition that fails in
the second job is left out, and the job is repeated with the other partitions. A topic has one commit for partitions
that are exported in full, and another commit for partitions that are exported incrementally.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from keytail.acting_user import as_caller, on_workers
from keytail.cli.masking import masked
from keytail.errors import KeytailError
from keytail.export import delta_table as export_table
from keytail.export.columns import Undecodable, arrow_batches, raw_schema, table_columns
from keytail.export.delta_table import TableState
from keytail.export.formats import Formats
from keytail.export.latest import SLICE_BYTES, Latest, LatestSlice, LatestTask, find_latest, latest_records, slices_of
from keytail.export.plan import Exported, ExportPlan
from keytail.log.fs import LOCAL
from keytail.run.ended import raise_if_ended, text_of
from keytail.run.engine import Engine
from keytail.run.memory import map_memory_bytes
from keytail.run.spark.delta import alone, changed_settings
from keytail.run.spark.engine import lost, name_jobs
from keytail.run.spark.stores import is_remote
from keytail.run.tasks import as_problem
from keytail.run.watching import sending_progress
from keytail.values import NotAValue, from_bytes, to_bytes

_PROBLEM = "keytail-export-problem "
_ENCODED_PROBLEM = re.compile(_PROBLEM + r"([A-Za-z0-9+/=]+)")
# Matches the first line of an error message of Spark, except lines of a stack trace, that names the client of a store.
# The HDFS client adds a link to a page of Hadoop's wiki, and not its own name, to network exceptions.
_OF_A_STORE = re.compile(
    r"(?m)^(?!\s+at ).*(?:\.fs\.(?:s3a|azurebfs|gs)\.|awssdk\.|hadoop\.(?:hdfs|ipc)\.|wiki\.apache\.org/hadoop/).*$"
)
# Bytes of log per task in the shuffle of Delta's MERGE.
_MERGED_BYTES = 64 << 20


@dataclass(frozen=True)
class Work:
    """One partition to be exported according to `plan`, and its state in the table `after` the export."""

    partition: int
    plan: ExportPlan
    task: LatestTask
    after: Exported

    @property
    def log_bytes(self) -> int:
        return sum(segment.log_bytes for segment in self.task.sources)

    def in_full(self, why: str) -> Work:
        start = self.task.log_start_offset
        plan = ExportPlan("full", why, start)
        return replace(self, plan=plan, task=replace(self.task, from_offset=start, tombstones=False))


@dataclass(frozen=True)
class Exporting:
    """A topic to be exported: path, formats and state of its table (`before` is None if there is no table), and its
    partitions. `change_feed`: Delta must record the changes of rows from this export on."""

    topic: str
    path: str
    formats: Formats
    before: TableState | None
    as_of: str
    works: Sequence[Work]
    change_feed: bool = False


@dataclass(frozen=True)
class ExportOutcome:
    """The result for one partition. `latest` is None if finding the latest records failed."""

    work: Work
    latest: Latest | None = None
    problem: KeytailError | None = None
    trace: str = ""
    start_ms: int = 0
    end_ms: int = 0


OnResult = Callable[[ExportOutcome], None]


@dataclass
class Export:
    """One export. `on_result` is called with the outcome of each partition, once the partition is committed or has
    failed."""

    engine: Engine
    on_result: OnResult
    slice_bytes: int = SLICE_BYTES
    _state: TableState = field(init=False)
    _exists: bool = field(init=False)

    def run(self, what: Exporting) -> None:
        self._exists = what.before is not None
        self._state = what.before or TableState(what.topic, what.formats.as_json(), table_columns(), what.as_of)
        found = self._found(what)
        for strategy, commit in (("full", self._write), ("incremental", self._merge)):
            of_strategy = {number: item for number, item in found.items() if item.work.plan.strategy == strategy}
            self._commit(what, of_strategy, commit)

    def _found(self, what: Exporting) -> dict[int, ExportOutcome]:
        """Return the outcomes with latest records by partition number; call `on_result` for partitions that failed. If
        offsets are missing after the last export, the partition is read again in full."""
        waiting = sorted(what.works, key=lambda work: work.log_bytes, reverse=True)
        found = {}
        while waiting:
            tasks_per_host = self.engine.concurrent_tasks
            function = partial(_find, tasks_per_host=tasks_per_host)
            outcomes = self.engine.run_bundle(waiting, function, name=f"export {what.topic}: latest records")
            again = []
            for work, outcome in zip(waiting, outcomes, strict=True):
                latest = outcome.value
                if latest is None:
                    times = (outcome.start_ms, outcome.end_ms)
                    self.on_result(ExportOutcome(work, None, outcome.problem, outcome.trace, *times))
                elif work.plan.strategy == "incremental" and latest.has_gap:
                    again.append(work.in_full(
                        f"offsets are missing from offset {work.task.from_offset} on, where the last export ended: "
                        "the log was compacted, and tombstones may have been removed"
                    ))  # fmt: skip
                else:
                    found[work.partition] = ExportOutcome(work, latest, start_ms=outcome.start_ms)
            waiting = again
        return found

    def _commit(
        self, what: Exporting, found: dict[int, ExportOutcome], commit: Callable[[Exporting, Any, list[int]], None]
    ) -> None:
        """Commit the rows of all partitions in `found` in one commit. If a partition makes the job fail, that partition
        is left out, and the job is repeated; after an error of unknown origin, none is committed. Calls `on_result` for
        each partition."""
        while found:
            try:
                with _frame(self.engine.session, list(found.values()), what.formats, self.slice_bytes) as raw:
                    problem = self._try(what, raw, found, commit)
            except BaseException:  # after a signal, or when Spark has ended, nothing may be written
                self.engine.cancel()
                raise
            if problem is None:
                for item in found.values():
                    self.on_result(replace(item, end_ms=_now_ms()))
                return
            number, why = problem
            for other in [number] if number is not None else list(found):
                self.on_result(replace(found.pop(other), problem=why, end_ms=_now_ms()))

    @as_caller()
    def _try(
        self,
        what: Exporting,
        raw: Any,
        found: Mapping[int, ExportOutcome],
        commit: Callable[[Exporting, Any, list[int]], None],
    ) -> tuple[int | None, KeytailError] | None:
        """Try to commit the rows of all partitions in `found`. Return None if that succeeds; if not, the number of the
        partition that made the job fail (None if unknown), and the error."""
        numbers = sorted(found)
        state = self._state.with_partitions({number: found[number].work.after for number in numbers})
        size = sum(item.work.log_bytes for item in found.values())
        wanted = {
            # A task has rows of one partition; without this setting Spark would first sort the rows by partition.
            "spark.sql.maxConcurrentOutputFileWriters": "2",
            "spark.sql.shuffle.partitions": str(max(self.engine.parallel_tasks, size // _MERGED_BYTES)),
        }
        previous, self._state = self._state, state
        try:
            name_jobs(self.engine.session.sparkContext, f"export {what.topic}: rows")
            with changed_settings(self.engine.session, wanted), alone(os.path.dirname(what.path)):
                if what.change_feed and self._exists:
                    export_table.enable_change_feed(self.engine.session, what.path)
                commit(what, raw, numbers)
        except Exception as problem:
            self._state = previous
            raise_if_ended(self.engine, problem)
            return _problem_of(problem, what.formats, what.path)
        self._exists = True
        return None

    def _write(self, what: Exporting, raw: Any, numbers: list[int]) -> None:
        frame = export_table.decoded(raw, what.formats)
        existing = numbers if self._exists else None
        export_table.write(frame, what.path, self._state, existing, change_feed=what.change_feed)

    def _merge(self, what: Exporting, raw: Any, numbers: list[int]) -> None:
        export_table.merge(export_table.decoded(raw, what.formats), what.path, self._state, numbers)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _find(work: Work, attempt: str, *, tasks_per_host: int) -> Latest:
    memory = work.task.map_memory_bytes or map_memory_bytes(tasks_per_host)
    with sending_progress(work.task.partition_path, attempt, "latest records"):
        return find_latest(LOCAL, replace(work.task, map_memory_bytes=memory))


@contextlib.contextmanager
def _frame(session: Any, found: Sequence[ExportOutcome], formats: Formats, slice_bytes: int) -> Iterator[Any]:
    """Yield a DataFrame with `raw_schema` and one task per slice. The frame is valid while the context is open."""
    pieces = [
        (item.work.partition, piece)
        for item in found
        if item.latest is not None
        for piece in slices_of(item.work.task, item.latest, slice_bytes)
    ]
    with as_caller():
        shared = session.sparkContext.broadcast(pieces)
        ids = session.range(0, len(pieces), 1, max(len(pieces), 1))
        frame = ids.mapInArrow(on_workers(partial(_emit, formats=formats, shared=shared)), raw_schema(formats))
    try:
        yield frame
    finally:
        with as_caller():
            shared.destroy()


def _emit(batches: Iterator[Any], *, shared: Any, formats: Formats) -> Iterator[Any]:
    """Run a Spark task of the second job: yield the rows of its slices as Arrow batches."""
    with as_caller():
        pieces = shared.value
    for batch in batches:
        for number in batch.column(0).to_pylist():
            partition, piece = pieces[number]
            try:
                yield from _rows(partition, piece, formats)
            except Exception as problem:
                # `from None`: Spark would first print the message of the cause, which may contain data of a record.
                text = base64.b64encode(to_bytes((partition, as_problem(problem)))).decode()
                raise RuntimeError(_PROBLEM + text) from None


def _rows(partition: int, piece: LatestSlice, formats: Formats) -> Iterator[Any]:
    try:
        yield from arrow_batches(latest_records(LOCAL, piece), partition, formats)
    except Undecodable as problem:
        raise Undecodable(
            f"partition {partition}: {problem.what}",
            path=piece.partition_path,
            offset=problem.offset,
            remedy=problem.remedy,
        ) from problem


def _problem_of(problem: Exception, formats: Formats, path: str) -> tuple[int | None, KeytailError]:
    """Return the number of the partition that made a job fail (None if unknown), and the error."""
    text = text_of(problem)
    if match := _ENCODED_PROBLEM.search(text):
        # If the text was not written by a task of this job, `lost` is called with Spark's error.
        with contextlib.suppress(NotAValue, ValueError, TypeError):
            number, known = from_bytes(base64.b64decode(match[1]))
            if isinstance(known, KeytailError):
                return number, known
    if match := export_table.UNDECODABLE.search(text):
        name, number, offset = match[1], int(match[2]), int(match[3])
        return number, Undecodable(
            f"partition {number}: a {name} is not valid {getattr(formats, name)}",
            offset=offset,
            remedy=f"Use another --{name}-format, such as binary; nothing of this partition was written",
        )
    if is_remote(path) and (of_store := _OF_A_STORE.search(text)):
        return None, KeytailError(
            f"the table could not be written: {masked(of_store[0].strip())[:500]}",
            path=path,
            remedy="Check the store, the network and the credentials, then run again: the table has either all rows of "
            "this commit or none, and the next run detects which",
            slug="table-not-written",
        )
    return None, lost(problem, "once")
