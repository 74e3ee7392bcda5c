"""Reads messages of magic 0 and 1 as records of version 2, so that the same code cleans all formats; writes messages of
magic 0 and 1.

The layout is defined in `format/LEGACY.md`. Every length is checked against the available bytes before it is used;
kernels return codes, which `format/legacy.py` turns into reasons. `format/legacy.py` also decompresses the messages.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from keytail.kernels import batch_header as v2
from keytail.kernels.batches import be32, be64
from keytail.kernels.fallback import crc_tables
from keytail.kernels.jit import kernel
from keytail.kernels.native import copy_bytes
from keytail.kernels.records import CLOSED, IN_ARENA, put_varint, read_varint, varint_bytes

OK = 0
MESSAGE_TOO_SHORT = 80
MESSAGE_MAGIC = 81
MESSAGE_CRC = 82
FIELD_TOO_LONG = 83
MESSAGE_COMPRESSED = 84
OFFSETS_NOT_INCREASING = 85
SPAN_TOO_LONG = 86
NEGATIVE_OFFSET = 87
OUT_OF_RANGE = 88

PREFIX_BYTES = 12  # offset and size
MIN_V0, MIN_V1 = 14, 22  # smallest size of a message after the prefix
# An upper bound of the bytes by which a record of version 2 is longer than its message: at most 37 bytes, counting all
# varints at their largest size, replace the fixed fields of magic 0 (26 bytes).
MAX_GROWTH_BYTES = 11
_MAX_OFFSET_DELTA = 2**31 - 1
_MAX_OFFSET = 2**63 - 1  # no message can have this offset, as in batches.py

# Maximum bytes by which a message is longer than its record's body: 34 bytes of fields replace 3 bytes (two sizes, no
# headers).
MAX_MESSAGE_GROWTH_BYTES = 31

# Positions in the `out` array of `walk_messages` and `check_plain`; MAGICS has bit 0 for magic 0, bit 1 for magic 1.
CODE, WHERE, COUNT, FIRST, LAST, FIRST_TIMESTAMP, MAGICS, OUT_SIZE = range(8)


_CRC_TABLES = crc_tables(0xEDB88320)
_LOW_BYTE = np.uint64(0xFF)


# Unsigned positions avoid the check for Python's negative positions, which makes this function twice, and copying six
# times, as fast.
@njit(forceinline=True)
def _le32(a, p):
    return (
        np.uint64(a[p])
        | np.uint64(a[p + np.uint64(1)]) << np.uint64(8)
        | np.uint64(a[p + np.uint64(2)]) << np.uint64(16)
        | np.uint64(a[p + np.uint64(3)]) << np.uint64(24)
    )


@kernel
def crc32(array, start, n):
    """Return the CRC-32 (IEEE, as zlib's) of `array[start:start + n]`, eight bytes per step through eight tables."""
    crc = np.uint64(0xFFFFFFFF)
    p = np.uint64(start)
    end = p + np.uint64(n)
    while p + np.uint64(8) <= end:
        low = _le32(array, p) ^ crc
        high = _le32(array, p + np.uint64(4))
        crc = np.uint64(
            _CRC_TABLES[7, low & _LOW_BYTE]
            ^ _CRC_TABLES[6, (low >> np.uint64(8)) & _LOW_BYTE]
            ^ _CRC_TABLES[5, (low >> np.uint64(16)) & _LOW_BYTE]
            ^ _CRC_TABLES[4, low >> np.uint64(24)]
            ^ _CRC_TABLES[3, high & _LOW_BYTE]
            ^ _CRC_TABLES[2, (high >> np.uint64(8)) & _LOW_BYTE]
            ^ _CRC_TABLES[1, (high >> np.uint64(16)) & _LOW_BYTE]
            ^ _CRC_TABLES[0, high >> np.uint64(24)]
        )
        p += np.uint64(8)
    while p < end:
        crc = np.uint64(_CRC_TABLES[0, (crc ^ np.uint64(array[p])) & _LOW_BYTE]) ^ (crc >> np.uint64(8))
        p += np.uint64(1)
    return np.uint32(crc ^ np.uint64(0xFFFFFFFF))


@njit(forceinline=True)
def _fields(a, p, end):
    """Return (code, key position, key bytes, value position, value bytes) of message `a[p:end]`; -1 bytes for null.

    Requires magic 0 or 1 and at least the smallest size of that magic. Bytes after the value are ignored, as in Kafka's
    reader.
    """
    at = p + 6 if a[p + 4] == 0 else p + 14
    key_bytes = max(np.int64(be32(a, at)), np.int64(-1))
    key = at + 4
    if max(key_bytes, np.int64(0)) > end - key - 4:
        return FIELD_TOO_LONG, key, key_bytes, key, np.int64(-1)
    at = key + max(key_bytes, np.int64(0))
    value_bytes = max(np.int64(be32(a, at)), np.int64(-1))
    if value_bytes > end - at - 4:
        return FIELD_TOO_LONG, key, key_bytes, key, np.int64(-1)
    return OK, key, key_bytes, at + 4, value_bytes


@njit
def _check_message(a, p, end):
    """Return OK or the code of an error for message `a[p:end]`, which begins after its offset and size."""
    if end - p < MIN_V0:
        return MESSAGE_TOO_SHORT
    if a[p + 4] > 1:
        return MESSAGE_MAGIC
    if a[p + 4] == 1 and end - p < MIN_V1:
        return MESSAGE_TOO_SHORT
    if crc32(a, p + 4, end - p - 4) != np.uint32(be32(a, p)):
        return MESSAGE_CRC
    return _fields(a, p, end)[0]


@kernel
def check_message(a, p, end, out):
    """Check message `a[p:end]`; set `out[CODE]` and, for a valid message, the spans of key and value in `out[1:5]`."""
    out[CODE] = _check_message(a, p, end)
    if out[CODE] == OK:
        _, out[1], out[2], out[3], out[4] = _fields(a, p, end)


@njit(forceinline=True)
def _put_span(a, p, source, q, n):
    p = put_varint(a, p, n)
    n = max(n, np.int64(0))
    target_at, source_at = np.uint64(p), np.uint64(q)
    for i in range(np.uint64(n)):
        a[target_at + i] = source[source_at + i]
    return p + n


@njit(forceinline=True)
def _put_record(target, at, time_delta, offset_delta, a, key, key_bytes, value, value_bytes):
    """Write one record of version 2 without headers at `target[at]`; return the position after it."""
    length = 2 + varint_bytes(time_delta) + varint_bytes(offset_delta)
    length += varint_bytes(key_bytes) + max(key_bytes, np.int64(0))
    length += varint_bytes(value_bytes) + max(value_bytes, np.int64(0))
    at = put_varint(target, at, length)
    target[at] = 0
    at = put_varint(target, at + 1, time_delta)
    at = put_varint(target, at, offset_delta)
    at = _put_span(target, at, a, key, key_bytes)
    at = _put_span(target, at, a, value, value_bytes)
    target[at] = 0
    return at + 1


@kernel
def check_plain(raw, chunk_position, table, out):
    """Check all uncompressed messages of magic 0 and 1 among the rows of `table` and complete their rows.

    `raw[0]` is byte `chunk_position` of the file. `out` is int64[OUT_SIZE]: a code, the row with the error, and the
    number of wrappers (compressed messages), whose rows are not changed.
    """
    out[:] = 0
    for row in range(table.shape[0]):
        batch = table[row]
        if batch.magic > 1:
            continue
        start = batch.position - chunk_position
        end = start + batch.size_bytes
        out[WHERE] = row
        if start < 0 or end > raw.shape[0] or batch.size_bytes < PREFIX_BYTES + MIN_V0:
            out[CODE] = OUT_OF_RANGE
            return
        p = start + PREFIX_BYTES
        if raw[p + 5] & v2.CODEC_MASK:
            out[COUNT] += 1
            continue
        out[CODE] = _check_message(raw, p, end)
        if out[CODE] != OK:
            return
        offset = be64(raw, start)
        if offset < 0 or offset == _MAX_OFFSET:
            out[CODE] = NEGATIVE_OFFSET
            return
        batch.base_offset = offset
        batch.last_offset = offset
        batch.record_count = 1
        batch.attributes = np.int16(raw[p + 5] & v2.LOG_APPEND_TIME) if batch.magic == 1 else np.int16(0)
        timestamp = be64(raw, p + 6) if batch.magic == 1 else np.int64(-1)
        batch.base_timestamp_ms = timestamp
        batch.max_timestamp_ms = timestamp


@kernel
def transcode_plain(raw, chunk_position, table, row_from, row_to, where, start, size, arena, used):
    """Write the records of the wanted uncompressed messages among rows `row_from` .. `row_to` into `arena[used:]`.

    A row is wanted if its `where` is not CLOSED; `where` becomes IN_ARENA, and `start` and `size` give the bytes. Rows
    must have passed `check_plain`. The kernel stops before a row that might not fit, and returns (next row, bytes
    used).
    """
    for row in range(row_from, row_to):
        batch = table[row]
        if batch.magic > 1 or where[row] == CLOSED or batch.attributes & v2.CODEC_MASK:
            continue
        size_bytes = np.int64(batch.size_bytes)
        if used + size_bytes > arena.shape[0]:
            return row, used
        p = batch.position - chunk_position + PREFIX_BYTES
        _, key, key_bytes, value, value_bytes = _fields(raw, p, p - PREFIX_BYTES + size_bytes)
        # Both deltas are 0: such a record is never longer than the message.
        end = _put_record(arena, used, np.int64(0), np.int64(0), raw, key, key_bytes, value, value_bytes)
        where[row] = IN_ARENA
        start[row] = used
        size[row] = end - used
        used = end
    return row_to, used


@njit(forceinline=True)
def _timestamp(a, p, append_time, wrapper_timestamp):
    """Return the timestamp of an inner message: magic 0 has none, even if its wrapper has one."""
    if a[p + 4] == 0:
        return np.int64(-1)
    return np.int64(wrapper_timestamp) if append_time else be64(a, p + 6)


@kernel
def walk_messages(a, n, append_time, wrapper_timestamp, out):
    """Check the messages of a decompressed wrapper `a[:n]`. An incomplete last message is ignored.

    `out` is int64[OUT_SIZE]: a code and the byte position of the error; the number of messages, the first and last of
    their offset fields, the timestamp of the first message, and the magics of the messages.
    """
    out[:] = 0
    p = np.int64(0)
    while n - p >= PREFIX_BYTES:
        out[WHERE] = p
        offset = be64(a, p)
        size = np.int64(be32(a, p + 8))
        if size < MIN_V0:
            out[CODE] = MESSAGE_TOO_SHORT
            return
        message = p + PREFIX_BYTES
        end = message + size
        if end > n:
            break
        out[CODE] = _check_message(a, message, end)
        if out[CODE] == OK and a[message + 5] & v2.CODEC_MASK:
            out[CODE] = MESSAGE_COMPRESSED
        if out[CODE] != OK:
            return
        if out[COUNT] == 0:
            out[FIRST] = offset
            out[FIRST_TIMESTAMP] = _timestamp(a, message, append_time, wrapper_timestamp)
        elif offset <= out[LAST]:
            out[CODE] = OFFSETS_NOT_INCREASING
            return
        elif np.uint64(offset) - np.uint64(out[FIRST]) > np.uint64(_MAX_OFFSET_DELTA):
            out[CODE] = SPAN_TOO_LONG
            return
        out[LAST] = offset
        out[MAGICS] |= np.int64(1) << np.int64(a[message + 4])
        out[COUNT] += 1
        p = end


@kernel
def transcode_messages(a, n, append_time, wrapper_timestamp, first_delta, base_timestamp, target):
    """Write the records of `a[:n]`, which `walk_messages` has accepted, into `target`; return the number of bytes.

    `first_delta` is the first message's offset delta. `target` has room for `n` bytes and MAX_GROWTH_BYTES per
    message.
    """
    at = np.int64(0)
    p = np.int64(0)
    first = be64(a, 0) if n >= PREFIX_BYTES else np.int64(0)
    while n - p >= PREFIX_BYTES:
        message = p + PREFIX_BYTES
        end = message + np.int64(be32(a, p + 8))
        if end > n:
            break
        _, key, key_bytes, value, value_bytes = _fields(a, message, end)
        time_delta = _timestamp(a, message, append_time, wrapper_timestamp) - base_timestamp
        offset_delta = be64(a, p) - first + first_delta
        at = _put_record(target, at, time_delta, offset_delta, a, key, key_bytes, value, value_bytes)
        p = end
    return at


@njit(forceinline=True)
def _put_be(a, p, value, n):
    v = np.uint64(value)
    for i in range(n):
        a[p + i] = np.uint8((v >> np.uint64(8 * (n - 1 - i))) & np.uint64(0xFF))
    return p + n


@njit
def _put_fixed(a, p, offset, size, magic, attributes, timestamp):
    """Write the fields of a message before its key, except the checksum; return the position after them."""
    p = _put_be(a, p, offset, 8)
    p = _put_be(a, p, size, 4) + 4
    a[p] = magic
    a[p + 1] = attributes
    return _put_be(a, p + 2, timestamp, 8) if magic == 1 else p + 2


@njit
def _put_crc(a, p, end):
    """Write the checksum of message `a[p:end]`, whose offset is at `p`, and return it."""
    crc = crc32(a, p + 16, end - p - 16)
    _put_be(a, p + 12, np.int64(crc), 4)
    return crc


@njit
def put_message(a, p, offset, magic, attributes, timestamp, source, q, end):
    """Write the record with the body `source[q:end]` as an uncompressed message; return the position after it.

    The body was checked; its headers are omitted. `a` has room for the body and MAX_MESSAGE_GROWTH_BYTES.
    """
    start = p
    key_bytes, key = read_varint(source, q, end)
    key_bytes = max(np.int64(key_bytes), np.int64(-1))
    value_bytes, value = read_varint(source, key + max(key_bytes, np.int64(0)), end)
    value_bytes = max(np.int64(value_bytes), np.int64(-1))
    size = (MIN_V1 if magic == 1 else MIN_V0) + max(key_bytes, np.int64(0)) + max(value_bytes, np.int64(0))
    p = _put_fixed(a, p, offset, size, magic, attributes, timestamp)
    p = _put_be(a, p, key_bytes, 4)
    if key_bytes > 0:
        copy_bytes(a, p, source, key, key_bytes)
        p += key_bytes
    p = _put_be(a, p, value_bytes, 4)
    if value_bytes > 0:
        copy_bytes(a, p, source, value, value_bytes)
        p += value_bytes
    _put_crc(a, start, p)
    return p


@njit
def wrapper_bytes(magic):
    """Return the number of bytes before the compressed messages in a message of `magic` without a key."""
    return PREFIX_BYTES + (MIN_V1 if magic == 1 else MIN_V0)


@njit
def put_wrapper(a, p, offset, total, magic, attributes, timestamp):
    """Write the fields before the compressed messages `a[p + wrapper_bytes(magic):p + total]`; return the checksum."""
    at = _put_fixed(a, p, offset, total - PREFIX_BYTES, magic, attributes, timestamp)
    at = _put_be(a, at, -1, 4)
    _put_be(a, at, total - wrapper_bytes(magic), 4)
    return _put_crc(a, p, p + total)
