"""Formats the control records of a metadata log as Kafka's tool does (COORDINATOR.md, "Control records")."""

from __future__ import annotations

from keytail.format.control import ControlType, parse_control_record
from keytail.format.kafka_messages import CONTROL
from keytail.format.messages import Message, to_json

_MESSAGES: dict[int, tuple[str, Message]] = {
    ControlType.LEADER_CHANGE: ("LeaderChange: ", CONTROL["LeaderChangeMessage"].message()),
    ControlType.SNAPSHOT_HEADER: ("SnapshotHeader ", CONTROL["SnapshotHeaderRecord"].message()),
    ControlType.SNAPSHOT_FOOTER: ("SnapshotFooter ", CONTROL["SnapshotFooterRecord"].message()),
    ControlType.KRAFT_VERSION: ("KRaftVersion ", CONTROL["KRaftVersionRecord"].message()),
    ControlType.KRAFT_VOTERS: ("KRaftVoters ", CONTROL["VotersRecord"].message()),
}


def control_text(key: bytes | None, value: bytes | None, *, as_json: bool) -> str:
    """Return the text that follows the other fields of a control record; with `as_json`, as members of a JSON
    object."""
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
