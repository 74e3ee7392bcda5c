"""Reads the results of runs from a ledger, and maintains the ledger. No log dir is read.

An intent without an outcome is reported as `interrupted`: its run was killed, or is still running.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from keytail.cli.masking import masked_arguments
from keytail.cli.options import comma_lists
from keytail.errors import NO_ERROR, ErrorText, UsageProblem, of_stored
from keytail.format import names
from keytail.ledger.command import OF_DOWNTIME, MaintainRow, PartitionRow, Request, RunRow, ledger_at
from keytail.ledger.maintain import maintain as maintain_tables
from keytail.ledger.of_run import LedgerFlags, needs_spark
from keytail.ledger.read import read_rows
from keytail.ledger.tables import DOWNTIME, INTENT, OUTCOME, RUNS
from keytail.run.engine import Engine
from keytail.run.spark.session import session_of_run
from keytail.run.spark.stores import require_store

INTERRUPTED = "interrupted"
_MADE_OF: dict[str, Callable[[Any], Any]] = {"array": tuple, "map": dict}


def history(request: Request) -> list[Any]:
    """Return the requested rows: runs, one run and its partitions, partitions over time, or maintained tables."""
    _check(request)
    flags = ledger_at(request.ledger, request.delta_jars)
    if request.maintain:
        return maintain(flags, request.retain_days, execute=request.execute, master=request.master)
    if request.run_id is not None:
        item, of_run = run(flags, request.run_id, master=request.master)
        return [item, *of_run]
    if request.partitions:
        return partitions(flags, comma_lists(request.partitions), limit=request.limit, master=request.master)
    return runs(flags, limit=request.limit, master=request.master)


def _check(request: Request) -> None:
    if (request.run_id is not None) + bool(request.partitions) + request.maintain > 1:
        raise UsageProblem(
            "--run, --partitions and --maintain cannot be combined",
            remedy="Give only one of these flags",
            slug="conflicting-flags",
        )
    if (request.execute or request.retain_days is not None) and not request.maintain:
        raise UsageProblem(
            "--execute and --retain-days require --maintain",
            remedy="Give --maintain, or omit --execute and --retain-days",
            slug="missing-flag",
        )


@contextlib.contextmanager
def _reader(
    flags: LedgerFlags, master: str | None, *, always: bool = False, writes: bool = False
) -> Iterator[Engine | None]:
    """Yield an engine with a Spark session for reading the ledger, or None if deltalake reads it.

    `always` starts a session in any case. `writes` is True if the session also writes.
    """
    with contextlib.ExitStack() as run:
        if not (always or needs_spark() or master is not None or flags.is_remote):
            yield None
            return
        engine = session_of_run(run, master, submitted=False, extra=flags.session_settings())
        assert flags.path is not None
        require_store(engine.session, flags.path, writes=writes)
        yield engine


def runs(flags: LedgerFlags, *, limit: int, master: str | None = None) -> list[RunRow]:
    """Return the rows of the latest `limit` runs, in ascending order of time."""
    with _reader(flags, master) as engine:
        return folded_runs(_read(flags, "runs", {}, engine))[-limit:]


def run(
    flags: LedgerFlags, run_id: str, *, master: str | None = None, newest: bool = False
) -> tuple[RunRow, list[PartitionRow]]:
    """Return the row of one run, and a row for each of its partitions. `run_id` is the run's id, or a suffix of it.

    If several runs have the suffix `run_id`, `newest` selects the latest; without `newest`, UsageProblem is raised.
    UsageProblem is also raised if no run matches.
    """
    with _reader(flags, master) as engine:
        known = folded_runs(_read(flags, "runs", {}, engine))
        ones = [item for item in known if item.run_id.endswith(run_id)]
        ones = ones[-1:] if newest else ones
        if not known:
            raise UsageProblem(
                "the ledger has no runs",
                path=flags.path,
                remedy="Check the path. Only runs with --ledger and this path are recorded",
                slug="no-single-run",
            )
        if len(ones) != 1:
            few = ", ".join(item.run_id for item in known[-5:])
            what = "several runs have an id that ends with" if ones else "the ledger has no run"
            raise UsageProblem(
                f"{what} {run_id}",
                path=flags.path,
                remedy=f"Give the id of one run; the latest runs are: {few}",
                slug="no-single-run",
            )
        partitions = _read(flags, "partitions", {"run_id": ones[0].run_id}, engine)
    return ones[0], folded_partitions(partitions)


def runs_since(
    flags: LedgerFlags, since_ms: int, *, master: str | None = None
) -> tuple[list[RunRow], list[PartitionRow]]:
    """Return the rows of the runs that began at or after `since_ms`, and a row for each partition of these runs."""
    with _reader(flags, master) as engine:
        known = folded_runs(_read(flags, "runs", {}, engine))
        wanted = [item for item in known if (item.start_ms or 0) >= since_ms]
        ids = [item.run_id for item in wanted]
        found = _read(flags, "partitions", {"run_id": ids}, engine) if ids else []
    return wanted, folded_partitions(found)


def partitions(
    flags: LedgerFlags, wanted: Sequence[str], *, limit: int, master: str | None = None
) -> list[PartitionRow]:
    """Return the latest `limit` rows of the partitions named in `wanted`, in ascending order of time. Raises
    UsageProblem if a name is invalid or a partition has no row."""
    pairs = [_parsed(name) for name in wanted]
    with _reader(flags, master) as engine:
        found = _read(flags, "partitions", {"topic": sorted({topic for topic, _ in pairs})}, engine)
    rows = [row for row in folded_partitions(found) if (row.topic, row.partition) in pairs]
    known = {(row.topic, row.partition) for row in rows}
    if unknown := [name for name, pair in zip(wanted, pairs, strict=True) if pair not in known]:
        raise UsageProblem(
            f"the ledger has no rows of {', '.join(unknown)}",
            path=flags.path,
            remedy="Check the names of the partitions and --ledger",
            slug="partitions-not-in-ledger",
        )
    return rows[-limit:]


def maintain(
    flags: LedgerFlags, retain_days: int | None, *, execute: bool, master: str | None = None
) -> list[MaintainRow]:
    """Maintain the ledger, and return a row for each of its tables. Without `execute` nothing is changed."""
    assert flags.path is not None
    with _reader(flags, master, always=True, writes=execute) as engine:
        assert engine is not None
        _read(flags, "runs", {"run_id": ""}, engine)  # raises UsageProblem if there is no ledger
        today = datetime.datetime.now(datetime.UTC).date()
        return maintain_tables(engine, flags.path, today, retain_days, execute=execute)


def _read(flags: LedgerFlags, table: str, filters: Mapping[str, Any], engine: Engine | None) -> list[dict[str, Any]]:
    assert flags.path is not None
    return read_rows(flags.path, table, filters, None if engine is None else engine.session)


def _parsed(name: str) -> tuple[str, int]:
    parsed = names.parse_partition_dir(name)
    if parsed is None or parsed.kind != "normal":
        raise UsageProblem(f"invalid partition name '{name}'", remedy="Use TOPIC-N", slug="invalid-partition-name")
    return parsed.topic, parsed.partition


def folded_runs(rows: Iterable[Mapping[str, Any]]) -> list[RunRow]:
    """Return one row for each run and for each downtime without a run, in the order of start times. `rows` are rows of
    the table `runs`. An outcome that the run itself recorded takes precedence over one that another run determined."""
    rows = list(rows)
    found = sorted((row for row in rows if row["event"] == DOWNTIME), key=lambda row: row["at"])
    downtimes = {row["run_id"]: row for row in found}  # the latest recorded downtime of each run
    made = []
    for intent, outcome in _pairs(rows, ("run_id",)):
        known = outcome or intent or {}
        own = outcome is not None and not outcome["repaired_by"]
        run = RunRow(
            **_columns(known),
            status=(outcome["status"] if outcome else INTERRUPTED),
            error=_error(outcome, "the run recorded no outcome, or is still running"),
            start_ms=_ms(intent) if intent else None,
            end_ms=_ms(outcome) if outcome and own else None,
        )
        downtime = downtimes.pop(run.run_id, None)
        made.append(run if downtime is None else replace(run, **{name: downtime[name] for name in OF_DOWNTIME}))
    made += [_downtime_alone(row) for row in downtimes.values()]
    return sorted(made, key=lambda row: (row.start_ms or 0, row.run_id))


def _columns(known: Mapping[str, Any]) -> dict[str, Any]:
    """Return those fields of RunRow that are columns of the table `runs`, from one of its rows."""
    columns: dict[str, Any] = _plain(RunRow, known, "start_ms", "end_ms", "status", "error")
    for name, (kind, _) in RUNS.items():
        if (made := _MADE_OF.get(kind.partition("<")[0])) is not None:
            columns[name] = made(known[name] or ())
    columns["arguments"] = tuple(masked_arguments(columns["arguments"]))  # older releases stored secrets unmasked
    return columns


def _downtime_alone(row: Mapping[str, Any]) -> RunRow:
    """Return the row of a downtime without a run: from the stop of the broker to its first answer."""
    times = {"start_ms": row["down_at_ms"], "end_ms": row["reachable_at_ms"]}
    return RunRow(**_columns(row), status=row["status"], error=NO_ERROR, **times)


def folded_partitions(rows: Iterable[Mapping[str, Any]]) -> list[PartitionRow]:
    """Return one row for each partition and run, in the order of the times of the outcomes (of the intents, if there is
    no outcome)."""
    made = []
    for intent, outcome in _pairs(rows, ("run_id", "log_dir", "topic", "partition")):
        known = outcome or intent or {}
        made.append(
            PartitionRow(
                **_plain(PartitionRow, known, "status", "error", "at_ms", "command"),
                command=known["command"] or "",  # the column is null in older ledgers
                status=outcome["status"] if outcome else INTERRUPTED,
                error=_error(outcome, "the run began with this partition, but recorded no outcome"),
                at_ms=_ms(known),
            )
        )
    return sorted(made, key=lambda row: (row.at_ms or 0, row.topic, row.partition))


def _error(outcome: Mapping[str, Any] | None, otherwise: str) -> ErrorText:
    return of_stored(outcome["error"] or "") if outcome else ErrorText(otherwise)


_Pair = tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]


def _pairs(rows: Iterable[Mapping[str, Any]], keys: Sequence[str]) -> Iterator[_Pair]:
    """Yield (intent, outcome) for each key; one of the two may be None. If there are several outcomes, the first one
    that the run itself recorded is used or, if it recorded none, the first one that another run determined."""
    intents: dict[tuple, Mapping[str, Any]] = {}
    outcomes: dict[tuple, Mapping[str, Any]] = {}
    for row in sorted(rows, key=lambda row: (bool(row["repaired_by"]), row["at"])):
        key = tuple(row[name] for name in keys)
        if row["event"] == INTENT:
            intents.setdefault(key, row)
        elif row["event"] == OUTCOME:
            outcomes.setdefault(key, row)
    for key in {**intents, **outcomes}:
        yield intents.get(key), outcomes.get(key)


def _plain(kind: type, known: Mapping[str, Any], *without: str) -> dict[str, Any]:
    wanted = {field.name for field in fields(kind)} - set(without)
    return {name: known[name] for name in wanted if name in known}


def _ms(row: Mapping[str, Any]) -> int:
    at: datetime.datetime = row["at"]
    return int(at.timestamp() * 1000)
