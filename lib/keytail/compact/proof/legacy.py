"""The proof's own reader of messages of magic 0 and 1, and of their replacements: messages, or batches of version 2.

Both formats are described in format/LEGACY.md. The proof's reader was written independently of the reader that cleaning
uses. The proof reads one message at a time, and is therefore slower. `messages.py` and the table of keys decide whether
removed records may be missing.
"""

from __future__ import annotations

import itertools
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from keytail.format.compression import decompress
from keytail.kernels import batch_header as v2
from keytail.kernels.proof.records import read_records

_PREFIX = struct.Struct(">qi")
_HEADER = struct.Struct(">qiibIhiqqqhii")
_MAX_BLOCK_BYTES = 2**31 - 1  # the writer's limit is far lower
_LZ4_HEADER_V0 = bytes.fromhex("04224d1860401a")  # a header with the checksum of old writers (LEGACY.md 3)

INVALID_CRC = "a message has an invalid CRC"


@dataclass(frozen=True)
class Record:
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None


@dataclass(frozen=True)
class Message:
    """One message with its records; `attributes` has the bits for codec and timestamp type.

    `is_uniform`: the inner messages have the same magic, and the message has the offset of the last of them.
    """

    magic: int
    is_uniform: bool
    first_offset: int
    last_offset: int
    attributes: int
    timestamp_ms: int
    records: tuple[Record, ...]


def read_message(data: bytes) -> Message:
    """Return the message in `data`. Raises ValueError with the reason if `data` is not a well-formed message."""
    outer_offset, magic, attributes, timestamp_ms, key, value = next(_messages(data, whole=True))
    attributes &= v2.CODEC_MASK | v2.LOG_APPEND_TIME if magic else v2.CODEC_MASK
    codec = attributes & v2.CODEC_MASK
    if not codec:
        record = Record(outer_offset, timestamp_ms, key, value)
        return _checked(Message(magic, True, outer_offset, outer_offset, attributes, timestamp_ms, (record,)))
    if codec > v2.MAX_OLD_CODEC or value is None:
        raise ValueError("a compressed message has nothing to decompress")
    inner = decompress(codec, value, limit_bytes=_MAX_BLOCK_BYTES, skip_header_checksum=magic == 0)
    found = list(_messages(bytes(inner), whole=False))
    if not found:
        raise ValueError("a compressed message contains no messages")
    if any(m[2] & 7 for m in found):
        raise ValueError("a message inside a compressed message is also compressed")
    shift, last_offset = 0, outer_offset
    if outer_offset < found[-1][0]:
        if not magic or outer_offset:
            raise ValueError("the offset of a compressed message is below that of the last message in it")
        last_offset = found[-1][0]
    elif magic and outer_offset:
        shift = outer_offset - found[-1][0]
    records = tuple(
        Record(offset + shift, timestamp_ms if kind and attributes & v2.LOG_APPEND_TIME else time, key, value)
        for offset, kind, _, time, key, value in found
    )
    uniform = all(m[1] == magic for m in found) and outer_offset == last_offset
    return _checked(Message(magic, uniform, records[0].offset, last_offset, attributes, timestamp_ms, records))


def _checked(message: Message) -> Message:
    offsets = [record.offset for record in message.records]
    if offsets[0] < 0 or message.last_offset - offsets[0] > 2**31 - 1:
        raise ValueError("a message has impossible offsets")
    if any(b <= a for a, b in itertools.pairwise(offsets)):
        raise ValueError("the offsets in a compressed message do not increase")
    return message


def _messages(data: bytes, *, whole: bool) -> Iterator[tuple[int, int, int, int, bytes | None, bytes | None]]:
    """Yield (offset, magic, attributes, timestamp, key, value) of each message; a truncated last message is an error if
    `whole`.
    """
    at = 0
    while at + _PREFIX.size <= len(data):
        offset, size = _PREFIX.unpack_from(data, at)
        end = at + _PREFIX.size + size
        if end > len(data) and not whole:
            return
        if size < 14 or end > len(data):
            raise ValueError("a message has an impossible size")
        body = data[at + 16 : end]
        if zlib.crc32(body) != int.from_bytes(data[at + 12 : at + 16], "big"):
            raise ValueError(INVALID_CRC)
        magic, attributes = body[0], body[1]
        if magic > 1 or len(body) < (18 if magic else 10):
            raise ValueError("a message is too short or has an unknown magic")
        timestamp_ms = int.from_bytes(body[2:10], "big", signed=True) if magic else -1
        key, then = _sized(body, 10 if magic else 2)
        value, then = _sized(body, then)
        yield offset, magic, attributes, timestamp_ms, key, value
        at = end


def _sized(body: bytes, at: int) -> tuple[bytes | None, int]:
    if at + 4 > len(body):
        raise ValueError("a message is shorter than its fixed fields")
    (size,) = struct.unpack_from(">i", body, at)
    end = at + 4 + max(size, 0)
    if end > len(body):
        raise ValueError("a message's key or value is longer than the message")
    return (None if size < 0 else body[at + 4 : end]), end


def kept_offsets(message: Message, batch: bytes, horizon_ms: int) -> set[int]:
    """Return the offsets of the records that `batch`, the replacement of `message`, keeps. Raises ValueError if `batch`
    is invalid.

    `horizon_ms` is the delete horizon that a batch with a tombstone must have, or -1 for none. The caller has checked
    size and checksum.
    """
    base, _length, epoch, _magic, _crc, attributes, last_delta, base_time, max_time, *producer, count = (
        _HEADER.unpack_from(batch)
    )
    if epoch != -1 or producer != [-1, -1, -1]:
        raise ValueError("the batch has a leader epoch or a producer, but its message has neither")
    if attributes & ~v2.DELETE_HORIZON != message.attributes:
        raise ValueError("the batch has other attributes than its message")
    kept = _records(batch, attributes & v2.CODEC_MASK, base, base_time, count)
    by_offset = {record.offset: record for record in message.records}
    if not kept or any(by_offset.get(record.offset) != record for record in kept):
        raise ValueError("the output has a record that its message does not have")
    offsets = [record.offset for record in kept]
    if len(set(offsets)) < len(offsets) or offsets != sorted(offsets):
        raise ValueError("the batch has records out of order")
    if base != offsets[0] or last_delta != offsets[-1] - base:
        raise ValueError("the offset range of the batch is not that of its records")
    needs_horizon = horizon_ms >= 0 and any(record.value is None for record in kept)
    if bool(attributes & v2.DELETE_HORIZON) != needs_horizon:
        raise ValueError("the batch's delete horizon is missing or should not be there")
    if base_time != (horizon_ms if needs_horizon else kept[0].timestamp_ms):
        raise ValueError("the batch has a wrong base timestamp")
    newest = max(record.timestamp_ms for record in kept)
    if max_time != (message.timestamp_ms if attributes & v2.LOG_APPEND_TIME else newest):
        raise ValueError("the batch has a wrong max timestamp")
    return set(offsets)


def kept_in_message(message: Message, source: bytes, output: bytes) -> set[int]:
    """Return the offsets of the records that message `output` keeps of `message`, whose bytes are `source`.

    Raises ValueError if `output` is not what Kafka's cleaners before 4.0 write (LEGACY.md 5).
    """
    every = {record.offset for record in message.records}
    if output == source:
        if not message.is_uniform:
            raise ValueError(
                "the message was copied unchanged, although inner messages have another magic or its offset is not "
                "that of the last inner message"
            )
        return every
    codec = message.attributes & v2.CODEC_MASK
    if not codec or output[16] != message.magic:
        raise ValueError("the output is neither the source's bytes nor a compressed message of its magic")
    kept = {record.offset for record in read_message(output).records}
    if not kept <= every:
        raise ValueError("the output has a record that its message does not have")
    if kept == every and message.is_uniform:
        raise ValueError("the message differs from the source's bytes, although nothing was removed")
    _, _, attributes, time, key, value = next(_messages(output, whole=True))
    records = [record for record in message.records if record.offset in kept]
    append_time = message.timestamp_ms if message.attributes & v2.LOG_APPEND_TIME else None
    newest = max(record.timestamp_ms for record in records) if append_time is None else append_time
    if int.from_bytes(output[:8], "big", signed=True) != records[-1].offset:
        raise ValueError("the message has another offset than the last record in it")
    if attributes != message.attributes or key is not None or (message.magic and time != newest):
        raise ValueError("the message has a wrong timestamp, key or attributes")
    assert value is not None
    if len(output) != (34 if message.magic else 26) + len(value):
        raise ValueError("the message has bytes after its value")
    if message.magic == 0 and codec == v2.LZ4 and not value.startswith(_LZ4_HEADER_V0):
        raise ValueError("the message has an lz4 header that clients before 0.10 reject")
    inner = decompress(codec, value, limit_bytes=_MAX_BLOCK_BYTES, skip_header_checksum=message.magic == 0)
    if bytes(inner) != b"".join(_inner_message(message, record, records[0].offset) for record in records):
        raise ValueError("the messages in the message differ from those of its source")
    return kept


def _inner_message(message: Message, record: Record, first_offset: int) -> bytes:
    """Return the bytes for `record` inside a rebuilt message."""
    body = bytes([message.magic, message.attributes & v2.LOG_APPEND_TIME])
    if message.magic:
        time = message.timestamp_ms if message.attributes & v2.LOG_APPEND_TIME else record.timestamp_ms
        body += struct.pack(">q", time)
    for part in (record.key, record.value):
        body += struct.pack(">i", -1) if part is None else struct.pack(">i", len(part)) + part
    offset = record.offset - first_offset if message.magic else record.offset
    return _PREFIX.pack(offset, len(body) + 4) + struct.pack(">I", zlib.crc32(body)) + body


def _records(batch: bytes, codec: int, base: int, base_time: int, count: int) -> Sequence[Record]:
    block = np.frombuffer(decompress(codec, batch[_HEADER.size :], limit_bytes=_MAX_BLOCK_BYTES), np.uint8)
    if not 0 <= count <= len(block):
        raise ValueError("the batch has an impossible record count")
    spans = np.empty((count, 6), np.int64)
    if not read_records(block, spans):
        raise ValueError("the batch has a record that cannot be parsed, or a wrong record count")
    data = block.tobytes()
    return [
        Record(
            base + offset_delta,
            base_time + time_delta,
            data[key : key + key_bytes] if key_bytes >= 0 else None,
            data[value : value + value_bytes] if value_bytes >= 0 else None,
        )
        for time_delta, offset_delta, key, key_bytes, value, value_bytes in spans.tolist()
    ]
