"""Records of the cluster metadata log: topics, partitions, configs and KRaft transactions (METADATA.md).

Only the types that decide what a topic is and how it is configured are taken apart; all others are passed
over by their number, so that nothing else of a cluster (credentials among it) is looked at. Errors are
ValueError with the reason; what the records add up to is left to `log/replay.py`.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

FRAME_VERSION = 1
MAX_UVARINT_BYTES = 5
MAX_NUMBER = 2**15 - 1  # of a frame, a type or a version
UUID_BYTES = 16

_INT8, _INT32 = struct.Struct(">b"), struct.Struct(">i")
_SNAPSHOT_HEADER = struct.Struct(">hq")  # version, time of the last record contained


class ResourceType(IntEnum):
    """What a config belongs to; other numbers are of no interest here."""

    TOPIC = 2
    BROKER = 4


@dataclass(frozen=True, slots=True)
class TopicRecord:
    """A topic comes into being. Ids are written as in `partition.metadata`."""

    name: str
    topic_id: str


@dataclass(frozen=True, slots=True)
class PartitionRecord:
    """A partition as it is from now on."""

    topic_id: str
    partition: int
    replicas: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PartitionChangeRecord:
    """What changes of a partition; None where its replicas stay."""

    topic_id: str
    partition: int
    replicas: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class ConfigRecord:
    """A config of a topic, a broker (named by its id) or all brokers (named ""); None takes it away."""

    resource_type: int
    resource_name: str
    name: str
    value: str | None


@dataclass(frozen=True, slots=True)
class RemoveTopicRecord:
    """A topic goes, with its partitions and configs."""

    topic_id: str


@dataclass(frozen=True, slots=True)
class BeginTransaction:
    """The records from here on count when the transaction ends, and only then."""


@dataclass(frozen=True, slots=True)
class EndTransaction:
    """The records since the transaction began count from here on."""


@dataclass(frozen=True, slots=True)
class AbortTransaction:
    """The records since the transaction began never count."""


@dataclass(frozen=True, slots=True)
class OtherRecord:
    """A record of a type that is passed over."""

    record_type: int


MetadataRecord: TypeAlias = (
    TopicRecord
    | PartitionRecord
    | PartitionChangeRecord
    | ConfigRecord
    | RemoveTopicRecord
    | BeginTransaction
    | EndTransaction
    | AbortTransaction
    | OtherRecord
)


class _Fields:
    """The fields of one record, taken in order, in Kafka's flexible encoding."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def _take(self, size_bytes: int) -> bytes:
        end = self._at + size_bytes
        if end > len(self._data):
            raise ValueError(f"field of {size_bytes} bytes with {len(self._data) - self._at} left in its record")
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def uvarint(self) -> int:
        value = 0
        for shift in range(0, 7 * MAX_UVARINT_BYTES, 7):
            byte = self._take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise ValueError(f"unsigned varint of more than {MAX_UVARINT_BYTES} bytes")

    def number(self, what: str) -> int:
        value = self.uvarint()
        if value > MAX_NUMBER:
            raise ValueError(f"{what} {value} is above {MAX_NUMBER}")
        return value

    def int8(self) -> int:
        return int(_INT8.unpack(self._take(_INT8.size))[0])

    def int32(self) -> int:
        return int(_INT32.unpack(self._take(_INT32.size))[0])

    def uuid(self) -> str:
        return base64.urlsafe_b64encode(self._take(UUID_BYTES)).rstrip(b"=").decode()

    def nullable_string(self) -> str | None:
        length_and_one = self.uvarint()
        return None if length_and_one == 0 else self._take(length_and_one - 1).decode("utf-8")

    def string(self) -> str:
        text = self.nullable_string()
        if text is None:
            raise ValueError("null where a text must be")
        return text

    def nullable_ints(self) -> tuple[int, ...] | None:
        count_and_one = self.uvarint()
        if count_and_one == 0:
            return None
        data = self._take(_INT32.size * (count_and_one - 1))
        return tuple(value for (value,) in _INT32.iter_unpack(data))

    def ints(self) -> tuple[int, ...]:
        values = self.nullable_ints()
        if values is None:
            raise ValueError("null where a list must be")
        return values

    def skip_uuids(self) -> None:
        count_and_one = self.uvarint()
        if count_and_one == 0:
            raise ValueError("null where a list must be")
        self._take(UUID_BYTES * (count_and_one - 1))

    def tagged(self) -> dict[int, bytes]:
        """The tagged fields, which end a record: content by tag, known or not."""
        found: dict[int, bytes] = {}
        for _ in range(self.uvarint()):
            tag = self.uvarint()
            if tag in found:
                raise ValueError(f"tag {tag} twice in one record")
            found[tag] = self._take(self.uvarint())
        return found

    def end(self) -> None:
        if self._at != len(self._data):
            raise ValueError(f"{len(self._data) - self._at} bytes after the last field of a record")


def parse_record(data: bytes | None) -> MetadataRecord:
    """The value of one record of the log; ValueError where Kafka would not read it, or where its version is new."""
    if data is None:
        raise ValueError("record without a value")
    fields = _Fields(data)
    frame_version = fields.number("frame version")
    if frame_version != FRAME_VERSION:
        raise ValueError(f"frame version {frame_version}, {FRAME_VERSION} expected")
    record_type, version = fields.number("type"), fields.number("version")
    if record_type not in _PARSERS:
        return OtherRecord(record_type)
    newest, parse = _PARSERS[record_type]
    if version > newest:
        raise ValueError(f"record of type {record_type} has version {version}, newer than {newest}")
    record = parse(fields, version)
    fields.end()
    return record


def _topic(fields: _Fields, version: int) -> TopicRecord:
    record = TopicRecord(fields.string(), fields.uuid())
    fields.tagged()
    return record


def _partition(fields: _Fields, version: int) -> PartitionRecord:
    partition, topic_id, replicas = fields.int32(), fields.uuid(), fields.ints()
    for _ in ("in-sync", "removing", "adding"):
        fields.ints()
    for _ in ("leader", "leader epoch", "partition epoch"):
        fields.int32()
    if version >= 1:
        fields.skip_uuids()  # directories
    fields.tagged()
    return PartitionRecord(topic_id, partition, replicas)


_CHANGED_REPLICAS = 2  # tag


def _partition_change(fields: _Fields, version: int) -> PartitionChangeRecord:
    partition, topic_id = fields.int32(), fields.uuid()
    changed = fields.tagged().get(_CHANGED_REPLICAS)
    replicas = None
    if changed is not None:
        tag = _Fields(changed)
        replicas = tag.nullable_ints()
        tag.end()
    return PartitionChangeRecord(topic_id, partition, replicas)


def _config(fields: _Fields, version: int) -> ConfigRecord:
    record = ConfigRecord(fields.int8(), fields.string(), fields.string(), fields.nullable_string())
    fields.tagged()
    return record


def _remove_topic(fields: _Fields, version: int) -> RemoveTopicRecord:
    record = RemoveTopicRecord(fields.uuid())
    fields.tagged()
    return record


def _only_tags(record: MetadataRecord) -> Callable[[_Fields, int], MetadataRecord]:
    def parse(fields: _Fields, version: int) -> MetadataRecord:
        fields.tagged()
        return record

    return parse


# By type: the newest version whose fields are known, and what takes them apart.
_PARSERS: Mapping[int, tuple[int, Callable[[_Fields, int], MetadataRecord]]] = {
    2: (0, _topic),
    3: (2, _partition),
    4: (0, _config),
    5: (2, _partition_change),
    9: (0, _remove_topic),
    23: (0, _only_tags(BeginTransaction())),
    24: (0, _only_tags(EndTransaction())),
    25: (0, _only_tags(AbortTransaction())),
}


def parse_snapshot_header(value: bytes | None) -> int:
    """Time in ms of the last record that a snapshot contains, from the value of its first control record."""
    if value is None or len(value) < _SNAPSHOT_HEADER.size:
        raise ValueError(f"snapshot header of {0 if value is None else len(value)} bytes")
    version, last_ms = _SNAPSHOT_HEADER.unpack_from(value)
    if version < 0:
        raise ValueError(f"snapshot header of version {version}")
    return int(last_ms)


def parse_topic_id(data: bytes) -> str:
    """The topic id in a `partition.metadata` file (NAMES.md)."""
    lines = data.decode("ascii").split("\n")
    version, topic_id = (line.partition(": ") for line in [*lines, "", ""][:2])
    if (version[0], topic_id[0]) != ("version", "topic_id") or not version[2].strip().isdecimal():
        raise ValueError("not the two lines of version and topic_id")
    text = topic_id[2].strip()
    if len(text) != len("AAAAAAAAAAAAAAAAAAAAAA"):
        raise ValueError("a topic id must have 22 characters")
    return text
