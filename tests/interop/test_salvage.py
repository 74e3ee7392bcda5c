"""The output of salvage for damaged logs of Kafka: Kafka's loader accepts it without a repair, and a real broker serves
the salvaged records, and appends.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

from tests import golden
from tests.chance import SEED, cases
from tests.interop.broker import Broker
from tests.interop.broker_client import from_wire
from tests.interop.broker_story import complaints, keytail, repairs, start_client
from tests.interop.damages import batches
from tests.interop.kafka import Kafka, Record
from tests.interop.test_rebuild import KINDS, traffic_of
from tests.salvage.test_partition import salvage

pytestmark = pytest.mark.interop

LOGS = int(os.environ.get("KEYTAIL_FUZZ_LOGS", "0")) // 10 or 8


def damage(rng: random.Random, partition: Path) -> None:
    """Flip, remove or overwrite bytes of one log file, or remove a file.

    The offset of an intact batch is not changed: no checksum covers it, so it is not detectable in a gap or at the log
    end. salvage/test_partition.py changes offsets where this is detectable.
    """
    logs = [path for path in sorted(partition.glob("*.log")) if path.stat().st_size]
    while True:
        path = rng.choice(logs)
        data = bytearray(path.read_bytes())
        at, size = rng.randrange(len(data)), rng.choice([1, 40, 500])
        match rng.randrange(5):
            case 0:
                at += 20 - at if at < 20 else 0
                data[min(at, len(data) - 1)] ^= 1 << rng.randrange(8)
            case 1:
                del data[at : at + size]
            case 2:
                data[at : at + size] = rng.randbytes(len(data[at : at + size]))
            case 3:
                del data[at:]
            case 4 if len(logs) > 2:
                path.unlink()
                return
        if not any(batch not in data and batch[8:] in data for _, batch in batches(path)):
            path.write_bytes(data)
            return


def is_lost(record: Record, losses: list[tuple[int, int | None]]) -> bool:
    return any(first <= record.offset and (end is None or record.offset < end) for first, end in losses)


@pytest.mark.parametrize("kind", KINDS)
def test_kafkas_loader_accepts_salvaged_logs_without_repair(kafka: Kafka, fast_dir: Path, kind: str) -> None:
    lost = 0
    for number in cases(LOGS, lambda: lost):
        rng = random.Random(f"{SEED} {kind} {number}")
        traffic = traffic_of(rng, kind, far_jumps=False)
        source = fast_dir / f"{number}" / "t-0"
        for _ in range(2):
            options = traffic.options
            kafka.append(source, traffic.steps(), **options)
        options = traffic.options
        before = kafka.load(source, **options)
        damage(rng, source)
        found = salvage(source, fast_dir / f"{number}-to", high_watermark=before.log_end_offset)
        after = kafka.load(fast_dir / f"{number}-to" / "t-0", fetch=True, transactions=True, **options)
        what = f"log {number}, {traffic.configs}, {found}"
        assert after.repaired == [] and after.warnings == [], what
        assert after.fetch_mismatches == (), what
        assert after.log_end_offset == before.log_end_offset == found.log_end_offset, what
        losses = [(loss.first_offset, loss.end_offset) for loss in found.losses if loss.certain or loss.kind == "gap"]
        unlost = [record for record in before.records if not is_lost(record, losses)]
        assert set(after.records) <= set(before.records), what
        if not found.gaps:  # a gap means that a whole batch was lost
            assert list(after.records) == unlost, what
        lost += len(before.records) - len(after.records)
        # The open transactions of the result are those that are reported.
        still_open = {producer[0]: producer[7] for producer in after.producers if producer[7] >= 0}
        if found.certain and not any(path.suffix == ".snapshot" for path in source.iterdir()):
            reported = {item.producer_id: item.first_offset for item in found.transactions if item.at_offset is None}
            assert still_open == reported, what


PARTITIONS = [("none", 0), ("zstd", 0), ("transactional", 0), ("idempotent", 0)]


@pytest.mark.one_of("a broker starts after expire, salvage or undo")
def test_a_real_broker_serves_the_salvaged_records(tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("broker")
    log_dir = golden.unpack(root)
    rng = random.Random(SEED)
    for topic, number in PARTITIONS:
        [path] = [max((log_dir / f"{topic}-{number}").glob("*.log"), key=lambda item: item.stat().st_size)]
        data = bytearray(path.read_bytes())
        at = rng.randrange(len(data) // 4, len(data) * 3 // 4)
        data[at : at + 300] = rng.randbytes(300)
        path.write_bytes(data)
    names = ",".join(f"{topic}-{number}" for topic, number in PARTITIONS)
    rows = keytail("salvage", "--log-dirs", log_dir, "--partitions", names, "--to", root / "saved", "--execute")
    losses = {}
    for row in rows:
        name = f"{row['topic']}-{row['partition']}"
        assert row["status"] == "salvaged" and row["to"] == str(root / "saved" / name)
        losses[row["topic"]] = [(item["first_offset"], item["end_offset"]) for item in row["losses"] if item["certain"]]
        assert losses[row["topic"]]
        shutil.move(log_dir / name, root / f"{name}-damaged")
        shutil.move(row["to"], log_dir / name)
    broker = Broker(log_dir, root / "work")
    with start_client() as client, broker:
        client.connect(broker)
        served = client.consume(PARTITIONS)
        new = {topic: client.produce("new", topic, number, [(1, b"k", b"v")]) for topic, number in PARTITIONS}
        offsets = client.offsets(PARTITIONS)
    everything = [from_wire(row) for row in golden.record_rows()]
    for topic, number in PARTITIONS:
        wanted = [item for item in everything if item[:2] == (topic, number)]
        wanted = [item for item in wanted if not any(first <= item[2] < end for first, end in losses[topic])]
        assert [item[2] for item in served if item[:2] == (topic, number)] == [item[2] for item in wanted]
        assert [item for item in served if item[:2] == (topic, number)] == wanted
        end = golden.TOPICS[topic].offsets[number][1]
        assert new[topic] == [end], "the broker must append at the log end"
        assert offsets[f"{topic}-{number}"][1] == end + 1
    assert complaints(broker.log_lines()) == []
    assert repairs(broker.log_lines()) == []

