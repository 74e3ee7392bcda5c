"""`compact --roll-active` on the log dir of a broker of each version, with two interrupted rolls; then the broker
starts, serves the latest records, and appends to the new segments.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.interop.broker import Broker
from tests.interop.broker_client import BrokerClient, Served
from tests.interop.broker_story import complaints, keytail
from tests.versions_of_kafka import has_zookeeper
from tests.versions_of_kafka.broker import broker_of
from tests.versions_of_kafka.consumers import java_records
from tests.versions_of_kafka.topics import (
    CLEANER_PROPERTIES,
    DAYS_10_MS,
    PARTITIONS,
    TOPICS,
    check_has_no_problems,
    check_one_record_per_key,
    produce,
    settings_of,
    wait_until_served,
)

pytestmark = [pytest.mark.interop]

COMMITS = 300
# By topic, the files that a roll has created if it is stopped before it creates the `.log`.
INTERRUPTED = {"zstd": (".index",), "gzip": (".index", ".timeindex")}
ROLLED = [topic for topic in TOPICS if topic not in INTERRUPTED]


def _write(client: BrokerClient, first_ms: int) -> None:
    """Write to all topics within `segment.ms`, so that all records are in the active segment."""
    for number in range(4):
        for topic in TOPICS:
            produce(client, topic, first_ms + number, number)


def _served(broker: Broker) -> list[Served]:
    return java_records(broker, PARTITIONS, isolation="read_committed")


def _logs(log_dir: Path, topic: str) -> list[tuple[int, int]]:
    """Return the base offset and size of each segment of partition 0."""
    return sorted((int(path.stem), path.stat().st_size) for path in (log_dir / f"{topic}-0").glob("*.log"))


def _bytes_of_offsets(log_dir: Path) -> int:
    return sum(path.stat().st_size for path in log_dir.glob("__consumer_offsets-*/*.log"))


def test_a_broker_starts_on_rolled_and_compacted_logs_and_appends(version: str, tmp_path: Path) -> None:
    log_dir = tmp_path / "logs"
    broker = broker_of(version, log_dir, tmp_path / "work", properties=CLEANER_PROPERTIES)
    with broker, BrokerClient() as client:
        client.connect(broker)
        for topic, settings in TOPICS.items():
            client.create_topic(topic, 1, settings)
        _write(client, int(time.time() * 1000) - DAYS_10_MS)
        client.commit_offsets("group", "none", 0, range(1, COMMITS))
        before, offsets = _served(broker), client.offsets(PARTITIONS)
        broker.stop()

        before_bytes = _bytes_of_offsets(log_dir)
        flags = (*settings_of(broker, tmp_path / "topics.txt"), "--force", "--execute")
        if has_zookeeper(version):
            with (tmp_path / "topics.txt").open("a") as file:
                file.write("__consumer_offsets:cleanup.policy=compact\n")
        chosen = ("--topic-list", ",".join([*ROLLED, "__consumer_offsets"]))
        plain = {row["topic"]: row["status"] for row in keytail("compact", *flags, *chosen)}
        assert plain["none"] == plain["__consumer_offsets"] == "clean", "all records are in active segments"
        rows = keytail("compact", *flags, *chosen, "--roll-active")
        rolled = {row["topic"] for row in rows if row["active_segment"] == "rolled"}
        assert rolled == {*ROLLED, "__consumer_offsets"}, rows
        after_bytes = _bytes_of_offsets(log_dir)
        print(f"Kafka {version}: __consumer_offsets {before_bytes} -> {after_bytes} bytes")
        assert after_bytes < before_bytes / 50
        check_has_no_problems(tmp_path)
        assert all(_logs(log_dir, topic)[-1][1] == 0 for topic in ROLLED)
        again = keytail("compact", *flags, *chosen, "--roll-active")
        assert {row["status"] for row in again} == {"clean"}
        interrupted = [path for topic, suffixes in INTERRUPTED.items() for path in _interrupt(log_dir, topic, suffixes)]

        broker.start()
        client.connect(broker)
        wait_until_served(client)
        assert client.offsets(PARTITIONS) == offsets
        assert not any(path.exists() for path in interrupted)
        after = _served(broker)
        check_one_record_per_key(before, after, unchanged=INTERRUPTED)
        assert client.committed_offsets("group") == {"none-0": COMMITS - 1}
        _write(client, int(time.time() * 1000) - DAYS_10_MS)
        assert len(_served(broker)) > len(after)
        names = [path.name for path in interrupted]
        removed = [line for line in complaints(broker.log_lines()) if any(name in line.text for name in names)]
        assert len(removed) == len(names)
        assert complaints(broker.log_lines()) == removed
        broker.stop()


def _interrupt(log_dir: Path, topic: str, suffixes: Sequence[str]) -> list[Path]:
    """Create the files that a roll creates first, and return them. The latest snapshot is at the log end."""
    newest = max((log_dir / f"{topic}-0").glob("*.snapshot"))
    created = [newest.with_suffix(suffix) for suffix in suffixes]
    for path in created:
        path.touch()
    return created
