"""A real broker on a log dir that keytail compacted.

All tests share a scenario: clients write to the golden log dir, the broker stops, keytail compacts, the broker starts,
clients write more, and the broker restarts, finally with its own cleaner on.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests import golden
from tests.interop.broker import Broker, LogLine
from tests.interop.broker_client import BrokerClient, Served, from_wire
from tests.interop.broker_story import complaints, keytail, latest_by_key, repairs, start_client, state_of

pytestmark = [pytest.mark.interop, pytest.mark.spark]

INTERNAL = ("__consumer_offsets", "__transaction_state")
# Several closed segments with superseded keys, and a policy and lag that allow compaction.
SHRINKING = (
    "none gzip snappy lz4 zstd mixed-codecs tombstones odd-records idempotent append-time compact-and-delete"
    " cleaned-horizon-ahead cleaned-horizon-past transactional __consumer_offsets"
).split()
UNTOUCHED = "recent one-segment empty events __transaction_state".split()
# The topic whose tombstones may be removed; in others, their delete horizon is a day or more in the future.
TOMBSTONES_MAY_BE_REMOVED = ("cleaned-horizon-past",)
LIVE = ("idempotent", "zstd", "append-time")  # topics to which idempotent producers write in this run
RAW_PRODUCER = 800_001  # brokers do not assign such a high id


@dataclass
class Story:
    """What was observed `before` compaction, `after` it, `later` (after more traffic and another restart), and after
    the broker had `cleaned`.
    """

    log_dir: Path
    rows: list[dict[str, Any]] = field(default_factory=list)
    files: set[str] = field(default_factory=set)  # the files between the compaction and the start
    log: dict[str, list[LogLine]] = field(default_factory=dict)
    served: dict[str, list[Served]] = field(default_factory=dict)
    committed: dict[str, list[Served]] = field(default_factory=dict)
    offsets: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)
    producers: dict[str, dict[str, list[dict[str, int]]]] = field(default_factory=dict)
    first_from: dict[tuple[str, int], dict[int, int | None]] = field(default_factory=dict)
    groups: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    log_dir_errors: dict[str, list[str | None]] = field(default_factory=dict)
    resent: list[tuple[tuple[str, int], tuple[str, int]]] = field(default_factory=list)
    out_of_order: str = ""
    continued: dict[str, list[int]] = field(default_factory=dict)
    produced: dict[tuple[str, int], list[Served]] = field(default_factory=dict)

    def look(self, when: str, client: BrokerClient) -> None:
        everything = golden.partitions()
        self.offsets[when] = client.offsets(everything)
        self.served[when] = client.consume(everything)
        self.committed[when] = client.consume([("transactional", 0)], isolation="read_committed")
        self.producers[when] = {f"{t}-{n}": client.describe_producers(t, n) for t, n in everything}
        self.groups[when] = {f"group-{n}": client.committed_offsets(f"group-{n}") for n in range(8)}
        self.log_dir_errors[when] = [item["error"] for item in client.describe_log_dirs().values()]

    def of(self, when: str, topic: str) -> list[Served]:
        return [record for record in self.served[when] if record.topic == topic]

    def settled(self, when: str, topic: str) -> list[Served]:
        """Return the records except aborted ones."""
        return self.committed[when] if topic == "transactional" else self.of(when, topic)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    root = tmp_path_factory.mktemp("broker")
    log_dir = golden.unpack(root)
    seen = Story(log_dir)
    with start_client() as client:
        _run_scenario(seen, root, client)
    yield seen


def _run_scenario(seen: Story, root: Path, client: BrokerClient) -> None:
    broker = Broker(seen.log_dir, root / "work")  # one object, whose port remains the same for the producers
    with broker:
        client.connect(broker)
        seen.served["golden"] = client.consume(golden.partitions())
        last_batches = [_live_traffic(client, topic) for topic in LIVE]
        seen.look("before", client)
    given = ("--log-dirs", seen.log_dir, "--config", seen.log_dir.parent / "server.properties")
    seen.rows = keytail("compact", *given, *golden.topic_config_arguments(), "--execute")
    seen.files = {path.relative_to(seen.log_dir).as_posix() for path in seen.log_dir.rglob("*")}
    with broker:
        client.connect(broker)
        seen.look("after", client)
        _fetch_from_anywhere(seen, client)
        _send_wrong_sequences(seen, client, last_batches)
        _continue(seen, client)
        seen.offsets["produced"] = client.offsets(golden.partitions())
    seen.log["after"] = broker.log_lines()
    with broker:
        client.connect(broker)
        seen.look("later", client)
    seen.log["later"] = broker.log_lines()
    cleaning = {
        "log.cleaner.enable": "true",
        "log.cleaner.backoff.ms": "200",
        "log.cleaner.min.cleanable.ratio": "0",
    }
    with Broker(seen.log_dir, root / "cleaning", properties=cleaning) as broker:
        client.connect(broker)
        _wait_for_cleaner(seen, "zstd")
        seen.look("cleaned", client)
    seen.log["cleaned"] = broker.log_lines()


def _send_wrong_sequences(seen: Story, client: BrokerClient, last_batches: list[tuple[str, int, int]]) -> None:
    """Send a producer's last batch again, as after a lost response, and a batch that leaves a gap in the sequences."""
    for topic, sequence, base_offset in last_batches:
        again = client.raw_produce(
            topic, 0, _raw_records(sequence), producer_id=RAW_PRODUCER, epoch=1, sequence=sequence
        )
        seen.resent.append((("NONE", base_offset), again))
    seen.out_of_order, _ = client.raw_produce(
        "idempotent", 0, _raw_records(9), producer_id=RAW_PRODUCER, epoch=1, sequence=10_000
    )
    seen.offsets["resent"] = client.offsets(golden.partitions())


def _fetch_from_anywhere(seen: Story, client: BrokerClient) -> None:
    """Consume from offsets throughout each partition, each found through an index."""
    for topic, number in golden.partitions():
        start, end = seen.offsets["after"][f"{topic}-{number}"]
        asked = sorted({start + (end - start) * step // 24 for step in range(25)})
        seen.first_from[topic, number] = dict(zip(asked, client.first_from(topic, number, asked), strict=True))


def _cleaner_checkpoint(log_dir: Path, topic: str) -> int:
    lines = (log_dir / "cleaner-offset-checkpoint").read_text().splitlines()[2:]
    found = [int(line.split()[2]) for line in lines if line.split()[:2] == [topic, "0"]]
    return found[0] if found else 0


def _wait_for_cleaner(seen: Story, topic: str) -> None:
    """Wait until the broker's cleaner has continued where keytail stopped."""
    give_up = time.monotonic() + 300
    while _cleaner_checkpoint(seen.log_dir, topic) < seen.offsets["after"][f"{topic}-0"][1]:
        assert time.monotonic() < give_up, "the broker's cleaner did not continue"
        time.sleep(0.2)


def _live_traffic(client: BrokerClient, topic: str) -> tuple[str, int, int]:
    """Write with idempotent producers. One stops early, so that its last batch is in a segment that is cleaned, with
    superseded keys. Return the last batch of the raw producer: topic, sequence, base offset.
    """
    now_ms = int(time.time() * 1000)
    last = (topic, -1, -1)
    for number in range(40):
        keys = [b"user-%05d" % (key % 150) for key in range(number, number + 30)]
        records = [(now_ms + number, key, b"live %d of %s" % (number, key) * 6) for key in keys]
        if number < 3:
            client.produce(f"{topic} early", topic, 0, records, idempotent=True)
        client.produce(f"{topic} late", topic, 0, records, codec="lz4" if number % 2 else "none", idempotent=True)
        if number < 5:
            sequence = number * len(_raw_records(0))
            error, base_offset = client.raw_produce(
                topic, 0, _raw_records(sequence), producer_id=RAW_PRODUCER, epoch=1, sequence=sequence
            )
            assert error == "NONE"
            last = (topic, sequence, base_offset)
    # Supersede what the early and the raw producer wrote, and roll the segment after it.
    for number in range(4):
        records = [(now_ms + 100, b"user-%05d" % key, b"newer %d" % number * 8) for key in range(200)]
        records += [(now_ms + 100, b"raw-%d" % key, b"newer") for key in range(10)]
        client.produce(f"{topic} late", topic, 0, records, idempotent=True)
    return last


def _raw_records(sequence: int) -> list[tuple[int, bytes, bytes]]:
    now_ms = int(time.time() * 1000)
    return [(now_ms, b"raw-%d" % number, b"sequence %d" % sequence) for number in range(10)]


def _continue(seen: Story, client: BrokerClient) -> None:
    """Write more to every partition: with the same producers, a new one, and a transaction; commit offsets."""
    now_ms = int(time.time() * 1000)
    for topic in LIVE:
        for user in ("early", "late"):
            records = [(now_ms, b"went on", user.encode())]
            seen.continued[f"{topic} {user}"] = client.produce(f"{topic} {user}", topic, 0, records)
    for topic, number in golden.partitions():
        if topic in INTERNAL:
            continue
        for batch in range(3):
            new = [(now_ms, b"new %d" % key, b"batch %d" % batch, (("h", None),)) for key in range(5)]
            offsets = client.produce("afterwards", topic, number, new)
            seen.produced[topic, number] = [
                Served(topic, number, offset, at_ms, "CreateTime", key, value, headers)
                for offset, (at_ms, key, value, headers) in zip(offsets, new, strict=True)
            ]
    for number in range(4):  # these roll segments, so that the broker's cleaner has something to clean
        records = [(now_ms, b"user-%05d" % key, b"newest %d" % number * 8) for key in range(150)]
        client.produce("afterwards", "zstd", 0, records)
    client.transaction("tx-new", "begin", transactional_id="tx-new")
    client.produce("tx-new", "transactional", 0, [(now_ms, b"in a transaction", b"1")])
    client.transaction("tx-new", "commit")
    for number in range(2, 8):
        client.commit_offsets(f"group-{number}", "none", 1, [500 + number])


def test_the_golden_log_dir_is_served_unchanged(story: Story) -> None:
    assert story.served["golden"] == [from_wire(row) for row in golden.record_rows()]


def test_every_partition_was_compacted_or_skipped_with_a_reason(story: Story) -> None:
    status = {(row["topic"], row["partition"]): row["status"] for row in story.rows}
    assert status.keys() == set(golden.partitions())
    for (topic, number), found in status.items():
        if topic in SHRINKING:
            assert found == "compacted", (topic, number)
        else:
            assert found in ("clean", "skipped"), (topic, number)
    assert set(SHRINKING) | set(UNTOUCHED) == set(golden.TOPICS)


def test_only_files_of_a_broker_remain(story: Story) -> None:
    assert ".kafka_cleanshutdown" in story.files
    assert ".lock" in story.files, "the lock file must remain: a broker that starts may have it open"
    suffixes = {name.rpartition(".")[2] for name in story.files if re.search(r"/\d{20}\.", name)}
    assert suffixes <= {"log", "index", "timeindex", "txnindex", "snapshot", "checkpoint"}


@pytest.mark.parametrize("when", ["after", "later", "cleaned"])
def test_the_broker_starts_without_recovery_or_complaint(story: Story, when: str) -> None:
    lines = story.log[when]
    count = len(golden.partitions())
    skipped = [line.text for line in lines if line.text.startswith("Skipping recovery of")]
    assert skipped == [f"Skipping recovery of {count} logs from {story.log_dir} since clean shutdown file was found"]
    assert not complaints(lines)
    assert not repairs(lines)
    assert story.log_dir_errors[when] == [None]


def test_offsets_did_not_change(story: Story) -> None:
    assert story.offsets["after"] == story.offsets["before"]


def test_every_served_record_existed_before(story: Story) -> None:
    before = {record[:3]: record for record in story.served["before"]}
    assert story.served["after"]
    for record in story.served["after"]:
        assert record == before[record[:3]]


def test_a_consumer_can_start_at_any_offset(story: Story) -> None:
    for (topic, number), answers in story.first_from.items():
        offsets = [r.offset for r in story.of("after", topic) if r.partition == number]
        for asked, found in answers.items():
            expected = next((offset for offset in offsets if offset >= asked), None)
            assert found == expected, (topic, number, asked)


@pytest.mark.parametrize("topic", SHRINKING)
def test_the_latest_record_of_every_key_is_retained(story: Story, topic: str) -> None:
    before, after = story.settled("before", topic), story.settled("after", topic)
    assert len(after) < len(before), "no record was removed"
    assert state_of(after) == state_of(before)
    newest = latest_by_key(after)
    for key, record in latest_by_key(before).items():
        if record.value is None and topic in TOMBSTONES_MAY_BE_REMOVED and key not in newest:
            continue
        assert newest[key] == record


def test_tombstones_past_their_horizon_are_removed(story: Story, tmp_path: Path) -> None:
    (topic,) = TOMBSTONES_MAY_BE_REMOVED
    # Below the checkpoint of the broker's cleaner, tombstones have a horizon in the past; later ones get theirs now.
    cleaned_to = _cleaner_checkpoint(golden.unpack(tmp_path), topic)
    old = [r for r in story.of("before", topic) if r.value is None and r.offset < cleaned_to]
    assert old
    assert not {r.offset for r in old} & {r.offset for r in story.of("after", topic)}


@pytest.mark.parametrize("topic", UNTOUCHED)
def test_other_topics_are_unchanged(story: Story, topic: str) -> None:
    assert story.of("after", topic) == story.of("before", topic)


def test_aborted_records_are_removed(story: Story) -> None:
    [end] = [row["end_dirty_offset"] for row in story.rows if row["topic"] == "transactional"]
    committed = {record.offset for record in story.committed["before"]}
    aborted = [r.offset for r in story.of("before", "transactional") if r.offset not in committed]
    assert min(aborted) < end < max(aborted)
    left = {record.offset for record in story.of("after", "transactional")}
    assert [offset for offset in aborted if offset in left] == [offset for offset in aborted if offset >= end]
    assert {record.offset for record in story.committed["after"]} <= committed


def test_groups_keep_their_offsets(story: Story) -> None:
    assert story.groups["after"] == story.groups["before"]
    assert story.groups["after"]["group-7"] == {"none-0": 109, "none-1": 89}
    assert story.groups["later"]["group-7"] == {"none-0": 109, "none-1": 507}


def test_live_producers_have_the_same_state_as_before(story: Story) -> None:
    assert story.producers["after"] == story.producers["before"]
    for topic in LIVE:
        assert len(story.producers["after"][f"{topic}-0"]) == 3  # the three producers are early, late and raw


def test_a_batch_sent_again_is_recognised_as_a_duplicate(story: Story) -> None:
    assert len(story.resent) == 3
    for expected, answered in story.resent:
        assert answered == expected
    assert story.offsets["resent"] == story.offsets["after"]


def test_a_gap_in_sequences_is_refused(story: Story) -> None:
    assert story.out_of_order == "OUT_OF_ORDER_SEQUENCE_NUMBER"


def test_idempotent_producers_continue(story: Story) -> None:
    assert story.continued
    for name, (offset,) in story.continued.items():
        assert offset >= story.offsets["after"][f"{name.split()[0]}-0"][1]


def test_new_records_go_to_every_partition_and_survive_a_restart(story: Story) -> None:
    assert story.produced.keys() == {partition for partition in golden.partitions() if partition[0] not in INTERNAL}
    later = {record[:3]: record for record in story.served["later"]}
    for (topic, number), records in story.produced.items():
        assert records[0].offset >= story.offsets["after"][f"{topic}-{number}"][1]
        for record in records:
            found = later[record[:3]]
            if topic == "append-time":
                found = found._replace(timestamp_ms=record.timestamp_ms, timestamp_type=record.timestamp_type)
            assert found == record


def test_a_restart_changes_no_record(story: Story) -> None:
    assert story.offsets["later"] == story.offsets["produced"]
    ends = story.offsets["after"]
    old = [r for r in story.served["later"] if r.offset < ends[f"{r.topic}-{r.partition}"][1]]
    assert old == story.served["after"]


def test_the_brokers_own_cleaner_continues_after_keytail(story: Story) -> None:
    assert story.offsets["cleaned"] == story.offsets["later"]
    assert len(story.of("cleaned", "zstd")) < len(story.of("later", "zstd"))
    for topic in SHRINKING:
        assert state_of(story.settled("cleaned", topic)) == state_of(story.settled("later", topic)), topic
