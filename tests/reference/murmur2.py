"""Murmur2 as in Kafka's `Utils.murmur2`, in plain Python."""

from __future__ import annotations

_M = 0x5BD1E995
_ONES = 0xFFFFFFFF


def murmur2(data: bytes) -> int:
    """Return the unsigned 32-bit hash."""
    h = 0x9747B28C ^ len(data)
    whole = len(data) - len(data) % 4
    for at in range(0, whole, 4):
        k = int.from_bytes(data[at : at + 4], "little") * _M & _ONES
        k = (k ^ k >> 24) * _M & _ONES
        h = h * _M & _ONES ^ k
    if rest := data[whole:]:
        h = (h ^ int.from_bytes(rest, "little")) * _M & _ONES
    h = (h ^ h >> 13) * _M & _ONES
    return h ^ h >> 15


def partition(key: bytes, n_partitions: int) -> int:
    return (murmur2(key) & 0x7FFFFFFF) % n_partitions
