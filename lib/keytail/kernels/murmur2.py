"""Computes the partition of a key as Kafka's producer does: `toPositive(murmur2(key)) % partitions`.

The hash is Murmur2 of 32 bits over little-endian words, with Kafka's seed.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from keytail.kernels.jit import kernel

_SEED = np.uint32(0x9747B28C)
_M = np.uint32(0x5BD1E995)


@njit
def murmur2(data, start, n):
    """Return the uint32 hash of `data[start:start + n]`."""
    # Numba widens uint32 products to 64 bits, so every step truncates them to 32 bits.
    h = np.uint32(_SEED ^ np.uint32(n))
    p = start
    end = start + (n & ~3)
    while p < end:
        k = (
            np.uint32(data[p])
            | np.uint32(np.uint32(data[p + 1]) << np.uint32(8))
            | np.uint32(np.uint32(data[p + 2]) << np.uint32(16))
            | np.uint32(np.uint32(data[p + 3]) << np.uint32(24))
        )
        k = np.uint32(np.uint32(k) * _M)
        k = np.uint32(k ^ (k >> np.uint32(24)))
        k = np.uint32(k * _M)
        h = np.uint32(np.uint32(h * _M) ^ k)
        p += 4
    rest = n & 3
    if rest >= 3:
        h = np.uint32(h ^ np.uint32(np.uint32(data[p + 2]) << np.uint32(16)))
    if rest >= 2:
        h = np.uint32(h ^ np.uint32(np.uint32(data[p + 1]) << np.uint32(8)))
    if rest >= 1:
        h = np.uint32(h ^ np.uint32(data[p]))
        h = np.uint32(h * _M)
    h = np.uint32(h ^ (h >> np.uint32(13)))
    h = np.uint32(h * _M)
    return np.uint32(h ^ (h >> np.uint32(15)))


@kernel
def _partitions(data, offsets, nulls, n_partitions, out):
    for i in range(len(out)):
        if nulls[i]:
            out[i] = -1
        else:
            h = murmur2(data, offsets[i], offsets[i + 1] - offsets[i])
            out[i] = np.int64(h & np.uint32(0x7FFFFFFF)) % n_partitions


def partition_of_keys(data, offsets, nulls, n_partitions):
    """Return the partition of each key `data[offsets[i]:offsets[i + 1]]` as int32, or -1 where `nulls[i]`.

    `data` is uint8; `offsets` is int64 or int32, ascending, inside `data`, and one longer than `nulls` (bool). An empty
    key is a key. Raises ValueError for offsets that do not fit, and for less than one partition.
    """
    offsets = np.ascontiguousarray(offsets, np.int64)
    if n_partitions < 1:
        raise ValueError(f"invalid number of partitions {n_partitions}: must be at least 1")
    if len(offsets) != len(nulls) + 1 or offsets[0] < 0 or offsets[-1] > len(data) or (np.diff(offsets) < 0).any():
        raise ValueError("invalid offsets: there must be one more than keys, in ascending order inside the data")
    out = np.empty(len(nulls), np.int32)
    # The views are always read-only, so that one compiled kernel serves read-only and writable arrays.
    views = [np.ascontiguousarray(array, dtype).view() for array, dtype in
             ((data, np.uint8), (offsets, np.int64), (nulls, np.bool_))]
    for view in views:
        view.flags.writeable = False
    _partitions(*views, n_partitions, out)
    return out
