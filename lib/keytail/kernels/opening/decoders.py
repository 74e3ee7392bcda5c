"""C functions inside the wheels that `format/compression.py` uses, which kernels call by address.

Compiled code contains neither the names nor the addresses of the functions, so that it can be cached. An address is 0
if a wheel does not export the function, or with `KEYTAIL_NATIVE=0`. The wheels do not guarantee their exports: each
library is checked before use, zstd and lz4 against the wheel's own binding, ISA-L against Python's `zlib`.
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

NOT_PLAIN = -1

# Positions of addresses in `Decoders.tools`; 0: none.
ZSTD_DECOMPRESS, ZSTD_CONTEXT, LZ4_DECOMPRESS, INFLATE_INIT, INFLATE, INFLATE_STATE, CRC32 = range(7)
TOOLS = 7
_INFLATE_STATE_BYTES = 1 << 18  # `struct inflate_state` of ISA-L takes 90 KB; the rest is a margin

# Positions of the first fields of `struct inflate_state`: next_out, avail_out (u4), next_in, avail_in (u4).
NEXT_OUT, AVAIL_OUT, NEXT_IN, AVAIL_IN = 0, 8, 16, 32
_SAMPLE = b"".join(b"%d of many, " % (i * i) for i in range(3000))  # fills more than one lz4 block


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
    """The wheels' libraries; None for a library that is missing, fails its check or must not be used here."""

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
    return _Wheels(*(item if item and agrees(item) else None for item, agrees in zip(found, checks, strict=True)))


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
    """Return whether the library agrees with zlib, and whether the fields of its state are at the expected
    positions."""
    if not all(_address(library, name) for name in ("isal_inflate_init", "isal_inflate_stateless", "crc32_gzip_refl")):
        return False
    packer = zlib.compressobj(6, zlib.DEFLATED, -zlib.MAX_WBITS)
    packed = packer.compress(_SAMPLE) + packer.flush() + b"trailer."
    out, state = ctypes.create_string_buffer(len(_SAMPLE) + 5), ctypes.create_string_buffer(_INFLATE_STATE_BYTES)
    library.isal_inflate_init(state)
    ctypes.c_void_p.from_buffer(state, NEXT_OUT).value = ctypes.addressof(out)
    ctypes.c_uint32.from_buffer(state, AVAIL_OUT).value = len(out)
    source = ctypes.create_string_buffer(packed, len(packed))
    ctypes.c_void_p.from_buffer(state, NEXT_IN).value = ctypes.addressof(source)
    ctypes.c_uint32.from_buffer(state, AVAIL_IN).value = len(packed)
    code = library.isal_inflate_stateless(state)
    left = [ctypes.c_uint32.from_buffer(state, at).value for at in (AVAIL_OUT, AVAIL_IN)]
    crc = library.crc32_gzip_refl
    crc.restype, crc.argtypes = ctypes.c_uint32, (ctypes.c_uint32, ctypes.c_char_p, ctypes.c_uint64)
    right = code == 0 and left == [5, 8] and out.raw[:-5] == _SAMPLE
    return right and crc(0, _SAMPLE, len(_SAMPLE)) == zlib.crc32(_SAMPLE)


class Decoders:
    """Addresses of the C decompressors and of their working memory, which kernels read from `tools` (int64).

    An instance is not thread-safe.
    """

    def __init__(self) -> None:
        self.tools = np.zeros(TOOLS, np.int64)
        wheels = _wheels()
        if wheels.zstd is not None and (context := wheels.zstd.ZSTD_createDCtx()):
            weakref.finalize(self, wheels.zstd.ZSTD_freeDCtx, context)
            self.tools[ZSTD_CONTEXT] = context
            self.tools[ZSTD_DECOMPRESS] = _address(wheels.zstd, "ZSTD_decompressDCtx")
        if wheels.lz4 is not None:
            self.tools[LZ4_DECOMPRESS] = _address(wheels.lz4, "LZ4_decompress_safe")
        if wheels.inflate is not None:
            self._state = np.zeros(_INFLATE_STATE_BYTES, np.uint8)
            self.tools[INFLATE_STATE] = self._state.ctypes.data
            self.tools[INFLATE_INIT] = _address(wheels.inflate, "isal_inflate_init")
            self.tools[INFLATE] = _address(wheels.inflate, "isal_inflate_stateless")
            self.tools[CRC32] = _address(wheels.inflate, "crc32_gzip_refl")


@intrinsic
def call_address(typingctx, address, arguments):
    """Call the C function at `address` with integers or pointers, each in its own register; return its result as an
    int64.

    The upper half of the result is undefined if the function returns a C int: convert the result with `np.int32`.
    """
    n = len(arguments)

    def codegen(context, builder, signature, args):
        word = ir.IntType(64)
        function_type = ir.FunctionType(word, [word] * n)
        function = builder.inttoptr(args[0], function_type.as_pointer())
        return builder.call(function, [builder.extract_value(args[1], i) for i in range(n)])

    return types.int64(types.int64, types.UniTuple(types.int64, n)), codegen


@intrinsic
def address_of(typingctx, array, index):
    """Return the address of element `index` of an array."""

    def codegen(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.ptrtoint(builder.gep(data, [args[1]]), ir.IntType(64))

    return types.int64(array, types.int64), codegen


@intrinsic
def store_at(typingctx, address, value):
    """Store the eight bytes of `value` at an address."""

    def codegen(context, builder, signature, args):
        builder.store(args[1], builder.inttoptr(args[0], ir.IntType(64).as_pointer()), align=1)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64), codegen


@intrinsic
def load_from(typingctx, address):
    def codegen(context, builder, signature, args):
        return builder.load(builder.inttoptr(args[0], ir.IntType(64).as_pointer()), align=1)

    return types.int64(types.int64), codegen


@njit(forceinline=True)
def le_32(a, p):
    return np.int64(a[p]) | np.int64(a[p + 1]) << 8 | np.int64(a[p + 2]) << 16 | np.int64(a[p + 3]) << 24
