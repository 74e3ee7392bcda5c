"""Reads messages of magic 0 and 1 as batches: fills their rows of the batch table, and converts records to version 2.

LEGACY.md beside this file specifies the layout of the messages. All fields and checksums, including inner checksums,
are checked, because the records are written with new checksums. The caller adds file and byte position to an error.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keytail.format.batch import CODEC_MASK, LOG_APPEND_TIME, NO_TIMESTAMP, NOT_COPIED
from keytail.format.codecs.errors import NO_LIMIT_BYTES, Buffer, TooLarge
from keytail.format.codecs.table import LZ4, codec_name
from keytail.format.compression import decompress
from keytail.kernels import legacy as kernels

# The fields before the key's length, exactly as on disk (LEGACY.md 1).
MESSAGE_V0 = np.dtype(
    [
        ("offset", ">i8"),
        ("size", ">i4"),  # bytes after this field
        ("crc", ">u4"),  # CRC-32 from `magic` to the end
        ("magic", "i1"),
        ("attributes", "i1"),
    ]
)
MESSAGE_V1 = np.dtype([*MESSAGE_V0.descr, ("timestamp", ">i8")])
assert (MESSAGE_V0.itemsize, MESSAGE_V1.itemsize) == (18, 26)

_REASONS = {
    kernels.MESSAGE_TOO_SHORT: "message is shorter than its fixed fields",
    kernels.MESSAGE_MAGIC: "message has a magic byte other than 0 or 1",
    kernels.MESSAGE_CRC: "message has an invalid CRC",
    kernels.FIELD_TOO_LONG: "a message's key or value is longer than the message",
    kernels.MESSAGE_COMPRESSED: "a message inside a compressed message is compressed itself",
    kernels.OFFSETS_NOT_INCREASING: "offsets do not increase inside a compressed message",
    kernels.SPAN_TOO_LONG: "a compressed message spans more than 2^31 offsets",
    kernels.NEGATIVE_OFFSET: "message has a negative offset or the largest possible one",
    kernels.OUT_OF_RANGE: "message is not within the bytes that were read",
}


class LegacyProblem(ValueError):
    """An invalid message in one row of a batch table."""

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(reason)
        self.row = row
        self.is_crc = reason == _REASONS[kernels.MESSAGE_CRC]


@dataclass(frozen=True)
class LegacyBatch:
    """One message with its inner messages, described as a version 2 batch.

    `attributes` has codec and timestamp type as in version 2. `max_timestamp_ms` is the timestamp of the message
    itself, which in a compressed message need not be the largest of the inner timestamps. `is_uniform`: the inner
    messages have the magic of this message, which has the offset of the last inner message.
    """

    base_offset: int
    last_offset: int
    record_count: int
    attributes: int
    base_timestamp_ms: int
    max_timestamp_ms: int
    is_uniform: bool = True


@dataclass(frozen=True)
class _Opened:
    """The inner messages of a message; an uncompressed message is its own inner message."""

    block: np.ndarray
    offset: int
    magic: int
    attributes: int
    timestamp_ms: int

    @property
    def relative(self) -> bool:
        """Whether the inner offsets are relative."""
        return self.packed and self.magic > 0

    @property
    def append_time(self) -> bool:
        return bool(self.attributes & LOG_APPEND_TIME)

    @property
    def packed(self) -> bool:
        return bool(self.attributes & CODEC_MASK)


def summarize(raw: np.ndarray, start: int, size: int, limit_bytes: int = NO_LIMIT_BYTES) -> LegacyBatch:
    """Return the message `raw[start:start + size]`, which includes the offset and size fields, as a batch.

    Raises ValueError for every error listed in LEGACY.md, and TooLarge if the message decompresses to more than
    `limit_bytes`.
    """
    opened = _open(raw, start, size, limit_bytes)
    return _summary(opened, _walk(opened))


def transcode(
    raw: np.ndarray,
    start: int,
    size: int,
    base_offset: int,
    base_timestamp_ms: int,
    limit_bytes: int = NO_LIMIT_BYTES,
) -> np.ndarray:
    """Return the records of the message `raw[start:start + size]` as a version 2 record block (uint8).

    Deltas are relative to `base_offset` and `base_timestamp_ms`. Raises the same errors as `summarize`.
    """
    opened = _open(raw, start, size, limit_bytes)
    found = _walk(opened)
    summary = _summary(opened, found)
    block = opened.block
    room = len(block) + kernels.MAX_GROWTH_BYTES * int(found[kernels.COUNT])
    records = np.empty(room, np.uint8)
    used = kernels.transcode_messages(
        block,
        len(block),
        opened.append_time,
        opened.timestamp_ms,
        summary.base_offset - base_offset,
        base_timestamp_ms,
        records,
    )
    return records[:used]


def summarize_rows(
    raw: np.ndarray,
    chunk_position: int,
    table: np.ndarray,
    previous_last_offset: int = -1,
    limit_bytes: int = NO_LIMIT_BYTES,
) -> None:
    """Check all rows of magic 0 and 1 and complete these rows in place; `raw[0]` is byte `chunk_position` of the file.

    Raises LegacyProblem for the first row that is invalid, or that begins at or below the last offset before it, and
    TooLarge for a row that decompresses to more than `limit_bytes`.
    """
    old = np.flatnonzero(table["magic"] < 2)
    if not len(old):
        return
    out = np.zeros(kernels.OUT_SIZE, np.int64)
    kernels.check_plain(raw, chunk_position, table, out)
    bad, reason = len(table), ""
    if out[kernels.CODE]:
        bad, reason = int(out[kernels.WHERE]), _REASONS[int(out[kernels.CODE])]
    wrappers = old[(table["attributes"][old] & CODEC_MASK != 0) & (old < bad)]
    for row in wrappers:
        start = int(table["position"][row]) - chunk_position
        try:
            batch = summarize(raw, start, int(table["size_bytes"][row]), limit_bytes)
        except ValueError as problem:
            bad, reason = int(row), str(problem)
            break
        except TooLarge as problem:
            problem.byte_position, problem.offset = int(table["position"][row]), int(table["base_offset"][row])
            raise
        table["base_offset"][row], table["last_offset"][row] = batch.base_offset, batch.last_offset
        table["record_count"][row] = batch.record_count
        table["attributes"][row] = batch.attributes | (0 if batch.is_uniform else NOT_COPIED)
        table["base_timestamp_ms"][row] = batch.base_timestamp_ms
        table["max_timestamp_ms"][row] = batch.max_timestamp_ms
    # The caller uses the rows before an invalid row, so the offsets of these rows must ascend, too.
    ends = np.concatenate(([previous_last_offset], table["last_offset"][:-1]))
    back = np.flatnonzero(table["base_offset"][:bad] <= ends[:bad])
    if len(back):
        raise LegacyProblem(int(back[0]), "batch begins at or below the last offset of the previous batch")
    if bad < len(table):
        raise LegacyProblem(bad, reason)


def _open(raw: np.ndarray, start: int, size: int, limit_bytes: int) -> _Opened:
    """Check a message, and return its decompressed inner messages."""
    if start < 0 or size < kernels.PREFIX_BYTES or start + size > len(raw):
        raise ValueError(_REASONS[kernels.OUT_OF_RANGE])
    message, end = start + kernels.PREFIX_BYTES, start + size
    out = np.zeros(kernels.OUT_SIZE, np.int64)
    kernels.check_message(raw, message, end, out)
    _raise(out)
    fields = np.frombuffer(raw[start : message + 14].tobytes(), MESSAGE_V1, count=1)[0]
    declared, magic = int(fields["size"]), int(fields["magic"])
    if declared != size - kernels.PREFIX_BYTES:
        has_bytes = size - kernels.PREFIX_BYTES
        raise ValueError(f"message declares {declared} bytes after its size field, but has {has_bytes}")
    attributes = int(fields["attributes"]) & (CODEC_MASK | LOG_APPEND_TIME if magic else CODEC_MASK)
    timestamp_ms = int(fields["timestamp"]) if magic else NO_TIMESTAMP
    codec = attributes & CODEC_MASK
    block = raw[start:end]
    if codec:
        if out[4] < 0:
            raise ValueError("a compressed message has no value")
        value = memoryview(raw)[int(out[3]) : int(out[3] + out[4])]
        block = np.frombuffer(_decompress(codec, value, magic, limit_bytes), np.uint8)
    return _Opened(block, int(fields["offset"]), magic, attributes, timestamp_ms)


def _decompress(codec: int, value: memoryview, magic: int, limit_bytes: int) -> Buffer:
    if codec > LZ4:
        raise ValueError(f"a message of magic {magic} cannot be compressed with {codec_name(codec)}")
    return decompress(codec, value, limit_bytes, skip_header_checksum=magic == 0)


def _walk(opened: _Opened) -> np.ndarray:
    out = np.zeros(kernels.OUT_SIZE, np.int64)
    if opened.packed:
        kernels.walk_messages(opened.block, len(opened.block), opened.append_time, opened.timestamp_ms, out)
        _raise(out)
        if not out[kernels.COUNT]:
            raise ValueError("a compressed message contains no messages")
    else:
        out[kernels.COUNT] = 1
        out[kernels.FIRST] = out[kernels.LAST] = opened.offset
        out[kernels.FIRST_TIMESTAMP] = opened.timestamp_ms
        out[kernels.MAGICS] = 1 << opened.magic
    return out


def _summary(opened: _Opened, found: np.ndarray) -> LegacyBatch:
    """Return the message as a batch, with offsets according to LEGACY.md 2."""
    first, last, offset = int(found[kernels.FIRST]), int(found[kernels.LAST]), opened.offset
    if opened.relative and offset == 0:
        end = last
    elif offset < last:
        raise ValueError(f"the last inner message has offset {last}, but the compressed message has offset {offset}")
    else:
        end = offset
        if opened.relative:
            first += offset - last
    if first < 0 or end >= 2**63 - 1:
        raise ValueError(_REASONS[kernels.NEGATIVE_OFFSET])
    if end - first > 2**31 - 1:
        raise ValueError(_REASONS[kernels.SPAN_TOO_LONG])
    return LegacyBatch(
        base_offset=first,
        last_offset=end,
        record_count=int(found[kernels.COUNT]),
        attributes=opened.attributes,
        base_timestamp_ms=int(found[kernels.FIRST_TIMESTAMP]),
        max_timestamp_ms=opened.timestamp_ms,
        is_uniform=int(found[kernels.MAGICS]) == 1 << opened.magic and end == offset,
    )


def _raise(out: np.ndarray) -> None:
    if out[kernels.CODE]:
        raise ValueError(_REASONS[int(out[kernels.CODE])])
