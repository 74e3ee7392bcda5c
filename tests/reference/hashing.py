"""Reference models of the checksum and of the hashes that kernels compute: bit by bit, from their definitions."""

from __future__ import annotations

from collections.abc import Sequence

_M = (1 << 64) - 1


def crc32c(data: bytes) -> int:
    """Return CRC-32C, computed with its polynomial, one bit at a time."""
    register = 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = register >> 1 ^ (0x82F63B78 if register & 1 else 0)
    return register ^ 0xFFFFFFFF


def _rotl(x: int, r: int) -> int:
    return (x << r | x >> (64 - r)) & _M


def _fmix(k: int) -> int:
    k = (k ^ k >> 33) * 0xFF51AFD7ED558CCD & _M
    k = (k ^ k >> 33) * 0xC4CEB9FE1A85EC53 & _M
    return k ^ k >> 33


def fallback_128(data: bytes, seed: int) -> tuple[int, int]:
    """Return (low, high) of MurmurHash3_x64_128 with both state words initialised with a 64-bit seed."""
    c1, c2 = 0x87C37B91114253D5, 0x4CF5AD432745937F
    h1 = h2 = seed
    whole = len(data) // 16 * 16
    for i in range(0, whole, 16):
        k1 = int.from_bytes(data[i : i + 8], "little")
        k2 = int.from_bytes(data[i + 8 : i + 16], "little")
        h1 ^= _rotl(k1 * c1 & _M, 31) * c2 & _M
        h1 = ((_rotl(h1, 27) + h2) * 5 + 0x52DCE729) & _M
        h2 ^= _rotl(k2 * c2 & _M, 33) * c1 & _M
        h2 = ((_rotl(h2, 31) + h1) * 5 + 0x38495AB5) & _M
    tail = data[whole:]
    h2 ^= _rotl(int.from_bytes(tail[8:], "little") * c2 & _M, 33) * c1 & _M
    h1 ^= _rotl(int.from_bytes(tail[:8], "little") * c1 & _M, 31) * c2 & _M
    h1 ^= len(data)
    h2 ^= len(data)
    h1 = (h1 + h2) & _M
    h2 = (h2 + h1) & _M
    h1, h2 = _fmix(h1), _fmix(h2)
    h1 = (h1 + h2) & _M
    return h1, (h2 + h1) & _M


def proof_128(key: bytes, coefficients: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Return the proof's hash of a key (low, high): two sums modulo a prime, each then mixed into a word."""
    prime, words = 2**61 - 1, [int.from_bytes(key[i : i + 7], "little") for i in range(0, len(key), 7)]
    sums = []
    for *of_words, of_length, of_sum in coefficients:
        total = 0
        for block in range(0, len(words), 16):
            products = zip(of_words, words[block : block + 16], strict=False)
            total = total * of_sum + sum(coefficient * word for coefficient, word in products)
        sums.append((total + of_length * len(key)) % prime)
    low, high = (total ^ total >> 31 for total in sums)
    low = low * 0x243F6A8885A308D3 & _M
    return low ^ low >> 32, (high << 3) * 0xB7E151628AED2A6B & _M
