"""A real broker on a log dir after `expire`: it starts without recovery, serves the remaining records, and appends."""

from __future__ import annotations

import pytest

from tests import golden
from tests.interop.broker import Broker
from tests.interop.broker_client import from_wire
from tests.interop.broker_story import complaints, keytail, repairs, start_client

pytestmark = pytest.mark.interop

# Settings that remove a part of a log, all of it, and only segments below its log start offset.
SETTINGS = (
    "events:retention.bytes=40000 events:retention.ms=-1"
    " transactional:cleanup.policy=delete transactional:retention.bytes=20000 transactional:retention.ms=-1"
    " none:cleanup.policy=delete none:retention.ms=1000"
    " compact-and-delete:retention.ms=-1"
).split()


@pytest.mark.one_of("a broker starts after expire, salvage or undo")
def test_a_broker_starts_after_expire_and_serves_the_remaining_records(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    root = tmp_path_factory.mktemp("broker")  # a path without words that occur in messages about repairs
    log_dir = golden.unpack(root)
    config = [word for setting in SETTINGS for word in ("--topic-config", setting)]
    rows = keytail("expire", "--config", root / "server.properties", *config, "--execute")
    by_name = {f"{row['topic']}-{row['partition']}": row for row in rows}
    reasons = {name: {segment["reason"] for segment in row["expired"]} for name, row in by_name.items()}
    assert reasons["events-0"] == reasons["transactional-0"] == {"size"}
    assert reasons["none-0"] == {"time"}
    assert by_name["none-0"]["log_start_after"] == by_name["none-0"]["log_end_offset"] > 0
    assert by_name["events-0"]["segments_after"] > 1
    assert by_name["compact-and-delete-0"]["log_start_after"] == 350
    assert {row["status"] for row in rows} == {"expired", "kept"}
    assert not any(row["findings"] for row in rows)
    broker = Broker(log_dir, root / "work")
    with start_client() as client, broker:
        client.connect(broker)
        offsets = client.offsets(golden.partitions())
        served = client.consume(golden.partitions())
        committed = client.consume([("transactional", 0)], isolation="read_committed")
        appended = client.produce("p", "none", 0, [(1_700_000_000_000, b"k", b"v")])
    assert offsets == {name: (row["log_start_after"], row["log_end_offset"]) for name, row in by_name.items()}
    starts = {name: start for name, (start, _) in offsets.items()}
    before = [from_wire(row) for row in golden.record_rows()]
    expected = [record for record in before if record.offset >= starts[f"{record.topic}-{record.partition}"]]
    assert served == sorted(expected, key=lambda record: record[:3])
    assert 0 < len(committed) < len([record for record in served if record.topic == "transactional"])
    assert appended == [by_name["none-0"]["log_end_offset"]]
    lines = broker.log_lines()
    assert not complaints(lines)
    assert not repairs(lines)
