"""Where the records of a block end that is there in part: a block of more than memory is for is walked in pieces."""

from __future__ import annotations

import numpy as np

from keytail.kernels.jit import kernel
from keytail.kernels.records import read_varint, read_varlong

# What `out` (int64[5]) of `whole_records` says.
END, COUNT, FIRST_DELTA, LARGEST_DELTA, WANTED = range(5)

MOST_VARINT_BYTES = 5


@kernel
def whole_records(data, end, most, up_to_delta, out):
    """Count the records that lie whole in `data[:end]`, at most `most`, up to one behind `up_to_delta`.

    `out`: position behind the last of them, how many they are, the first one's offset delta and the largest (-1: it
    cannot be read), and how many bytes the next one takes: 0 where it is none, or the count or the delta ended them;
    at least 1 where bytes are missing. What is wrong with a record is for who walks it to say: one without a length
    ends them, too.
    """
    p, n, wanted = np.int64(0), np.int64(0), np.int64(0)
    first_delta, largest_delta = np.int64(-1), np.int64(-1)
    while n < most:
        length, q = read_varint(data, p, end)
        if q < 0:
            if end - p < MOST_VARINT_BYTES:
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
