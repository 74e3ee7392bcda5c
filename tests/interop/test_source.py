"""`kafka-log` compared with Spark's own Kafka source, on the same topics of a running broker: the rows are the same,
column by column.

The topics have transactions of every kind, every codec, headers, tombstones, and both timestamp types.
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from keytail.log.checkpoint import read_offsets
from keytail.log.fs import LOCAL
from tests.chance import SEED
from tests.interop.broker import Broker
from tests.interop.broker_client import BrokerClient
from tests.interop.broker_story import roll_segment, start_client
from tests.interop.kafka_source import add_kafka_source, from_kafka
from tests.interop.test_export import PARTITIONS, TOPIC, compact_past, traffic
from tests.run.shared import run_stream, shared_session

pytestmark = [pytest.mark.interop, pytest.mark.spark]

BY_BROKER = "by-broker"
LEVELS = ("read_uncommitted", "read_committed")


@pytest.fixture(scope="module")
def spark() -> Any:
    session = shared_session()
    add_kafka_source(session)
    return session


def theirs(spark: Any, broker: Broker, topic: str, level: str, **options: object) -> Any:
    return from_kafka(spark, broker, topic, **options).option("kafka.isolation.level", level).load()


def ours(spark: Any, broker: Broker, topic: str, level: str, **options: object) -> Any:
    reader = spark.read.format("kafka-log").option("logDirs", str(broker.log_dirs[0])).option("subscribe", topic)
    for name, value in {"includeHeaders": "true", "isolationLevel": level, "sliceBytes": 40_000, **options}.items():
        reader = reader.option(name, str(value))
    return reader.load()


def rows(frame: Any) -> list[Any]:
    """Return the sorted rows. Spark would read the source twice to sort them."""
    found = [row.asDict(recursive=True) for row in frame.collect()]
    return sorted(found, key=lambda row: (row["topic"], row["partition"], row["offset"]))


def check_same(spark: Any, broker: Broker, topic: str, level: str, **options: object) -> list[Any]:
    expected, found = (of(spark, broker, topic, level, **options) for of in (theirs, ours))
    assert [(field.name, field.dataType) for field in found.schema] == [(field.name, field.dataType)
            for field in expected.schema]  # fmt: skip
    wanted = rows(expected)
    assert rows(found) == wanted
    return wanted


def from_stream(spark: Any, broker: Broker, topic: str, level: str, checkpoint: Path) -> tuple[list[Any], str]:
    """Read the existing records as a stream; return the rows, and the end offsets in the stream's checkpoint."""
    found: list[Any] = []
    source = spark.readStream.format("kafka-log").option("logDirs", str(broker.log_dirs[0])).option("subscribe", topic)
    options = {"startingOffsets": "earliest", "includeHeaders": "true", "kafka.isolation.level": level}
    writer = source.options(**options, maxOffsetsPerTrigger=1000).load().writeStream.trigger(availableNow=True)
    writer = writer.foreachBatch(lambda frame, _: found.extend(rows(frame)))
    run_stream(writer.option("checkpointLocation", str(checkpoint)))
    last = max((checkpoint / "offsets").glob("[0-9]*"), key=lambda file: int(file.name))
    found.sort(key=lambda row: (row["topic"], row["partition"], row["offset"]))
    return found, last.read_text().splitlines()[-1]


def wait_for_high_watermarks(broker: Broker, client: BrokerClient) -> None:
    """Wait until the broker has written the high watermarks to their checkpoint."""
    partitions = [*((TOPIC, number) for number in range(PARTITIONS)), (BY_BROKER, 0)]
    path, give_up = str(broker.log_dirs[0] / "replication-offset-checkpoint"), time.monotonic() + 300
    ends = {name: end for name, (_, end) in client.offsets(partitions).items()}
    while not ends.items() <= {f"{topic}-{n}": end for (topic, n), end in read_offsets(LOCAL, path).items()}.items():
        assert time.monotonic() < give_up, "the broker did not write the current high watermarks within 300 s"
        time.sleep(0.02)


def clock_after(time_ms: int) -> int:
    """Wait until the clock is later than this time, and return the clock."""
    while (now_ms := time.time_ns() // 1_000_000) <= time_ms:
        time.sleep(0.02)
    return now_ms


def test_the_rows_equal_those_of_sparks_own_source(spark: Any, tmp_path: Path) -> None:
    rng, of_topic = random.Random(SEED), [(TOPIC, number) for number in range(PARTITIONS)]
    properties = {"log.flush.interval.messages": "1", "replica.high.watermark.checkpoint.interval.ms": "100"}
    broker = Broker(tmp_path / "logs", tmp_path / "work", properties=properties)
    with start_client() as client:
        with broker:
            client.connect(broker)
            client.create_topic(TOPIC, PARTITIONS, {"cleanup.policy": "compact", "segment.bytes": "1048576"})
            client.create_topic(BY_BROKER, 1, {"message.timestamp.type": "LogAppendTime"})
            traffic(client, rng, 30, "a")
            between_ms = clock_after(max(record.timestamp_ms for record in client.consume(of_topic)))
            traffic(client, rng, 30, "b")
            client.transaction("open", "begin", "open", timeout_ms=600_000)
            client.produce("open", TOPIC, 0, [(between_ms, b"key-open", b"x")], transactional_id="open")
            client.produce("behind", TOPIC, 0, [(between_ms, b"key-behind", b"held back where it is read_committed")])
            headers = (("h\u00e4", b"\xff"), ("", None))
            client.produce("plain", BY_BROKER, 0, [(5, b"k", b"v", headers), (6, None, b"", ())], codec="lz4")
            client.produce("plain", BY_BROKER, 0, [(7, b"", None, ())])
            wait_for_high_watermarks(broker, client)
            uncommitted, committed = (check_same(spark, broker, TOPIC, level) for level in LEVELS)
            assert len(uncommitted) > len(committed) > 0
            assert len(check_same(spark, broker, BY_BROKER, rng.choice(LEVELS), minPartitions=rng.randint(1, 9))) == 3
            sizes = client.offsets(of_topic)
            ends = {str(n): rng.randrange(1, min(sizes[f"{TOPIC}-{n}"][1], 200)) for n in range(PARTITIONS)}
            starts = {str(n): rng.choice([-2, rng.randrange(ends[str(n)])]) for n in range(PARTITIONS)}
            ranges = {"startingOffsets": json.dumps({TOPIC: starts}), "endingOffsets": json.dumps({TOPIC: ends})}
            check_same(spark, broker, TOPIC, rng.choice(LEVELS), **ranges)
            part = check_same(spark, broker, TOPIC, "read_committed", startingTimestamp=between_ms)
            assert 0 < len(part) < len(committed)
            other = check_same(spark, broker, TOPIC, "read_uncommitted", endingTimestamp=between_ms + 500)
            assert 0 < len(other) < len(uncommitted)
            client.transaction("open", "abort")
            client.wait_until_decided(of_topic)
            client.alter_configs(TOPIC, {"segment.ms": "1"})
            for number in range(PARTITIONS):
                roll_segment(broker, client, (TOPIC, number), between_ms + 10**6, [(b"key-1", b"in the next segment")])
            wait_for_high_watermarks(broker, client)
            level = rng.choice(LEVELS)
            closed, ends = from_stream(spark, broker, TOPIC, level, tmp_path / "checkpoint")
            assert closed == rows(theirs(spark, broker, TOPIC, level, endingOffsets=ends))
            assert len(closed) >= len(committed)
        broker._properties |= {"log.cleaner.enable": "true", "log.cleaner.backoff.ms": "200"}
        with broker:
            client.connect(broker)
            compact_past(broker, client)
            wait_for_high_watermarks(broker, client)
            cleaned = check_same(spark, broker, TOPIC, "read_committed")
            assert len(cleaned) < len(committed)
        assert rows(ours(spark, broker, TOPIC, "read_committed")) == cleaned, (
            "the rows must be the same after the broker has stopped"
        )
