"""Decodes the keys and values of control records (BATCH.md, "Control").

Brokers write these records: the end of a transaction, or information about a metadata log's
leader, snapshot and voters. Invalid data raises ValueError with the reason.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

_KEY = struct.Struct(">hh")  # version, type
_MARKER = struct.Struct(">hi")  # version, coordinator epoch

NO_COORDINATOR_EPOCH = -1


class ControlType(IntEnum):
    """The known types of control records. A key may contain any other number; brokers skip such a record."""

    ABORT = 0
    COMMIT = 1
    LEADER_CHANGE = 2
    SNAPSHOT_HEADER = 3
    SNAPSHOT_FOOTER = 4
    KRAFT_VERSION = 5
    KRAFT_VOTERS = 6


@dataclass(frozen=True)
class ControlRecord:
    """A control record. `control_type` is one of ControlType or an unknown number; only markers have a coordinator
    epoch."""

    control_type: int
    coordinator_epoch: int = NO_COORDINATOR_EPOCH


def parse_control_record(key: bytes | None, value: bytes | None) -> ControlRecord:
    """Return the control record with this key and value; versions above 0 are decoded as version 0, as in brokers."""
    control_type = _unpack(_KEY, key, "control record key")
    if control_type not in (ControlType.ABORT, ControlType.COMMIT):
        return ControlRecord(control_type)
    return ControlRecord(control_type, _unpack(_MARKER, value, "transaction marker"))


def _unpack(layout: struct.Struct, data: bytes | None, what: str) -> int:
    if data is None or len(data) < layout.size:
        raise ValueError(f"the {what} has {'no' if data is None else len(data)} bytes, expected {layout.size}")
    version, number = layout.unpack_from(data)
    if version < 0:
        raise ValueError(f"the {what} has invalid version {version}")
    return number
