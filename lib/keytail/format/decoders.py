"""Decodes the records of Kafka's internal topics to text, each topic as DumpLogSegments does with one flag.

COORDINATOR.md describes the topics of coordinators and, in section "Framed records", the other topics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

from keytail.format.coordinator import OFFSETS, SHARE_GROUP_STATE, TRANSACTIONS
from keytail.format.kafka_messages import METADATA, REMOTE_LOG
from keytail.format.messages import Buffer, Definition, Json, Message, to_json
from keytail.format.metadata import take_frame

_SEGMENT_STATES = ("COPY_SEGMENT_STARTED", "COPY_SEGMENT_FINISHED", "DELETE_SEGMENT_STARTED", "DELETE_SEGMENT_FINISHED")
_PARTITION_STATES = ("DELETE_PARTITION_MARKED", "DELETE_PARTITION_STARTED", "DELETE_PARTITION_FINISHED")


class Decoder(Protocol):
    """Decodes records of a topic, as Kafka's tool does with `flag`."""

    @property
    def flag(self) -> str: ...

    @property
    def topic(self) -> str: ...

    def text(self, key: bytes | None, value: bytes | None, offset: int) -> tuple[str | None, str | None]:
        """Return the key and the payload of a record as Kafka's tool prints them; None is not printed. Text that is
        JSON has the type Json."""


@dataclass(frozen=True, eq=False)
class FramedDecoder:
    """Decodes values that begin with a frame: its version, the type of the record, and the version of its message.
    `show` returns the text of a message, given its definition, version and fields. Keys are not printed."""

    flag: str
    topic: str
    values: Mapping[int, Definition]
    show: Callable[[Definition, int, dict[str, Any]], str]
    place: str  # the words before the offset in an error

    def text(self, key: bytes | None, value: bytes | None, offset: int) -> tuple[None, str]:
        """Return None for the key, which is not printed, and the payload of a record as Kafka's tool prints it."""
        try:
            return None, self._decoded(value)
        except ValueError as reason:
            return None, f"Error at {self.place}{offset}, skipping. {reason}"

    def _decoded(self, value: bytes | None) -> str:
        if value is None:
            raise ValueError("the record has no value")
        buffer = Buffer(value)
        record_type, version = take_frame(buffer)
        if record_type not in self.values:
            raise ValueError(f"unknown record type {record_type}, version {version}")
        definition = self.values[record_type]
        if version > definition.newest_version:
            latest = definition.newest_version
            raise ValueError(f"version {version} of {definition.name} is unknown: the latest known version is {latest}")
        data = _message(definition).take(buffer, version)
        if buffer.at != len(value):
            raise ValueError(f"{len(value) - buffer.at} bytes follow the last field of a {definition.name}")
        return self.show(definition, version, data)


@cache
def _message(definition: Definition) -> Message:
    return definition.message()


def _metadata(definition: Definition, version: int, data: dict[str, Any]) -> Json:
    name = "".join(f"_{letter}" if letter.isupper() else letter for letter in definition.name).upper().lstrip("_")
    return Json(f'{{"type":"{name}","version":{version},"data":{to_json(data)}}}')


# What Kafka prints for these records: the name of its class, and its fields.
_REMOTE_LOG_FIELDS = {
    "RemoteLogSegmentMetadataRecord": (
        "RemoteLogSegmentMetadata",
        "remoteLogSegmentId startOffset endOffset brokerId maxTimestampMs eventTimestampMs segmentLeaderEpochs "
        "segmentSizeInBytes customMetadata state txnIdxEmpty",
    ),
    "RemoteLogSegmentMetadataUpdateRecord": (
        "RemoteLogSegmentMetadataUpdate",
        "remoteLogSegmentId customMetadata state eventTimestampMs brokerId",
    ),
    "RemotePartitionDeleteMetadataRecord": (
        "RemotePartitionDeleteMetadata",
        "topicPartition state eventTimestampMs brokerId",
    ),
    "RemoteLogSegmentMetadataSnapshotRecord": (
        "RemoteLogSegmentMetadataSnapshot",
        "segmentId startOffset endOffset maxTimestampMs segmentLeaderEpochs segmentSizeInBytes customMetadata state "
        "txnIdxEmpty",
    ),
}


def _remote_log(definition: Definition, version: int, data: dict[str, Any]) -> str:
    shown, of_class = dict(data), _REMOTE_LOG_FIELDS[definition.name]
    if "remoteLogSegmentId" in data:
        segment = data["remoteLogSegmentId"]
        where = _topic_partition(segment["topicIdPartition"])
        shown["remoteLogSegmentId"] = f"RemoteLogSegmentId{{topicIdPartition={where}, id={segment['id']}}}"
    if "topicIdPartition" in data:
        shown["topicPartition"] = _topic_partition(data["topicIdPartition"])
        shown["state"] = _state(_PARTITION_STATES, data["remotePartitionDeleteState"])
    else:
        shown["state"] = _state(_SEGMENT_STATES, data["remoteLogSegmentState"])
        custom = data["customMetadata"]
        shown["customMetadata"] = (
            "Optional.empty" if custom is None else f"Optional[CustomMetadata{{{len(custom)} bytes}}]"
        )
        shown["txnIdxEmpty"] = to_json(data.get("txnIndexEmpty", False))
    if "segmentLeaderEpochs" in data:
        epochs = {item["leaderEpoch"]: item["offset"] for item in data["segmentLeaderEpochs"]}
        shown["segmentLeaderEpochs"] = f"{{{', '.join(f'{epoch}={epochs[epoch]}' for epoch in sorted(epochs))}}}"
    return f"{of_class[0]}{{{', '.join(f'{name}={shown[name]}' for name in of_class[1].split())}}}"


def _topic_partition(data: dict[str, Any]) -> str:
    return f"{data['id']}:{data['name']}-{data['partition']}"


def _state(names: tuple[str, ...], number: int) -> str:
    if not 0 <= number < len(names):
        raise ValueError(f"unknown state {number}")
    return names[number]


CLUSTER_METADATA = FramedDecoder("--cluster-metadata-decoder", "__cluster_metadata", METADATA, _metadata, "")
REMOTE_LOG_METADATA = FramedDecoder(
    "--remote-log-metadata-decoder", "__remote_log_metadata", REMOTE_LOG, _remote_log, "offset "
)
DECODERS: tuple[Decoder, ...] = (OFFSETS, TRANSACTIONS, SHARE_GROUP_STATE, CLUSTER_METADATA, REMOTE_LOG_METADATA)
