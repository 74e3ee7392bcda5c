"""A repack on a broker of a cluster: a follower in sync continues, a new one copies the repacked log, and consumers
receive the same records from each. Broker 1 is A, broker 2 is B.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from tests.interop.broker_story import keytail
from tests.reference.batches import decode_log
from tests.versions_of_kafka import has_zookeeper
from tests.versions_of_kafka.cluster import Cluster, wait_until
from tests.versions_of_kafka.consumers import java_records, librdkafka_records
from tests.versions_of_kafka.test_changed_replicas import SETTINGS, A, B, lead, restart

pytestmark = [pytest.mark.interop]

TOPIC = "events"
COUNT, ROLL_MS = 60, 120_000
FIRST_MS = int(time.time() * 1000) - 5 * 86_400_000
KNOWN = ("max.message.bytes=1000000", "unclean.leader.election.enable=false", "remote.storage.enable=false")


def write(cluster: Cluster, start: int, *, acks: str = "all") -> None:
    """Write batches of one record of an idempotent and of a plain producer; the first one rolls the segment."""
    for number in range(start, start + COUNT):
        record = (FIRST_MS + start * ROLL_MS + number, b"key-%d" % (number % 7), b"value %d" % number)
        is_idempotent = acks == "all" and number % 20 > 12
        producer = "idempotent" if is_idempotent else f"acks={acks}"
        cluster.client.produce(producer, TOPIC, 0, [record], acks=acks, codec="lz4", idempotent=is_idempotent)


def repack(cluster: Cluster, number: int) -> dict[str, object]:
    """Repack on a stopped broker, and return the row of the topic."""
    config = cluster.brokers[number].work_dir / "server.properties"
    settings = [word for text in KNOWN for word in ("--topic-config", f"{TOPIC}:{text}")]
    settings += ["--topic-config", "producer.id.expiration.ms=86400000"]  # unknown with ZooKeeper: it may be dynamic
    flags = ("--topic", TOPIC, "--repack", "--forget-producers", "--compression", "zstd", "--replicas-in-sync")
    [row] = keytail("compact", "--config", config, *settings, *flags, "--execute")
    return row


def batches(partition: Path) -> int:
    """Return the number of batches; -1 if the broker is just writing one."""
    try:
        return sum(len(decode_log(log.read_bytes())) for log in partition.glob("*.log"))
    except ValueError:
        return -1


@pytest.mark.one_of("changed replicas")
def test_followers_of_a_repacked_leader_have_its_records(version: str, tmp_path: Path) -> None:
    with Cluster(version, tmp_path, 2) as cluster:
        cluster.start(A, B)
        cluster.client.create_partition(TOPIC, [A, B], SETTINGS)
        cluster.wait_until_leader(TOPIC, A)
        for start in (0, COUNT):
            write(cluster, start)
        cluster.wait_until_in_sync(TOPIC, 2)
        cluster.client.connect(cluster.brokers[B])
        cluster.stop(A)
        row = repack(cluster, A)
        assert row["status"] == "repacked"
        # With ZooKeeper, transactional.id.expiration.ms counts as well, by which the idempotent producer is active.
        assert row["batches_after"] * (2 if has_zookeeper(version) else 5) < row["batches_before"]
        restart(cluster, A, B)
        cluster.wait_until_in_sync(TOPIC, 2)
        lead(cluster, TOPIC, [A, B])
        write(cluster, 2 * COUNT, acks="1")  # B, which is not repacked, follows A
        wait_until(lambda: batches(cluster.partition(B, TOPIC)) == 3 * COUNT, "B has all batches")
        assert batches(cluster.partition(A, TOPIC)) < 3 * COUNT
        cluster.client.connect(cluster.brokers[A])
        cluster.stop(B)
        shutil.rmtree(cluster.partition(B, TOPIC))
        restart(cluster, B, A)
        cluster.wait_until_in_sync(TOPIC, 2)
        of_a = batches(cluster.partition(A, TOPIC))
        wait_until(lambda: batches(cluster.partition(B, TOPIC)) == of_a, "B has the batches of A")
        for number in (A, B):
            lead(cluster, TOPIC, [number, A + B - number])
            for records in (java_records, librdkafka_records):
                for isolation in ("read_committed", "read_uncommitted"):
                    found = records(cluster.brokers[number], [(TOPIC, 0)], isolation=isolation)
                    assert [record.value for record in found] == [b"value %d" % n for n in range(3 * COUNT)]
        cluster.stop(B)
        assert repack(cluster, B)["status"] in ("clean", "repacked")  # of the last segment that was rolled
        restart(cluster, B, A)
        cluster.wait_until_in_sync(TOPIC, 2)
        for number in (A, B):
            assert "UnexpectedAppendOffsetException" not in cluster.log_text(number)
