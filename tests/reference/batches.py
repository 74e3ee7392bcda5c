"""Record batches v2 in plain Python: the reference model with which tests build logs and read them back.

`encode_batch` writes its arguments unchecked, including invalid ones (gaps, overrides, a wrong CRC). `decode_log` is
strict, and raises ValueError for anything malformed. Shares no code with `keytail.format`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from tests.reference import codecs
from tests.reference.varints import crc32c, decode_varint, decode_varlong, encode_varint, encode_varlong

HEADER = struct.Struct(">qiibIhiqqqhii")  # 61 bytes
assert HEADER.size == 61
AFTER_CRC = struct.Struct(">hiqqqhii")  # the 40 header bytes that the CRC covers

SMALL_LOG_BYTES = 4096  # the limit for logs that tests read thousands of times

Headers = tuple[tuple[bytes, bytes | None], ...]


@dataclass(frozen=True)
class Rec:
    """A record. `timestamp` is the one that a consumer receives. A `key`, `value` or header value of None is null."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Headers = ()


@dataclass(frozen=True)
class Batch:
    """A decoded batch. `position` and `size` are in bytes of the data from which it was decoded."""

    position: int
    size: int
    base_offset: int
    last_offset: int
    leader_epoch: int
    crc: int
    attributes: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int
    records: tuple[Rec, ...] = field(repr=False)

    @property
    def codec(self) -> int:
        return self.attributes & 0x07

    @property
    def timestamp_type(self) -> int:
        return self.attributes >> 3 & 1

    @property
    def transactional(self) -> bool:
        return bool(self.attributes & 0x10)

    @property
    def control(self) -> bool:
        return bool(self.attributes & 0x20)

    @property
    def delete_horizon_ms(self) -> int | None:
        return self.base_timestamp if self.attributes & 0x40 else None


def encode_record(
    rec: Rec, base_offset: int, base_timestamp: int, spell: Callable[[bytes], bytes] = bytes
) -> bytes:
    """Encode a record. `spell` receives each varint, and returns it or another encoding of the same number."""

    def sized(data: bytes | None) -> bytes:
        return spell(encode_varint(-1)) if data is None else spell(encode_varint(len(data))) + data

    body = b"\x00" + spell(encode_varlong(rec.timestamp - base_timestamp))
    body += spell(encode_varint(rec.offset - base_offset))
    body += sized(rec.key) + sized(rec.value) + spell(encode_varint(len(rec.headers)))
    for name, value in rec.headers:
        body += sized(name) + sized(value)
    return spell(encode_varint(len(body))) + body


def encode_batch(
    records: Sequence[Rec],
    *,
    base_offset: int | None = None,
    last_offset: int | None = None,
    codec: int = 0,
    timestamp_type: int = 0,
    leader_epoch: int = 0,
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
    transactional: bool = False,
    control: bool = False,
    delete_horizon_ms: int | None = None,
    max_timestamp: int | None = None,
    base_timestamp: int | None = None,
    record_count: int | None = None,
    extra_attributes: int = 0,
    crc: int | None = None,
    spell: Callable[[bytes], bytes] = bytes,
) -> bytes:
    """Encode a batch. An omitted field is written as Kafka's producer would write it, and a given field unchanged.

    With `timestamp_type` 1 the append time is `max_timestamp`, and the deltas are computed from the timestamps of the
    records. Without `records` the result has the 61 bytes of an emptied batch, and requires `base_offset` and
    `last_offset`.
    """
    if base_offset is None:
        base_offset = records[0].offset
    if last_offset is None:
        last_offset = records[-1].offset
    if base_timestamp is None:
        base_timestamp = records[0].timestamp if records else -1
    if delete_horizon_ms is not None:
        base_timestamp = delete_horizon_ms
    if max_timestamp is None:
        max_timestamp = max((rec.timestamp for rec in records), default=-1)
    attributes = codec | timestamp_type << 3 | transactional << 4 | control << 5 | extra_attributes
    attributes |= (delete_horizon_ms is not None) << 6
    block = b"".join(encode_record(rec, base_offset, base_timestamp, spell) for rec in records)
    block = codecs.compress(codec, block) if records else b""
    count = len(records) if record_count is None else record_count
    covered = AFTER_CRC.pack(
        attributes - 0x10000 if attributes >= 0x8000 else attributes,
        last_offset - base_offset,
        base_timestamp,
        max_timestamp,
        producer_id,
        producer_epoch,
        base_sequence,
        count,
    )
    covered += block
    prefix = struct.pack(">qiib", base_offset, 9 + len(covered), leader_epoch, 2)
    return prefix + struct.pack(">I", crc32c(covered) if crc is None else crc) + covered


def encode_marker(
    offset: int,
    timestamp: int,
    *,
    commit: bool,
    producer_id: int,
    producer_epoch: int,
    coordinator_epoch: int = 0,
    **batch_fields: int | None,
) -> bytes:
    """Encode a control batch with a COMMIT or ABORT marker."""
    key = struct.pack(">hh", 0, 1 if commit else 0)
    value = struct.pack(">hi", 0, coordinator_epoch)
    return encode_batch(
        [Rec(offset, timestamp, key, value)],
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        transactional=True,
        control=True,
        **batch_fields,  # type: ignore[arg-type]
    )


def with_crc(batch: bytes) -> bytes:
    """Return the batch with a valid CRC."""
    return batch[:17] + struct.pack(">I", crc32c(batch[21:])) + batch[21:]


def with_bytes(batch: bytes, at: int, new: bytes) -> bytes:
    """Return the batch with other bytes at `at`, and with a valid CRC."""
    return with_crc(batch[:at] + new + batch[at + len(new) :])


def with_tail(batch: bytes, tail: bytes) -> bytes:
    """Return the batch with these bytes after its records, in its block; the record count is unchanged."""
    codec = batch[22] & 7
    block = codecs.compress(codec, codecs.decompress(codec, batch[61:]) + tail)
    return with_crc(batch[:8] + struct.pack(">i", 49 + len(block)) + batch[12:61] + block)


def decode_log(data: bytes, *, check_crc: bool = True) -> list[Batch]:
    """Decode a segment's bytes, all of which must be valid batches. Raises ValueError, with a byte position, if not."""
    data = bytes(data)
    return list(_decode_again(data, check_crc)) if len(data) < SMALL_LOG_BYTES else _decode_log(data, check_crc)


@lru_cache(maxsize=1 << 12)
def _decode_again(data: bytes, check_crc: bool) -> tuple[Batch, ...]:
    return tuple(_decode_log(data, check_crc))


def _decode_log(data: bytes, check_crc: bool) -> list[Batch]:
    batches, at = [], 0
    while at < len(data):
        try:
            batches.append(_decode_batch(data, at, check_crc))
        except ValueError as problem:
            raise ValueError(f"batch at byte {at}: {problem}") from problem
        at += batches[-1].size
    return batches


def _decode_batch(data: bytes, at: int, check_crc: bool) -> Batch:
    if len(data) - at < HEADER.size:
        raise ValueError("data ends inside the header")
    header = HEADER.unpack_from(data, at)
    base_offset, length, leader_epoch, magic, crc, attributes, last_delta = header[:7]
    base_timestamp, max_timestamp, producer_id, producer_epoch, base_sequence, count = header[7:]
    size = length + 12
    if magic != 2:
        raise ValueError(f"magic {magic}")
    if size < HEADER.size or at + size > len(data):
        raise ValueError(f"size {size} with {len(data) - at} bytes left")
    if check_crc and crc32c(data[at + 21 : at + size]) != crc:
        raise ValueError("CRC differs")
    block = data[at + HEADER.size : at + size]
    if count:
        block = codecs.decompress(attributes & 7, block)
    records = decode_records(block, count, base_offset, base_timestamp)
    if attributes & 0x08:
        records = [Rec(r.offset, max_timestamp, r.key, r.value, r.headers) for r in records]
    return Batch(
        at,
        size,
        base_offset,
        base_offset + last_delta,
        leader_epoch,
        crc,
        attributes & 0xFFFF,
        base_timestamp,
        max_timestamp,
        producer_id,
        producer_epoch,
        base_sequence,
        count,
        tuple(records),
    )


def decode_records(block: bytes, count: int, base_offset: int, base_timestamp: int) -> list[Rec]:
    """Decode exactly `count` records that fill `block` exactly."""
    records, at = [], 0
    for _ in range(count):
        length, at = decode_varint(block, at)
        if length < 0 or at + length > len(block):
            raise ValueError(f"record of {length} bytes with {len(block) - at} left")
        records.append(_decode_record(block[at : at + length], base_offset, base_timestamp))
        at += length
    if at != len(block):
        raise ValueError(f"{len(block) - at} bytes after the last record")
    return records


def _decode_record(body: bytes, base_offset: int, base_timestamp: int) -> Rec:
    timestamp_delta, at = decode_varlong(body, 1)
    offset_delta, at = decode_varint(body, at)
    key, at = _take_sized(body, at)
    value, at = _take_sized(body, at)
    header_count, at = decode_varint(body, at)
    if not 0 <= header_count <= len(body) - at:
        raise ValueError(f"{header_count} headers")
    headers = []
    for _ in range(header_count):
        name, at = _take_sized(body, at)
        if name is None:
            raise ValueError("null header key")
        header_value, at = _take_sized(body, at)
        headers.append((name, header_value))
    if at != len(body):
        raise ValueError(f"record of {len(body)} bytes ends after {at}")
    return Rec(base_offset + offset_delta, base_timestamp + timestamp_delta, key, value, tuple(headers))


def _take_sized(body: bytes, at: int) -> tuple[bytes | None, int]:
    length, at = decode_varint(body, at)
    if length < 0:
        return None, at
    if at + length > len(body):
        raise ValueError("field longer than its record")
    return body[at : at + length], at + length


def all_records(batches: Iterable[Batch]) -> list[Rec]:
    return [rec for batch in batches for rec in batch.records]
