"""Encodes the records of neighbouring batches again, as one batch (compact/repack/REPACK.md)."""

from __future__ import annotations

import numpy as np

from keytail.kernels import batch_header as v2
from keytail.kernels.jit import kernel
from keytail.kernels.records import IN_RAW, put_varint, varint_bytes
from keytail.kernels.rewriting.blocks import copy, move_down, normalised_body
from keytail.kernels.rewriting.headers import put_header

# Positions in the state of `encode_rows` (int64). The open batch is the one that is being encoded.
(
    ROW,  # the next row of the chunk
    RECORD,  # the next record of the portion
    LIMIT,  # size of the open batch's block above which no further row joins the batch
    MAX_RECORDS,  # number of records above which no further row joins the open batch
    SOURCES,  # rows in the open batch; 0: no batch is open
    USED,  # bytes in the block of the open batch
    RECORDS,  # records in the open batch
    BASE_OFFSET,
    LAST_OFFSET,
    BASE_TIMESTAMP,
    MAX_TIMESTAMP,
    STATE,
) = range(12)

# Return codes of `encode_rows`.
DONE, CLOSE, COPY = range(3)

NO_LIMIT = 2**62
_MAX_OFFSET_DELTA = 2**31 - 1


@kernel
def encode_rows(raw, arena, where, records, n, table, wanted, joins, end_row, block, state):
    """Add rows of the chunk, from `state[ROW]` to before `end_row`, to the open batch; return the reason for stopping.

    DONE: all rows are added. CLOSE: the next row is not part of the open batch. COPY: no batch is open, and the next
    row is not `wanted`. `records[:n]` are the records of the wanted rows of the portion. `joins[i]`: whether the
    headers of rows i - 1 and i allow them to become one batch. A row with a timestamp below -1 becomes unwanted.
    `block` needs room for all bodies and `blocks.MAX_GROWTH_BYTES` per record, after the bytes that are used.
    """
    row, i = state[ROW], state[RECORD]
    code = DONE
    while row < end_row:
        end = i
        while end < n and records[end].row == row:
            end += 1
        for j in range(i, end):
            if records[j].timestamp_ms < -1:
                wanted[row] = False
        is_open = state[SOURCES] > 0
        batch = table[row]
        if not wanted[row]:
            code = CLOSE if is_open else COPY
            if code == COPY:
                i = end
            break
        if is_open and not (joins[row] and batch.last_offset - state[BASE_OFFSET] <= _MAX_OFFSET_DELTA):
            code = CLOSE
            break
        if not is_open:
            has_horizon = batch.attributes & v2.DELETE_HORIZON != 0
            state[BASE_OFFSET] = batch.base_offset
            state[BASE_TIMESTAMP] = batch.base_timestamp_ms if has_horizon else records[i].timestamp_ms
            state[MAX_TIMESTAMP] = -1
            state[USED] = state[RECORDS] = 0
        base_offset, base_timestamp = state[BASE_OFFSET], state[BASE_TIMESTAMP]
        limit = state[LIMIT] if is_open else NO_LIMIT
        p, newest = state[USED], state[MAX_TIMESTAMP]
        a = raw if where[row] == IN_RAW else arena
        for j in range(i, end):
            if p > limit:
                break
            record = records[j]
            timestamp = np.int64(record.timestamp_ms)
            newest = max(newest, timestamp)
            time_delta, offset_delta = timestamp - base_timestamp, np.int64(record.offset) - base_offset
            deltas_bytes = varint_bytes(time_delta) + varint_bytes(offset_delta)
            start, body_bytes = np.int64(record.body_start), np.int64(record.body_bytes)
            if record.canonical == 1:
                p = put_varint(block, p, 1 + deltas_bytes + body_bytes)
                block[p] = 0
                p = put_varint(block, p + 1, time_delta)
                p = put_varint(block, p, offset_delta)
                p = copy(block, p, a, start, body_bytes)
            else:
                # The length precedes the body but is known last: write the body where the longest prefix would end.
                body_at = p + 5 + 1 + deltas_bytes
                stop = normalised_body(block, body_at, a, start, start + body_bytes)
                length = 1 + deltas_bytes + stop - body_at
                shift = 5 - varint_bytes(length)
                p = put_varint(block, p, length)
                block[p] = 0
                p = put_varint(block, p + 1, time_delta)
                p = put_varint(block, p, offset_delta)
                p = move_down(block, p, p + shift, stop - body_at)
        if is_open and (p > limit or state[RECORDS] + end - i > state[MAX_RECORDS]):
            code = CLOSE
            break
        state[USED], state[MAX_TIMESTAMP] = p, newest
        state[RECORDS] += end - i
        state[LAST_OFFSET] = batch.last_offset
        state[SOURCES] += 1
        row, i = row + 1, end
    state[ROW], state[RECORD] = row, i
    return code


@kernel
def complete(data, size, row, attributes, state):
    """Write the header of the open batch before its block `data[61:size]`, with the epochs and the producer of
    `row[0]`, and set `row[0]` (BATCH_TABLE) to that header."""
    batch = row[0]
    max_timestamp = state[MAX_TIMESTAMP]
    if attributes & v2.LOG_APPEND_TIME != 0:
        max_timestamp = np.int64(batch.max_timestamp_ms)
    batch.crc = put_header(
        data,
        0,
        batch,
        state[BASE_OFFSET],
        state[LAST_OFFSET],
        size,
        attributes,
        state[BASE_TIMESTAMP],
        max_timestamp,
        state[RECORDS],
    )
    batch.size_bytes = size
    batch.attributes = attributes
    batch.last_offset = state[LAST_OFFSET]
    batch.base_timestamp_ms = state[BASE_TIMESTAMP]
    batch.max_timestamp_ms = max_timestamp
    batch.record_count = state[RECORDS]
