"""Decompresses the record blocks of many batches in one call, if they are as Kafka's producers write them.

Uses the C functions inside the wheels that `format/compression.py` uses, called by address: compiled code names none of
them, and the address is 0 if a wheel does not export them (or `KEYTAIL_NATIVE=0`). A block that has another framing,
does not fit, or is damaged is only NOT_PLAIN here and left to `format/compression.py`, which reports what is wrong with
it. The wheels do not guarantee their exports: each is checked against the wheel's own binding before use.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import platform
import weakref
import zlib
from dataclasses import dataclass

import lz4.block
import numba
import numpy as np
import zstandard
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from keytail.kernels import batch_header as v2
from keytail.kernels.jit import kernel
from keytail.kernels.native import copy_bytes
from keytail.kernels.records import CLOSED, IN_ARENA, IN_RAW

GZIP, SNAPPY, LZ4, ZSTD = range(1, 5)
NOT_PLAIN = -1


# Positions of addresses in `Decoders.tools`; 0: none.
_ZSTD_DECOMPRESS, _ZSTD_CONTEXT, _LZ4_DECOMPRESS, _INFLATE_INIT, _INFLATE, _INFLATE_STATE, _CRC32 = range(7)
TOOLS = 7

_INFLATE_STATE_BYTES = 1 << 18  # `struct inflate_state` of ISA-L takes 90 KB; the rest is reserve
# Positions of its first fields: next_out, avail_out (u4), next_in, avail_in (u4).
_NEXT_OUT, _AVAIL_OUT, _NEXT_IN, _AVAIL_IN = 0, 8, 16, 32

_GZIP_HEADER_BYTES, _GZIP_TRAILER_BYTES = 10, 8
_ZSTD_MOST_WINDOW_LOG = 23  # Kafka's own are far smaller, and its reader accepts larger ones than this
_XERIAL_HEADER_BYTES = 16

_SAMPLE = b"".join(b"%d of many, " % (i * i) for i in range(3000))  # more than one lz4 block


def _library(module_name: str) -> ctypes.CDLL | None:
    try:
        found = importlib.util.find_spec(module_name)
        return ctypes.CDLL(found.origin) if found is not None and found.origin else None
    except (ImportError, OSError):
        return None


def _address(library: ctypes.CDLL | None, name: str) -> int:
    function = getattr(library, name, None)
    return (ctypes.cast(function, ctypes.c_void_p).value or 0) if function is not None else 0


@dataclass(frozen=True)
class _Wheels:
    """The wheels' libraries; None for one that is missing or fails its check."""

    zstd: ctypes.CDLL | None
    lz4: ctypes.CDLL | None
    inflate: ctypes.CDLL | None


@functools.cache
def _wheels() -> _Wheels:
    # On these architectures integers and pointers are passed in registers, one each.
    known = platform.machine().lower() in {"x86_64", "amd64", "aarch64", "arm64"} and os.name == "posix"
    if not known or os.environ.get("KEYTAIL_NATIVE", "1") == "0" or numba.config.DISABLE_JIT:
        return _Wheels(None, None, None)
    found = [_library(name) for name in ("zstandard._cffi", "lz4.block._block", "isal.isal_zlib")]
    checks = (_unzstd_agrees, _unlz4_agrees, _inflate_agrees)
    return _Wheels(*(one if one and agrees(one) else None for one, agrees in zip(found, checks, strict=True)))


def _unzstd_agrees(library: ctypes.CDLL) -> bool:
    """Return whether the library decompresses a sample that the wheel's own binding has compressed."""
    names = ("ZSTD_createDCtx", "ZSTD_freeDCtx", "ZSTD_decompressDCtx")
    if not all(_address(library, name) for name in names):
        return False
    library.ZSTD_createDCtx.restype = ctypes.c_void_p
    library.ZSTD_freeDCtx.argtypes = (ctypes.c_void_p,)
    function = library.ZSTD_decompressDCtx
    function.restype = ctypes.c_size_t
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t)
    packed = zstandard.ZstdCompressor().compress(_SAMPLE)
    out, context = ctypes.create_string_buffer(len(_SAMPLE)), library.ZSTD_createDCtx()
    if not context:
        return False
    try:
        done = function(context, out, len(_SAMPLE), packed, len(packed))
    finally:
        library.ZSTD_freeDCtx(context)
    return done == len(_SAMPLE) and out.raw == _SAMPLE


def _unlz4_agrees(library: ctypes.CDLL) -> bool:
    function = getattr(library, "LZ4_decompress_safe", None)
    if function is None:
        return False
    function.restype = ctypes.c_int
    function.argtypes = (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
    packed, out = lz4.block.compress(_SAMPLE, store_size=False), ctypes.create_string_buffer(len(_SAMPLE))
    return function(packed, out, len(packed), len(_SAMPLE)) == len(_SAMPLE) and out.raw == _SAMPLE


def _inflate_agrees(library: ctypes.CDLL) -> bool:
    """Return whether the library agrees with zlib, and the fields of its state are at the expected positions."""
    if not all(_address(library, name) for name in ("isal_inflate_init", "isal_inflate_stateless", "crc32_gzip_refl")):
        return False
    packer = zlib.compressobj(6, zlib.DEFLATED, -zlib.MAX_WBITS)
    packed = packer.compress(_SAMPLE) + packer.flush() + b"trailer."
    out, state = ctypes.create_string_buffer(len(_SAMPLE) + 5), ctypes.create_string_buffer(_INFLATE_STATE_BYTES)
    library.isal_inflate_init(state)
    ctypes.c_void_p.from_buffer(state, _NEXT_OUT).value = ctypes.addressof(out)
    ctypes.c_uint32.from_buffer(state, _AVAIL_OUT).value = len(out)
    source = ctypes.create_string_buffer(packed, len(packed))
    ctypes.c_void_p.from_buffer(state, _NEXT_IN).value = ctypes.addressof(source)
    ctypes.c_uint32.from_buffer(state, _AVAIL_IN).value = len(packed)
    code = library.isal_inflate_stateless(state)
    left = [ctypes.c_uint32.from_buffer(state, at).value for at in (_AVAIL_OUT, _AVAIL_IN)]
    crc = library.crc32_gzip_refl
    crc.restype, crc.argtypes = ctypes.c_uint32, (ctypes.c_uint32, ctypes.c_char_p, ctypes.c_uint64)
    right = code == 0 and left == [5, 8] and out.raw[:-5] == _SAMPLE
    return right and crc(0, _SAMPLE, len(_SAMPLE)) == zlib.crc32(_SAMPLE)


class Decoders:
    """Functions and their working memory, for kernels in `tools` (int64); one instance serves one call at a time."""

    def __init__(self) -> None:
        self.tools = np.zeros(TOOLS, np.int64)
        wheels = _wheels()
        if wheels.zstd is not None and (context := wheels.zstd.ZSTD_createDCtx()):
            weakref.finalize(self, wheels.zstd.ZSTD_freeDCtx, context)
            self.tools[_ZSTD_CONTEXT] = context
            self.tools[_ZSTD_DECOMPRESS] = _address(wheels.zstd, "ZSTD_decompressDCtx")
        if wheels.lz4 is not None:
            self.tools[_LZ4_DECOMPRESS] = _address(wheels.lz4, "LZ4_decompress_safe")
        if wheels.inflate is not None:
            self._state = np.zeros(_INFLATE_STATE_BYTES, np.uint8)
            self.tools[_INFLATE_STATE] = self._state.ctypes.data
            self.tools[_INFLATE_INIT] = _address(wheels.inflate, "isal_inflate_init")
            self.tools[_INFLATE] = _address(wheels.inflate, "isal_inflate_stateless")
            self.tools[_CRC32] = _address(wheels.inflate, "crc32_gzip_refl")


@intrinsic
def _call(typingctx, address, arguments):
    """Call the C function at `address` with integers (also pointers), each in its own register; return an int64."""
    n = len(arguments)

    def codegen(context, builder, signature, args):
        word = ir.IntType(64)
        function_type = ir.FunctionType(word, [word] * n)
        function = builder.inttoptr(args[0], function_type.as_pointer())
        return builder.call(function, [builder.extract_value(args[1], i) for i in range(n)])

    return types.int64(types.int64, types.UniTuple(types.int64, n)), codegen


@intrinsic
def _at(typingctx, array, index):
    """Return the address of element `index`."""

    def codegen(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.ptrtoint(builder.gep(data, [args[1]]), ir.IntType(64))

    return types.int64(array, types.int64), codegen


@intrinsic
def _store(typingctx, address, value):
    """Store the eight bytes of `value` at an address."""

    def codegen(context, builder, signature, args):
        builder.store(args[1], builder.inttoptr(args[0], ir.IntType(64).as_pointer()), align=1)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64), codegen


@intrinsic
def _load(typingctx, address):
    def codegen(context, builder, signature, args):
        return builder.load(builder.inttoptr(args[0], ir.IntType(64).as_pointer()), align=1)

    return types.int64(types.int64), codegen


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


@njit(inline="always")
def _le_32(a, p):
    return (
        np.int64(a[p]) | np.int64(a[p + 1]) << 8 | np.int64(a[p + 2]) << 16 | np.int64(a[p + 3]) << 24
    )


@njit
def _unzstd(tools, data, start, n, out, at, room):
    """Decompress one frame, which is all of `data[start:start + n]`."""
    if tools[_ZSTD_DECOMPRESS] == 0 or n < 9 or _le_32(data, start) != 0xFD2FB528:
        return NOT_PLAIN
    end = start + n
    descriptor = np.int64(data[start + 4])
    p = start + 5
    if descriptor & 3:  # a dictionary
        return NOT_PLAIN
    if descriptor & 0x20:  # a single segment: its content size is given and is the window size
        p += 1 if descriptor >> 6 == 0 else 0
    else:
        if (np.int64(data[p]) >> 3) + 10 > _ZSTD_MOST_WINDOW_LOG:
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
    done = _call(
        tools[_ZSTD_DECOMPRESS],
        (tools[_ZSTD_CONTEXT], _at(out, at), np.int64(room), _at(data, start), np.int64(n)),
    )
    return done if 0 < done <= room else NOT_PLAIN


@njit
def _unlz4(tools, data, start, n, out, at, room):
    """Decompress a frame of independent blocks without checksums and content size, as Kafka writes it."""
    if tools[_LZ4_DECOMPRESS] == 0 or n < 11 or _le_32(data, start) != 0x184D2204:
        return NOT_PLAIN
    flags, block, check = data[start + 4], data[start + 5], data[start + 6]
    if flags != 0x60 or block != 0x40 or check != 0x82:  # blocks of 64 KiB
        return NOT_PLAIN
    end, p, done = start + n, start + 7, np.int64(0)
    while p + 4 <= end:
        word = _le_32(data, p)
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
                np.int32(_call(tools[_LZ4_DECOMPRESS], (_at(data, p), _at(out, at + done), size, left)))
            )
            if got < 0:
                return NOT_PLAIN
        done += got
        p += size
    return NOT_PLAIN


@njit
def _gunzip(tools, data, start, n, out, at, room):
    """Decompress one member whose header has no optional fields, and which nothing follows."""
    header = _GZIP_HEADER_BYTES
    if tools[_INFLATE] == 0 or n < header + _GZIP_TRAILER_BYTES + 1 or room > 0x7FFFFFFF:
        return NOT_PLAIN
    if data[start] != 0x1F or data[start + 1] != 0x8B or data[start + 2] != 8 or data[start + 3] != 0:
        return NOT_PLAIN
    state = tools[_INFLATE_STATE]
    _call(tools[_INFLATE_INIT], (state,))
    _store(state + _NEXT_OUT, _at(out, at))
    _store(state + _AVAIL_OUT, np.int64(room))  # also sets the bytes written to 0
    _store(state + _NEXT_IN, _at(data, start + header))
    _store(state + _AVAIL_IN, np.int64(n - header))  # also sets the bits held to 0
    if np.int32(_call(tools[_INFLATE], (state,))) != 0:
        return NOT_PLAIN
    done = room - (_load(state + _AVAIL_OUT) & 0xFFFFFFFF)
    if _load(state + _AVAIL_IN) & 0xFFFFFFFF != _GZIP_TRAILER_BYTES or not 0 < done <= room:
        return NOT_PLAIN
    trailer = start + n - _GZIP_TRAILER_BYTES
    crc = _call(tools[_CRC32], (np.int64(0), _at(out, at), done)) & 0xFFFFFFFF
    if crc != _le_32(data, trailer) or done & 0xFFFFFFFF != _le_32(data, trailer + 4):
        return NOT_PLAIN
    return done


@njit
def _unsnappy(data, start, n, out, at, room):
    """Decompress blocks in the framing that Kafka writes, without C functions.

    Up to 16 bytes after the result are overwritten.
    """
    if n < _XERIAL_HEADER_BYTES + 4 or _le_32(data, start) != 0x414E5382 or _le_32(data, start + 4) != 0x00595050:
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
    """Decompress the raw block `data[p:end]` to `out[first:]`; return its bytes, or NOT_PLAIN for anything invalid."""
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
            size, back = (tag >> 2) + 1, _le_32(data, p)
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


@njit
def decompress_plain(tools, codec, data, start, n, out, at):
    """Decompress the block `data[start:start + n]` to `out[at:]` (uint8); return its bytes, or NOT_PLAIN.

    All of `out[at:]` may be overwritten.
    """
    room = out.shape[0] - at
    if codec == ZSTD:
        return _unzstd(tools, data, start, n, out, at, room)
    if codec == LZ4:
        return _unlz4(tools, data, start, n, out, at, room)
    if codec == SNAPPY:
        return _unsnappy(data, start, n, out, at, room)
    if codec == GZIP:
        return _gunzip(tools, data, start, n, out, at, room)
    return np.int64(NOT_PLAIN)


@kernel
def lay_out(table, wanted, position, where, start, size):
    """Set where each row's block is before decompression: `where`, and its bytes in the stride (`start`, `size`).

    Returns how many of the wanted rows are compressed, and how many are of magic 0 or 1. `position` is that of the
    stride's first byte.
    """
    packed = old = 0
    for i in range(table.shape[0]):
        row = table[i]
        where[i] = CLOSED
        start[i] = row.position - position + v2.HEADER_BYTES
        size[i] = np.int64(row.size_bytes) - v2.HEADER_BYTES
        if wanted[i]:
            where[i] = IN_RAW
            packed += row.attributes & 7 != 0
            old += row.magic < 2
    return packed, old


@kernel
def open_blocks(tools, raw, table, row_from, arena, used, where, start, size):
    """Decompress the compressed blocks of rows that are IN_RAW to `arena[used:]`; return (next row, bytes used).

    Stops before a block that is of magic 0 or 1, not plain, or does not fit. `where`, `start` and `size` are updated
    for the others.
    """
    row = row_from
    while row < table.shape[0]:
        codec = np.int64(table[row].attributes) & 7
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
