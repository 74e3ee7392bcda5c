"""The ledger of runs, with real Delta tables: its rows after runs that succeed, fail, or are killed."""

from __future__ import annotations

import datetime
import json
import os
import random
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash
from chispa import assert_df_equality

from keytail.cli.configuration import Configuration
from keytail.compact.running.replacing import planned_row
from keytail.errors import KeytailError, UsageProblem
from keytail.ledger import maintain as ledger_maintain
from keytail.ledger import tables as ledger_tables
from keytail.ledger.command import OF_DOWNTIME, PartitionRow, Request, RunRow, show_rows
from keytail.ledger.history import folded_partitions, folded_runs
from keytail.ledger.maintain import maintain
from keytail.ledger.of_run import LedgerFlags, Recording, Run, recording
from keytail.ledger.read import read_rows
from keytail.ledger.repair import repair
from keytail.ledger.tables import Stamp, partition_fields
from keytail.ledger.write import Ledger, LedgerTable
from keytail.log.fs import FileSystem
from keytail.log.replacement.recover import recover
from keytail.run.engine import Engine, ThisProcess
from keytail.run.rows import ResultRow, exit_status
from keytail.run.spark.engine import SparkEngine
from tests.chance import SEED
from tests.compact.test_driver import checkpoint, compaction, make
from tests.log_dirs import snapshot

pytestmark = pytest.mark.spark

LOG = "_delta_log/00000000000000000000.json"
EVERY_POINT = os.environ.get("KEYTAIL_FAULTS") == "all"


@pytest.fixture(scope="module")
def empty(engine: SparkEngine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a ledger without runs once, because creating its tables takes some seconds."""
    path = tmp_path_factory.mktemp("ledgers") / "empty"
    Ledger(engine, str(path), "nobody").open()
    return path


@pytest.fixture
def path(empty: Path, tmp_path: Path) -> str:
    return str(shutil.copytree(empty, tmp_path / "ledger"))


def runs(path: str) -> dict[str, RunRow]:
    return {row.run_id: row for row in folded_runs(read_rows(path, "runs", {}))}


def partitions(path: str, run_id: str) -> dict[str, PartitionRow]:
    return {row.name: row for row in folded_partitions(read_rows(path, "partitions", {"run_id": run_id}))}


def begun(engine: SparkEngine, path: str, run_id: str, log_dir: Path, **more: Any) -> Ledger:
    ledger = Ledger(engine, path, run_id, **more)
    ledger.begin(command="compact", arguments=["compact"], log_dirs=[str(log_dir)], versions={}, now_ms=0, config={})
    return ledger


def assert_segments_are_on_disk(path: str, run_id: str, log_dir: Path, bases: dict[str, set[int]]) -> None:
    """Check that the ledger's digests of the partitions of a run are those of the segments on disk."""
    rows = read_rows(path, "segments", {"run_id": run_id})
    found: dict[str, set[int]] = {}
    for row in rows:
        name = f"{row['topic']}-{row['partition']}"
        found.setdefault(name, set()).add(row["base_offset"])
        data = (log_dir / name / f"{row['base_offset']:020d}.log").read_bytes()
        assert row["xxh3_128"] == xxhash.xxh3_128(data).hexdigest()
        assert (row["log_bytes"], row["index_status"], row["error"]) == (len(data), "good", None)
    assert found == {name: wanted for name, wanted in bases.items() if wanted}


def cleaned_bases(log_dir: Path) -> dict[str, set[int]]:
    """Return the base offsets of the segments below the checkpoint, by partition."""
    found = {}
    for (topic, number), to in checkpoint(log_dir).items():
        bases = {int(log.stem) for log in (log_dir / f"{topic}-{number}").glob("*.log")}
        found[f"{topic}-{number}"] = {base for base in bases if base < to}
    return found


def test_a_completed_run_is_recorded(engine: SparkEngine, path: str, tmp_path: Path) -> None:
    log_dir, tasks = make(tmp_path / "logs", count=3)
    ledger = begun(engine, path, "one", log_dir)
    rows = compaction(engine, log_dir, tasks, ledger=ledger).run()
    assert runs(path)["one"].status == "interrupted", "the end of the run must not be recorded yet"
    skipped = ResultRow("u", 0, str(log_dir), "skipped", "not due")
    ledger.end([*rows, skipped], "done")
    assert not ledger.lost
    run = runs(path)["one"]
    assert (run.status, run.partitions, run.counts) == ("done", 4, {"compacted": 3, "skipped": 1})
    assert run.bytes_before == sum(row.bytes_before or 0 for row in rows)
    assert run.records_after == sum(row.records_after or 0 for row in rows)
    reported = partitions(path, "one")
    assert reported.pop("u-0").status == "skipped"
    for row in rows:
        of_ledger = reported.pop(row.name)
        for name in ("status", "bytes_before", "bytes_after", "records_before", "records_after", "end_dirty_offset"):
            assert getattr(of_ledger, name) == getattr(row, name)
        assert of_ledger.bundle is not None
    assert not reported
    assert_segments_are_on_disk(path, "one", log_dir, cleaned_bases(log_dir))


class Killed(BaseException):
    """Raised at the point of the kill."""


class KillsAtPoint:
    """Raises Killed at point number `at`, and from then on at every point, because a killed process does nothing more.
    """

    def __init__(self, at: int | None) -> None:
        self.at, self.seen = at, list[str]()

    def point(self, name: str) -> None:
        self.seen.append(name)
        if self.at is not None and len(self.seen) > self.at:
            raise Killed


class DyingFileSystem(FileSystem):
    def __init__(self, dying: KillsAtPoint) -> None:
        super().__init__()
        self._dying = dying

    def _change(self, operation: str, arguments: tuple[Any, ...], action: Callable[[], Any]) -> Any:
        self._dying.point(operation)
        return super()._change(operation, arguments, action)


@pytest.fixture
def dying(monkeypatch: pytest.MonkeyPatch) -> Iterator[KillsAtPoint]:
    """Yield points for a kill, including before and after each append to the ledger."""
    death = KillsAtPoint(None)
    write = LedgerTable._write

    def killed_write(table: LedgerTable, rows: Any) -> None:
        death.point(f"before {table.name}")
        write(table, rows)
        death.point(f"after {table.name}")

    monkeypatch.setattr(LedgerTable, "_write", killed_write)
    yield death


def one_run(engine: SparkEngine, path: str, log_dir: Path, tasks: Any, dying: KillsAtPoint) -> None:
    ledger = begun(engine, path, "killed", log_dir)
    rows = compaction(engine, log_dir, tasks, ledger=ledger, fs=DyingFileSystem(dying)).run()
    ledger.end(rows, "done")


def test_after_a_kill_at_any_point_the_ledger_is_correct_and_the_next_run_completes_it(
    engine: SparkEngine, empty: Path, tmp_path: Path, dying: KillsAtPoint
) -> None:
    log_dir, tasks = make(tmp_path / "logs", count=2, records=120)
    once = str(shutil.copytree(empty, tmp_path / "once"))
    shutil.copytree(log_dir, tmp_path / "copy")
    one_run(engine, once, log_dir, tasks, dying)
    points = dying.seen
    assert len(points) > 30
    [intended, *_, concluded] = [at for at, name in enumerate(points) if name == "after partitions"]
    rng = random.Random(SEED)
    drawn = {rng.choice((rng.randrange(intended + 1, concluded), intended, concluded - 1, concluded))}
    chosen = range(len(points)) if EVERY_POINT else sorted(drawn)
    print(f"seed {SEED}, points {list(chosen)} of {len(points)}")
    for at in chosen:
        shutil.rmtree(log_dir)
        shutil.copytree(tmp_path / "copy", log_dir)
        path = str(shutil.copytree(empty, tmp_path / f"ledger-{at}"))
        dying.at, dying.seen = at, []
        with pytest.raises(Killed):
            one_run(engine, path, log_dir, tasks, dying)
        dying.at = None
        reported = partitions(path, "killed")
        moved = checkpoint(log_dir)
        for name, row in reported.items():
            if row.status == "compacted":
                assert ("t", int(name[2:])) in moved, f"at {at}: compacted, but the checkpoint has not moved"
            else:
                assert row.status == "interrupted"
        for task in tasks:
            recover(FileSystem(), task.partition_path)
            if (task.topic, task.partition) in moved:
                assert f"t-{task.partition}" in reported, f"at {at}: begun without a recorded intent"
        known = runs(path)
        next_run = Ledger(engine, path, "next")
        repair(next_run, [str(log_dir)])
        assert repair(Ledger(engine, path, "later"), [str(log_dir)]) == 0, "everything must already be recorded"
        for name, row in partitions(path, "killed").items():
            done = ("t", int(name[2:])) in moved
            assert row.status == ("compacted" if done else "interrupted"), f"at {at}"
        if "killed" in known:
            done = known["killed"].status == "done"
            assert runs(path)["killed"].status == ("done" if done else "interrupted")
        if len(moved) == 2:
            assert_segments_are_on_disk(path, "killed", log_dir, cleaned_bases(log_dir))


def test_a_bundle_whose_intent_cannot_be_written_is_not_started(
    engine: SparkEngine, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_dir, tasks = make(tmp_path / "logs", count=2)
    ledger = begun(engine, path, "one", log_dir)
    before = snapshot(log_dir)
    monkeypatch.setattr(LedgerTable, "_write", fail)
    rows = compaction(engine, log_dir, tasks, ledger=ledger).run()
    assert [row.status for row in rows] == ["failed", "failed"]
    assert "the ledger cannot be written: no room" in rows[0].error
    assert "the partition was not started" in rows[0].error
    assert snapshot(log_dir) == before


def fail(table: LedgerTable, rows: Any) -> None:
    raise OSError("no room")


def test_an_outcome_that_cannot_be_recorded_changes_the_exit_status_and_is_later_read_from_the_disk(
    engine: SparkEngine, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_dir, tasks = make(tmp_path / "logs", count=2)
    notes: list[str] = []
    ledger = begun(engine, path, "one", log_dir, on_note=notes.append)
    conclude = Ledger.conclude

    def lose(self: Ledger, *arguments: Any, **more: Any) -> None:
        monkeypatch.setattr(LedgerTable, "_write", fail)
        conclude(self, *arguments, **more)

    write = LedgerTable._write
    monkeypatch.setattr(Ledger, "conclude", lose)
    rows = compaction(engine, log_dir, tasks, ledger=ledger).run()
    ledger.end(rows, "done")
    assert [row.status for row in rows] == ["compacted", "compacted"]
    assert ledger.lost
    assert "the ledger cannot be written" in notes[0]
    assert exit_status(rows) == 0
    assert exit_status(Recording(ledger).recorded(rows)) == 3
    assert {row.status for row in partitions(path, "one").values()} == {"interrupted"}
    monkeypatch.setattr(LedgerTable, "_write", write)
    monkeypatch.setattr(Ledger, "conclude", conclude)
    assert repair(Ledger(engine, path, "two"), [str(tmp_path / "other")]) == 0, "the run has other log dirs"
    assert repair(Ledger(engine, path, "two", host="another"), [str(log_dir)]) == 0, "the run is of another host"
    assert repair(Ledger(engine, path, "two"), [str(log_dir)]) == 3
    reported = partitions(path, "one")
    for row in rows:
        assert (reported[row.name].status, reported[row.name].repaired_by) == ("compacted", "two")
        assert reported[row.name].bytes_after == row.bytes_after
        assert reported[row.name].end_dirty_offset == row.end_dirty_offset
    assert runs(path)["one"].status == "interrupted"
    assert_segments_are_on_disk(path, "one", log_dir, cleaned_bases(log_dir))


def test_a_run_works_even_if_it_cannot_repair_the_ledger(
    engine: SparkEngine, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_dir, tasks = make(tmp_path / "logs", count=1)
    ledger = begun(engine, path, "killed", log_dir)
    ledger.intend(1, [planned_row(task) for task in tasks])
    (log_dir / "cleaner-offset-checkpoint").write_text("no checkpoint")
    notes: list[str] = []
    run = Run("compact", "next", 0, [str(log_dir)], Configuration())
    monkeypatch.setattr(sys, "argv", ["keytail", "compact"])
    with recording(LedgerFlags(path), engine, run, on_note=notes.append) as record:
        record.end([], 0)
    assert "could not be determined" in notes[0]
    assert runs(path)["next"].status == "done"


def test_an_append_that_succeeded_despite_an_error_is_not_repeated(
    spark: Any, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyspark.sql.readwriter import DataFrameWriter

    save = DataFrameWriter.save
    saved = []

    def save_and_fail(self: Any, *arguments: Any, **more: Any) -> None:
        save(self, *arguments, **more)
        saved.append(1)
        if len(saved) == 1:
            raise RuntimeError("io.delta.exceptions.ConcurrentWriteException: another came first")

    monkeypatch.setattr(DataFrameWriter, "save", save_and_fail)
    table = LedgerTable(spark, path, "partitions", "one")
    stamp = Stamp("one", "here", 0)
    table.append([partition_fields(stamp, "intent", 1, ResultRow("t", 0, "/x", "would-compact"))])
    assert len(saved) == 2
    assert len(read_rows(path, "partitions", {})) == 1


def test_rows_that_arrive_during_an_append_are_written_in_the_next_append(
    spark: Any, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes: list[int] = []
    going, may_go = threading.Event(), threading.Event()

    def slow(table: LedgerTable, rows: Any) -> None:
        going.set()
        may_go.wait(300)
        writes.append(len(rows))

    monkeypatch.setattr(LedgerTable, "_write", slow)
    table = LedgerTable(spark, path, "partitions", "one")
    threads = [threading.Thread(target=table.append, args=([{}],)) for _ in range(9)]
    threads[0].start()
    assert going.wait(300)
    for thread in threads[1:]:
        thread.start()
    while len(table._waiting) < 8:
        time.sleep(0.01)
    may_go.set()
    for thread in threads:
        thread.join(300)
    assert writes == [1, 8]


def test_missing_columns_are_added_to_an_older_ledger(spark: Any, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stamp = Stamp("old", "here", 0)
    LedgerTable(spark, path, "runs", "old").append([{**stamp.fields(), "event": "intent"}])
    newer = {**ledger_tables.RUNS, "seconds": ("bigint", "that it took")}
    monkeypatch.setitem(ledger_tables.TABLES, "runs", newer)  # type: ignore[arg-type]
    assert read_rows(path, "runs", {})[0]["seconds"] is None
    table = LedgerTable(spark, path, "runs", "new")
    table.ensure()
    table.append([{**stamp.fields(), "run_id": "new", "event": "intent", "seconds": 7}])
    assert {row["run_id"]: row["seconds"] for row in read_rows(path, "runs", {})} == {"old": None, "new": 7}
    monkeypatch.undo()
    LedgerTable(spark, path, "runs", "older").ensure()
    LedgerTable(spark, path, "runs", "older").append([{**stamp.fields(), "run_id": "older", "event": "intent"}])
    assert len(read_rows(path, "runs", {})) == 3, "an older keytail must be able to write"


def test_a_downtime_is_added_to_the_ledger_of_an_older_keytail(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "older")
    columns = {name: column for name, column in ledger_tables.RUNS.items() if name not in OF_DOWNTIME}
    assert len(columns) == len(ledger_tables.RUNS) - 4
    with monkeypatch.context() as older:
        older.setitem(ledger_tables.TABLES, "runs", columns)  # type: ignore[arg-type]
        Ledger(engine, path, "one").open()  # type: ignore[arg-type]
        begun(engine, path, "one", tmp_path).end((), "done")  # type: ignore[arg-type]
    assert (runs(path)["one"].status, runs(path)["one"].broker) == ("done", None)
    times = {"down_at_ms": 1, "reachable_at_ms": 2, "in_sync_at_ms": None}
    newer = Ledger(engine, path, "newer", "downtime")
    newer.open()
    newer.record_downtime("one", broker="b1", **times)
    assert [getattr(runs(path)["one"], name) for name in OF_DOWNTIME] == ["b1", 1, 2, None]
    with monkeypatch.context() as older:  # the older version continues
        older.setitem(ledger_tables.TABLES, "runs", columns)  # type: ignore[arg-type]
        Ledger(engine, path, "two").open()
        begun(engine, path, "two", tmp_path).end((), "done")  # type: ignore[arg-type]
    assert {name: (row.status, row.broker) for name, row in runs(path).items()} == {
        "one": ("done", "b1"), "two": ("done", None)
    }  # fmt: skip


def test_a_foreign_table_is_refused(
    spark: Any, engine: SparkEngine, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spark.range(3).write.format("delta").save(str(tmp_path / "else" / "runs"))
    with pytest.raises(UsageProblem, match="is not a ledger's"):
        Ledger(engine, str(tmp_path / "else"), "one").open()
    spark.sql(f"ALTER TABLE delta.`{path}/runs` SET TBLPROPERTIES ('keytail.ledger.version' = '9')")
    with pytest.raises(UsageProblem, match="newer keytail"):
        Ledger(engine, path, "one").open()
    changed = {**ledger_tables.PARTITIONS, "status": ("int", "")}
    monkeypatch.setitem(ledger_tables.TABLES, "partitions", changed)  # type: ignore[arg-type]
    with pytest.raises(UsageProblem, match="column status of the ledger has type string, not int"):
        LedgerTable(spark, path, "partitions", "one").ensure()
    (tmp_path / "file").write_text("")
    with pytest.raises(KeytailError, match="the ledger cannot be opened"):
        Ledger(engine, str(tmp_path / "file" / "ledger"), "one").open()


def test_both_readers_return_the_same_rows(spark: Any, path: str) -> None:
    stamp = Stamp("it's", "here", 1_700_000_000_123)
    run = {**stamp.fields(), "event": "intent", "config": {"a": "b"}, "log_dirs": ["/x", "/y"], "counts": {"clean": 2}}
    LedgerTable(spark, path, "runs", "one").append([run, {**run, "run_id": "other"}])
    item = read_rows(path, "runs", {"run_id": "it's"})
    assert item == read_rows(path, "runs", {"run_id": "it's"}, spark)
    assert [row["config"] for row in item] == [{"a": "b"}]
    assert len(read_rows(path, "runs", {"run_id": ["it's", "other"]}, spark)) == 2
    assert len(read_rows(path, "runs", {"run_id": ["it's", "other"]})) == 2
    for reader in (None, spark):
        with pytest.raises(UsageProblem, match="no ledger"):
            read_rows(f"{path}/nowhere", "runs", {}, reader)


@pytest.mark.one_of("Spark and deltalake with one ledger")
@pytest.mark.parametrize("by_spark", [True, False], ids=["Spark first", "deltalake first"])
def test_spark_and_deltalake_write_the_same_tables(
    engine: SparkEngine, spark: Any, tmp_path: Path, by_spark: bool
) -> None:
    """It does not matter which of them creates the tables, appends, or records that runs of the other one were
    interrupted.
    """
    path, log_dir = str(tmp_path / "ledger"), tmp_path / "logs"
    log_dir.mkdir()
    engines: list[Engine] = [engine, ThisProcess()] if by_spark else [ThisProcess(), engine]
    for number, writer in enumerate(engines * 2):
        ledger = Ledger(writer, path, f"run-{number}")
        ledger.open()
        repair(ledger, [str(log_dir)])
        ledger.begin(command="compact", arguments=["it's"], log_dirs=[str(log_dir)], versions={}, now_ms=0, config={})
        ledger.intend(1, [ResultRow("t", number, str(log_dir), "would-compact", first_dirty_offset=number)])
    for table in ledger_tables.TABLES:
        found = [
            sorted(read_rows(path, table, {}, reader), key=lambda row: (row["at"], row["event"], row["run_id"]))
            for reader in (None, spark)
        ]
        assert found[0] == found[1]
        assert len(found[0]) == (0 if table == "segments" else 7)
        actions = [json.loads(line) for line in (tmp_path / "ledger" / table / LOG).read_text().splitlines()]
        kept = next(action["metaData"] for action in actions if "metaData" in action)
        fields = json.loads(kept["schemaString"])["fields"]
        columns = {name: comment for name, (_, comment) in ledger_tables.TABLES[table].items()}
        assert {field["name"]: field["metadata"]["comment"] for field in fields} == columns
        assert (kept["partitionColumns"], kept["configuration"]) == (["day"], {"keytail.ledger.version": "1"})
        [protocol] = [action["protocol"] for action in actions if "protocol" in action]
        assert protocol == {"minReaderVersion": 1, "minWriterVersion": 2}
    repaired = [(row.run_id, row.status, row.repaired_by) for row in runs(path).values()]
    assert repaired == [(f"run-{n}", "interrupted", f"run-{n + 1}" if n < 3 else None) for n in range(4)]
    for number in range(3):
        assert partitions(path, f"run-{number}")[f"t-{number}"].repaired_by == f"run-{number + 1}"


@pytest.mark.one_of("Spark and deltalake with one ledger")
def test_spark_maintains_tables_of_deltalake_and_deltalake_continues(
    spark: Any, engine: SparkEngine, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stamp = Stamp("one", "here", 0)
    table = LedgerTable(None, path, "runs", "one")
    for number in range(12):  # enough commits for a checkpoint of the table
        table.append([{**stamp.fields(), "event": "intent", "now_ms": number}])
    monkeypatch.setattr(ledger_maintain, "TABLES", ("runs",))
    [row] = maintain(engine, path, datetime.date(1970, 1, 2), None, execute=True)
    assert (row.status, row.rows, row.files_before, row.files_after) == ("maintained", 12, 12, 1)
    table.append([{**stamp.fields(), "event": "intent", "now_ms": 12}])
    assert sorted(item["now_ms"] for item in read_rows(path, "runs", {}, spark)) == list(range(13))


def test_an_append_of_the_other_writer_is_not_repeated(spark: Any, path: str) -> None:
    """Spark and deltalake number appends in the same way, and each of them reads the other's numbers."""
    stamp = Stamp("one", "here", 0)
    for writer in (spark, None, spark):
        LedgerTable(writer, path, "runs", "one").append([{**stamp.fields(), "event": "intent"}])
    assert len(read_rows(path, "runs", {})) == 1


def test_a_ledger_without_some_columns_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """In the result of `read_rows`, columns that the table does not have are null."""
    at = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
    key = {"run_id": "one", "at": at, "host": "here", "event": "outcome", "status": "done"}
    [run] = folded_runs([{**dict.fromkeys(ledger_tables.RUNS), **key, "command": "compact"}])
    place = {"log_dir": "/x", "topic": "t", "partition": 0}
    [row] = folded_partitions([{**dict.fromkeys(ledger_tables.PARTITIONS), **key, **place}])
    show_rows([run], Request("ledger"))
    show_rows([run, row], Request("ledger", run_id="one"))
    show_rows([row], Request("ledger", partitions=["t-0"]))
    shown = capsys.readouterr().out
    assert shown.count("t-0") == 2
    assert shown.count("done") == 4


def test_maintenance_removes_old_days_and_merges_files(
    spark: Any, engine: SparkEngine, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    day_ms = 24 * 3600 * 1000
    now_ms = 100 * day_ms
    table = LedgerTable(spark, path, "runs", "one")
    for days in (50, 3, 3, 3, 1):
        stamp = Stamp(f"run-{days}", "here", now_ms - days * day_ms)
        table.append([{**stamp.fields(), "event": "intent"}])
    today = datetime.date(1970, 1, 1) + datetime.timedelta(days=100)
    before = spark.read.format("delta").load(f"{path}/runs").where("day >= '1970-03-01'").sort("at")
    kept = spark.createDataFrame(before.toArrow())
    [row, *others] = maintain(engine, path, today, 30, execute=False)
    assert [item.status for item in others] == ["would-maintain"] * 2
    assert (row.status, row.rows, row.removed_rows, row.files_before) == ("would-maintain", 5, 1, 5)
    assert len(read_rows(path, "runs", {})) == 5
    # the other tables are maintained in the same way, which takes as long
    monkeypatch.setattr(ledger_maintain, "TABLES", ("runs",))
    [row] = maintain(engine, path, today, 30, execute=True)
    assert (row.status, row.removed_rows, row.files_before, row.files_after) == ("maintained", 1, 5, 2)
    assert_df_equality(spark.read.format("delta").load(f"{path}/runs").sort("at"), kept, ignore_metadata=True)
    assert maintain(engine, path, today, None, execute=True)[0].removed_rows == 0
