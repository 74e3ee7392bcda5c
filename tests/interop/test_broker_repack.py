"""A real broker on a log dir that keytail repacked: clients write to the golden log dir, the broker stops, keytail
repacks, the broker starts, serves the same records from any offset and time, and appends more.

The producers of the golden log dir have expired, and are forgotten.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests import golden
from tests.chance import chance
from tests.interop.broker import Broker, LogLine
from tests.interop.broker_client import BrokerClient, Served
from tests.interop.broker_story import complaints, keytail, repairs, start_client
from tests.log_dirs import snapshot

pytestmark = [pytest.mark.interop]

LEVELS = ("read_uncommitted", "read_committed")
PRODUCER = 800_001  # brokers do not assign such a high id
TOPIC = "zstd"
Answers = dict[tuple[str, int], Any]


@dataclass
class Story:
    """What was observed `before` the repack, `after` it, and `later`, after more traffic and a restart with the
    broker's own cleaner.
    """

    log_dir: Path
    rows: list[dict[str, Any]] = field(default_factory=list)
    again: list[dict[str, Any]] = field(default_factory=list)
    is_unchanged: bool = False  # the second run changed nothing
    served: dict[tuple[str, str], list[Served]] = field(default_factory=dict)
    offsets: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)
    producers: dict[str, Answers] = field(default_factory=dict)
    from_offsets: dict[str, Answers] = field(default_factory=dict)
    from_times: dict[str, Answers] = field(default_factory=dict)
    resent: tuple[str, int] = ("", -1)
    out_of_order: str = ""
    rebuilt: dict[str, dict[str, set[int]]] = field(default_factory=dict)  # ids, without snapshots
    logs: list[list[LogLine]] = field(default_factory=list)

    def look(self, when: str, client: BrokerClient, rng: random.Random) -> None:
        everything = golden.partitions()
        self.offsets[when] = client.offsets(everything)
        for level in LEVELS:
            self.served[when, level] = client.consume(everything, isolation=level)
        self.producers[when] = {item: client.describe_producers(*item) for item in everything}
        self.from_offsets[when], self.from_times[when] = {}, {}
        for item in everything:
            start, end = self.offsets[when][f"{item[0]}-{item[1]}"]
            asked = sorted(rng.randint(start, end) for _ in range(20))
            self.from_offsets[when][item] = dict(zip(asked, client.first_from(*item, asked), strict=True))
            times = [r.timestamp_ms for r in self.served[when, LEVELS[0]] if (r.topic, r.partition) == item]
            asked = sorted(rng.choice(times) + rng.choice([-1, 0, 1]) for _ in range(20)) if times else []
            asked = [at for at in asked if at >= 0]
            self.from_times[when][item] = dict(zip(asked, client.offsets_for_times(*item, asked), strict=True))


    def look_without_snapshots(self, when: str, client: BrokerClient, path: Path) -> None:
        """Let a broker rebuild the producers of a copy of the log dir from its log."""
        copy = path / "log"
        shutil.copytree(self.log_dir, copy)
        for file in [*copy.glob("*/*.snapshot"), copy / ".kafka_cleanshutdown"]:
            if not file.parent.name.startswith("__cluster_metadata"):
                file.unlink()
        with Broker(copy, path / "work") as broker:
            client.connect(broker)
            self.rebuilt[when] = {
                f"{topic}-{number}": {state["producer_id"] for state in client.describe_producers(topic, number)}
                for topic, number in golden.partitions()
            }


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    root = tmp_path_factory.mktemp("broker")
    seen = Story(golden.unpack(root))
    with start_client() as client:
        _run_scenario(seen, root, client)
    yield seen


def _run_scenario(seen: Story, root: Path, client: BrokerClient) -> None:
    seed = chance().randrange(2**32)
    broker = Broker(seen.log_dir, root / "work")
    now_ms = int(time.time() * 1000)
    records = [(now_ms, b"raw-%d" % number, b"value") for number in range(10)]
    with broker:
        client.connect(broker)
        for number in range(8):  # each in a separate batch
            client.produce("plain", TOPIC, 0, [(now_ms + number, b"a", b"%d" % number)], codec="lz4")
        for number in range(7):
            error, last = client.raw_produce(
                TOPIC, 0, records, producer_id=PRODUCER, epoch=1, sequence=number * len(records)
            )
            assert error == "NONE"
        for number in range(4):  # rolls the segment
            client.produce("plain", TOPIC, 0, [(now_ms, b"user-%05d" % key, b"newer" * 20) for key in range(200)])
        seen.look("before", client, random.Random(seed))
    given = ("--config", root / "work" / "server.properties", "--log-dirs", seen.log_dir, "--metadata-is-current")
    flags = ("--repack", "--forget-producers", "--compression", "zstd", "--execute")
    seen.look_without_snapshots("before", client, root / "rebuilt-before")
    seen.rows = keytail("compact", *given, *flags)
    files = snapshot(seen.log_dir)
    seen.again = keytail("compact", *given, *flags)
    seen.is_unchanged = snapshot(seen.log_dir) == files
    keytail("verify", "--log-dirs", seen.log_dir, ends_with=(0,))
    seen.look_without_snapshots("after", client, root / "rebuilt-after")
    with broker:
        client.connect(broker)
        seen.look("after", client, random.Random(seed))
        seen.resent = client.raw_produce(
            TOPIC, 0, records, producer_id=PRODUCER, epoch=1, sequence=6 * len(records)
        )
        assert seen.resent[1] == last
        seen.out_of_order, _ = client.raw_produce(TOPIC, 0, records, producer_id=PRODUCER, epoch=1, sequence=10_000)
        error, _ = client.raw_produce(TOPIC, 0, records, producer_id=PRODUCER, epoch=1, sequence=7 * len(records))
        assert error == "NONE"
        for topic, number in golden.partitions():
            if not topic.startswith("__"):
                client.produce("afterwards", topic, number, [(now_ms, b"new", b"value")])
    seen.logs.append(broker.log_lines())
    cleaning = {
        "log.cleaner.enable": "true",
        "log.cleaner.backoff.ms": "200",
        "log.cleaner.min.cleanable.ratio": "0",
    }
    with Broker(seen.log_dir, root / "cleaning", properties=cleaning) as cleaner:
        client.connect(cleaner)
        seen.look("later", client, random.Random(seed))
    seen.logs.append(cleaner.log_lines())


def test_partitions_with_closed_segments_were_repacked(story: Story) -> None:
    assert {row["status"] for row in story.rows} <= {"repacked", "clean", "skipped"}
    done = {row["topic"]: row for row in story.rows if row["status"] == "repacked"}
    assert {"none", "lz4", TOPIC, "transactional", "events", "__consumer_offsets"} <= done.keys()
    assert all(row["records_before"] == row["records_after"] for row in done.values())
    for topic in ("none", "lz4", TOPIC, "events", "__consumer_offsets"):
        assert done[topic]["batches_after"] < done[topic]["batches_before"] / 4
        assert done[topic]["bytes_after"] < done[topic]["bytes_before"]


def test_a_second_run_changes_nothing(story: Story) -> None:
    assert {row["status"] for row in story.again} <= {"clean", "skipped"}
    assert story.is_unchanged


@pytest.mark.parametrize("level", LEVELS)
def test_consumers_receive_the_same_records(story: Story, level: str) -> None:
    assert story.served["before", level]
    assert story.served["after", level] == story.served["before", level]


def test_consumers_receive_the_same_records_from_any_offset_and_time(story: Story) -> None:
    assert story.offsets["after"] == story.offsets["before"]
    assert story.from_offsets["after"] == story.from_offsets["before"]
    assert story.from_times["after"] == story.from_times["before"]


def test_producers_have_the_same_state_as_before(story: Story) -> None:
    """A batch that is sent again is a duplicate, and a gap in the sequences is refused."""
    assert story.producers["after"] == story.producers["before"]
    assert story.resent[0] == "NONE"
    assert story.out_of_order == "OUT_OF_ORDER_SEQUENCE_NUMBER"


def test_batches_of_producers_that_have_expired_are_merged(story: Story) -> None:
    rows = {row["topic"]: row for row in story.rows}
    for topic in ("idempotent", "transactional"):
        assert rows[topic]["batches_after"] < rows[topic]["batches_before"]


def test_a_broker_without_snapshots_rebuilds_the_same_producers(story: Story) -> None:
    """It recovers the active segment, writes a snapshot, and loads it without the producers that have expired."""
    assert story.rebuilt["after"] == story.rebuilt["before"]
    assert PRODUCER in story.rebuilt["after"][f"{TOPIC}-0"]
    assert not story.rebuilt["after"]["idempotent-0"]


def test_the_broker_and_its_cleaner_do_not_complain(story: Story) -> None:
    for lines in story.logs:
        assert not complaints(lines)
        assert not repairs(lines)


def test_the_brokers_cleaner_retains_the_latest_records(story: Story) -> None:
    def latest(when: str) -> dict[tuple[str, int, bytes | None], bytes | None]:
        served = [r for r in story.served[when, "read_committed"] if r.key not in (None, b"new") and r.topic != TOPIC]
        return {(r.topic, r.partition, r.key): r.value for r in served}

    later = latest("later")
    values = {key: value for key, value in latest("after").items() if value is not None}
    assert {key: later.get(key) for key in values} == values
