"""Reads batch headers as a fetch does, valid or not: every batch that has a size gets a row and a validity flag.

Batches with a wrong checksum, count or order are included; `kernels/batches.py` accepts only valid batches.
"""

from __future__ import annotations

import numpy as np

from keytail.kernels import batch_header as v2
from keytail.kernels.batches import be16, be32, be64
from keytail.kernels.jit import kernel
from keytail.kernels.legacy import crc32
from keytail.kernels.native import crc32c

# Codes in `out[CODE]` of `index_any`, and positions in that array.
OK, TABLE_FULL, SIZE_TOO_SMALL = 0, 1, 2
ROWS, CONSUMED, CODE, NEEDED = 0, 1, 2, 3


_MIN_SIZE = 14
_UP_TO_MAGIC = 17


@kernel(allocates=True)
def index_any(raw, n, position, table, valid, out):
    """Fill `table` (BATCH_TABLE rows) and `valid` (bool) with the batches of `raw[:n]`, whose first byte is byte
    `position`.

    `valid`: the batch is large enough for its header, and its checksum is correct. The missing bytes of an incomplete
    header are read as zeros. `out` is int64[4]: rows, bytes consumed, a code, and the size of a batch that is not
    whole. The kernel stops when 17 bytes or fewer are left, as Kafka's reader of segment files does.
    """
    rows = 0
    p = np.int64(0)
    code = OK
    needed = np.int64(0)
    header = np.zeros(v2.HEADER_BYTES, np.uint8)
    while n - p > _UP_TO_MAGIC:
        size = np.int64(be32(raw, p + v2.BATCH_LENGTH))
        if size < _MIN_SIZE:
            code = SIZE_TOO_SMALL
            break
        total = size + v2.LENGTH_PREFIX_BYTES
        if p + total > n:
            needed = total
            break
        if rows == table.shape[0]:
            code = TABLE_FULL
            break
        for i in range(v2.HEADER_BYTES):
            header[i] = raw[p + i] if p + i < n else 0
        row = table[rows]
        base = be64(header, 0)
        magic = np.int8(header[16])
        row.position = position + p
        row.size_bytes = total
        row.base_offset = base
        row.magic = magic
        row.control_type = -1
        row.coordinator_epoch = -1
        if magic >= 2:
            row.last_offset = base + be32(header, 23)
            row.leader_epoch = be32(header, 12)
            row.crc = np.uint32(be32(header, 17))
            row.attributes = be16(header, 21)
            row.base_timestamp_ms = be64(header, 27)
            row.max_timestamp_ms = be64(header, 35)
            row.producer_id = be64(header, 43)
            row.producer_epoch = be16(header, 51)
            row.base_sequence = be32(header, 53)
            row.record_count = be32(header, 57)
            valid[rows] = total >= v2.HEADER_BYTES and crc32c(raw, p + v2.ATTRIBUTES, total - v2.ATTRIBUTES) == row.crc
        else:
            row.last_offset = base
            row.leader_epoch = -1
            row.crc = np.uint32(be32(header, 12))
            row.attributes = np.int16(header[17])
            timestamp = be64(header, 18) if magic != 0 else np.int64(-1)
            row.base_timestamp_ms = timestamp
            row.max_timestamp_ms = timestamp
            row.producer_id = -1
            row.producer_epoch = -1
            row.base_sequence = -1
            row.record_count = 1
            valid[rows] = crc32(raw, p + 16, total - 16) == row.crc
        rows += 1
        p += total
    out[ROWS] = rows
    out[CONSUMED] = p
    out[CODE] = code
    out[NEEDED] = needed


# Codes of `find_batch`.
FOUND, CONTINUE, NO_BATCH = 0, 1, 2


@kernel
def find_batch(raw, n, p, target, out):
    """Find the first batch from `raw[p]` on whose last offset is `target` or more; `raw[:n]` contains whole headers.

    `out` is int64[4]: a code (FOUND, CONTINUE at the end of the bytes, NO_BATCH at an impossible size), the position
    reached, and the size and last offset of the batch found.
    """
    out[0] = CONTINUE
    while n - p > _UP_TO_MAGIC:
        size = np.int64(be32(raw, p + v2.BATCH_LENGTH))
        if size < _MIN_SIZE:
            out[0] = NO_BATCH
            break
        last = be64(raw, p)
        if np.int8(raw[p + v2.MAGIC]) >= 2:
            if n - p < 27:
                break
            last += be32(raw, p + v2.LAST_OFFSET_DELTA)
        if last >= target:
            out[0] = FOUND
            out[2] = size + v2.LENGTH_PREFIX_BYTES
            out[3] = last
            break
        p += size + v2.LENGTH_PREFIX_BYTES
    out[1] = p
