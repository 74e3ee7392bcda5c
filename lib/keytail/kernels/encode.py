"""Cuts columns of records into batches of version 2 and writes them.

Three steps on the same columns: `check_records` refuses what no batch can hold, so that `write_blocks` need not
look; `put_headers` puts the 61 bytes in front of each block, which may have been compressed in between. The
layout is that of `format/BATCH.md`, where a batch ends that of its section 6.

A byte column is a tuple (data uint8, offsets int64, valid bool), headers are (offsets int64, keys, values), with no
offsets at all where no record has headers.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from keytail.kernels.jit import kernel
from keytail.kernels.native import copy_bytes
from keytail.kernels.records import put_varint, varint_bytes
from keytail.kernels.rewrite import HEADER_BYTES, put_header

# Codes of `check_records`.
OK = 0
KEY_OFFSETS = 1
VALUE_OFFSETS = 2
HEADER_OFFSETS = 3
HEADER_KEY_OFFSETS = 4
HEADER_VALUE_OFFSETS = 5
HEADER_KEY_NULL = 6
NEGATIVE_TIMESTAMP = 7
RECORD_TOO_LARGE = 8


@njit(inline="always")
def _span_fits(column, i):
    data, offsets, _ = column
    return 0 <= offsets[i] <= offsets[i + 1] <= len(data)


@njit(inline="always")
def _field_bytes(column, i):
    """Bytes of a value with the length in front of it."""
    _, offsets, valid = column
    if not valid[i]:
        return np.int64(1)
    n = offsets[i + 1] - offsets[i]
    return varint_bytes(n) + n


@njit(inline="always")
def _put_field(target, p, column, i):
    data, offsets, valid = column
    if not valid[i]:
        target[p] = 1  # -1
        return p + 1
    n = offsets[i + 1] - offsets[i]
    p = put_varint(target, p, n)
    copy_bytes(target, p, data, offsets[i], n)
    return p + n


@njit
def _headers_bytes(headers, i):
    offsets, keys, values = headers
    total = np.int64(varint_bytes(offsets[i + 1] - offsets[i]))
    for j in range(offsets[i], offsets[i + 1]):
        total += _field_bytes(keys, j) + _field_bytes(values, j)
    return total


@njit
def _put_headers_of(target, p, headers, i):
    offsets, keys, values = headers
    p = put_varint(target, p, offsets[i + 1] - offsets[i])
    for j in range(offsets[i], offsets[i + 1]):
        p = _put_field(target, p, keys, j)
        p = _put_field(target, p, values, j)
    return p


@njit
def _check_headers(headers, i):
    offsets, keys, values = headers
    if not 0 <= offsets[i] <= offsets[i + 1] <= len(keys[2]):
        return HEADER_OFFSETS
    for j in range(offsets[i], offsets[i + 1]):
        if not keys[2][j]:
            return HEADER_KEY_NULL
        if not _span_fits(keys, j):
            return HEADER_KEY_OFFSETS
        if not _span_fits(values, j):
            return HEADER_VALUE_OFFSETS
    return OK


@kernel
def check_records(timestamps, keys, values, headers, most_bytes):
    """(code, row it speaks of, bytes of the largest batch that holds one record alone).

    No record may need a batch of more than `most_bytes`. Also of a null the offsets must fit.
    """
    largest = np.int64(0)
    has_headers = len(headers[0]) > 0
    for i in range(len(timestamps)):
        if timestamps[i] < -1:
            return NEGATIVE_TIMESTAMP, i, largest
        if not _span_fits(keys, i):
            return KEY_OFFSETS, i, largest
        if not _span_fits(values, i):
            return VALUE_OFFSETS, i, largest
        length = 3 + _field_bytes(keys, i) + _field_bytes(values, i)
        if has_headers:
            code = _check_headers(headers, i)
            if code != OK:
                return code, i, largest
            length += _headers_bytes(headers, i)
        else:
            length += 1
        size = HEADER_BYTES + varint_bytes(length) + length
        largest = max(largest, size)
        if size > most_bytes:
            return RECORD_TOO_LARGE, i, largest
    return OK, -1, largest


@kernel
def write_blocks(
    timestamps, keys, values, headers, record_from, base_offset, batch_bytes, batch_records, stop_bytes, target, table
):
    """Write the record blocks of checked records `record_from` .. into `target`; (next record, bytes, rows).

    61 bytes are left free in front of each block. No batch begins at or behind `stop_bytes`, nor without a row in
    `table` (BATCH_TABLE): there a row a batch gets position in `target`, size, offsets, times and count, the rest is
    left. `target` has room for `stop_bytes` and a batch, which has at most `batch_bytes` or one record. `base_offset`
    is that of record 0.
    """
    n = len(timestamps)
    has_headers = len(headers[0]) > 0
    i = record_from
    p = np.int64(0)
    rows = 0
    while i < n and p < stop_bytes and rows < len(table):
        start = p
        first = i
        end = start + batch_bytes
        base_timestamp = timestamps[i]
        max_timestamp = np.int64(-1)
        p += HEADER_BYTES
        while i < n and i - first < batch_records:
            time_delta = timestamps[i] - base_timestamp
            length = 1 + varint_bytes(time_delta) + varint_bytes(i - first)
            length += _field_bytes(keys, i) + _field_bytes(values, i)
            length += _headers_bytes(headers, i) if has_headers else 1
            if i > first and p + varint_bytes(length) + length > end:
                break
            p = put_varint(target, p, length)
            target[p] = 0
            p = put_varint(target, p + 1, time_delta)
            p = put_varint(target, p, i - first)
            p = _put_field(target, p, keys, i)
            p = _put_field(target, p, values, i)
            if has_headers:
                p = _put_headers_of(target, p, headers, i)
            else:
                target[p] = 0
                p += 1
            max_timestamp = max(max_timestamp, timestamps[i])
            i += 1
        row = table[rows]
        row.position = start
        row.size_bytes = p - start
        row.base_offset = base_offset + first
        row.last_offset = base_offset + i - 1
        row.base_timestamp_ms = base_timestamp
        row.max_timestamp_ms = max_timestamp
        row.record_count = i - first
        rows += 1
    return i, p, rows


@kernel
def put_headers(target, table):
    """Write the header of each row at its position in `target`, whose block is there, and the row's CRC."""
    for k in range(len(table)):
        row = table[k]
        row.crc = put_header(
            target,
            row.position,
            row,
            row.base_offset,
            row.last_offset,
            np.int64(row.size_bytes),
            np.int64(row.attributes),
            row.base_timestamp_ms,
            row.max_timestamp_ms,
            np.int64(row.record_count),
        )
