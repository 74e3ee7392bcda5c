"""`keytail import` through the command line: errors before Spark starts, replicas, and settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from keytail.cli.cluster import Cluster
from keytail.cli.configuration import Configuration, read_configuration
from keytail.errors import KeytailError, Refused, UsageProblem
from keytail.import_ import driver as import_
from keytail.import_ import here as import_here
from keytail.import_.command import ImportRow, Request, exit_status, next_step, show_rows
from keytail.import_.local_source import look
from keytail.import_.source import Source
from keytail.import_.target import Target, find_target
from keytail.log.cluster.replay import Topic
from keytail.log.fs import LOCAL
from keytail.log.lock import hold
from keytail.run.rates import HERE_BYTES
from tests.command_line import Run
from tests.import_.case import TOPIC_ID
from tests.log_dirs import snapshot
from tests.reference.batches import all_records, decode_log
from tests.reference.murmur2 import partition as partition_of


@pytest.fixture(autouse=True)
def no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: Any, **__: Any) -> None:
        raise AssertionError("Spark was started")

    monkeypatch.setattr(import_, "session_of_run", started)


POLICY = "orders:cleanup.policy=delete"
KNOWN = ("--topics-have-no-overrides", "--topic-config", POLICY, "--topic-config", "new:cleanup.policy=delete")
KNOWN += ("--topic-config", "order:cleanup.policy=delete")


MISTAKES: dict[str, tuple[tuple[str, ...], str]] = {
    "no such topic": (("--topic", "order", *KNOWN), "no partition of topic order"),
    "an invalid topic name": (("--topic", "or/ders", *KNOWN), "invalid topic name"),
    "two flags about replicas": (
        ("--topic", "orders", *KNOWN, "--single-replica", "--replica-log-dirs", "/x"),
        "cannot be combined",
    ),
    "too few partitions": (
        ("--topic", "orders", *KNOWN, "--partition-count", "1"), "--partition-count 1 is too small. Give at least 2"
    ),
    "a new topic without its id": (
        ("--topic", "new", *KNOWN, "--partition-count", "2"), "--topic-id"
    ),
    "a replica's log dir that does not exist": (
        ("--topic", "orders", *KNOWN, "--replica-log-dirs", "/no/such/dir"), "no such log dir"
    ),
    "an unknown format": (("--topic", "orders", "--format", "avro"), "avro"),
    "a topic with a typo": (("--topic", "order", *KNOWN), "Did you mean orders?"),
    "no such file": (("--topic", "orders", *KNOWN, "--single-replica"), "there is no such file or directory"),
    "an invalid size": (("--topic", "orders", "--segment-bytes", "many"), "invalid size 'many'"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_wrong_flags_are_refused_before_spark_starts(name: str, run: Run, log_dir: Path) -> None:
    arguments, message = MISTAKES[name]
    before = snapshot(log_dir)
    result = run("import", "source.parquet", "--log-dirs", log_dir, *arguments)
    assert result.exit_code == 2, result.output
    assert message in result.output.replace("\n", " ")
    assert snapshot(log_dir) == before


def write_sources(folder: Path) -> None:
    """Write a valid source of each format."""
    table = pa.table({"key": [b"a", b"b"], "value": ["x", "y"], "at": pa.array([1, 2], pa.timestamp("ms"))})
    pq.write_table(table, folder / "table.parquet")
    (folder / "many").mkdir()
    pq.write_table(table, folder / "many" / "1.parquet")
    pq.write_table(table.drop(["value"]), folder / "many" / "2.parquet")
    (folder / "lines.json").write_text('{"key": "a", "value": "x"}\n\n{"key": "b", "note": 1}\n')
    (folder / "table.csv").write_text("key,value\na,x\n")
    deltalake.write_deltalake(folder / "delta", table.drop(["at"]))


WRONG_SOURCES: dict[str, tuple[str, tuple[str, ...], str]] = {
    "no column": ("table.parquet", ("--key-column", "id"), "no column id. Its columns are key, value, at"),
    "no column in any file": ("many", ("--value-column", "id"), "the source has no column id"),
    "no column of JSON": ("lines.json", ("--format", "json", "--sort-by", "id"), "Its columns are key, value, note"),
    "no column of Delta": ("delta", ("--format", "delta", "--key-column", "id"), "no column id. Its columns are key"),
    "no column to sort by": ("table.parquet", ("--sort-by", "id"), "give the correct name with --sort-by"),
    "a wrong type": ("table.parquet", ("--partition-column", "at"), "at of the source has the type timestamp_ntz, but"),
    "a typo in the path": ("tables.parquet", (), "Did you mean"),
    "JSON read as Parquet": ("lines.json", (), "it is JSON lines ( . Give --format json"),
    "CSV read as Parquet": ("table.csv", (), "table.csv is not a Parquet file"),
    "Parquet read as JSON": ("table.parquet", ("--format", "json"), "it is Parquet ( . Give --format parquet"),
    "Parquet read as Delta": ("table.parquet", ("--format", "delta"), "it is Parquet ( . Give --format parquet"),
    "Delta read as Parquet": ("delta", (), "it is a Delta table ( . Give --format delta"),
}


@pytest.mark.parametrize("name", WRONG_SOURCES)
def test_an_invalid_source_is_refused_before_spark_starts(name: str, run: Run, log_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sources"
    folder.mkdir()
    write_sources(folder)
    which, arguments, message = WRONG_SOURCES[name]
    before = snapshot(log_dir)
    path = folder / which
    result = run("import", path, "--log-dirs", log_dir, "--topic", "orders", *KNOWN, "--single-replica", *arguments)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.replace(f"{path})", " ").split()), result.output
    assert snapshot(log_dir) == before


@pytest.mark.parametrize("uri", ["s3a://key:hunter2@bucket/t", "s3://key:12/hunter2@bucket/t", "hdfs://me@host/hunter2"])
def test_credentials_in_the_uri_of_the_source_are_refused_and_not_printed(uri: str, run: Run, log_dir: Path) -> None:
    result = run("import", uri, "--log-dirs", log_dir, "--topic", "orders", *KNOWN, "--single-replica")
    assert result.exit_code == 2, result.output
    assert "[credentials-in-uri]" in result.output
    assert "hunter2" not in result.output


def test_other_uris_of_a_source_are_read_by_spark(run: Run, log_dir: Path) -> None:
    for uri in ("s3://bucket/a@b/*.parquet", "wasbs://c@account/t?.parquet", "file:/t/a:b@c"):
        result = run("import", uri, "--log-dirs", log_dir, "--topic", "orders", *KNOWN, "--single-replica")
        assert str(result.exception) == "Spark was started"


@pytest.mark.parametrize(
    ("which", "arguments"),
    [
        ("table.parquet", ("--sort-by", "key")),
        ("table.parquet", ("--master", "local[2]")),
        ("many", ()),  # only one of the files has the column `value`
        ("lines.json", ("--format", "json")),
        ("delta", ("--format", "delta")),
    ],
)
def test_spark_is_started_for_sources_that_only_spark_reads(
    which: str, arguments: tuple[str, ...], run: Run, log_dir: Path, tmp_path: Path
) -> None:
    write_sources(tmp_path)
    flags = ("--log-dirs", log_dir, "--topic", "orders", *KNOWN, "--single-replica", *arguments)
    assert str(run("import", tmp_path / which, *flags).exception) == "Spark was started"


@pytest.mark.parametrize(
    ("limit_bytes", "limit_records", "is_small"),
    [(HERE_BYTES, 1000, True), (10, 1000, False), (HERE_BYTES, 999, False)],
)
def test_a_small_parquet_file_is_imported_without_spark(
    limit_bytes: int, limit_records: int, is_small: bool, run: Run, log_dir: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(import_here, "HERE_BYTES", limit_bytes)
    monkeypatch.setattr(import_here, "MAX_RECORDS", limit_records)
    pq.write_table(pa.table({"key": [f"k{n}" for n in range(1000)], "value": ["v"] * 1000}), tmp_path / "s.parquet")
    flags = ("--log-dirs", log_dir, "--topic", "new", *KNOWN, "--single-replica", "--partition-count", "3",
             "--topic-id", TOPIC_ID)  # fmt: skip
    if not is_small:
        assert str(run("import", tmp_path / "s.parquet", *flags).exception) == "Spark was started"
        return
    before = snapshot(log_dir)
    dry = run("import", tmp_path / "s.parquet", *flags, "--output", "json")
    assert "in this process, without Spark" in dry.stderr
    assert snapshot(log_dir) == before
    counts = [row["records"] for row in json.loads(dry.stdout)]
    assert sum(counts) == 1000
    assert all(counts)
    done = json.loads(run("import", tmp_path / "s.parquet", *flags, "--execute", "--output", "json").stdout)
    assert [(row["status"], row["records"]) for row in done] == [("imported", count) for count in counts]
    for number in range(3):
        log = b"".join(path.read_bytes() for path in sorted((log_dir / f"new-{number}").glob("*.log")))
        keys = [rec.key for batch in decode_log(log) for rec in all_records([batch])]
        assert keys == [b"k%d" % n for n in range(1000) if partition_of(b"k%d" % n, 3) == number]
    assert not list(log_dir.glob("*/*.clean"))
    again = json.loads(run("import", tmp_path / "s.parquet", *flags, "--execute", "--output", "json").stdout)
    assert {row["status"] for row in again} == {"imported-before"}


def test_a_small_source_with_a_partition_that_does_not_exist_is_refused(
    run: Run, log_dir: Path, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"key": ["a", "b"], "value": ["1", "2"], "partition": [0, 9]}), tmp_path / "s.parquet")
    flags = ("--log-dirs", log_dir, "--topic", "new", *KNOWN, "--single-replica", "--partition-count", "3",
             "--topic-id", TOPIC_ID)  # fmt: skip
    dry = run("import", tmp_path / "s.parquet", *flags)
    assert "1 records are for partitions that new does not have: 9" in dry.stderr
    result = run("import", tmp_path / "s.parquet", *flags, "--execute")
    assert result.exit_code == 1
    assert "a record is for partition 9, which the topic does not have" in result.output
    assert not any(path.stat().st_size for path in log_dir.glob("new-*/*.log"))


def test_a_topic_with_unknown_settings_is_refused(run: Run, log_dir: Path) -> None:
    result = run("import", "source.parquet", "--log-dirs", log_dir, "--topic", "orders", "--output", "json")
    assert result.exit_code == 1
    assert "topic config unknown" in result.stderr
    assert result.stdout.strip() == "[]"
    result = run("import", "s", "--log-dirs", log_dir, "--topic", "orders", "--topics-have-no-overrides")
    assert result.exit_code == 1
    assert "Unknown settings of orders: cleanup.policy. Give" in result.stderr


def test_a_topic_of_an_older_message_format_is_refused(run: Run, log_dir: Path) -> None:
    """A broker before 3.0 sends batches of version 2 unchanged, and clients before 0.11 cannot read them."""
    arguments = ("import", "file:/s", "--log-dirs", log_dir, "--topic", "orders", *KNOWN, "--output", "json")
    (log_dir / "meta.properties").write_text("version=0\nbroker.id=1\n")
    result = run(*arguments, "--topic-config", "orders:message.format.version=0.10.2")
    assert result.exit_code == 1
    assert "orders has a message format before version 2 (command line: orders:message.format" in result.stderr
    (log_dir / "meta.properties").write_text("version=1\nnode.id=1\n")  # KRaft ignores the setting
    result = run(*arguments, "--topic-config", "orders:message.format.version=0.10.2")
    assert "message format" not in result.stderr and "Spark was started" in repr(result.exception)


def test_an_import_while_a_broker_runs_is_refused(run: Run, log_dir: Path) -> None:
    arguments = ("import", "file:/s", "--log-dirs", log_dir, "--topic", "orders", *KNOWN, "--execute")
    with hold([str(log_dir)]):
        result = run(*arguments)
    assert result.exit_code == 1
    assert "in use by" in result.stderr


def target(log_dir: Path, known: Mapping[int, tuple[int, ...]] | None = None, **changes: Any) -> Target:
    configuration = read_configuration(None, (POLICY,), topics_have_no_overrides=True)
    if known is not None:
        latest = {number: brokers[:1] for number, brokers in known.items()}  # others may be removed, uncommitted
        topic = Topic("A" * 22, latest, known)
        metadata: Any = SimpleNamespace(
            topics={"orders": topic}, topic_configs={"orders": {}}, cluster_configs={}, broker_configs={},
            as_of_offset=7, as_of_ms=-1, path="m", uncertain_topics={}, features={},
            unknown_types=(),
        )  # fmt: skip
        configuration = Configuration(cluster=Cluster(1, metadata))
    request = Request(Source("s", "parquet"), "orders", (str(log_dir),), configuration=configuration, **changes)
    return find_target(LOCAL, request)


def refused(of: Target) -> list[str]:
    found = []
    for partition in of.partitions:
        try:
            of.check_replicas(partition)
        except KeytailError as problem:
            found.append(str(problem))
    return found


def test_other_replicas_must_be_given_or_excluded(log_dir: Path, tmp_path: Path) -> None:
    assert len(refused(target(log_dir))) == 2
    assert refused(target(log_dir, single_replica=True)) == []
    other = tmp_path / "other"
    (other / "orders-0").mkdir(parents=True)
    (other / "meta.properties").write_text("version=1\nnode.id=2\n")
    [left] = refused(target(log_dir, replica_log_dirs=((str(other),),)))
    assert "unknown whether the partition has other replicas" in left
    both = {0: (1, 2), 1: (1,)}
    assert refused(target(log_dir, both, replica_log_dirs=((str(other),),))) == []
    [left] = refused(target(log_dir, both))
    assert "replicas on brokers 1, 2, but log dirs of brokers 1 were given" in left
    [left] = refused(target(log_dir, both, single_replica=True))
    assert "would differ permanently" in left, "the metadata log takes precedence over a flag"
    assert len(refused(target(log_dir, {0: (1,), 1: (3,)}))) == 1


def test_partitions_and_topic_id_are_those_of_the_metadata_log(log_dir: Path) -> None:
    of = target(log_dir, dict.fromkeys(range(4), (1,)))
    assert (of.n_partitions, [partition.number for partition in of.partitions]) == (4, [0, 1, 2, 3])
    assert [len(partition.entries) for partition in of.partitions] == [1, 1, 0, 0]
    with pytest.raises(UsageProblem, match="orders has 4 partitions"):
        target(log_dir, dict.fromkeys(range(4), (1,)), partition_count=3)
    with pytest.raises(UsageProblem, match="is not the id of topic orders, which is AAAAA"):
        target(log_dir, {0: (1,), 1: (1,)}, topic_id="B" * 22)


def test_codec_and_level_are_those_of_the_topic_unless_a_flag_sets_them(log_dir: Path) -> None:
    def with_type(*settings: str) -> Target:
        configuration = read_configuration(None, (POLICY, *settings), topics_have_no_overrides=True)
        source = Source("s", "parquet")
        return find_target(LOCAL, Request(source, "orders", (str(log_dir),), configuration=configuration))

    assert with_type().codec(None) == ("none", None)
    assert with_type("compression.type=zstd", "compression.zstd.level=7").codec(None) == ("zstd", 7)
    assert with_type("compression.type=zstd").codec("gzip") == ("gzip", None)
    assert with_type("compression.type=lz4").codec(None) == ("lz4", None), "Kafka's level 9 of lz4 is the fast level"
    assert with_type("compression.type=uncompressed").codec(None) == ("none", None)


def test_records_that_retention_will_remove_are_reported(log_dir: Path) -> None:
    of = target(log_dir)
    week_ms = 604_800_000
    assert of.notes_on(1000, 1000 + week_ms) == []
    assert "older than retention.ms" in of.notes_on(1000, 1001 + week_ms)[0]


def test_log_dirs_of_two_brokers_are_refused(log_dir: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    (other / "orders-5").mkdir(parents=True)
    (other / "meta.properties").write_text("version=1\nnode.id=2\n")
    request = Request(Source("s", "parquet"), "orders", (str(log_dir), str(other)), partition_count=6,
                      configuration=read_configuration(None, (POLICY,), topics_have_no_overrides=True))  # fmt: skip
    with pytest.raises((UsageProblem, Refused), match=r"brokers 1, 2|number differs"):
        find_target(LOCAL, request)


def test_results_are_shown_and_determine_the_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    done = ImportRow("orders", 0, "/logs", "imported", records=1234, log_bytes=5000, segments=2, first_offset=0,
                     end_offset=1234, notes=("a note",))  # fmt: skip
    bad = ImportRow("orders", 1, "/logs", "refused", "because")
    executed = Request(Source("s", "parquet"), "orders", ("/logs",), execute=True)
    show_rows([done, bad], executed)
    out = capsys.readouterr().out
    assert "1,234" in out
    assert "orders-1 refused: because" in out
    assert "orders-0: a note" in out
    assert "2 partitions: 1 imported, 1 refused. 1,234 records, 4.9 KiB of log." in out
    assert [exit_status(rows) for rows in ([done], [done, bad], [bad])] == [0, 3, 1]
    planned = ImportRow("orders", 2, "/logs", "would-import")
    assert [exit_status(rows) for rows in ([planned], [planned, bad])] == [0, 3]
    assert "start the brokers" in next_step([done], executed)
    assert "--execute" in next_step([ImportRow("orders", 0, "/logs", "would-import")], replace(executed, execute=False))


def test_a_source_in_the_current_directory_needs_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "partition=3").mkdir()
    table = pa.table({"key": [b"a"], "value": [b"v"]})
    for name in ("good.parquet", "partition=3/good.parquet"):
        pq.write_table(table, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    wanted = {"key": "binary", "value": "binary"}
    below = {**wanted, "partition": ""}
    for path, types in (("good.parquet", wanted), ("partition=3/good.parquet", wanted), (".", below)):
        found = look(Source(path, "parquet"))
        assert found is not None
        assert found.types == types
