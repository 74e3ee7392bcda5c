"""A broker starts on the output of `compact --output-dir`, compacted from the log dirs of another broker.

It opens the partitions without recovery, serves the latest record of each key, and appends; the source log dirs are
unchanged. Without `meta.properties`, no broker starts.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from tests import golden
from tests.interop.broker import Broker
from tests.interop.broker_client import BrokerClient, from_wire
from tests.interop.broker_story import KEYTAIL, complaints, keytail, latest_by_key, repairs, start_client, state_of
from tests.log_dirs import snapshot

pytestmark = pytest.mark.interop

RECORD = "keytail-output.json"


@pytest.mark.one_of("a broker starts after another command")
def test_a_broker_starts_on_an_out_of_place_compaction_and_appends(tmp_path: Path) -> None:
    log_dir, out = golden.unpack(tmp_path), tmp_path / "out"
    before = [from_wire(row) for row in golden.record_rows()]  # the records that the source broker served
    ends = {
        f"{topic.name}-{number}": tuple(offsets)
        for topic in golden.TOPICS.values()
        for number, offsets in enumerate(topic.offsets)
    }
    untouched = snapshot(log_dir)
    given = ("--log-dirs", log_dir, "--config", log_dir.parent / "server.properties")
    given = (*given, *golden.topic_config_arguments(), "--output-dir", out, "--execute")
    rows = keytail("compact", *given)
    assert {row["status"] for row in rows} == {"compacted", "clean", "skipped"}
    assert snapshot(log_dir) == untouched
    recorded = {path.parent.name for path in out.rglob(RECORD)}
    assert recorded == {path.name for path in log_dir.iterdir() if path.is_dir()}
    with start_client() as client:
        with Broker(out, tmp_path / "there") as broker:
            client.connect(broker)
            _look(client, before, ends)
            assert client.describe_topics().keys() == golden.TOPICS.keys()
            client.produce("afterwards", "zstd", 0, [(int(time.time() * 1000), b"new", b"1")])
            assert [record.value for record in client.consume([("zstd", 0)]) if record.key == b"new"] == [b"1"]
    lines = broker.log_lines()
    assert not complaints(lines) and not repairs(lines)
    skipped = f"Skipping recovery of {len(golden.partitions())} logs from {out} since clean shutdown file was found"
    assert any(line.text == skipped for line in lines)
    assert {path.parent.name for path in out.rglob(RECORD)} == recorded, "the broker does not remove unknown files"
    # The metadata log has records of this broker, which shows that a broker uses the log dir.
    command = [KEYTAIL, "compact", *given]
    again = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert again.returncode == 1
    assert "not those that keytail wrote" in again.stderr


def _look(client: BrokerClient, before: list, ends: dict) -> None:
    after = client.consume(golden.partitions())
    was = {record[:3]: record for record in before}
    assert all(record == was[record[:3]] for record in after)
    assert len(after) < len(before)
    assert client.offsets(golden.partitions()) == ends
    for topic in ("none", "zstd", "gzip", "idempotent"):
        of = [[record for record in records if record.topic == topic] for records in (before, after)]
        assert state_of(of[0]) == state_of(of[1])
        assert {key: latest_by_key(of[0])[key] for key in latest_by_key(of[1])} == latest_by_key(of[1])


def test_no_broker_starts_on_an_incomplete_target(tmp_path: Path) -> None:
    log_dir, out = golden.unpack(tmp_path), tmp_path / "out"
    given = ("--log-dirs", log_dir, "--config", log_dir.parent / "server.properties", "--output-dir", out)
    keytail("compact", *given, *golden.topic_config_arguments(), "--topic", "none|zstd", "--execute")
    assert not (out / "meta.properties").exists()
    broker = Broker(out, tmp_path / "there")
    broker._prepare = lambda config: None  # type: ignore[method-assign] (as an operator who just starts it)
    with pytest.raises(RuntimeError, match="the broker ended with status"):
        broker.start()
