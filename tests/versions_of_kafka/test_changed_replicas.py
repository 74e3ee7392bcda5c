"""What brokers of a cluster do with a replica whose batches were merged or emptied while its broker was stopped.

These are properties of Kafka, which decide when keytail may change a replica. Broker 1 is A, broker 2 is B.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from tests.interop.broker_client import ClientError
from tests.reference.batches import Batch
from tests.versions_of_kafka.changed_log import Merges, changed_log, read_log
from tests.versions_of_kafka.cluster import Cluster, wait_until

pytestmark = [pytest.mark.interop]

A, B, C = 1, 2, 3
IN_SYNC = 41  # records that both brokers have
FIRST_MS = int(time.time() * 1000) - 86_400_000
SETTINGS = {"cleanup.policy": "delete", "retention.ms": "-1", "segment.ms": "60000"}
FAILED = "marked as failed"


def write(cluster: Cluster, topic: str, count: int, *, acks: str = "all") -> None:
    """Write one-record batches. With acks=1, the leader does not wait for a follower."""
    for number in range(count):
        record = (FIRST_MS + number, b"key-%d" % number, b"value")
        cluster.client.produce(f"acks={acks}", topic, 0, [record], acks=acks)


def merged_from(offset: int, batches: int) -> Merges:
    """Return a rule that merges these batches to one."""

    def merges(first: Batch, second: Batch) -> bool:
        return first.base_offset >= offset and second.last_offset < offset + batches

    return merges


def ranges(partition: Path) -> list[tuple[int, int]]:
    return [(batch.base_offset, batch.last_offset) for batch in read_log(partition)]


def offsets_of(partition: Path) -> list[int]:
    return [record.offset for batch in read_log(partition) for record in batch.records]


def has_same_batches(cluster: Cluster, topic: str) -> bool:
    try:
        return ranges(cluster.partition(A, topic)) == ranges(cluster.partition(B, topic))
    except (OSError, ValueError):  # the log is not there, or a batch is only partly written
        return False


def lead(cluster: Cluster, topic: str, brokers: list[int]) -> None:
    """Make the first of the brokers the leader."""
    cluster.client.reassign(topic, 0, brokers)
    try:
        cluster.client.elect_leader(topic, 0)
    except ClientError as error:  # it leads already
        assert "ElectionNotNeeded" in str(error)
    cluster.wait_until_leader(topic, brokers[0])


def restart(cluster: Cluster, number: int, other: int) -> None:
    """Start a stopped broker; the client stays connected to the other."""
    cluster.start(number)
    cluster.client.connect(cluster.brokers[other])


@pytest.mark.one_of("changed replicas")
def test_a_follower_whose_log_ends_inside_a_merged_batch_fails(version: str, tmp_path: Path) -> None:
    """The follower fails again at each start, until another replica leads, or its directory is removed, or the log
    start moves.

    This is why batches are merged only where all replicas are in sync.
    """
    topics = ("restarted", "removed", "deleted", "moved")
    merged = merged_from(IN_SYNC - 5, 10)
    with Cluster(version, tmp_path, 3) as cluster:
        cluster.start(A, B, C)
        for topic in topics:
            cluster.client.create_partition(topic, [A, C, B] if topic == "moved" else [A, B], SETTINGS)
            cluster.wait_until_leader(topic, A)
            write(cluster, topic, 1, acks="1")  # the producer connects before B is killed
            write(cluster, topic, IN_SYNC - 1)
            cluster.wait_until_in_sync(topic, 3 if topic == "moved" else 2)
        cluster.kill(B)
        for topic in topics:  # written before B's session ends, so that the leader epoch remains the same
            write(cluster, topic, 6, acks="1")
        for topic in topics:
            cluster.wait_until_in_sync(topic, 2 if topic == "moved" else 1)
            assert len(ranges(cluster.partition(B, topic))) == IN_SYNC
        cluster.stop(A)
        for topic in topics:
            batches = changed_log(cluster.partition(A, topic), merges=merged)
            assert {(batch.base_offset, batch.last_offset) for batch in batches} >= {(IN_SYNC - 5, IN_SYNC + 4)}
        restart(cluster, A, A)
        cluster.wait_until_in_sync("moved", 2)
        lead(cluster, "moved", [A, C, B])
        restart(cluster, B, A)
        for topic in topics:
            cluster.wait_for_line(B, f"{topic}-0 {FAILED}")
            assert f"First offset {IN_SYNC - 5} is less than the next offset {IN_SYNC}" in cluster.log_text(B)
            assert len(ranges(cluster.partition(B, topic))) == IN_SYNC
        lead(cluster, "moved", [C, A, B])
        cluster.wait_until_in_sync("moved", 3)
        assert ranges(cluster.partition(B, "moved")) == ranges(cluster.partition(C, "moved"))
        lead(cluster, "moved", [A, B, C])
        write(cluster, "moved", 1)
        cluster.stop(B)
        shutil.rmtree(cluster.partition(B, "removed"))
        cluster.client.delete_records("deleted", 0, IN_SYNC + 2)  # the offset is inside the merged batch
        restart(cluster, B, A)
        for topic in ("removed", "deleted"):
            cluster.wait_until_in_sync(topic, 2)
        assert ranges(cluster.partition(B, "removed")) == ranges(cluster.partition(A, "removed"))
        assert ranges(cluster.partition(B, "deleted"))[0] == (IN_SYNC - 5, IN_SYNC + 4)
        cluster.wait_for_line(B, f"restarted-0 {FAILED}")


@pytest.mark.one_of("changed replicas")
def test_a_merged_batch_across_the_high_watermark_loses_committed_records(version: str, tmp_path: Path) -> None:
    """B led, and has records that A does not have. When B follows A, B truncates its log to A's log end, but only at
    the start of a batch.

    This is why batches are merged only below the high watermark.
    """
    # The frozen broker must remain in sync, or it could not lead.
    with Cluster(version, tmp_path, 2, properties={"replica.lag.time.max.ms": "60000"}) as cluster:
        cluster.start(A, B)
        for topic in ("across", "below"):
            cluster.client.create_partition(topic, [B, A], SETTINGS)
            cluster.wait_until_leader(topic, B)
            write(cluster, topic, IN_SYNC - 1)
            cluster.wait_until_in_sync(topic, 2)
        cluster.client.connect(cluster.brokers[B])
        for topic in ("across", "below"):  # the producer connects before A is frozen
            write(cluster, topic, 1, acks="1")
        with cluster.frozen(A):
            for topic in ("across", "below"):
                write(cluster, topic, 10, acks="1")
            cluster.kill(B)
        cluster.client.connect(cluster.brokers[A])
        ends = {}
        for topic in ("across", "below"):
            cluster.wait_until_leader(topic, A)
            # A fetch that waited at B may have got some of the last records.
            ends[topic] = end = len(offsets_of(cluster.partition(A, topic)))
            assert IN_SYNC - 1 <= end < len(offsets_of(cluster.partition(B, topic))) == IN_SYNC + 10
            write(cluster, topic, 20, acks="1")
        changed_log(cluster.partition(B, "across"), merges=merged_from(ends["across"] - 5, 10))
        changed_log(cluster.partition(B, "below"), merges=merged_from(ends["below"] - 10, 10))
        restart(cluster, B, A)
        for topic in ("across", "below"):
            cluster.wait_until_in_sync(topic, 2)
        assert offsets_of(cluster.partition(B, "below")) == offsets_of(cluster.partition(A, "below"))
        lost = {*offsets_of(cluster.partition(A, "across"))} - {*offsets_of(cluster.partition(B, "across"))}
        assert lost == set(range(ends["across"] - 5, ends["across"]))


@pytest.mark.one_of("changed replicas")
def test_followers_copy_merged_and_emptied_batches(version: str, tmp_path: Path) -> None:
    """New followers get the batches unchanged. The replica of an untreated broker keeps erased records, and gives
    them back to a treated broker only if that copies its log again.
    """
    gone = {*range(20, 30), *range(40, 80), 119}
    topics = ("merged", "erased", "lost")
    with Cluster(version, tmp_path, 2) as cluster:
        cluster.start(A, B)
        for topic in topics:
            cluster.client.create_partition(topic, [A] if topic == "merged" else [A, B], SETTINGS)
            cluster.wait_until_leader(topic, A)
            write(cluster, topic, 120)
        for topic in topics[1:]:
            cluster.wait_until_in_sync(topic, 2)
        cluster.stop(B)
        for topic in topics[1:]:
            changed_log(cluster.partition(B, topic), keeps=lambda record: record.offset not in gone)
        restart(cluster, B, A)
        for topic in topics[1:]:
            cluster.wait_until_in_sync(topic, 2)
            write(cluster, topic, 5)
        assert not gone & {*offsets_of(cluster.partition(B, "erased"))}
        cluster.stop(B)
        shutil.rmtree(cluster.partition(B, "lost"))
        restart(cluster, B, A)
        for topic in topics[1:]:
            cluster.wait_until_in_sync(topic, 2)
        assert not gone & {*offsets_of(cluster.partition(B, "erased"))}
        assert gone < {*offsets_of(cluster.partition(B, "lost"))}
        # B leads: A, whose replica was not treated, keeps what it has, until it copies B's log.
        lead(cluster, "erased", [B, A])
        assert not gone & {record.offset for record in cluster.client.consume([("erased", 0)])}
        assert gone < {*offsets_of(cluster.partition(A, "erased"))}
        cluster.client.reassign("erased", 0, [B])
        wait_until(lambda: not cluster.partition(A, "erased").exists(), "A has removed its replica")
        cluster.client.reassign("erased", 0, [B, A])
        # The other broker's metadata may still have the replicas from before the removal.
        wait_until(lambda: has_same_batches(cluster, "erased"), "A has copied B's log")
        assert not gone & {*offsets_of(cluster.partition(A, "erased"))}
        # A follower starts with the batch that contains the log start.
        cluster.stop(A)
        changed_log(cluster.partition(A, "merged"), merges=merged_from(30, 20))
        restart(cluster, A, B)
        cluster.wait_until_leader("merged", A)
        cluster.client.delete_records("merged", 0, 40)
        cluster.client.reassign("merged", 0, [A, B])
        cluster.wait_until_in_sync("merged", 2)
        assert ranges(cluster.partition(B, "merged"))[0] == (30, 49)
        lead(cluster, "merged", [B, A])
        assert [record.offset for record in cluster.client.consume([("merged", 0)])] == list(range(40, 120))
