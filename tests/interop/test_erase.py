"""A real broker after `erase`: it starts without a complaint, consumers receive exactly the other records, producers
continue, and no file has a key or a value of an erased record.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests import golden
from tests.interop.broker import Broker
from tests.interop.broker_client import BrokerClient, Served
from tests.interop.broker_story import complaints, keytail, repairs, start_client
from tests.reference import codecs
from tests.reference.batches import HEADER, decode_log

pytestmark = pytest.mark.interop

PEOPLE = ("people", 0)
RAW_PRODUCER, EPOCH = 900_001, 1
KEYS = {b"user-%05d" % number for number in range(0, 400, 7)} | {b"key-%d" % number for number in range(10, 40, 3)}
KEYS |= {b"anna", b"bert"}


def people(client: BrokerClient) -> tuple[int, int]:
    """Write to a topic of policy `delete`; return sequence and base offset of the last batch of the raw producer, all
    of whose records are erased."""
    now_ms = int(time.time() * 1000) - 60_000
    configs = {"cleanup.policy": "delete", "retention.ms": "-1", "internal.segment.bytes": "4096"}
    client.create_topic("people", 1, configs)
    raw = (0, 0)
    for number in range(30):
        names = [b"anna", b"carl", b"bert", None, b"dora"] if number % 3 else [b"anna", b"bert"]
        records = [(now_ms + number, name, b"%s in batch %d" % (name or b"nobody", number) * 4) for name in names]
        client.produce("lasting", "people", 0, records, codec=("none", "lz4", "zstd")[number % 3], idempotent=True)
        if number % 5 == 0:
            client.transaction("tx", "begin", transactional_id="tx")
            client.produce("tx", "people", 0, [(t, k, b"tx " + v) for t, k, v in records])
            client.transaction("tx", "abort" if number % 2 else "commit")
        if number in (3, 9):
            of_raw = [(now_ms, b"anna", b"raw anna"), (now_ms, b"bert", b"raw bert")]
            error, base = client.raw_produce(
                "people", 0, of_raw, producer_id=RAW_PRODUCER, epoch=EPOCH, sequence=raw[0] + 2 if number == 9 else 0
            )
            assert error == "NONE"
            raw = (2 if number == 9 else 0, base)
    client.wait_until_decided([PEOPLE])
    return raw


def others(served: Iterable[Served]) -> list[Served]:
    return [record for record in served if record.key not in KEYS]


def producers(client: BrokerClient) -> list[dict[str, int]]:
    """Return the producers of the topic without their times, which are those of the records that are left."""
    found = [
        {name: value for name, value in producer.items() if name != "last_timestamp_ms"}
        for producer in client.describe_producers(*PEOPLE)
    ]
    return sorted(found, key=lambda producer: producer["producer_id"])


def blocks_of(log: bytes) -> Iterable[bytes]:
    """Yield the record blocks of a segment, decompressed."""
    for batch in decode_log(log):
        block = log[batch.position + HEADER.size : batch.position + batch.size]
        yield codecs.decompress(batch.codec, block) if batch.record_count else block


def assert_nothing_left(log_dir: Path, values: set[bytes]) -> None:
    for path in sorted(log_dir.glob("*-*/*")):
        if path.parent.name.startswith("__") or not path.is_file():
            continue
        data = path.read_bytes()
        contents = b"\n".join([data, *(blocks_of(data) if path.suffix == ".log" else ())])
        for wanted in {*KEYS, *values}:
            assert wanted not in contents, (path, wanted)


@pytest.mark.one_of("a broker starts after expire, salvage or undo")
def test_consumers_receive_exactly_the_other_records_and_producers_continue(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    root = tmp_path_factory.mktemp("broker")  # a path without words that occur in messages about repairs
    log_dir = golden.unpack(root)
    topics = [p for p in golden.partitions() if not p[0].startswith("__")] + [PEOPLE]
    broker = Broker(log_dir, root / "work")
    with start_client() as client:
        with broker:
            client.connect(broker)
            raw_sequence, raw_base = people(client)
            before, committed = client.consume(topics), client.consume(topics, isolation="read_committed")
            offsets, stable = client.offsets(topics), client.offsets(topics, isolation="read_committed")
            states = producers(client)
        keys_file = root / "keys"
        keys_file.write_bytes(b"\n".join(sorted(KEYS)) + b"\n")
        flags = ("--config", root / "server.properties", "--keys-file", keys_file, "--topic", "(?!__).*")
        planned = keytail("erase", *flags)
        rows = keytail("erase", *flags, "--execute")
        assert {row["status"] for row in rows} == {"erased", "absent"}
        assert [row["records_erased"] for row in planned] == [row["records_erased"] for row in rows]
        assert {row["status"] for row in keytail("erase", *flags, "--execute")} == {"absent"}
        gone = [record for record in before if record.key in KEYS]
        of_topics = {record.topic for record in gone}
        assert {"events", "gzip", "snappy", "lz4", "zstd", "none", "transactional", "people"} <= of_topics
        left = b"\0".join({record.value for record in others(before) if record.value})
        values = {record.value for record in gone if record.value and record.value not in left}
        assert len(values) > 500
        assert_nothing_left(log_dir, values)
        with broker:
            client.connect(broker)
            assert client.offsets(topics) == offsets
            assert client.offsets(topics, isolation="read_committed") == stable
            assert client.consume(topics) == others(before)
            assert client.consume(topics, isolation="read_committed") == others(committed)
            assert producers(client) == states
            start, end = offsets["people-0"]
            of_people = [record.offset for record in others(before) if record.topic == "people"]
            expected = [next((at for at in of_people if at >= offset), None) for offset in range(start, end, 5)]
            assert client.first_from(*PEOPLE, range(start, end, 5)) == expected
            times = sorted({record.timestamp_ms for record in before if record.topic == "events"})
            events = [record for record in others(before) if record.topic == "events"]
            wanted = [next(((e.offset, e.timestamp_ms) for e in events if e.timestamp_ms >= ms), None) for ms in times]
            assert client.offsets_for_times("events", 0, times) == wanted
            of_raw = [(0, b"anna", b"raw anna"), (0, b"bert", b"raw bert")]
            ids = {"producer_id": RAW_PRODUCER, "epoch": EPOCH}
            again = client.raw_produce("people", 0, of_raw, **ids, sequence=raw_sequence)
            assert again == ("NONE", raw_base), "a duplicate of an emptied batch is recognised"
            now_ms = int(time.time() * 1000)
            added = client.produce("lasting", "people", 0, [(now_ms, b"carl", b"later")], idempotent=True)
            client.transaction("tx", "begin", transactional_id="tx")
            added += client.produce("tx", "people", 0, [(now_ms, b"dora", b"later")])
            client.transaction("tx", "commit")
            client.wait_until_decided([PEOPLE])
            assert added == [end, end + 1]
            states = producers(client)
            last = client.consume([PEOPLE], isolation="read_committed")
        assert not complaints(broker.log_lines())
        assert not repairs(broker.log_lines())
        for path in log_dir.glob("people-0/*.snapshot"):  # the broker rebuilds the state of producers from the log
            path.unlink()
        (log_dir / ".kafka_cleanshutdown").unlink()
        (log_dir / "recovery-point-offset-checkpoint").unlink()
        with broker:
            client.connect(broker)
            assert producers(client) == states
            assert client.consume([PEOPLE], isolation="read_committed") == last
            assert client.offsets([PEOPLE])["people-0"] == (0, end + 3)
            again = client.raw_produce("people", 0, of_raw, **ids, sequence=raw_sequence)
            assert again == ("NONE", raw_base)
