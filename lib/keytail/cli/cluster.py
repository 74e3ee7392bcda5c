"""Describes the cluster that log dirs belong to, by the metadata log in these log dirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keytail.cli.configuration import NO_METADATA, SETTINGS_COMMAND
from keytail.config.message_format import ClusterMode
from keytail.config.resolve import Layer, broker_options, topic_options
from keytail.console import listed
from keytail.durations import duration_text, time_text
from keytail.errors import NO_ERROR, ErrorText, Refused
from keytail.format import names
from keytail.log.cluster.metadata import ClusterMetadata, read_topic_id
from keytail.log.fs import FileSystem
from keytail.log.partition import PartitionEntry

# A metadata log is old, or stale, if it ends more than this time before the run, or before the latest appended data.
OLD_MS = 3_600_000
GIVE_SETTINGS = (
    f"Save the settings of topics from any running broker of the cluster: `{SETTINGS_COMMAND} > topics.txt`; then run "
    "again with --topic-configs topics.txt"
)


@dataclass(frozen=True)
class Cluster:
    """The cluster that the log dirs belong to, as described by their metadata log.

    `problem` is the reason why the metadata log gives no information; `metadata` is None in this case. `is_absent`:
    there is no metadata log. `mode` is derived from the metadata log, from `meta.properties` or from the broker's file.
    """

    broker: int = -1
    metadata: ClusterMetadata | None = None
    problem: ErrorText = NO_ERROR
    mode: ClusterMode = "unknown"
    is_absent: bool = False

    @property
    def origin(self) -> str:
        assert self.metadata is not None
        return f"metadata log at offset {self.metadata.as_of_offset}"

    def sentence(self, now_ms: int, instead: str = GIVE_SETTINGS) -> str:
        """Return a message about the metadata log, with a warning if that log is old. If the log gives no information,
        return the reason and `instead`, a sentence about where the settings of topics come from.
        """
        if self.metadata is None:
            return self.problem + f". {instead}"
        at = self.metadata
        message = f"metadata as of offset {at.as_of_offset}, time {time_text(at.as_of_ms)} ({at.path})"
        if at.uncertain_topics:
            message += f". {_uncertain(at.uncertain_topics)}"
        if at.unknown_types:
            types = ", ".join(map(str, at.unknown_types))
            message += (
                f". Warning: records of type {types} are ignored, because this release does not know them: if they "
                "concern topics, the settings used here may not be the effective settings. Update keytail"
            )
        if not self.is_old(now_ms):
            return message
        age = duration_text(now_ms - at.as_of_ms)
        return f"{message}. Warning: this time is {age} before this run; settings of topics may have changed since"

    @property
    def is_uncertain(self) -> bool:
        return self.metadata is not None and bool(self.metadata.uncertain_topics or self.metadata.unknown_types)

    def is_old(self, now_ms: int) -> bool:
        return self.metadata is not None and 0 <= self.metadata.as_of_ms < now_ms - OLD_MS

    def topics(self, topic: str) -> Mapping[str, Layer]:
        """Return a mapping of `topic` to its layer of settings; empty if the metadata does not have these settings."""
        at = self.metadata
        if at is None or topic not in at.topics or topic in at.uncertain_topics:
            return {}
        return {topic: topic_options(topic, at.topic_configs[topic], self.origin)}

    def why_unknown(self, topic: str) -> str:
        """Return the reason why this metadata does not have the settings of `topic`."""
        if self.metadata is None:
            return self.problem or NO_METADATA
        why = self.metadata.uncertain_topics.get(topic)
        return f"{why} ({self.metadata.path})" if why else f"the {self.origin} has no topic {topic}"

    def dynamic(self) -> Sequence[Layer]:
        if self.metadata is None:
            return ()
        return (
            broker_options(self.metadata.cluster_configs, f"{self.origin}, all brokers"),
            broker_options(self.metadata.broker_configs, f"{self.origin}, broker {self.broker}"),
        )

    def refuse_stray(self, fs: FileSystem, entry: PartitionEntry) -> None:
        """Raise Refused if the metadata shows that the partition's directory is stray: a starting broker renames it."""
        if self.metadata is None or entry.topic in self.metadata.uncertain_topics:
            return
        why = self._stray(fs, entry)
        if why:
            raise Refused(
                f"stray: {why}",
                path=entry.path,
                remedy="If the directory is needed, find out why it is in this log dir: a broker that starts renames "
                "it",
                slug="stray-partition",
            )

    def _stray(self, fs: FileSystem, entry: PartitionEntry) -> str:
        assert self.metadata is not None
        topic = self.metadata.topics.get(entry.topic)
        if topic is None:
            return f"the {self.origin} has no topic {entry.topic}"
        topic_id = read_topic_id(fs, entry.path)
        if topic_id is None:
            return f"the directory has no {names.PARTITION_METADATA}, from which a broker reads its topic id"
        if topic_id != topic.topic_id:
            return f"the topic id of the directory is {topic_id}, but topic {entry.topic} has {topic.topic_id}"
        replicas = topic.replicas.get(entry.partition)
        if replicas is None:
            return f"{entry.topic} has no partition {entry.partition}"
        if self.broker not in replicas:
            return f"broker {self.broker} is not among the partition's replicas {', '.join(map(str, replicas))}"
        return ""


def _uncertain(topics: Mapping[str, str]) -> str:
    named = sorted(topics)
    return (
        f"Warning: the settings of {listed(named)} are unknown: {topics[named[0]]}. Update "
        "keytail, or give their settings with --topic-configs"
    )
