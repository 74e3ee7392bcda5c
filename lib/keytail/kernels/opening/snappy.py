"""Decompresses blocks in the framing of Kafka's snappy, without C functions."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from keytail.kernels.native import copy_bytes
from keytail.kernels.opening.decoders import NOT_PLAIN, le_32

_XERIAL_HEADER_BYTES = 16


@intrinsic
def _copy_16(typingctx, target, at, source, start):
    def codegen(context, builder, signature, args):
        vector = ir.VectorType(ir.IntType(8), 16).as_pointer()

        def pointer(i):
            data = context.make_array(signature.args[i])(context, builder, args[i]).data
            return builder.bitcast(builder.gep(data, [args[i + 1]]), vector)

        builder.store(builder.load(pointer(2), align=1), pointer(0), align=1)
        return context.get_dummy_value()

    return types.none(target, types.int64, source, types.int64), codegen


@njit
def unsnappy(data, start, n, out, at, room):
    """Decompress blocks in the framing that Kafka writes; return the number of bytes, or NOT_PLAIN.

    Up to 16 bytes after the result are overwritten.
    """
    if n < _XERIAL_HEADER_BYTES + 4 or le_32(data, start) != 0x414E5382 or le_32(data, start + 4) != 0x00595050:
        return NOT_PLAIN
    end, p, done = start + n, start + _XERIAL_HEADER_BYTES, np.int64(0)
    while p < end:
        if end - p < 4:
            return NOT_PLAIN
        size = (
            np.int64(data[p]) << 24 | np.int64(data[p + 1]) << 16 | np.int64(data[p + 2]) << 8 | np.int64(data[p + 3])
        )
        p += 4
        if size <= 0 or size > end - p:
            return NOT_PLAIN
        got = _unsnappy_block(data, p, p + size, out, at + done, at + room)
        if got < 0:
            return NOT_PLAIN
        done += got
        p += size
    return done if done > 0 else NOT_PLAIN


@njit
def _unsnappy_block(data, p, end, out, first, limit):
    """Decompress the raw block `data[p:end]` to `out[first:]`; return the number of bytes, NOT_PLAIN if invalid."""
    length, shift = np.int64(0), 0
    while True:
        if p >= end or shift > 28:
            return NOT_PLAIN
        byte = np.int64(data[p])
        p += 1
        length |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            break
    if length > limit - first - 16:
        return NOT_PLAIN
    q, stop = first, first + length
    while p < end:
        tag = np.int64(data[p])
        p += 1
        if tag & 3 == 0:
            size = (tag >> 2) + 1
            if size <= 16 and end - p >= 16 and size <= stop - q:
                _copy_16(out, q, data, p)
            else:
                if size > 60:
                    extra = size - 60
                    if extra > end - p:
                        return NOT_PLAIN
                    size = np.int64(1)
                    for i in range(extra):
                        size += np.int64(data[p + i]) << (8 * i)
                    p += extra
                if size > end - p or size > stop - q:
                    return NOT_PLAIN
                copy_bytes(out, q, data, p, size)
            p += size
            q += size
            continue
        if tag & 3 == 1:
            if p >= end:
                return NOT_PLAIN
            size, back = (tag >> 2 & 7) + 4, tag >> 5 << 8 | np.int64(data[p])
            p += 1
        elif tag & 3 == 2:
            if end - p < 2:
                return NOT_PLAIN
            size, back = (tag >> 2) + 1, np.int64(data[p]) | np.int64(data[p + 1]) << 8
            p += 2
        else:
            if end - p < 4:
                return NOT_PLAIN
            size, back = (tag >> 2) + 1, le_32(data, p)
            p += 4
        if back == 0 or back > q - first or size > stop - q:
            return NOT_PLAIN
        if back >= 16:
            for i in range(0, size, 16):
                _copy_16(out, q + i, out, q + i - back)
        else:
            for i in range(size):
                out[q + i] = out[q + i - back]
        q += size
    return length if q == stop else NOT_PLAIN
