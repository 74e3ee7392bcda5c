"""Finds the target of an import: the partitions of the topic in the log dirs, their replicas, and the effective
settings.

Reads listings, checkpoints and the metadata log. An import that would leave replicas permanently different is refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from keytail.cli.configuration import Configuration
from keytail.cli.metadata import with_metadata
from keytail.cli.selection import did_you_mean
from keytail.config.files import parse_meta_properties
from keytail.config.message_format import older_format
from keytail.errors import WRITTEN_TO, KeytailError, Refused, UsageProblem
from keytail.format import names
from keytail.format.codecs.table import CODECS, TABLE
from keytail.import_.command import Request
from keytail.import_.plan import Rules
from keytail.log.cluster.replay import Topic
from keytail.log.fs import FileSystem
from keytail.log.log_dirs import survey_log_dirs
from keytail.log.partition import LogDirFacts, PartitionEntry

_DEFAULT_CODEC = "none"
# The settings that determine whether a broker would accept the records, and how it would write them.
_SETTINGS = ("cleanup.policy", "remote.storage.enable", "max.message.bytes", "message.timestamp.type")


@dataclass(frozen=True)
class Partition:
    """One partition: the log dir of each replica, and the replica's directory (`entries`). A partition that does not
    exist yet has no entries, and will be created in the only log dir in `log_dirs`."""

    number: int
    log_dirs: tuple[LogDirFacts, ...]
    entries: tuple[PartitionEntry, ...]


@dataclass(frozen=True)
class Target:
    """The partitions of the topic that are, or will be created, in the log dirs, and facts about the topic."""

    request: Request
    values: dict[str, Any]
    rules: Rules
    n_partitions: int
    partitions: tuple[Partition, ...]
    topic_id: str | None
    known: Topic | None  # the topic as in the metadata log; None if there is no metadata log or it lacks the topic
    brokers_of: dict[int, tuple[int | None, ...]]  # broker ids of the replicas, by partition; None if unknown

    def check_replicas(self, partition: Partition) -> None:
        """Raise Refused if log dirs of other brokers than those with replicas were given or, without a metadata log,
        those of one broker without --single-replica."""
        of = self.brokers_of[partition.number]
        if self.known is not None:
            wanted = self.known.possible_replicas.get(partition.number, ())
            if set(wanted) != set(of):
                raise Refused(
                    f"the partition has replicas on brokers {', '.join(map(str, wanted))}, but log dirs of brokers "
                    f"{', '.join(map(str, of))} were given: the replicas would differ permanently",
                    remedy="Stop all brokers that have replicas, and give the log dirs of each further broker with a "
                    "separate --replica-log-dirs",
                    slug="replica-log-dirs-mismatch",
                )
        elif len(of) == 1 and not self.request.single_replica:
            raise Refused(
                "it is unknown whether the partition has other replicas, which would differ permanently: the log dirs "
                "contain no metadata log",
                remedy="If the partition has no other replicas, give --single-replica. If the partition has other "
                "replicas, stop their brokers, and give the log dirs of each broker with a separate --replica-log-dirs",
                slug="unknown-replicas",
            )

    def codec(self, flag: str | None) -> tuple[str, int | None]:
        """Return the name and the level of the codec that `flag` names or, if `flag` is None, the topic's
        compression.type. The level is None if it is the codec's default."""
        of_topic = str(self.values["compression.type"])
        name = flag or {"uncompressed": "none", "producer": _DEFAULT_CODEC}.get(of_topic, of_topic)
        codec = TABLE[CODECS.index(name)]
        level = self.values.get(codec.level_key)
        return name, None if level == codec.default_level else level

    def notes_on(self, largest_timestamp_ms: int, now_ms: int) -> list[str]:
        retention_ms = self.values["retention.ms"]
        if "delete" in self.values["cleanup.policy"] and 0 <= retention_ms < now_ms - largest_timestamp_ms:
            return [f"all imported records are older than retention.ms {retention_ms}: the broker will delete them"]
        return []

    def found_again(self, fs: FileSystem, partition: Partition) -> Partition:
        """Return the partition with its directory, after the directory has been created."""
        for facts in survey_log_dirs(fs, self.request.log_dirs):
            for entry in facts.partitions:
                if (entry.topic, entry.partition) == (self.request.topic, partition.number):
                    return replace(partition, log_dirs=(facts,), entries=(entry,))
        what = f"partition {partition.number} was created, but is missing"
        path = partition.log_dirs[0].path
        raise KeytailError(what, path=path, remedy=WRITTEN_TO, slug="created-partition-missing")


def find_target(fs: FileSystem, request: Request, *, is_reported: bool = False) -> Target:
    """Return the target. Raises UsageProblem for flags that are invalid, contradict the log dirs or do not determine
    the topic's partitions, and Refused if settings are unknown, the topic has an old message format, or a partition to
    be created has several replicas. `is_reported` is passed to `with_metadata`."""
    topic = request.topic
    _check_topic(request)
    by_broker = [survey_log_dirs(fs, dirs) for dirs in (request.log_dirs, *request.replica_log_dirs)]
    configuration = with_metadata(fs, request.log_dirs, request.configuration, is_reported=is_reported)
    known = _known(configuration, request)
    found = _found(by_broker, topic)
    existing = {entry.topic for dirs in by_broker for facts in dirs for entry in facts.partitions}
    n_partitions = _partition_count(request, known, found, existing)
    _check_settings(configuration, topic)
    if known is None:
        numbers = sorted(found) or list(range(n_partitions))
    else:
        assert configuration.cluster is not None
        own_id = configuration.cluster.broker
        numbers = sorted({*found, *(number for number, replicas in known.replicas.items() if own_id in replicas)})
    topic_id = known.topic_id if known is not None else request.topic_id
    broker_ids = [_broker_id(fs, dirs) for dirs in by_broker]
    partitions, brokers_of = [], {}
    for number in numbers:
        places = found.get(number, [])
        if not places:
            _check_creatable(request, number, topic_id)
        # A new partition is created in the log dir with the fewest partitions, as a broker does.
        homes = tuple(facts for _, facts, _ in places) or (min(by_broker[0], key=lambda item: len(item.partitions)),)
        partitions.append(Partition(number, homes, tuple(entry for _, _, entry in places)))
        brokers_of[number] = tuple(broker_ids[broker] for broker, _, _ in places) or (broker_ids[0],)
    values = configuration.of(topic).values()
    return Target(
        request, values, _rules(request, values), n_partitions, tuple(partitions), topic_id, known, brokers_of
    )


def _check_topic(request: Request) -> None:
    if names.parse_partition_dir(names.partition_dir(request.topic, 0)) is None:
        raise UsageProblem(
            f"invalid topic name {request.topic!r} in --topic",
            remedy="Give the full name of one topic, of ASCII letters, digits, `.`, `_` and `-`: an import writes one "
            "topic, and --topic is no regular expression",
            slug="invalid-topic-name",
        )
    if request.topic == names.CLUSTER_METADATA_TOPIC:
        what = "only controllers write the metadata log"
        raise Refused(what, remedy="Give another --topic", slug="import-into-metadata-log")


def _known(configuration: Configuration, request: Request) -> Topic | None:
    """Return the topic as in the metadata log; None if there is no such log. Raises UsageProblem if flags contradict
    the log."""
    topic, cluster, known = request.topic, configuration.cluster, None
    if cluster is not None and cluster.metadata is not None:
        known = cluster.metadata.topics.get(topic)
        if known is None:
            raise UsageProblem(
                f"topic {topic} is not in the {cluster.origin}",
                remedy=did_you_mean((topic,), cluster.metadata.topics)
                + "To import into a new topic, create it while the broker runs, stop the broker, and run again",
                slug="unknown-topic-or-partition",
            )
        if request.topic_id not in (None, known.topic_id):
            raise UsageProblem(
                f"--topic-id {request.topic_id} is not the id of topic {topic}, which is {known.topic_id}",
                remedy="Check --topic, --topic-id and --log-dirs",
                slug="topic-id-differs",
            )
    return known


def _check_settings(configuration: Configuration, topic: str) -> None:
    """Raise Refused if one of _SETTINGS is unknown, or the topic has an old message format."""
    cluster = configuration.cluster
    if unknown := configuration.unknown(topic, _SETTINGS):
        raise Refused(unknown, slug="unknown-topic-settings")
    older = older_format(configuration.of(topic), cluster.mode if cluster is not None else "unknown")
    if older is not None:
        raise Refused(
            f"{topic} has a message format before version 2 ({older.source}): a broker before 3.0 would send "
            "the imported batches, which have version 2, to clients that cannot read them",
            remedy="Set message.format.version of the topic to 0.11 or later while the broker runs, or produce the "
            "records instead",
            slug="message-format-before-v2",
        )


def _check_creatable(request: Request, number: int, topic_id: str | None) -> None:
    """Raise UsageProblem if there is no topic id, and Refused if the partition to be created has several replicas."""
    if topic_id is None:
        raise UsageProblem(
            f"{request.topic}-{number} has no directory, and its creation requires the topic id",
            remedy="Give --topic-id (kafka-topics.sh --describe shows it)",
            slug="no-topic-id",
        )
    if request.replica_log_dirs:
        raise Refused(
            f"{request.topic}-{number} has no directory, and keytail creates no partition with several replicas",
            remedy="Start and stop the brokers, which create the directories",
            slug="no-partition-directory",
        )


def _found(
    by_broker: Sequence[Sequence[LogDirFacts]], topic: str
) -> dict[int, list[tuple[int, LogDirFacts, PartitionEntry]]]:
    """Return the directories of each partition of the topic as (index of the broker in `by_broker`, log dir,
    directory)."""
    found: dict[int, list[tuple[int, LogDirFacts, PartitionEntry]]] = {}
    for broker, dirs in enumerate(by_broker):
        for facts in dirs:
            for entry in facts.partitions:
                if entry.topic == topic:
                    found.setdefault(entry.partition, []).append((broker, facts, entry))
    return found


def _partition_count(request: Request, known: Topic | None, found: dict[int, Any], existing: Iterable[str]) -> int:
    """Return the number of partitions of the topic, which determines the partition of each key. `found` is the result
    of `_found`, and `existing` has the topics in the log dirs. Raises UsageProblem if the number is unknown."""
    given = request.partition_count
    if known is not None:
        if given not in (None, len(known.replicas)):
            raise UsageProblem(
                f"--partition-count is {given}, but topic {request.topic} has {len(known.replicas)} partitions",
                remedy="Check --topic, or leave out --partition-count",
                slug="partition-count-mismatch",
            )
        return len(known.replicas)
    if given is not None:
        if given < 1 or (found and max(found) >= given):
            raise UsageProblem(
                f"--partition-count {given} is too small",
                remedy=f"Give at least {max(found) + 1}: partition {request.topic}-{max(found)} exists"
                if found
                else "Give at least 1",
                slug="partition-count-too-small",
            )
        return given
    if not found:
        raise UsageProblem(
            f"the log dirs contain no partition of topic {request.topic}",
            remedy=did_you_mean((request.topic,), existing)
            + "Check --topic and --log-dirs; to create the topic's partitions, give --partition-count and --topic-id",
            slug="unknown-topic-or-partition",
        )
    if sorted(found) != list(range(len(found))):
        raise UsageProblem(
            f"the log dirs contain partitions {', '.join(map(str, sorted(found)))} of {request.topic}, so the number "
            "of its partitions, which determines the partition of each key, is unknown",
            remedy="Give --partition-count",
            slug="unknown-partition-count",
        )
    return len(found)


def _broker_id(fs: FileSystem, dirs: Sequence[LogDirFacts]) -> int | None:
    """Return the broker id in `meta.properties` of the log dirs, or None. Raises UsageProblem if the ids differ."""
    numbers = set()
    for facts in dirs:
        path = os.path.join(facts.path, names.META_PROPERTIES)
        if fs.exists(path):
            numbers.add(parse_meta_properties(fs.read_bytes(path), path).node_id)
    if len(numbers) > 1:
        raise UsageProblem(
            f"log dirs of brokers {', '.join(map(str, sorted(numbers, key=str)))} were given as log dirs of one broker",
            remedy="Give the log dirs of one broker with --log-dirs, and of each other broker with --replica-log-dirs",
            slug="different-broker-ids",
        )
    return next(iter(numbers), None)


def _rules(request: Request, values: dict[str, Any]) -> Rules:
    of_topic = values["internal.segment.bytes"] or values["segment.bytes"]
    return Rules(
        compacted="compact" in values["cleanup.policy"],
        remote_storage_enable=bool(values["remote.storage.enable"]),
        segment_bytes=request.segment_bytes or int(of_topic),
        segment_index_bytes=int(values["segment.index.bytes"]),
        index_interval_bytes=int(values["index.interval.bytes"]),
        max_message_bytes=int(values["max.message.bytes"]),
        log_append_time=values["message.timestamp.type"] == "LogAppendTime",
    )
