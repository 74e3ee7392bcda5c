"""Topics, traffic and checks shared by tests that compact the log dir of a broker of any version."""

from __future__ import annotations

import random
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from tests.chance import SEED
from tests.interop.broker import Broker
from tests.interop.broker_client import BrokerClient, ClientError, Served
from tests.interop.broker_story import keytail, latest_by_key, state_of
from tests.versions_of_kafka import has_zookeeper

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
# No round of the broker's own cleaner is due before a test lowers the ratio. Segments roll by timestamps of records.
# Markers get the broker's time, and so do the transactional records, so that a marker does not roll a segment.
SETTINGS = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "1", "segment.ms": "60000"}
TOPICS: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(CODECS, SETTINGS),
    "both": {**SETTINGS, "cleanup.policy": "compact,delete", "retention.ms": "-1"},
    "append-time": {**SETTINGS, "message.timestamp.type": "LogAppendTime", "segment.ms": "300"},
    "transactional": {**SETTINGS, "segment.ms": "300"},
}
PARTITIONS = [(topic, 0) for topic in TOPICS]
CLEANER_PROPERTIES = {"log.cleaner.enable": "true", "log.cleaner.backoff.ms": "200"}
KEYS = 40
MINUTES_10_MS = 600_000
DAYS_10_MS = 10 * 86_400_000


def produce(client: BrokerClient, topic: str, time_ms: int, number: int) -> None:
    """Write one batch with some tombstones; to `transactional`, in a transaction that commits or aborts."""
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


def wait_until_served(client: BrokerClient, partitions: Sequence[tuple[str, int]] = PARTITIONS) -> None:
    """Wait until they are served: with ZooKeeper, a broker may be ready before it knows its partitions."""
    give_up = time.monotonic() + 300
    while True:
        try:
            client.wait_until_decided(partitions)
            return
        except ClientError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.1)


def settings_of(broker: Broker, path: Path) -> tuple[str | Path, ...]:
    """Return the flags with the settings of the topics, which are not in the log dirs if the broker uses ZooKeeper."""
    config = ("--config", path.parent / "work" / "server.properties")
    if not has_zookeeper(broker.version):
        return config
    lines = [f"{topic}:{key}={value}\n" for topic, settings in TOPICS.items() for key, value in settings.items()]
    path.write_text("".join(lines))
    return (*config, "--topic-configs", path)


def check_has_no_problems(path: Path) -> None:
    """Check that `verify` reports every partition as sound; `path` has the work directory of the broker."""
    rows = keytail("verify", "--config", path / "work" / "server.properties")
    assert {row["status"] for row in rows} == {"sound"}, [row for row in rows if row["status"] != "sound"]


def check_latest_records_are_retained(before: list[Served], after: list[Served]) -> None:
    """Check for each topic that records were removed, and that the latest record of each key is unchanged."""
    for topic, old, new in _by_topic(before, after):
        assert len(new) < len(old), f"nothing was removed from {topic}"
        assert latest_by_key(new) == latest_by_key(old)


def check_latest_records_except_tombstones(before: list[Served], after: list[Served]) -> None:
    """Check for each topic that the latest record of each key is unchanged, or is a tombstone and was removed."""
    for topic, old, new in _by_topic(before, after):
        removed = latest_by_key(old).keys() - latest_by_key(new).keys()  # tombstones whose delete horizon has passed
        assert all(latest_by_key(old)[key].value is None for key in removed), topic
        assert all(latest_by_key(new)[key] == latest_by_key(old)[key] for key in latest_by_key(new)), topic


def check_one_record_per_key(before: list[Served], after: list[Served], unchanged: Collection[str]) -> None:
    """Check for each topic that one record of each key is retained; in topics of `unchanged`, all records."""
    for topic, old, new in _by_topic(before, after):
        if topic in unchanged:
            assert new == old
        else:
            assert len(new) == len(latest_by_key(new)) <= KEYS < len(old)


def _by_topic(before: list[Served], after: list[Served]) -> Iterator[tuple[str, list[Served], list[Served]]]:
    """Yield each topic with its records; check that none is new or changed, and that the latest values are equal."""
    for topic in TOPICS:
        old, new = ([record for record in records if record.topic == topic] for records in (before, after))
        assert set(new) <= set(old), topic
        assert state_of(new) == state_of(old), topic
        yield topic, old, new
