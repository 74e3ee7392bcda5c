"""Prints the records of the coordinators' topics, and control records, as text (COORDINATOR.md).

In the coordinators' topics, a key begins with the record type, and a value with its version; a message follows, in one
of the formats that Kafka generates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

from keytail.format.control import ControlType, parse_control_record
from keytail.format.kafka_messages import (
    CONSUMER_PROTOCOL,
    CONTROL,
    GROUP_KEYS,
    GROUP_VALUES,
    SHARE_KEYS,
    SHARE_VALUES,
    TRANSACTION_KEYS,
    TRANSACTION_VALUES,
)
from keytail.format.messages import Definition, Json, Message, to_json

_GROUP_METADATA = 2

DELETED = "<DELETE>"


@dataclass(frozen=True, eq=False)
class CoordinatorDecoder:
    """Decodes the records of `topic` as Kafka's tool does with `flag`. `keys` and `values` are messages, `nested` are
    functions that decode bytes within a value, by record type (COORDINATOR.md, "Record types")."""

    flag: str
    topic: str
    keys: Mapping[int, Definition]
    values: Mapping[int, Definition]
    nested: Mapping[int, Callable[[dict[str, Any]], None]] = field(default_factory=dict)

    def text(self, key: bytes | None, value: bytes | None, offset: int) -> tuple[str | None, str | None]:
        """Return key and payload of a record as the tool prints them."""
        try:
            if key is None:
                raise ValueError("the record has no key")
            record_type = _version(key, "key")
            if record_type not in self.keys:
                return f"Unknown record type {record_type} at offset {offset}, skipping.", None
            text = _key_text(self, record_type, key)
            if value is None:
                return text, DELETED
            version = _version(value, "value")
            data = _message(self.values[record_type]).read(value, version, 2)
            if record_type in self.nested:
                self.nested[record_type](data)
            return text, Json(f'{{"version":"{version}","data":{to_json(data)}}}')
        except ValueError as reason:
            return f"Error at offset {offset}, skipping. {reason}", None


@cache
def _message(definition: Definition) -> Message:
    return definition.message()


@lru_cache(maxsize=1 << 14)  # keys of the coordinators' topics recur
def _key_text(decoder: CoordinatorDecoder, record_type: int, key: bytes) -> Json:
    data = _message(decoder.keys[record_type]).read(key, 0, 2)
    return Json(f'{{"type":"{record_type}","data":{to_json(data)}}}')


def _version(data: bytes, name: str) -> int:
    if len(data) < 2:
        raise ValueError(f"Could not read version from {name}'s buffer.")
    return int.from_bytes(data[:2], "big", signed=True)


def _open_members(group: dict[str, Any]) -> None:
    """Decode subscription and assignment of each member of a consumer group; data that cannot be decoded remain
    bytes."""
    if group["protocolType"] != "consumer":
        return
    for member in group["members"]:
        for name, definition in CONSUMER_PROTOCOL.items():
            content = member[name]
            try:
                member[name] = _message(definition).read(content, _version(content, name), 2)
            except ValueError:
                continue


# Control records of a metadata log.
_MESSAGES: dict[int, tuple[str, Message]] = {
    ControlType.LEADER_CHANGE: ("LeaderChange: ", CONTROL["LeaderChangeMessage"].message()),
    ControlType.SNAPSHOT_HEADER: ("SnapshotHeader ", CONTROL["SnapshotHeaderRecord"].message()),
    ControlType.SNAPSHOT_FOOTER: ("SnapshotFooter ", CONTROL["SnapshotFooterRecord"].message()),
    ControlType.KRAFT_VERSION: ("KRaftVersion ", CONTROL["KRaftVersionRecord"].message()),
    ControlType.KRAFT_VOTERS: ("KRaftVoters ", CONTROL["VotersRecord"].message()),
}


def control_text(key: bytes | None, value: bytes | None, *, as_json: bool) -> str:
    """Return the text that follows a control record's other fields; with `as_json`, it has the form of members of a
    JSON object."""
    try:
        kind = parse_control_record(key, value).control_type
        if kind not in _MESSAGES:
            return f',"controlType":{kind}' if as_json else f" controlType: UNKNOWN({kind})"
        name, layout = _MESSAGES[kind]
        data = value or b""
        # The message itself begins with its version.
        text = to_json(layout.read(data, int.from_bytes(data[:2], "big", signed=True)))
        return f',"{name.rstrip(": ")}":{text}' if as_json else f" {name}{text}"
    except ValueError as reason:
        return f',"unreadable":{to_json(str(reason))}' if as_json else f" unreadable: {reason}"


OFFSETS = CoordinatorDecoder(
    "--offsets-decoder", "__consumer_offsets", GROUP_KEYS, GROUP_VALUES, {_GROUP_METADATA: _open_members}
)
TRANSACTIONS = CoordinatorDecoder(
    "--transaction-log-decoder", "__transaction_state", TRANSACTION_KEYS, TRANSACTION_VALUES
)
SHARE_GROUP_STATE = CoordinatorDecoder(
    "--share-group-state-decoder", "__share_group_state", SHARE_KEYS, SHARE_VALUES
)
