"""Decodes and encodes producer snapshots of a partition (`.snapshot`): a broker's state of each producer id.

SNAPSHOT.md beside this file specifies the layout; `log/producers.py` decides which snapshot is used, and replays the
log after it. Invalid data raises ValueError with the reason.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import astuple, dataclass

import numpy as np

from keytail.kernels.native import crc32c

VERSION = 1
_HEAD = struct.Struct(">hIi")  # version, crc, entry count
_CRC_START = 6  # the CRC covers the entry count and all that follows
_ENTRY = struct.Struct(">qhiqiqiq")
assert (_HEAD.size, _ENTRY.size) == (10, 46)


@dataclass(frozen=True)
class ProducerEntry:
    """The state of one producer id; -1 means "none" in every field but `offset_delta`.

    `last_offset` is the last offset of the producer's last data batch, whose base offset is `last_offset -
    offset_delta`.
    """

    producer_id: int
    epoch: int
    last_sequence: int
    last_offset: int
    offset_delta: int
    timestamp_ms: int
    coordinator_epoch: int
    current_txn_first_offset: int


def parse_snapshot(data: bytes) -> list[ProducerEntry]:
    """Return the entries of a snapshot in file order, which is the order of the broker's hash table."""
    check_snapshot(data)
    return [ProducerEntry(*fields) for fields in _ENTRY.iter_unpack(data[_HEAD.size :])]


def check_snapshot(data: bytes) -> None:
    """Raise ValueError if the version, the checksum or the size is wrong. Entries are not decoded."""
    if len(data) < _HEAD.size:
        raise ValueError(f"the snapshot has {len(data)} bytes, at least {_HEAD.size} are required")
    version, crc, count = _HEAD.unpack_from(data)
    if version != VERSION:
        raise ValueError(f"the snapshot has unsupported version {version}")
    if _crc(data) != crc:
        raise ValueError("the snapshot has an invalid CRC")
    if count < 0 or len(data) != _HEAD.size + count * _ENTRY.size:
        raise ValueError(f"the snapshot of {len(data)} bytes declares {count} entries of {_ENTRY.size} bytes")


def encode_snapshot(entries: Iterable[ProducerEntry]) -> bytes:
    packed = [_ENTRY.pack(*astuple(entry)) for entry in entries]
    covered = struct.pack(">i", len(packed)) + b"".join(packed)
    head = struct.pack(">hI", VERSION, 0)
    return struct.pack(">hI", VERSION, _crc(head + covered)) + covered


def _crc(data: bytes) -> int:
    return int(crc32c(np.frombuffer(data, np.uint8), _CRC_START, len(data) - _CRC_START))
