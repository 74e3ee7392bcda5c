"""Defines the configuration of a run: settings of topics from flags, files and the metadata log."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from keytail.cli import options as o
from keytail.cli.flags import FromFlags
from keytail.config.broker_version import BrokerVersion
from keytail.config.compaction import CompactionConfig
from keytail.config.files import parse_server_properties
from keytail.config.kafka_version import METADATA_VERSION
from keytail.config.message_format import MessageFormat, message_format
from keytail.config.producer_expiration import Expiration, producer_expiration
from keytail.config.resolve import (
    CLEANUP_POLICY,
    LOG_DIRS,
    USED,
    CommandLine,
    Resolved,
    Setting,
    effective,
    from_broker,
    from_command_line,
)
from keytail.config.topic_configs import TopicConfigs, parse_topic_configs
from keytail.console import print_message
from keytail.errors import NO_ERROR, ErrorText, UsageProblem, is_denied, refusal

if TYPE_CHECKING:
    from keytail.cli.cluster import Cluster

NO_METADATA = "no metadata log here"
SETTINGS_COMMAND = "kafka-configs.sh --bootstrap-server HOST:PORT --describe --entity-type topics --all"
_MAX_RESOLVED = 64  # maximum number of topics whose settings are cached


@dataclass(frozen=True)
class Configuration:
    """All sources of settings; `of` returns the effective settings of one topic."""

    command_line: CommandLine = field(default_factory=CommandLine)
    broker: Mapping[str, Setting] = field(default_factory=dict)  # empty if no file of the broker was given
    topics_have_no_overrides: bool = False
    topic_configs: TopicConfigs = field(default_factory=TopicConfigs)
    metadata_is_current: bool = False
    message_format: MessageFormat = "unknown"  # from the command line
    broker_version: BrokerVersion | None = None  # from the command line
    cluster: Cluster | None = None  # from the metadata log in the log dirs; None until that log is read
    _resolved: dict[str, tuple[Resolved, CompactionConfig]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def of(self, topic: str) -> Resolved:
        """Return the effective settings of `topic`. Raises Refused if settings are invalid or contradict each other."""
        return self.for_compaction(topic)[0]

    def for_compaction(self, topic: str) -> tuple[Resolved, CompactionConfig]:
        """Return the effective settings of `topic`, as `of` does, and the CompactionConfig derived from them. The
        result is cached for the other partitions of the topic, which are usually processed next.
        """
        found = self._resolved.get(topic)
        if found is None:
            resolved = self._resolve(topic)
            found = resolved, self._compaction_config(resolved)
            if len(self._resolved) >= _MAX_RESOLVED:
                self._resolved.clear()
            self._resolved[topic] = found
        return found

    def _compaction_config(self, resolved: Resolved) -> CompactionConfig:
        # If it is unknown when producers expire, none is taken for expired, and the last batch of each is retained.
        expiration_ms = self._producer_expiration(resolved).ms
        return replace(CompactionConfig.from_values(resolved.values()), producer_id_expiration_ms=expiration_ms)

    def producer_expiration(self, topic: str) -> Expiration:
        """Return after which idle time brokers forget producers, or why this is uncertain."""
        return self._producer_expiration(self.of(topic))

    def _producer_expiration(self, resolved: Resolved) -> Expiration:
        mode = self.cluster.mode if self.cluster is not None else "unknown"
        metadata = self.cluster.metadata if self.cluster is not None else None
        level = metadata.features.get(METADATA_VERSION, 0) if metadata is not None else None
        return producer_expiration(resolved, self.broker_version, mode, level)

    def why_unknown(self, topic: str) -> str:
        """Return the reason why the metadata log does not have the settings of a topic."""
        return self.cluster.why_unknown(topic) if self.cluster is not None else NO_METADATA

    def unknown(self, topic: str, names: Iterable[str]) -> ErrorText:
        """Return why an operation that requires the settings `names` is refused, and a remedy; empty if all of them are
        known.
        """
        missing = self.of(topic).unknown(names)
        if not missing:
            return NO_ERROR
        text = "topic config unknown: " + self.why_unknown(topic)
        text += f". Unknown settings of {topic}: {', '.join(missing)}"
        more = "; or state with --topics-have-no-overrides that the topic has no other settings of its own"
        if CLEANUP_POLICY in missing:
            more = ", cleanup.policy as Kafka shows it: a wrong policy removes records that must be retained"
        return refusal(
            text,
            slug="unknown-topic-settings",
            remedy=f"Give --topic-configs FILE with the output of `{SETTINGS_COMMAND}`, or each setting as "
            f"--topic-config {topic}:key=value{more}",
        )

    def message_format_of(self, topic: str) -> MessageFormat:
        """Return the format for messages of magic 0 and 1; the command line takes precedence."""
        if self.message_format != "unknown":
            return self.message_format
        return message_format(self.of(topic), self.cluster.mode if self.cluster is not None else "unknown")

    @property
    def by_file_time(self) -> bool:
        """Whether tombstones and markers are removed by file time, as before Kafka 3.1 (CLEANING.md 16)."""
        return self.broker_version is not None and self.broker_version.cleans_by_file_time

    def _resolve(self, topic: str) -> Resolved:
        return effective(
            topic,
            command_line=self.command_line,
            topic_configs=self.topic_configs,
            topics=self.cluster.topics(topic) if self.cluster else {},
            dynamic=self.cluster.dynamic() if self.cluster else (),
            broker=self.broker or None,
            topics_have_no_overrides=self.topics_have_no_overrides,
        )


def read_configuration(
    config: o.Config = None,
    topic_config: o.TopicConfig = None,
    topics_have_no_overrides: o.NoOverrides = False,
    topic_configs: o.TopicConfigs = None,
    metadata_is_current: o.MetadataIsCurrent = False,
) -> Configuration:
    """Return the configuration given by flags. Raises UsageProblem if a file cannot be read or a setting is invalid."""
    flags = from_command_line(topic_config or ())
    broker: Mapping[str, Setting] = {}
    if config is not None:
        broker = _broker_file(config, USED - flags.everywhere.keys())
    of_topics = TopicConfigs()
    if topic_configs is not None:
        remedy = "Give a file with the output of kafka-configs.sh --describe --entity-type topics --all"
        of_topics = parse_topic_configs(_read(topic_configs, "--topic-configs", remedy), topic_configs)
    return Configuration(flags, broker, topics_have_no_overrides, of_topics, metadata_is_current)


def _broker_settings(config: o.Config = None) -> Configuration:
    return Configuration(broker=_broker_file(config, LOG_DIRS)) if config is not None else Configuration()


def _broker_file(path: str, needed: Collection[str]) -> Mapping[str, Setting]:
    """Return the settings in the broker's file; invalid settings that are not `needed` are ignored with a note."""
    data = _read(path, "--config", "Give the server.properties with which the broker is started")
    return from_broker(
        parse_server_properties(data, path), path, needed, lambda note: print_message(f"keytail: {note}", "warning")
    )


def _known_settings(
    config: o.Config = None,
    topic_config: o.TopicConfig = None,
    topic_configs: o.TopicConfigs = None,
    metadata_is_current: o.MetadataIsCurrent = False,
) -> Configuration:
    return read_configuration(config, topic_config, False, topic_configs, metadata_is_current)


ConfigurationByFlags = Annotated[Configuration, FromFlags(read_configuration)]
# The configuration of commands that remove nothing because of a setting.
WithoutAssertions = Annotated[Configuration, FromFlags(_known_settings)]
# The configuration of commands that use only the broker's file.
BrokerSettings = Annotated[Configuration, FromFlags(_broker_settings)]


def _read(path: str, flag: str, remedy: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        if is_denied(error):
            remedy = "Run as a user that may read the file, or change its owner or mode (chown, chmod)"
        raise UsageProblem(
            f"{flag} cannot be read: {error.strerror}", path=path, remedy=remedy, slug="unreadable-settings-file"
        ) from error
