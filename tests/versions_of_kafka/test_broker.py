"""Brokers of each version start, stop, start after a kill, and serve the same records to independent clients."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interop.broker_client import BrokerClient
from tests.versions_of_kafka.broker import broker_of
from tests.versions_of_kafka.consumers import java_records, librdkafka_records

pytestmark = [pytest.mark.interop, pytest.mark.soak("test_story.py: a start and a stop, with the same two clients")]


def test_a_broker_serves_the_same_records_to_each_client(version: str, tmp_path: Path) -> None:
    everything = [("t", 0), ("t", 1)]
    with broker_of(version, tmp_path / "logs", tmp_path / "work") as broker, BrokerClient() as client:
        client.connect(broker)
        client.create_topic("t", 2, {"cleanup.policy": "compact"})
        for codec in ("none", "gzip", "snappy", "lz4", "zstd"):
            records = [(1_000, b"k", b"v", [("h", b"x"), ("n", None)]), (1_001, b"k2", None)]
            client.produce(f"of-{codec}", "t", 0, records, codec=codec)
        broker.kill()
        broker.start()
        client.produce("of-none", "t", 1, [(1_003, b"k3", b"v3")])
        wanted = client.consume(everything)
        assert [record.offset for record in wanted] == [*range(10), 0]
        assert java_records(broker, everything) == wanted
        assert librdkafka_records(broker, everything) == wanted
        assert "t-0" in {path.name for path in (tmp_path / "logs").iterdir()}
