"""Decodes records of the cluster metadata log: topics, partitions, configs and KRaft transactions (METADATA.md).

Only the record types that define a topic, its configuration and the cluster's version are decoded, and the ids and
epochs in registrations of brokers; other types are skipped by their number, so other data of a cluster, such as
credentials, is not decoded. Invalid data raises ValueError with the reason. `log/cluster/replay.py` computes the
resulting state.
"""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeAlias

from keytail.format.control import ControlType, parse_control_record
from keytail.format.kafka_messages import CONTROL, METADATA
from keytail.format.messages import Buffer

FRAME_VERSION = 1
_REGISTER_BROKER = 0
MAX_NUMBER = 2**15 - 1  # the largest frame version, record type or record version
_RESOURCE_TYPES = (2, 4, 8, 16, 32)  # topic, broker, broker logger, client metrics, group
_TOPIC_NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}")
_TOPIC_ID_CHARACTERS = 22
_SAME_LEADER = -2
_SNAPSHOT_HEADER = struct.Struct(">hq")  # version, time of the last record contained


class ResourceType(IntEnum):
    """The type of the resource to which a config belongs; other types are not used here."""

    TOPIC = 2
    BROKER = 4


@dataclass(frozen=True, slots=True)
class TopicRecord:
    """A topic is created. The id is text as in `partition.metadata`."""

    name: str
    topic_id: str


@dataclass(frozen=True, slots=True)
class PartitionRecord:
    """The state of a partition from this record on. `in_sync` are the replicas in sync; `eligible` are other replicas
    that have all committed records, so that they may become the leader if no replica is in sync."""

    topic_id: str
    partition: int
    replicas: tuple[int, ...]
    in_sync: tuple[int, ...]
    leader_epoch: int
    eligible: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PartitionChangeRecord:
    """A change to a partition; `replicas`, `in_sync` and `eligible` are None if they do not change. `has_leader`: the
    change has a leader, even the present one or none (-1), so a new leader epoch begins."""

    topic_id: str
    partition: int
    replicas: tuple[int, ...] | None
    in_sync: tuple[int, ...] | None
    has_leader: bool = False
    eligible: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class ConfigRecord:
    """A config of a topic, a broker (`resource_name` is its id) or all brokers (""); value None removes the config."""

    resource_type: int
    resource_name: str
    name: str
    value: str | None


@dataclass(frozen=True, slots=True)
class RemoveTopicRecord:
    """A topic is removed, with its partitions and configs."""

    topic_id: str


@dataclass(frozen=True, slots=True)
class FeatureLevelRecord:
    """The cluster's level of a feature, such as `metadata.version`, from this record on."""

    name: str
    level: int


@dataclass(frozen=True, slots=True)
class BeginTransaction:
    """The records after this record are applied only when the transaction ends."""


@dataclass(frozen=True, slots=True)
class EndTransaction:
    """The records since the transaction began are applied now."""


@dataclass(frozen=True, slots=True)
class AbortTransaction:
    """The records since the transaction began are discarded."""


@dataclass(frozen=True, slots=True)
class OtherRecord:
    """A record of a type that is skipped."""

    record_type: int

    @property
    def is_known(self) -> bool:
        """Whether `kafka_messages.json` lists the type. A known type is skipped because it does not concern topics."""
        return self.record_type in METADATA


@dataclass(frozen=True, slots=True)
class RegisterBrokerRecord(OtherRecord):
    """A broker registers with the controller, under a new broker epoch. The record's other fields are omitted."""

    broker: int
    broker_epoch: int


KnownRecord: TypeAlias = (
    TopicRecord
    | PartitionRecord
    | PartitionChangeRecord
    | ConfigRecord
    | RemoveTopicRecord
    | FeatureLevelRecord
    | BeginTransaction
    | EndTransaction
    | AbortTransaction
)


@dataclass(frozen=True, slots=True)
class NewerRecord:
    """A record with a newer version than the latest known version. `record` has its leading fields, decoded as in the
    latest known version; they identify the subject of the record. The record's other fields are unknown."""

    record_type: int
    version: int
    record: KnownRecord


MetadataRecord: TypeAlias = KnownRecord | NewerRecord | OtherRecord


def parse_record(data: bytes | None) -> MetadataRecord:
    """Return the record that the value `data` encodes. Raises ValueError if Kafka could not read the record.

    A record whose version is newer than the latest known version is returned as a `NewerRecord`. ValueError is also
    raised if the known fields of such a record are invalid.
    """
    if data is None:
        raise ValueError("the record has no value")
    buffer = Buffer(data)
    record_type, version = take_frame(buffer)
    if record_type == _REGISTER_BROKER:
        return _registration(buffer, version)
    if record_type not in _RECORDS:
        return OtherRecord(record_type)
    layout, make = _RECORDS[record_type]
    newest = METADATA[record_type].newest_version
    if version > newest:
        return _newer(record_type, version, make(layout.take_untagged(buffer, newest)))
    record = make(layout.take(buffer, version))
    if buffer.at != len(data):
        raise ValueError(f"{len(data) - buffer.at} bytes follow the last field of a record")
    return record


def take_frame(buffer: Buffer) -> tuple[int, int]:
    """Return the type and the version of the record in a buffer, and advance the buffer to its first field. Raises
    ValueError for an unsupported frame."""
    frame_version = _number(buffer, "frame version")
    if frame_version != FRAME_VERSION:
        raise ValueError(f"unsupported frame version {frame_version}, expected {FRAME_VERSION}")
    return _number(buffer, "type"), _number(buffer, "version")


def _registration(buffer: Buffer, version: int) -> OtherRecord:
    """Return a RegisterBrokerRecord, or an OtherRecord if the fields cannot be read: most commands do not need them."""
    definition = METADATA[_REGISTER_BROKER]
    try:
        fields = definition.message().take_untagged(buffer, min(version, definition.newest_version))
    except ValueError:
        return OtherRecord(_REGISTER_BROKER)
    return RegisterBrokerRecord(_REGISTER_BROKER, fields["brokerId"], fields["brokerEpoch"])


def _number(buffer: Buffer, what: str) -> int:
    value = buffer.uvarint()
    if value > MAX_NUMBER:
        raise ValueError(f"{what} {value} is above {MAX_NUMBER}")
    return value


def _newer(record_type: int, version: int, record: KnownRecord) -> NewerRecord:
    """Return a NewerRecord. Raises ValueError if the known fields are invalid: the newer version may have inserted
    fields before them."""
    if not _is_plausible(record):
        raise ValueError(f"a record of type {record_type} has unsupported version {version}")
    return NewerRecord(record_type, version, record)


def _is_plausible(record: KnownRecord) -> bool:
    if isinstance(record, TopicRecord):
        return _TOPIC_NAME.fullmatch(record.name) is not None
    if not isinstance(record, ConfigRecord):
        return True
    if record.resource_type == ResourceType.TOPIC and not _TOPIC_NAME.fullmatch(record.resource_name):
        return False
    return record.resource_type in _RESOURCE_TYPES and bool(record.name) and record.name.isprintable()


def _id(uuid: bytes) -> str:
    return base64.urlsafe_b64encode(uuid).rstrip(b"=").decode()


def _if_any(fields: Mapping[str, Any], name: str) -> tuple[int, ...] | None:
    return None if fields.get(name) is None else tuple(fields[name])


# By record type, a function that creates the record from its fields; other types become OtherRecord.
_MAKERS: Mapping[int, Callable[[Mapping[str, Any]], KnownRecord]] = {
    2: lambda fields: TopicRecord(fields["name"], _id(fields["topicId"])),
    3: lambda fields: PartitionRecord(
        _id(fields["topicId"]),
        fields["partitionId"],
        tuple(fields["replicas"]),
        tuple(fields["isr"]),
        fields["leaderEpoch"],
        _if_any(fields, "eligibleLeaderReplicas") or (),
    ),
    4: lambda fields: ConfigRecord(fields["resourceType"], fields["resourceName"], fields["name"], fields["value"]),
    5: lambda fields: PartitionChangeRecord(
        _id(fields["topicId"]),
        fields["partitionId"],
        _if_any(fields, "replicas"),
        _if_any(fields, "isr"),
        fields.get("leader", _SAME_LEADER) != _SAME_LEADER,
        _if_any(fields, "eligibleLeaderReplicas"),
    ),
    9: lambda fields: RemoveTopicRecord(_id(fields["topicId"])),
    12: lambda fields: FeatureLevelRecord(fields["name"], fields["featureLevel"]),
    23: lambda _: BeginTransaction(),
    24: lambda _: EndTransaction(),
    25: lambda _: AbortTransaction(),
}
_RECORDS = {record_type: (METADATA[record_type].message(), make) for record_type, make in _MAKERS.items()}


def parse_snapshot_header(value: bytes | None) -> int:
    """Return the time in ms of the last record in a snapshot, from the value of its first control record."""
    if value is None or len(value) < _SNAPSHOT_HEADER.size:
        size_bytes = 0 if value is None else len(value)
        raise ValueError(f"the snapshot header has {size_bytes} bytes, at least {_SNAPSHOT_HEADER.size} are required")
    version, last_ms = _SNAPSHOT_HEADER.unpack_from(value)
    if version < 0:
        raise ValueError(f"the snapshot header has invalid version {version}")
    return int(last_ms)


_VOTERS = {ControlType.LEADER_CHANGE: "LeaderChangeMessage", ControlType.KRAFT_VOTERS: "VotersRecord"}


def parse_voters(key: bytes | None, value: bytes | None) -> tuple[int, ...]:
    """Return the ids of the quorum's voters in a control record; empty if the record has no voters, or if they cannot
    be read."""
    try:
        name = _VOTERS[ControlType(parse_control_record(key, value).control_type)]
        data = value or b""
        fields = CONTROL[name].message().read(data, int.from_bytes(data[:2], "big"))
    except (KeyError, ValueError):
        return ()
    return tuple(voter["voterId"] for voter in fields["voters"])


def encode_topic_id(topic_id: str) -> bytes:
    """Return the contents of a `partition.metadata` file, as a broker writes them."""
    return f"version: 0\ntopic_id: {topic_id}".encode()


def parse_topic_id(data: bytes) -> str:
    """Return the topic id in the contents of a `partition.metadata` file (NAMES.md). Raises ValueError if the contents
    are invalid."""
    lines = data.decode("ascii").split("\n")
    version, topic_id = (line.partition(": ") for line in [*lines, "", ""][:2])
    if (version[0], topic_id[0]) != ("version", "topic_id") or not version[2].strip().isdecimal():
        raise ValueError("expected two lines, version and topic_id")
    text = topic_id[2].strip()
    if len(text) != _TOPIC_ID_CHARACTERS:
        raise ValueError(f"a topic id must have {_TOPIC_ID_CHARACTERS} characters")
    return text
