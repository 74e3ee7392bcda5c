"""Zig-zag varints in plain Python, one byte at a time, and CRC-32C.

These reference models of the kernels are short enough to be checked by reading them.
"""

from __future__ import annotations

import crc32c as _wheel

_ONE_BYTE = [bytes((number,)) for number in range(0x80)]


def encode_varint(value: int) -> bytes:
    """Encode a signed 32-bit number: zig-zag, then 7-bit groups, lowest first, with the high bit set on all but the
    last.
    """
    if not -(2**31) <= value < 2**31:
        raise ValueError(f"{value} does not fit 32 bits")
    return _encode_groups(((value << 1) ^ (value >> 31)) & 0xFFFFFFFF)


def encode_varlong(value: int) -> bytes:
    """Encode a signed 64-bit number in the same way."""
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{value} does not fit 64 bits")
    return _encode_groups(((value << 1) ^ (value >> 63)) & 0xFFFFFFFFFFFFFFFF)


def _encode_groups(unsigned: int) -> bytes:
    if unsigned < 0x80:
        return _ONE_BYTE[unsigned]
    out = bytearray()
    while unsigned >= 0x80:
        out.append(0x80 | (unsigned & 0x7F))
        unsigned >>= 7
    out.append(unsigned)
    return bytes(out)


def longer_varint(varint: bytes) -> bytes:
    """Return an encoding of the same number with one more byte, if 32 bits allow that."""
    return varint[:-1] + bytes([varint[-1] | 0x80, 0]) if len(varint) < 5 else varint


def decode_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the value at byte `at`, and the position after it. Raises ValueError beyond 5 bytes, or past the end."""
    unsigned, at = _decode_groups(data, at, most_bytes=5)
    unsigned &= 0xFFFFFFFF
    return (unsigned >> 1) ^ -(unsigned & 1), at


def decode_varlong(data: bytes, at: int) -> tuple[int, int]:
    """Return the value at byte `at`, and the position after it. Raises ValueError beyond 10 bytes, or past the end."""
    unsigned, at = _decode_groups(data, at, most_bytes=10)
    unsigned &= 0xFFFFFFFFFFFFFFFF
    return (unsigned >> 1) ^ -(unsigned & 1), at


def _decode_groups(data: bytes, at: int, most_bytes: int) -> tuple[int, int]:
    unsigned = 0
    for group in range(most_bytes):
        if at >= len(data):
            raise ValueError("data ends inside a varint")
        byte = data[at]
        at += 1
        unsigned |= (byte & 0x7F) << (7 * group)
        if byte < 0x80:
            return unsigned, at
    raise ValueError(f"varint longer than {most_bytes} bytes")


def crc32c(data: bytes) -> int:
    """Return CRC-32C (Castagnoli), computed by the C code of a wheel, because tests build logs of many megabytes.

    tests/reference/test_batches.py compares it with its definition, `hashing.crc32c`.
    """
    return _wheel.crc32c(data)
