"""Finds the nodes of a cluster in the given log dirs, its newest metadata log, and the replicas of each partition.

Only directories, checkpoints, `meta.properties`, `partition.metadata`, `quorum-state` and metadata logs are read.
Nothing is changed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from keytail.cli.replicas import Replica
from keytail.config.files import parse_meta_properties
from keytail.config.keys import KEYS, parse
from keytail.cut.fixed_point import PartitionKey
from keytail.errors import NO_ERROR, ErrorText, KeytailError, Refused, in_words, joined, refusal, slugs_of
from keytail.format import names
from keytail.format.json_object import parse_object
from keytail.log.cluster.metadata import ClusterMetadata, find_metadata_dir, read_metadata, read_topic_id
from keytail.log.cluster.replay import Topic, Values
from keytail.log.fs import FileSystem
from keytail.log.partition import LogDirFacts, PartitionEntry

_INDEX_INTERVAL, _INDEX_BYTES, _TIERED = "index.interval.bytes", "segment.index.bytes", "remote.storage.enable"
_SHARE_GROUPS = "__share_group_state"


@dataclass(frozen=True)
class Node:
    """A broker or controller: its `node.id`, its `cluster.id`, its log dirs, and its metadata log, if there is one."""

    node_id: int
    cluster_id: str | None
    replica: Replica
    metadata: ClusterMetadata | None


@dataclass(frozen=True)
class Host:
    """A replica of a partition: its directory in a log dir of a node."""

    node: Node
    log_dir: LogDirFacts
    entry: PartitionEntry
    is_in_sync: bool


@dataclass(frozen=True)
class Hosted:
    """A partition of the cluster, its latest leader epoch and its replicas in the given log dirs. `refused` is empty
    if the partition is not refused. The two settings in bytes are for its index files."""

    key: PartitionKey
    topic_id: str
    leader_epoch: int
    hosts: tuple[Host, ...]
    index_interval_bytes: int
    segment_index_bytes: int
    notes: tuple[str, ...] = ()
    refused: ErrorText = NO_ERROR


@dataclass(frozen=True)
class Cluster:
    """All nodes, the newest metadata log, and the partitions in the order of their names. `notes` are sentences about
    absent voters, ignored records, and directories that are not written."""

    nodes: tuple[Node, ...]
    metadata: ClusterMetadata
    partitions: tuple[Hosted, ...]
    notes: tuple[str, ...] = field(default=())


def find_cluster(fs: FileSystem, replicas: Sequence[Replica]) -> Cluster:
    """Return the cluster. Raises Refused if the nodes do not belong to one cluster, two have the same id or the ids of
    one are unclear, no metadata log is found, or at least half of the voters are not given."""
    nodes = tuple(_node(fs, replica) for replica in replicas)
    by_id: dict[int, Node] = {}
    for node in nodes:
        if node.node_id in by_id:
            raise Refused(
                f"{by_id[node.node_id].replica.name} and {node.replica.name} have the same node.id {node.node_id}",
                remedy="Give all log dirs of one broker with one --replica, and one snapshot of each",
                slug="same-node-id",
            )
        if node.cluster_id != nodes[0].cluster_id:
            raise Refused(
                f"{nodes[0].replica.name} and {node.replica.name} belong to two clusters: their cluster.id is "
                f"{nodes[0].cluster_id} and {node.cluster_id}",
                remedy="Give the log dirs of the brokers and controllers of one cluster",
                slug="different-cluster-ids",
            )
        by_id[node.node_id] = node
    found = [node.metadata for node in nodes if node.metadata is not None]
    if not found:
        raise Refused(
            "no log dir contains a metadata log",
            remedy="Give the log dirs of all brokers and controllers, with the metadata.log.dir of each. A cluster "
            "with ZooKeeper is not supported",
            slug="no-metadata-log",
        )
    metadata = max(found, key=lambda one: (one.as_of_epoch, one.as_of_offset))
    absent = _absent_voters(fs, found, metadata, by_id.keys())
    partitions = tuple(
        _hosted(fs, by_id, metadata, (name, partition), topic)
        for name, topic in sorted(metadata.topics.items())
        for partition in sorted(topic.replicas)
    )
    if metadata.unknown_types:
        types = ", ".join(map(str, metadata.unknown_types))
        absent.append(f"metadata records of type {types} are ignored, because this release does not know them")
    return Cluster(nodes, metadata, partitions, (*absent, *_not_written(nodes, partitions)))


def _absent_voters(
    fs: FileSystem, logs: Sequence[ClusterMetadata], newest: ClusterMetadata, given: Collection[int]
) -> list[str]:
    """Return a sentence for each voter of the quorum that is not given. Raises Refused if at least half of the voters
    are not given: the absent voters could elect a controller with an older or an empty metadata log."""
    voters = set(newest.voters)
    for path in (os.path.join(one.path, names.QUORUM_STATE) for one in logs):
        # A static quorum's voters are in this file instead of the metadata log. A truncated file is ignored.
        if not voters and fs.exists(path):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                voters = {int(voter["voterId"]) for voter in parse_object(fs.read_bytes(path))["currentVoters"]}
    absent = sorted(voters - set(given))
    if 2 * len(absent) >= len(voters) > 0:
        raise Refused(
            f"of the {len(voters)} voters of the metadata quorum, these are not given: {', '.join(map(str, absent))}",
            remedy="Give the log dirs of all controllers, with the metadata.log.dir of each: voters that are not given "
            "could elect a controller with an older or an empty metadata log",
            slug="voters-not-given",
        )
    remedy = "start it with an empty metadata log, never with its old one"
    return [f"voter {voter} of the metadata quorum is not given: {remedy}" for voter in absent]


def _node(fs: FileSystem, replica: Replica) -> Node:
    log_dirs = [facts.path for facts in replica.log_dirs]
    paths = [os.path.join(log_dir, names.META_PROPERTIES) for log_dir in log_dirs]
    lacking = [path for path in paths if not fs.exists(path)]
    if lacking:
        raise Refused(
            "a log dir has no meta.properties",
            path=lacking[0],
            remedy="Give whole log dirs: a broker does not start on a log dir without this file",
            slug="no-meta-properties",
        )
    ids = {parse_meta_properties(fs.read_bytes(path), path)[1:] for path in paths}
    node_id, cluster_id = next(iter(ids))
    if len(ids) > 1 or node_id is None:
        raise Refused(
            f"the log dirs of --replica {replica.name} have no common node.id and cluster.id",
            path=paths[0],
            remedy="Give the log dirs of one broker with one --replica",
            slug="different-broker-ids",
        )
    path = find_metadata_dir(fs, log_dirs)
    kept = (_INDEX_INTERVAL, _INDEX_BYTES, _TIERED)
    metadata = None if path is None else read_metadata(fs, path, node_id, kept, torn_tail=True)
    return Node(node_id, cluster_id, replica, metadata)


def _hosted(
    fs: FileSystem, nodes: dict[int, Node], metadata: ClusterMetadata, key: PartitionKey, topic: Topic
) -> Hosted:
    name, partition = key
    # After all brokers have stopped, no replica is in sync, and the last in-sync replicas are the eligible leaders.
    in_sync = topic.last_in_sync[partition] or topic.eligible[partition]
    hosts, problems = [], []
    for node_id in topic.replicas[partition]:
        is_in_sync = node_id in in_sync or not in_sync
        node = nodes.get(node_id)
        found = None if node is None else node.replica.find(name, partition)
        if node is not None and found is not None:
            hosts.append(Host(node, found[0], _present(found[1]), is_in_sync))
            problems.append(_other_topic(fs, found[1].path, topic.topic_id))
        elif is_in_sync:
            problems.append(_absent(node_id, node))
    settings = metadata.topic_configs.get(name, {})
    if any((value or "").lower() == "true" for value in settings.get(_TIERED, ())):
        text = "the topic has tiered storage, and its remote part is not in the log dirs"
        problems.append(refusal(text, slug="tiered-topic", remedy="Restore this topic by other means"))
    if name in metadata.uncertain_topics:
        problems.append(refusal(metadata.uncertain_topics[name], slug="uncertain-topic"))
    if not hosts and not any(problems):
        problems.append(refusal("no replica of the partition is in the given log dirs", slug="no-replica-given"))
    interval, index = (_setting(settings, setting, problems) for setting in (_INDEX_INTERVAL, _INDEX_BYTES))
    return Hosted(
        key,
        topic.topic_id,
        topic.leader_epochs[partition],
        tuple(hosts),
        interval,
        index,
        tuple(_notes(name, in_sync)),
        joined(problems),
    )


def _present(entry: PartitionEntry) -> PartitionEntry:
    """Return the entry without the problem that the partition is moving to another log dir: the present log is
    complete, and the copy in the new log dir is not used."""
    return replace(entry, problems=tuple(why for why in entry.problems if "partition-moving" not in slugs_of(why)))


def _notes(topic: str, in_sync: Sequence[int]) -> Iterator[str]:
    if not in_sync:
        yield "in the metadata log, no replica is in sync, and none is an eligible leader: all replicas limit the cut"
    if topic == _SHARE_GROUPS:
        yield (
            "offsets of share groups are not compared with the cuts: reset those that are beyond the end of a "
            "partition (kafka-share-groups.sh --reset-offsets)"
        )


def _setting(settings: Mapping[str, Values], name: str, problems: list[ErrorText]) -> int:
    """Return the topic's latest value of a setting. If it is invalid, add a reason to refuse the partition."""
    latest, key = (settings.get(name) or (None,))[-1], KEYS[name]
    try:
        value = key.default if latest is None else parse(key, latest)
    except ValueError:
        text = f"the metadata log has the invalid value {latest!r} for {name} of the topic"
        remedy = f"Let the topic have {key.allowed}, and take new snapshots; or restore this topic by other means"
        problems.append(refusal(text, slug="invalid-config-value", remedy=remedy))
        value = key.default
    return int(value)  # type: ignore[arg-type]  # both settings are numbers


def _absent(node_id: int, node: Node | None) -> ErrorText:
    if node is None:
        text = f"broker {node_id} is in sync, but no given log dir has its node.id"
        return refusal(text, slug="in-sync-replica-not-given", remedy="Give the log dirs of all brokers")
    text = f"broker {node_id} is in sync, but its log dirs do not have the partition"
    remedy = (
        "Give all log dirs of the broker. If the topic is newer than the snapshot of the broker, take a new snapshot"
    )
    return refusal(text, slug="in-sync-replica-absent", remedy=remedy)


def _other_topic(fs: FileSystem, path: str, topic_id: str) -> ErrorText:
    try:
        theirs = read_topic_id(fs, path)
    except (KeytailError, OSError) as problem:
        return in_words(problem)
    if theirs in (None, topic_id):
        return NO_ERROR
    text = f"the directory belongs to topic id {theirs}, but the topic id in the metadata log is {topic_id} ({path})"
    remedy = "The topic was deleted and created again between the snapshots: take new snapshots"
    return refusal(text, slug="topic-id-differs", remedy=remedy)


def _not_written(nodes: Sequence[Node], partitions: Sequence[Hosted]) -> list[str]:
    """Return a sentence for each directory in the log dirs that is neither a replica of the cluster nor the metadata
    log."""
    written = {host.entry.path for hosted in partitions for host in hosted.hosts}
    notes = []
    for node in nodes:
        for facts in node.replica.log_dirs:
            stray = [entry.path for entry in facts.partitions if entry.path not in written]
            stray += [os.path.join(facts.path, name) for name in facts.skipped if name != _METADATA_NAME]
            notes += [f"{path} is not written: according to the metadata log it is not a replica" for path in stray]
    return notes


_METADATA_NAME = names.partition_dir(names.CLUSTER_METADATA_TOPIC, 0)
