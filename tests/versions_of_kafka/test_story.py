"""A log dir of each version: written by its broker, compacted, started again, read by two clients, and cleaned further.

The traffic covers all codecs, tombstones, LogAppendTime, `compact,delete`, transactions that commit and abort, and the
offsets of a group.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.chance import SEED
from tests.interop.broker import Broker
from tests.interop.broker_client import BrokerClient, ClientError, Served
from tests.interop.broker_story import complaints, keytail, newest_of, state_of
from tests.versions_of_kafka import has_zookeeper
from tests.versions_of_kafka.broker import broker_of
from tests.versions_of_kafka.consumers import java_records, librdkafka_records

pytestmark = [pytest.mark.interop, pytest.mark.spark]

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
# No round of the broker's own cleaner is due before the ratio is lowered. Segments roll by the times of records;
# markers have the broker's time, and so do the records next to them.
SETTINGS = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "1", "segment.ms": "60000"}
TOPICS: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(CODECS, SETTINGS),
    "both": {**SETTINGS, "cleanup.policy": "compact,delete", "retention.ms": "-1"},
    "append-time": {**SETTINGS, "message.timestamp.type": "LogAppendTime", "segment.ms": "300"},
    "transactional": {**SETTINGS, "segment.ms": "300"},
}
PARTITIONS = [(topic, 0) for topic in TOPICS]
BROKER = {"log.cleaner.enable": "true", "log.cleaner.backoff.ms": "200"}
ROUNDS, KEYS = 6, 40
MINUTES_10_MS = 600_000


def produce(client: BrokerClient, topic: str, time_ms: int, number: int) -> None:
    """Write some keys and a few tombstones; for a transactional topic, in a transaction that is committed or aborted.
    """
    draws = random.Random(f"{SEED} {topic} {number}")
    keys = draws.sample(range(KEYS), 25)
    if topic == "transactional":
        time_ms = int(time.time() * 1000)
    records = [
        (time_ms + n, b"key-%d" % key, None if draws.random() < 0.1 else b"%d of round %d " % (key, number) * 5)
        for n, key in enumerate(keys)
    ]
    codec = topic if topic in CODECS else "none"
    if topic != "transactional":
        client.produce(f"to {topic}", topic, 0, records, codec=codec, idempotent=True)
        return
    client.transaction("to transactional", "begin", "id")
    client.produce("to transactional", topic, 0, records, transactional_id="id")
    client.transaction("to transactional", "abort" if number % 3 == 1 else "commit")
    client.wait_until_decided([(topic, 0)])


def _write(client: BrokerClient, first_ms: int) -> None:
    for number in range(ROUNDS):
        for topic in TOPICS:
            produce(client, topic, first_ms + number * MINUTES_10_MS, number)
        time.sleep(0.4)  # the clock rolls the segments of topics with append time


def wait_until_served(client: BrokerClient) -> None:
    """Wait until the topics are served: a broker with ZooKeeper is ready before its controller has sent it its
    partitions.
    """
    give_up = time.monotonic() + 60
    while True:
        try:
            client.wait_until_decided(PARTITIONS)
            return
        except ClientError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.1)


def settings_of(broker: Broker, path: Path) -> tuple[str | Path, ...]:
    """Return the flags that give keytail the settings of the topics: a cluster with ZooKeeper has none in its log dirs.
    """
    config = ("--config", path.parent / "work" / "server.properties")
    if not has_zookeeper(broker.version):
        return config
    lines = [f"{topic}:{key}={value}\n" for topic, settings in TOPICS.items() for key, value in settings.items()]
    path.write_text("".join(lines))
    return (*config, "--topic-configs", path)


def _cleaned_to(log_dir: Path) -> dict[str, int]:
    """Return the entries of the cleaner's checkpoint, by topic."""
    lines = (log_dir / "cleaner-offset-checkpoint").read_text().splitlines()[2:]
    return {topic: int(offset) for topic, _, offset in map(str.split, lines)}


@pytest.mark.one_of("a broker starts on its compacted log dir")
def test_a_broker_of_each_version_continues_with_a_compacted_log_dir(version: str, tmp_path: Path) -> None:
    log_dir = tmp_path / "logs"
    broker = broker_of(version, log_dir, tmp_path / "work", properties=BROKER)
    with broker, BrokerClient() as client:
        client.connect(broker)
        for topic, settings in TOPICS.items():
            client.create_topic(topic, 1, settings)
        begin_ms = int(time.time() * 1000) - 10 * 86_400_000
        _write(client, begin_ms)
        client.commit_offsets("group", "none", 0, range(1, 50))
        before = java_records(broker, PARTITIONS, isolation="read_committed")
        offsets = client.offsets(PARTITIONS)
        broker.stop()

        check_has_no_problems(tmp_path)
        rows = keytail("compact", *settings_of(broker, tmp_path / "topics.txt"), "--force", "--execute")
        assert {row["topic"] for row in rows if row["status"] == "compacted"} >= set(TOPICS)
        check_has_no_problems(tmp_path)
        cleaned_to = _cleaned_to(log_dir)
        assert cleaned_to.keys() >= set(TOPICS)

        broker.start()
        client.connect(broker)
        wait_until_served(client)
        assert client.offsets(PARTITIONS) == offsets
        for isolation in ("read_uncommitted", "read_committed"):
            after = java_records(broker, PARTITIONS, isolation=isolation)
            assert librdkafka_records(broker, PARTITIONS, isolation=isolation) == after
            assert client.consume(PARTITIONS, isolation=isolation) == after
        _compare(before, after)
        assert client.committed_offsets("group") == {"none-0": 49}
        assert not complaints(broker.log_lines())

        _write(client, begin_ms + 2 * ROUNDS * MINUTES_10_MS)
        written = java_records(broker, PARTITIONS, isolation="read_committed")
        for topic in TOPICS:
            client.alter_configs(topic, {**TOPICS[topic], "min.cleanable.dirty.ratio": "0.01"})
        give_up = time.monotonic() + 60
        while any(_cleaned_to(log_dir)[topic] <= cleaned_to[topic] for topic in TOPICS):
            assert time.monotonic() < give_up, f"the broker's cleaner did not continue: {_cleaned_to(log_dir)}"
            time.sleep(0.2)
        _compare(written, librdkafka_records(broker, PARTITIONS, isolation="read_committed"))
        assert not complaints(broker.log_lines())


def check_has_no_problems(path: Path) -> None:
    rows = keytail("verify", "--config", path / "work" / "server.properties")
    assert {row["status"] for row in rows} == {"sound"}, [row for row in rows if row["status"] != "sound"]


def _compare(before: list[Served], after: list[Served]) -> None:
    """Check, for each topic, that fewer records are left, all unchanged, with the latest of each key among them."""
    for topic in TOPICS:
        old, new = ([record for record in records if record.topic == topic] for records in (before, after))
        assert len(new) < len(old), f"nothing was removed from {topic}"
        assert set(new) <= set(old)
        assert state_of(new) == state_of(old)
        assert newest_of(new) == newest_of(old)
