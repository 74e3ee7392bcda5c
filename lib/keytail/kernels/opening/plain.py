"""Decompresses the record blocks of many batches in one call, if the blocks have the framing that Kafka's producers
write.

For a block that has another framing, does not fit, is damaged, or has no decoder here, the functions that decompress
return NOT_PLAIN; `format/compression.py` then decompresses the block or reports what is wrong with it.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from keytail.kernels import batch_header as v2
from keytail.kernels.jit import kernel
from keytail.kernels.native import copy_bytes
from keytail.kernels.opening.decoders import (
    AVAIL_IN,
    AVAIL_OUT,
    CRC32,
    INFLATE,
    INFLATE_INIT,
    INFLATE_STATE,
    LZ4_DECOMPRESS,
    NEXT_IN,
    NEXT_OUT,
    NOT_PLAIN,
    ZSTD_CONTEXT,
    ZSTD_DECOMPRESS,
    address_of,
    call_address,
    le_32,
    load_from,
    store_at,
)
from keytail.kernels.opening.snappy import unsnappy
from keytail.kernels.records import CLOSED, IN_ARENA, IN_RAW

_GZIP_HEADER_BYTES, _GZIP_TRAILER_BYTES = 10, 8
_ZSTD_MAX_WINDOW_LOG = 23  # Kafka's producers use far smaller windows; Kafka's reader accepts larger windows


@njit
def _unzstd(tools, data, start, n, out, at, room):
    """Decompress one zstd frame, which is all of `data[start:start + n]`; return the number of bytes, or NOT_PLAIN."""
    if tools[ZSTD_DECOMPRESS] == 0 or n < 9 or le_32(data, start) != 0xFD2FB528:
        return NOT_PLAIN
    end = start + n
    descriptor = np.int64(data[start + 4])
    p = start + 5
    if descriptor & 3:  # the frame needs a dictionary
        return NOT_PLAIN
    if descriptor & 0x20:  # a single segment: its content size is given, and is also the window size
        p += 1 if descriptor >> 6 == 0 else 0
    else:
        if (np.int64(data[p]) >> 3) + 10 > _ZSTD_MAX_WINDOW_LOG:
            return NOT_PLAIN
        p += 1
    if descriptor >> 6:
        p += 1 << (descriptor >> 6)
    last = np.int64(0)
    while last == 0:
        if p + 3 > end:
            return NOT_PLAIN
        word = np.int64(data[p]) | np.int64(data[p + 1]) << 8 | np.int64(data[p + 2]) << 16
        last = word & 1
        p += 3 + (1 if word >> 1 & 3 == 1 else word >> 3)
    if p + (4 if descriptor & 4 else 0) != end:
        return NOT_PLAIN
    done = call_address(
        tools[ZSTD_DECOMPRESS],
        (tools[ZSTD_CONTEXT], address_of(out, at), np.int64(room), address_of(data, start), np.int64(n)),
    )
    return done if 0 < done <= room else NOT_PLAIN


@njit
def _unlz4(tools, data, start, n, out, at, room):
    """Decompress an lz4 frame of independent blocks without checksums and content size; return the number of bytes, or
    NOT_PLAIN."""
    if tools[LZ4_DECOMPRESS] == 0 or n < 11 or le_32(data, start) != 0x184D2204:
        return NOT_PLAIN
    flags, block, check = data[start + 4], data[start + 5], data[start + 6]
    if flags != 0x60 or block != 0x40 or check != 0x82:  # Kafka writes blocks of 64 KiB
        return NOT_PLAIN
    end, p, done = start + n, start + 7, np.int64(0)
    while p + 4 <= end:
        word = le_32(data, p)
        size = word & 0x7FFFFFFF
        p += 4
        if size == 0:
            return done if done > 0 else NOT_PLAIN
        if size > 65536 or size > end - p:
            return NOT_PLAIN
        left = min(np.int64(65536), room - done)
        if word >> 31:
            if size > left:
                return NOT_PLAIN
            copy_bytes(out, at + done, data, p, size)
            got = size
        else:
            got = np.int64(
                np.int32(
                    call_address(tools[LZ4_DECOMPRESS], (address_of(data, p), address_of(out, at + done), size, left))
                )
            )
            if got < 0:
                return NOT_PLAIN
        done += got
        p += size
    return NOT_PLAIN


@njit
def _gunzip(tools, data, start, n, out, at, room):
    """Decompress one gzip member without optional header fields, with nothing after it; return the number of bytes, or
    NOT_PLAIN."""
    header = _GZIP_HEADER_BYTES
    if tools[INFLATE] == 0 or n < header + _GZIP_TRAILER_BYTES + 1 or room > 0x7FFFFFFF:
        return NOT_PLAIN
    if data[start] != 0x1F or data[start + 1] != 0x8B or data[start + 2] != 8 or data[start + 3] != 0:
        return NOT_PLAIN
    state = tools[INFLATE_STATE]
    call_address(tools[INFLATE_INIT], (state,))
    store_at(state + NEXT_OUT, address_of(out, at))
    store_at(state + AVAIL_OUT, np.int64(room))  # this also sets the number of bytes written to 0
    store_at(state + NEXT_IN, address_of(data, start + header))
    store_at(state + AVAIL_IN, np.int64(n - header))  # this also sets the number of buffered bits to 0
    if np.int32(call_address(tools[INFLATE], (state,))) != 0:
        return NOT_PLAIN
    done = room - (load_from(state + AVAIL_OUT) & 0xFFFFFFFF)
    if load_from(state + AVAIL_IN) & 0xFFFFFFFF != _GZIP_TRAILER_BYTES or not 0 < done <= room:
        return NOT_PLAIN
    trailer = start + n - _GZIP_TRAILER_BYTES
    crc = call_address(tools[CRC32], (np.int64(0), address_of(out, at), done)) & 0xFFFFFFFF
    if crc != le_32(data, trailer) or done & 0xFFFFFFFF != le_32(data, trailer + 4):
        return NOT_PLAIN
    return done


@kernel
def decompress_plain(tools, codec, data, start, n, out, at):
    """Decompress the block `data[start:start + n]` to `out[at:]` (uint8); return the number of bytes, or NOT_PLAIN.

    All of `out[at:]` may be overwritten.
    """
    room = out.shape[0] - at
    if codec == v2.ZSTD:
        return _unzstd(tools, data, start, n, out, at, room)
    if codec == v2.LZ4:
        return _unlz4(tools, data, start, n, out, at, room)
    if codec == v2.SNAPPY:
        return unsnappy(data, start, n, out, at, room)
    if codec == v2.GZIP:
        return _gunzip(tools, data, start, n, out, at, room)
    return np.int64(NOT_PLAIN)


@kernel
def lay_out(table, wanted, position, where, start, size):
    """Set `where` of each row, and `start` and `size`, the position and the bytes of the row's block in the chunk.

    The block of a wanted row is not decompressed yet. Returns how many wanted rows are compressed, and how many are of
    magic 0 or 1. `position` is the position of the chunk's first byte in the file.
    """
    packed = old = 0
    for i in range(table.shape[0]):
        row = table[i]
        where[i] = CLOSED
        start[i] = row.position - position + v2.HEADER_BYTES
        size[i] = np.int64(row.size_bytes) - v2.HEADER_BYTES
        if wanted[i]:
            where[i] = IN_RAW
            packed += row.attributes & v2.CODEC_MASK != 0
            old += row.magic < 2
    return packed, old


@kernel
def open_blocks(tools, raw, table, row_from, arena, used, where, start, size):
    """Decompress the compressed blocks of rows that are IN_RAW to `arena[used:]`; return (next row, bytes used).

    The kernel stops before a block that is of magic 0 or 1, not plain, or too large. `where`, `start` and `size` are
    updated for the decompressed blocks.
    """
    row = row_from
    while row < table.shape[0]:
        codec = np.int64(table[row].attributes) & v2.CODEC_MASK
        if where[row] == IN_RAW and codec != 0 and table[row].record_count > 0:
            if table[row].magic < 2:
                break
            n = decompress_plain(tools, codec, raw, start[row], size[row], arena, used)
            if n < 0:
                break
            where[row], start[row], size[row] = IN_ARENA, used, n
            used += n
        row += 1
    return row, used
