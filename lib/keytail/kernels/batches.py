"""Reads batch headers from raw bytes into a table, one row per batch, and checks each header before it is used.

The layout is defined in `format/BATCH.md`. Kernels return codes and positions; `log/records/chunk.py` turns the codes
into errors that name the file.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from keytail.kernels import batch_header as v2
from keytail.kernels.jit import kernel
from keytail.kernels.native import crc32c

# Codes in `out[CODE]` of `index_batches`.
OK = 0  # only whole batches, perhaps followed by an incomplete batch
TABLE_FULL = 1
SIZE_TOO_SMALL = 2
INVALID_MAGIC = 3
TOO_SHORT_FOR_V2 = 4
CRC_MISMATCH = 5
NEGATIVE_COUNT = 6
NEGATIVE_SPAN = 7
OFFSETS_GO_BACK = 8

# Positions in the `out` array.
ROWS, CONSUMED, CODE, NEEDED = 0, 1, 2, 3


_MIN_SIZE = 14
_MAX_OFFSET = 2**63 - 1  # no record can have this offset, because the next offset is not representable


@njit(forceinline=True)
def _byte_at(a, i):
    """Return byte `i`, which is not negative: the index is unsigned, so that LLVM makes one load of several bytes."""
    return np.uint32(a[np.uint64(i)])


@njit(forceinline=True)
def be16(a, i):
    return np.int16(np.uint16(_byte_at(a, i) << np.uint32(8) | _byte_at(a, i + 1)))


@njit(forceinline=True)
def be32(a, i):
    return np.int32(
        np.uint32(
            _byte_at(a, i) << np.uint32(24)
            | _byte_at(a, i + 1) << np.uint32(16)
            | _byte_at(a, i + 2) << np.uint32(8)
            | _byte_at(a, i + 3)
        )
    )


@njit(forceinline=True)
def be64(a, i):
    hi = np.uint64(np.uint32(be32(a, i)))
    lo = np.uint64(np.uint32(be32(a, i + 4)))
    return np.int64((hi << np.uint64(32)) | lo)


@njit(forceinline=True)
def _skip_varint(a, p, end, longest):
    """Return the position after a varint of at most `longest` bytes, or -1."""
    for _ in range(longest):
        if p >= end:
            return -1
        p += 1
        if a[p - 1] < 0x80:
            return p
    return -1


@njit(forceinline=True)
def _small_varint(a, p, end):
    """Return a one-byte zig-zag varint, or -2: control keys and values are never longer than 63 bytes."""
    if p >= end or a[p] >= 0x80:
        return -2
    b = np.int64(a[p])
    return (b >> 1) ^ -(b & 1)


@njit(forceinline=True)
def _read_control(a, p, end, row):
    """Set type and coordinator epoch of an uncompressed control batch in `row`, from its first record (BATCH.md,
    "Control")."""
    p = _skip_varint(a, p, end, 5)
    if p < 0:
        return
    p = _skip_varint(a, p + 1, end, 10)
    if p < 0:
        return
    p = _skip_varint(a, p, end, 5)
    if p < 0:
        return
    key_bytes = _small_varint(a, p, end)
    if key_bytes < 4 or p + 1 + key_bytes > end:
        return
    row.control_type = be16(a, p + 3)
    p += 1 + key_bytes
    value_bytes = _small_varint(a, p, end)
    if value_bytes >= 6 and p + 1 + value_bytes <= end:
        row.coordinator_epoch = be32(a, p + 3)


@kernel
def index_batches(raw, n, position, previous_last_offset, table, out):
    """Fill `table` (BATCH_TABLE rows) with the whole batches of `raw[:n]`; `raw[0]` is byte `position` of the file.

    `out` is int64[4]: rows written, bytes consumed, a code, and the size of a batch that did not fit whole, or 0. The
    CRC of magic 2 is checked; in rows of magic 0 and 1, only position, offset, size, magic, CRC, attributes and
    timestamp are from the message.
    Offsets must increase, from above `previous_last_offset` on.
    """
    rows = 0
    p = 0
    code = OK
    needed = 0
    last = previous_last_offset
    while n - p >= 17:
        size = np.int64(be32(raw, p + v2.BATCH_LENGTH))
        if size < _MIN_SIZE:
            code = SIZE_TOO_SMALL
            break
        magic = np.int8(raw[p + v2.MAGIC])
        if magic < 0 or magic > 2:
            code = INVALID_MAGIC
            break
        total = size + v2.LENGTH_PREFIX_BYTES
        if magic == 2 and total < v2.HEADER_BYTES:
            code = TOO_SHORT_FOR_V2
            break
        if p + total > n:
            needed = total
            break
        if rows == table.shape[0]:
            code = TABLE_FULL
            break
        row = table[rows]
        base = be64(raw, p)
        row.position = position + p
        row.size_bytes = total
        row.base_offset = base
        row.magic = magic
        row.control_type = -1
        row.coordinator_epoch = -1
        if magic == 2:
            if crc32c(raw, p + v2.ATTRIBUTES, total - v2.ATTRIBUTES) != np.uint32(be32(raw, p + v2.CRC)):
                code = CRC_MISMATCH
                break
            span = be32(raw, p + v2.LAST_OFFSET_DELTA)
            count = be32(raw, p + v2.RECORD_COUNT)
            if count < 0:
                code = NEGATIVE_COUNT
                break
            if span < 0 or base < 0 or span >= _MAX_OFFSET - base:
                code = NEGATIVE_SPAN
                break
            row.last_offset = base + span
            row.leader_epoch = be32(raw, p + v2.LEADER_EPOCH)
            row.crc = np.uint32(be32(raw, p + v2.CRC))
            row.attributes = be16(raw, p + v2.ATTRIBUTES)
            row.base_timestamp_ms = be64(raw, p + v2.BASE_TIMESTAMP)
            row.max_timestamp_ms = be64(raw, p + v2.MAX_TIMESTAMP)
            row.producer_id = be64(raw, p + v2.PRODUCER_ID)
            row.producer_epoch = be16(raw, p + v2.PRODUCER_EPOCH)
            row.base_sequence = be32(raw, p + v2.BASE_SEQUENCE)
            row.record_count = count
            if row.attributes & v2.CONTROL and count > 0 and row.attributes & v2.CODEC_MASK == 0:
                _read_control(raw, p + v2.HEADER_BYTES, p + total, row)
        else:
            row.last_offset = base
            row.leader_epoch = -1
            row.crc = np.uint32(be32(raw, p + 12))
            row.attributes = np.int16(raw[p + 17])
            timestamp = np.int64(-1)
            if magic == 1 and size >= 22:
                timestamp = be64(raw, p + 18)
            row.base_timestamp_ms = timestamp
            row.max_timestamp_ms = timestamp
            row.producer_id = -1
            row.producer_epoch = -1
            row.base_sequence = -1
            row.record_count = 1
        if base <= last:
            code = OFFSETS_GO_BACK
            break
        last = row.last_offset
        rows += 1
        p += total
    out[ROWS] = rows
    out[CONSUMED] = p
    out[CODE] = code
    out[NEEDED] = needed
