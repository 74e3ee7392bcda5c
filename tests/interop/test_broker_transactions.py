"""Transactions of a real broker after a compaction: what consumers read, the state of coordinators, and new
transactions.

In one scenario, transactions of several producers interleave over many segments, and two are open when the broker
stops. keytail compacts all due partitions without a list of topics, and the broker starts again. The open transactions
are aborted, and everything is repeated. The expected contents of every partition are computed from what was sent.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.interop.broker import Broker, LogLine
from tests.interop.broker_client import BrokerClient, Served
from tests.interop.broker_story import complaints, keytail, latest_by_key, repairs, start_client
from tests.interop.kafka import Kafka

pytestmark = [pytest.mark.interop, pytest.mark.spark]

START_MS = 1_700_000_000_000
RECENT_MS = int(time.time() * 1000) - 3_600_000  # an hour ago, because a broker that starts expires idle producers
SEED = 20_260_413
SMALL_SEGMENTS = {"cleanup.policy": "compact", "internal.segment.bytes": "16384"}
LEDGER = (("ledger", 0), ("ledger", 1))  # the first partition has the open transactions
MOMENTS = ("moments", 0)
OFFSETS, TRANSACTIONS = "__consumer_offsets", "__transaction_state"
INTERNAL = (*((OFFSETS, number) for number in range(3)), (TRANSACTIONS, 0))
EVERYTHING = (*LEDGER, MOMENTS, *INTERNAL)
GROUPS = tuple(f"group-{number}" for number in range(6))
LOOKUPS = 1_500
LONG_MS = 900_000  # the maximum of a broker, so that the transaction does not expire during the scenario


class Sent(NamedTuple):
    """A record that the broker accepted. `transaction` is the name of its transaction, or empty."""

    offset: int
    timestamp_ms: int
    key: bytes
    value: bytes | None
    transaction: str


@dataclass
class Ledger:
    """All records sent to the topic, by partition, and how the transactions ended."""

    client: BrokerClient
    chance: random.Random
    sent: dict[int, list[Sent]] = field(default_factory=lambda: {0: [], 1: []})
    ended: dict[str, str] = field(default_factory=dict)  # transaction -> "commit" or "abort"
    groups: dict[str, int] = field(default_factory=dict)  # group -> committed offset
    running: dict[str, str] = field(default_factory=dict)  # producer -> its open transaction
    pending: dict[str, dict[str, int]] = field(default_factory=dict)  # transaction -> group -> offset
    count: int = 0

    def begin(self, producer: str) -> str:
        self.count += 1
        name = f"{producer} {self.count}"
        self.client.transaction(producer, "begin", transactional_id=producer, timeout_ms=LONG_MS)
        self.running[producer] = name
        self.pending[name] = {}
        return name

    def send(self, producer: str, number: int, size: int, keys: int = 160) -> None:
        """Send one batch, in the running transaction of the producer if it has one."""
        name = self.running.get(producer, "")
        self.count += 1
        records = []
        for place in range(size):
            key = b"key-%03d" % self.chance.randrange(keys)
            value = None if self.chance.random() < 0.05 else b"%d.%d of %s" % (self.count, place, name.encode() * 3)
            records.append((RECENT_MS + self.count * 1000 + place, key, value))
        offsets = self.client.produce(producer, "ledger", number, records, idempotent=True)
        self.sent[number] += [Sent(offset, *record, name) for offset, record in zip(offsets, records, strict=True)]

    def note(self, producer: str, group: str, offset: int) -> None:
        self.client.send_offsets(producer, group, "ledger", 0, offset)
        self.pending[self.running[producer]][group] = offset

    def end(self, producer: str, how: str) -> None:
        self.client.transaction(producer, how)
        self.ended_as(self.running.pop(producer), how)

    def ended_as(self, name: str, how: str) -> None:
        self.ended[name] = how
        if how == "commit":
            self.groups |= self.pending[name]

    def traffic(self, steps: int) -> None:
        """Send interleaved steps of five transactional producers and a plain one, and end all transactions."""
        for _ in range(steps):
            producer = f"tx-{self.chance.randrange(5)}"
            if self.chance.random() < 0.1:
                self.send("plain", self.chance.randrange(2), 4)
            elif producer not in self.running:
                self.begin(producer)
            elif self.chance.random() < 0.7:
                self.send(producer, self.chance.randrange(2), self.chance.randint(1, 24))
            else:
                if self.chance.random() < 0.4:
                    self.note(producer, self.chance.choice(GROUPS), self.count)
                self.end(producer, self.chance.choice(("commit", "commit", "abort")))
        for producer in [name for name in self.running if name.startswith("tx-")]:
            self.end(producer, self.chance.choice(("commit", "abort")))

    def first_offset(self, transaction: str) -> int:
        return next(record.offset for record in self.sent[0] if record.transaction == transaction)

    def is_settled(self, record: Sent) -> bool:
        return not record.transaction or self.ended.get(record.transaction) == "commit"

    def after_compaction(self, number: int, end_offset: int) -> list[Sent]:
        """Return the records that a round with this end offset retains: below it, the latest record of each key that
        was not aborted.
        """
        below = [r for r in self.sent[number] if r.offset < end_offset and self.is_settled(r)]
        newest = {record.key: record.offset for record in below}
        return [r for r in self.sent[number] if r.offset >= end_offset or newest.get(r.key) == r.offset]


@dataclass(frozen=True)
class View:
    """What the broker serves at one time. `stable` are the last stable offsets."""

    offsets: dict[str, tuple[int, int]]
    stable: dict[str, int]
    served: list[Served]
    committed: list[Served]
    groups: dict[str, dict[str, int]]
    producers: list[list[dict[str, int]]]
    errors: list[str | None]

    @classmethod
    def of(cls, client: BrokerClient) -> View:
        ends = client.offsets(EVERYTHING, isolation="read_committed")
        return cls(
            offsets=client.offsets(EVERYTHING),
            stable={name: end for name, (_, end) in ends.items()},
            served=client.consume(EVERYTHING),
            committed=client.consume(EVERYTHING, isolation="read_committed"),
            groups={group: client.committed_offsets(group) for group in (*GROUPS, "group-open")},
            producers=[client.describe_producers(*item) for item in (*LEDGER, MOMENTS)],
            errors=[item["error"] for item in client.describe_log_dirs().values()],
        )

    def records(self, partition: tuple[str, int], isolation: str = "read_uncommitted") -> list[Served]:
        found = self.committed if isolation == "read_committed" else self.served
        return [record for record in found if record[:2] == partition]


@dataclass
class Story:
    """What was observed `before` compaction, `after` it, and, with no open transaction, `before again` and `after
    again`.
    """

    log_dir: Path
    ledger: Ledger
    bases: list[int] = field(default_factory=list)  # base offsets of the segments of ledger-0 before compaction
    views: dict[str, View] = field(default_factory=dict)
    expected: dict[str, dict[int, list[Sent]]] = field(default_factory=dict)
    expected_groups: dict[str, dict[str, int]] = field(default_factory=dict)
    aborted: dict[str, set[str]] = field(default_factory=dict)
    rows: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    planned: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)  # the plan after the compaction
    log: dict[str, list[LogLine]] = field(default_factory=dict)
    left_open: list[str] = field(default_factory=list)
    stable_after_abort: list[int] = field(default_factory=list)
    times: list[int] = field(default_factory=list)
    answers: dict[str, list[tuple[int, int] | None]] = field(default_factory=dict)

    def compact(self, when: str, properties: Path) -> None:
        """Compact everything that is due, with the settings of the broker's properties file and its metadata log."""
        self.rows[when] = _by_name(keytail("compact", "--config", properties, "--execute"))
        self.planned[when] = _by_name(keytail("plan", "--config", properties))
        ends = {number: self.rows[when][f"ledger-{number}"]["end_dirty_offset"] for _, number in LEDGER}
        self.expected[when] = {number: self.ledger.after_compaction(number, end) for number, end in ends.items()}

    def look(self, when: str, client: BrokerClient) -> None:
        client.wait_until_quiet(EVERYTHING)
        self.views[when] = View.of(client)
        self.expected_groups[when] = dict(self.ledger.groups)
        self.aborted[when] = {name for name, how in self.ledger.ended.items() if how == "abort"}


def _by_name(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {f"{row['topic']}-{row['partition']}": row for row in rows}


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory, kafka: Kafka) -> Iterator[Story]:
    root = tmp_path_factory.mktemp("transactions")
    with start_client() as client:
        scenario = Story(root / "logs", Ledger(client, random.Random(SEED)))
        _run_scenario(scenario, root, client, kafka)
    yield scenario
    shutil.rmtree(root)


def _run_scenario(scenario: Story, root: Path, client: BrokerClient, kafka: Kafka) -> None:
    broker = Broker(scenario.log_dir, root / "work")  # one object, so that producers find it on the same port
    properties = root / "work" / "server.properties"
    with broker:
        client.connect(broker)
        _before(scenario, client)
        scenario.look("before", client)
        scenario.answers["before"] = client.offsets_for_times(*MOMENTS, scenario.times)
    scenario.bases = sorted(int(path.stem) for path in (scenario.log_dir / "ledger-0").glob("*.log"))
    scenario.answers["kafka"] = _answers_of_kafka(kafka, scenario, root)
    scenario.compact("after", properties)
    with broker:
        client.connect(broker)
        scenario.look("after", client)
        scenario.answers["keytail"] = client.offsets_for_times(*MOMENTS, scenario.times)
        _continue(scenario, client)
        scenario.look("before again", client)
    scenario.log["after"] = broker.log_lines()
    scenario.compact("after again", properties)
    with broker:
        client.connect(broker)
        scenario.look("after again", client)
    scenario.log["after again"] = broker.log_lines()


def _before(scenario: Story, client: BrokerClient) -> None:
    client.create_topic("ledger", 2, SMALL_SEGMENTS)
    client.create_topic("moments", 1, SMALL_SEGMENTS)
    ledger = scenario.ledger
    ledger.begin("tx-0")  # this creates the topics of the coordinators
    ledger.note("tx-0", GROUPS[0], 1)
    ledger.end("tx-0", "commit")
    for topic in (OFFSETS, TRANSACTIONS):
        client.alter_configs(topic, {"internal.segment.bytes": "4096"})
    for group in GROUPS:
        client.commit_offsets(group, "ledger", 1, range(1, 40))
    ledger.traffic(260)
    for producer in ("open-a", "open-b"):
        scenario.left_open.append(ledger.begin(producer))
        ledger.send(producer, 0, 30)
        if producer == "open-a":
            ledger.note(producer, "group-open", 7)
        ledger.traffic(60)
    ledger.send("open-a", 0, 30)
    scenario.times = _times_for_lookups(client)


def _times_for_lookups(client: BrokerClient) -> list[int]:
    """Write records of which all but a quarter and the last ones are superseded; return times for lookups."""
    count, step_ms = 4_000, 60_000
    chance = random.Random(SEED)
    for first in range(0, count, 20):
        records = []
        for number in range(first, first + 20):
            key = b"once-%d" % number if number < count // 4 else b"often-%d" % (number % 40)
            records.append((START_MS + number * step_ms + chance.randrange(3 * step_ms), key, b"%040d" % number))
        client.produce("moments", *MOMENTS, records)
    return [START_MS + count * step_ms * number // LOOKUPS for number in range(LOOKUPS)]


def _answers_of_kafka(kafka: Kafka, scenario: Story, root: Path) -> list[tuple[int, int] | None]:
    """Return Kafka's answers after a first round of its own cleaner on a copy of the same log."""
    copy = root / "copy" / "moments-0"
    shutil.copytree(scenario.log_dir / "moments-0", copy)
    kafka.clean(copy, configs=SMALL_SEGMENTS)
    found = kafka.load(copy, configs=SMALL_SEGMENTS, records=False, timestamps=scenario.times).timestamps
    answers = (found[asked] for asked in scenario.times)
    return [None if answer is None else (answer[1], answer[0]) for answer in answers]


def _continue(scenario: Story, client: BrokerClient) -> None:
    """Commit offsets and transactions with existing and new producers; then abort the open transactions in two ways."""
    ledger = scenario.ledger
    ledger.traffic(60)
    ledger.begin("new")
    ledger.send("new", 0, 5)
    ledger.note("new", GROUPS[1], 4711)
    ledger.end("new", "commit")
    client.commit_offsets(GROUPS[2], "ledger", 1, [4712])
    first, second = scenario.left_open
    # A new producer with the same transactional id, as after a restart of the client.
    ledger.ended_as(first, "abort")
    client.transaction("open-a again", "begin", transactional_id="open-a")
    ledger.running["open-a again"] = "open-a again"
    ledger.pending["open-a again"] = {}
    scenario.stable_after_abort.append(_stable(client))
    client.abort_transaction("ledger", 0, ledger.first_offset(second))
    ledger.ended_as(second, "abort")
    scenario.stable_after_abort.append(_stable(client))
    ledger.send("open-a again", 0, 20)
    ledger.end("open-a again", "commit")
    ledger.traffic(150)


def _stable(client: BrokerClient) -> int:
    return client.offsets(LEDGER[:1], isolation="read_committed")["ledger-0"][1]


def _seen(records: Sequence[Served]) -> list[tuple[Any, ...]]:
    return [(r.offset, r.timestamp_ms, r.key, r.value) for r in records]


def _right_answers(served: Sequence[Served], times: Sequence[int]) -> list[tuple[int, int] | None]:
    return [next(((r.offset, r.timestamp_ms) for r in served if r.timestamp_ms >= asked), None) for asked in times]


ROUNDS = ("after", "after again")


def test_the_traffic_covers_the_required_cases(story: Story) -> None:
    """The traffic has aborted, committed and plain records of many keys, and interleaved transactions that span
    segments."""
    before = story.views["before"]
    for topic, number in LEDGER:
        _, end = before.offsets[f"{topic}-{number}"]
        sent = [record[:4] for record in story.ledger.sent[number] if record.offset < end]
        assert _seen(before.records((topic, number))) == sent
        assert len(sent) > 1000
    offsets = [[r.offset for r in story.ledger.sent[0] if r.transaction == name] for name in story.ledger.ended]
    spans = [(found[0], found[-1]) for found in offsets if found]
    assert any(a < c < b < d for a, b in spans for c, d in spans)
    assert any(first < base <= last for base in story.bases for first, last in spans)
    assert len(story.aborted["before"]) > 15


@pytest.mark.parametrize("when", ROUNDS)
def test_all_due_partitions_are_compacted_without_a_list_of_topics(story: Story, when: str) -> None:
    rows = story.rows[when]
    assert rows.keys() == {f"{topic}-{number}" for topic, number in EVERYTHING}
    assert {name: row["status"] for name, row in rows.items() if name.startswith("ledger")} == {
        "ledger-0": "compacted",
        "ledger-1": "compacted",
    }
    assert {row["status"] for row in rows.values()} <= {"compacted", "clean", "skipped"}
    if when == "after":
        assert rows["moments-0"]["status"] == rows["__transaction_state-0"]["status"] == "compacted"
        assert "compacted" in {rows[f"{OFFSETS}-{number}"]["status"] for number in range(3)}
        assert rows["moments-0"]["segments_after"] < rows["moments-0"]["segments_before"] / 2


def test_records_from_the_open_transaction_on_are_unchanged(story: Story) -> None:
    first = story.ledger.first_offset(story.left_open[0])
    row = story.rows["after"]["ledger-0"]
    assert row["end_dirty_offset"] == max(base for base in story.bases if base <= first) > 0
    assert story.views["before"].stable["ledger-0"] == first
    assert story.views["before"].stable["ledger-1"] == story.views["before"].offsets["ledger-1"][1]
    again = story.planned["after"]["ledger-0"]
    assert again["status"] == "skipped"
    assert f"{first}" in again["error"]
    assert "transaction" in again["error"]


@pytest.mark.parametrize("when", ROUNDS)
@pytest.mark.parametrize("number", [0, 1])
def test_uncommitted_readers_see_the_latest_records_that_were_not_aborted(story: Story, when: str, number: int) -> None:
    seen = _seen(story.views[when].records(("ledger", number)))
    assert seen == [record[:4] for record in story.expected[when][number]]
    assert len(seen) < len(story.views[f"before{when[5:]}"].records(("ledger", number)))


@pytest.mark.parametrize("when", ROUNDS)
@pytest.mark.parametrize("number", [0, 1])
def test_committed_readers_see_nothing_aborted_or_open(story: Story, when: str, number: int) -> None:
    stable = story.views[when].stable[f"ledger-{number}"]
    unseen = story.aborted[when]
    expected = [
        record[:4]
        for record in story.expected[when][number]
        if record.offset < stable and record.transaction not in unseen
    ]
    assert _seen(story.views[when].records(("ledger", number), "read_committed")) == expected


@pytest.mark.parametrize("when", ROUNDS)
def test_aborted_records_are_removed_from_compacted_partitions(story: Story, when: str) -> None:
    for topic, number in LEDGER:
        end = story.rows[when][f"{topic}-{number}"]["end_dirty_offset"]
        aborted = {r.offset for r in story.ledger.sent[number] if r.transaction in story.aborted[when]}
        assert any(offset < end for offset in aborted)
        left = {record.offset for record in story.views[when].records((topic, number))}
        assert not {offset for offset in left & aborted if offset < end}


@pytest.mark.parametrize("when", ROUNDS)
def test_offsets_producers_and_last_stable_offsets_did_not_change(story: Story, when: str) -> None:
    before, after = story.views[f"before{when[5:]}"], story.views[when]
    assert after.offsets == before.offsets
    assert after.stable == before.stable
    assert after.producers == before.producers
    assert any(item["transaction_start_offset"] >= 0 for item in before.producers[0]) == (when == "after")


@pytest.mark.parametrize("when", ROUNDS)
def test_the_broker_starts_without_recovery_or_complaint(story: Story, when: str) -> None:
    lines = story.log[when]
    [skipped] = [line.text for line in lines if line.text.startswith("Skipping recovery of")]
    assert skipped.endswith("since clean shutdown file was found")
    assert not complaints(lines)
    assert not repairs(lines)
    assert story.views[when].errors == [None]


@pytest.mark.parametrize("when", ["before", "after", "before again", "after again"])
def test_groups_have_the_committed_offsets(story: Story, when: str) -> None:
    """Offsets of aborted or open transactions are not visible."""
    found = {group: offsets["ledger-0"] for group, offsets in story.views[when].groups.items() if "ledger-0" in offsets}
    assert found == story.expected_groups[when]
    assert len(found) > 3
    assert "group-open" not in found


def test_group_offsets_are_the_same_after_compaction(story: Story) -> None:
    assert story.views["after"].groups == story.views["before"].groups
    assert story.views["after again"].groups == story.views["before again"].groups
    assert story.views["after again"].groups[GROUPS[2]]["ledger-1"] == 4712


@pytest.mark.parametrize("when", ROUNDS)
def test_the_coordinators_logs_retain_the_latest_record_of_each_key(story: Story, when: str) -> None:
    before, after = story.views[f"before{when[5:]}"], story.views[when]
    for item in INTERNAL:
        old, new = (latest_by_key(view.records(item, "read_committed")) for view in (before, after))
        assert new == old
        if story.rows[when][f"{item[0]}-{item[1]}"]["status"] == "compacted":
            assert len(after.records(item)) < len(before.records(item))
            assert {*_seen(after.records(item))} <= {*_seen(before.records(item))}


def test_open_transactions_can_be_aborted(story: Story) -> None:
    """One transaction is aborted through its transactional id, the other by an administrator; each time, the last
    stable offset advances.
    """
    first, second = (story.ledger.first_offset(name) for name in story.left_open)
    assert story.views["after"].stable["ledger-0"] == first
    end_then = next(r.offset for r in story.ledger.sent[0] if r.transaction == "open-a again")
    assert story.stable_after_abort == [second, end_then]
    again = story.views["before again"]
    assert again.stable["ledger-0"] == again.offsets["ledger-0"][1]
    left = {r.transaction for r in story.expected["after again"][0] if r.transaction in story.left_open}
    assert not left, "their partitions must be compacted in the second round"


def test_transactions_continue_after_compaction(story: Story) -> None:
    newer = story.views["before again"].records(LEDGER[0], "read_committed")
    by_offset = {record.offset: record.transaction for record in story.ledger.sent[0]}
    seen = {by_offset[record.offset].rpartition(" ")[0] for record in newer}
    assert {"tx-0", "tx-1", "tx-2", "tx-3", "tx-4", "new", "open-a"} <= seen


@pytest.mark.parametrize("when", ROUNDS)
def test_a_further_plan_has_nothing_to_compact(story: Story, when: str) -> None:
    assert {row["status"] for row in story.planned[when].values()} <= {"clean", "skipped"}


def test_time_lookups_are_correct_after_the_first_round(
    story: Story, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kafka's own first round leaves empty segments, which Kafka treats as later than any time; its answers are then
    wrong.
    """
    before, after = (story.views[when].records(MOMENTS) for when in ("before", "after"))
    assert story.answers["before"] == _right_answers(before, story.times)
    right = _right_answers(after, story.times)
    wrong = {
        user: sum(answer != expected for answer, expected in zip(story.answers[user], right, strict=True))
        for user in ("keytail", "kafka")
    }
    with capsys.disabled():
        print(f"\nwrong answers to {LOOKUPS} time lookups, by whose round it was: {wrong}")
    assert wrong["keytail"] == 0
    assert wrong["kafka"] > LOOKUPS / 2
