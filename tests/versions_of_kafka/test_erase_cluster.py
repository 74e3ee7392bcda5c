"""An erasure on each broker of a cluster of three in turn: treated replicas do not get the records back, although they
follow untreated leaders; at the end all replicas have the same records, and consumers receive exactly the other
records.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.interop.broker_client import BrokerClient
from tests.interop.broker_story import keytail
from tests.interop.test_erase import blocks_of
from tests.ports import free_ports
from tests.versions_of_kafka.broker import ClusterBroker, controller_of
from tests.versions_of_kafka.cluster import wait_until_in_sync
from tests.versions_of_kafka.consumers import java_records, librdkafka_records
from tests.versions_of_kafka.test_prepared_cluster import BROKERS, PROPERTIES

pytestmark = [pytest.mark.interop, pytest.mark.soak("tests/interop/test_erase.py: one broker, with the same checks")]

TOPICS = {"kept": {"cleanup.policy": "delete", "retention.ms": "-1"}, "latest": {"cleanup.policy": "compact"}}
PARTITIONS = [(topic, 0) for topic in TOPICS]
ERASED = (b"anna", b"bert")
ENDS = ("commit", "abort")  # the steps that end a transaction
KINDS = ("plain", "idempotent", *ENDS)
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")


def write(client: BrokerClient, start: int, names: tuple[bytes, ...]) -> None:
    """Write 40 batches to each topic, with all codecs, by plain, idempotent and transactional producers in turn."""
    for number in range(start, start + 40):
        codec, kind = CODECS[number % len(CODECS)], KINDS[number % len(KINDS)]
        records = [(int(time.time() * 1000), name, b"%s %d" % (name, number)) for name in names]
        writer = f"{kind} {codec}"
        ids: Any = {"idempotent": kind == "idempotent", "transactional_id": writer if kind in ENDS else None}
        if kind in ENDS:
            client.transaction(writer, "begin", transactional_id=writer)
        for topic in TOPICS:
            client.produce(writer, topic, 0, records, codec=codec, **ids)
        if kind in ENDS:
            client.transaction(writer, kind)


def values(isolation: str) -> list[bytes]:
    """Return the values that consumers get after all erasures, in the order of the log."""
    written = [(b"carl", n) for n in range(40)] + [(name, n) for n in range(40, 160) for name in (b"carl", b"dora")]
    aborted = isolation == "read_committed" and "abort"
    return [b"%s %d" % (name, n) for name, n in written if KINDS[n % len(KINDS)] != aborted]


def holds_keys(log_dir: Path) -> bool:
    logs = [log.read_bytes() for topic in TOPICS for log in (log_dir / f"{topic}-0").glob("*.log")]
    return any(name in data for log in logs for data in (log, *blocks_of(log)) for name in ERASED)


def test_treated_replicas_do_not_get_erased_records_back(tmp_path: Path) -> None:
    ports = free_ports(1)
    controller = controller_of(tmp_path / "controller", ports[0])
    properties = {**PROPERTIES, "log.cleaner.enable": "false"}
    brokers = {n: ClusterBroker(n, ports[0], tmp_path / f"b{n}", properties=properties) for n in BROKERS}
    dirs = {n: tmp_path / f"b{n}" / "logs" for n in BROKERS}
    keys = tmp_path / "keys"
    keys.write_bytes(b"\n".join(ERASED))
    with ExitStack() as cluster:
        controller.start()
        cluster.callback(controller.kill)
        for broker in brokers.values():
            cluster.enter_context(broker)
        admin = cluster.enter_context(BrokerClient(heap="256m"))
        admin.connect(brokers[1])
        for topic, settings in TOPICS.items():
            admin.create_topic(topic, 1, settings, replicas=3)
        write(admin, 0, (*ERASED, b"carl"))
        wait_until_in_sync(admin, TOPICS, len(BROKERS))
        for number in BROKERS:
            assert holds_keys(dirs[number])
            brokers[number].stop()
            flags = ("--config", brokers[number].work_dir / "server.properties", "--topic-list", ",".join(TOPICS))
            rows = keytail("erase", *flags, "--keys-file", keys, "--execute")
            assert {row["status"] for row in rows} == {"erased"}
            assert {tuple(sorted(row["replicas"])) for row in rows} == {tuple({*BROKERS} - {number})}
            brokers[number].start()
            admin.connect(brokers[BROKERS[number % 3]])
            wait_until_in_sync(admin, TOPICS, len(BROKERS))
            write(admin, 40 * number, (b"carl", b"dora"))
            wait_until_in_sync(admin, TOPICS, len(BROKERS))
            assert [holds_keys(dirs[n]) for n in BROKERS] == [n > number for n in BROKERS]
        for records in (java_records, librdkafka_records):
            for isolation in ("read_committed", "read_uncommitted"):
                found = records(brokers[2], PARTITIONS, isolation=isolation)
                for topic in TOPICS:
                    assert [record.value for record in found if record.topic == topic] == values(isolation)
    replicas = [text for number in BROKERS for text in ("--replica", f"b{number}={dirs[number]}")]
    rows = keytail("audit", *replicas, "--topic-list", ",".join(TOPICS))
    assert {row["status"] for row in rows} == {"alike"}, rows
