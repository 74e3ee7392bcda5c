"""CRC-32C and the 128-bit key hash for kernels: C functions of the crc32c and xxhash wheels, or fallbacks.

The public functions except `file_digest` can be called from any kernel and from Python, and read exactly the given
bytes. The wheels do not guarantee their C exports: each export is looked up, called and compared with the wheel's
Python binding before a kernel uses it; an export that is missing or differs, or every export with `KEYTAIL_NATIVE=0`,
is replaced by the function in `fallback.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform

import crc32c as _crc32c_wheel
import llvmlite.binding as llvm
import numba
import numpy as np
import xxhash as _xxhash_wheel
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic, overload

from keytail.kernels import fallback

# Compiled code, also from the cache, refers to these symbols, and each process binds them to the wheels' functions: so
# cached code contains no address, and no other library's symbol of the same name is used.
_CRC_SYMBOL = "keytail_crc32c"
_HASH_SYMBOL = "keytail_xxh3_128"

_CRC_CHECK = (b"", b"1", b"123456789", bytes(range(256)) * 40)
_HASH_CHECK = (*(bytes(range(n)) for n in (0, 1, 3, 4, 8, 9, 16, 17, 128, 129, 240)), bytes(range(256)) * 17)
_SEEDS = (0, 1, 0x9E3779B97F4A7C15)


class _Hash128(ctypes.Structure):
    _fields_ = (("low", ctypes.c_uint64), ("high", ctypes.c_uint64))


def _library(wheel, module_name: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(getattr(wheel, module_name).__file__)
    except (AttributeError, OSError):
        return None


def _native_crc() -> tuple[str, int] | None:
    """Return the name and the address of the wheel's fastest CRC function that agrees with its Python binding, or
    None."""
    library = _library(_crc32c_wheel, "_crc32c")
    if library is None:
        return None
    candidates = ["_crc32c_sw_slicing_by_8"]
    with contextlib.suppress(AttributeError):  # a build without the Intel functions
        if library._crc32c_intel_probe():
            library.crc32c_init_hw_adler()
            candidates.insert(0, "_crc32c_hw_adler")
    with contextlib.suppress(AttributeError):  # a build without the ARM functions
        if library._crc32c_arm64_probe():
            candidates.insert(0, "_crc32c_hw_arm64")
    for name in candidates:
        function = getattr(library, name, None)
        if function is None:
            continue
        function.restype = ctypes.c_uint32
        function.argtypes = (ctypes.c_uint32, ctypes.c_char_p, ctypes.c_size_t)
        if all(function(0xFFFFFFFF, b, len(b)) ^ 0xFFFFFFFF == _crc32c_wheel.crc32c(b) for b in _CRC_CHECK):
            address = ctypes.cast(function, ctypes.c_void_p).value
            if address:
                return name, address
    return None


def _native_hash() -> tuple[str, int] | None:
    """Return the name and the address of the wheel's seeded XXH3-128 if it agrees with its Python binding, else
    None."""
    # The C calling convention returns two words in registers, as declared below, only on these architectures.
    if platform.machine().lower() not in {"x86_64", "amd64", "aarch64", "arm64"} or os.name != "posix":
        return None
    name = "XXH3_128bits_withSeed"
    function = getattr(_library(_xxhash_wheel, "_xxhash"), name, None)
    if function is None:
        return None
    function.restype = _Hash128
    function.argtypes = (ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint64)
    for seed in _SEEDS:
        for data in _HASH_CHECK:
            result = function(data, len(data), seed)
            if (result.high << 64 | result.low) != _xxhash_wheel.xxh3_128_intdigest(data, seed):
                return None
    address = ctypes.cast(function, ctypes.c_void_p).value
    return (name, address) if address else None


def _choose() -> tuple[str | None, str | None]:
    if os.environ.get("KEYTAIL_NATIVE", "1") == "0" or numba.config.DISABLE_JIT:
        return None, None
    chosen: list[str | None] = []
    for symbol, found in ((_CRC_SYMBOL, _native_crc()), (_HASH_SYMBOL, _native_hash())):
        if found is not None:
            llvm.add_symbol(symbol, found[1])
        # The symbol is looked up first, because the process ends if the linker does not find a symbol that compiled
        # code refers to.
        chosen.append(found[0] if found is not None and llvm.address_of_symbol(symbol) else None)
    return chosen[0], chosen[1]


CRC_FUNCTION, HASH_FUNCTION = _choose()
NATIVE = CRC_FUNCTION is not None and HASH_FUNCTION is not None
HASH_NAME = "xxh3-128" if HASH_FUNCTION is not None else fallback.HASH_NAME
# Distinguishes compiled code by the choice of functions (part of the cache's name).
CHOICE = f"crc={'native' if CRC_FUNCTION else 'fallback'} hash={'native' if HASH_FUNCTION else 'fallback'}"

_WORD = ir.IntType(64)
_MAX_PER_WORD = (1 << 64) - 1


def _require_bytes(array: types.Type) -> None:
    contiguous = isinstance(array, types.Array) and array.ndim == 1 and array.layout == "C"
    if not contiguous or array.dtype != types.uint8:
        raise TypingError(f"a contiguous uint8 array is needed, not {array}")


def _pointer(context, builder, array_type, array, index) -> ir.Value:
    """Return the address of element `index`, without a bounds check and without wrapping negative indexes."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), cgutils.voidptr_t)


@intrinsic
def _call_crc(typingctx, array, start, n):
    _require_bytes(array)

    def codegen(context, builder, signature, args):
        function_type = ir.FunctionType(ir.IntType(32), [ir.IntType(32), cgutils.voidptr_t, _WORD])
        function = cgutils.get_or_insert_function(builder.module, function_type, _CRC_SYMBOL)
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1])
        raw = builder.call(function, [ir.Constant(ir.IntType(32), 0xFFFFFFFF), pointer, args[2]])
        return builder.xor(raw, ir.Constant(ir.IntType(32), 0xFFFFFFFF))

    return types.uint32(array, types.int64, types.int64), codegen


@intrinsic
def _call_hash(typingctx, array, start, n, seed):
    _require_bytes(array)
    pair = types.UniTuple(types.uint64, 2)

    def codegen(context, builder, signature, args):
        words = ir.LiteralStructType([_WORD, _WORD])
        function_type = ir.FunctionType(words, [cgutils.voidptr_t, _WORD, _WORD])
        function = cgutils.get_or_insert_function(builder.module, function_type, _HASH_SYMBOL)
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1])
        result = builder.call(function, [pointer, args[2], args[3]])
        halves = [builder.extract_value(result, 0), builder.extract_value(result, 1)]
        return context.make_tuple(builder, signature.return_type, halves)

    return pair(array, types.int64, types.int64, types.uint64), codegen


@intrinsic
def _call_prefetch(typingctx, array, index):
    if not (isinstance(array, types.Array) and array.ndim == 1 and array.layout == "C"):
        raise TypingError(f"a contiguous one-dimensional array is needed, not {array}")

    def codegen(context, builder, signature, args):
        i32 = ir.IntType(32)
        function_type = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, i32, i32, i32])
        function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1])
        # Arguments: read access, keep in every cache level, data rather than instructions.
        builder.call(function, [pointer, ir.Constant(i32, 0), ir.Constant(i32, 3), ir.Constant(i32, 1)])
        return context.get_dummy_value()

    return types.none(array, types.int64), codegen


@intrinsic
def _call_copy(typingctx, target, at, source, start, n):
    _require_bytes(target)
    _require_bytes(source)

    def codegen(context, builder, signature, args):
        to = _pointer(context, builder, signature.args[0], args[0], args[1])
        cgutils.raw_memcpy(
            builder, to, _pointer(context, builder, signature.args[2], args[2], args[3]), args[4], 1
        )
        return context.get_dummy_value()

    return types.none(target, types.int64, source, types.int64, types.int64), codegen


@intrinsic
def _call_compare(typingctx, a, a_start, b, b_start, n):
    _require_bytes(a)
    _require_bytes(b)

    def codegen(context, builder, signature, args):
        function_type = ir.FunctionType(ir.IntType(32), [cgutils.voidptr_t, cgutils.voidptr_t, _WORD])
        function = cgutils.get_or_insert_function(builder.module, function_type, "memcmp")
        left = _pointer(context, builder, signature.args[0], args[0], args[1])
        right = _pointer(context, builder, signature.args[2], args[2], args[3])
        result = builder.call(function, [left, right, args[4]])
        return builder.icmp_signed("==", result, ir.Constant(ir.IntType(32), 0))

    return types.boolean(a, types.int64, b, types.int64, types.int64), codegen


@intrinsic
def _call_multiply_add(typingctx, high, low, a, b):
    pair = types.UniTuple(types.uint64, 2)

    def codegen(context, builder, signature, args):
        wide = ir.IntType(128)
        high, low, a, b = (builder.zext(arg, wide) for arg in args)
        word_bits = ir.Constant(wide, 64)
        total = builder.add(builder.or_(builder.shl(high, word_bits), low), builder.mul(a, b))
        halves = [builder.trunc(builder.lshr(total, word_bits), _WORD), builder.trunc(total, _WORD)]
        return context.make_tuple(builder, signature.return_type, halves)

    return pair(types.uint64, types.uint64, types.uint64, types.uint64), codegen


def copy_bytes(target, at, source, start, n):
    """Set `target[at:at + n] = source[start:start + n]`, for spans that do not overlap; both arrays are contiguous
    uint8."""
    target[at : at + n] = source[start : start + n]


def equal_bytes(a, a_start, b, b_start, n):
    """Return whether the `n` bytes from `a[a_start]` and from `b[b_start]` on are equal; both arrays are contiguous
    uint8."""
    return bytes(a[a_start : a_start + n]) == bytes(b[b_start : b_start + n])


def multiply_add(high, low, a, b):
    """Return `high << 64 | low` plus the product `a * b`, modulo 2**128, as (high, low); all are uint64."""
    total = (int(high) << 64 | int(low)) + int(a) * int(b)
    return np.uint64(total >> 64 & _MAX_PER_WORD), np.uint64(total & _MAX_PER_WORD)


def crc32c(array, start, n):
    """Return the CRC-32C (as stored in a batch header) of `array[start:start + n]`; `array` is contiguous uint8."""
    return _crc32c_wheel.crc32c(memoryview(array)[start : start + n])


def xxh3_128(array, start, n, seed):
    """Return the 128-bit hash `HASH_NAME` of `array[start:start + n]` under a uint64 seed: (low, high) uint64 words."""
    data = bytes(memoryview(array)[start : start + n])
    if HASH_FUNCTION is None:
        return fallback.hash_128_python(data, int(seed))
    value = _xxhash_wheel.xxh3_128_intdigest(data, int(seed))
    return value & _MAX_PER_WORD, value >> 64


def prefetch(array, index):
    """Start to load element `index` into the CPU cache; never faults, whatever the index."""


@overload(crc32c)
def _overload_crc32c(array, start, n):
    _require_bytes(array)
    if CRC_FUNCTION is None:
        return lambda array, start, n: fallback.crc32c(array, start, n)  # noqa: PLW0108 (Numba matches names)
    return lambda array, start, n: _call_crc(array, start, n)  # noqa: PLW0108 (the same)


@overload(xxh3_128)
def _overload_xxh3_128(array, start, n, seed):
    _require_bytes(array)
    if HASH_FUNCTION is None:
        return lambda array, start, n, seed: fallback.hash_128(array, start, n, seed)  # noqa: PLW0108 (the same)
    return lambda array, start, n, seed: _call_hash(array, start, n, seed)  # noqa: PLW0108 (the same)


@overload(copy_bytes)
def _overload_copy_bytes(target, at, source, start, n):
    return lambda target, at, source, start, n: _call_copy(target, at, source, start, n)  # noqa: PLW0108 (the same)


@overload(equal_bytes)
def _overload_equal_bytes(a, a_start, b, b_start, n):
    return lambda a, a_start, b, b_start, n: _call_compare(a, a_start, b, b_start, n)  # noqa: PLW0108 (the same)


@overload(multiply_add)
def _overload_multiply_add(high, low, a, b):
    return lambda high, low, a, b: _call_multiply_add(high, low, a, b)  # noqa: PLW0108 (the same)


@overload(prefetch)
def _overload_prefetch(array, index):
    return lambda array, index: _call_prefetch(array, index)  # noqa: PLW0108 (the same)


def file_digest() -> _xxhash_wheel.xxh3_128:
    """Return a new XXH3-128 digest for the bytes of a file: call its `update(buffer)`, then `hexdigest()`."""
    return _xxhash_wheel.xxh3_128()
