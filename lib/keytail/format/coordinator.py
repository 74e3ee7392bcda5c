"""The records of `__consumer_offsets` and `__transaction_state` as text (COORDINATOR.md).

The key begins with the record's type, the value with its version; what follows are Kafka's generated messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from keytail.format.messages import Message, message, to_json

_GROUP = "groupId:string"
_MEMBER = "groupId:string memberId:string"
_OFFSET = "group:string topic:string partition:int32"
_TOPIC_PARTITIONS = "[(topicId:uuid partitions:[int32])]"
_ASSIGNED = "[(topicId:uuid partitions:[int32] assignmentEpochs:[int32]?#0)]"
_TASKS = "[(subtopologyId:string partitions:[int32])]"
_TASKS_WITH_EPOCHS = "[(subtopologyId:string partitions:[int32] assignmentEpochs:[int32]?#0)]"
_TASK_LISTS = [f"{state}Tasks{part}" for part in ("", "PendingRevocation") for state in ("active", "standby", "warmup")]
_EPOCH = "assignmentEpoch:int32 assignmentTimestamp:int64#0=0"
_TOPICS = "[(topicId:uuid topicName:string partitions:[int32])]"
_CHANGELOG = "[(name:string partitions:int32 replicationFactor:int16 topicConfigs:[(key:string value:string)])]"


@dataclass(frozen=True)
class _Kind:
    key: Message
    value: Message


def _kind(key: str, value: str, flexible_from: int = 0) -> _Kind:
    return _Kind(message(key), message(value, flexible_from))


# By record type (COORDINATOR.md, "Record types").
_OFFSETS_TOPIC: Mapping[int, _Kind] = {
    0: _Kind(message(_OFFSET), message("offset:int64 metadata:string commitTimestamp:int64")),
    1: _kind(
        _OFFSET,
        "offset:int64 leaderEpoch:int32/3+ metadata:string commitTimestamp:int64 expireTimestamp:int64/1 "
        "topicId:uuid/4+#0",
        4,
    ),
    2: _kind(
        "group:string",
        "protocolType:string generation:int32 protocol:string? leader:string? currentStateTimestamp:int64/2+ "
        "members:[(memberId:string groupInstanceId:string?/3+ clientId:string clientHost:string "
        "rebalanceTimeout:int32/1+ sessionTimeout:int32 subscription:bytes assignment:bytes)]",
        4,
    ),
    3: _kind(_GROUP, "epoch:int32 metadataHash:int64#0=0"),
    4: _kind(
        _GROUP,
        "topics:[(topicId:uuid topicName:string numPartitions:int32 "
        "partitionMetadata:[(partition:int32 racks:[string])])]",
    ),
    5: _kind(
        _MEMBER,
        "instanceId:string? rackId:string? clientId:string clientHost:string subscribedTopicNames:[string] "
        "subscribedTopicRegex:string? rebalanceTimeoutMs:int32 serverAssignor:string? "
        "classicMemberMetadata:(sessionTimeoutMs:int32 supportedProtocols:[(name:string metadata:bytes)])?#0",
    ),
    6: _kind(_GROUP, _EPOCH),
    7: _kind(_MEMBER, f"topicPartitions:{_TOPIC_PARTITIONS}"),
    8: _kind(
        _MEMBER,
        "memberEpoch:int32 previousMemberEpoch:int32 state:int8 "
        f"assignedPartitions:{_ASSIGNED} partitionsPendingRevocation:{_ASSIGNED}",
    ),
    10: _kind(_MEMBER, "rackId:string? clientId:string clientHost:string subscribedTopicNames:[string]"),
    11: _kind(_GROUP, "epoch:int32 metadataHash:int64"),
    12: _kind(_GROUP, _EPOCH),
    13: _kind(_MEMBER, f"topicPartitions:{_TOPIC_PARTITIONS}"),
    14: _kind(
        _MEMBER, f"memberEpoch:int32 previousMemberEpoch:int32 state:int8 assignedPartitions:{_TOPIC_PARTITIONS}"
    ),
    15: _kind(
        _GROUP,
        f"initializingTopics:{_TOPICS} initializedTopics:{_TOPICS} deletingTopics:[(topicId:uuid topicName:string)]",
    ),
    16: _kind("groupId:string regularExpression:string", "topics:[string] version:int64 timestamp:int64"),
    17: _kind(
        _GROUP,
        "epoch:int32 metadataHash:int64 validatedTopologyEpoch:int32#0=-1 "
        "lastAssignmentConfigs:[(key:string value:string)]?#1",
    ),
    19: _kind(
        _MEMBER,
        "instanceId:string? rackId:string? clientId:string clientHost:string rebalanceTimeoutMs:int32 "
        "topologyEpoch:int32 processId:string userEndpoint:(host:string port:uint16)? "
        "clientTags:[(key:string value:string)]",
    ),
    20: _kind(_GROUP, _EPOCH),
    21: _kind(_MEMBER, f"activeTasks:{_TASKS} standbyTasks:{_TASKS} warmupTasks:{_TASKS}"),
    22: _kind(
        _MEMBER,
        "memberEpoch:int32 previousMemberEpoch:int32 state:int8 "
        + " ".join(f"{name}:{_TASKS_WITH_EPOCHS}" for name in _TASK_LISTS),
    ),
    23: _kind(
        _GROUP,
        "epoch:int32 subtopologies:[(subtopologyId:string sourceTopics:[string] sourceTopicRegex:[string] "
        f"stateChangelogTopics:{_CHANGELOG} repartitionSinkTopics:[string] "
        f"repartitionSourceTopics:{_CHANGELOG} "
        "copartitionGroups:[(sourceTopics:[int16] sourceTopicRegex:[int16] repartitionSourceTopics:[int16])])]",
    ),
}
_TRANSACTION_TOPIC: Mapping[int, _Kind] = {
    0: _kind(
        "transactionalId:string",
        "producerId:int64 previousProducerId:int64/1+#0=-1 nextProducerId:int64/1+#1=-1 producerEpoch:int16 "
        "nextProducerEpoch:int16/1+#3=-1 transactionTimeoutMs:int32 transactionStatus:int8 "
        "transactionPartitions:[(topic:string partitionIds:[int32])]? transactionLastUpdateTimestampMs:int64 "
        "transactionStartTimestampMs:int64 clientTransactionVersion:int16/1+#2=0",
        1,
    ),
}
_GROUP_METADATA = 2
_CONSUMER_PROTOCOL = {
    "subscription": message(
        "topics:[string] userData:bytes? ownedPartitions:[(topic:string partitions:[int32])]/1+ "
        "generationId:int32/2+ rackId:string?/3+"
    ),
    "assignment": message("assignedPartitions:[(topic:string partitions:[int32])] userData:bytes?"),
}

DELETED = "<DELETE>"


def offsets_text(key: bytes | None, value: bytes | None, offset: int) -> tuple[str | None, str | None]:
    """Key and payload of a record of `__consumer_offsets`, as `--offsets-decoder` of Kafka's tool prints them."""
    return _text(_OFFSETS_TOPIC, key, value, offset)


def transaction_text(key: bytes | None, value: bytes | None, offset: int) -> tuple[str | None, str | None]:
    """Key and payload of a record of `__transaction_state`, as `--transaction-log-decoder` prints them."""
    return _text(_TRANSACTION_TOPIC, key, value, offset)


def _text(
    kinds: Mapping[int, _Kind], key: bytes | None, value: bytes | None, offset: int
) -> tuple[str | None, str | None]:
    try:
        if key is None:
            raise ValueError("the record has no key")
        record_type = _version(key, "key")
        if record_type not in kinds:
            return f"Unknown record type {record_type} at offset {offset}, skipping.", None
        kind = kinds[record_type]
        text = _key_text(kinds is _OFFSETS_TOPIC, record_type, key)
        if value is None:
            return text, DELETED
        version = _version(value, "value")
        data = kind.value.read(value, version, 2)
        if kinds is _OFFSETS_TOPIC and record_type == _GROUP_METADATA:
            _open_members(data)
        return text, f'{{"version":"{version}","data":{to_json(data)}}}'
    except ValueError as reason:
        return f"Error at offset {offset}, skipping. {reason}", None


@lru_cache(maxsize=1 << 14)  # keys of these topics come again and again
def _key_text(of_offsets: bool, record_type: int, key: bytes) -> str:
    layout = (_OFFSETS_TOPIC if of_offsets else _TRANSACTION_TOPIC)[record_type].key
    return f'{{"type":"{record_type}","data":{to_json(layout.read(key, 0, 2))}}}'


def _version(data: bytes, name: str) -> int:
    if len(data) < 2:
        raise ValueError(f"Could not read version from {name}'s buffer.")
    return int.from_bytes(data[:2], "big", signed=True)


def _open_members(group: dict[str, Any]) -> None:
    """What members of a group of consumers said is opened too; what cannot be stays as bytes."""
    if group["protocolType"] != "consumer":
        return
    for member in group["members"]:
        for name, layout in _CONSUMER_PROTOCOL.items():
            content = member[name]
            try:
                member[name] = layout.read(content, _version(content, name), 2)
            except ValueError:
                continue
