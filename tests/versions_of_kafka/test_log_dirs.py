"""`verify` finds no problem in log dirs of brokers of each version, and they can be compacted with the flags that a
message requires.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
from pathlib import Path

import pytest

from tests.chance import chance
from tests.command_line import Run, rows_of, run
from tests.golden.older import wait_for_cleaner
from tests.interop.broker import Broker, tool
from tests.interop.broker_client import BrokerClient
from tests.interop.kafka import broker_class_path
from tests.versions_of_kafka import has_zookeeper
from tests.versions_of_kafka.broker import broker_of
from tests.versions_of_kafka.consumers import java_records

__all__ = ["run"]
pytestmark = [pytest.mark.interop]

THEN_MS = 1_700_000_000_000
CODECS = ("none", "none", "none", "gzip", "snappy", "lz4", "zstd")
CLEANER = {"log.cleaner.enable": "true", "log.cleaner.backoff.ms": "200", "log.cleaner.io.buffer.size": "4096"}


def small_segments(version: str) -> dict[str, str]:
    """Return the settings for small segments; from 4.1 on, only a setting for Kafka's tests allows them."""
    is_new = tuple(map(int, version.split(".")[:2])) >= (4, 1)
    return {"internal.segment.bytes" if is_new else "segment.bytes": "16384", "index.interval.bytes": "512"}


def printed_settings(broker: Broker) -> str:
    """Return the output of `kafka-configs.sh --describe --entity-type topics --all`."""
    arguments = ("--bootstrap-server", broker.bootstrap, "--describe", "--entity-type", "topics", "--all")
    command = [tool("java"), "-Xmx128m", "-cp", broker_class_path(broker.version), "kafka.admin.ConfigCommand"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, check=True).stdout


def send(client: BrokerClient, topic: str, rng: random.Random) -> None:
    for number in range(80):
        codec = rng.choice(CODECS)
        records = [
            (THEN_MS + number * 1000 + rng.randrange(5000), b"k%d" % rng.randrange(60), rng.choice([None, b"v" * 50]))
            for _ in range(rng.choice((1, 5, 30)))
        ]
        client.produce(f"{topic} {codec}", topic, 0, records, codec=codec)


@pytest.mark.one_of("a broker starts on its compacted log dir")
@pytest.mark.parametrize("is_cleaned", [pytest.param(False, marks=pytest.mark.soak("test_story.py")), True])
def test_log_dirs_of_a_broker_have_no_problems_and_can_be_compacted(
    run: Run, version: str, tmp_path: Path, is_cleaned: bool
) -> None:
    log_dir, rng = tmp_path / "logs", chance()
    properties = CLEANER if is_cleaned else {}
    with broker_of(version, log_dir, tmp_path / "work", properties=properties) as broker, BrokerClient() as client:
        client.connect(broker)
        compacted = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.01", "file.delete.delay.ms": "0"}
        client.create_topic("t", 1, {**compacted, **small_segments(version)})
        client.create_topic("events", 1, {"cleanup.policy": "delete", "retention.ms": "-1", **small_segments(version)})
        for topic in ("t", "events"):
            send(client, topic, rng)
        if is_cleaned:
            wait_for_cleaner(log_dir, ["t"])
        printed = printed_settings(broker)
        before = {record.key: record for record in client.consume([("t", 0)])}
        broker.stop()

        verified = run("verify", "--log-dirs", log_dir, "--output", "json")
        assert verified.exit_code == 0, verified.stdout
        rebuilt = run("rebuild-index", "--log-dirs", log_dir, "--output", "json")
        assert {row["status"] for row in json.loads(rebuilt.stdout)} == {"sound"}, rebuilt.stdout
        flags = required_flags(run, version, log_dir, printed, tmp_path)
        done = run("compact", "--log-dirs", log_dir, "--execute", "--force", "--output", "json", *flags)
        assert done.exit_code == 0, done.stdout
        assert rows_of(done)["t-0"]["status"] in (("compacted", "clean") if is_cleaned else ("compacted",))
        assert rows_of(done)["events-0"]["status"] == "skipped"
        expired = run("expire", "--log-dirs", log_dir, "--output", "json", "--topic", "(?!__).*", *flags)
        assert expired.exit_code == 0, expired.stdout
        assert run("verify", "--log-dirs", log_dir).exit_code == 0

        broker.start()
        after = java_records(broker, [("t", 0)])
        latest = {record.key: record for record in after}
        assert {key: item for key, item in latest.items() if item.value is not None} == {
            key: item for key, item in before.items() if item.value is not None
        }


def required_flags(run: Run, version: str, log_dir: Path, printed: str, tmp_path: Path) -> tuple[str | Path, ...]:
    """Return the flags that `plan` requires if it is run without flags: none if the log dir has a metadata log."""
    message = re.sub(r"\s+", " ", run("plan", "--log-dirs", log_dir).stderr)
    if not has_zookeeper(version):
        assert "metadata as of offset" in message
        return ()
    assert "the broker runs with ZooKeeper" in message
    assert (
        "--describe --entity-type topics --all > topics.txt`; then run again with --topic-configs topics.txt" in message
    )
    (tmp_path / "topics.txt").write_text(printed)
    return "--topic-configs", tmp_path / "topics.txt"
