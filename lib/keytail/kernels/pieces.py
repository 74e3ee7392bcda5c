"""Finds whole records in a part of a block, since a block that is too large for memory is walked in pieces."""

from __future__ import annotations

import numpy as np

from keytail.kernels.jit import kernel
from keytail.kernels.records import read_varint, read_varlong

# Positions in `out` (int64[5]) of `whole_records`.
END, COUNT, FIRST_DELTA, LARGEST_DELTA, WANTED = range(5)

MAX_VARINT_BYTES = 5


@kernel
def whole_records(data, end, most, up_to_delta, out):
    """Count the whole records in `data[:end]`: at most `most`, and none from the first record with a delta above
    `up_to_delta` on.

    `out` receives the position after the last of these records, their number, the offset delta of the first record, the
    largest offset delta (-1: unreadable), and the number of bytes that the next record needs if it is incomplete: its
    size, or one more than are available if its length is incomplete. That number is 0 if `most`, the delta or an
    invalid length ended the count. All other errors in a record are reported by the code that walks the record.
    """
    p, n, wanted = np.int64(0), np.int64(0), np.int64(0)
    first_delta, largest_delta = np.int64(-1), np.int64(-1)
    while n < most:
        length, q = read_varint(data, p, end)
        if q < 0:
            if end - p < MAX_VARINT_BYTES:
                wanted = end - p + 1
            break
        if length < 1:
            break
        if length > end - q:
            wanted = q + length - p
            break
        stop = q + length
        _, q = read_varlong(data, q + 1, stop)
        if q >= 0:
            offset_delta, q = read_varint(data, q, stop)
            if q >= 0:
                if offset_delta > up_to_delta:
                    break
                largest_delta = max(largest_delta, offset_delta)
                if n == 0:
                    first_delta = offset_delta
        p = stop
        n += 1
    out[END] = p
    out[COUNT] = n
    out[FIRST_DELTA] = first_delta
    out[LARGEST_DELTA] = largest_delta
    out[WANTED] = wanted
