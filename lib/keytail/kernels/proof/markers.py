"""The proof's own table of markers: how every transaction of the log ended, and what was seen of its data.

A table is int64[n, COLUMNS], sorted by producer id and offset. The table is built from the markers alone in one pass
over the headers of the whole log; the marker of transactional data is found by a search. The proof of markers uses
neither the transaction indexes nor the results of cleaning.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from keytail.kernels import batch_header as v2
from keytail.kernels.jit import kernel
from keytail.kernels.native import crc32c
from keytail.kernels.walk import batch_size, be_16, be_32, be_64, be_u32, control_type, wanted_bytes

ABORT, COMMIT = 0, 1

# Columns. FIRST_DATA: base offset of the transaction's first data batch among the sources, -1: none. OUTPUT: number of
# the output that contains the marker, -1: none.
PRODUCER, OFFSET, KIND, FIRST_DATA, OUTPUT, COLUMNS = range(6)

# `cursor` of `collect`, int64: the next batch, the end of the window, whether nothing follows it, markers found, bytes
# wanted, last offset seen.
FROM, TO, IS_ALL, FOUND, WANTED, LAST_OFFSET, CURSOR_SIZE = range(7)

COLLECTED, NEED_BYTES, NEED_ROOM, CUT, BAD_SIZE, BAD_CRC, BAD_ORDER, BAD_MAGIC, FOUND_ONE = range(9)


@register_jitable
def next_header(data, cursor):
    """Return (code, size of the next batch); the code is FOUND_ONE, COLLECTED if no batch follows, or what is needed or
    wrong."""
    p, to, is_all = cursor[FROM], cursor[TO], cursor[IS_ALL] != 0
    if p == to and is_all:
        return COLLECTED, np.int64(0)
    size = batch_size(data, p, to, is_all)
    if size == 0:
        cursor[WANTED] = wanted_bytes(data, p, to)
        return NEED_BYTES, size
    if size < 0:
        return CUT if size == -1 else BAD_SIZE, size
    return FOUND_ONE, size


@kernel
def collect(data, cursor, found):
    """Append the markers of a segment's batches to `found`, in log order; return COLLECTED, or a code for what is
    needed or wrong."""
    while True:
        code, size = next_header(data, cursor)
        if code != FOUND_ONE:
            return code
        p = cursor[FROM]
        magic = data[p + v2.MAGIC]
        if magic > 2:
            return BAD_MAGIC
        if magic == 2:
            base = be_64(data, p)
            if base <= cursor[LAST_OFFSET] or be_32(data, p + v2.LAST_OFFSET_DELTA) < 0:
                return BAD_ORDER
            if be_16(data, p + v2.ATTRIBUTES) & v2.CONTROL:
                if np.int64(crc32c(data, p + v2.ATTRIBUTES, size - v2.ATTRIBUTES)) != be_u32(data, p + v2.CRC):
                    return BAD_CRC
                kind = control_type(data, p, size)
                if kind in (ABORT, COMMIT):
                    row = cursor[FOUND]
                    if row == found.shape[0]:
                        return NEED_ROOM
                    found[row, PRODUCER] = be_64(data, p + v2.PRODUCER_ID)
                    found[row, OFFSET] = base
                    found[row, KIND] = kind
                    found[row, FIRST_DATA] = -1
                    found[row, OUTPUT] = -1
                    cursor[FOUND] += 1
            cursor[LAST_OFFSET] = base + be_32(data, p + v2.LAST_OFFSET_DELTA)
        cursor[FROM] = p + size


@register_jitable
def next_marker(markers, producer_id, offset):
    """Return the row of the producer's first marker at or above `offset`; -1: none."""
    low, high = np.int64(0), np.int64(markers.shape[0])
    while low < high:
        middle = (low + high) // 2
        of = markers[middle, PRODUCER]
        if of < producer_id or (of == producer_id and markers[middle, OFFSET] < offset):
            low = middle + 1
        else:
            high = middle
    if low < markers.shape[0] and markers[low, PRODUCER] == producer_id:
        return low
    return np.int64(-1)


@kernel
def marker_at(markers, producer_id, offset):
    """Return the row of the producer's marker at `offset`; -1: none."""
    row = next_marker(markers, producer_id, offset)
    return row if row >= 0 and markers[row, OFFSET] == offset else np.int64(-1)


@kernel
def note_first_data(data, cursor, markers, log_start_offset):
    """Note in `markers` where the data of each transaction begins; `cursor` is as for `collect`.

    Reads a segment's batches in log order; returns COLLECTED, NEED_BYTES, CUT or BAD_SIZE.
    """
    while True:
        code, size = next_header(data, cursor)
        if code != FOUND_ONE:
            return code
        p = cursor[FROM]
        of_transaction = be_16(data, p + v2.ATTRIBUTES) & v2.TRANSACTIONAL_OR_CONTROL == v2.TRANSACTIONAL
        if data[p + v2.MAGIC] == 2 and of_transaction:
            last = be_64(data, p) + be_32(data, p + v2.LAST_OFFSET_DELTA)
            if last >= log_start_offset:
                row = next_marker(markers, be_64(data, p + v2.PRODUCER_ID), last + 1)
                if row >= 0 and markers[row, FIRST_DATA] < 0:
                    markers[row, FIRST_DATA] = be_64(data, p)
        cursor[FROM] = p + size
