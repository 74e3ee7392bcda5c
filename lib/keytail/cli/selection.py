"""Which partitions a verb is about, by flags and listings, and under which configuration.

Reads listings, checkpoints, index tails and the broker's file; decides nothing about a partition beyond
whether it was asked for. A selection that matches nothing is an error, since it is mostly a typing mistake.
"""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from keytail.compact.plan import CompactionConfig
from keytail.config.broker_version import BrokerVersion
from keytail.config.files import log_dirs as log_dirs_of
from keytail.config.files import parse_server_properties
from keytail.config.message_format import MessageFormat, message_format
from keytail.config.resolve import (
    CLEANUP_POLICY,
    DEFAULT_SOURCE,
    CommandLine,
    Resolved,
    Setting,
    effective,
    from_broker,
    from_command_line,
)
from keytail.config.topic_configs import TopicConfigs, parse_topic_configs
from keytail.errors import UsageProblem
from keytail.log.fs import FileSystem
from keytail.log.partition import LogDirFacts, PartitionEntry, survey_log_dirs

if TYPE_CHECKING:
    from keytail.cli.metadata import Cluster


_MOST_RESOLVED = 64
# Kafka before 3.1 has no setting of its own for producers: they expire when transactional ids do.
PRODUCER_EXPIRATION, TRANSACTION_EXPIRATION = "producer.id.expiration.ms", "transactional.id.expiration.ms"
NO_METADATA = "no metadata log here (ZooKeeper?)"
SETTINGS_COMMAND = "kafka-configs.sh --bootstrap-server HOST:PORT --describe --entity-type topics --all"
GIVE_SETTINGS = (
    f"Save the settings of topics, from any broker of the cluster that runs: `{SETTINGS_COMMAND} > topics.txt`; then "
    "run again with --topic-configs topics.txt"
)


@dataclass(frozen=True)
class Choice:
    """What the user said about which partitions: empty fields restrict nothing."""

    log_dirs: tuple[str, ...] = ()
    topic_patterns: tuple[str, ...] = ()
    topics: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()

    def takes(self, entry: PartitionEntry) -> bool:
        by_pattern = any(re.fullmatch(pattern, entry.topic) for pattern in self.topic_patterns)
        if (self.topic_patterns or self.topics) and not (by_pattern or entry.topic in self.topics):
            return False
        return not self.partitions or f"{entry.topic}-{entry.partition}" in self.partitions


@dataclass(frozen=True)
class Configuration:
    """All that was said about settings; `of` gives those that hold for one topic."""

    command_line: CommandLine = field(default_factory=CommandLine)
    broker: Mapping[str, Setting] = field(default_factory=dict)  # empty: no file of the broker was given
    topics_have_no_overrides: bool = False
    topic_configs: TopicConfigs = field(default_factory=TopicConfigs)
    metadata_is_current: bool = False
    message_format: MessageFormat = "unknown"  # as given
    broker_version: BrokerVersion | None = None  # as given
    cluster: Cluster | None = None  # what is known by the metadata log in the log dirs, once it was looked for
    _resolved: dict[str, tuple[Resolved, CompactionConfig]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def of(self, topic: str) -> Resolved:
        """Raises Refused where settings contradict each other."""
        return self.for_compaction(topic)[0]

    def for_compaction(self, topic: str) -> tuple[Resolved, CompactionConfig]:
        """As `of`, and what compaction takes of it. Kept for the other partitions of the topic, which mostly come
        next."""
        found = self._resolved.get(topic)
        if found is None:
            resolved = self._resolve(topic)
            found = resolved, self._compaction_config(resolved)
            if len(self._resolved) >= _MOST_RESOLVED:
                self._resolved.clear()
            self._resolved[topic] = found
        return found

    def _compaction_config(self, resolved: Resolved) -> CompactionConfig:
        config = CompactionConfig.from_values(resolved.values())
        if self.by_file_time and resolved.settings[PRODUCER_EXPIRATION].source == DEFAULT_SOURCE:
            expiration_ms = resolved.settings[TRANSACTION_EXPIRATION].value
            assert isinstance(expiration_ms, int)
            config = replace(config, producer_id_expiration_ms=expiration_ms)
        return config

    def why_unknown(self, topic: str) -> str:
        """Why settings of a topic are not known by a metadata log."""
        return self.cluster.why_unknown(topic) if self.cluster is not None else NO_METADATA

    def unknown(self, topic: str, names: Iterable[str]) -> str:
        """Why something that rests on the settings `names` is refused, with what to do; empty if all are known."""
        missing = self.of(topic).unknown(names)
        if not missing:
            return ""
        text = f"topic config unknown: {self.why_unknown(topic)}. Not known of {topic}: {', '.join(missing)}. "
        text += f"Give --topic-configs FILE with what `{SETTINGS_COMMAND}` prints, or each as --topic-config "
        text += f"{topic}:key=value"
        if CLEANUP_POLICY in missing:
            return f"{text}, cleanup.policy as Kafka shows it: by a wrong one, records that are to be kept are removed"
        return f"{text}; or state with --topics-have-no-overrides that it has no settings of its own beside those given"

    def message_format_of(self, topic: str) -> MessageFormat:
        """Whether messages of magic 0 and 1 of the topic may become version 2; what was given takes precedence."""
        if self.message_format != "unknown":
            return self.message_format
        return message_format(self.of(topic), self.cluster.mode if self.cluster is not None else "unknown")

    @property
    def by_file_time(self) -> bool:
        """Whether tombstones and markers are removed as before Kafka 3.1 (CLEANING.md 16)."""
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
    path: str | None,
    topic_config: Iterable[str],
    topics_have_no_overrides: bool,
    topic_configs: str | None = None,
    metadata_is_current: bool = False,
) -> Configuration:
    """What the flags give: `path` is the broker's properties file, `topic_configs` a file of topics' settings."""
    broker: Mapping[str, Setting] = {}
    if path is not None:
        data = _read(path, "--config", "Give the server.properties that the broker is started with")
        broker = from_broker(parse_server_properties(data, path), path)
    of_topics = TopicConfigs()
    if topic_configs is not None:
        remedy = "Give a file with what kafka-configs.sh --describe --entity-type topics --all prints"
        of_topics = parse_topic_configs(_read(topic_configs, "--topic-configs", remedy), topic_configs)
    return Configuration(
        from_command_line(topic_config), broker, topics_have_no_overrides, of_topics, metadata_is_current
    )


def _read(path: str, flag: str, remedy: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UsageProblem(f"{flag} cannot be read: {error.strerror}", path=path, remedy=remedy) from error


def chosen_log_dirs(given: Sequence[str], configuration: Configuration) -> tuple[str, ...]:
    """`--log-dirs`, else those that the broker's file names, as absolute paths."""
    paths = tuple(given) or log_dirs_of(configuration.broker)
    if not paths:
        raise UsageProblem(
            "No log directories were given",
            remedy="Give --log-dirs DIR[,DIR], or --config FILE with a server.properties that has log.dirs",
        )
    return tuple(dict.fromkeys(str(Path(path).absolute()) for path in paths))


@dataclass(frozen=True)
class Chosen:
    """The surveyed log dirs, and the partitions in them that were asked for, each with its log dir."""

    log_dirs: tuple[LogDirFacts, ...]
    partitions: tuple[tuple[LogDirFacts, PartitionEntry], ...]


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """No search for cycles within it: of a large broker what is listed is a million objects, and all of them stay."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def choose(fs: FileSystem, choice: Choice) -> Chosen:
    """List the log dirs and take what was asked for; UsageProblem when something named does not exist."""
    _check_patterns(choice)
    with uncollected():
        surveyed = tuple(survey_log_dirs(fs, choice.log_dirs))
        return Chosen(surveyed, pick(choice, surveyed))


def _check_patterns(choice: Choice) -> None:
    for pattern in choice.topic_patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise UsageProblem(f"--topic {pattern} is no regular expression: {error}") from error


def pick(choice: Choice, surveyed: Sequence[LogDirFacts]) -> tuple[tuple[LogDirFacts, PartitionEntry], ...]:
    """What was asked for of log dirs that are listed; UsageProblem as `choose` raises it."""
    _check_patterns(choice)
    entries = [(facts, entry) for facts in surveyed for entry in facts.partitions]
    _check_named("--partitions", choice.partitions, (f"{e.topic}-{e.partition}" for _, e in entries))
    _check_named("--topic-list", choice.topics, (e.topic for _, e in entries))
    taken = tuple((facts, entry) for facts, entry in entries if choice.takes(entry))
    if entries and not taken:
        topics = sorted({entry.topic for _, entry in entries})
        raise UsageProblem(
            "No partition matches --topic, --topic-list and --partitions together",
            remedy=f"The topics are: {', '.join(topics[:20])}{' ...' if len(topics) > 20 else ''}",
        )
    return taken


def _check_named(flag: str, named: Sequence[str], of_entries: Iterable[str]) -> None:
    existing = set(of_entries) if named else set()
    for name in named:
        if name not in existing:
            near = get_close_matches(name, sorted(existing), n=1)
            raise UsageProblem(
                f"{flag} names {name}, which is in none of the log dirs",
                remedy=f"Did you mean {near[0]}?" if near else None,
            )
