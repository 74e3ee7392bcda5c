"""Compactions that are prepared beside a running broker of each version, and committed when it has stopped.

During the preparation, clients write and segments roll; after it, the broker's cleaner cleans some topics. Each round
ends with a stop, a commit and a start, after which consumers get the same records. A soak run makes a hundred rounds.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.chance import chance
from tests.interop.broker import Broker
from tests.interop.broker_client import BrokerClient
from tests.interop.broker_story import complaints, keytail
from tests.interop.kafka import VERSION
from tests.versions_of_kafka.broker import broker_of
from tests.versions_of_kafka.consumers import java_records
from tests.versions_of_kafka.topics import (
    DAYS_10_MS,
    MINUTES_10_MS,
    PARTITIONS,
    TOPICS,
    check_has_no_problems,
    check_latest_records_except_tombstones,
    produce,
    settings_of,
    wait_until_served,
)

pytestmark = [pytest.mark.interop]

ROUNDS = 100 if os.environ.get("KEYTAIL_SOAK") == "1" else 1
PROPERTIES = {
    "log.cleaner.enable": "true",
    "log.cleaner.backoff.ms": "100",
    "log.flush.offset.checkpoint.interval.ms": "200",
    "replica.high.watermark.checkpoint.interval.ms": "200",
    "log.segment.delete.delay.ms": "1000",
    "log.initial.task.delay.ms": "100",
}


class Traffic:
    """Writes to all topics in a thread until it is stopped, with timestamps that make segments roll."""

    def __init__(self, client: BrokerClient, first_ms: int, number: int) -> None:
        self._client, self._time_ms, self._number = client, first_ms, number
        self._stop = threading.Event()
        self._written = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run)
        self.failed: BaseException | None = None

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self.failed is not None:
            raise self.failed

    def wait_for(self, times: int) -> None:
        """Wait until all topics have been written to `times` more times."""
        for _ in range(times):
            assert self._written.acquire(timeout=300), self.failed

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                for topic in TOPICS:
                    produce(self._client, topic, self._time_ms, self._number)
                self._number += 1
                self._time_ms += MINUTES_10_MS
                self._written.release()
                self._stop.wait(0.2)  # each write begins a new segment in each topic
        except BaseException as error:
            self.failed = error
            self._written.release(100)

    @property
    def next_ms(self) -> int:
        return self._time_ms

    @property
    def next_number(self) -> int:
        return self._number


def _wait_until_cleaned(log_dir: Path) -> None:
    """Wait until the broker's cleaner does nothing: twice in a row, no file of a cleaning is found."""
    give_up, times = time.monotonic() + 300, 0
    while times < 2:
        assert time.monotonic() < give_up, "the cleaner does not end"
        time.sleep(0.2)
        times = 0 if _has_files_of_cleaner(log_dir) else times + 1


def _has_files_of_cleaner(log_dir: Path) -> bool:
    return any(path.suffix in (".cleaned", ".swap", ".deleted") for path in log_dir.glob("*-0/*"))


def _wait_for_checkpoints(log_dir: Path) -> None:
    """Wait until the recovery point of every topic is above 0: a preparation ends at the recovery point."""
    give_up = time.monotonic() + 300
    while True:
        path = log_dir / "recovery-point-offset-checkpoint"
        lines = path.read_text().splitlines()[2:] if path.exists() else []
        flushed = {line.split()[0]: int(line.split()[2]) for line in lines}
        if all(flushed.get(topic, 0) > 0 for topic in TOPICS):
            return
        assert time.monotonic() < give_up, f"a recovery point is still 0: {flushed}"
        time.sleep(0.1)


def test_consumers_get_the_same_records_after_a_prepared_compaction_is_committed(version: str, tmp_path: Path) -> None:
    log_dir = tmp_path / "logs"
    broker = broker_of(version, log_dir, tmp_path / "work", properties=PROPERTIES)
    found: Counter[str] = Counter()
    with broker, BrokerClient() as client:
        client.connect(broker)
        for topic, settings in TOPICS.items():
            client.create_topic(topic, 1, settings)
        first_ms, number, draws = int(time.time() * 1000) - DAYS_10_MS, 0, chance()
        for round_number in range(ROUNDS):
            cleaned = draws.sample(sorted(TOPICS), 2)  # topics that the broker cleans after the preparation
            with Traffic(client, first_ms, number) as traffic:
                traffic.wait_for(4)
                _wait_for_checkpoints(log_dir)
                rows = keytail("compact", *settings_of(broker, tmp_path / "topics.txt"), "--force", "--prepare")
                found.update(row["status"] for row in rows if row["topic"] in TOPICS)
                traffic.wait_for(1)
            for topic in cleaned:
                client.alter_configs(topic, {**TOPICS[topic], "min.cleanable.dirty.ratio": "0.01"})
            with Traffic(client, traffic.next_ms, traffic.next_number) as traffic:
                traffic.wait_for(draws.randrange(1, 4))
            first_ms, number = traffic.next_ms, traffic.next_number
            for topic in cleaned:
                client.alter_configs(topic, TOPICS[topic])
            client.wait_until_decided(PARTITIONS)
            before = java_records(broker, PARTITIONS, isolation="read_committed")
            offsets = client.offsets(PARTITIONS)
            if round_number:  # at its first start, a broker logs warnings
                assert not complaints(broker.log_lines())
            _wait_until_cleaned(log_dir)
            broker.stop()
            found.update(_commit(broker, tmp_path))
            broker.start()
            client.connect(broker)
            wait_until_served(client)
            assert client.offsets(PARTITIONS) == offsets
            check_latest_records_except_tombstones(before, java_records(broker, PARTITIONS, isolation="read_committed"))
            assert not complaints(broker.log_lines())
    print(f"Kafka {version}, {ROUNDS} rounds: {dict(found)}")
    assert found["prepared"] > ROUNDS
    assert found["committed"] > ROUNDS


@pytest.mark.soak("compact/prepared/test_committing.py: a preparation remains valid if a later version appends")
def test_a_later_version_continues_on_prepared_partitions_and_their_commit_succeeds(tmp_path: Path) -> None:
    """The features of the metadata log are not upgraded to those of the later version."""
    broker = broker_of("3.9.1", tmp_path / "logs", tmp_path / "work", properties=PROPERTIES)
    with broker, BrokerClient() as client:
        client.connect(broker)
        for topic, settings in TOPICS.items():
            client.create_topic(topic, 1, settings)
        with Traffic(client, int(time.time() * 1000) - DAYS_10_MS, 0) as traffic:
            traffic.wait_for(4)
            _wait_for_checkpoints(tmp_path / "logs")
            rows = keytail("compact", *settings_of(broker, tmp_path / "topics.txt"), "--force", "--prepare")
            assert {row["status"] for row in rows if row["topic"] in TOPICS} == {"prepared"}
        broker.stop()
        broker.version = VERSION
        broker.start()
        client.connect(broker)
        with Traffic(client, traffic.next_ms, traffic.next_number) as traffic:
            traffic.wait_for(3)
        client.wait_until_decided(PARTITIONS)
        before = java_records(broker, PARTITIONS, isolation="read_committed")
        assert not complaints(broker.log_lines())
        broker.stop()
        assert _commit(broker, tmp_path).count("committed") >= len(TOPICS)
        broker.start()
        client.connect(broker)
        wait_until_served(client)
        check_latest_records_except_tombstones(before, java_records(broker, PARTITIONS, isolation="read_committed"))
        assert not complaints(broker.log_lines())


def _commit(broker: Broker, tmp_path: Path) -> list[str]:
    """Commit the prepared compactions; return the result of each: `committed`, or the slug of the reason."""
    check_has_no_problems(tmp_path)
    flags = ("--force", "--execute", "--prepared-only")
    rows = keytail("compact", *settings_of(broker, tmp_path / "topics.txt"), *flags)
    check_has_no_problems(tmp_path)
    ended = [row["prepared"] for row in rows if row["prepared"]]
    assert {row["status"] for row in rows if row["prepared"] == "committed"} <= {"compacted"}
    assert not list((tmp_path / "logs").glob("*/*.clean")), "prepared files remain after the commit"
    return [text if text == "committed" else text.partition("[")[2].rstrip("]") for text in ended]
