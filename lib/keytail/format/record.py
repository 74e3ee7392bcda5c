"""Decodes single records of v2 batches, in plain Python: for the metadata log and damaged batches.

The layout is specified in BATCH.md, "Records". Kernels process whole batches; this module accepts and refuses the same
bytes as the kernels, but is a thousand times slower. Invalid data raises ValueError with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview
Span: TypeAlias = tuple[int, int]  # start and length

MAX_VARINT_BYTES = 5
MAX_VARLONG_BYTES = 10


@dataclass(frozen=True)
class Record:
    """A record as stored, with deltas relative to its batch. None represents null; a header's key is never null."""

    timestamp_delta: int
    offset_delta: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[bytes, bytes | None], ...] = ()


def decode_varint(data: Buffer, position: int, end: int | None = None) -> tuple[int, int]:
    """Return the 32-bit value at `position` and the position after it; nothing at or after `end` is read."""
    zigzag, after = _decode_groups(data, position, len(data) if end is None else end, MAX_VARINT_BYTES)
    return _unzigzag(zigzag & 0xFFFFFFFF), after


def decode_varlong(data: Buffer, position: int, end: int | None = None) -> tuple[int, int]:
    """Return the 64-bit value at `position` and the position after it; nothing at or after `end` is read."""
    zigzag, after = _decode_groups(data, position, len(data) if end is None else end, MAX_VARLONG_BYTES)
    return _unzigzag(zigzag & 0xFFFFFFFFFFFFFFFF), after


def _unzigzag(zigzag: int) -> int:
    return zigzag >> 1 if not zigzag & 1 else ~(zigzag >> 1)


def _decode_groups(data: Buffer, position: int, end: int, most_bytes: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 7 * most_bytes, 7):
        if position >= end:
            raise ValueError("a varint extends beyond the end of the data")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ValueError(f"a varint has more than {most_bytes} bytes")


class Fields(NamedTuple):
    """The positions of a record's fields: the start and the length of each field. The length of null is -1."""

    timestamp_delta: int
    offset_delta: int
    body: int  # position after the offset delta
    key: Span
    value: Span
    headers: tuple[tuple[Span, Span], ...]
    end: int


def find_fields(data: Buffer, position: int) -> Fields:
    """Return the fields of the record at `position`. Raises ValueError if the fields do not fill the record exactly."""
    length, at = decode_varint(data, position)
    end = at + length
    if length < 1 or end > len(data):
        raise ValueError(f"its length is {length} bytes, but {len(data) - at} are left")
    timestamp_delta, at = decode_varlong(data, at + 1, end)
    offset_delta, body = decode_varint(data, at, end)
    key, at = _find_field(data, body, end)
    value, at = _find_field(data, at, end)
    header_count, at = decode_varint(data, at, end)
    if not 0 <= header_count <= end - at:
        raise ValueError(f"its header count is {header_count}, but {end - at} bytes are left")
    headers = []
    for _ in range(header_count):
        header_key, at = _find_field(data, at, end)
        if header_key[1] < 0:
            raise ValueError("a header has no key")
        header_value, at = _find_field(data, at, end)
        headers.append((header_key, header_value))
    if at != end:
        raise ValueError(f"its fields end {end - at} bytes before its end")
    return Fields(timestamp_delta, offset_delta, body, key, value, tuple(headers), end)


def _find_field(data: Buffer, position: int, end: int) -> tuple[Span, int]:
    length, at = decode_varint(data, position, end)
    if length > end - at:
        raise ValueError(f"a field has {length} bytes, but {end - at} are left")
    return (at, max(length, -1)), at + max(length, 0)


def decode_record(data: Buffer, position: int = 0) -> tuple[Record, int]:
    """Return the record at `position` and the position after it. Raises the same errors as `find_fields`."""
    found = find_fields(data, position)

    def content(span: Span) -> bytes | None:
        return None if span[1] < 0 else bytes(data[span[0] : sum(span)])

    headers = tuple((content(key) or b"", content(value)) for key, value in found.headers)
    deltas = found.timestamp_delta, found.offset_delta
    return Record(*deltas, content(found.key), content(found.value), headers), found.end


def decode_records(block: Buffer, count: int) -> list[Record]:
    """Return the records of an uncompressed block. Raises ValueError if it does not have exactly `count` records."""
    if count < 0:
        raise ValueError(f"the record count {count} is negative")
    records, at = [], 0
    for _ in range(count):
        record, at = decode_record(block, at)
        records.append(record)
    if at != len(block):
        raise ValueError(f"{len(block) - at} bytes follow the last of {count} records")
    return records
