"""The `kafka-log` data sources in a real session: what they read, their options, and errors in the options."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import types as T

from keytail.errors import KeytailError, Refused, UsageProblem
from keytail.log.fs import LOCAL
from keytail.source.columns import batch_tables, record_batches
from keytail.source.options import EARLIEST, LATEST, Bound, parse_options
from keytail.source.plan import plan_read
from keytail.source.schema import BATCH_COLUMNS, RECORD_COLUMNS, schema_of
from tests.chance import SEED
from tests.growing_log import GrowingLog
from tests.source.numbers_source import Numbers

pytestmark = pytest.mark.spark


@pytest.fixture
def rng() -> random.Random:
    return random.Random(SEED)


@pytest.fixture
def logs(rng: random.Random, tmp_path: Path) -> list[GrowingLog]:
    made = [GrowingLog(rng, tmp_path / "logs", topic, partition) for topic, partition in [("a", 0), ("a", 1), ("b", 0)]]
    for log in made:
        log.grow(rng.randint(10, 120))
        log.write()
    return made


def read(spark: Any, path: Path, kind: str = "kafka-log", **options: object) -> Any:
    reader = spark.read.format(kind).option("logDirs", str(path))
    for name, value in options.items():
        reader = reader.option(name, str(value))
    return reader.load()


def expected(log: GrowingLog, *, committed: bool = False) -> list[tuple[object, ...]]:
    end = log.stable if committed else log.end
    rows = []
    for item in log._appended:
        record = item.record
        if record.offset < end and not (committed and item.aborted):
            headers = [(name.decode(), value) for name, value in record.headers] or None  # type: ignore[union-attr]
            rows.append((log.topic, log.partition, record.offset, record.key, record.value, record.timestamp, headers))
    return rows


def seen(frame: Any) -> list[tuple[object, ...]]:
    rows = frame.selectExpr("*", "unix_millis(timestamp) AS ms").collect()
    rows.sort(key=lambda row: (row.topic, row.partition, row.offset))  # Spark would read everything twice to sort it
    return [
        (row.topic, row.partition, row.offset, _bytes(row.key), _bytes(row.value), row.ms,
         None if row.headers is None else [(item.key, _bytes(item.value)) for item in row.headers])
        for row in rows
    ]  # fmt: skip


def _bytes(value: bytearray | None) -> bytes | None:
    return None if value is None else bytes(value)


def test_the_source_is_found_without_being_registered(spark: Any, logs: list[GrowingLog], rng: random.Random) -> None:
    path, size = logs[0].log_dir, rng.choice([4000, 1 << 30])
    frame = read(spark, path, topicPattern=".*", includeHeaders="true", sliceBytes=size)
    assert seen(frame) == [row for log in logs for row in expected(log)]
    frame = read(spark, path, topic="a", includeHeaders="TRUE", isolationLevel="read_committed", sliceBytes=size)
    assert seen(frame) == [row for log in logs[:2] for row in expected(log, committed=True)]


def test_batches_have_the_documented_columns(spark: Any, logs: list[GrowingLog]) -> None:
    frame = read(spark, logs[0].log_dir, "kafka-log-batches", topic="a,b", sliceBytes=4000)
    assert frame.columns == list(BATCH_COLUMNS)
    rows = sorted(frame.collect(), key=lambda row: (row.topic, row.partition, row.base_offset))
    for log in logs:
        table = np.concatenate(_tables(log))
        of = [row for row in rows if (row.topic, row.partition) == (log.topic, log.partition)]
        assert len(of) == len(table)
        for row, batch in zip(of, table):
            for name in ("position", "size_bytes", "base_offset", "last_offset", "record_count", "magic", "attributes",
                         "leader_epoch", "producer_id", "producer_epoch", "base_sequence", "control_type", "crc"):
                assert row[name] == batch[name], name
            assert row.codec == ["none", "gzip", "snappy", "lz4", "zstd"][batch["attributes"] & 7]
            flags = [bool(batch["attributes"] & bit) for bit in (8, 16, 32)]
            assert [bool(row.timestamp_type), row.is_transactional, row.is_control] == flags
            at = datetime.fromtimestamp(batch["max_timestamp_ms"] / 1000, UTC).replace(tzinfo=None)
            assert row.max_timestamp.astimezone(UTC).replace(tzinfo=None) == at
            assert row.delete_horizon is None
            assert row.segment_base_offset <= row.base_offset


def _tables(log: GrowingLog) -> list[np.ndarray]:
    from keytail.log.records.chunk import SegmentReader

    reader, tables = SegmentReader(LOCAL), []
    for segment in log.facts().segments:
        path = str(log.path / f"{segment.base_offset:020d}.log")
        tables += [chunk.table.copy() for chunk in reader.chunks(path, segment.log_bytes)]
    return tables


def test_old_formats_are_read(rng: random.Random, tmp_path: Path, spark: Any) -> None:
    """A message of magic 0 has timestamp -1 and timestamp type -1, as a consumer receives it."""
    log = GrowingLog(rng, tmp_path, "old")
    log.grow(20, old=True)
    log.write()
    rows = read(spark, tmp_path, topic="old", columns="offset,timestamp,timestampType").selectExpr(
        "offset", "unix_millis(timestamp) AS ms", "timestampType AS kind").collect()  # fmt: skip
    rows.sort(key=lambda row: row.offset)
    wanted = [item.record for item in log._appended]
    assert [(row.offset, row.ms) for row in rows] == [(item.offset, item.timestamp) for item in wanted]
    assert {row.kind for row in rows if row.ms == -1} <= {-1}
    assert {row.kind for row in rows if row.ms != -1} <= {0}
    times = read(spark, tmp_path, "kafka-log-batches", topic="old").select("magic", "max_timestamp").collect()
    assert all((row.max_timestamp is None) == (row.magic == 0) for row in times)


def test_delete_horizons_have_a_separate_column(rng: random.Random, tmp_path: Path, spark: Any) -> None:
    log = GrowingLog(rng, tmp_path)
    log.append_records(log.random_records(30, plain=True))
    log.roll()
    log.append(1)
    log.write()
    log.compact()
    rows = read(spark, tmp_path, "kafka-log-batches", topicPattern="t").collect()
    newest = {item.record.key: item.record for item in log._appended[:30]}
    has_tombstones = any(record.value is None for record in newest.values())
    assert any(row.delete_horizon is not None for row in rows) == has_tombstones
    assert all((row.delete_horizon is None) != (row.base_timestamp is None) for row in rows)


def test_only_requested_columns_are_read(
    spark: Any, logs: list[GrowingLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = read(spark, logs[0].log_dir, topic="b", columns="offset, partition")
    assert frame.columns == ["offset", "partition"]
    assert frame.count() == len(expected(logs[2]))
    by_schema = spark.read.format("kafka-log").schema("partition int, key binary").option("topic", "b")
    frame = by_schema.option("logDirs", str(logs[0].log_dir)).load()
    assert frame.columns == ["partition", "key"]
    assert [bytes(row.key) for row in frame.collect()] == [row[3] for row in expected(logs[2])]
    monkeypatch.setattr("keytail.log.records.table.RecordTable._gather", _never)
    options = parse_options({"logDirs": str(logs[0].log_dir), "topic": "a", "columns": "topic,offset,timestamp"})
    tasks = plan_read(LOCAL, options)
    found = sum(batch.num_rows for pieces in tasks for batch in record_batches(LOCAL, pieces, _arrow(options)))
    assert found == len(expected(logs[0])) + len(expected(logs[1]))


def _never(*_: object) -> None:
    raise AssertionError("bytes of keys or values were gathered")


def _arrow(options: Any, columns: Mapping[str, Any] = RECORD_COLUMNS) -> Any:
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(schema_of(columns, options.columns, headers=options.include_headers), timezone="UTC")


def offsets(path: Path, *, records: bool = True, **options: object) -> dict[tuple[str, int], list[int]]:
    """Return the offsets of each partition, read with the code that tasks run, without Spark."""
    columns = "topic,partition,offset" if records else "topic,partition,base_offset"
    given = {"logDirs": str(path), "columns": columns} | {name: str(value) for name, value in options.items()}
    parsed = parse_options(given, records=records)
    make, schema = (record_batches, RECORD_COLUMNS) if records else (batch_tables, BATCH_COLUMNS)
    found: dict[tuple[str, int], list[int]] = {}
    for pieces in plan_read(LOCAL, parsed):
        for batch in make(LOCAL, pieces, _arrow(parsed, schema)):
            for topic, partition, offset in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                found.setdefault((topic, partition), []).append(offset)
    return found


def all_offsets(log: GrowingLog, start: int = 0, end: int = 2**62) -> list[int]:
    return [item.record.offset for item in log._appended if start <= item.record.offset < end]


def test_ranges_of_offsets_are_read(logs: list[GrowingLog]) -> None:
    path = logs[0].log_dir
    half = logs[0].end // 2
    of = offsets(path, topic="a", startingOffsets=f'{{"a": {{"0": {half}, "1": -2}}}}',
                 endingOffsets=f'{{"a": {{"0": -1, "1": {half + 1}}}}}', failOnDataLoss="false")  # fmt: skip
    assert of.get(("a", 0), []) == all_offsets(logs[0], half)
    assert of.get(("a", 1), []) == all_offsets(logs[1], 0, half + 1)
    assert offsets(path, assign='{"b": [0]}', startingOffsets="earliest", endingOffsets="latest").keys() == {("b", 0)}
    assert offsets(path, assign='{"b": [0]}', startingOffsets=f'{{"b": {{"0": {logs[2].end}}}}}') == {}
    assert offsets(path, subscribePattern="[b]", **{"kafka.isolation.level": "read_committed"}).keys() <= {("b", 0)}
    found = offsets(path, records=False, assign='{"b": [0]}', endingOffsets='{"b": {"0": 1}}')
    assert found == {("b", 0): [0]}


def test_ranges_of_times_are_read(rng: random.Random, tmp_path: Path) -> None:
    log = GrowingLog(rng, tmp_path)
    times = []
    for number in range(200):
        log.now_ms += rng.choice([0, 1000, 3_600_000])
        log.append(1)
        times.append(log._appended[-1].record.timestamp)
        if number % 50 == 49:
            log.roll()
    log.append(1)
    log.write()
    first_ms, last_ms = min(times), max(times)
    for _ in range(20):
        start_ms, end_ms = sorted((rng.randint(first_ms - 10, last_ms), rng.randint(first_ms, last_ms + 10)))
        start = _first_at(log, start_ms)
        end = _first_at(log, end_ms)
        found = offsets(tmp_path, topic="t", startingTimestamp=start_ms, endingTimestamp=end_ms)
        assert found.get(("t", 0), []) == all_offsets(log, start, end if end is not None else 2**62)
        each = offsets(tmp_path, topic="t", startingOffsetsByTimestamp=f'{{"t": {{"0": {start_ms}}}}}')
        assert each[("t", 0)] == all_offsets(log, start)
    with pytest.raises(UsageProblem, match="at or after the starting time"):
        offsets(tmp_path, topic="t", startingTimestamp=last_ms + 10**9)
    log.write(high_watermark=(beyond := log.end // 2))
    later_ms = max(item.record.timestamp for item in log._appended if item.record.offset < beyond) + 1
    if _first_at(log, later_ms) is not None:
        with pytest.raises(UsageProblem, match="at or after the starting time"):
            offsets(tmp_path, topic="t", startingTimestamp=later_ms)
    log.write()
    latest = {"startingOffsetsByTimestampStrategy": "latest"}
    assert offsets(tmp_path, topic="t", startingTimestamp=last_ms + 10**9, **latest) == {}


def _first_at(log: GrowingLog, time_ms: int) -> int | None:
    return next((item.record.offset for item in log._appended if item.record.timestamp >= time_ms), None)


def test_reading_ends_at_the_high_watermark(rng: random.Random, tmp_path: Path) -> None:
    log = GrowingLog(rng, tmp_path)
    for _ in range(30):
        log.append(2)
    log.write(high_watermark=41)
    assert offsets(tmp_path, topic="t")["t", 0] == list(range(41))
    assert offsets(tmp_path, topic="t", highWatermark="log-end")["t", 0] == list(range(60))
    with pytest.raises(UsageProblem, match="ending offset 42 is out of range: t-0 has offsets 0 to 41 "):
        offsets(tmp_path, topic="t", endingOffsets='{"t": {"0": 42}}')
    (tmp_path / "replication-offset-checkpoint").unlink()
    with pytest.raises(Refused, match="highWatermark"):
        offsets(tmp_path, topic="t")
    assert len(offsets(tmp_path, topic="t", highWatermark="log-end")["t", 0]) == 60


def test_records_below_the_log_start_offset_are_not_read(rng: random.Random, tmp_path: Path) -> None:
    log = GrowingLog(rng, tmp_path)
    log.append(6)
    log.append(6)
    log.start = 4
    log.write()
    assert offsets(tmp_path, topic="t")["t", 0] == list(range(4, 12))
    with pytest.raises(UsageProblem, match="starting offset 2 is out of range: t-0 has offsets 4 to 12 "):
        offsets(tmp_path, topic="t", startingOffsets='{"t": {"0": 2}}')
    found = offsets(tmp_path, topic="t", startingOffsets='{"t": {"0": 2}}', failOnDataLoss="false")
    assert found["t", 0] == list(range(4, 12))


def test_an_open_transaction_ends_a_committed_read(rng: random.Random, tmp_path: Path) -> None:
    log = GrowingLog(rng, tmp_path)
    log.append(5)
    log.append(2, producer=1)
    log.append(3)
    log.write()
    assert offsets(tmp_path, topic="t", isolationLevel="read_committed")["t", 0] == list(range(5))
    assert offsets(tmp_path, topic="t")["t", 0] == list(range(10))
    with pytest.raises(UsageProblem, match="producer id 1, epoch 0, has an open transaction"):
        offsets(tmp_path, topic="t", isolationLevel="read_committed", endingOffsets='{"t": {"0": 8}}')


def test_small_partitions_share_tasks(rng: random.Random, tmp_path: Path) -> None:
    for number in range(40):
        log = GrowingLog(rng, tmp_path, "many", number)
        log.append(1)
        log.write()
    tasks = plan_read(LOCAL, parse_options({"logDirs": str(tmp_path), "topic": "many"}))
    assert len(tasks) == 2  # 32 segments per task, because Spark adds 4 MiB for each file that is opened
    assert [piece.partition for task in tasks for piece in task] == list(range(40))


def test_min_partitions_divides_the_log_into_more_tasks(rng: random.Random, logs: list[GrowingLog]) -> None:
    path = logs[0].log_dir
    # 32 segments share a task
    wanted = len(plan_read(LOCAL, parse_options({"logDirs": str(path), "subscribe": "a,b"}))) + rng.randint(1, 10)
    options = parse_options({"logDirs": str(path), "subscribe": "a,b", "minPartitions": str(wanted)})
    tasks = plan_read(LOCAL, options)
    assert len(tasks) == wanted
    assert offsets(path, subscribe="a,b", minPartitions=wanted) == offsets(path, subscribe="a,b")
    sizes = [sum(piece.slice.size_bytes for piece in pieces) for pieces in tasks]
    largest = max(piece.slice.size_bytes for pieces in tasks for piece in pieces)
    assert max(sizes) <= sum(sizes) / wanted + largest
    log = GrowingLog(rng, path, "one-segment")
    for _ in range(60):
        log.append(2)
    log.write()
    one = parse_options({"logDirs": str(path), "subscribe": "one-segment", "minPartitions": "7"})
    assert [len(pieces) >= 1 for pieces in plan_read(LOCAL, one)] == [True] * 7
    many = plan_read(LOCAL, replace(options, min_partitions=10**6))
    assert all(len(pieces) == 1 for pieces in many), "a log is divided at entries of its offset index only"


def test_a_range_outside_of_the_log_is_refused_with_the_offsets_of_the_log(logs: list[GrowingLog]) -> None:
    path, end = logs[2].log_dir, logs[2].end
    beyond = f'{{"b": {{"0": {end + 1}}}}}'
    for options in ({"startingOffsets": beyond}, {"endingOffsets": beyond}):
        with pytest.raises(UsageProblem, match=rf"{end + 1}\b.*: b-0 has offsets 0 to {end} \(exclusive\)"):
            offsets(path, subscribe="b", **options)
        assert offsets(path, subscribe="b", failOnDataLoss="false", **options).get(("b", 0), []) in (
            [], all_offsets(logs[2]))  # fmt: skip


def test_a_damaged_batch_is_reported_with_its_position(spark: Any, rng: random.Random, tmp_path: Path) -> None:
    log = GrowingLog(rng, tmp_path)
    for _ in range(20):
        log.append(3)
    log.write()
    file = log.path / f"{0:020d}.log"
    data, [table] = bytearray(file.read_bytes()), _tables(log)
    row = table[len(table) // 2]
    data[row["position"] + row["size_bytes"] - 1] ^= 1
    file.write_bytes(data)
    with pytest.raises(Exception, match=rf"(?s)invalid CRC.*0{{20}}\.log, byte position {row['position']}\b"):
        read(spark, tmp_path, topic="t").collect()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topics": "a"}, "unknown option topics. Did you mean topic?"),
        ({}, "and assign is required, but none is given"),
        ({"topic": "a", "topicPattern": "a"}, "but 2 are given: topic, topicPattern"),
        ({"SUBSCRIBE": "a", "assign": '{"a": [0]}'}, "but 2 are given: subscribe, assign"),
        ({"subscribe": "a", "subscribepattern": "a"}, "but 2 are given: subscribe, subscribePattern"),
        ({"topic": "a", "subscribe": "a"}, "options topic and subscribe are both given"),
        ({"topic": "a", "kafka.bootstrap.servers": "x:1"}, 'Give .option("logDirs", ...) instead'),
        ({"topic": "a", "kafka.group.id": "g"}, "it configures a Kafka client, which is not used"),
        ({"topic": "a", "groupIdPrefix": "g"}, "it configures a Kafka client, which is not used"),
        ({"topic": "a", "maxRecordsPerPartition": "9"}, "Use minPartitions or sliceBytes"),
        ({"topic": "a", "minPartitions": "0"}, "0 of option minPartitions: the minimum is 1"),
        ({"topic": "a", "startingOffsets": '{"a": {"0": 5}}', "endingOffsets": '{"a": {"0": 4}}'},
         "the starting offset 5 of a-0 is above its ending offset 4"),
        ({"topic": " , "}, "contains no topic name"),
        ({"subscribePattern": ""}, "option subscribePattern is empty. Give .* for all topics"),
        ({"subscribePattern": "("}, "option subscribePattern: invalid regular expression '('"),
        ({"topic": "a", "startingOffsets": "latest"}, "startingOffsets cannot be latest"),
        ({"topic": "a", "endingOffsets": "earliest"}, "endingOffsets cannot be earliest"),
        ({"topic": "a", "startingOffsets": "12"}, "expected earliest or JSON"),
        ({"topic": "a", "startingOffsets": '{"a": {"0": -1}}'}, "cannot have -1 for a-0"),
        ({"topic": "a", "endingOffsets": '{"a": {"0": -2}}'}, "cannot have -2 for a-0"),
        ({"topic": "a", "endingOffsets": '{"a": {"0": -3}}'}, "-3 of option endingOffsets: the minimum is -2"),
        ({"topic": "a", "endingOffsets": '{"a": 3}'}, "the value of topic a is not an object of partitions"),
        ({"topic": "a", "endingOffsets": "{}"}, "contains no partition"),
        ({"topic": "a", "endingOffsets": "{"}, "is not a JSON object"),
        ({"topic": "a", "startingTimestamp": "yesterday"}, "'yesterday' of option startingTimestamp: expected a whole"),
        ({"topic": "a", "isolationLevel": "serializable"}, "Give read_uncommitted or read_committed"),
        ({"topic": "a", "includeHeaders": "yes"}, "Give false or true"),
        ({"topic": "a", "sliceBytes": "0"}, "0 of option sliceBytes: the minimum is 1"),
        ({"assign": '{"a": []}'}, "at least one partition"),
        # as Spark's session catalog passes the options of CREATE TABLE
        ({"topic": "a", "owner": "root", "option.topic": "a"}, "Create a temporary view instead"),
        ({"assign": "[1]"}, "is not a JSON object: "),
    ],
)
def test_wrong_options_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(UsageProblem) as caught:
        parse_options({"logDirs": "/x", **options})
    assert message in str(caught.value)


def test_options_of_batches_are_checked() -> None:
    with pytest.raises(UsageProblem, match="no option includeHeaders"):
        parse_options({"logDirs": "/x", "topic": "a", "includeHeaders": "true"}, records=False)


@pytest.mark.soak("nothing: this tests pyspark itself, which changes only with its pinned version")
def test_filters_pushed_to_a_python_source_remain_in_the_next_query(spark: Any) -> None:
    """If this fails, this version of pyspark keeps the filters of each query apart, and `kafka-log` can have
    pushFilters: SOURCE.md states why it has not."""
    spark.dataSource.register(Numbers)
    setting = "spark.sql.python.filterPushdown.enabled"
    spark.conf.set(setting, "true")
    try:
        frame = spark.read.format(Numbers.name()).load()
        assert [frame.where("n = 3").count(), frame.count()] == [1, 1], "the right numbers are 1 and 10"
    finally:
        spark.conf.unset(setting)


def test_bounds_have_the_precedence_of_sparks_kafka_source() -> None:
    """A time for all partitions takes precedence over times of partitions, and these over offsets."""
    given = {"logdirs": "/x", "TOPIC": "a", "startingoffsets": "earliest", "endingOffsets": '{"a": {"0": 7}}'}
    options = parse_options(given)
    assert (options.start, options.end) == (Bound(False, EARLIEST), Bound(False, of={("a", 0): 7}))
    given |= {"startingOffsetsByTimestamp": '{"a": {"1": 5}}'}
    assert parse_options(given).start == Bound(True, of={("a", 1): 5})
    assert parse_options(given | {"startingTimestamp": "9"}).start == Bound(True, 9)
    assert parse_options({"logDirs": "/x", "topic": "a"}).end == Bound(False, LATEST)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"topic": "a,c"}, "c not found in the log dirs"),
        ({"topicPattern": "x.*"}, "no topic matches topicPattern"),
        ({"assign": '{"a": [0, 7]}'}, "a-7 not found in"),
        ({"topic": "a", "startingOffsets": '{"a": {"0": 0}}'}, "does not contain a-1"),
        ({"topic": "a", "endingOffsets": '{"a": {"0": 0, "1": 0, "2": 0}}'}, "contains a-2"),
        ({"topic": "a", "columns": "nope"}, "there is no column nope"),
        ({"topic": "a", "columns": "headers"}, "Set includeHeaders to true"),
    ],
)
def test_missing_topics_and_partitions_are_reported(options: dict[str, str], why: str, logs: list[GrowingLog]) -> None:
    with pytest.raises(KeytailError) as caught:
        offsets(logs[0].log_dir, **({"columns": "offset"} | options))
    assert why in str(caught.value)


def test_a_schema_of_other_types_is_refused(spark: Any, logs: list[GrowingLog]) -> None:
    reader = spark.read.format("kafka-log").schema(T.StructType([T.StructField("offset", T.StringType())]))
    with pytest.raises(AnalysisException, match="column offset has type bigint, not string"):
        reader.option("logDirs", str(logs[0].log_dir)).option("topic", "a").load().collect()
    with pytest.raises(AnalysisException, match="no such log dir"):
        read(spark, Path("/nowhere/at/all"), topic="a").collect()


def test_a_data_frame_or_view_is_planned_by_its_first_query(spark: Any, rng: random.Random, tmp_path: Path) -> None:
    log = GrowingLog(rng, tmp_path)
    log.append(5)
    log.write()
    frame = read(spark, tmp_path, subscribe="t", columns="offset")
    spark.sql(f"CREATE TEMPORARY VIEW planned_once USING `kafka-log` OPTIONS (logDirs '{tmp_path}', subscribe 't')")
    counts = [frame.count(), spark.table("planned_once").count()]
    log.append(5)
    log.write()
    counts += [frame.count(), spark.table("planned_once").count()]
    spark.catalog.dropTempView("planned_once")
    assert [*counts, read(spark, tmp_path, subscribe="t", columns="offset").count()] == [5, 5, 5, 5, 10]
