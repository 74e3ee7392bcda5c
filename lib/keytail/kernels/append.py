"""Writes the fields that a leader sets in batch headers: offsets, its leader epoch, and optionally the append time."""

from __future__ import annotations

import numpy as np
from numba import njit

from keytail.kernels import batch_header as v2
from keytail.kernels.batches import be32
from keytail.kernels.jit import kernel
from keytail.kernels.native import crc32c

_MIN_BYTES = 26  # size of the smallest batch of any format


@njit(forceinline=True)
def _put(a, i, value, n):
    """Write the low `n` bytes of `value`, big-endian, to `a[i:i + n]`."""
    for k in range(n):
        a[i + k] = np.uint8((value >> (8 * (n - 1 - k))) & 0xFF)


@kernel
def stamp(raw, n, offset, leader_epoch):
    """Assign consecutive offsets, from `offset` on, and `leader_epoch` to the batches of magic 2 in `raw[:n]`.

    The batches are not checked: bytes that are not a batch of magic 2 may be changed, too. The next reader refuses
    invalid batches. The checksum of magic 2 covers neither the offset nor the epoch.
    """
    p = 0
    while n - p >= v2.HEADER_BYTES:
        total = np.int64(be32(raw, p + v2.BATCH_LENGTH)) + v2.LENGTH_PREFIX_BYTES
        if total < v2.HEADER_BYTES:
            break
        _put(raw, p, np.int64(offset), 8)
        _put(raw, p + v2.LEADER_EPOCH, np.int64(leader_epoch), 4)
        offset += np.int64(be32(raw, p + v2.LAST_OFFSET_DELTA)) + 1
        p += total


@kernel
def count(raw, n):
    """Return how many batches begin in `raw[:n]`; only the length fields are read."""
    p = 0
    batches = 0
    while n - p >= _MIN_BYTES:
        total = np.int64(be32(raw, p + v2.BATCH_LENGTH)) + v2.LENGTH_PREFIX_BYTES
        if total < _MIN_BYTES:
            break
        p += total
        batches += 1
    return batches


@kernel
def set_append_time(raw, table, now_ms):
    """Set the timestamp of all records in the batches of `table` to `now_ms`, and update the checksums.

    The first batch is at `raw[0]`. Call this kernel only for batches whose checksum has just been verified.
    """
    p = 0
    for i in range(len(table)):
        row = table[i]
        if not row.attributes & v2.LOG_APPEND_TIME or row.max_timestamp_ms != now_ms:
            row.attributes |= np.int16(v2.LOG_APPEND_TIME)
            row.max_timestamp_ms = now_ms
            _put(raw, p + v2.ATTRIBUTES, np.int64(row.attributes), 2)
            _put(raw, p + v2.MAX_TIMESTAMP, np.int64(now_ms), 8)
            row.crc = crc32c(raw, p + v2.ATTRIBUTES, np.int64(row.size_bytes) - v2.ATTRIBUTES)
            _put(raw, p + v2.CRC, np.int64(row.crc), 4)
        p += np.int64(row.size_bytes)
