"""The proof's own decoder of snappy in Kafka's framing (format/COMPRESSION.md 3).

The writer's decoder (`opening/snappy.py`) is also part of keytail: if the proof used that decoder, it would repeat the
decoder's errors. The two decoders share no code. For other framings, and for anything invalid, the result is
NOT_SNAPPY; `format/compression.py` then decompresses the block by a library, or reports what is wrong with it.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from keytail.kernels.jit import kernel
from keytail.kernels.native import copy_bytes
from keytail.kernels.walk import be_32, be_64, byte_at

NOT_SNAPPY = -1
SPARE_BYTES = 16  # bytes of room required after the result: short pieces are copied as two words
_MAGIC = -0x7DACB1BEAFAFA700  # 82 "SNAPPY" 00
_FRAME_BYTES = 16
_LENGTH_BYTES = 4
_MAX_LENGTH_SHIFT = 28  # a length is a number of at most five groups of 7 bits

_inlined = register_jitable(forceinline=True)


@_inlined
def _number(data, at, n):
    """Return the `n` bytes from `at` as a little-endian number."""
    value = np.int64(0)
    for i in range(n):
        value |= np.int64(byte_at(data, at + i)) << (8 * i)
    return value


@_inlined
def _move_8(target, at, source, start):
    """Copy 8 bytes, all of which are read before the first is written."""
    t, s = np.uint64(at), np.uint64(start)
    b0, b1, b2, b3 = source[s], source[s + np.uint64(1)], source[s + np.uint64(2)], source[s + np.uint64(3)]
    b4, b5 = source[s + np.uint64(4)], source[s + np.uint64(5)]
    b6, b7 = source[s + np.uint64(6)], source[s + np.uint64(7)]
    target[t], target[t + np.uint64(1)], target[t + np.uint64(2)], target[t + np.uint64(3)] = b0, b1, b2, b3
    target[t + np.uint64(4)], target[t + np.uint64(5)] = b4, b5
    target[t + np.uint64(6)], target[t + np.uint64(7)] = b6, b7


@kernel
def decode_snappy(data, start, n, out):
    """Decompress the block `data[start:start + n]` to `out`; return the number of bytes, or NOT_SNAPPY.

    All of `out` may be overwritten.
    """
    at, end, filled = start + _FRAME_BYTES, start + n, np.int64(0)
    if n <= _FRAME_BYTES + _LENGTH_BYTES or be_64(data, start) != _MAGIC:
        return np.int64(NOT_SNAPPY)
    while at < end:
        if end - at <= _LENGTH_BYTES:
            return np.int64(NOT_SNAPPY)
        size = be_32(data, at)
        at += _LENGTH_BYTES
        if size < 1 or size > end - at:
            return np.int64(NOT_SNAPPY)
        filled = _decode_chunk(data, at, at + size, out, filled)
        if filled < 0:
            return np.int64(NOT_SNAPPY)
        at += size
    return filled if filled > 0 else np.int64(NOT_SNAPPY)


@register_jitable
def _decode_chunk(data, at, end, out, first):
    """Decompress the raw block `data[at:end]` to `out[first:]`; return the end of the result, or NOT_SNAPPY."""
    shift, length, more = 0, np.int64(0), True
    while more:
        if at == end or shift > _MAX_LENGTH_SHIFT:
            return np.int64(NOT_SNAPPY)
        group = np.int64(byte_at(data, at))
        length |= (group & 127) << shift
        more = group > 127
        shift += 7
        at += 1
    if length > out.shape[0] - SPARE_BYTES - first:
        return np.int64(NOT_SNAPPY)
    to, stop = first, first + length
    while at < end:
        tag = np.int64(byte_at(data, at))
        at += 1
        kind, count = tag & 3, tag >> 2
        left = end - at
        if kind == 0:
            if count >= 60:  # the length follows in 1 to 4 bytes
                width = count - 59
                if width > left:
                    return np.int64(NOT_SNAPPY)
                count = _number(data, at, width)
                at += width
                left -= width
            count += 1
            if count > left or count > stop - to:
                return np.int64(NOT_SNAPPY)
            if count <= 16 and left >= 16:
                _move_8(out, to, data, at)
                _move_8(out, to + 8, data, at + 8)
            else:
                copy_bytes(out, to, data, at, count)
            at += count
        else:
            width = np.int64(4) if kind == 3 else kind
            if width > left:
                return np.int64(NOT_SNAPPY)
            if kind == 1:
                distance = tag >> 5 << 8 | np.int64(byte_at(data, at))
                count = (count & 7) + 4
            else:
                distance = _number(data, at, 2) if kind == 2 else _number(data, at, 4)
                count += 1
            at += width
            if distance < 1 or distance > to - first or count > stop - to:
                return np.int64(NOT_SNAPPY)
            _repeat(out, to, distance, count)
        to += count
    return to if to == stop else np.int64(NOT_SNAPPY)


@_inlined
def _repeat(out, to, distance, count):
    """Append `count` bytes that begin `distance` bytes before `to`; the source may overlap the appended bytes."""
    done = np.int64(0)
    if distance >= 8:
        while done < count:
            _move_8(out, to + done, out, to + done - distance)
            done += 8
    else:
        while done < count:
            at = np.uint64(to + done)
            out[at] = out[at - np.uint64(distance)]
            done += 1
