"""The reader of batch headers and records (format/BATCH.md) that the proof and the inspection use.

This reader is separate from the reader that cleaning uses, so that one mistake cannot affect both. Every read is
bounded by `end`; for a record that does not fit, the returned position is -1.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, register_jitable

from keytail.kernels import batch_header as v2

# LLVM inlines these functions whatever their size: a call would count references of each array argument.
_inlined = register_jitable(forceinline=True)


@_inlined
def byte_at(a, p):
    """Return byte `p` as uint64; `p` is at or above 0.

    For a signed index Numba adds a branch at each byte, because index -1 means the last byte; without the branch, LLVM
    makes one load of several bytes.
    """
    return np.uint64(a[np.uint64(p)])


@_inlined
def be_64(a, p):
    """Return the signed big-endian int64 at byte `p`."""
    return np.int64(
        byte_at(a, p) << np.uint64(56)
        | byte_at(a, p + 1) << np.uint64(48)
        | byte_at(a, p + 2) << np.uint64(40)
        | byte_at(a, p + 3) << np.uint64(32)
        | byte_at(a, p + 4) << np.uint64(24)
        | byte_at(a, p + 5) << np.uint64(16)
        | byte_at(a, p + 6) << np.uint64(8)
        | byte_at(a, p + 7)
    )


@_inlined
def be_u32(a, p):
    return np.int64(
        byte_at(a, p) << np.uint64(24)
        | byte_at(a, p + 1) << np.uint64(16)
        | byte_at(a, p + 2) << np.uint64(8)
        | byte_at(a, p + 3)
    )


@_inlined
def be_32(a, p):
    """Return the signed big-endian int32 at byte `p`, as int64."""
    return np.int64(np.int32(np.uint32(be_u32(a, p))))


@_inlined
def be_16(a, p):
    """Return the signed big-endian int16 at byte `p`, as int64."""
    return np.int64(np.int16(np.uint16(byte_at(a, p) << np.uint64(8) | byte_at(a, p + 1))))


@intrinsic
def _memcmp(typingctx, a, i, b, j, n):
    def codegen(context, builder, signature, args):
        pointers = []
        for k in (0, 2):
            data = context.make_array(signature.args[k])(context, builder, args[k]).data
            pointers.append(builder.bitcast(builder.gep(data, [args[k + 1]]), cgutils.voidptr_t))
        function_type = ir.FunctionType(ir.IntType(32), [cgutils.voidptr_t, cgutils.voidptr_t, ir.IntType(64)])
        function = cgutils.get_or_insert_function(builder.module, function_type, "memcmp")
        return builder.call(function, [*pointers, args[4]])

    return types.int32(a, types.int64, b, types.int64, types.int64), codegen


@_inlined
def same_bytes(a, i, b, j, n):
    """Return whether `a[i:i + n]` equals `b[j:j + n]` (uint8)."""
    return _memcmp(a, i, b, j, n) == 0


@register_jitable
def _read_long_varint(a, p, end, most_bytes):
    """Return (raw value, position after it) of a variable-length number; position -1: invalid."""
    value = np.uint64(0)
    for i in range(min(most_bytes, end - p)):
        byte = byte_at(a, p + i)
        value |= (byte & np.uint64(127)) << np.uint64(7 * i)
        if byte < 128:
            return value, p + i + 1
    return value, np.int64(-1)


@_inlined
def read_varint(a, p, end):
    """Return (value, position after it) of a zig-zag varint of at most 5 bytes; position -1: invalid."""
    if end - p >= 2:
        byte = np.int64(byte_at(a, p))
        if byte < 128:
            return byte >> 1 ^ -(byte & 1), p + 1
        second = np.int64(byte_at(a, p + 1))
        if second < 128:
            raw = byte & 127 | second << 7
            return raw >> 1 ^ -(raw & 1), p + 2
    value, p = _read_long_varint(a, p, end, 5)
    raw = np.int64(value & np.uint64(0xFFFFFFFF))  # only four bits of the fifth byte count
    return raw >> 1 ^ -(raw & 1), p


@_inlined
def read_varlong(a, p, end):
    """Return (value, position after it) of a zig-zag varlong of at most 10 bytes; position -1: invalid."""
    if p < end:
        byte = np.int64(byte_at(a, p))
        if byte < 128:
            return byte >> 1 ^ -(byte & 1), p + 1
    value, p = _read_long_varint(a, p, end, 10)
    return np.int64(value >> np.uint64(1)) ^ -np.int64(value & np.uint64(1)), p


@_inlined
def read_span(a, p, end):
    """Return (start, length, position after the bytes) of bytes with a varint length in front; a negative length is a
    null."""
    length, p = read_varint(a, p, end)
    if p < 0 or length > end - p:
        return np.int64(0), np.int64(0), np.int64(-1)
    return p, length, p + max(length, 0)


@register_jitable
def read_headers(a, p, end):
    """Return the position after the headers, which must end at `end`; -1: malformed."""
    count, p = read_varint(a, p, end)
    if p < 0 or count < 0 or count > end - p:
        return np.int64(-1)
    for _ in range(count):
        _start, length, p = read_span(a, p, end)
        if p < 0 or length < 0:
            return np.int64(-1)
        _start, length, p = read_span(a, p, end)
        if p < 0:
            return np.int64(-1)
    return p if p == end else np.int64(-1)


class Record(NamedTuple):
    """The positions and lengths of a record's parts; a length below 0 is null. `end` is -1 for a malformed record."""

    timestamp_delta: int
    offset_delta: int
    key: int
    key_bytes: int
    value: int
    value_bytes: int
    headers: int
    end: int


NO_RECORD = Record(0, 0, 0, 0, 0, 0, 0, -1)


@_inlined
def read_record(a, p, end):
    """Return the record at byte `p`, after a check of its headers; NO_RECORD if it is malformed."""
    length, p = read_varint(a, p, end)
    if p < 0 or length < 1 or length > end - p:
        return NO_RECORD
    end = p + length
    p += 1  # the attributes are unused
    timestamp_delta, p = read_varlong(a, p, end)
    if p < 0:
        return NO_RECORD
    offset_delta, p = read_varint(a, p, end)
    if p < 0:
        return NO_RECORD
    key, key_bytes, p = read_span(a, p, end)
    if p < 0:
        return NO_RECORD
    value, value_bytes, p = read_span(a, p, end)
    if p < 0:
        return NO_RECORD
    headers = p
    if end - p != 1 or byte_at(a, p) != 0:  # one zero byte means no headers
        p = read_headers(a, p, end)
        if p < 0:
            return NO_RECORD
    return Record(timestamp_delta, offset_delta, key, key_bytes, value, value_bytes, headers, end)


@register_jitable
def same_headers(a, p, a_end, b, q, b_end):
    """Return whether the header block `b[q:b_end]` equals `a[p:a_end]`, or what `a[p:a_end]` becomes when it is written
    with minimal varints."""
    if a_end - p == b_end - q and same_bytes(a, p, b, q, a_end - p):
        return True
    count, p = read_varint(a, p, a_end)
    other_count, q = read_varint(b, q, b_end)
    if count != other_count:
        return False
    for _ in range(2 * count):
        start, length, p = read_span(a, p, a_end)
        other, other_length, q = read_span(b, q, b_end)
        if max(length, -1) != other_length or (length > 0 and not same_bytes(a, start, b, other, length)):
            return False
    return True


_SMALLEST_BYTES = (26, 34, v2.HEADER_BYTES)  # size of the smallest batch, by magic
_UP_TO_MAGIC_BYTES = 17


@register_jitable
def batch_size(a, p, to, is_all):
    """Return the size of the batch at `p`; 0: more bytes needed; -1: truncated; -2: an impossible size."""
    if to - p < _UP_TO_MAGIC_BYTES:
        return np.int64(-1) if is_all else np.int64(0)
    size = be_32(a, p + v2.BATCH_LENGTH) + v2.LENGTH_PREFIX_BYTES
    if size < _SMALLEST_BYTES[min(np.int64(a[p + v2.MAGIC]), 2)]:
        return np.int64(-2)
    if size > to - p:
        return np.int64(-1) if is_all else np.int64(0)
    return size


@register_jitable
def wanted_bytes(a, p, to):
    """Return how many bytes from `p` on are needed: the whole batch, or a header if its size is not known yet."""
    if to - p < v2.LENGTH_PREFIX_BYTES:
        return np.int64(v2.HEADER_BYTES)
    return max(np.int64(v2.HEADER_BYTES), be_32(a, p + v2.BATCH_LENGTH) + v2.LENGTH_PREFIX_BYTES)


@register_jitable
def control_type(a, p, size):
    """Return the type of the first record of the control batch at `p` (0: ABORT, 1: COMMIT); -1 if it is unreadable."""
    if be_16(a, p + v2.ATTRIBUTES) & 7 or be_32(a, p + v2.RECORD_COUNT) < 1:
        return np.int64(-1)
    record = read_record(a, p + v2.HEADER_BYTES, p + size)
    if record.end < 0 or record.key_bytes < 4:
        return np.int64(-1)
    return be_16(a, record.key + 2)
