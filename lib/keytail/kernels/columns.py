"""Gathers spans of many records into contiguous columns: the bytes, and the position of each value in
them (Arrow's offsets).

The buffers have the layout of Arrow's large binaries and lists, so that a caller can pass them to Arrow without a copy.
The spans were checked when the records were walked (`records.py`).
"""

from __future__ import annotations

import numpy as np
from numba import njit

from keytail.kernels.jit import kernel
from keytail.kernels.records import read_varint


@njit
def _copy(target, at, source, start, size):
    for i in range(size):
        target[at + i] = source[start + i]


@kernel
def gather(raw, arena, in_arena, starts, sizes, offsets, data):
    """Copy the spans one after the other into `data` (uint8), which has room for all spans.

    `in_arena` (bool) selects the array that contains a span; a size below 0 is a null. `offsets` (int64, one element
    more than spans) receives the position in `data` at which each span begins.
    """
    at = np.int64(0)
    for i in range(len(starts)):
        offsets[i] = at
        size = max(np.int64(sizes[i]), np.int64(0))
        if in_arena[i]:
            _copy(data, at, arena, starts[i], size)
        else:
            _copy(data, at, raw, starts[i], size)
        at += size
    offsets[len(starts)] = at


@njit
def _header_spans(a, p, end, which, at, in_arena, key_starts, key_sizes, value_starts, value_sizes):
    count, p = read_varint(a, p, end)
    for _ in range(count):
        if at < len(in_arena):
            in_arena[at] = which
        size, p = read_varint(a, p, end)
        if at < len(in_arena):
            key_starts[at] = p
            key_sizes[at] = size
        p += size
        size, p = read_varint(a, p, end)
        if at < len(in_arena):
            value_starts[at] = p
            value_sizes[at] = max(size, np.int64(-1))
        p += max(size, np.int64(0))
        at += 1
    return at


@kernel
def header_spans(
    raw, arena, in_arena, starts, ends, offsets, of_arena, key_starts, key_sizes, value_starts, value_sizes
):
    """Write the spans of all headers; return their number. Block i, the headers of one record, is the bytes from
    `starts[i]` to `ends[i]`.

    `offsets` (int64, one element more than blocks) receives the number of each block's first header. The last five
    arrays are filled up to their length; if these arrays are empty, headers are only counted.
    """
    at = np.int64(0)
    for i in range(len(starts)):
        offsets[i] = at
        if in_arena[i]:
            at = _header_spans(
                arena, starts[i], ends[i], True, at, of_arena, key_starts, key_sizes, value_starts, value_sizes
            )
        else:
            at = _header_spans(
                raw, starts[i], ends[i], False, at, of_arena, key_starts, key_sizes, value_starts, value_sizes
            )
    offsets[len(starts)] = at
    return at
