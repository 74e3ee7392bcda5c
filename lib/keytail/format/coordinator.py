"""Prints the records of `__consumer_offsets` and `__transaction_state`, and control records, as text (COORDINATOR.md).

In the two topics, the key begins with the record type, the value with its version; one of Kafka's generated messages
follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from keytail.format.control import ControlType, parse_control_record
from keytail.format.kafka_messages import (
    CONSUMER_PROTOCOL,
    CONTROL,
    GROUP_KEYS,
    GROUP_VALUES,
    TRANSACTION_KEYS,
    TRANSACTION_VALUES,
)
from keytail.format.messages import Definition, Message, to_json


@dataclass(frozen=True)
class _Kind:
    key: Message
    value: Message


def _kinds(keys: Mapping[int, Definition], values: Mapping[int, Definition]) -> dict[int, _Kind]:
    return {number: _Kind(keys[number].message(), values[number].message()) for number in keys}


# By record type (COORDINATOR.md, "Record types").
_OFFSETS_TOPIC = _kinds(GROUP_KEYS, GROUP_VALUES)
_TRANSACTION_TOPIC = _kinds(TRANSACTION_KEYS, TRANSACTION_VALUES)
_CONSUMER_PROTOCOL = {name: definition.message() for name, definition in CONSUMER_PROTOCOL.items()}
_GROUP_METADATA = 2

DELETED = "<DELETE>"


def offsets_text(key: bytes | None, value: bytes | None, offset: int) -> tuple[str | None, str | None]:
    """Return key and payload of a record of `__consumer_offsets`, as Kafka's `--offsets-decoder` prints them."""
    return _text(_OFFSETS_TOPIC, key, value, offset)


def transaction_text(key: bytes | None, value: bytes | None, offset: int) -> tuple[str | None, str | None]:
    """Return key and payload of a record of `__transaction_state`, as `--transaction-log-decoder` prints them."""
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


@lru_cache(maxsize=1 << 14)  # keys of these topics recur
def _key_text(of_offsets: bool, record_type: int, key: bytes) -> str:
    layout = (_OFFSETS_TOPIC if of_offsets else _TRANSACTION_TOPIC)[record_type].key
    return f'{{"type":"{record_type}","data":{to_json(layout.read(key, 0, 2))}}}'


def _version(data: bytes, name: str) -> int:
    if len(data) < 2:
        raise ValueError(f"Could not read version from {name}'s buffer.")
    return int.from_bytes(data[:2], "big", signed=True)


def _open_members(group: dict[str, Any]) -> None:
    """Decode subscription and assignment of each member of a consumer group; invalid ones remain bytes."""
    if group["protocolType"] != "consumer":
        return
    for member in group["members"]:
        for name, layout in _CONSUMER_PROTOCOL.items():
            content = member[name]
            try:
                member[name] = layout.read(content, _version(content, name), 2)
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
    """Return the text that follows a control record's other fields; with `as_json` as members of a JSON object."""
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
