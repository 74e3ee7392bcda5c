"""Reads messages of magic 0 and 1 without conversion, one at a time in plain Python (format/LEGACY.md).

The messages are not converted to records of version 2, because the dump shows the checksum of each inner message. Old
formats are rare, so their messages need not be read fast.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

from keytail.errors import Refused
from keytail.format.batch import CODEC_MASK, LOG_APPEND_TIME, NO_TIMESTAMP
from keytail.format.codecs.table import LZ4
from keytail.format.compression import decompress
from keytail.kernels.records import RECORD_TABLE
from keytail.limits import max_record_bytes
from keytail.log.records.chunk import Chunk

_PREFIX_BYTES = 12
_MIN_BYTES = 14


@dataclass
class LegacyRecords:
    """Records of old messages: `spans` (RECORD_TABLE; the body is only the value) over `raw`. For each record, `crcs`
    has the checksum, and `valid` whether it is correct.

    `problems` are (row of the chunk, description). A message with a problem has no records here, except those before an
    inner message that is itself compressed.
    """

    spans: np.ndarray
    raw: np.ndarray
    crcs: np.ndarray
    valid: np.ndarray
    problems: list[tuple[int, str]]


@dataclass
class _Message:
    offset: int
    magic: int
    attributes: int
    timestamp_ms: int
    crc: int
    valid: bool
    key: bytes | None
    value: bytes | None


def legacy_records(chunk: Chunk, first: int, end: int) -> LegacyRecords:
    """Return the records of the rows [first, end), all of which must have magic 0 or 1."""
    rows: list[tuple[int, ...]] = []
    crcs: list[int] = []
    valid: list[bool] = []
    problems: list[tuple[int, str]] = []
    pieces: list[bytes] = []
    at = 0
    for row in range(first, end):
        batch = chunk.table[row]
        start = int(batch["position"]) - chunk.position
        data = chunk.raw[start : start + int(batch["size_bytes"])].tobytes()
        found, problem = _messages(data)
        for message in found:
            key, value = message.key or b"", message.value or b""
            key_bytes = -1 if message.key is None else len(key)
            value_bytes = -1 if message.value is None else len(value)
            body = at + len(key)
            rows.append(
                (message.offset, message.timestamp_ms, at, body, len(value), key_bytes, value_bytes, 0, row - first, 0)
            )
            crcs.append(message.crc)
            valid.append(message.valid)
            pieces += (key, value)
            at = body + len(value)
        if problem:
            problems.append((row, problem))
    return LegacyRecords(
        np.array(rows, RECORD_TABLE) if rows else np.zeros(0, RECORD_TABLE),
        np.frombuffer(bytearray().join(pieces), np.uint8),
        np.array(crcs, np.int64),
        np.array(valid, np.bool_),
        problems,
    )


def _messages(data: bytes) -> tuple[list[_Message], str]:
    """Return the messages inside one message (the message itself if it is not compressed), and its problem or ""."""
    try:
        offset = int.from_bytes(data[:8], "big", signed=True)
        outer = _message(offset, data[_PREFIX_BYTES:])
        codec = outer.attributes & CODEC_MASK
        if not codec:
            return [outer], ""
        return _inner(outer, codec)
    except ValueError as reason:
        return [], str(reason)
    except Refused as reason:
        return [], reason.what


def _inner(outer: _Message, codec: int) -> tuple[list[_Message], str]:
    if codec > LZ4 or outer.magic not in (0, 1):
        raise ValueError(f"magic {outer.magic} does not allow codec {codec}")
    if outer.value is None:
        raise ValueError("a compressed message has no value")
    block = bytes(decompress(codec, memoryview(outer.value), max_record_bytes(), skip_header_checksum=outer.magic == 0))
    found = []
    at = 0
    while len(block) - at >= _PREFIX_BYTES:
        offset = int.from_bytes(block[at : at + 8], "big", signed=True)
        size = int.from_bytes(block[at + 8 : at + 12], "big", signed=True)
        if size < _MIN_BYTES:
            raise ValueError(f"an inner message has the invalid size {size}")
        if at + _PREFIX_BYTES + size > len(block):
            break
        message = _message(offset, block[at + _PREFIX_BYTES : at + _PREFIX_BYTES + size])
        if message.magic == 1 and outer.magic == 1 and outer.attributes & LOG_APPEND_TIME:
            message.timestamp_ms = outer.timestamp_ms
        found.append(message)
        at += _PREFIX_BYTES + size
    if not found:
        raise ValueError("a compressed message contains no messages")
    if outer.magic == 1 and outer.offset != 0:
        last = found[-1].offset
        if outer.offset < last:
            raise ValueError(f"the last inner message has offset {last}, above the message's own offset {outer.offset}")
        for message in found:
            message.offset += outer.offset - last
    for number, message in enumerate(found):
        if message.attributes & CODEC_MASK:
            return found[:number], "an inner message is itself compressed"
    return found, ""


def _message(offset: int, data: bytes) -> _Message:
    """Parse one message; `data` begins at the checksum. Raises ValueError if the message is not valid."""
    if len(data) < _MIN_BYTES:
        raise ValueError(f"the message has only {len(data)} bytes")
    magic = int.from_bytes(data[4:5], "big", signed=True)
    timestamp, at = NO_TIMESTAMP, 6
    if magic != 0:
        timestamp, at = int.from_bytes(data[6:14], "big", signed=True), 14
    key, at = _field(data, at)
    value, at = _field(data, at)
    crc = int.from_bytes(data[:4], "big")
    return _Message(offset, magic, data[5], timestamp, crc, zlib.crc32(data[4:]) == crc, key, value)


def _field(data: bytes, at: int) -> tuple[bytes | None, int]:
    if len(data) - at < 4:
        raise ValueError("the message ends inside a length field")
    size = int.from_bytes(data[at : at + 4], "big", signed=True)
    at += 4
    if size < 0:
        return None, at
    if size > len(data) - at:
        raise ValueError(f"a key or value has {size} bytes, but {len(data) - at} are left")
    return data[at : at + size], at + size
