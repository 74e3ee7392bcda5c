"""Parses the records of decompressed batches into a table of spans, and hashes their keys.

Every length is checked against the available bytes before it is used, so that no input makes a kernel read past its
block. The layout is defined in `format/BATCH.md`, "Records".
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from keytail.kernels import batch_header as v2
from keytail.kernels.jit import kernel
from keytail.kernels.native import xxh3_128

# One item per record: spans into the bytes that contain its batch's record block.
RECORD_TABLE = np.dtype(
    [
        ("offset", "i8"),
        ("timestamp_ms", "i8"),  # the timestamp that a consumer sees
        ("key_start", "i8"),
        ("body_start", "i8"),  # from the key's length varint ...
        ("body_bytes", "i4"),  # ... to the end of the record
        ("key_bytes", "i4"),  # -1: no key
        ("value_bytes", "i4"),  # -1: null
        ("value_skip", "i4"),  # distance of the value from body_start; the headers begin where the value ends
        ("row", "i4"),  # row of its batch in the chunk's table
        ("canonical", "i4"),  # 1: the body's varints are minimal and its nulls are -1, so it may be copied
    ],
    align=True,
)

# Values of the array `where` of OpenedRows: the location of each batch's record block; CLOSED: it is not to be read.
CLOSED, IN_RAW, IN_ARENA = -1, 0, 1

# Codes in `out[2]` of `scan_records`.
OK = 0
RECORD_COUNT_IMPOSSIBLE = 20
PREMATURE_END = 21
RECORD_SIZE_INVALID = 22
HEADER_COUNT_INVALID = 23
HEADER_KEY_NEGATIVE = 24
VARINT_INVALID = 25
BYTES_LEFT_OVER = 26
OFFSETS_NOT_INCREASING = 27
OFFSET_BEYOND_BATCH = 28

NEXT_ROW, COUNT, CODE, BAD_ROW = 0, 1, 2, 3

MIN_RECORD_BYTES = 7  # length, attributes, two deltas, key length, value length, header count


@njit(forceinline=True)
def read_varint(a, p, end):
    """Return (value, next position) of a zig-zag varint of at most 5 bytes; next position -1 if it does not fit."""
    if p >= end:
        return np.int64(0), np.int64(-1)
    b = np.int64(a[p])
    if b < 0x80:
        return (b >> 1) ^ -(b & 1), np.int64(p + 1)
    if p + 1 < end and a[p + 1] < 0x80:
        b = (b & 0x7F) | (np.int64(a[p + 1]) << 7)
        return (b >> 1) ^ -(b & 1), np.int64(p + 2)
    return _long_varint(a, p, end)


@njit
def _long_varint(a, p, end):
    v = np.int64(0)
    for i in range(5):
        if p + i >= end:
            return np.int64(0), np.int64(-1)
        b = np.int64(a[p + i])
        v |= (b & 0x7F) << (7 * i)
        if b < 0x80:
            v &= 0xFFFFFFFF
            return (v >> 1) ^ -(v & 1), np.int64(p + i + 1)
    return np.int64(0), np.int64(-1)


@njit(forceinline=True)
def read_varlong(a, p, end):
    """Return (value, next position) of a zig-zag varlong of at most 10 bytes; next position -1 if it does not fit."""
    if p >= end:
        return np.int64(0), np.int64(-1)
    b = np.int64(a[p])
    if b < 0x80:
        return (b >> 1) ^ -(b & 1), np.int64(p + 1)
    if p + 1 < end and a[p + 1] < 0x80:
        b = (b & 0x7F) | (np.int64(a[p + 1]) << 7)
        return (b >> 1) ^ -(b & 1), np.int64(p + 2)
    return _long_varlong(a, p, end)


@njit
def _long_varlong(a, p, end):
    v = np.uint64(0)
    for i in range(10):
        if p + i >= end:
            return np.int64(0), np.int64(-1)
        b = np.uint64(a[p + i])
        v |= (b & np.uint64(0x7F)) << np.uint64(7 * i)
        if b < np.uint64(0x80):
            half = np.int64(v >> np.uint64(1))
            sign = np.int64(v & np.uint64(1))
            return half ^ -sign, np.int64(p + i + 1)
    return np.int64(0), np.int64(-1)


@njit(forceinline=True)
def varint_bytes(value):
    """Return the length of the minimal zig-zag varint of an int32, or varlong of an int64."""
    v = np.uint64((value << 1) ^ (value >> 63))
    n = 1
    while v >= np.uint64(0x80):
        v >>= np.uint64(7)
        n += 1
    return n


@njit(forceinline=True)
def put_varint(a, p, value):
    """Write a minimal zig-zag varint of an int32, or varlong of an int64, to `a[p:]`; return the position after it."""
    v = np.uint64((value << 1) ^ (value >> 63))
    while v >= np.uint64(0x80):
        a[p] = np.uint8((v & np.uint64(0x7F)) | np.uint64(0x80))
        v >>= np.uint64(7)
        p += 1
    a[p] = np.uint8(v)
    return p + 1


@njit(forceinline=True)
def _minimal(value, length):
    if length == 1:
        return True
    if length == 2:
        return value >= 64 or value < -64
    return length == varint_bytes(value)


@njit
def scan_headers(a, p, end, count):
    """Return (position after `count` headers, whether they are canonical, code)."""
    canonical = True
    for _ in range(count):
        n, q = read_varint(a, p, end)
        if q < 0:
            return p, canonical, VARINT_INVALID
        if n < 0:
            return p, canonical, HEADER_KEY_NEGATIVE
        if n > end - q:
            return p, canonical, RECORD_SIZE_INVALID
        canonical &= _minimal(n, q - p)
        p = q + n
        n, q = read_varint(a, p, end)
        if q < 0:
            return p, canonical, VARINT_INVALID
        canonical &= n >= -1 and _minimal(n, q - p)
        n = max(n, 0)
        if n > end - q:
            return p, canonical, RECORD_SIZE_INVALID
        p = q + n
    return p, canonical, OK


class Walked(NamedTuple):
    """The parts of a record in the bytes `a`; a length of -1 means null. `stop` is the end of the record; if `code` is
    not OK, the record is malformed, and the other fields have no meaning."""

    code: int
    stop: int
    time_delta: int
    offset_delta: int
    body: int  # from the key's length varint on
    key: int
    key_bytes: int
    value: int
    value_bytes: int
    canonical: bool


@njit(forceinline=True)
def _malformed(code):
    zero = np.int64(0)
    return Walked(np.int64(code), zero, zero, zero, zero, zero, zero, zero, zero, False)


@njit(forceinline=True)
def walk_record(a, p, end):
    """Return the record at `p` as a Walked, after a check of every length."""
    length, q = read_varint(a, p, end)
    if q < 0:
        return _malformed(PREMATURE_END if p >= end else VARINT_INVALID)
    if length < 1 or length > end - q:
        return _malformed(RECORD_SIZE_INVALID)
    stop = q + length
    # The attributes byte is unused and skipped.
    time_delta, q = read_varlong(a, q + 1, stop)
    if q < 0:
        return _malformed(VARINT_INVALID)
    offset_delta, q = read_varint(a, q, stop)
    if q < 0:
        return _malformed(VARINT_INVALID)
    body = q
    key_bytes, q = read_varint(a, q, stop)
    if q < 0:
        return _malformed(VARINT_INVALID)
    canonical = key_bytes >= -1 and _minimal(key_bytes, q - body)
    key = q
    key_bytes = max(key_bytes, np.int64(-1))
    if key_bytes > stop - q:
        return _malformed(RECORD_SIZE_INVALID)
    q += max(key_bytes, np.int64(0))
    mark = q
    value_bytes, q = read_varint(a, q, stop)
    if q < 0:
        return _malformed(VARINT_INVALID)
    canonical &= value_bytes >= -1 and _minimal(value_bytes, q - mark)
    value_bytes = max(value_bytes, np.int64(-1))
    if value_bytes > stop - q:
        return _malformed(RECORD_SIZE_INVALID)
    value = q
    q += max(value_bytes, np.int64(0))
    mark = q
    headers, q = read_varint(a, q, stop)
    if q < 0:
        return _malformed(VARINT_INVALID)
    if headers < 0 or headers > stop - q:
        return _malformed(HEADER_COUNT_INVALID)
    canonical &= _minimal(headers, q - mark)
    if headers > 0:
        q, minimal, code = scan_headers(a, q, stop, headers)
        if code != OK:
            return _malformed(code)
        canonical &= minimal
    if q != stop:
        return _malformed(RECORD_SIZE_INVALID)
    return Walked(
        np.int64(OK), stop, time_delta, offset_delta, body, key, key_bytes, value, value_bytes, canonical
    )


@njit(forceinline=True)
def _skip_record(a, p, end):
    """Return (code, position after the record at `p`) without a check of its contents."""
    length, q = read_varint(a, p, end)
    if q < 0:
        return PREMATURE_END if p >= end else VARINT_INVALID, q
    if length < 1 or length > end - q:
        return RECORD_SIZE_INVALID, q
    return OK, q + length


@njit
def _scan_batch(
    a, p, end, base_offset, last_offset, base_timestamp, append_time, row, count, records, n, bits, first_bit
):
    """Fill `records` from item `n` on with the records of the block `a[p:end]`; return (code, next item).

    With a `first_bit` of 0 or more, only records whose bit is set are examined.
    """
    previous = base_offset - 1
    for k in range(count):
        if first_bit >= 0:
            bit = first_bit + k
            if (bits[bit >> 3] >> np.uint8(bit & 7)) & 1 == 0:
                code, p = _skip_record(a, p, end)
                if code != OK:
                    return code, n
                continue
        found = walk_record(a, p, end)
        if found.code != OK:
            return found.code, n
        offset = base_offset + found.offset_delta
        if offset <= previous:
            return OFFSETS_NOT_INCREASING, n
        previous = offset
        p = found.stop
        record = records[n]
        record.offset = offset
        record.timestamp_ms = base_timestamp if append_time else base_timestamp + found.time_delta
        record.key_start = found.key
        record.body_start = found.body
        record.body_bytes = found.stop - found.body
        record.key_bytes = found.key_bytes
        record.value_bytes = found.value_bytes
        record.value_skip = found.value - found.body
        record.row = row
        record.canonical = 1 if found.canonical else 0
        n += 1
    if previous > last_offset:
        return OFFSET_BEYOND_BATCH, n
    return OK if p == end else BYTES_LEFT_OVER, n


@kernel
def scan_records(
    raw, arena, table, where, block_start, block_bytes, row_from, row_to, bits, first_bit, records, out
):
    """Fill `records` (RECORD_TABLE) with the records of the rows from `row_from` to before `row_to` that are not
    CLOSED, whole batches at a time.

    `first_bit[row]` is the bit in `bits` of the row's first record; the records whose bits are not set are neither
    taken nor checked, so their blocks must have been checked before. If it is negative, all records of the row are
    taken. The kernel stops before the first batch that might not fit. `out` is int64[4]: next row, records of whole
    batches written, a code, and the row with the error.
    """
    n = np.int64(0)
    row = row_from
    code = OK
    while row < row_to:
        if where[row] != CLOSED:
            batch = table[row]
            count = np.int64(batch.record_count)
            if count * MIN_RECORD_BYTES > block_bytes[row]:
                code = RECORD_COUNT_IMPOSSIBLE
                break
            if n + count > records.shape[0]:
                break
            # Blocks of magic 0 and 1 were converted by `legacy.py`, with each record's own timestamp in them.
            append_time = batch.magic == 2 and batch.attributes & v2.LOG_APPEND_TIME != 0
            timestamp = batch.max_timestamp_ms if append_time else batch.base_timestamp_ms
            start = block_start[row]
            end = start + block_bytes[row]
            if where[row] == IN_RAW:
                code, filled = _scan_batch(
                    raw, start, end, batch.base_offset, batch.last_offset, timestamp, append_time, row, count,
                    records, n, bits, first_bit[row],
                )  # fmt: skip
            else:
                code, filled = _scan_batch(
                    arena, start, end, batch.base_offset, batch.last_offset, timestamp, append_time, row, count,
                    records, n, bits, first_bit[row],
                )  # fmt: skip
            if code != OK:
                break
            n = filled
        row += 1
    out[NEXT_ROW] = row
    out[COUNT] = n
    out[CODE] = code
    out[BAD_ROW] = row


@kernel
def hash_keys(raw, arena, where, records, n, seed, low, high):
    """Write 128-bit hashes of the keys of `records[:n]` to `low` and `high` (uint64); keyless records get zeros."""
    for i in range(n):
        record = records[i]
        if record.key_bytes < 0:
            low[i] = 0
            high[i] = 0
        elif where[record.row] == IN_RAW:
            low[i], high[i] = xxh3_128(raw, record.key_start, record.key_bytes, seed)
        else:
            low[i], high[i] = xxh3_128(arena, record.key_start, record.key_bytes, seed)


@kernel
def number_records(records, n, first_ordinal, from_offset, ordinals, keyless):
    """Set `ordinals[i]` to the ordinal of record i, or to -1 if it has no key or is below `from_offset`.

    `first_ordinal[row]` is the ordinal of the row's first record. `keyless` is int64[2]: the number of records so far
    at or above `from_offset` that have no key, and the first offset of these.
    """
    previous = np.int64(-1)
    k = np.int64(0)
    for i in range(n):
        record = records[i]
        row = np.int64(record.row)
        if row != previous:
            previous = row
            k = 0
        ordinals[i] = -1
        if record.offset >= from_offset:
            if record.key_bytes >= 0:
                ordinals[i] = first_ordinal[row] + k
            else:
                if keyless[0] == 0:
                    keyless[1] = record.offset
                keyless[0] += 1
        k += 1
