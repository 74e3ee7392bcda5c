"""Imports on a real Spark session: sources and their errors, partitions, order, replicas, and a repeated run."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from keytail.cli.configuration import Configuration, read_configuration
from keytail.errors import KeytailError, UsageProblem
from keytail.import_ import driver as import_
from keytail.import_ import on_spark
from keytail.import_.command import ImportRow, Request, exit_status
from keytail.import_.driver import import_records
from keytail.import_.source import Columns, Source
from keytail.run.spark.engine import SparkEngine
from tests.log_dirs import snapshot
from tests.reference.batches import Rec, all_records, decode_log
from tests.reference.murmur2 import partition as partition_of

pytestmark = pytest.mark.spark
TOPIC_ID = "AAAAAAAAAAAAAAAAAAAAAQ"
SOAK = os.environ.get("KEYTAIL_SOAK") == "1"
HEADERS = pa.list_(pa.struct({"key": pa.string(), "value": pa.binary()}))


@pytest.fixture(autouse=True)
def in_this_session(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_, "session_of_run", lambda *_, **__: SparkEngine(spark))


def log_dir(path: Path, node: int = 1) -> Path:
    path.mkdir()
    (path / "meta.properties").write_text(f"version=1\nnode.id={node}\n")
    (path / ".kafka_cleanshutdown").write_text('{"version":0,"brokerEpoch":-1}')
    return path


def parquet(path: Path, **columns: Any) -> Source:
    pq.write_table(pa.table(columns), path)
    return Source(str(path), "parquet")


def unknown_topics(*settings: str) -> Configuration:
    policy = () if any("cleanup.policy" in setting for setting in settings) else ("orders:cleanup.policy=delete",)
    return read_configuration(None, (*policy, *settings), topics_have_no_overrides=True)


@pytest.fixture
def run_import(tmp_path: Path) -> Callable[..., list[ImportRow]]:
    logs = log_dir(tmp_path / "logs")

    def run(source: Source, **changes: Any) -> list[ImportRow]:
        values: dict[str, Any] = {
            "log_dirs": (str(logs),),
            "configuration": unknown_topics(),
            "single_replica": True,
            "topic_id": TOPIC_ID,
            "partition_count": 3,
            "execute": True,
            "master": "local[2]",  # without a master, a small source is read without Spark
            **changes,
        }
        return import_records(Request(source, "orders", **values))

    return run


def found(tmp_path: Path, which: str = "logs") -> dict[int, list[Rec]]:
    of: dict[int, list[Rec]] = {}
    for path in sorted((tmp_path / which).glob("orders-*")):
        logs = sorted(path.glob("*.log"))
        batches = [batch for log in logs for batch in decode_log(log.read_bytes())]
        of[int(path.name.rpartition("-")[2])] = all_records(batches)
    return of


def test_json_lines_are_read_as_text_with_headers_and_nulls(run_import: Callable[..., Any], tmp_path: Path) -> None:
    rows = [
        {"key": "ключ", "value": "v", "headers": [{"key": "h", "value": "x"}, {"key": "g"}], "timestamp": 5},
        {"key": "ключ", "value": None, "timestamp": 6},
        {"value": "no key", "headers": [], "timestamp": 7},
    ]
    path = tmp_path / "source.json"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert exit_status(run_import(Source(str(path), "json"), partition_count=1)) == 0
    key = "ключ".encode()
    assert found(tmp_path) == {
        0: [Rec(0, 5, key, b"v", ((b"h", b"x"), (b"g", None))), Rec(1, 6, key, None), Rec(2, 7, None, b"no key")]
    }


def test_keys_are_partitioned_as_by_kafkas_producer_and_other_records_round_robin(
    run_import: Callable[..., Any], tmp_path: Path
) -> None:
    rng = random.Random(1)
    keys = [None if rng.random() < 0.1 else rng.randbytes(rng.randrange(0, 9)) for _ in range(25_000)]
    times = pa.array(range(len(keys)), pa.timestamp("ms", "UTC"))
    source = parquet(tmp_path / "s.parquet", key=pa.array(keys, pa.binary()), value=[str(n) for n in range(len(keys))],
                     timestamp=times)  # fmt: skip
    rows = run_import(source, codec="zstd", segment_bytes=100_000, batch_bytes=3000)
    expected: dict[int, list[tuple[bytes | None, bytes, int]]] = defaultdict(list)
    for n, key in enumerate(keys):
        number = n % 3 if key is None else partition_of(key, 3)
        expected[number].append((key, b"%d" % n, n))
    got = found(tmp_path)
    assert {n: [(rec.key, rec.value, rec.timestamp) for rec in recs] for n, recs in got.items()} == expected
    assert [row.records for row in rows] == [len(expected[n]) for n in range(3)]
    assert [row.log_bytes for row in rows] == [
        sum(log.stat().st_size for log in (tmp_path / "logs" / f"orders-{n}").glob("*.log")) for n in range(3)
    ]


def test_the_partition_column_is_used_and_columns_can_have_other_names(
    run_import: Callable[..., Any], tmp_path: Path
) -> None:
    source = parquet(
        tmp_path / "s.parquet",
        k=["a", "b", "c", "d", None],
        v=["1", "2", "3", "4", "5"],
        at=[40, 30, 20, 10, 0],
        p=pa.array([1, 1, 0, None, 1], pa.int64()),
    )
    columns = Columns("k", "v", None, "at", "p")
    rows = run_import(Source(source.path, "parquet", columns, ("at",)), partition_count=2)
    got = {n: [(rec.key, rec.timestamp) for rec in recs] for n, recs in found(tmp_path).items()}
    of_d = partition_of(b"d", 2)
    wanted: dict[int, list[tuple[bytes | None, int]]] = {0: [(b"c", 20)], 1: [(None, 0), (b"b", 30), (b"a", 40)]}
    wanted[of_d] = sorted([*wanted[of_d], (b"d", 10)], key=lambda item: item[1])
    assert got == wanted
    assert [row.status for row in rows] == ["imported", "imported"]


def test_two_replicas_get_the_same_bytes(run_import: Callable[..., Any], tmp_path: Path) -> None:
    first = parquet(tmp_path / "first.parquet", key=["a", "b"], value=["1", "2"])
    assert exit_status(run_import(first, partition_count=2)) == 0
    second = tmp_path / "other"
    shutil.copytree(tmp_path / "logs", second)
    (second / "meta.properties").write_text("version=1\nnode.id=2\n")
    keys = [b"key-%d" % n for n in range(5000)]
    source = parquet(tmp_path / "s.parquet", key=keys, value=pa.array([None] * 5000, pa.binary()))
    both = {"single_replica": False, "replica_log_dirs": ((str(second),),), "append": True}
    rows = run_import(source, partition_count=2, segment_bytes=20_000, **both)
    assert [(row.status, row.replicas) for row in rows] == [("imported", 2)] * 2
    here, there = (segment_files(tmp_path / name) for name in ("logs", "other"))
    assert here == there
    assert len(here) > 12
    assert sum(len(recs) for recs in found(tmp_path, "other").values()) == 5002
    for name in ("recovery-point-offset-checkpoint", "replication-offset-checkpoint"):
        assert (tmp_path / "logs" / name).read_text() == (second / name).read_text()


def segment_files(log_dir: Path) -> dict[str, bytes]:
    kinds = (".log", ".index", ".timeindex", ".snapshot", "leader-epoch-checkpoint")
    return {name: data for name, (data, _) in snapshot(log_dir).items() if name.endswith(kinds)}


def test_a_repeated_import_completes_the_rest(
    run_import: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [b"key-%d" % n for n in range(300)]
    source = parquet(tmp_path / "s.parquet", key=keys, value=keys)
    real, calls = on_spark.install, []

    def killed(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(on_spark, "install", killed)
        with pytest.raises(KeyboardInterrupt):
            run_import(source)
    assert not list((tmp_path / "logs").glob("*/*.clean")), "scratch files are left"
    dry = run_import(source, execute=False)
    assert [row.status for row in dry] == ["imported-before", "would-import", "would-import"]
    rows = run_import(source)
    assert [row.status for row in rows] == ["imported-before", "imported", "imported"]
    before = snapshot(tmp_path / "logs")
    assert [row.status for row in run_import(source)] == ["imported-before"] * 3
    assert snapshot(tmp_path / "logs") == before
    assert sum(len(recs) for recs in found(tmp_path).values()) == 300
    again = run_import(source, import_id="another", append=True)
    assert {row.status for row in again} == {"imported"}
    assert sum(len(recs) for recs in found(tmp_path).values()) == 600


def test_a_dry_run_counts_records_and_changes_nothing(run_import: Callable[..., Any], tmp_path: Path) -> None:
    source = parquet(tmp_path / "s.parquet", key=["a", "bb", None], value=["xyz", None, "1"], partition=[0, 0, 2])
    before = snapshot(tmp_path / "logs")
    rows = run_import(source, execute=False)
    assert snapshot(tmp_path / "logs") == before
    assert [(row.status, row.records, row.source_bytes) for row in rows] == [
        ("would-import", 2, 6), ("unchanged", 0, None), ("would-import", 1, 1)
    ]  # fmt: skip


def test_an_error_of_spark_is_reported_with_its_text_but_not_the_name_of_the_call(
    run_import: Callable[..., Any], tmp_path: Path
) -> None:
    """The source is a URI, which only Spark opens."""
    path = tmp_path / "source"
    path.write_bytes(b"PAR1 not a footer")
    with pytest.raises(UsageProblem, match="cannot be read as parquet: ") as refused:
        run_import(Source(path.as_uri(), "parquet"))
    assert "An error occurred while calling" not in str(refused.value)
    assert "Exception" in str(refused.value) or "[" in str(refused.value)


MISTAKES: dict[str, tuple[dict[str, Any], Columns, str]] = {
    "no key": ({"value": ["a"]}, Columns(), "no column key.*--key-column"),
    "no such name": ({"key": ["a"], "value": ["a"]}, Columns(timestamp="at"), "no column at.*--timestamp-column"),
    "a number as value": ({"key": ["a"], "value": [1]}, Columns(), "column value of the source has the type bigint"),
    "text as time": ({"key": ["a"], "value": ["a"], "timestamp": ["now"]}, Columns(), "timestamp .* type string"),
    "text as headers": ({"key": ["a"], "value": ["a"], "headers": ["x"]}, Columns(), "headers .* type string"),
    "text as partition": ({"key": ["a"], "value": ["a"], "partition": ["1"]}, Columns(), "partition .* type string"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_wrong_columns_are_reported_before_anything_is_read(
    name: str, run_import: Callable[..., Any], tmp_path: Path
) -> None:
    columns, names, message = MISTAKES[name]
    source = parquet(tmp_path / "s.parquet", **columns)
    before = snapshot(tmp_path / "logs")
    with pytest.raises(UsageProblem, match=message):
        run_import(Source(source.path, "parquet", names))
    assert snapshot(tmp_path / "logs") == before


def test_empty_and_missing_sources_are_reported(run_import: Callable[..., Any], tmp_path: Path) -> None:
    empty = parquet(tmp_path / "s.parquet", key=pa.array([], pa.binary()), value=pa.array([], pa.binary()))
    for execute in (False, True):
        with pytest.raises(KeytailError, match="no rows"):
            run_import(empty, execute=execute)
    with pytest.raises(UsageProblem, match="cannot be read as parquet"):
        run_import(Source(str(tmp_path / "nowhere"), "parquet"))
    with pytest.raises(UsageProblem, match=r"cannot be read as parquet: \[PATH_NOT_FOUND\]"):
        run_import(Source((tmp_path / "nowhere").as_uri(), "parquet"))
    (tmp_path / "bad.json").write_text('{"key": "a", "value": "b"}\nnot json\n')
    with pytest.raises(UsageProblem, match=r"a line is not a JSON object: not json \(.*bad\.json\)"):
        run_import(Source(str(tmp_path / "bad.json"), "json"))


@pytest.mark.parametrize("numbers", [[0, 3], [0, -1], [0, 2**32]])
def test_a_partition_that_does_not_exist_is_refused(
    numbers: Sequence[int], run_import: Callable[..., Any], tmp_path: Path
) -> None:
    source = parquet(tmp_path / "s.parquet", key=["a", "b"], value=["1", "2"], partition=pa.array(numbers, pa.int64()))
    with pytest.raises(KeytailError, match="1 records are for partitions that orders does not have"):
        run_import(source, execute=False)
    rows = run_import(source)
    assert {row.status for row in rows} == {"refused", "failed"}
    assert any("which the topic does not have" in row.error for row in rows)
    assert not any(found(tmp_path).values())
    assert exit_status(rows) == 1


def test_records_that_a_topic_refuses_are_refused_and_nothing_else_is_imported(
    run_import: Callable[..., Any], tmp_path: Path
) -> None:
    source = parquet(tmp_path / "s.parquet", key=["a", None, "c"], value=["1", "2", "3"], partition=[0, 1, 2])
    compacted = unknown_topics("orders:cleanup.policy=compact")
    dry = run_import(source, execute=False, configuration=compacted)
    assert [row.status for row in dry] == ["would-import", "refused", "would-import"]
    rows = run_import(source, configuration=compacted)
    assert [row.status for row in rows] == ["failed", "refused", "failed"]
    assert "no key" in rows[1].error
    assert not any(found(tmp_path).values())
    small = unknown_topics("orders:max.message.bytes=60")
    rows = run_import(source, configuration=small)
    assert {row.status for row in rows} == {"refused"}
    assert "the limit is 60" in rows[0].error


def write_by_the_protocol(table: Path) -> None:
    """Write a table as Delta's protocol specifies: two commits add a file each, and a third one replaces both files
    with one without the deleted rows.
    """
    (table / "_delta_log").mkdir(parents=True)
    types = {"key": "string", "value": "binary", "timestamp": "long"}
    fields = [{"name": name, "type": kind, "nullable": True, "metadata": {}} for name, kind in types.items()]
    schema = json.dumps({"type": "struct", "fields": fields})
    described = {"id": str(uuid.uuid4()), "format": {"provider": "parquet", "options": {}}, "schemaString": schema}
    described |= {"partitionColumns": [], "configuration": {}, "createdTime": 0}
    protocol = {"protocol": {"minReaderVersion": 1, "minWriterVersion": 2}}
    removed = {"deletionTimestamp": 1, "dataChange": True}

    def added(name: str, numbers: Sequence[int]) -> dict[str, Any]:
        columns = {"key": [str(n) for n in numbers], "value": [b"%d" % (2 * n) for n in numbers], "timestamp": numbers}
        pq.write_table(pa.table(columns), table / name)
        size = (table / name).stat().st_size
        return {"add": {"path": name, "partitionValues": {}, "size": size, "modificationTime": 0, "dataChange": True}}

    def commit(version: int, *actions: dict[str, Any]) -> None:
        lines = [json.dumps(action) + "\n" for action in actions]
        (table / "_delta_log" / f"{version:020d}.json").write_text("".join(lines))

    commit(0, protocol, {"metaData": described}, added("first", range(600)))
    commit(1, added("second", range(600, 1000)))
    commit(2, {"remove": {"path": "first", **removed}}, {"remove": {"path": "second", **removed}},
           added("third", [n for n in range(1000) if n % 10]))  # fmt: skip


def write_with_delta(table: Path) -> None:
    lines = f"""
from keytail.run.spark.delta import session_settings
from keytail.run.spark.session import local_session
spark = local_session("local[2]", extra=session_settings(None))
columns = ["cast(id as string) key", "cast(cast(id * 2 as string) as binary) value", "id timestamp"]
frame = spark.range(1000).selectExpr(*columns)
frame.where("id < 600").write.format("delta").save({str(table)!r})
frame.where("id >= 600").write.format("delta").mode("append").save({str(table)!r})
spark.sql("DELETE FROM delta.`{table}` WHERE timestamp % 10 = 0")
spark.stop()
"""
    run_with_jars([sys.executable, "-c", lines])


def run_with_jars(command: list[str]) -> None:
    """Run a command in a separate process, because Delta's jars must be present when the JVM starts. The first run
    downloads them.

    By default, Delta uses 50 tasks for the state of a table, and Spark 200 for a shuffle; here two are sufficient.
    """
    few = ("spark.databricks.delta.snapshotPartitions=2", "spark.sql.shuffle.partitions=2")
    arguments = " ".join([*(f"--conf {item}" for item in few), "pyspark-shell"])
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False,
                          env=os.environ | {"PYSPARK_SUBMIT_ARGS": arguments})  # fmt: skip
    if done.returncode and ("unresolved dependency" in done.stderr or "download failed" in done.stderr):
        reason = f"Delta's jars could not be fetched: {done.stderr[-2000:]}"
        if os.environ.get("KEYTAIL_NO_SKIP") == "1":
            pytest.fail(f"KEYTAIL_NO_SKIP=1, but {reason}")
        pytest.skip(reason)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("write", [write_by_the_protocol, *([write_with_delta] if SOAK else [])])
def test_a_delta_table_is_imported(write: Callable[[Path], None], tmp_path: Path) -> None:
    logs = log_dir(tmp_path / "logs")
    write(tmp_path / "table")
    command = ["import", str(tmp_path / "table"), "--format", "delta", "--topic", "orders", "--log-dirs", str(logs)]
    flags = ["--single-replica", "--topics-have-no-overrides", "--partition-count", "2", "--topic-id", TOPIC_ID]
    flags += ["--topic-config", "orders:cleanup.policy=delete"]
    run_with_jars([str(Path(sys.executable).with_name("keytail")), *command, *flags, "--execute"])
    got = sorted((rec.timestamp, rec.key, rec.value) for recs in found(tmp_path).values() for rec in recs)
    assert got == [(n, b"%d" % n, b"%d" % (2 * n)) for n in range(1000) if n % 10]
