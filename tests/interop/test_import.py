"""A real broker on the output of import: it starts without recovery, a consumer receives exactly the imported records,
also after a restart, idempotent producers continue, and the broker's own cleaner compacts the partitions.

KEYTAIL_IMPORT_RECORDS sets the total number of records.
"""

from __future__ import annotations

import os
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from keytail.import_ import driver as import_
from keytail.import_.command import ImportRow, Request
from keytail.import_.driver import import_records
from keytail.import_.source import Source
from keytail.run.spark.engine import SparkEngine
from tests.interop.broker import Broker
from tests.interop.broker_client import BrokerClient, Served
from tests.interop.broker_story import complaints, latest_by_key, repairs, roll_segment, start_client, state_of
from tests.reference.murmur2 import partition as partition_of

pytestmark = [pytest.mark.interop, pytest.mark.spark]

RECORDS = int(os.environ.get("KEYTAIL_IMPORT_RECORDS", "20000"))
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
PARTITIONS = 3
COMPACTED, HAS_LEADER_EPOCHS = "compacted", "zstd"
SCHEMA = pa.schema(
    {
        "key": pa.binary(),
        "value": pa.binary(),
        "headers": pa.list_(pa.struct({"key": pa.string(), "value": pa.binary()})),
        "timestamp": pa.int64(),
    }
)
Row = tuple[bytes | None, bytes | None, tuple[tuple[str, bytes | None], ...], int | None]


def rows_of(count: int, seed: int, *, keyless: bool) -> list[Row]:
    rng = random.Random(seed)
    rows: list[Row] = []
    for number in range(count):
        key = None if keyless and rng.random() < 0.05 else b"key-%d" % rng.randrange(count // 4 + 1)
        value = None if rng.random() < 0.05 else b"value %d " % number * rng.randrange(1, 9)
        headers = tuple((f"h{i}", None if rng.random() < 0.2 else rng.randbytes(i)) for i in range(rng.randrange(0, 3)))
        timestamp_ms = None if rng.random() < 0.05 else time.time_ns() // 1_000_000 - rng.randrange(10**6)
        rows.append((key, value, headers, timestamp_ms))
    return rows


def write_parquet(path: Path, rows: Sequence[Row]) -> Path:
    columns = [
        [row[0] for row in rows],
        [row[1] for row in rows],
        [[{"key": key, "value": value} for key, value in row[2]] or None for row in rows],
        [row[3] for row in rows],
    ]
    pq.write_table(pa.table(columns, schema=SCHEMA), path)
    return path


@dataclass
class Story:
    """What was imported, what each consumer received, and what the broker logged."""

    rows: dict[str, list[Row]] = field(default_factory=dict)
    reports: dict[str, list[ImportRow]] = field(default_factory=dict)
    before: list[Served] = field(default_factory=list)
    served: dict[str, list[Served]] = field(default_factory=dict)
    restarted: dict[str, list[Served]] = field(default_factory=dict)
    compacted: list[Served] = field(default_factory=list)
    lines: list[Any] = field(default_factory=list)
    restart_lines: list[Any] = field(default_factory=list)
    cleaner_lines: list[Any] = field(default_factory=list)
    produced_after: list[int] = field(default_factory=list)
    from_ms: int = 0
    to_ms: int = 0


def partitions(topic: str) -> list[tuple[str, int]]:
    return [(topic, number) for number in range(PARTITIONS)]


@pytest.fixture(scope="module")
def story(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    root = tmp_path_factory.mktemp("broker")  # a path without words that occur in messages about repairs
    reported = Story(from_ms=time.time_ns() // 1_000_000)
    with start_client() as client, pytest.MonkeyPatch.context() as patch:
        broker = Broker(root / "logs", root / "work", properties={"message.max.bytes": "1000000"})
        topics = [*CODECS, COMPACTED]
        with broker:
            client.connect(broker)
            for topic in topics:
                policy = "compact" if topic == COMPACTED else "delete"
                client.create_topic(topic, PARTITIONS, {"cleanup.policy": policy, "segment.bytes": "1048576"})
            records = [(reported.from_ms, b"key-before", b"value")] * 7
            client.produce("kept", HAS_LEADER_EPOCHS, 0, records, idempotent=True)
            reported.before = client.consume(partitions(HAS_LEADER_EPOCHS))
        patch.setattr(import_, "session_of_run", lambda *_, **__: SparkEngine(spark))
        _import(reported, topics, root)
        reported.to_ms = time.time_ns() // 1_000_000
        with broker:
            client.connect(broker)
            reported.served = {topic: client.consume(partitions(topic)) for topic in topics}
            reported.produced_after = client.produce("kept", HAS_LEADER_EPOCHS, 0, records)
            reported.lines = broker.log_lines()
        _restart_and_clean(reported, broker, client)
    yield reported


def _import(reported: Story, topics: Sequence[str], root: Path) -> None:
    for number, topic in enumerate(topics):
        reported.rows[topic] = rows_of(RECORDS // len(topics), number, keyless=topic != COMPACTED)
        source = Source(str(write_parquet(root / f"{topic}.parquet", reported.rows[topic])), "parquet")
        request = Request(source, topic, (str(root / "logs"),), codec=topic if topic in CODECS else "lz4", execute=True,
                          master="local[2]" if number % 2 else None)  # fmt: skip  # on Spark, and in this process
        if topic == HAS_LEADER_EPOCHS:
            refused = import_records(request)
            assert [row.status for row in refused] == ["refused", "failed", "failed"]
            assert all("not empty" in row.error for row in refused)
            request = Request(**{**request.__dict__, "append": True})
        reported.reports[topic] = import_records(request)


def _restart_and_clean(reported: Story, broker: Broker, client: BrokerClient) -> None:
    """Restart the broker with its cleaner on, consume, then lower min.cleanable.dirty.ratio and wait until it has
    cleaned.
    """
    on = {"log.cleaner.enable": "true", "log.cleaner.backoff.ms": "200", "log.cleaner.min.cleanable.ratio": "1"}
    broker._properties |= {**on, "log.initial.task.delay.ms": "500"}
    with broker:
        client.connect(broker)
        reported.restarted = {topic: client.consume(partitions(topic)) for topic in reported.rows}
        reported.restart_lines = broker.log_lines()
        # The active segment is not cleaned: records written later roll the segments of the import.
        client.alter_configs(COMPACTED, {"segment.ms": "1", "min.cleanable.dirty.ratio": "0"})
        for number in range(PARTITIONS):
            for round_ in range(2):
                later_ms = reported.to_ms + 10**6 * round_ + 1000
                roll_segment(broker, client, (COMPACTED, number), later_ms, [(b"last", b"value")])
        ends = client.offsets(partitions(COMPACTED))
        give_up = time.monotonic() + 300
        while any(_cleaned_to(broker, number) < ends[f"{COMPACTED}-{number}"][1] - 2 for number in range(PARTITIONS)):
            assert time.monotonic() < give_up, "the broker's cleaner did not clean the imported records"
            time.sleep(0.2)
        reported.compacted = client.consume(partitions(COMPACTED))
        reported.cleaner_lines = broker.log_lines()


def _cleaned_to(broker: Broker, number: int) -> int:
    lines = (broker.log_dirs[0] / "cleaner-offset-checkpoint").read_text().splitlines()[2:]
    return next((int(line.split()[2]) for line in lines if line.split()[:2] == [COMPACTED, str(number)]), 0)


def expected(rows: Sequence[Row]) -> dict[int, list[Row]]:
    """Return the records of each partition, in order: Kafka's partitioner for records with keys, round-robin for
    others.
    """
    of: dict[int, list[Row]] = defaultdict(list)
    for number, row in enumerate(rows):
        of[number % PARTITIONS if row[0] is None else partition_of(row[0], PARTITIONS)].append(row)
    return of


def test_every_partition_has_the_number_of_records_in_its_row(story: Story) -> None:
    for topic, rows in story.reports.items():
        assert [row.status for row in rows] == ["imported"] * PARTITIONS
        assert sum(row.records for row in rows) == len(story.rows[topic])
        assert all(row.segments > 1 for row in rows) or RECORDS < 500_000 or topic not in ("none", COMPACTED)


@pytest.mark.parametrize("topic", [*CODECS, COMPACTED])
def test_a_consumer_receives_exactly_the_imported_records(story: Story, topic: str) -> None:
    behind = len(story.before) if topic == HAS_LEADER_EPOCHS else 0
    given = expected(story.rows[topic])
    got: dict[int, list[Served]] = defaultdict(list)
    for record in story.served[topic]:
        got[record.partition].append(record)
    for number in range(PARTITIONS):
        skip = behind if number == 0 else 0
        assert [record.offset for record in got[number]] == list(range(skip + len(given[number])))
        for record, (key, value, headers, timestamp_ms) in zip(got[number][skip:], given[number], strict=True):
            assert (record.key, record.value, record.headers) == (key, value, headers)
            if timestamp_ms is None:
                assert story.from_ms <= record.timestamp_ms <= story.to_ms
            else:
                assert record.timestamp_ms == timestamp_ms


def test_the_broker_recovers_nothing(story: Story) -> None:
    for lines in (story.lines, story.restart_lines):
        assert not complaints(lines)
        assert not repairs(lines)


def test_a_restart_changes_no_record(story: Story) -> None:
    for topic in story.restarted:
        end = len(story.served[topic])
        again = story.restarted[topic]
        if topic == HAS_LEADER_EPOCHS:  # these records were written after the import
            again = [record for record in again if record.key != b"key-before"]
            end -= len(story.before)
            assert again == [record for record in story.served[topic] if record.key != b"key-before"]
        else:
            assert again == story.served[topic]
        assert len(again) == end


def test_a_producer_continues_after_the_import(story: Story) -> None:
    """An idempotent producer can continue: the snapshot at the new log end has its last sequence."""
    end = len(expected(story.rows[HAS_LEADER_EPOCHS])[0]) + len(story.before)
    assert story.produced_after == list(range(end, end + 7))


def test_the_brokers_own_cleaner_compacts_the_import(story: Story) -> None:
    assert not complaints(story.cleaner_lines)
    before = [record for record in story.served[COMPACTED] if record.key != b"last"]
    after = [record for record in story.compacted if record.key != b"last"]
    assert len(after) < len(before) / 2
    assert {**latest_by_key(before)} == {**latest_by_key(after)}
    assert state_of(before) == state_of(after)
