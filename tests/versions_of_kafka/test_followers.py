"""Logs of followers, which append all batches of a fetch at once: `verify` finds no problem, and lookups are correct.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from tests.chance import chance
from tests.command_line import Run, rows_of, run
from tests.golden.older import _records, topics_of, wait_for_cleaner
from tests.golden.test_older import answers_are_right
from tests.interop.broker import Broker, tool
from tests.interop.broker_client import BrokerClient
from tests.interop.kafka import broker_class_path
from tests.versions_of_kafka import VERSIONS, has_zookeeper
from tests.versions_of_kafka.broker import Follower, ZooKeeperBroker

__all__ = ["run"]
pytestmark = [pytest.mark.interop, pytest.mark.soak("test_log_dirs.py: the same checks of the logs of leaders")]

LIMIT_S = 300.0
PROPERTIES = {
    "log.cleaner.enable": "true",
    "log.cleaner.backoff.ms": "200",
    "log.cleaner.io.buffer.size": "4096",
    "offsets.topic.num.partitions": "1",
}
NEVER_CLEANED = {"min.compaction.lag.ms": "315360000000"}


def create(broker: Broker, topic: str, configs: dict[str, str]) -> None:
    """Create a topic with broker 1 as the leader, and broker 2 as its follower."""
    arguments = ["--create", "--bootstrap-server", broker.bootstrap, "--topic", topic, "--replica-assignment", "1:2"]
    for name, value in configs.items():
        arguments += ["--config", f"{name}={value}"]
    command = [tool("java"), "-Xmx128m", "-cp", broker_class_path(broker.version), "kafka.admin.TopicCommand"]
    subprocess.run([*command, *arguments], check=True, capture_output=True)


def wait_until_equal(leader: Path, follower: Path, topics: list[str]) -> None:
    """Wait until the follower has as many bytes as the leader of these topics, which are never cleaned."""
    give_up = time.monotonic() + LIMIT_S
    while any(_bytes(leader / f"{topic}-0") != _bytes(follower / f"{topic}-0") for topic in topics):
        assert time.monotonic() < give_up, "the follower did not catch up"
        time.sleep(0.1)


def _bytes(partition: Path) -> int:
    return sum(path.stat().st_size for path in partition.glob("*.log"))


@pytest.mark.parametrize("version", [v for v in VERSIONS if has_zookeeper(v)], indirect=True)
def test_logs_of_followers_have_no_problems(run: Run, version: str, tmp_path: Path) -> None:
    rng, topics = chance(), topics_of(version)
    theirs, ours = tmp_path / "leader", tmp_path / "follower"
    leader = ZooKeeperBroker(theirs, tmp_path / "work-1", version=version, properties=PROPERTIES)
    follower = Follower(leader, ours, tmp_path / "work-2", properties=PROPERTIES)
    never_cleaned = [topic for topic in topics if "cleaned" not in topic]

    def send(share: float) -> None:
        for topic, (_, codecs, batches) in topics.items():
            for number in range(int(batches * share)):
                codec = rng.choice(codecs)
                client.produce(f"{topic} {codec}", topic, 0, _records(rng, number), codec=codec)

    with leader, BrokerClient() as client:
        client.connect(leader)
        with follower:
            for topic, (configs, _, _) in topics.items():
                create(leader, topic, configs | (NEVER_CLEANED if topic in never_cleaned else {}))
            send(0.2)
            wait_until_equal(theirs, ours, never_cleaned)
            follower.stop()
            send(0.5)
            follower.start()
            wait_until_equal(theirs, ours, never_cleaned)
            follower.kill()
            send(0.2)
            follower.start()
            send(0.2)
            wait_until_equal(theirs, ours, never_cleaned)
            for log_dir in (theirs, ours):
                wait_for_cleaner(log_dir, [topic for topic in topics if topic not in never_cleaned])
            follower.stop()
        leader.stop()
    for log_dir in (theirs, ours):
        # Segments that the follower truncated may not be deleted yet, which is a warning.
        verified = rows_of(run("verify", "--log-dirs", log_dir, "--output", "json"))
        findings = [finding for row in verified.values() for finding in row["findings"]]
        assert [finding for finding in findings if finding["severity"] == "error"] == []
        logs = [path for path in log_dir.rglob("*.log") if path.stat().st_size and path.parent.name[0] != "_"]
        assert len(logs) > len(topics)
        assert all(map(answers_are_right, logs))
