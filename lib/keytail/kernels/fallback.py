"""CRC-32C and a 128-bit key hash in Numba alone, for processes that cannot use a wheel's C function.

The hash, named `keytail-fallback-128`, is MurmurHash3_x64_128 (public domain, Austin Appleby) with both state words
initialised to the whole 64-bit seed; for seeds below 2**32 it equals the original. Both functions are compiled into
each kernel that calls them, read exactly the bytes given, and have a reference model in `tests/reference/hashing.py`.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

HASH_NAME = "keytail-fallback-128"

_CASTAGNOLI_REFLECTED = 0x82F63B78


def crc_tables(polynomial: int) -> np.ndarray:
    """Return `tables[k, b]` of a reflected polynomial: the CRC register after byte `b` and then `k` zero bytes."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        shifted = table >> np.uint32(1)
        table = np.where(table & 1, shifted ^ np.uint32(polynomial), shifted)
    tables = [table]
    for _ in range(7):
        tables.append((tables[-1] >> 8) ^ table[tables[-1] & 0xFF])
    return np.stack(tables)


_CRC_TABLES = crc_tables(_CASTAGNOLI_REFLECTED)
_LOW_BYTE = np.uint32(0xFF)


@register_jitable
def crc32c(array, start, n):
    """Return the CRC-32C of `array[start:start + n]`, eight bytes per step through eight tables ("slicing by 8")."""
    crc = np.uint32(0xFFFFFFFF)
    position = start
    end = start + n
    while end - position >= 8:
        low = crc ^ (
            np.uint32(array[position])
            | np.uint32(array[position + 1]) << np.uint32(8)
            | np.uint32(array[position + 2]) << np.uint32(16)
            | np.uint32(array[position + 3]) << np.uint32(24)
        )
        crc = (
            _CRC_TABLES[7, low & _LOW_BYTE]
            ^ _CRC_TABLES[6, (low >> np.uint32(8)) & _LOW_BYTE]
            ^ _CRC_TABLES[5, (low >> np.uint32(16)) & _LOW_BYTE]
            ^ _CRC_TABLES[4, low >> np.uint32(24)]
            ^ _CRC_TABLES[3, array[position + 4]]
            ^ _CRC_TABLES[2, array[position + 5]]
            ^ _CRC_TABLES[1, array[position + 6]]
            ^ _CRC_TABLES[0, array[position + 7]]
        )
        position += 8
    while position < end:
        crc = _CRC_TABLES[0, (crc ^ np.uint32(array[position])) & _LOW_BYTE] ^ (crc >> np.uint32(8))
        position += 1
    return np.uint32(crc ^ np.uint32(0xFFFFFFFF))


_C1 = np.uint64(0x87C37B91114253D5)
_C2 = np.uint64(0x4CF5AD432745937F)
_FINAL_1 = np.uint64(0xFF51AFD7ED558CCD)
_FINAL_2 = np.uint64(0xC4CEB9FE1A85EC53)


@register_jitable
def _rotate(x, bits):
    return x << np.uint64(bits) | x >> np.uint64(64 - bits)


@register_jitable
def _final_mix(x):
    x = (x ^ x >> np.uint64(33)) * _FINAL_1
    x = (x ^ x >> np.uint64(33)) * _FINAL_2
    return x ^ x >> np.uint64(33)


@register_jitable
def _little_endian(array, start, n):
    """Return the `n` <= 8 bytes from `start` as one number."""
    value = np.uint64(0)
    for i in range(n):
        value |= np.uint64(array[start + i]) << np.uint64(8 * i)
    return value


@register_jitable
def hash_128(array, start, n, seed):
    """Return `keytail-fallback-128` of `array[start:start + n]`, as (low, high) uint64 words."""
    h1 = np.uint64(seed)
    h2 = np.uint64(seed)
    position = start
    end = start + n
    while end - position >= 16:
        k1 = _little_endian(array, position, 8)
        k2 = _little_endian(array, position + 8, 8)
        h1 ^= _rotate(k1 * _C1, 31) * _C2
        h1 = (_rotate(h1, 27) + h2) * np.uint64(5) + np.uint64(0x52DCE729)
        h2 ^= _rotate(k2 * _C2, 33) * _C1
        h2 = (_rotate(h2, 31) + h1) * np.uint64(5) + np.uint64(0x38495AB5)
        position += 16
    rest = end - position
    if rest > 8:
        h2 ^= _rotate(_little_endian(array, position + 8, rest - 8) * _C2, 33) * _C1
    h1 ^= _rotate(_little_endian(array, position, min(rest, 8)) * _C1, 31) * _C2
    h1 ^= np.uint64(n)
    h2 ^= np.uint64(n)
    h1 += h2
    h2 += h1
    h1 = _final_mix(h1)
    h2 = _final_mix(h2)
    h1 += h2
    h2 += h1
    return h1, h2


def hash_128_python(data: bytes, seed: int) -> tuple[int, int]:
    """Return `hash_128` of `data`, for callers outside kernels; this is slow, because it computes with NumPy
    scalars."""
    with np.errstate(over="ignore"):
        low, high = hash_128(np.frombuffer(data, dtype=np.uint8), 0, len(data), np.uint64(seed))
    return int(low), int(high)
