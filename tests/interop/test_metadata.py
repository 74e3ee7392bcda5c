"""The metadata log of a real broker, with snapshots, read while the broker runs, after a stop, and after a crash. In
one scenario, topics are created, changed, deleted and created again. Each test checks what keytail reads at one time.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from keytail.config.keys import KEYS, TOPIC_KEYS, file_names
from keytail.format.names import parse_metadata_snapshot
from keytail.log.cluster.metadata import METADATA_DIR, ClusterMetadata, read_metadata
from keytail.log.fs import LOCAL
from tests.interop.broker import NODE_ID, Broker
from tests.interop.broker_client import BrokerClient, client_command
from tests.interop.kafka import KafkaUnavailable

pytestmark = pytest.mark.interop

OFTEN = {
    "internal.metadata.log.segment.bytes": "8192",
    "metadata.log.max.record.bytes.between.snapshots": "2000",
    "metadata.max.idle.interval.ms": "4",
}
# By the names in the properties file; of several synonyms, the first is effective.
SYNONYMS = {
    "log.roll.hours": "3",
    "log.retention.hours": "9",
    "log.retention.minutes": "70",
    "log.segment.bytes": "3000000",
    "log.index.interval.bytes": "5000",
    "log.cleaner.min.compaction.lag.ms": "11",
    "log.cleaner.min.cleanable.ratio": "0.25",
    "log.cleaner.delete.retention.ms": "12",
    "message.max.bytes": "2000000",
}
# Values of synonyms in hours and minutes: the broker uses them, but reports them as defaults.
IN_HOURS_AND_MINUTES = {
    "segment.ms": "server.properties: log.roll.hours=3", "retention.ms": "server.properties: log.retention.minutes=70"
}
SOURCES = {
    "DYNAMIC_TOPIC_CONFIG": "of topic",
    "DYNAMIC_BROKER_CONFIG": "broker 1",
    "DYNAMIC_DEFAULT_BROKER_CONFIG": "all brokers",
    "STATIC_BROKER_CONFIG": "server.properties",
    "DEFAULT_CONFIG": "default",
}
FIRST = (
    "create kept 3 cleanup.policy=compact segment.bytes=2000000",
    "create plain 1",
    "create gone 1 cleanup.policy=compact",
    "create again 1 cleanup.policy=compact delete.retention.ms=5",
    "broker all log.cleaner.min.compaction.lag.ms=77",
    "broker all log.retention.ms=1000",
    "broker 1 log.cleaner.min.compaction.lag.ms=78",
    "delete gone",
    "delete again",
    "topic kept delete.retention.ms=6",
    "topic kept segment.bytes",
    "broker all log.retention.ms",
)
MADE_AGAIN = ("create again 2 cleanup.policy=delete",)
LATER = ("topic kept cleanup.policy=delete", "topic plain retention.ms=9", "create late 1 cleanup.policy=compact")
KEPT = {*KEYS, *file_names()}


def read(log_dir: Path) -> ClusterMetadata:
    return read_metadata(LOCAL, str(log_dir / METADATA_DIR), NODE_ID, KEPT)


@dataclass
class Story:
    log_dir: Path
    described: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    # by topic, as printed by `describe --all`
    settings: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    found: dict[str, ClusterMetadata] = field(default_factory=dict)
    without_old_segments: ClusterMetadata | None = None
    beside: list[ClusterMetadata] = field(default_factory=list)

    def look(self, when: str) -> None:
        self.found[when] = read(self.log_dir)

    def wait(self, what: Callable[[ClusterMetadata], bool]) -> None:
        """Read beside the broker until the condition holds; every read must succeed."""
        give_up = time.monotonic() + 300
        while not what(self.read_beside()):
            assert time.monotonic() < give_up, self.beside[-1]
            time.sleep(0.02)

    def read_beside(self) -> ClusterMetadata:
        self.beside.append(read(self.log_dir))
        return self.beside[-1]

    @property
    def newest_snapshot(self) -> int:
        names = (path.name for path in (self.log_dir / METADATA_DIR).iterdir())
        return max((found[0] for name in names if (found := parse_metadata_snapshot(name))), default=0)


def change(broker: Broker, *commands: str) -> None:
    command = [*client_command("MetadataAdmin", "128m"), broker.bootstrap, *commands]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _without_old_segments(scenario: Story, copy: Path) -> Path:
    """Copy the metadata log without the segments that the snapshot covers; a broker removes these later."""
    shutil.copytree(scenario.log_dir / METADATA_DIR, copy / METADATA_DIR)
    logs = sorted((copy / METADATA_DIR).glob("*.log"))
    contained = [path for path, after in pairwise(logs) if int(after.stem) <= scenario.newest_snapshot]
    assert contained
    for path in contained:
        path.unlink()
    return copy


def _until_stopped(scenario: Story, client: BrokerClient, work_dir: Path) -> None:
    with Broker(scenario.log_dir, work_dir, properties={**OFTEN, **SYNONYMS}) as broker:
        client.connect(broker)
        change(broker, *FIRST)
        change(broker, *MADE_AGAIN)
        end = scenario.read_beside().as_of_offset
        scenario.wait(lambda _: scenario.newest_snapshot > end and len(scenario.beside) > 20)
        scenario.described["stopped"] = client.describe_topics()
    scenario.look("stopped")
    scenario.settings = _settings(work_dir / "server.properties")
    scenario.without_old_segments = read(_without_old_segments(scenario, work_dir / "copy"))


def _settings(config: Path) -> dict[str, dict[str, dict[str, Any]]]:
    command = [sys.executable, "-m", "keytail", "describe", "--config", str(config), "--all"]
    done = subprocess.run([*command, "--output", "json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {row["topic"]: row["settings"] for row in json.loads(done.stdout)}


def _until_killed(scenario: Story, client: BrokerClient, work_dir: Path) -> None:
    """Run a broker that writes no snapshot, and kill it, so that its last records may be uncommitted."""
    with Broker(scenario.log_dir, work_dir) as broker:
        client.connect(broker)
        change(broker, *LATER)
        # The controller has committed the last change, the new topic, but the broker may not know it yet.
        while "late" not in (described := client.describe_topics()):
            time.sleep(0.02)
        scenario.described["killed"] = described
        broker.kill()
    scenario.look("killed")


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    work_dir = tmp_path_factory.mktemp("metadata")
    scenario = Story(work_dir / "logs")
    try:
        client = BrokerClient()
    except KafkaUnavailable as reason:
        if os.environ.get("KEYTAIL_NO_SKIP") == "1":
            pytest.fail(f"KEYTAIL_NO_SKIP=1, and there is no broker to start: {reason}")
        pytest.skip(f"no broker to start: {reason}")
    with client:
        _until_stopped(scenario, client, work_dir / "stopped")
        _until_killed(scenario, client, work_dir / "killed")
    shutil.rmtree(work_dir)
    yield scenario


def test_the_latest_snapshot_replaces_the_segments_before_it(story: Story) -> None:
    assert story.without_old_segments is not None
    assert replace(story.without_old_segments, path="") == replace(story.found["stopped"], path="")


@pytest.mark.parametrize("when", ["stopped", "killed"])
def test_topics_partitions_ids_and_configs_are_those_of_the_broker(story: Story, when: str) -> None:
    described, found = story.described[when], story.found[when]
    assert found.topics.keys() == described.keys() >= {"kept", "plain", "again"}
    for name, topic in described.items():
        assert found.topics[name].topic_id == topic["id"]
        assert found.topics[name].replicas == dict.fromkeys(range(topic["partitions"]), (NODE_ID,))
        newest = {key: values[-1] for key, values in found.topic_configs[name].items() if values[-1] is not None}
        assert newest == {key: value for key, value in topic["configs"].items() if key in KEPT}, name


def test_every_effective_setting_and_its_source_are_those_of_the_broker(story: Story) -> None:
    compared: set[str] = set()
    for topic, settings in story.settings.items():
        holding = story.described["stopped"][topic]["holding"]
        for key in TOPIC_KEYS:
            if key.name not in holding:
                continue
            value, source = holding[key.name]
            found = settings[key.name]
            text = ",".join(found["value"]) if isinstance(found["value"], list) else str(found["value"])
            assert text.lower() == value.lower(), (topic, key.name)
            expected = IN_HOURS_AND_MINUTES.get(key.name, SOURCES[source])
            assert expected in found["source"], (topic, key.name, source)
            compared.add(source)
    assert story.settings.keys() == {"kept", "plain", "again"}
    assert compared >= {"DYNAMIC_TOPIC_CONFIG", "DYNAMIC_BROKER_CONFIG", "STATIC_BROKER_CONFIG", "DEFAULT_CONFIG"}


def test_a_committed_setting_has_one_value(story: Story) -> None:
    found = story.found["stopped"]
    assert found.topic_configs["kept"] == {"cleanup.policy": ("compact",), "delete.retention.ms": ("6",)}
    assert found.topic_configs["again"] == {"cleanup.policy": ("delete",)}
    assert found.cluster_configs["log.cleaner.min.compaction.lag.ms"] == ("77",)
    assert found.broker_configs == {"log.cleaner.min.compaction.lag.ms": ("78",)}
    assert "log.retention.ms" not in found.cluster_configs


def test_a_setting_changed_just_before_a_crash_has_two_possible_values(story: Story) -> None:
    found = story.found["killed"]
    assert found.topic_configs["kept"]["cleanup.policy"] == ("compact", "delete")
    assert found.topic_configs["plain"]["retention.ms"] == (None, "9")
    assert found.topic_configs["late"] == {"cleanup.policy": ("compact",)}


def test_every_read_beside_the_broker_returned_an_actual_state(story: Story) -> None:
    assert len(story.beside) > 20
    offsets = [found.as_of_offset for found in story.beside]
    assert offsets == sorted(offsets)
    for found in story.beside:
        assert "gone" not in found.topics
        assert found.topics.keys() >= {"kept", "plain"}
