"""What the metadata log in the log dirs adds to the configuration, and which partitions it does not know.

Read before anything is decided; by an executing run, under the locks. A metadata log that cannot be read leaves
topics unknown, for the reason given, unless the command line says what they are.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from keytail.app.selection import Configuration
from keytail.config.files import parse_node_id
from keytail.config.keys import KEYS, file_names
from keytail.config.resolve import Layer, Setting, broker_options, topic_options
from keytail.durations import duration_text
from keytail.errors import KeytailError, Refused
from keytail.format import names
from keytail.log.fs import FileSystem
from keytail.log.metadata import ClusterMetadata, find_metadata_dir, read_metadata, read_topic_id
from keytail.log.partition import PartitionEntry
from keytail.telling import say

_OLD_MS = 3_600_000


@dataclass(frozen=True)
class Cluster:
    """The cluster that the log dirs belong to, as far as their metadata log tells.

    `problem` says why it tells nothing; then there is no `metadata`.
    """

    broker: int = -1
    metadata: ClusterMetadata | None = None
    problem: str = ""

    @property
    def origin(self) -> str:
        assert self.metadata is not None
        return f"metadata log at offset {self.metadata.as_of_offset}"

    def sentence(self, now_ms: int) -> str:
        """What to tell a person about it, with a warning where it is old."""
        if self.metadata is None:
            return self.problem
        at = self.metadata
        said = f"metadata as of offset {at.as_of_offset}, time {_time(at.as_of_ms)} ({at.path})"
        if not self.is_old(now_ms):
            return said
        age = duration_text(now_ms - at.as_of_ms)
        return f"{said}. Warning: that is {age} before this run, and settings of topics may have changed since"

    def is_old(self, now_ms: int) -> bool:
        return self.metadata is not None and 0 <= self.metadata.as_of_ms < now_ms - _OLD_MS

    def topics(self, topic: str) -> Mapping[str, Layer]:
        """The entry of `topic` for `effective`, where the metadata has one."""
        if self.metadata is None or topic not in self.metadata.topics:
            return {}
        return {topic: topic_options(topic, self.metadata.topic_configs[topic], self.origin)}

    def dynamic(self) -> Sequence[Layer]:
        if self.metadata is None:
            return ()
        return (
            broker_options(self.metadata.cluster_configs, f"{self.origin}, all brokers"),
            broker_options(self.metadata.broker_configs, f"{self.origin}, broker {self.broker}"),
        )

    def refuse_unknown(self, topic: str) -> None:
        """Refused when the metadata log could not be read, for a topic of which nothing else is known."""
        if self.problem:
            raise Refused(
                f"topic config unknown: {self.problem}",
                remedy=f"Or give --topic-config {topic}:key=value or --topics-have-no-overrides",
            )

    def refuse_stray(self, fs: FileSystem, entry: PartitionEntry) -> None:
        """Refused when a broker that starts would move the partition's directory out of the way."""
        if self.metadata is None:
            return
        why = self._stray(fs, entry)
        if why:
            raise Refused(
                f"stray: {why}",
                path=entry.path,
                remedy="A broker that starts here renames the directory; if it is needed, find out why it is here",
            )

    def _stray(self, fs: FileSystem, entry: PartitionEntry) -> str:
        assert self.metadata is not None
        topic = self.metadata.topics.get(entry.topic)
        if topic is None:
            return f"the {self.origin} has no topic {entry.topic}"
        topic_id = read_topic_id(fs, entry.path)
        if topic_id is None:
            return f"the directory has no {names.PARTITION_METADATA}, by which a broker knows whose it is"
        if topic_id != topic.topic_id:
            return f"the directory is of topic id {topic_id}, but {entry.topic} has {topic.topic_id}"
        replicas = topic.replicas.get(entry.partition)
        if replicas is None:
            return f"{entry.topic} has no partition {entry.partition}"
        if self.broker not in replicas:
            return f"broker {self.broker} is not among the partition's replicas {', '.join(map(str, replicas))}"
        return ""


def _time(ms: int) -> str:
    try:
        return f"{ms} ms ({time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(ms / 1000))} UTC)"
    except (OverflowError, ValueError, OSError):  # no time of this calendar
        return f"{ms} ms"


def with_metadata(fs: FileSystem, log_dirs: Sequence[str], configuration: Configuration) -> Configuration:
    """The configuration and what the metadata log of these log dirs, if they hold one, adds to it."""
    own_dir = _value(configuration.broker, "metadata.log.dir")
    try:
        path = find_metadata_dir(fs, [*([str(own_dir)] if own_dir else []), *log_dirs])
        if path is None:
            return configuration
        broker = _broker(fs, log_dirs, configuration.broker)
        metadata = read_metadata(fs, path, broker, {*KEYS, *file_names()})
    except (KeytailError, OSError) as problem:
        return replace(configuration, cluster=Cluster(problem=str(problem)))
    return replace(configuration, cluster=Cluster(broker, metadata))


def metadata_told(
    fs: FileSystem, log_dirs: Sequence[str], configuration: Configuration, now_ms: int
) -> Configuration:
    """As `with_metadata`, with a word on standard error about how old the metadata is."""
    configuration = with_metadata(fs, log_dirs, configuration)
    if (cluster := configuration.cluster) is not None:
        is_wrong = cluster.metadata is None or cluster.is_old(now_ms)
        say(f"keytail: {cluster.sentence(now_ms)}", "warning" if is_wrong else "info")
    return configuration


def _value(broker: Mapping[str, Setting], name: str) -> object:
    return broker[name].value if name in broker else None


def _broker(fs: FileSystem, log_dirs: Sequence[str], broker: Mapping[str, Setting]) -> int:
    """The broker's number, on which its log dirs and its file must agree."""
    said: dict[int, str] = {}
    for log_dir in log_dirs:
        path = os.path.join(log_dir, names.META_PROPERTIES)
        if fs.exists(path):
            number = parse_node_id(fs.read_bytes(path), path)
            if number is not None:
                said[number] = path
    in_file = _value(broker, "node.id")
    if isinstance(in_file, int):
        said[in_file] = broker["node.id"].source
    if len(said) != 1:
        listed = ", ".join(f"{number} in {where}" for number, where in sorted(said.items()))
        raise Refused(
            f"the broker's number differs: {listed}" if said else "no meta.properties names the broker's number",
            remedy="Give the log dirs of one broker, and with --config the server.properties of the same",
        )
    return next(iter(said))
