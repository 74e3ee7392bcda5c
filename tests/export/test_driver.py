"""Exports of random logs into real Delta tables: full and incremental exports equal a fold in plain Python, and a
kill at any step leaves a complete state.
"""

from __future__ import annotations

import base64
import dataclasses
import os
import pickle
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from chispa import assert_df_equality

from keytail.cli.selection import PartitionFilter
from keytail.errors import CorruptLog, KeytailError
from keytail.export import columns, delta_table, on_spark
from keytail.export import driver as export_driver
from keytail.export.command import ExportRow, Request
from keytail.export.driver import export
from keytail.export.formats import Format, Formats
from keytail.run.spark.engine import SparkEngine
from keytail.values import to_bytes
from tests.chance import SEED
from tests.growing_log import GrowingLog
from tests.log_dirs import records_of
from tests.reference.batches import Rec
from tests.run.work import OpensWhereUnpickled

pytestmark = pytest.mark.spark
ROUNDS = int(os.environ.get("KEYTAIL_EXPORT_ROUNDS", "1"))


@pytest.fixture
def rng() -> random.Random:
    return random.Random(SEED)


@pytest.fixture(autouse=True)
def one_session(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_driver, "session_of_run", lambda *_, **__: SparkEngine(spark))


def run(
    tmp_path: Path, *logs: GrowingLog, to: str = "lake", formats: Formats | None = None, **flags: Any
) -> list[ExportRow]:
    log_dirs = tuple(dict.fromkeys(str(log.log_dir) for log in logs))
    partition_filter = PartitionFilter(log_dirs=log_dirs, partitions=flags.pop("partitions", ()))
    request = Request(partition_filter, str(tmp_path / to), formats or Formats(), **{"execute": True, **flags})
    return export(request)


def statuses(rows: Sequence[ExportRow]) -> list[tuple[str, str]]:
    return [(row.status, row.strategy) for row in rows]


def expected(*logs: GrowingLog, end: int | None = None) -> set[tuple[Any, ...]]:
    rows = set()
    for log in logs:
        for key, (record, epoch) in log.latest(end).items():
            headers = tuple((name.decode(), value) for name, value in record.headers)
            timestamp_ms = None if record.timestamp == -1 else record.timestamp
            rows.add((log.partition, key, record.value, headers, timestamp_ms, record.offset, epoch))
    return rows


def table(spark: Any, tmp_path: Path, topic: str = "t", to: str = "lake") -> set[tuple[Any, ...]]:
    frame = spark.read.format("delta").load(str(tmp_path / to / topic))
    frame = frame.selectExpr("*", "unix_millis(timestamp) AS ms")
    rows = [
        (row.partition, row.key and bytes(row.key), row.value and bytes(row.value),
         tuple((item.key, None if item.value is None else bytes(item.value)) for item in row.headers),
         row.ms, row.offset, row.leader_epoch)
        for row in frame.collect()
    ]  # fmt: skip
    rows = [(p, key or b"", value or b"", *rest) for p, key, value, *rest in rows]
    assert len(set(rows)) == len(rows)
    return set(rows)


def logs_of(rng: random.Random, tmp_path: Path, count: int = 2, **fields: Any) -> list[GrowingLog]:
    logs = [GrowingLog(rng, tmp_path / "logs", partition=number, **fields) for number in range(count)]
    for log in logs:
        if rng.random() < 0.5:
            log.grow(4, old=True)
            log.roll()
        log.grow(30)
        log.write()
    return logs


def test_tables_of_random_traffic_equal_the_model(spark: Any, tmp_path: Path, rng: random.Random) -> None:
    logs = logs_of(rng, tmp_path)
    assert statuses(run(tmp_path, *logs)) == [("exported", "full")] * 2
    assert table(spark, tmp_path) == expected(*logs)
    assert statuses(run(tmp_path, *logs)) == [("clean", "")] * 2
    for _ in range(ROUNDS):
        for log in logs:
            log.append_records(log.random_records(3))
            log.grow(15)
            log.write()
        rows = run(tmp_path, *logs)
        assert all(row.status in ("exported", "clean") and row.strategy != "full" for row in rows), rows
        assert table(spark, tmp_path) == expected(*logs)
    for log in logs:  # an export without rows makes no Delta commit, which would record its end offset
        log.settle()
        log.append_records([dataclasses.replace(record, value=b"last") for record in log.random_records(3)])
        log.write()
    assert statuses(run(tmp_path, *logs)) == [("exported", "incremental")] * 2
    assert statuses(run(tmp_path, *logs, to="rebuilt")) == [("exported", "full")] * 2
    merged, rebuilt = (spark.read.format("delta").load(str(tmp_path / to / "t")) for to in ("lake", "rebuilt"))
    assert_df_equality(merged, rebuilt, ignore_row_order=True)
    compacted_past(logs[0])
    rows = run(tmp_path, *logs)
    assert (rows[0].status, rows[0].strategy) == ("exported", "full")
    assert "tombstones may have been removed" in rows[0].why
    assert rows[1].status == "clean", rows[1]
    assert table(spark, tmp_path) == expected(*logs)


def compacted_past(log: GrowingLog) -> None:
    """Append tombstones after the exported offset, and compact the log until they are removed."""
    log.settle()
    log.append_records([Rec(log.end, log.now_ms, b"k1", None), Rec(log.end + 1, log.now_ms, b"k1", None)])
    for _ in range(3):
        log.roll()
        log.append_records([Rec(log.end, log.now_ms, b"last", b"x")])
        log.write()
        log.compact()


def test_a_gap_reveals_a_compaction_if_no_checkpoint_does(spark: Any, tmp_path: Path) -> None:
    log = GrowingLog(random.Random(1), tmp_path / "logs")
    log.append_records([Rec(0, 5, b"k1", b"x"), Rec(1, 5, b"k2", b"x")])
    log.write()
    assert statuses(run(tmp_path, log)) == [("exported", "full")]
    assert table(spark, tmp_path) == expected(log) != set()
    compacted_past(log)
    (log.log_dir / "cleaner-offset-checkpoint").unlink()
    assert not [record for record in records_of(log.path) if record.key == b"k1"], "the tombstone must be removed"
    dry = run(tmp_path, log, execute=False)
    assert statuses(dry) == [("would-export", "incremental")]
    [row] = run(tmp_path, log)
    assert (row.status, row.strategy, "offsets are missing" in row.why) == ("exported", "full", True)
    assert table(spark, tmp_path) == expected(log)


class Killed(BaseException):
    pass


def test_a_kill_leaves_the_old_or_the_new_state(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One partition is updated and another one is new: a kill happens before and after each of the two commits."""
    old, new = (GrowingLog(random.Random(n), tmp_path / "logs", partition=n) for n in range(2))
    old.grow(10)
    old.write()
    run(tmp_path, old)
    before = expected(old)
    assert table(spark, tmp_path) == before
    old.append_records(old.random_records(4))
    for log in (old, new):
        log.grow(10)
        log.settle()
        log.write()
    both = expected(old, new)
    between = before | expected(new)
    kills = [("write", False, before), ("write", True, between), ("merge", False, between), ("merge", True, both)]
    for step, is_done, left in kills:
        real = getattr(delta_table, step)

        def killed(*arguments: Any, real: Any = real, is_done: bool = is_done, **fields: Any) -> None:
            if is_done:
                real(*arguments, **fields)
            raise Killed

        with monkeypatch.context() as patch:
            patch.setattr(delta_table, step, killed)
            with pytest.raises(Killed):
                run(tmp_path, old, new)
        assert table(spark, tmp_path) == left, (step, is_done)
    assert statuses(run(tmp_path, old, new)) == [("clean", "")] * 2
    assert table(spark, tmp_path) == both


def test_rows_written_but_not_committed_are_not_visible(spark: Any, tmp_path: Path) -> None:
    """The first run was killed after it had written its files, and before it committed them."""
    log = GrowingLog(random.Random(1), tmp_path / "logs")
    log.grow(10)
    log.write()
    stray = tmp_path / "lake" / "t" / "partition=0"
    stray.mkdir(parents=True)
    (stray / "part-0.parquet").write_bytes(b"PAR1")
    assert statuses(run(tmp_path, log)) == [("exported", "full")]
    assert table(spark, tmp_path) == expected(log)


def test_changes_of_rows_by_others_lead_to_a_full_export(spark: Any, tmp_path: Path) -> None:
    """Changes that affect no row do not matter; after any other change, everything is exported again."""
    log = GrowingLog(random.Random(1), tmp_path / "logs")
    log.append(9)
    log.write()
    run(tmp_path, log)
    path = f"delta.`{tmp_path / 'lake' / 't'}`"
    spark.sql(f"OPTIMIZE {path}")
    spark.sql(f"ALTER TABLE {path} SET TBLPROPERTIES ('delta.logRetentionDuration' = 'interval 90 days')")
    assert statuses(run(tmp_path, log)) == [("clean", "")]
    spark.sql(f"DELETE FROM {path} WHERE offset % 2 = 0")
    [row] = run(tmp_path, log)
    assert (row.strategy, "changed by DELETE" in row.why) == ("full", True)
    assert table(spark, tmp_path) == expected(log)
    spark.range(3).write.format("delta").save(str(tmp_path / "lake2" / "t"))
    [row] = run(tmp_path, log, to="lake2")
    assert (row.status, "[not-an-export]" in row.error) == ("refused", True)


def test_one_bad_partition_does_not_stop_others_from_being_exported(spark: Any, tmp_path: Path) -> None:
    logs = logs_of(random.Random(3), tmp_path, 3)
    logs[1].append_records([Rec(logs[1].end, 5, None, b"keyless")])
    logs[1]._appended.pop()
    logs[1].settle()
    logs[1].write()
    file = sorted(logs[2].path.glob("*.log"))[0]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    rows = run(tmp_path, *logs)
    assert [row.status for row in rows] == ["exported", "refused", "corrupt"]
    assert "have no key" in rows[1].error
    assert table(spark, tmp_path) == expected(logs[0])
    rows = run(tmp_path, *logs, drop_keyless=True, partitions=("t-1",))
    assert (rows[0].status, rows[0].keyless) == ("exported", 1)
    assert table(spark, tmp_path) == expected(*logs[:2])


def test_another_log_of_the_same_name_replaces_the_old_one(spark: Any, tmp_path: Path) -> None:
    log = GrowingLog(random.Random(1), tmp_path / "logs", topic="_hidden")
    log.append(9)
    log.write()
    run(tmp_path, log)
    other = GrowingLog(random.Random(2), tmp_path / "other", topic="_hidden", topic_id="B" * 21 + "A")
    other.append(20)
    other.write()
    [row] = run(tmp_path, other)
    assert (row.strategy, "another topic of the same name" in row.why) == ("full", True)
    assert table(spark, tmp_path, "_hidden") == expected(other)


def test_keys_and_values_are_decoded(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks decode numbers, and Spark decodes JSON. An invalid value is reported with its partition, and the table is
    unchanged. Keys that are equal as numbers, but not as bytes, are two keys.
    """
    good, bad = (GrowingLog(random.Random(1), tmp_path / "logs", partition=number) for number in range(2))
    zero, below, nan = bytes(8), b"\x80" + bytes(7), b"\x7f\xf8" + bytes(6)
    good.append_records([Rec(0, 5, zero, b'{"a": 1}'), Rec(1, 5, below, b"[]"), Rec(2, 5, nan, b"null")])
    bad.append_records([Rec(0, 5, zero, b"0"), Rec(1, 5, nan, b'{"a": ')])
    good.write()
    bad.write()
    formats = Formats(Format("double"), Format("json"))
    rows = run(tmp_path, good, bad, formats=formats)
    assert statuses(rows) == [("exported", "full"), ("failed", "full")]
    assert "partition 1: a value is not valid json (offset 1)" in rows[1].error
    path = str(tmp_path / "lake" / "t")

    def values() -> dict[bytes, tuple[str, str]]:
        rows = spark.read.format("delta").load(path).collect()
        return {bytes(row.key_bytes): (repr(row.key), row.value) for row in rows}

    assert values() == {zero: ("0.0", '{"a": 1}'), below: ("-0.0", "[]"), nan: ("nan", "null")}
    good.append_records([Rec(3, 5, zero, b"looked at by nobody"), Rec(4, 5, zero, None), Rec(5, 5, nan, b"7")])
    good.write()
    again = statuses(run(tmp_path, good, bad, formats=formats))
    assert again == [("exported", "incremental"), ("failed", "full")], "a failed topic must not count as exported"
    assert values() == {below: ("-0.0", "[]"), nan: ("nan", "7")}
    good.append_records([Rec(6, 5, b"short", b"7")])
    good.write()
    [row] = run(tmp_path, good, formats=formats, partitions=("t-0",))
    why = "partition 0: a key does not have the 8 bytes of format double"
    assert (row.status, why in row.error) == ("failed", True)
    [row] = run(tmp_path, good, formats=Formats(), partitions=("t-0",))
    assert (row.status, "exported with --key-format double" in row.error) == ("refused", True)
    more = (*columns._COLUMNS, columns.ExportColumn("added", "int", lambda piece: None))
    monkeypatch.setattr(columns, "_COLUMNS", more)
    [row] = run(tmp_path, good, formats=formats, partitions=("t-0",))
    assert (row.status, "only one of the two has the columns added" in row.error) == ("refused", True)
    assert len(values()) == 2


def test_the_state_at_a_time_is_exported(spark: Any, tmp_path: Path, rng: random.Random) -> None:
    log = GrowingLog(rng, tmp_path / "logs")
    log.grow(20)
    log.settle()
    log.write()
    for end in (log.end // 2, log.end):
        assert run(tmp_path, log, to=f"at-{end}", as_of_offset=end)[0].status == "exported"
        assert table(spark, tmp_path, to=f"at-{end}") == expected(log, end=end)
    end = log.end // 2
    again = run(tmp_path, log, to=f"at-{end}", as_of_offset=end)
    assert statuses(again) == [("exported", "full")]
    for flags in ({}, {"as_of_offset": end + 1}, {"as_of_timestamp": "5"}):
        [row] = run(tmp_path, log, to=f"at-{end}", **flags)
        assert (row.status, "Give another --to" in row.error) == ("refused", True)
    log.now_ms += 10**6  # later than all earlier timestamps, whether the producer or the broker sets them
    log.append_records([Rec(log.end, log.now_ms, b"late", b"x")])
    log.write()
    moment = str(log.now_ms)
    run(tmp_path, log, to="late", as_of_timestamp=moment)
    assert table(spark, tmp_path, to="late") == expected(log, end=log.end - 1)
    compacted_past(log)
    [row] = run(tmp_path, log, to="past", as_of_offset=end)
    assert (row.status, "was compacted up to" in row.error) == ("refused", True)


def test_a_pickle_in_the_text_of_an_error_is_not_run(tmp_path: Path) -> None:
    """The text of a record can become part of an error, and may look like a serialized error of a task."""
    hostile = base64.b64encode(pickle.dumps((0, OpensWhereUnpickled(str(tmp_path / "mark"))))).decode()
    for text in (hostile, base64.b64encode(to_bytes((0, "no problem"))).decode(), "AAAA"):
        number, known = on_spark._problem_of(RuntimeError(on_spark._PROBLEM + text), Formats(), "/t")
        assert number is None
        assert type(known) is KeytailError
    assert not (tmp_path / "mark").exists()
    problem = CorruptLog("a byte is wrong", path="/x", offset=3)
    text = base64.b64encode(to_bytes((7, problem))).decode()
    number, known = on_spark._problem_of(RuntimeError(f"...\n{on_spark._PROBLEM}{text}\n..."), Formats(), "/t")
    assert (number, type(known), str(known)) == (7, CorruptLog, str(problem))
