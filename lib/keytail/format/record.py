"""Decodes single records of v2 batches, in plain Python: for the metadata log and damaged batches.

The layout is specified in BATCH.md, "Records". Kernels process whole batches; this module accepts and refuses the
same bytes, a thousand times slower. Errors are ValueError with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview

MAX_VARINT_BYTES = 5
MAX_VARLONG_BYTES = 10


@dataclass(frozen=True)
class Record:
    """A record as stored, relative to its batch. None is null; a header's key is never null."""

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
            raise ValueError("varint runs past the end")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ValueError(f"varint of more than {most_bytes} bytes")


def decode_record(data: Buffer, position: int = 0) -> tuple[Record, int]:
    """Return the record at `position` and the position after it. Its fields must fill its length exactly."""
    length, at = decode_varint(data, position)
    end = at + length
    if length < 0 or end > len(data):
        raise ValueError(f"record of {length} bytes with {len(data) - at} left")
    if at == end:
        raise ValueError("record without fields")
    timestamp_delta, at = decode_varlong(data, at + 1, end)
    offset_delta, at = decode_varint(data, at, end)
    key, at = _decode_field(data, at, end)
    value, at = _decode_field(data, at, end)
    header_count, at = decode_varint(data, at, end)
    if not 0 <= header_count <= end - at:
        raise ValueError(f"{header_count} headers in {end - at} bytes")
    headers = []
    for _ in range(header_count):
        header_key, at = _decode_field(data, at, end)
        if header_key is None:
            raise ValueError("header key of negative length")
        header_value, at = _decode_field(data, at, end)
        headers.append((header_key, header_value))
    if at != end:
        raise ValueError(f"record ends {end - at} bytes before its declared length")
    return Record(timestamp_delta, offset_delta, key, value, tuple(headers)), end


def _decode_field(data: Buffer, position: int, end: int) -> tuple[bytes | None, int]:
    length, at = decode_varint(data, position, end)
    if length < 0:
        return None, at
    if length > end - at:
        raise ValueError(f"field of {length} bytes with {end - at} left in its record")
    return bytes(data[at : at + length]), at + length


def decode_records(block: Buffer, count: int) -> list[Record]:
    """Return the `count` records that exactly fill the uncompressed record block of one batch."""
    if count < 0:
        raise ValueError(f"record count {count}")
    records, at = [], 0
    for _ in range(count):
        record, at = decode_record(block, at)
        records.append(record)
    if at != len(block):
        raise ValueError(f"{len(block) - at} bytes after the last of {count} records")
    return records
