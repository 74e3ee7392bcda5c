"""Compactions that are prepared and committed on each broker of a cluster of three in turn, while clients write.

Producers are idempotent or transactional, some transactions abort, and one is open during many restarts. Cleaners and
retention of the brokers work on some topics, and segments roll. The amount written before each step is random. Some
preparations and commits are killed, and the broker may start on what they left. After each restart the broker must
fetch only what follows its log end, and consumers must get what was written. At the end `audit` compares the replicas.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.chance import SEED, chance
from tests.interop.broker import Broker, LogLine
from tests.interop.broker_client import BrokerClient, Served
from tests.interop.broker_story import KEYTAIL, complaints, keytail, latest_by_key
from tests.interop.kafka import VERSION
from tests.versions_of_kafka.broker import ClusterBroker, ZooKeeperMember
from tests.versions_of_kafka.cluster import Cluster, wait_until_in_sync
from tests.versions_of_kafka.consumers import java_records, librdkafka_records
from tests.versions_of_kafka.test_swap_states import REBUILDS

pytestmark = [
    pytest.mark.interop,
    pytest.mark.soak("test_prepared.py: one broker of each version, with the same consumers, cleaner and checks"),
]

ROLLS = int(os.environ.get("KEYTAIL_ROLLS", "100"))  # the number of restarts of one broker
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
    "replica.lag.time.max.ms": "30000",
    "transaction.state.log.min.isr": "2",
    "transaction.state.log.replication.factor": "3",
    # Two hours: one transaction is open during many restarts.
    "transaction.max.timeout.ms": "7200000",
}
# Segments roll by timestamps of records. The brokers' own cleaners never clean a topic except `cleaned`.
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
    "held": {**SETTINGS, "segment.ms": "2000"},  # one transaction on this topic is open during many restarts
    # The broker cleans `cleaned` after some 30 segments, and applies retention to `both` after each, of 20 batches.
    "cleaned": {**SETTINGS, "min.cleanable.dirty.ratio": "0.95"},
    "both": {
        **SETTINGS,
        "cleanup.policy": "compact,delete",
        "retention.bytes": "150000",
        "retention.ms": "-1",
        "segment.ms": "2400000",
    },
}
OWN = ("plain", "lz4", "transactional", "held")  # topics whose files only keytail replaces
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
MINUTES_2_MS = 120_000
DAYS_60_MS = 60 * 86_400_000
OPEN_MS = 7_000_000


class Writers:
    """Writes to all topics in a thread, with timestamps that make segments roll.

    `latest` has the values that consumers must get by topic and key, and `offsets` their offsets. Producers repeat
    requests that fail while leaders change.
    """

    def __init__(self, bootstrap: Broker) -> None:
        self._client = BrokerClient(heap="256m")
        self._client.connect(bootstrap)
        self._chance = chance()
        self._time_ms = int(time.time() * 1000) - DAYS_60_MS
        self._number = 0
        self._pause, self._paused, self._end = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.written = threading.Semaphore(0)
        self.latest: dict[tuple[str, bytes], bytes | None] = {}
        self.offsets: dict[tuple[str, bytes], int] = {}
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
        """Wait until all topics have been written to `times` more times."""
        while self.written.acquire(blocking=False):
            pass
        for _ in range(times):
            assert self.written.acquire(timeout=300), self.failed

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Write nothing within the block; all transactions but the one on `held` are decided."""
        self._paused.clear()
        self._pause.set()
        assert self._paused.wait(300), self.failed
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
                self._time_ms += MINUTES_2_MS
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
            offsets = self._client.produce(f"to {topic}", topic, 0, records, codec=codec, idempotent=True)
            self.offsets.update({(topic, key): offset for (_, key, _), offset in zip(records, offsets, strict=True)})
        self.latest.update({(topic, key): value for _, key, value in records})

    def _write_held(self) -> None:
        """Write records that can be cleaned, then begin a transaction and leave it open."""
        for _ in range(3):
            records = self._records("held")
            self._client.produce("before held", "held", 0, records, idempotent=True)
            self.latest.update({("held", key): value for _, key, value in records})
            time.sleep(2.1)  # segments of this topic roll by the clock
        self._client.transaction("held", "begin", "held", timeout_ms=OPEN_MS)
        records = [(int(time.time() * 1000), b"held-%d" % self._number, b"in a transaction")]
        self._client.produce("held", "held", 0, records, transactional_id="held")

    def _records(self, topic: str) -> list[tuple[int, bytes, bytes | None]]:
        by_clock = topic in ("transactional", "held")
        time_ms = int(time.time() * 1000) if by_clock else self._time_ms
        keys = self._chance.sample(range(KEYS), 25)
        return [
            (time_ms + n, b"key-%d" % key, None if self._chance.random() < 0.1 else b"%d, " % self._number * 20)
            for n, key in enumerate(keys)
        ]


def test_prepared_compactions_are_committed_in_rolling_restarts(tmp_path: Path) -> None:
    found: Counter[str] = Counter()
    down_s: list[float] = []
    draws = chance()
    print(f"seed {SEED}", flush=True)
    with ExitStack() as end, Cluster(VERSION, tmp_path, len(BROKERS), properties=PROPERTIES) as cluster:
        end.callback(_print, found)
        cluster.start(*BROKERS)
        admin, brokers = cluster.client, cluster.brokers
        for topic, settings in TOPICS.items():
            admin.create_topic(topic, 1, settings, replicas=3)
        with Writers(brokers[1]) as writers:
            writers.wait_for(5)
            for roll in range(ROLLS):
                number = BROKERS[roll % 3]
                found.update(_roll(brokers[number], writers, down_s, draws))
                other = brokers[BROKERS[(roll + 1) % 3]]
                admin.connect(other)
                wait_until_in_sync(admin, TOPICS, len(BROKERS))
                if roll % 3 == 2:
                    with writers.paused():
                        _check_consumers(admin, other, writers)
                print(f"roll {roll + 1} of {ROLLS}: down for {down_s[-1]:.1f} s", flush=True)
                if roll % 10 == 9:
                    _print(found)
            with writers.paused():
                wait_until_in_sync(admin, TOPICS, len(BROKERS))
                start, _ = admin.offsets([("both", 0)])["both-0"]
        cluster.stop(*BROKERS)
    replicas = [text for number in BROKERS for text in ("--replica", f"b{number}={tmp_path / f'b{number}' / 'logs'}")]
    rows = keytail("audit", *replicas, "--topic-list", ",".join(TOPICS))
    assert {row["status"] for row in rows} == {"alike"}, rows
    assert ROLLS < 10 or start > 0, "retention removed nothing"
    of_each = {topic: {what for what in found if what.startswith(f"{topic}: ")} for topic in TOPICS}
    for topic in OWN:
        assert found[f"{topic}: committed"] > ROLLS / 2, found
    if ROLLS >= 100:
        for topic in ("cleaned", "both"):
            assert f"{topic}: committed" in of_each[topic] and len(of_each[topic]) > 1, found


def _print(found: Counter[str]) -> None:
    print("\n".join(f"{count:5} {what}" for what, count in sorted(found.items())), flush=True)


def _roll(
    broker: ClusterBroker | ZooKeeperMember, writers: Writers, down_s: list[float], draws: random.Random
) -> list[str]:
    """Prepare beside the broker, stop it, commit, start it; return the result of each preparation."""
    log_dir, ended = broker.log_dirs[0], list[str]()
    common = ("--config", broker.work_dir / "server.properties", "--force", "--topic-list", ",".join(TOPICS))
    prepare, commit = (*common, "--prepare"), (*common, "--execute", "--prepared-only")

    def files(pattern: str) -> int:
        return sum(1 for _ in log_dir.glob(f"*/*{pattern}.clean"))

    writers.wait_for(draws.randrange(4))
    if draws.random() < 0.25:
        wanted = draws.randrange(24)
        ended += _killed(prepare, draws, lambda: files("") >= wanted)
    if draws.random() < 0.95:  # in other cases, commit only what a killed preparation left, if anything
        rows = keytail("compact", *prepare)
        ended += [f"{row['topic']}: not prepared: {row['status']}" for row in rows if row["status"] != "prepared"]
    writers.wait_for(draws.choice([0, 0, 1, 3, 10, 30]))
    assert not _log_complaints(broker)
    if draws.random() < 0.15:
        broker.stop()
        broker.start()
        writers.wait_for(draws.randrange(4))
        assert not _log_complaints(broker)
        ended.append("(started without a commit)")
    begin_s = time.monotonic()
    broker.stop()
    stop_s = time.monotonic() - begin_s
    writers.wait_for(draws.randrange(4))
    is_killed = draws.random() < 0.25
    if is_killed:
        wanted = draws.randrange(files(".prepared.*") + 1)
        ended += _killed(commit, draws, lambda: files(".prepared.*") <= wanted)
    is_left_to_broker = is_killed and draws.random() < 0.5
    begin_s = time.monotonic()
    rows = [] if is_left_to_broker else keytail("compact", *commit)
    commit_s = time.monotonic() - begin_s
    ended += [f"{row['topic']}: {re.sub('[0-9]+', 'N', row['prepared'])}" for row in rows if row["prepared"]]
    logs = [sorted((log_dir / f"{topic}-0").glob("*.log")) for topic in OWN]
    closed = {path: _identity(path) for paths in logs for path in paths[:-1]}
    if not is_left_to_broker and draws.random() < 0.2:
        verified = keytail("verify", *common[:2], ends_with=(0, 1))
        # The snapshot of an earlier shutdown may be at an offset that the leader has removed by compaction.
        problems = [row for row in verified if {item["kind"] for item in row["findings"]} - {"segment-perhaps-missing"}]
        assert not problems
    writers.wait_for(draws.randrange(4))
    begin_s = time.monotonic()
    broker.start()
    down_s.append(stop_s + commit_s + time.monotonic() - begin_s)
    writers.wait_for(2)
    if is_left_to_broker:  # the broker finishes or undoes the replacement of a group, and may rebuild an index
        ended.append("(started after a killed commit)")
        errors = [line for line in _log_complaints(broker) if line.level != "WARN"]
        assert not [line for line in errors if not line.text.endswith(REBUILDS)]
    else:  # no segment was fetched again: the files are the same
        assert {path: _identity(path) for path in closed} == closed
        assert not _log_complaints(broker)
    return ended


def _killed(arguments: tuple[str | Path, ...], draws: random.Random, is_due: Callable[[], bool]) -> list[str]:
    """Run `compact`, and kill all its processes or only the first when `is_due` is true; return what happened."""
    command = [str(KEYTAIL), "compact", *map(str, arguments)]
    silent = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=silent, stderr=silent, start_new_session=True) as process:
        while process.poll() is None and not is_due():
            time.sleep(0.002)
        is_running = process.poll() is None
        if is_running and draws.random() < 0.5:
            process.kill()
        elif is_running:
            os.killpg(process.pid, signal.SIGKILL)
    return [f"({'killed' if is_running else 'ended before the kill'}: {arguments[-1]})"]


def _identity(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _log_complaints(broker: Broker) -> list[LogLine]:
    """Return the broker's complaints about logs; others are about connections to stopped brokers.

    Messages about the high watermark are left out: a new leader may not know the last one, but nothing is truncated.
    """
    found = [line for line in complaints(broker.log_lines()) if line.logger.rpartition(".")[2] in LOGGERS]
    return [line for line in found if "Non-monotonic update of high watermark" not in line.text]


def _check_consumers(admin: BrokerClient, broker: Broker, writers: Writers) -> None:
    """Check that two consumers get the latest record of each key, except those of `both` that retention removed."""
    java = java_records(broker, PARTITIONS, isolation="read_committed")
    librdkafka = librdkafka_records(broker, PARTITIONS, isolation="read_committed")
    assert [item for item in java if item.topic in OWN] == [item for item in librdkafka if item.topic in OWN]
    start, _ = admin.offsets([("both", 0)])["both-0"]
    expected = {key: value for key, value in writers.latest.items() if value is not None}
    for state in (_state(java), _state(librdkafka)):
        assert state == {key: value for key, value in expected.items() if key in state}
        missing = expected.keys() - state.keys()
        assert all(key[0] == "both" and writers.offsets[key] < start for key in missing), missing


def _state(records: list[Served]) -> dict[tuple[str, bytes], bytes]:
    by_topic: dict[str, list[Served]] = {topic: [] for topic in TOPICS}
    for record in records:
        by_topic[record.topic].append(record)
    return {
        (topic, key): record.value
        for topic, of_topic in by_topic.items()
        for (_, key), record in latest_by_key(of_topic).items()
        if key is not None and record.value is not None and not key.startswith(b"held-")
    }
