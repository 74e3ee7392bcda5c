"""Lookups by keytail compared with offsetsForTimes and fetches of a real broker, on golden and on random logs.

The random logs have timestamps out of order, all codecs, and both timestamp types. Some are compacted by Kafka's own
cleaner. Others have index files that are missing, empty or full of zeros when the broker starts; keytail predicts the
answers of the broker.
"""

from __future__ import annotations

import json
import random
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from keytail.log.fs import LOCAL
from keytail.log.log_dirs import survey_log_dirs
from keytail.log.partition import PartitionFacts, survey_partition
from keytail.lookup.steps import Lookup, lookup_offset, lookup_time
from tests import golden
from tests.chance import SEED
from tests.interop.broker import Broker
from tests.interop.broker_client import BrokerClient
from tests.interop.broker_story import keytail, start_client
from tests.interop.kafka import Kafka
from tests.lookup.test_steps import NOW, Damage, no_time_index, survey, write_three_segments, zeros

pytestmark = pytest.mark.interop

THEN = 1_700_000_000_000
CONFIGS = {"cleanup.policy": "compact", "internal.segment.bytes": "16384", "index.interval.bytes": "512"}
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
DAMAGED = "damaged"
DAMAGES = ("no index", "no index at all", "no time index", "empty time index", "zeros", "untrimmed")
RANDOM = ("created", "appended", "late", DAMAGED)
Partition = tuple[str, int]


@dataclass
class Story:
    """The answers of keytail before the broker started (`reported`) and beside it (`beside`), and those of the broker.
    """

    log_dir: Path
    times: dict[Partition, list[int]] = field(default_factory=dict)
    offsets: dict[Partition, list[int]] = field(default_factory=dict)
    reported_times: dict[Partition, list[Lookup]] = field(default_factory=dict)
    reported_offsets: dict[Partition, list[int | None]] = field(default_factory=dict)
    beside_times: dict[Partition, list[Lookup]] = field(default_factory=dict)
    beside_offsets: dict[Partition, list[int | None]] = field(default_factory=dict)
    broker_times: dict[Partition, list[tuple[int, int] | None]] = field(default_factory=dict)
    broker_offsets: dict[Partition, list[int | None]] = field(default_factory=dict)
    keys: dict[tuple[str, int, int], bytes | None] = field(default_factory=dict)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory, kafka: Kafka) -> Story:
    rng = random.Random(SEED)
    root = tmp_path_factory.mktemp("lookup")
    seen = Story(golden.unpack(root))
    broker = Broker(seen.log_dir, root / "work")
    with start_client() as client:
        with broker:
            client.connect(broker)
            _random_topics(rng, client)
        for topic in RANDOM[:2]:
            # With larger segments than before, no segment becomes empty; Kafka treats an empty one as later than any
            # time.
            larger = CONFIGS | {"internal.segment.bytes": "65536"}
            kafka.clean(seen.log_dir / f"{topic}-0", configs=larger, clock_ms=int(time.time() * 1000))
        for number, damage in enumerate(DAMAGES):
            _damage(seen.log_dir / f"{DAMAGED}-{number}", damage, rng)
        facts = _survey(seen.log_dir)
        for partition, fact in facts.items():
            _choose(rng, seen, partition, fact)
        seen.reported_times, seen.reported_offsets = _answers_of_keytail(seen, facts)
        with broker:
            client.connect(broker)
            for topic, number in facts:
                asked = seen.times[topic, number], seen.offsets[topic, number]
                seen.broker_times[topic, number] = client.offsets_for_times(topic, number, asked[0])
                seen.broker_offsets[topic, number] = client.first_from(topic, number, asked[1])
            seen.beside_times, seen.beside_offsets = _answers_of_keytail(seen, _survey(seen.log_dir))
            served = client.consume([("created", 0), ("appended", 0)])
            seen.keys = {(record.topic, record.partition, record.offset): record.key for record in served}
    return seen


def _random_topics(rng: random.Random, client: BrokerClient) -> None:
    client.create_topic("created", 1, CONFIGS)
    client.create_topic("appended", 1, CONFIGS | {"message.timestamp.type": "LogAppendTime"})
    client.create_topic("late", 1, CONFIGS | {"cleanup.policy": "delete", "retention.ms": "-1"})
    client.create_topic(DAMAGED, len(DAMAGES), CONFIGS | {"internal.segment.bytes": "4096"})
    for topic, number, batches in (
        *((topic, 0, 120) for topic in RANDOM[:3]),
        *((DAMAGED, number, 30) for number in range(len(DAMAGES))),
    ):
        for batch in range(batches):
            times = [THEN + batch * 1000 + rng.choice([0, 0, 500, -9000, 9000]) for _ in range(rng.choice([1, 3, 40]))]
            values = (rng.randbytes(rng.choice([0, 5, 90])) for _ in times)
            keys = (b"%d" % rng.randrange(300) for _ in times)
            records = list(zip(times, keys, values, strict=True))
            codec = rng.choice(CODECS)
            client.produce(f"{topic} {codec}", topic, number, records, codec=codec)
    client.delete_records("late", 0, rng.randint(200, 900))


def _damage(partition: Path, damage: str, rng: random.Random) -> None:
    """Remove or damage index files of the first closed segment and, with some probability, of each other one."""
    for number, log in enumerate(sorted(partition.glob("*.log"))[:-1]):
        if number and rng.random() < 0.4:
            continue
        index, time_index = log.with_suffix(".index"), log.with_suffix(".timeindex")
        if damage.startswith("no index"):
            index.unlink()
        if damage in ("no index at all", "no time index"):
            time_index.unlink()
        elif damage == "empty time index":
            time_index.write_bytes(b"")
        elif damage == "zeros":
            time_index.write_bytes(rng.choice([time_index.read_bytes(), b""]) + bytes(12 * 100))
        elif damage == "untrimmed":
            index.write_bytes(index.read_bytes() + bytes(8 * rng.choice([3, 5000])))


def _survey(log_dir: Path) -> dict[Partition, PartitionFacts]:
    [listed] = survey_log_dirs(LOCAL, [str(log_dir)])
    wanted = {*golden.partitions(), *((topic, 0) for topic in RANDOM), *((DAMAGED, n) for n in range(len(DAMAGES)))}
    return {
        (entry.topic, entry.partition): survey_partition(LOCAL, listed, entry)
        for entry in listed.partitions
        if (entry.topic, entry.partition) in wanted
    }


def _choose(rng: random.Random, seen: Story, partition: Partition, facts: PartitionFacts) -> None:
    """Choose times near those of the segments, and offsets throughout the log and at both ends."""
    count = 60 if partition[0] in RANDOM else 12
    start, end = facts.log_start_offset, facts.log_end_offset
    largest = [segment.largest_timestamp_ms for segment in facts.segments]
    earliest = min([THEN, *(s.first_batch_timestamp_ms for s in facts.segments if s.first_batch_timestamp_ms > 0)])
    near = [time_ms + step for time_ms in largest for step in (-1, 0, 1)]
    some = [rng.randint(earliest - 10_000, max(*largest, earliest) + 1000) for _ in range(count)]
    if partition[0] in ("created", "late", DAMAGED):  # a few timestamps are years later: draw times near the others
        some = [THEN - 10_000 + rng.randint(0, 150_000) for _ in range(count)]
    if partition[0] != DAMAGED:  # there, the answers must differ at the damaged segments
        near = rng.sample(near, min(len(near), 12))
    seen.times[partition] = sorted(max(t, 0) for t in {0, *near, *some})
    seen.offsets[partition] = sorted({start, end, *(rng.randint(start, end) for _ in range(count // 3))})


def _answers_of_keytail(
    seen: Story, facts: dict[Partition, PartitionFacts]
) -> tuple[dict[Partition, list[Lookup]], dict[Partition, list[int | None]]]:
    times = {p: [lookup_time(LOCAL, facts[p], item) for item in asked] for p, asked in seen.times.items()}
    return times, {p: [_first_from(facts[p], item) for item in asked] for p, asked in seen.offsets.items()}


def _first_from(facts: PartitionFacts, offset: int) -> int | None:
    """Return the offset of the first record that a consumer receives from `offset` on; it receives no control records.
    """
    record = lookup_offset(LOCAL, facts, offset).record
    while record is not None and record.control:
        record = lookup_offset(LOCAL, facts, record.offset + 1).record
    return None if record is None else record.offset


def _answer(result: Lookup) -> tuple[int, int] | None:
    return None if result.record is None else (result.record.offset, result.record.timestamp_ms)


def _predicted(result: Lookup) -> tuple[int, int] | None:
    """Return the answer that, according to the notes, the broker gives."""
    for note in result.notes:
        if found := re.search(r"A broker that starts .* returns offset (\d+), timestamp (\d+)", note):
            return int(found[1]), int(found[2])
        if re.search(r"A broker that starts .* returns nothing$", note):
            return None
    return _answer(result)


def test_lookups_by_time_equal_those_of_the_broker(story: Story) -> None:
    compared = found = 0
    for partition, results in story.reported_times.items():
        own = dict(zip(story.times[partition], map(_predicted, results), strict=True))
        assert own == dict(zip(story.times[partition], story.broker_times[partition], strict=True)), partition
        compared += len(own)
        found += sum(answer is not None for answer in own.values())
    assert compared > 800
    assert found > compared / 3


def test_fetches_begin_at_the_same_offset_as_those_of_the_broker(story: Story) -> None:
    assert story.reported_offsets == story.broker_offsets
    assert sum(map(len, story.reported_offsets.values())) > 200
    gaps = [asked - found for p in (("created", 0), ("appended", 0)) for asked, found in
            zip(story.offsets[p], story.reported_offsets[p], strict=True) if found is not None]  # fmt: skip
    assert any(gaps)  # some requested records were removed by compaction


def test_lookups_beside_the_running_broker_equal_its_own(story: Story) -> None:
    for partition, results in story.beside_times.items():
        assert [_predicted(result) for result in results] == story.broker_times[partition], partition
    assert story.beside_offsets == story.broker_offsets


@pytest.mark.parametrize("number", range(len(DAMAGES)), ids=DAMAGES)
def test_damaged_indexes_are_reported(number: int, story: Story) -> None:
    results = story.reported_times[DAMAGED, number]
    notes = {note for result in results for note in result.notes}
    says = {"zeros": "ends with zeros", "untrimmed": "was not trimmed", "empty time index": "is empty"}
    assert any(says.get(DAMAGES[number], "is missing") in note for note in notes)
    # keytail ignores such an index and reads the records, so its answer is that of the undamaged log.
    differs = [_answer(result) != _predicted(result) for result in results]
    assert any(differs) == (DAMAGES[number] in ("no time index", "empty time index", "zeros"))


@pytest.mark.parametrize("damage", [no_time_index, zeros])
@pytest.mark.parametrize("recovery_point", [0, 21, 40])
def test_after_an_unclean_shutdown_recovered_indexes_are_predicted(
    damage: Damage, recovery_point: int, kafka: Kafka, tmp_path: Path
) -> None:
    partition = write_three_segments(tmp_path / "logs" / "t-0", damage)
    (partition.parent / "recovery-point-offset-checkpoint").write_text(f"0\n1\nt 0 {recovery_point}\n")
    facts = survey(partition, clean=False)
    times = [NOW - 2, NOW + 5, NOW + 19, NOW + 25, NOW + 39, NOW + 41, NOW + 59, NOW + 60]
    reported = [_predicted(lookup_time(LOCAL, facts, item)) for item in times]
    theirs = kafka.load(partition, clean=False, recovery_point=recovery_point, timestamps=times).timestamps
    answers = (theirs[item] for item in times)
    assert reported == [None if answer is None else (answer[1], answer[0]) for answer in answers]


def test_records_and_their_positions_are_correct(story: Story) -> None:
    for partition in (("created", 0), ("appended", 0)):
        for result in story.beside_times[partition]:
            if result.record is not None:
                record = result.record
                assert story.keys[(*partition, record.offset)] == record.key
                path = story.log_dir / f"{partition[0]}-0" / f"{record.segment:020d}.log"
                header = path.read_bytes()[record.byte_position :][:12]
                assert int.from_bytes(header[:8]) == record.batch_base_offset
                assert int.from_bytes(header[8:]) + 12 == record.batch_bytes


def test_the_command_prints_the_same_answers(story: Story) -> None:
    asked, expected = next(
        (asked, answer)
        for asked, answer in zip(story.times["created", 0], story.broker_times["created", 0], strict=True)
        if answer is not None
    )
    where = ("--log-dirs", story.log_dir, "--partitions", "created-0")
    [row] = keytail("lookup", *where, "--timestamp", str(asked), "--explain")
    assert (row["status"], row["offset"], row["timestamp_ms"]) == ("found", *expected)
    assert len(row["steps"]) >= 5
    json.dumps(row)
    [row] = keytail("lookup", *where, "--offset", str(row["offset"]))
    assert (row["status"], row["offset"]) == ("found", expected[0])
