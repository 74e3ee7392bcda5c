"""Splits columns of records into batches of version 2 and writes them.

There are three steps: `check_records` refuses invalid columns, and records that do not fit into any batch, so
`write_blocks` makes no checks; `put_headers` writes the 61 bytes in front of each block, which may have been compressed
in between. The layout is defined in `format/BATCH.md`; section 6 of that page defines where a batch ends.

A byte column is a tuple (data uint8, offsets int64, valid bool), headers are (offsets int64, keys, values), with empty
offsets if no record has headers.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from keytail.kernels import batch_header as v2
from keytail.kernels.jit import kernel
from keytail.kernels.native import copy_bytes
from keytail.kernels.records import put_varint, varint_bytes
from keytail.kernels.rewriting.headers import put_header

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


# The helpers avoid branches: with an `and` in the first helper, checking a record took 46 ns instead of 4 ns. Numba
# seems to count references to the array arguments of a helper that branches, at every call.


@njit(forceinline=True)
def _span_fits(data, offsets, i):
    return (offsets[i] >= 0) & (offsets[i] <= offsets[i + 1]) & (offsets[i + 1] <= len(data))


@njit(forceinline=True)
def _size(offsets, valid, i):
    """Return the size of a value in bytes, -1 for null."""
    return (offsets[i + 1] - offsets[i] + 1) * np.int64(valid[i]) - 1


@njit(forceinline=True)
def _field_bytes(size):
    """Return the number of bytes of a field: of the varint with its size, and of a value of that size (-1: null)."""
    return varint_bytes(size) + max(size, np.int64(0))


@njit(forceinline=True)
def _put_field(target, p, data, start, size):
    p = put_varint(target, p, size)
    size = max(size, np.int64(0))
    copy_bytes(target, p, data, start, size)
    return p + size


@njit
def _headers_bytes(offsets, key_offsets, key_valid, value_offsets, value_valid, i):
    total = np.int64(varint_bytes(offsets[i + 1] - offsets[i]))
    for j in range(offsets[i], offsets[i + 1]):
        total += _field_bytes(_size(key_offsets, key_valid, j)) + _field_bytes(_size(value_offsets, value_valid, j))
    return total


@njit
def _put_headers_of(
    target, p, offsets, key_data, key_offsets, key_valid, value_data, value_offsets, value_valid, i
):
    p = put_varint(target, p, offsets[i + 1] - offsets[i])
    for j in range(offsets[i], offsets[i + 1]):
        p = _put_field(target, p, key_data, key_offsets[j], _size(key_offsets, key_valid, j))
        p = _put_field(target, p, value_data, value_offsets[j], _size(value_offsets, value_valid, j))
    return p


@njit
def _check_headers(offsets, key_data, key_offsets, key_valid, value_data, value_offsets, i):
    if not 0 <= offsets[i] <= offsets[i + 1] <= len(key_valid):
        return HEADER_OFFSETS
    for j in range(offsets[i], offsets[i + 1]):
        if not key_valid[j]:
            return HEADER_KEY_NULL
        if not _span_fits(key_data, key_offsets, j):
            return HEADER_KEY_OFFSETS
        if not _span_fits(value_data, value_offsets, j):
            return HEADER_VALUE_OFFSETS
    return OK


@kernel
def check_records(timestamps, keys, values, headers, most_bytes):
    """Return (code, row with the error, bytes of the largest batch that contains a single record).

    No record may need a batch of more than `most_bytes`. The offsets of a null must be inside the data, too.
    """
    key_data, key_offsets, key_valid = keys
    value_data, value_offsets, value_valid = values
    header_offsets, header_keys, header_values = headers
    name_data, name_offsets, name_valid = header_keys
    content_data, content_offsets, content_valid = header_values
    largest = np.int64(0)
    has_headers = len(header_offsets) > 0
    for i in range(len(timestamps)):
        if timestamps[i] < -1:
            return NEGATIVE_TIMESTAMP, i, largest
        if not _span_fits(key_data, key_offsets, i):
            return KEY_OFFSETS, i, largest
        if not _span_fits(value_data, value_offsets, i):
            return VALUE_OFFSETS, i, largest
        length = 3 + _field_bytes(_size(key_offsets, key_valid, i))
        length += _field_bytes(_size(value_offsets, value_valid, i))
        if has_headers:
            code = _check_headers(header_offsets, name_data, name_offsets, name_valid, content_data, content_offsets, i)
            if code != OK:
                return code, i, largest
            length += _headers_bytes(header_offsets, name_offsets, name_valid, content_offsets, content_valid, i)
        else:
            length += 1
        size = v2.HEADER_BYTES + varint_bytes(length) + length
        largest = max(largest, size)
        if size > most_bytes:
            return RECORD_TOO_LARGE, i, largest
    return OK, -1, largest


@kernel
def write_blocks(
    timestamps, keys, values, headers, record_from, base_offset, batch_bytes, batch_records, stop_bytes, target, table
):
    """Write the blocks of the checked records, beginning with record `record_from`, to `target`; return (next record,
    bytes, rows).

    61 bytes are left free in front of each block. No batch begins at or after `stop_bytes`, or without a row in `table`
    (BATCH_TABLE): each batch's row receives position in `target`, size, offsets, timestamps and count; the other fields
    are unchanged. `target` has room for `stop_bytes` and a batch, which has at most `batch_bytes` or one record.
    `base_offset` is the offset of record 0.
    """
    key_data, key_offsets, key_valid = keys
    value_data, value_offsets, value_valid = values
    header_offsets, header_keys, header_values = headers
    name_data, name_offsets, name_valid = header_keys
    content_data, content_offsets, content_valid = header_values
    n = len(timestamps)
    has_headers = len(header_offsets) > 0
    i = record_from
    p = np.int64(0)
    rows = 0
    while i < n and p < stop_bytes and rows < len(table):
        start = p
        first = i
        end = start + batch_bytes
        base_timestamp = timestamps[i]
        max_timestamp = np.int64(-1)
        p += v2.HEADER_BYTES
        while i < n and i - first < batch_records:
            time_delta = timestamps[i] - base_timestamp
            length = 1 + varint_bytes(time_delta) + varint_bytes(i - first)
            key_bytes = _size(key_offsets, key_valid, i)
            value_bytes = _size(value_offsets, value_valid, i)
            length += _field_bytes(key_bytes) + _field_bytes(value_bytes)
            if has_headers:
                length += _headers_bytes(header_offsets, name_offsets, name_valid, content_offsets, content_valid, i)
            else:
                length += 1
            if i > first and p + varint_bytes(length) + length > end:
                break
            p = put_varint(target, p, length)
            target[p] = 0
            p = put_varint(target, p + 1, time_delta)
            p = put_varint(target, p, i - first)
            p = _put_field(target, p, key_data, key_offsets[i], key_bytes)
            p = _put_field(target, p, value_data, value_offsets[i], value_bytes)
            if has_headers:
                p = _put_headers_of(
                    target, p, header_offsets, name_data, name_offsets, name_valid,
                    content_data, content_offsets, content_valid, i,
                )  # fmt: skip
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
    """Write the header of each row at its position in `target`, in front of its block, and set the row's CRC."""
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
