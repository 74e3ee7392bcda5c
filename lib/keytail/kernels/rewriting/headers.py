"""Writes the header of a batch."""

from __future__ import annotations

import numpy as np
from numba import njit

from keytail.kernels import batch_header as v2
from keytail.kernels.native import crc32c


@njit
def _put_be(a, p, value, n):
    v = np.uint64(np.int64(value))  # without np.int64, -1 fails outside of compiled code
    for i in range(n):
        a[p + i] = np.uint8((v >> np.uint64(8 * (n - 1 - i))) & np.uint64(0xFF))


@njit
def put_header(a, p, batch, base_offset, last_offset, total, attributes, base_timestamp, max_timestamp, record_count):
    """Write a header before the block `a[p + 61:p + total]`; return the CRC. Epochs and producer are copied from
    `batch`."""
    _put_be(a, p, base_offset, 8)
    _put_be(a, p + v2.BATCH_LENGTH, total - v2.LENGTH_PREFIX_BYTES, 4)
    _put_be(a, p + v2.LEADER_EPOCH, np.int64(batch.leader_epoch), 4)
    a[p + v2.MAGIC] = 2
    _put_be(a, p + v2.ATTRIBUTES, attributes, 2)
    _put_be(a, p + v2.LAST_OFFSET_DELTA, last_offset - base_offset, 4)
    _put_be(a, p + v2.BASE_TIMESTAMP, base_timestamp, 8)
    _put_be(a, p + v2.MAX_TIMESTAMP, max_timestamp, 8)
    _put_be(a, p + v2.PRODUCER_ID, batch.producer_id, 8)
    _put_be(a, p + v2.PRODUCER_EPOCH, np.int64(batch.producer_epoch), 2)
    _put_be(a, p + v2.BASE_SEQUENCE, np.int64(batch.base_sequence), 4)
    _put_be(a, p + v2.RECORD_COUNT, record_count, 4)
    crc = crc32c(a, p + v2.ATTRIBUTES, total - v2.ATTRIBUTES)
    _put_be(a, p + v2.CRC, np.int64(crc), 4)
    return crc
