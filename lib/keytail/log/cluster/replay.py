"""Applies records of the metadata log, as a broker does, to obtain topics and configs.

A batch is applied as a whole, and a KRaft transaction is applied when it ends. Records at the end of the log may be
uncommitted: they may be truncated later. For configs and replicas that uncommitted records change, the earlier values
are kept too, because a broker may use any of them. `metadata.py` reads the records; contradictory records raise
ValueError.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from keytail.format.metadata import (
    AbortTransaction,
    BeginTransaction,
    ConfigRecord,
    EndTransaction,
    FeatureLevelRecord,
    KnownRecord,
    MetadataRecord,
    NewerRecord,
    OtherRecord,
    PartitionChangeRecord,
    PartitionRecord,
    RegisterBrokerRecord,
    RemoveTopicRecord,
    ResourceType,
    TopicRecord,
)

# Possible values of a config, the latest last; None stands for no value.
Values: TypeAlias = tuple[str | None, ...]
Resource: TypeAlias = tuple[int, str]


@dataclass(frozen=True)
class Topic:
    """A topic that exists. By partition number, `replicas` has the ids of the brokers with a replica after the latest
    record, which may be uncommitted; `possible_replicas` also has those before the uncommitted records, and `in_sync`
    the brokers whose replica is certainly in sync. If all records are committed, `last_in_sync` has the brokers in
    sync, `eligible` other brokers that have all committed records, and `leader_epochs` the latest leader epoch.
    """

    topic_id: str
    replicas: Mapping[int, tuple[int, ...]]
    possible_replicas: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    in_sync: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    last_in_sync: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    eligible: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    leader_epochs: Mapping[int, int] = field(default_factory=dict)


@dataclass
class _Topic:
    topic_id: str
    replicas: dict[int, tuple[int, ...]] = field(default_factory=dict)
    possible_replicas: dict[int, tuple[int, ...]] = field(default_factory=dict)
    in_sync: dict[int, tuple[int, ...]] = field(default_factory=dict)
    last_in_sync: dict[int, tuple[int, ...]] = field(default_factory=dict)
    eligible: dict[int, tuple[int, ...]] = field(default_factory=dict)
    leader_epochs: dict[int, int] = field(default_factory=dict)


class Replay:
    """The state after the batches applied so far. Only configs whose names are in `kept_configs` are kept."""

    def __init__(self, kept_configs: Collection[str]) -> None:
        self._kept = frozenset(kept_configs)
        self._topics: dict[str, _Topic] = {}
        self._names: dict[str, str] = {}  # topic names by id
        self._configs: dict[Resource, dict[str, str]] = {}
        self._earlier: dict[Resource, dict[str, list[str | None]]] = {}
        self._newer: dict[Resource, str] = {}
        self._features: dict[str, int] = {}
        self._broker_epochs: dict[int, int] = {}
        self._unknown_types: set[int] = set()
        self.voters: tuple[int, ...] = ()  # ids of the quorum's voters, from the latest control record that lists them
        self._transaction: list[MetadataRecord] | None = None

    def batch(self, records: Iterable[MetadataRecord], *, settled: bool) -> None:
        """Apply the records of one batch. `settled`: the batch is certainly committed, so it cannot be truncated.
        Raises ValueError for records that contradict earlier records."""
        unit: list[MetadataRecord] = []
        for record in records:
            kind = record.record if isinstance(record, NewerRecord) else record
            if isinstance(kind, BeginTransaction):
                if self._transaction is not None:
                    raise ValueError("a transaction begins inside another one")
                self._apply(unit, settled)
                unit, self._transaction = [], []
            elif isinstance(kind, (EndTransaction, AbortTransaction)):
                if self._transaction is None:
                    raise ValueError("a transaction ends without a beginning")
                if isinstance(kind, EndTransaction):
                    self._apply(self._transaction, settled)
                self._transaction = None
            elif self._transaction is not None:
                self._transaction.append(record)
            else:
                unit.append(record)
        self._apply(unit, settled)

    @property
    def in_transaction(self) -> bool:
        return self._transaction is not None

    def topics(self) -> dict[str, Topic]:
        return {
            name: Topic(
                topic.topic_id,
                dict(topic.replicas),
                dict(topic.possible_replicas),
                dict(topic.in_sync),
                dict(topic.last_in_sync),
                dict(topic.eligible),
                dict(topic.leader_epochs),
            )
            for name, topic in self._topics.items()
        }

    def newer(self, resource_type: ResourceType) -> dict[str, str]:
        """Return the reason by name, for each topic or broker whose settings are uncertain because a record about it
        has a newer version than this release supports."""
        return {name: why for (number, name), why in self._newer.items() if number == resource_type}

    def features(self) -> dict[str, int]:
        """Return the cluster's feature levels by name, including `metadata.version`."""
        return dict(self._features)

    def broker_epochs(self) -> dict[int, int]:
        """Return the epoch of the latest registration of each broker."""
        return dict(self._broker_epochs)

    def unknown_types(self) -> tuple[int, ...]:
        """Return the types of records that were not applied because this release does not know them."""
        return tuple(sorted(self._unknown_types))

    def configs(self, resource_type: ResourceType, resource_name: str) -> dict[str, Values]:
        """Return the possible values by config name; a config that is absent certainly has no value."""
        resource = (resource_type.value, resource_name)
        now, earlier = self._configs.get(resource, {}), self._earlier.get(resource, {})
        return {name: (*earlier.get(name, ()), now.get(name)) for name in sorted(now.keys() | earlier.keys())}

    def _apply(self, unit: Iterable[MetadataRecord], settled: bool) -> None:
        before: dict[tuple[Resource, str], str | None] = {}
        created: set[Resource] = set()
        newer: dict[Resource, str] = {}
        for record in unit:
            if isinstance(record, NewerRecord):
                newer |= self._apply_newer(record)
            elif isinstance(record, RegisterBrokerRecord):
                self._broker_epochs[record.broker] = record.broker_epoch
            elif isinstance(record, OtherRecord):
                if not record.is_known:
                    self._unknown_types.add(record.record_type)
            elif isinstance(record, FeatureLevelRecord):
                self._features[record.name] = record.level
            elif isinstance(record, TopicRecord):
                self._create(record)
                created.add((ResourceType.TOPIC, record.name))
            elif isinstance(record, RemoveTopicRecord):
                self._remove(record)
            elif isinstance(record, PartitionRecord):
                self._add_partition(record)
            elif isinstance(record, PartitionChangeRecord):
                self._change(record, settled=settled)
            elif isinstance(record, ConfigRecord) and record.name in self._kept:
                resource = (record.resource_type, record.resource_name)
                before.setdefault((resource, record.name), self._configs.get(resource, {}).get(record.name))
                self._configure(resource, record)
        self._newer |= newer  # a topic's first settings may precede the record that creates the topic
        if settled:
            return
        for (resource, name), value in before.items():
            # A log dir of a topic exists only after the topic's creation, with its first configs, was committed.
            if resource not in created and value != self._configs.get(resource, {}).get(name):
                self._earlier.setdefault(resource, {}).setdefault(name, []).append(value)

    def _apply_newer(self, newer: NewerRecord) -> dict[Resource, str]:
        """Apply a record of a newer version only as far as topics and partitions are concerned; return the resource
        whose other settings are therefore uncertain, with the reason."""
        record = newer.record
        resource = self._resource_of(record)
        if isinstance(record, TopicRecord):
            self._create(record)
        elif isinstance(record, RemoveTopicRecord):
            self._remove(record)
        elif isinstance(record, PartitionRecord):
            self._add_partition(record)
        if resource is None:
            return {}
        number, version = newer.record_type, newer.version
        return {resource: f"a record of type {number} has version {version}, which this release does not support"}

    def _resource_of(self, record: KnownRecord) -> Resource | None:
        if isinstance(record, ConfigRecord):
            return record.resource_type, record.resource_name
        if isinstance(record, TopicRecord):
            return ResourceType.TOPIC, record.name
        if isinstance(record, PartitionRecord | PartitionChangeRecord | RemoveTopicRecord):
            self._topic_of(record.topic_id)
            return ResourceType.TOPIC, self._names[record.topic_id]
        return None

    def _create(self, record: TopicRecord) -> None:
        if record.name in self._topics or record.topic_id in self._names:
            raise ValueError(f"topic {record.name} is created twice")
        self._topics[record.name] = _Topic(record.topic_id)
        self._names[record.topic_id] = record.name
        self._earlier.pop((ResourceType.TOPIC, record.name), None)
        self._newer.pop((ResourceType.TOPIC, record.name), None)

    def _remove(self, record: RemoveTopicRecord) -> None:
        self._topic_of(record.topic_id)
        name = self._names.pop(record.topic_id)
        del self._topics[name]
        self._configs.pop((ResourceType.TOPIC, name), None)

    def _add_partition(self, record: PartitionRecord) -> None:
        topic = self._topic_of(record.topic_id)
        topic.replicas[record.partition], topic.in_sync[record.partition] = record.replicas, record.in_sync
        topic.possible_replicas[record.partition] = record.replicas
        topic.last_in_sync[record.partition] = record.in_sync
        topic.eligible[record.partition] = record.eligible
        topic.leader_epochs[record.partition] = record.leader_epoch

    def _change(self, record: PartitionChangeRecord, *, settled: bool) -> None:
        topic = self._topic_of(record.topic_id)
        replicas = topic.replicas
        if record.partition not in replicas:
            what = f"a record changes partition {record.partition}, which topic id {record.topic_id} does not have"
            raise ValueError(what)
        if record.replicas is not None:
            earlier = () if settled else topic.possible_replicas[record.partition]
            topic.possible_replicas[record.partition] = tuple(dict.fromkeys((*record.replicas, *earlier)))
            replicas[record.partition] = record.replicas
        if record.in_sync is not None:
            before = topic.in_sync[record.partition]
            now = record.in_sync if settled else tuple(broker for broker in record.in_sync if broker in before)
            topic.in_sync[record.partition] = now
            topic.last_in_sync[record.partition] = record.in_sync
        if record.eligible is not None:
            topic.eligible[record.partition] = record.eligible
        topic.leader_epochs[record.partition] += record.has_leader

    def _configure(self, resource: Resource, record: ConfigRecord) -> None:
        if record.value is None:
            self._configs.get(resource, {}).pop(record.name, None)
        else:
            self._configs.setdefault(resource, {})[record.name] = record.value

    def _topic_of(self, topic_id: str) -> _Topic:
        name = self._names.get(topic_id)
        if name is None:
            raise ValueError(f"a record refers to topic id {topic_id}, which does not exist")
        return self._topics[name]
