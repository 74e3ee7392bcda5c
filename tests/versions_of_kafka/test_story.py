"""A broker of each version writes a log dir; keytail compacts or repacks it; the broker starts again, two clients read,
and the broker's own cleaner continues.

The traffic covers all codecs, tombstones, LogAppendTime, `compact,delete`, transactions that commit and abort, and the
offsets of a group.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.chance import chance
from tests.interop.broker_client import BrokerClient
from tests.interop.broker_story import complaints, keytail
from tests.versions_of_kafka.broker import broker_of
from tests.versions_of_kafka.consumers import java_records, librdkafka_records
from tests.versions_of_kafka.topics import (
    CLEANER_PROPERTIES,
    DAYS_10_MS,
    MINUTES_10_MS,
    PARTITIONS,
    TOPICS,
    check_has_no_problems,
    check_latest_records_are_retained,
    produce,
    settings_of,
    wait_until_served,
)

pytestmark = [pytest.mark.interop, pytest.mark.spark]

ROUNDS = 6


def _write(client: BrokerClient, first_ms: int) -> None:
    for number in range(ROUNDS):
        for topic in TOPICS:
            produce(client, topic, first_ms + number * MINUTES_10_MS, number)
        time.sleep(0.4)  # segments of `append-time` roll by the clock


def _cleaned_to(log_dir: Path) -> dict[str, int]:
    """Return the entries of the cleaner's checkpoint, by topic."""
    lines = (log_dir / "cleaner-offset-checkpoint").read_text().splitlines()[2:]
    return {topic: int(offset) for topic, _, offset in map(str.split, lines)}


@pytest.mark.one_of("a broker starts on its compacted log dir")
def test_a_broker_of_each_version_continues_with_a_compacted_log_dir(version: str, tmp_path: Path) -> None:
    log_dir = tmp_path / "logs"
    broker = broker_of(version, log_dir, tmp_path / "work", properties=CLEANER_PROPERTIES)
    with broker, BrokerClient() as client:
        client.connect(broker)
        for topic, settings in TOPICS.items():
            client.create_topic(topic, 1, settings)
        begin_ms = int(time.time() * 1000) - DAYS_10_MS
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
        check_latest_records_are_retained(before, after)
        assert client.committed_offsets("group") == {"none-0": 49}
        assert not complaints(broker.log_lines())

        _write(client, begin_ms + 2 * ROUNDS * MINUTES_10_MS)
        written = java_records(broker, PARTITIONS, isolation="read_committed")
        for topic in TOPICS:
            client.alter_configs(topic, {**TOPICS[topic], "min.cleanable.dirty.ratio": "0.01"})
        give_up = time.monotonic() + 300
        while any(_cleaned_to(log_dir)[topic] <= cleaned_to[topic] for topic in TOPICS):
            assert time.monotonic() < give_up, f"the broker's cleaner did not continue: {_cleaned_to(log_dir)}"
            time.sleep(0.2)
        check_latest_records_are_retained(written, librdkafka_records(broker, PARTITIONS, isolation="read_committed"))
        assert not complaints(broker.log_lines())


@pytest.mark.one_of("a broker starts on its repacked log dir")
def test_a_broker_of_each_version_serves_a_repacked_log_dir(version: str, tmp_path: Path) -> None:
    log_dir = tmp_path / "logs"
    broker = broker_of(version, log_dir, tmp_path / "work", properties=CLEANER_PROPERTIES)
    with broker, BrokerClient() as client:
        client.connect(broker)
        for topic, settings in TOPICS.items():
            client.create_topic(topic, 1, settings)
        begin_ms = int(time.time() * 1000) - DAYS_10_MS
        for number in range(30):  # a batch each
            for codec in ("none", "lz4"):
                client.produce("plain", codec, 0, [(begin_ms + number, b"key", b"%d" % number)], codec=codec)
        _write(client, begin_ms)
        offsets, rng = client.offsets(PARTITIONS), chance()
        asked = {item: sorted(rng.randrange(offsets[f"{item[0]}-0"][1]) for _ in range(20)) for item in PARTITIONS}
        times = [begin_ms + rng.randrange(ROUNDS * MINUTES_10_MS) for _ in range(20)]

        def served() -> list[object]:
            answers: list[object] = [client.first_from(*item, asked[item]) for item in PARTITIONS]
            answers += [client.offsets_for_times(*item, times) for item in PARTITIONS]
            for isolation in ("read_uncommitted", "read_committed"):
                answers.append(java_records(broker, PARTITIONS, isolation=isolation))
                assert librdkafka_records(broker, PARTITIONS, isolation=isolation) == answers[-1]
            return answers

        before = served()
        broker.stop()
        # With ZooKeeper, dynamic settings are not in the log dirs.
        expiration = ("--topic-config", "producer.id.expiration.ms=86400000")
        unclean = ("--topic-config", "unclean.leader.election.enable=false")
        forget = rng.choice([(), ("--forget-producers", *expiration)])
        flags = ("--repack", "--replicas-in-sync", *unclean, "--compression", "zstd", *forget, "--execute")
        given = settings_of(broker, tmp_path / "topics.txt")
        rows = keytail("compact", *given, *flags)
        done = {row["topic"]: row for row in rows if row["status"] == "repacked"}
        assert done.keys() >= {"none", "gzip", "snappy", "lz4"}
        assert all(done[topic]["batches_after"] <= done[topic]["batches_before"] - 29 for topic in ("none", "lz4"))
        again = [row for row in keytail("compact", *given, *flags) if row["topic"] in TOPICS]
        assert {row["status"] for row in again} == {"clean"}, [row["error"] for row in again]
        check_has_no_problems(tmp_path)

        broker.start()
        client.connect(broker)
        wait_until_served(client)
        assert client.offsets(PARTITIONS) == offsets
        assert served() == before
        assert not complaints(broker.log_lines())
