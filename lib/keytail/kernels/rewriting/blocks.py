"""Builds the record blocks of batches that lose records: the fields of format/CLEANING.md, "Rebuilt batch"."""

from __future__ import annotations

import numpy as np
from numba import njit

from keytail.kernels import batch_header as v2
from keytail.kernels.jit import kernel
from keytail.kernels.legacy import MAX_MESSAGE_GROWTH_BYTES, put_message
from keytail.kernels.native import copy_bytes
from keytail.kernels.records import IN_RAW, put_varint, read_varint, varint_bytes
from keytail.kernels.rewriting.records import REBUILD

# Codes of `rebuild_blocks`.
OK = 0
NEGATIVE_TIMESTAMP = 40
PRODUCER_FIELDS_INVALID = 41
NOT_EARLIER = -(2**63)

# Maximum bytes of a record besides its body (length, attributes and two deltas at their longest, with room to shift),
# or of a message.
MAX_GROWTH_BYTES = max(30, MAX_MESSAGE_GROWTH_BYTES)

# One row per rebuilt batch: the header fields that differ from the source header.
REBUILT = np.dtype(
    [
        ("block_start", "i8"),  # in the block arena, uncompressed
        ("block_bytes", "i8"),
        ("base_timestamp_ms", "i8"),
        ("max_timestamp_ms", "i8"),
        ("base_offset", "i8"),
        ("last_offset", "i8"),
        ("row", "i4"),
        ("record_count", "i4"),
        ("attributes", "i4"),
        ("where", "i4"),  # 0: block arena, 1: compressed arena
        ("magic", "i4"),
    ],
    align=True,
)


@njit(forceinline=True)
def copy(target, p, source, q, n):
    """Copy `n` bytes between arrays that do not overlap; return the position after the copied bytes."""
    copy_bytes(target, p, source, q, n)
    return p + n


@njit(forceinline=True)
def move_down(array, p, q, n):
    """Move `n` bytes from `q` down to `p` in the same array; return the position after the moved bytes."""
    for i in range(n):
        array[p + i] = array[q + i]
    return p + n


@njit
def _put_span(target, p, source, q, end):
    """Copy a varint length, in its shortest form, and as many bytes; return the positions after them in target and
    source."""
    n, q = read_varint(source, q, end)
    n = max(n, -1)
    p = put_varint(target, p, n)
    if n > 0:
        p = copy(target, p, source, q, n)
        q += n
    return p, q


@njit
def normalised_body(target, p, source, q, end):
    """Write key, value and headers of a checked body with minimal varints and -1 for null; return the end position."""
    p, q = _put_span(target, p, source, q, end)
    p, q = _put_span(target, p, source, q, end)
    count, q = read_varint(source, q, end)
    p = put_varint(target, p, count)
    for _ in range(count):
        p, q = _put_span(target, p, source, q, end)
        p, q = _put_span(target, p, source, q, end)
    return p


@kernel
def rebuild_blocks(
    raw,
    arena,
    where,
    records,
    n,
    keep,
    table,
    action,
    kept,
    kept_nulls,
    horizon_ms,
    first_ms,
    keep_magic,
    by_file_time,
    blocks,
    block_from,
    rebuilt,
    out,
):
    """Write the record blocks of all rows with action REBUILD to `blocks` from `block_from` on.

    `horizon_ms`, if not negative, is set on batches that keep a null value and have no delete horizon. `first_ms` is
    the timestamp of the first retained record if that record is in an earlier piece of the batch, else NOT_EARLIER.
    With `by_file_time` no batch has a horizon, even if its source has one (CLEANING.md 16). `blocks` must have room for
    the bodies plus MAX_GROWTH_BYTES per record. `out` is int64[4]: rebuilt rows, end of the bytes used in `blocks`,
    code, bad row. Fields follow CLEANING.md, "Rebuilt batch"; with `keep_magic`, those of magic 0 and 1 LEGACY.md 5.
    """
    p = block_from
    done = 0
    code = OK
    i = 0
    while i < n and code == OK:
        row = np.int64(records[i].row)
        end = i
        while end < n and records[end].row == row:
            end += 1
        if action[row] != REBUILD:
            i = end
            continue
        batch = table[row]
        new = rebuilt[done]
        attributes = np.int64(batch.attributes) & v2.KNOWN_ATTRIBUTES & ~v2.DELETE_HORIZON
        if by_file_time:
            horizon = np.int64(-1)
        elif batch.attributes & v2.DELETE_HORIZON != 0:
            horizon = np.int64(batch.base_timestamp_ms)
        elif kept_nulls[row] > 0:
            horizon = np.int64(horizon_ms)
        else:
            horizon = np.int64(-1)
        is_old = batch.magic < 2
        keeps = is_old and keep_magic
        if keeps:
            attributes &= v2.CODEC_MASK | v2.LOG_APPEND_TIME if batch.magic == 1 else v2.CODEC_MASK
            horizon = np.int64(-1)
        lacks_sequence = batch.base_sequence < 0 and not attributes & v2.CONTROL
        if batch.producer_id >= 0 and (batch.producer_epoch < 0 or lacks_sequence):
            code = PRODUCER_FIELDS_INVALID
            out[3] = row
            break
        base_timestamp = np.int64(-1)
        max_timestamp = np.int64(-1)
        if horizon >= 0:
            attributes |= v2.DELETE_HORIZON
            base_timestamp = horizon
        first = True
        base_offset = np.int64(batch.base_offset)
        last_offset = np.int64(batch.last_offset)
        new.block_start = p
        a = raw if where[row] == IN_RAW else arena
        for j in range(i, end):
            if keep[j] == 0:
                continue
            record = records[j]
            timestamp = np.int64(record.timestamp_ms)
            if timestamp < -1:
                code = NEGATIVE_TIMESTAMP
                out[3] = row
                break
            if is_old:
                last_offset = np.int64(record.offset)
            if first:
                first = False
                if is_old:
                    base_offset = np.int64(record.offset)
                if horizon < 0:
                    base_timestamp = timestamp if first_ms == NOT_EARLIER else first_ms
            max_timestamp = max(max_timestamp, timestamp)
            if keeps:
                # As in Kafka's builder: with magic 1, inner messages have offsets relative to the first retained
                # message, and the wrapper's append time.
                at = np.int64(record.offset) - (base_offset if batch.magic == 1 else np.int64(0))
                if attributes & v2.LOG_APPEND_TIME:
                    timestamp = np.int64(batch.max_timestamp_ms)
                body = np.int64(record.body_start)
                p = put_message(
                    blocks, p, at, np.int64(batch.magic), attributes & v2.LOG_APPEND_TIME, timestamp,
                    a, body, body + np.int64(record.body_bytes),
                )  # fmt: skip
                continue
            time_delta = timestamp - base_timestamp
            offset_delta = np.int64(record.offset) - base_offset
            deltas_bytes = varint_bytes(time_delta) + varint_bytes(offset_delta)
            if record.canonical == 1:
                p = put_varint(blocks, p, 1 + deltas_bytes + np.int64(record.body_bytes))
                blocks[p] = 0
                p = put_varint(blocks, p + 1, time_delta)
                p = put_varint(blocks, p, offset_delta)
                p = copy(blocks, p, a, record.body_start, record.body_bytes)
            else:
                # The length precedes the body but is known last: write the body where the longest prefix would end.
                body_at = p + 5 + 1 + deltas_bytes
                stop = normalised_body(blocks, body_at, a, record.body_start, record.body_start + record.body_bytes)
                length = 1 + deltas_bytes + stop - body_at
                shift = 5 - varint_bytes(length)
                p = put_varint(blocks, p, length)
                blocks[p] = 0
                p = put_varint(blocks, p + 1, time_delta)
                p = put_varint(blocks, p, offset_delta)
                p = move_down(blocks, p, p + shift, stop - body_at)
        if code != OK:
            break
        if batch.attributes & v2.LOG_APPEND_TIME:
            max_timestamp = batch.max_timestamp_ms
        if keeps and batch.magic == 0:  # inner messages of magic 1 (KAFKA-4298) lose their timestamps
            max_timestamp = np.int64(-1)
        new.block_bytes = p - new.block_start
        new.base_timestamp_ms = base_timestamp
        new.max_timestamp_ms = max_timestamp
        new.base_offset = base_offset
        new.last_offset = last_offset
        new.row = row
        new.record_count = kept[row]
        new.attributes = attributes
        new.where = 0
        new.magic = batch.magic if keeps else 2
        done += 1
        i = end
    out[0] = done
    out[1] = p
    out[2] = code
