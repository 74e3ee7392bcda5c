"""A simple encoder of metadata records, and of the log and snapshot files that contain them, for tests.

Written from METADATA.md, with one small function per field type; shares no code with the modules under test.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.reference.batches import Rec, encode_batch

T0 = 1_700_000_000_000


def uvarint(value: int) -> bytes:
    out = b""
    while value > 127:
        out += bytes([value % 128 + 128])
        value //= 128
    return out + bytes([value])


def text(value: str | None) -> bytes:
    return b"\0" if value is None else uvarint(len(value.encode()) + 1) + value.encode()


def ints(values: Sequence[int]) -> bytes:
    return uvarint(len(values) + 1) + b"".join(struct.pack(">i", value) for value in values)


def frame(record_type: int, version: int, fields: bytes, tags: bytes = b"\0") -> bytes:
    return uvarint(1) + uvarint(record_type) + uvarint(version) + fields + tags


def topic_uuid(number: int) -> bytes:
    return bytes([0x10]) * 15 + bytes([number])


def topic(name: str, number: int) -> bytes:
    return frame(2, 0, text(name) + topic_uuid(number))


def partition(number: int, partition_id: int, replicas: Sequence[int] = (1,)) -> bytes:
    fields = struct.pack(">i", partition_id) + topic_uuid(number) + ints(replicas) + ints(replicas)
    fields += ints(()) + ints(()) + struct.pack(">iii", replicas[0] if replicas else -1, 0, 0)
    return frame(3, 1, fields + uvarint(len(replicas) + 1) + bytes(16 * len(replicas)))


def change(
    number: int,
    partition_id: int,
    replicas: Sequence[int] | None = None,
    in_sync: Sequence[int] | None = None,
    leader: int | None = None,
    eligible: Sequence[int] | None = None,
) -> bytes:
    """Return a change; one with a leader begins a new leader epoch."""
    fields = [
        (0, None if in_sync is None else ints(in_sync)),
        (1, None if leader is None else struct.pack(">i", leader)),
        (2, None if replicas is None else ints(replicas)),
        (6, None if eligible is None else ints(eligible)),
    ]
    given = [(tag, data) for tag, data in fields if data is not None]
    tags = uvarint(len(given)) + b"".join(uvarint(tag) + uvarint(len(data)) + data for tag, data in given)
    return frame(5, 2, struct.pack(">i", partition_id) + topic_uuid(number), tags)


def config(resource_type: int, resource: str, name: str, value: str | None) -> bytes:
    return frame(4, 0, bytes([resource_type]) + text(resource) + text(name) + text(value))


def topic_config(name: str, key: str, value: str | None) -> bytes:
    return config(2, name, key, value)


def remove(number: int) -> bytes:
    return frame(9, 0, topic_uuid(number))


BEGIN, END, ABORT, NO_OP = frame(23, 0, b""), frame(24, 0, b""), frame(25, 0, b""), frame(20, 0, b"")
HEADER_KEY, FOOTER_KEY = struct.pack(">hh", 0, 3), struct.pack(">hh", 0, 4)


@dataclass
class MetadataLog:
    """Appends batches of record values to one segment file in `path`, and writes snapshots to the same directory."""

    path: Path
    end_offset: int = 0
    base_offset: int = 0

    def __post_init__(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        self.end_offset = max(self.end_offset, self.base_offset)
        self.log_path.touch()

    @property
    def log_path(self) -> Path:
        return self.path / f"{self.base_offset:020d}.log"

    def append(self, *values: bytes | None) -> MetadataLog:
        records = [Rec(self.end_offset + at, T0 + self.end_offset + at, None, value) for at, value in enumerate(values)]
        with self.log_path.open("ab") as file:
            file.write(encode_batch(records))
        self.end_offset += len(values)
        return self

    def no_ops(self, count: int) -> MetadataLog:
        for _ in range(count // 100):
            self.append(*[NO_OP] * 100)
        return self.append(*[NO_OP] * (count % 100)) if count % 100 else self

    def control(self, control_type: int = 2, value: bytes = b"\0\0") -> MetadataLog:
        record = Rec(self.end_offset, T0 + self.end_offset, struct.pack(">hh", 0, control_type), value)
        with self.log_path.open("ab") as file:
            file.write(encode_batch([record], control=True))
        self.end_offset += 1
        return self

    def roll(self) -> MetadataLog:
        self.base_offset = self.end_offset
        self.log_path.touch()
        return self

    def snapshot(self, end_offset: int, *values: bytes, epoch: int = 1, footer: bool = True) -> Path:
        """Write a snapshot file with these records, one per batch."""
        header = struct.pack(">hqB", 0, T0 + end_offset - 1, 0)
        data = encode_batch([Rec(0, T0, HEADER_KEY, header)], control=True)
        for at, value in enumerate(values, start=1):
            data += encode_batch([Rec(at, T0, None, value)])
        if footer:
            data += encode_batch([Rec(len(values) + 1, T0, FOOTER_KEY, b"\0\0\0")], control=True)
        path = self.path / f"{end_offset:020d}-{epoch:010d}.checkpoint"
        path.write_bytes(data)
        return path
