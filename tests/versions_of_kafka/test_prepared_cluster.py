"""Compactions that are prepared and committed on each broker of a cluster of three in turn, while clients continue to
write.

Producers (idempotent, transactional with aborts, one with a transaction that stays open over many restarts) write while
brokers are down, the brokers' cleaners and retention work on some topics, and segments roll. After each restart, the
broker follows the leaders from its log end, and consumers receive what was written. At the end the replicas are equal.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.chance import chance
from tests.interop.broker import Broker, LogLine
from tests.interop.broker_client import BrokerClient, ClientError, Served
from tests.interop.broker_story import complaints, keytail, newest_of
from tests.ports import free_ports
from tests.versions_of_kafka.broker import ClusterBroker, controller_of
from tests.versions_of_kafka.consumers import java_records, librdkafka_records

pytestmark = [
    pytest.mark.interop,
    pytest.mark.soak("test_prepared.py: one broker of each version, whose consumers, cleaner and log are the same"),
]

RESTARTS = int(os.environ.get("KEYTAIL_ROLLS", "100"))  # restarts of one broker each
BROKERS = (1, 2, 3)
PROPERTIES = {
    "controlled.shutdown.enable": "true",
    "default.replication.factor": "3",
    "log.cleaner.backoff.ms": "200",
    "log.cleaner.enable": "true",
    "log.flush.offset.checkpoint.interval.ms": "200",
    "log.initial.task.delay.ms": "100",
    "log.retention.check.interval.ms": "1000",
    "log.segment.delete.delay.ms": "1000",
    "offsets.topic.num.partitions": "1",
    "offsets.topic.replication.factor": "3",
    "replica.high.watermark.checkpoint.interval.ms": "200",
    "transaction.state.log.min.isr": "2",
    "transaction.state.log.replication.factor": "3",
    # The maximum that brokers allow: the open transaction outlives many restarts.
    "transaction.max.timeout.ms": "7200000",
}
# Segments roll by the times of records. No round of the brokers' own cleaners is due, except for `cleaned`.
SETTINGS = {
    "cleanup.policy": "compact",
    "min.cleanable.dirty.ratio": "1",
    "min.insync.replicas": "2",
    "segment.ms": "60000",
}
TOPICS: Mapping[str, Mapping[str, str]] = {
    "plain": SETTINGS,
    "lz4": SETTINGS,
    "transactional": {**SETTINGS, "segment.ms": "2000"},
    "held": {**SETTINGS, "segment.ms": "2000"},  # has an open transaction
    "cleaned": {**SETTINGS, "min.cleanable.dirty.ratio": "0.01"},
    "both": {**SETTINGS, "cleanup.policy": "compact,delete", "retention.ms": str(11 * 86_400_000)},
}
OWN = ("plain", "lz4", "transactional", "held")  # only keytail replaces files of these topics
PARTITIONS = [(topic, 0) for topic in TOPICS]
LOGGERS = {
    "AbstractIndex",
    "Cleaner",
    "LocalLog",
    "LogCleaner",
    "LogDirFailureHandler",
    "LogLoader",
    "LogManager",
    "LogSegment",
    "OffsetIndex",
    "ProducerStateManager",
    "TimeIndex",
    "UnifiedLog",
}
KEYS = 40
MINUTES_10_MS = 600_000
OPEN_MS = 7_000_000


class Writers:
    """Write to all topics in a thread, with times that make segments roll; `latest` has what consumers must receive.

    Producers retry requests that fail while leaders change.
    """

    def __init__(self, bootstrap: Broker) -> None:
        self._client = BrokerClient(heap="256m")
        self._client.connect(bootstrap)
        self._time_ms = int(time.time() * 1000) - 10 * 86_400_000
        self._number = 0
        self._pause, self._paused, self._end = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.written = threading.Semaphore(0)
        self.latest: dict[tuple[str, bytes], bytes | None] = {}
        self.failed: BaseException | None = None

    def __enter__(self) -> Writers:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._pause.clear()
        self._thread.join()
        self._client.close()
        if self.failed is not None:
            raise self.failed

    def wait_for(self, times: int) -> None:
        """Wait until all topics have been written to this many times more."""
        while self.written.acquire(blocking=False):
            pass
        for _ in range(times):
            assert self.written.acquire(timeout=120), self.failed

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause writing; all transactions but the open one have ended."""
        self._paused.clear()
        self._pause.set()
        assert self._paused.wait(120), self.failed
        self._client.wait_until_decided([(topic, 0) for topic in TOPICS if topic != "held"])
        yield
        self._pause.clear()

    def _run(self) -> None:
        try:
            self._write_held()
            while not self._end.is_set():
                if self._pause.is_set():
                    self._paused.set()
                    time.sleep(0.05)
                    continue
                for topic in TOPICS:
                    self._write(topic)
                self._number += 1
                self._time_ms += MINUTES_10_MS
                self.written.release()
                self._end.wait(0.1)
        except BaseException as error:
            self.failed = error

    def _write(self, topic: str) -> None:
        records = self._records(topic)
        if topic == "held":
            if self._number % 40 == 39:
                self._client.transaction("held", "commit")
                self._write_held()
            return
        if topic == "transactional":
            self._client.transaction("to transactional", "begin", "id")
            self._client.produce("to transactional", topic, 0, records, transactional_id="id")
            if self._number % 3 == 1:
                self._client.transaction("to transactional", "abort")
                return
            self._client.transaction("to transactional", "commit")
        else:
            codec = "lz4" if topic == "lz4" else "none"
            self._client.produce(f"to {topic}", topic, 0, records, codec=codec, idempotent=True)
        self.latest.update({(topic, key): value for _, key, value in records})

    def _write_held(self) -> None:
        """Write records that can be cleaned, and then begin a transaction, which stays open."""
        for _ in range(3):
            records = self._records("held")
            self._client.produce("before held", "held", 0, records, idempotent=True)
            self.latest.update({("held", key): value for _, key, value in records})
            time.sleep(2.1)  # segments of this topic roll by the brokers' clock
        self._client.transaction("held", "begin", "held", timeout_ms=OPEN_MS)
        records = [(int(time.time() * 1000), b"held-%d" % self._number, b"in a transaction")]
        self._client.produce("held", "held", 0, records, transactional_id="held")

    def _records(self, topic: str) -> list[tuple[int, bytes, bytes | None]]:
        by_clock = topic in ("transactional", "held")
        time_ms = int(time.time() * 1000) if by_clock else self._time_ms
        keys = chance().sample(range(KEYS), 25)
        return [
            (time_ms + n, b"key-%d" % key, None if chance().random() < 0.1 else b"%d, " % self._number * 20)
            for n, key in enumerate(keys)
        ]


def test_brokers_of_a_cluster_are_restarted_with_prepared_compactions(tmp_path: Path) -> None:
    ports = free_ports(1)
    controller = controller_of(tmp_path / "controller", ports[0])
    brokers = {
        number: ClusterBroker(number, ports[0], tmp_path / f"b{number}", properties=PROPERTIES) for number in BROKERS
    }
    found: Counter[str] = Counter()
    down_s: list[float] = []
    with ExitStack() as cluster:
        controller.start()
        cluster.callback(controller.kill)
        for broker in brokers.values():
            cluster.enter_context(broker)
        admin = cluster.enter_context(BrokerClient(heap="256m"))
        admin.connect(brokers[1])
        for topic, settings in TOPICS.items():
            admin.create_topic(topic, 1, settings, replicas=3)
        with Writers(brokers[1]) as writers:
            writers.wait_for(5)
            for roll in range(RESTARTS):
                number = BROKERS[roll % 3]
                found.update(_restart_with_commit(brokers[number], writers, down_s))
                other = brokers[BROKERS[(roll + 1) % 3]]
                admin.connect(other)
                _wait_until_in_sync(admin)
                if roll % 3 == 2:
                    with writers.paused():
                        _check_consumers(other, writers.latest)
                print(f"roll {roll + 1} of {RESTARTS}: down for {down_s[-1]:.1f} s, {dict(found)}", flush=True)
            with writers.paused():
                _wait_until_in_sync(admin)
    replicas = [text for number in BROKERS for text in ("--replica", f"b{number}={tmp_path / f'b{number}' / 'logs'}")]
    rows = keytail("audit", *replicas, "--topic-list", ",".join(TOPICS))
    assert {row["status"] for row in rows} == {"alike"}, rows
    assert found["committed"] >= 2 * RESTARTS


def _restart_with_commit(broker: ClusterBroker, writers: Writers, down_s: list[float]) -> list[str]:
    """Prepare on the running broker, stop it, commit, start it, and return the result of each preparation."""
    config = ("--config", broker.work_dir / "server.properties")
    writers.wait_for(chance().randrange(1, 4))
    keytail("compact", *config, "--force", "--prepare", "--topic-list", ",".join(TOPICS))
    writers.wait_for(chance().randrange(1, 3))
    assert not _of_logs(broker)
    stopped_s = time.monotonic()
    broker.stop()
    flags = ("--force", "--execute", "--prepared-only", "--topic-list", ",".join(TOPICS))
    rows = keytail("compact", *config, *flags)
    logs = [sorted((broker.log_dirs[0] / f"{topic}-0").glob("*.log")) for topic in OWN]
    closed = {path: _identity(path) for paths in logs for path in paths[:-1]}
    ends = [row["prepared"] for row in rows if row["prepared"]]
    if chance().random() < 0.2:
        verified = keytail("verify", *config)
        assert {row["status"] for row in verified} == {"sound"}, [row for row in verified if row["status"] != "sound"]
    broker.start()
    down_s.append(time.monotonic() - stopped_s)
    writers.wait_for(2)
    # Nothing was fetched again: the segments are the same files as before.
    assert {path: _identity(path) for path in closed} == closed
    assert not _of_logs(broker)
    return [text if text == "committed" else text.partition("[")[2].rstrip("]") for text in ends]


def _identity(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _of_logs(broker: Broker) -> list[LogLine]:
    """Return the broker's complaints about logs; others are about connections to brokers that are down."""
    return [line for line in complaints(broker.log_lines()) if line.logger.rpartition(".")[2] in LOGGERS]


def _wait_until_in_sync(admin: BrokerClient) -> None:
    give_up = time.monotonic() + 120
    while True:
        try:
            topics = admin.describe_topics()
            if all(topics[topic]["in_sync"] == len(BROKERS) for topic in TOPICS):
                return
        except ClientError:
            topics = {}
        assert time.monotonic() < give_up, {name: topic["in_sync"] for name, topic in topics.items()}
        time.sleep(0.1)


def _check_consumers(broker: Broker, latest: Mapping[tuple[str, bytes], bytes | None]) -> None:
    records = java_records(broker, PARTITIONS, isolation="read_committed")
    assert librdkafka_records(broker, PARTITIONS, isolation="read_committed") == records
    assert _state(records) == {key: value for key, value in latest.items() if value is not None}


def _state(records: list[Served]) -> dict[tuple[str, bytes], bytes]:
    by_topic: dict[str, list[Served]] = {topic: [] for topic in TOPICS}
    for record in records:
        by_topic[record.topic].append(record)
    return {
        (topic, key): record.value
        for topic, of_topic in by_topic.items()
        for (_, key), record in newest_of(of_topic).items()
        if key is not None and record.value is not None and not key.startswith(b"held-")
    }
