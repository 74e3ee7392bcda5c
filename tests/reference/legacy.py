"""Messages of magic 0 and 1 in plain Python: the reference model that writes them and reads them back.

`encode_message` and `encode_wrapper` write their arguments unchecked, including invalid ones. `decode_any_log` reads
logs of any magic as strictly as Kafka's reader, and also verifies the checksums that Kafka's reader does not.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from tests.reference import codecs
from tests.reference.batches import Batch, Rec, decode_log

PREFIX = struct.Struct(">qi")
LOG_APPEND_TIME = 0x08


@dataclass(frozen=True)
class LegacyBatch(Batch):
    """A message as a batch; `max_timestamp` is the timestamp of the outermost message."""

    magic: int = 0


def encode_message(
    offset: int,
    key: bytes | None,
    value: bytes | None,
    *,
    magic: int = 1,
    timestamp: int = -1,
    attributes: int = 0,
    crc: int | None = None,
    size: int | None = None,
    tail: bytes = b"",
) -> bytes:
    """Encode a message. `tail` is appended to the value, inside the message."""
    body = bytes([magic & 0xFF, attributes])
    if magic != 0:
        body += struct.pack(">q", timestamp)
    for part in (key, value):
        body += struct.pack(">i", -1 if part is None else len(part)) + (part or b"")
    body += tail
    crc = zlib.crc32(body) if crc is None else crc
    return PREFIX.pack(offset, 4 + len(body) if size is None else size) + struct.pack(">I", crc) + body


def encode_single(rec: Rec, *, magic: int = 1, append_time: bool = False) -> bytes:
    """Encode an uncompressed message with one record."""
    attributes = LOG_APPEND_TIME if append_time and magic else 0
    return encode_message(rec.offset, rec.key, rec.value, magic=magic, timestamp=rec.timestamp, attributes=attributes)


def encode_wrapper(
    records: Sequence[Rec],
    codec: int,
    *,
    magic: int = 1,
    offset: int | None = None,
    inner_magics: Sequence[int] | None = None,
    inner_offsets: Sequence[int] | None = None,
    append_time: int | None = None,
    timestamp: int | None = None,
    inner: bytes | None = None,
    wrong_lz4_checksum: bool | None = None,
    **fields: int | bytes | None,
) -> bytes:
    """Encode a compressed message around `records`. Omitted fields are written as by Kafka's own builder.

    Inner offsets are relative to the first record with magic 1, and absolute with magic 0, where the checksum in the
    lz4 header is also wrong. `append_time`, if given, is the timestamp of the message.
    """
    if offset is None:
        offset = records[-1].offset
    if inner is None:
        magics = inner_magics or [magic] * len(records)
        base = records[0].offset if magic else 0
        offsets = inner_offsets or [rec.offset - base for rec in records]
        inner = b"".join(
            encode_message(at, rec.key, rec.value, magic=kind, timestamp=rec.timestamp)
            for at, kind, rec in zip(offsets, magics, records, strict=True)
        )
    value = codecs.compress(codec, inner)
    if codec == codecs.LZ4 and (magic == 0 if wrong_lz4_checksum is None else wrong_lz4_checksum):
        value = value[:6] + wrong_header_checksum(value[:6]) + value[7:]
    if timestamp is None:
        timestamp = max((rec.timestamp for rec in records), default=-1) if append_time is None else append_time
    attributes = codec | (LOG_APPEND_TIME if append_time is not None else 0)
    return encode_message(
        offset,
        None,
        value,
        magic=magic,
        timestamp=timestamp,
        **{"attributes": attributes, **fields},  # type: ignore[arg-type]
    )


def rebuilt_wrapper(batch: LegacyBatch, kept: Sequence[Rec]) -> bytes:
    """Encode a compressed message with some of its records, as the cleaners before 4.0 write it."""
    append_time = batch.max_timestamp if batch.timestamp_type == 1 else None
    base = kept[0].offset if batch.magic else 0
    inner = b"".join(
        encode_message(
            rec.offset - base,
            rec.key,
            rec.value,
            magic=batch.magic,
            timestamp=rec.timestamp if append_time is None else append_time,
            attributes=0 if append_time is None else LOG_APPEND_TIME,
        )
        for rec in kept
    )
    return encode_wrapper(kept, batch.codec, magic=batch.magic, append_time=append_time, inner=inner)


def is_uniform(batch: LegacyBatch, raw: bytes) -> bool:
    """Return whether the inner magics and the outer offset are those of a builder of this magic (KAFKA-4298)."""
    outer_offset = int.from_bytes(raw[:8], "big", signed=True)
    return outer_offset == batch.last_offset and all(item[16] == batch.magic for item in inner_messages(raw))


def inner_messages(data: bytes) -> list[bytes]:
    """Return the bytes of the messages inside `data`, or `data` itself if it is uncompressed."""
    _, magic, attributes, _, _, value = _message(data)
    if not attributes & 7:
        return [data]
    assert value is not None
    if magic == 0 and attributes & 7 == codecs.LZ4:
        value = value[:6] + bytes([xxhash.xxh32_intdigest(value[4:6]) >> 8 & 0xFF]) + value[7:]
    block, at, found = codecs.decompress(attributes & 7, value), 0, []
    while len(block) - at >= PREFIX.size:
        end = at + PREFIX.size + PREFIX.unpack_from(block, at)[1]
        if end > len(block):
            break
        found.append(block[at:end])
        at = end
    return found


def wrong_header_checksum(header: bytes) -> bytes:
    """Return the lz4 header checksum that old clients write with magic 0, which wrongly covers the magic of the frame.
    """
    return bytes([xxhash.xxh32_intdigest(header) >> 8 & 0xFF])


def decode_any_log(data: bytes) -> list[Batch]:
    """Decode all batches of a segment's bytes, of any magic."""
    batches: list[Batch] = []
    at = 0
    while at < len(data):
        if len(data) - at < 17:
            raise ValueError(f"batch at byte {at}: data ends inside the header")
        size = PREFIX.unpack_from(data, at)[1] + 12
        if size < 26 or at + size > len(data):
            raise ValueError(f"batch at byte {at}: size {size} with {len(data) - at} bytes left")
        item = data[at : at + size]
        try:
            batch = decode_log(item)[0] if item[16] == 2 else decode_message(item)
        except (ValueError, struct.error) as problem:
            raise ValueError(f"batch at byte {at}: {problem}") from problem
        batches.append(type(batch)(**{**vars(batch), "position": at}))
        at += size
    return batches


def decode_message(data: bytes) -> LegacyBatch:
    """Decode the message in `data`, with all inner messages."""
    offset, magic, attributes, timestamp, key, value = _message(data)
    codec, append_time = attributes & 7, bool(magic and attributes & LOG_APPEND_TIME)
    records = [Rec(offset, timestamp, key, value)]
    last_offset = offset
    if codec:
        if codec > codecs.LZ4 or value is None:
            raise ValueError(f"codec {codec} with a value of {value!r}")
        if magic == 0 and codec == codecs.LZ4:
            value = value[:6] + bytes([xxhash.xxh32_intdigest(value[4:6]) >> 8 & 0xFF]) + value[7:]
        try:
            block = codecs.decompress(codec, value)
        except Exception as problem:  # each library has its own exceptions
            raise ValueError(f"codec {codec}: {problem}") from problem
        records = _inner(block, timestamp if append_time else None)
        shift = 0
        if magic == 1 and offset == 0:
            last_offset = records[-1].offset
        elif offset < records[-1].offset:
            raise ValueError(f"offset {offset} around {records[-1].offset}")
        elif magic == 1:
            shift = offset - records[-1].offset
        records = [Rec(rec.offset + shift, rec.timestamp, rec.key, rec.value) for rec in records]
    if records[0].offset < 0 or last_offset - records[0].offset >= 2**31:
        raise ValueError(f"offsets from {records[0].offset} to {last_offset}")
    return LegacyBatch(
        position=0,
        size=len(data),
        base_offset=records[0].offset,
        last_offset=last_offset,
        leader_epoch=-1,
        crc=int.from_bytes(data[12:16], "big"),
        attributes=codec | (LOG_APPEND_TIME if append_time else 0),
        base_timestamp=records[0].timestamp,
        max_timestamp=timestamp,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=-1,
        record_count=len(records),
        records=tuple(records),
        magic=magic,
    )


def _inner(block: bytes, append_time: int | None) -> list[Rec]:
    records: list[Rec] = []
    at = 0
    while len(block) - at >= PREFIX.size:
        size = PREFIX.unpack_from(block, at)[1]
        if size < 14:
            raise ValueError(f"inner message of {size} bytes")
        if at + 12 + size > len(block):
            break
        offset, magic, attributes, timestamp, key, value = _message(block[at : at + 12 + size])
        if attributes & 7:
            raise ValueError("inner message is compressed")
        if magic == 1 and append_time is not None:
            timestamp = append_time
        if records and offset <= records[-1].offset:
            raise ValueError("inner offsets do not increase")
        records.append(Rec(offset, timestamp, key, value))
        at += 12 + size
    if not records:
        raise ValueError("no inner messages")
    return records


def _message(data: bytes) -> tuple[int, int, int, int, bytes | None, bytes | None]:
    """Return offset, magic, attributes, timestamp, key and value."""
    offset, size = PREFIX.unpack_from(data)
    crc, magic, attributes = struct.unpack_from(">IBB", data, 12)
    if size + 12 != len(data) or magic > 1 or size < (22 if magic else 14):
        raise ValueError(f"magic {magic} of {size} bytes in {len(data)}")
    if zlib.crc32(data[16:]) != crc:
        raise ValueError("CRC differs")
    timestamp, at = (struct.unpack_from(">q", data, 18)[0], 26) if magic else (-1, 18)
    parts: list[bytes | None] = []
    for _ in range(2):
        (length,) = struct.unpack_from(">i", data, at)
        at += 4
        if at + length > len(data):
            raise ValueError("field longer than its message")
        parts.append(None if length < 0 else data[at : at + length])
        at += max(length, 0)
    return offset, magic, attributes, timestamp, parts[0], parts[1]
