"""An `export` equals the latest records that a read_committed consumer of a real broker receives: beside the running
broker, after it has stopped, and in an update after more traffic. The log has committed, aborted and open transactions,
tombstones, headers and every codec.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from keytail.cli.selection import PartitionFilter
from keytail.export import driver as story
from keytail.export.command import ExportRow, Request
from keytail.export.driver import export
from keytail.export.formats import Formats
from keytail.run.spark.engine import SparkEngine
from tests.chance import SEED
from tests.interop.broker import Broker
from tests.interop.broker_client import BrokerClient, Served
from tests.interop.broker_story import roll_segment, start_client
from tests.run.shared import shared_session

pytestmark = [pytest.mark.interop, pytest.mark.spark]

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
TOPIC, PARTITIONS = "latest", 2
CONFIGS = {"cleanup.policy": "compact", "segment.bytes": "1048576"}
State = set[tuple[Any, ...]]


@pytest.fixture(scope="module")
def spark() -> Any:
    return shared_session()


def traffic(client: BrokerClient, rng: random.Random, batches: int, tag: str) -> None:
    """Write interleaved batches and transactions with all codecs, and leave a transaction in two partitions open."""
    now_ms = time.time_ns() // 1_000_000

    def records() -> list[tuple[Any, ...]]:
        return [
            (now_ms + rng.randrange(1000), b"key-%d" % rng.randrange(60),
             None if rng.random() < 0.2 else rng.randbytes(rng.randrange(60)) * rng.randrange(20),
             tuple((f"h{i}", None if rng.random() < 0.3 else rng.randbytes(i)) for i in range(rng.randrange(3))))
            for _ in range(rng.randrange(1, 30))
        ]  # fmt: skip

    started: set[str] = set()
    for number in range(batches):
        codec, partition = CODECS[number % len(CODECS)], rng.randrange(PARTITIONS)
        if rng.random() < 0.4:
            client.produce(f"plain-{codec}-{tag}", TOPIC, partition, records(), codec=codec)
            continue
        name = f"txn-{codec}-{tag}"
        if name not in started:
            client.transaction(name, "begin", name, timeout_ms=900_000)
            started.add(name)
        client.produce(name, TOPIC, partition, records(), codec=codec, transactional_id=name)
        if rng.random() < 0.4:
            client.transaction(name, rng.choice(["commit", "abort"]))
            started.discard(name)
    for name in sorted(started):
        client.transaction(name, rng.choice(["commit", "abort"]))
    client.wait_until_decided([(TOPIC, n) for n in range(PARTITIONS)])


def folded(records: Iterable[Served]) -> State:
    newest: dict[tuple[int, bytes | None], Served] = {}
    for record in records:
        newest[record.partition, record.key] = record
    return {
        (item.partition, item.key, item.value, item.headers, item.timestamp_ms, item.offset)
        for item in newest.values()
        if item.value is not None
    }


def consumed(client: BrokerClient) -> State:
    return folded(client.consume([(TOPIC, n) for n in range(PARTITIONS)], isolation="read_committed"))


def table(spark: Any, path: Path) -> State:
    frame = spark.read.format("delta").load(str(path / TOPIC)).selectExpr("*", "unix_millis(timestamp) AS ms")
    rows = [
        (row.partition, bytes(row.key), bytes(row.value),
         tuple((item.key, None if item.value is None else bytes(item.value)) for item in row.headers), row.ms,
         row.offset)
        for row in frame.collect()
    ]  # fmt: skip
    assert len(set(rows)) == len(rows)
    return set(rows)


def run(broker: Broker, to: Path, **flags: Any) -> list[ExportRow]:
    partition_filter = PartitionFilter(log_dirs=(str(broker.log_dirs[0]),), topics=(TOPIC,))
    return export(Request(partition_filter, str(to), Formats(), execute=True, **flags))


def test_an_export_equals_the_latest_records_of_a_consumer(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(story, "session_of_run", lambda *_, **__: SparkEngine(spark))
    rng, lake = random.Random(SEED), tmp_path / "lake"
    broker = Broker(tmp_path / "logs", tmp_path / "work", properties={"log.flush.interval.messages": "1"})
    with start_client() as client:
        with broker:
            client.connect(broker)
            client.create_topic(TOPIC, PARTITIONS, CONFIGS)
            traffic(client, rng, 40, "a")
            client.transaction("open", "begin", "open", timeout_ms=600_000)
            for partition in range(PARTITIONS):
                client.produce("open", TOPIC, partition, [(1, b"key-open", b"x")], transactional_id="open")
            client.produce("behind", TOPIC, 0, [(1, b"key-behind", b"what is open holds it back")])
            rows = run(broker, lake, high_watermark="log-end")
            assert [(row.status, row.strategy) for row in rows] == [("exported", "full")] * PARTITIONS, rows
            assert all("open transaction" in " ".join(row.notes) for row in rows)
            seen = consumed(client)
            assert table(spark, lake) == seen
            assert seen != folded(client.consume([(TOPIC, n) for n in range(PARTITIONS)])), (
                "the log has no uncommitted records"
            )
            assert not {b"key-open", b"key-behind"} & {row[1] for row in seen}
            client.transaction("open", "commit")
            traffic(client, rng, 40, "b")
            expected = consumed(client)
            assert b"key-open" in {row[1] for row in expected}
        rows = run(broker, lake)  # the high watermarks of a stopped broker are its log end offsets
        assert [(row.status, row.strategy) for row in rows] == [("exported", "incremental")] * PARTITIONS, rows
        assert table(spark, lake) == expected
        assert all(row.status == "exported" for row in run(broker, tmp_path / "anew"))
        assert table(spark, tmp_path / "anew") == expected
        on = {"log.cleaner.enable": "true", "log.cleaner.backoff.ms": "200"}
        broker._properties |= on
        with broker:
            client.connect(broker)
            assert consumed(client) == expected
            compact_past(broker, client)
            expected = consumed(client)
        rows = run(broker, lake)
        assert [(row.status, row.strategy) for row in rows] == [("exported", "full")] * PARTITIONS, rows
        assert table(spark, lake) == expected


def compact_past(broker: Broker, client: BrokerClient) -> None:
    """Wait until the broker's own cleaner has cleaned past the last exported offset."""
    before = {n: client.offsets([(TOPIC, n)])[f"{TOPIC}-{n}"][1] for n in range(PARTITIONS)}
    client.alter_configs(TOPIC, {"segment.ms": "1", "min.cleanable.dirty.ratio": "0", "delete.retention.ms": "0"})
    now_ms = time.time_ns() // 1_000_000
    for n in range(PARTITIONS):
        for round_ in range(2):
            roll_segment(broker, client, (TOPIC, n), now_ms + 10**6 * round_, [(b"key-1", b"new"), (b"k", None)])
    give_up = time.monotonic() + 300
    while any(_cleaned_to(broker, n) <= before[n] for n in before):
        assert time.monotonic() < give_up, "the broker's cleaner did not clean"
        time.sleep(0.2)


def _cleaned_to(broker: Broker, number: int) -> int:
    path = broker.log_dirs[0] / "cleaner-offset-checkpoint"
    lines = path.read_text().splitlines()[2:] if path.exists() else []
    return next((int(line.split()[2]) for line in lines if line.split()[:2] == [TOPIC, str(number)]), 0)
