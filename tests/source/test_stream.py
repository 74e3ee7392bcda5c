"""`kafka-log` as a stream. Most tests call the reader as Spark does, in its order of calls, without a JVM; one runs a
query in a session.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit

from keytail.errors import KeytailError, Refused, UsageProblem
from keytail.source.data_source import KafkaLogBatchesSource, KafkaLogSource
from keytail.source.options import parse_options
from keytail.source.stream import from_json, limited, to_json
from tests.chance import chance, draws
from tests.growing_log import GrowingLog
from tests.run.shared import run_stream

Row = tuple[str, int, int]


class Query:
    """A stream as Spark runs it: a batch is planned from the checkpoint, which has the end of each planned batch."""

    def __init__(self, log_dir: Path, source: Any = KafkaLogSource, **options: object) -> None:
        offset = "offset" if source is KafkaLogSource else "base_offset"
        given = {"logDirs": str(log_dir), "startingOffsets": "earliest", "columns": f"topic,partition,{offset}"}
        self.source = source({**given, **{name: str(value) for name, value in options.items()}})
        self.planned: list[str] = []
        self.rows: list[Row] = []
        self.restart()

    def restart(self) -> None:
        self.reader = self.source.streamReader(self.source.schema())

    def batch(self, limit: ReadLimit | None = None) -> list[Row] | None:
        """Run the next batch; return its rows, or None if there is nothing to read."""
        start = self.planned[-1] if self.planned else self._json(self.reader.initialOffset())
        end = self._json(self.reader.latestOffset(json.loads(start), limit or self.reader.getDefaultReadLimit()))
        if end == start:
            return None
        rows = self.read(start, end)
        self.planned.append(end)
        self.rows += rows
        return rows

    def read(self, start: str, end: str) -> list[Row]:
        shares = self.reader.partitions(json.loads(start), json.loads(end))
        batches = [batch for share in shares for batch in self.reader.read(share)]
        return [tuple(row.values()) for batch in batches for row in batch.to_pylist()]  # type: ignore[misc]

    @staticmethod
    def _json(offset: dict[str, Any]) -> str:
        return json.dumps(offset)


def write(log: GrowingLog, *, running: bool, high_watermark: int | None = None) -> None:
    log.write(high_watermark)
    if running:
        (log.log_dir / ".kafka_cleanshutdown").unlink()


def rows_of(log: GrowingLog, start: int, end: int, *, committed: bool = False) -> list[Row]:
    return [
        (log.topic, log.partition, item.record.offset) for item in log._appended
        if start <= item.record.offset < end and not (committed and item.aborted)
    ]  # fmt: skip


def test_a_stream_returns_each_record_once_and_only_what_is_closed(tmp_path: Path) -> None:
    rng = chance()
    for number in range(draws(6)):
        committed = rng.random() < 0.5
        options: dict[str, object] = {"isolationLevel": "read_committed"} if committed else {}
        if limits := rng.random() < 0.5:
            options["maxOffsetsPerTrigger"] = rng.randint(1, 40)
        dirs = tmp_path / str(number)
        logs = [GrowingLog(rng, dirs, "a")]
        write(logs[0], running=True)
        query = Query(dirs, subscribePattern="a|b", minPartitions=rng.randint(1, 4), **options)
        for _ in range(rng.randint(1, 6)):
            if rng.random() < 0.3:
                logs.append(GrowingLog(rng, dirs, rng.choice("ab"), len(logs)))
            for log in logs:
                log.grow(rng.randint(0, 12))
                write(log, running=True)
            while query.batch() is not None:
                pass
            if rng.random() < 0.3:
                query.restart()
            for log in logs:
                end = min(log._segments[-1].base, log.stable if committed else log.end)
                assert _of(query, log) == rows_of(log, 0, end, committed=committed)
            if query.planned and not limits:
                before, last = (['{"a": {"0": 0}}', *query.planned])[-2:]
                again = query.read(before, last)
                assert not again or sorted(again) == sorted(query.rows[-len(again) :]), "a batch is repeatable"
        for log in logs:
            log.settle()
            write(log, running=False)
        while query.batch() is not None:
            pass
        for log in logs:
            assert _of(query, log) == rows_of(log, 0, log.end, committed=committed)


def _of(query: Query, log: GrowingLog) -> list[Row]:
    return [row for row in query.rows if row[:2] == (log.topic, log.partition)]


def test_undecided_transactions_and_records_above_the_high_watermark_are_not_read(tmp_path: Path) -> None:
    log = GrowingLog(chance(), tmp_path)
    log.append(5)
    log.append(2, producer=1)
    log.roll()
    log.append(3)
    log.roll()
    log.append(1)
    write(log, running=True, high_watermark=8)
    committed = Query(tmp_path, subscribe="t", isolationLevel="read_committed")
    every = Query(tmp_path, subscribe="t")
    assert committed.batch() == rows_of(log, 0, 5)
    assert every.batch() == rows_of(log, 0, 8)
    assert committed.batch() is None
    log.end_transaction(1, commit=False)
    write(log, running=True)
    assert committed.batch() == rows_of(log, 7, 10)
    assert every.batch() == rows_of(log, 8, 10)


def test_offsets_are_those_of_sparks_kafka_source(tmp_path: Path) -> None:
    for topic, partition in [("b", 2), ("a", 10), ("a", 9)]:
        log = GrowingLog(chance(), tmp_path, topic, partition)
        log.append(4)
        write(log, running=False)
    query = Query(tmp_path, subscribe="b,a")
    assert query.batch() is not None
    assert query.planned == ['{"a": {"9": 4, "10": 4}, "b": {"2": 4}}']
    query.planned = ['{"b":{"2":4},"a":{"10":4,"9":4}}']
    start = json.loads(query.planned[0])
    assert query.reader.latestOffset(start, ReadAllAvailable()) is start, "the text of the checkpoint is unchanged"
    assert from_json(to_json({("a", 10): 4, ("a", 9): 3})) == {("a", 10): 4, ("a", 9): 3}
    assert query.reader.reportLatestOffset() == start
    with pytest.raises(Refused, match="has no offsets by topic and partition"):
        from_json({"logOffset": 3})


def test_a_stream_begins_where_its_options_say(tmp_path: Path) -> None:
    log = GrowingLog(chance(), tmp_path)
    for _ in range(6):
        log.now_ms += 10_000
        log.append(1)
    write(log, running=False)
    assert Query(tmp_path, subscribe="t", startingOffsets='{"t": {"0": 4}}').batch() == rows_of(log, 4, 6)
    at_ms = log._appended[3].record.timestamp
    assert Query(tmp_path, subscribe="t", startingTimestamp=at_ms).batch() == rows_of(log, 3, 6)
    with pytest.raises(UsageProblem, match="does not contain t-0"):
        Query(tmp_path, subscribe="t", startingOffsets='{"x": {"0": 4}}').batch()
    with pytest.raises(UsageProblem, match="For a stream, give an earlier time"):
        Query(tmp_path, subscribe="t", startingTimestamp=at_ms + 10**9).batch()
    with pytest.raises(UsageProblem, match="x not found in the log dirs"):
        Query(tmp_path, subscribe="t,x").batch()
    batches = Query(tmp_path, KafkaLogBatchesSource, subscribe="t")
    assert batches.batch() == rows_of(log, 0, 6)
    assert batches.batch() is None
    (log.path / f"{0:020d}.log.swap").touch()
    with pytest.raises(Refused, match="If a broker is running, try again"):
        Query(tmp_path, subscribe="t").batch()


def test_a_batch_that_ends_above_the_high_watermark_is_returned_once(tmp_path: Path) -> None:
    log = GrowingLog(chance(), tmp_path)
    for count in (2, 6):
        log.append(count)
    log.write(high_watermark=5)
    query = Query(tmp_path, KafkaLogBatchesSource, subscribe="t")
    assert query.batch() == [("t", 0, 0)]
    log.write()
    assert query.batch() == [("t", 0, 2)]
    started = Query(tmp_path, KafkaLogBatchesSource, subscribe="t", startingOffsets='{"t": {"0": 4}}')
    assert started.batch() == [("t", 0, 2)]


def test_trigger_available_now_ends_at_what_existed_when_it_began(tmp_path: Path) -> None:
    log = GrowingLog(chance(), tmp_path)
    for _ in range(10):
        log.append(1)
    write(log, running=False)
    query = Query(tmp_path, subscribe="t", maxOffsetsPerTrigger=4)
    query.reader.prepareForTriggerAvailableNow()
    assert query.batch() == rows_of(log, 0, 4)
    log.append(5)
    write(log, running=False)
    assert [query.batch(), query.batch(), query.batch()] == [rows_of(log, 4, 8), rows_of(log, 8, 10), None]
    query.restart()
    assert query.batch(ReadAllAvailable()) == rows_of(log, 10, 15)


def test_a_limit_is_divided_by_the_sizes_of_partitions() -> None:
    begins, ends = {("a", 0): 0, ("a", 1): 100, ("b", 0): 7}, {("a", 0): 900, ("a", 1): 200, ("b", 0): 7}
    assert limited(begins, ends, 100) == {("a", 0): 90, ("a", 1): 110, ("b", 0): 7}
    assert limited(begins, ends, 1) == {("a", 0): 1, ("a", 1): 101, ("b", 0): 7}, "no partition is starved"
    assert limited(begins, ends, 10**30) == ends


def _advance(log: GrowingLog, other: GrowingLog) -> None:
    log.start = 8
    log.write()


def _delete_segment(log: GrowingLog, other: GrowingLog) -> None:
    for file in log.path.glob(f"{0:020d}.*"):
        file.unlink()
    log.write()


def _delete_partition(log: GrowingLog, other: GrowingLog) -> None:
    log.write()
    shutil.rmtree(log.path)


def _create_again(log: GrowingLog, other: GrowingLog) -> None:
    shutil.rmtree(log.path)
    again = GrowingLog(log.rng, log.log_dir)
    again.append(2)
    again.write()


def _add_with_later_start(log: GrowingLog, other: GrowingLog) -> None:
    other.append(3)
    other.start = 1
    other.write()
    log.write()


LOSSES = {
    "the log start offset advances": (_advance, "t-0 starts at offset 8, after the next offset 6", [8, 9]),
    "a segment is deleted": (_delete_segment, "t-0 starts at offset 7, after the next offset 6", [7, 8, 9]),
    "a partition is deleted": (_delete_partition, "t-0 is no longer in the log dirs", []),
    "a topic is created again": (_create_again, "t-0 ends at offset 2, before the next offset 6", []),
    "a partition appears late": (_add_with_later_start, "the new partition t-1 starts at offset 1 instead of 0", None),
}


@pytest.mark.parametrize("case", LOSSES)
def test_lost_data_is_an_error_unless_the_options_allow_it(tmp_path: Path, case: str) -> None:
    change, message, remaining = LOSSES[case]
    log, other = (GrowingLog(chance(), tmp_path, partition=number) for number in range(2))
    for count in (6, 1):
        log.append(count)
    log.roll()
    log.append(3)
    log.write(high_watermark=6)
    queries = [Query(tmp_path, subscribe="t", failOnDataLoss=value) for value in ("true", "false")]
    for query in queries:
        assert query.batch() == rows_of(log, 0, 6)
    change(log, other)
    with pytest.raises(KeytailError, match=f"records may be missing from the stream: {message}"):
        queries[0].batch()
    found = [row[2] for row in queries[1].batch() or []]
    assert found == ([6, 7, 8, 9, 1, 2] if remaining is None else remaining)
    assert queries[1].batch() is None


@pytest.mark.parametrize("case", ["a partition is deleted", "a topic is created again"])
def test_no_batch_is_stored_that_would_fail_after_the_lost_data_is_restored(tmp_path: Path, case: str) -> None:
    log, other = (GrowingLog(chance(), tmp_path / "logs", partition=number) for number in range(2))
    for each in (log, other):
        each.append(6)
        each.write()
    query = Query(log.log_dir, subscribe="t")
    assert query.batch() is not None
    shutil.copytree(log.log_dir, tmp_path / "backup")
    LOSSES[case][0](log, other)
    start = json.loads(query.planned[-1])
    with pytest.raises(Refused, match="records may be missing from the stream: t-0 "):
        query.reader.latestOffset(start, ReadAllAvailable())
    shutil.rmtree(log.log_dir)
    shutil.move(tmp_path / "backup", log.log_dir)
    assert query.batch() is None


def test_the_first_batch_can_be_planned_again_after_a_partition_was_created(tmp_path: Path) -> None:
    log, later = (GrowingLog(chance(), tmp_path, partition=number) for number in range(2))
    log.append(6)
    log.write()
    query = Query(tmp_path, subscribe="t")
    end = json.dumps(query.reader.latestOffset(query.reader.initialOffset(), ReadAllAvailable()))
    later.append(3)
    later.write()
    query.restart()
    start = query.reader.initialOffset()
    assert start == {"t": {"0": 0, "1": 0}}
    query.planned.append(end)
    assert query.read(json.dumps(start), end) == rows_of(log, 0, 6)
    assert query.batch() == rows_of(later, 0, 3)
    with pytest.raises(Refused, match="t-1 is no longer in the log dirs"):
        query.read('{"t": {"0": 0, "1": 1}}', end)


def test_the_end_of_a_batch_that_no_longer_exists_is_an_error(tmp_path: Path) -> None:
    """As after a restart in the middle of a batch, with a log that was truncated meanwhile."""
    log = GrowingLog(chance(), tmp_path)
    log.append(6)
    log.write()
    query = Query(tmp_path, subscribe="t")
    with pytest.raises(Refused, match="can be read up to offset 6, before the end of the batch 9"):
        query.read('{"t": {"0": 0}}', '{"t": {"0": 9}}')


def test_a_new_partition_needs_a_high_watermark_only_when_it_has_something_to_read(tmp_path: Path) -> None:
    log = GrowingLog(chance(), tmp_path)
    log.append(2)
    write(log, running=True)
    (tmp_path / "replication-offset-checkpoint").unlink()
    query = Query(tmp_path, subscribe="t")
    assert query.batch() is None
    log.roll()
    log.append(1)
    write(log, running=True)
    (tmp_path / "replication-offset-checkpoint").unlink()
    with pytest.raises(Refused, match="no high watermark"):
        query.batch()


def test_a_batch_fails_if_a_segment_is_replaced_and_succeeds_with_another_listing(tmp_path: Path) -> None:
    log = GrowingLog(chance(), tmp_path)
    log.append_records(log.random_records(40, plain=True))
    log.roll()
    log.append(1)
    log.write()
    query = Query(tmp_path, subscribe="t")
    offsets = {"t": {"0": 0}}, {"t": {"0": 41}}
    shares = query.reader.partitions(*offsets)
    log.compact()
    with pytest.raises(Refused, match="the segment is not the file that was listed"):
        [list(query.reader.read(share)) for share in shares]
    remaining = query.read(*map(json.dumps, offsets))
    newest = {item.record.key: item.record.offset for item in log._appended}
    assert {row[2] for row in remaining} <= {row[2] for row in rows_of(log, 0, 41)}
    assert {offset for key, offset in newest.items() if _has_value(log, offset)} <= {row[2] for row in remaining}


def _has_value(log: GrowingLog, offset: int) -> bool:
    return log._appended[offset].record.value is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "a stream needs a start that is the same when it restarts"),
        ({"startingOffsets": " "}, "a stream needs a start that is the same when it restarts"),
        ({"startingOffsets": "latest"}, "a stream needs a start that is the same when it restarts"),
        ({"startingOffsets": '{"a": {"0": -1}}'}, "cannot have -1 for a-0"),
        ({"startingTimestamp": "5", "startingOffsetsByTimestampStrategy": "latest"}, "a stream needs a start"),
        ({"startingOffsets": "earliest", "endingOffsets": "latest"}, "endingOffsets is not valid in a stream"),
        ({"startingOffsets": "earliest", "endingTimestamp": "5"}, "endingTimestamp is not valid in a stream"),
        ({"startingOffsets": "earliest", "maxOffsetsPerTrigger": "0"}, "the minimum is 1"),
        ({"startingOffsets": "earliest", "minOffsetsPerTrigger": "5"}, "Set an interval between batches"),
    ],
)
def test_wrong_options_of_a_stream_are_refused(options: dict[str, str], message: str) -> None:
    given = {"logDirs": "/x", "subscribe": "a", **options}
    with pytest.raises(UsageProblem) as caught:
        parse_options(given, streaming=True)
    assert message in str(caught.value)


def test_options_of_streams_are_refused_in_a_batch_query() -> None:
    given = {"logDirs": "/x", "subscribe": "a", "maxOffsetsPerTrigger": "5"}
    with pytest.raises(UsageProblem, match="maxOffsetsPerTrigger is not valid in a batch query"):
        parse_options(given)
    assert parse_options(given | {"endingOffsets": "{"}, streaming=None).max_offsets_per_trigger == 5
    with pytest.raises(UsageProblem, match="kafka-log-batches has no option maxOffsetsPerTrigger"):
        parse_options(given, records=False, streaming=None)


@pytest.mark.spark
def test_a_query_continues_from_its_checkpoint(spark: Any, tmp_path: Path) -> None:
    log, seen = GrowingLog(chance(), tmp_path / "logs"), []
    log.append(4)
    log.roll()
    log.append(3)
    for running in (True, False):
        write(log, running=running)
        source = spark.readStream.format("kafka-log").option("logDirs", str(log.log_dir)).option("subscribe", "t")
        source = source.option("startingOffsets", "earliest").option("columns", "topic,partition,offset").load()
        writer = source.writeStream.option("checkpointLocation", str(tmp_path / "checkpoint"))
        writer = writer.foreachBatch(lambda frame, _: seen.append(sorted(map(tuple, frame.collect()))))
        run_stream(writer.trigger(availableNow=True))
    assert seen == [rows_of(log, 0, 4), rows_of(log, 4, 7)]
    checkpoint = (tmp_path / "checkpoint" / "offsets" / "1").read_text().splitlines()
    assert json.loads(checkpoint[-1]) == {"t": {"0": 7}}
