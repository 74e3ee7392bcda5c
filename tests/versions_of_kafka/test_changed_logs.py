"""A broker starts on logs in which batches were merged or emptied, and serves the same records as before.

The Java consumer of the version and librdkafka read all records, and from random offsets inside the changed batches.
Emptied batches are at the beginning and end of segments, in a whole segment, and at the end of a log.
"""

from __future__ import annotations

import random
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest

from tests.chance import chance
from tests.interop.broker import Broker
from tests.interop.broker_client import BrokerClient, Served
from tests.interop.broker_story import complaints
from tests.reference.batches import Batch
from tests.versions_of_kafka.broker import broker_of
from tests.versions_of_kafka.changed_log import Merges, changed_log
from tests.versions_of_kafka.cluster import wait_until
from tests.versions_of_kafka.consumers import java_records, librdkafka_first, librdkafka_records
from tests.versions_of_kafka.topics import wait_until_served

pytestmark = [pytest.mark.interop]

ISOLATIONS = ("read_uncommitted", "read_committed")
DAYS_10_MS = 10 * 86_400_000
SEGMENT = 60  # records
MINUTES_10_MS = 600_000
# No retention until a test sets one. Segments roll by timestamps of records.
SETTINGS = {"cleanup.policy": "delete", "retention.ms": "-1", "segment.ms": "60000"}
COMPACTED = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "1", "segment.ms": "60000"}
PROPERTIES = {
    "log.cleaner.backoff.ms": "200",
    "log.cleaner.enable": "true",
    "log.initial.task.delay.ms": "100",
    "log.retention.check.interval.ms": "500",
    "log.segment.delete.delay.ms": "1000",
}
REBUILDS = "Could not find offset index file"  # changed_log removes the indexes


class Topics:
    """Writes one-record batches to topics of a broker, whose first timestamp is `first_ms`."""

    def __init__(self, client: BrokerClient) -> None:
        self.client = client
        self.first_ms = int(time.time() * 1000) - DAYS_10_MS

    def create(
        self, topic: str, batches: int, *, codec: str = "none", keys: int = 1000, segment: int = SEGMENT
    ) -> None:
        self.client.create_topic(topic, 1, COMPACTED if topic == "compacted" else SETTINGS)
        for number in range(batches):
            time_ms = self.first_ms + number // segment * MINUTES_10_MS + number % segment * 10
            record = (time_ms, b"key-%d" % (number % keys), b"value %d " % number * 4)
            self.client.produce(f"to {codec}", topic, 0, [record], codec=codec)

    def create_mixed(self, topic: str) -> None:
        """Write plain batches and transactions, of which a third aborts."""
        self.client.create_topic(topic, 1, SETTINGS)
        for number in range(15):
            for at in range(5):
                self.client.produce("plain", topic, 0, [(self.first_ms + at, b"plain", b"%d" % number)])
            records = [(self.first_ms + 9, b"transactional", b"%d" % number) for _ in range(3)]
            self.client.transaction("in transactions", "begin", "id")
            self.client.produce("in transactions", topic, 0, records, transactional_id="id")
            self.client.transaction("in transactions", "abort" if number % 3 == 1 else "commit")
            self.client.wait_until_decided([(topic, 0)])

    def served(self, topic: str, isolation: str = "read_uncommitted") -> list[Served]:
        return self.client.consume([(topic, 0)], isolation=isolation)


def groups_of_random_sizes(draws: random.Random) -> Merges:
    size = draws.randint(2, 20)

    def merges(first: Batch, second: Batch) -> bool:
        nonlocal size
        if second.last_offset - first.base_offset < size:
            return True
        size = draws.randint(1, 20)
        return False

    return merges


def check_consumers(broker: Broker, topic: str, before: dict[str, list[Served]], draws: random.Random) -> None:
    """Check that two consumers get these records, and start at random offsets with the right one of them."""
    for isolation, records in before.items():
        assert java_records(broker, [(topic, 0)], isolation=isolation) == records
        assert librdkafka_records(broker, [(topic, 0)], isolation=isolation) == records
        offsets = sorted(draws.sample(range(records[-1].offset + 1), 8))
        assert librdkafka_first(broker, topic, offsets, isolation=isolation) == firsts(records, offsets)


def firsts(records: Sequence[Served], offsets: Collection[int]) -> list[int | None]:
    return [next((record.offset for record in records if record.offset >= offset), None) for offset in offsets]


def log_errors(broker: Broker) -> list[str]:
    return [line.text for line in complaints(broker.log_lines()) if REBUILDS not in line.text]


def forget_shutdown(log_dir: Path) -> None:
    """Make the broker recover all segments at its next start, without indexes and producer snapshots."""
    (log_dir / ".kafka_cleanshutdown").unlink(missing_ok=True)
    (log_dir / "recovery-point-offset-checkpoint").write_text("0\n0\n")
    for path in log_dir.glob("[!_]*-0/*"):
        if path.suffix in (".index", ".timeindex", ".snapshot"):
            path.unlink()


@pytest.mark.one_of("a broker starts on changed logs")
def test_merged_batches_are_served_as_before(version: str, tmp_path: Path) -> None:
    draws, log_dir = chance(), tmp_path / "logs"
    broker = broker_of(version, log_dir, tmp_path / "work", properties=PROPERTIES)
    with broker, BrokerClient(heap="256m") as client:
        client.connect(broker)
        topics = Topics(client)
        topics.create("merged", 200, codec="lz4")
        topics.create("compacted", 200, keys=30)
        topics.create_mixed("mixed")
        names = ("merged", "mixed", "compacted")
        before = {topic: {isolation: topics.served(topic, isolation) for isolation in ISOLATIONS} for topic in names}
        partitions = [(topic, 0) for topic in names]
        ends = client.offsets(partitions)
        times = [draws.choice(before["merged"]["read_committed"]).timestamp_ms + draws.randrange(10) for _ in range(20)]
        found = client.offsets_for_times("merged", 0, times)
        broker.stop()
        for topic in names:
            assert len(changed_log(log_dir / f"{topic}-0", merges=groups_of_random_sizes(draws))) < len(
                before[topic]["read_uncommitted"]
            )
        for is_recovered in (False, True):
            broker.start()
            wait_until_served(client, partitions)
            assert log_errors(broker) == []
            assert client.offsets(partitions) == ends
            for topic in ("merged", "mixed"):
                check_consumers(broker, topic, before[topic], draws)
            offsets = sorted(draws.sample(range(200), 20))
            assert client.first_from("merged", 0, offsets) == offsets
            assert client.offsets_for_times("merged", 0, times) == found
            if not is_recovered:
                broker.kill()
                forget_shutdown(log_dir)
        # The broker's own cleaner continues with merged batches.
        client.alter_configs("compacted", {"min.cleanable.dirty.ratio": "0.01"})
        latest = {record.key: record for record in before["compacted"]["read_committed"]}
        wait_until(lambda: len(topics.served("compacted")) < 100, "the broker has cleaned")
        assert {record.key: record for record in topics.served("compacted")} == latest


@pytest.mark.one_of("a broker starts on changed logs")
def test_emptied_batches_are_skipped(version: str, tmp_path: Path) -> None:
    draws, log_dir = chance(), tmp_path / "logs"
    gone = {
        *(0, SEGMENT - 1),  # erase the first and last record of a segment
        *range(SEGMENT, 2 * SEGMENT),  # a segment
        *draws.sample(range(2 * SEGMENT, 3 * SEGMENT), 30),
        *range(190, 200),  # erase the end of the log
    }
    broker = broker_of(version, log_dir, tmp_path / "work", properties=PROPERTIES)
    with broker, BrokerClient(heap="256m") as client:
        client.connect(broker)
        topics = Topics(client)
        topics.create("emptied", 200)
        # In one segment, because librdkafka reports an error after 11 fetches without a record, and a fetch ends with
        # its segment.
        topics.create("ends-empty", 1200, segment=1200)
        client.create_topic("producers", 1, SETTINGS)
        for producer_id in (900_001, 900_002):
            for sequence in range(8):
                assert _send(client, producer_id, sequence)[0] == "NONE"
        before = {isolation: topics.served("emptied", isolation) for isolation in ISOLATIONS}
        partitions = [("emptied", 0), ("ends-empty", 0), ("producers", 0)]
        ends = client.offsets(partitions)
        broker.stop()
        changed_log(log_dir / "emptied-0", keeps=lambda record: record.offset not in gone)
        changed_log(log_dir / "ends-empty-0", keeps=lambda record: record.offset < 200)
        emptied = changed_log(log_dir / "producers-0", keeps=lambda record: record.key != b"900001")
        assert sum(not batch.records for batch in emptied) == 8
        after = {isolation: [item for item in before[isolation] if item.offset not in gone] for isolation in ISOLATIONS}
        for is_recovered in (False, True):
            broker.start()
            wait_until_served(client, partitions)
            assert log_errors(broker) == []
            assert client.offsets(partitions) == ends
            check_consumers(broker, "emptied", after, draws)
            assert client.first_from("ends-empty", 0, [199, 200, 900]) == [199, None, None]
            assert librdkafka_first(broker, "ends-empty", [199, 200, 900], isolation=ISOLATIONS[1]) == [199, None, None]
            # A duplicate of an erased batch gets the offset of the first, and a gap in sequences is refused.
            assert _send(client, 900_001, 7) == ("NONE", 7)
            assert _send(client, 900_001, 9)[0] == "OUT_OF_ORDER_SEQUENCE_NUMBER"
            assert client.offsets(partitions) == ends
            if not is_recovered:
                broker.kill()
                forget_shutdown(log_dir)
        assert _send(client, 900_001, 8) == ("NONE", 16)
        # Kafka searches a time in one segment, the first that is new enough by the timestamps of its batches.
        starts_ms = [topics.first_ms + number * MINUTES_10_MS for number in range(3)]
        times = [starts_ms[0] + (SEGMENT - 3) * 10, *starts_ms[1:]]
        first, inside, after_it = client.offsets_for_times("emptied", 0, times)
        assert first is not None and first[0] == SEGMENT - 3
        assert inside is None, "the segment has no records"
        assert after_it is not None and after_it[0] == min({*range(2 * SEGMENT, 200)} - gone)
        # Emptied batches keep their greatest timestamp, so retention deletes their segment when it is due.
        age_ms = int(time.time() * 1000) - starts_ms[2] + MINUTES_10_MS // 2
        client.alter_configs("emptied", {"retention.ms": str(age_ms)})
        wait_until(lambda: client.offsets(partitions)["emptied-0"] == (2 * SEGMENT, 200), "two segments are deleted")


def _send(client: BrokerClient, producer_id: int, sequence: int) -> tuple[str, int]:
    """Send a record with the time of the clock, because a broker forgets producers by the timestamps of batches."""
    records = [(int(time.time() * 1000), b"%d" % producer_id, b"%d" % sequence)]
    return client.raw_produce("producers", 0, records, producer_id=producer_id, epoch=0, sequence=sequence)
