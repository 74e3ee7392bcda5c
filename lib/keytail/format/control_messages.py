"""What the control records of a metadata log say, in Kafka's words (COORDINATOR.md, "Control records")."""

from __future__ import annotations

from keytail.format.control import ControlType, parse_control_record
from keytail.format.messages import Message, message, to_json

_VOTER = "voterId:int32 voterDirectoryId:uuid/1+"
_MESSAGES: dict[int, tuple[str, Message]] = {
    ControlType.LEADER_CHANGE: (
        "LeaderChange: ",
        message(f"version:int16 leaderId:int32 voters:[({_VOTER})] grantingVoters:[({_VOTER})]", 0),
    ),
    ControlType.SNAPSHOT_HEADER: ("SnapshotHeader ", message("version:int16 lastContainedLogTimestamp:int64", 0)),
    ControlType.SNAPSHOT_FOOTER: ("SnapshotFooter ", message("version:int16", 0)),
    ControlType.KRAFT_VERSION: ("KRaftVersion ", message("version:int16 kRaftVersion:int16", 0)),
    ControlType.KRAFT_VOTERS: (
        "KRaftVoters ",
        message(
            "version:int16 voters:[(voterId:int32 voterDirectoryId:uuid "
            "endpoints:[(name:string host:string port:uint16)] "
            "kRaftVersionFeature:(minSupportedVersion:int16 maxSupportedVersion:int16))]",
            0,
        ),
    ),
}


def control_text(key: bytes | None, value: bytes | None, *, as_json: bool) -> str:
    """What follows a control record's other fields: words, or with `as_json` members of an object."""
    try:
        kind = parse_control_record(key, value).control_type
        if kind not in _MESSAGES:
            return f',"controlType":{kind}' if as_json else f" controlType: UNKNOWN({kind})"
        name, layout = _MESSAGES[kind]
        data = value or b""
        # The version stands in the message itself, first.
        text = to_json(layout.read(data, int.from_bytes(data[:2], "big", signed=True)))
        return f',"{name.rstrip(": ")}":{text}' if as_json else f" {name}{text}"
    except ValueError as reason:
        return f',"unreadable":{to_json(str(reason))}' if as_json else f" unreadable: {reason}"
