"""Writes the ledger of runs: three Delta tables that record the intents and the outcomes of each run.

The ledger is only a record: recovery depends on the disk alone. Only the driver writes. LEDGER.md beside this file
describes how the tables are read, and the meaning of missing rows.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tenacity

from keytail.acting_user import as_caller
from keytail.errors import NO_ERROR, ErrorText, KeytailError, UsageProblem, stored
from keytail.ledger.on_spark import SparkTable
from keytail.ledger.read import intents_without_outcome
from keytail.ledger.tables import (
    DOWNTIME,
    INTENT,
    OUTCOME,
    TABLES,
    VERSION,
    Stamp,
    as_arrow,
    partition_fields,
    segment_fields,
)
from keytail.ledger.without_spark import DeltalakeTable
from keytail.run.contents import SegmentPlace, read_contents
from keytail.run.ended import first_line, text_of
from keytail.run.engine import Engine
from keytail.run.rows import ResultRow
from keytail.run.spark.delta import alone
from keytail.run.spark.stores import require_store

_VERSION_PROPERTY = "keytail.ledger.version"
# Parts of Delta's error messages about concurrent writers, after which a retry usually succeeds. deltalake raises
# CommitFailedError instead.
_MET = ("DELTA_CONCURRENT", "DELTA_METADATA_CHANGED", "DELTA_PROTOCOL_CHANGED", "Concurrent", "FileAlreadyExists")
_ATTEMPTS = 8
# Statuses of rows whose sizes and record numbers are added up for the run.
_CHANGED = ("compacted", "repacked", "expired", "erased")

Row = Mapping[str, Any]


def _has_met_another(problem: BaseException) -> bool:
    return type(problem).__name__ == "CommitFailedError" or any(word in text_of(problem) for word in _MET)


def _is_of_delta(problem: BaseException) -> bool:
    return isinstance(problem, Exception) and not isinstance(problem, KeytailError)


def again(work: Callable[[], Any], when: Callable[[BaseException], bool] = _has_met_another) -> Any:
    """Call `work` and return its result. If `work` raises an error for which `when` returns True, call it again, at
    most 8 times in all."""
    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception(when),
        stop=tenacity.stop_after_attempt(_ATTEMPTS),
        wait=tenacity.wait_random_exponential(0.1, 5.0),
        reraise=True,
    )
    return retrying(work)


@dataclass
class _Waiting:
    rows: list[Row]
    is_written: bool = False
    problem: Exception | None = None


class LedgerTable:
    """One table to which one run appends: with Spark if the run has a session, and with the deltalake package if not.
    Rows that threads add during an append are written together by the next append.

    Appends are numbered, and the number is passed to Delta: if `append` retries an append that succeeded in spite of an
    error, no rows are added. A caller that appends the same rows again after `append` has failed uses a new number: if
    the first append succeeded in spite of the error, the table then has the rows twice.
    """

    def __init__(self, spark: Any, path: str, name: str, run_id: str) -> None:
        self._folder = path
        self.path = os.path.join(path, name)
        self.name = name
        self._table = DeltalakeTable(self.path) if spark is None else SparkTable(spark, self.path)
        self._app_id = f"keytail-{name}-{run_id}"
        self._appends = 0
        # Never replaced: a thread may have fetched it, and append to it after another thread has written all rows.
        self._waiting: deque[_Waiting] = deque()
        self._writing = threading.Lock()

    def ensure(self) -> None:
        """Create the table if it does not exist, and add columns that an older keytail did not have. Raises
        UsageProblem if a newer keytail created the table, it is not a ledger's, or a column has another type.

        Another run may create the table at the same time. Delta raises many different errors for a table that is being
        created, so the call is repeated after any error.
        """
        with alone(self._folder):
            again(self._ensure, _is_of_delta)

    @as_caller()
    def _ensure(self) -> None:
        columns = TABLES[self.name]
        self._table.create(columns, {_VERSION_PROPERTY: str(VERSION)})
        properties, found = self._table.description()
        self._check_version(properties.get(_VERSION_PROPERTY))
        for name, (kind, _) in columns.items():
            if name in found and found[name] != kind:
                raise UsageProblem(
                    f"column {name} of the ledger has type {found[name]}, not {kind}",
                    path=self.path,
                    remedy="Give --ledger a separate folder",
                    slug="ledger-schema-mismatch",
                )
        missing = {name: column for name, column in columns.items() if name not in found}
        if missing:
            self._table.add_columns(missing)

    def _check_version(self, version: str | None) -> None:
        if version is None or int(version) > VERSION:
            made = "is not a ledger's" if version is None else f"was created by a newer keytail (version {version})"
            raise UsageProblem(
                f"the Delta table {made}",
                path=self.path,
                remedy="Give --ledger a separate folder" if version is None else "Update keytail on this host",
                slug="unsupported-ledger-table",
            )

    def append(self, rows: Iterable[Row]) -> None:
        """Append rows, and return when they are committed. Raises Delta's error if the rows cannot be committed."""
        own = _Waiting(list(rows))
        if not own.rows:
            return
        self._waiting.append(own)
        with self._writing:
            if not own.is_written:
                self._write_all()
        if own.problem is not None:
            raise own.problem

    def _write_all(self) -> None:
        together = [self._waiting.popleft() for _ in range(len(self._waiting))]
        problem = None
        try:
            self._write([row for item in together for row in item.rows])
        except Exception as reason:
            problem = reason
        for item in together:
            item.is_written, item.problem = True, problem

    @as_caller()
    def _write(self, rows: Sequence[Row]) -> None:
        self._appends += 1
        table = as_arrow(self.name, rows)
        with alone(self._folder):
            again(lambda: self._table.append(table, self._app_id, self._appends))


@dataclass
class Ledger:
    """Writes one run to the ledger at `path`. `on_note` is called with a message about rows that could not be written.

    `lost` is True if the ledger lacks an outcome of completed work; the next run on these log dirs adds it (repair.py).
    """

    engine: Engine
    path: str
    run_id: str
    command: str = "compact"
    host: str = field(default_factory=lambda: os.uname().nodename)
    on_note: Callable[[str], None] = lambda text: None
    lost: bool = False
    _tables: dict[str, LedgerTable] = field(init=False)
    _unwritten: list[tuple[str, list[Row]]] = field(default_factory=list)
    _reported: set[tuple[str, str]] = field(default_factory=set)
    _started: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._tables = {name: LedgerTable(self.engine.session, self.path, name, self.run_id) for name in TABLES}

    def open(self) -> None:
        """Create the tables that do not exist, and add missing columns. Raises KeytailError if the tables cannot be
        opened or changed."""
        require_store(self.engine.session, self.path, writes=True)
        try:
            for table in self._tables.values():
                table.ensure()
        except KeytailError:
            raise
        except Exception as problem:
            raise _failed("cannot be opened", self.path, problem, "the run was not started") from problem

    def begin(self, **run: Any) -> None:
        """Write the intent of the run; `run` has columns of the table `runs`. Raises KeytailError if the row cannot be
        written."""
        self._started = run
        self._append_to_runs(INTENT, run, "the run was not started")

    def record_downtime(self, run_id: str, **columns: Any) -> None:
        """Write the downtime of a broker, with the id of the run during the downtime; `columns` are columns of the
        table `runs`. Raises KeytailError if the row cannot be written."""
        row = {"run_id": run_id, "status": "done", **columns}
        self._append_to_runs(DOWNTIME, row, "the downtime is not recorded")

    def _append_to_runs(self, event: str, columns: Row, so: str) -> None:
        try:
            self._tables["runs"].append([{**self._stamp().fields(), "event": event, **columns}])
        except Exception as problem:
            raise _failed("cannot be written", self.path, problem, so) from problem

    def intend(self, bundle: int, rows: Sequence[ResultRow]) -> None:
        """Write the intents of a bundle. Raises KeytailError if the intents cannot be written: then the bundle must not
        be started."""
        try:
            stamp = self._stamp()
            self._tables["partitions"].append(partition_fields(stamp, INTENT, bundle, row) for row in rows)
        except Exception as problem:
            raise _failed("cannot be written", self.path, problem, "the partition was not started") from problem

    def conclude(
        self,
        bundle: int | None,
        rows: Sequence[ResultRow],
        made: Mapping[str, Sequence[int]] | None = None,
        **more: Any,
    ) -> None:
        """Write the outcomes of partitions. `made` has the base offsets of the segments that the run wrote, by the name
        of the partition. If rows cannot be written, `end` tries to write them again."""
        stamp = self._stamp()
        self._reported.update((row.log_dir, row.name) for row in rows)
        # Segments are written first, because an outcome implies that the rows of its segments exist.
        self._append_or_keep("segments", self._segments(stamp, bundle, rows, made or {}, more))
        self._append_or_keep("partitions", [partition_fields(stamp, OUTCOME, bundle, row, **more) for row in rows])

    def end(self, rows: Sequence[ResultRow], status: str, error: ErrorText = NO_ERROR) -> None:
        """Write the outcomes that are still missing, and the outcome of the run. `rows` are the rows of all chosen
        partitions, even if they needed no work."""
        self.conclude(None, [row for row in rows if (row.log_dir, row.name) not in self._reported])
        for table, kept in self._unwritten:
            self._append_or_lose(table, kept)
        self._unwritten = []
        done = [row for row in rows if row.status in _CHANGED]
        outcome = {
            **self._stamp().fields(),
            **self._started,
            "event": OUTCOME,
            "status": status,
            "error": stored(error),
            "partitions": len(rows),
            "counts": dict(Counter(row.status for row in rows)),
            **{name: _sum(done, name) for name in ("bytes_before", "bytes_after", "records_before", "records_after")},
        }
        self._append_or_lose("runs", [outcome])

    def append(self, table: str, rows: Sequence[Row]) -> None:
        """Append complete rows to the table named `table` (used by repair.py)."""
        self._tables[table].append(rows)

    def intents_without_outcome(self, table: str, keys: Sequence[str]) -> list[dict[str, Any]]:
        """Return the rows of those intents for which there is no outcome with the same values of the columns `keys`."""
        return intents_without_outcome(self.path, table, keys, self.engine.session)

    def path_of(self, table: str) -> str:
        return self._tables[table].path

    def _stamp(self) -> Stamp:
        return Stamp(self.run_id, self.host, time.time_ns() // 1_000_000, self.command)

    def _segments(
        self,
        stamp: Stamp,
        bundle: int | None,
        rows: Sequence[ResultRow],
        made: Mapping[str, Sequence[int]],
        more: Mapping[str, Any],
    ) -> list[Row]:
        places = [
            (row, SegmentPlace(os.path.join(row.log_dir, row.name), base))
            for row in rows
            for base in made.get(row.name, ())
        ]
        if not places:
            return []
        found: list[Row] = []
        try:
            answers = read_contents(self.engine, [place for _, place in places])
        except Exception as problem:  # for example, Spark has ended
            answers = [KeytailError(first_line(problem), slug="segment-contents-unknown")] * len(places)
        for (row, place), answer in zip(places, answers, strict=True):
            if isinstance(answer, KeytailError):
                unknown = {"base_offset": place.base_offset, "error": str(answer)}
                found.append(segment_fields(stamp, bundle, row, None, **unknown, **more))
            else:
                found.append(segment_fields(stamp, bundle, row, answer, **more))
        return found

    def _append_or_keep(self, table: str, rows: list[Row]) -> None:
        try:
            self._tables[table].append(rows)
        except Exception:
            self._unwritten.append((table, rows))

    def _append_or_lose(self, table: str, rows: list[Row]) -> None:
        try:
            self._tables[table].append(rows)
        except Exception as problem:
            self.lost = True
            self.on_note(f"{_failed('cannot be written', self.path, problem, 'the work of the run is complete')}")


def _failed(what: str, path: str, problem: Exception, so: str) -> KeytailError:
    return KeytailError(
        f"the ledger {what}: {first_line(problem)}; {so}",
        path=path,
        remedy="Repair the file system of the ledger, give --ledger another folder, or run without --ledger",
        slug="unwritable-ledger",
    )


def _sum(rows: Iterable[ResultRow], name: str) -> int | None:
    """Return the sum of the field `name` of the rows; None if the field is unknown (None) in one of the rows."""
    values = [getattr(row, name) for row in rows]
    return None if None in values else sum(values)
