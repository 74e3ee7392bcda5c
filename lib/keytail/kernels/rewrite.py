"""Decides record by record what is retained, and builds the bytes that replace a batch.

The rules are those of `format/CLEANING.md`: which records are retained, which batches are copied whole, rebuilt,
emptied or dropped, and every field of a rebuilt header.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from keytail.kernels import batch_header as v2
from keytail.kernels.jit import kernel
from keytail.kernels.legacy import MOST_MESSAGE_GROWTH_BYTES, put_message, put_wrapper, wrapper_bytes
from keytail.kernels.native import copy_bytes, crc32c
from keytail.kernels.records import IN_RAW, put_varint, read_varint, varint_bytes

# Rules that decide on the records of a row.
BY_BITS, BY_MAP, BEYOND = 0, 1, 2

# Actions for a row.
DROP, COPY, EMPTY, REBUILD, OPEN = 0, 1, 2, 3, 4

# Counters of `decide_records`.
KEYLESS, FIRST_KEYLESS, TOMBSTONES_EXPIRED = 0, 1, 2

# Codes of `rebuild_blocks`.
OK = 0
NEGATIVE_TIMESTAMP = 40
PRODUCER_FIELDS_INVALID = 41

NOT_EARLIER = -(2**63)

# Bytes of a record besides its body: length, attributes and two deltas at their longest, with room to shift; or of a
# message.
MOST_GROWTH_BYTES = max(30, MOST_MESSAGE_GROWTH_BYTES)



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


@kernel
def note_nulls(records, n, nulls, first_batch):
    """Set the bit of batch `first_batch + row` for every record with a null value (CLEANING.md, "Horizon")."""
    for i in range(n):
        if records[i].value_bytes < 0:
            bit = first_batch + records[i].row
            nulls[bit >> 3] |= np.uint8(1 << (bit & 7))


@kernel
def decide_records(
    records, n, decided_by, first_ordinal, found, latest_offset, tombstones_go, keep, kept, kept_nulls, counters
):
    """Set `keep[i]` for each record, `kept` and `kept_nulls` for each row (CLEANING.md, "Which records stay").

    Of rows decided by bits, only the survivors are among the records. `first_ordinal[row]` is the ordinal of the row's
    first record; `tombstones_go[row]`: the retention of its tombstones has expired.
    """
    previous = np.int64(-1)
    k = np.int64(0)
    for i in range(n):
        record = records[i]
        row = np.int64(record.row)
        if row != previous:
            previous = row
            k = 0
            kept[row] = 0
            kept_nulls[row] = 0
        rule = decided_by[row]
        stays = True
        if rule != BEYOND and record.offset <= latest_offset:
            if record.key_bytes < 0:
                if counters[KEYLESS] == 0:
                    counters[FIRST_KEYLESS] = record.offset
                counters[KEYLESS] += 1
                stays = False
            elif rule == BY_MAP:
                stays = found[i] <= first_ordinal[row] + k
            if stays and record.value_bytes < 0 and tombstones_go[row]:
                stays = False
                counters[TOMBSTONES_EXPIRED] += 1
        keep[i] = 1 if stays else 0
        if stays:
            kept[row] += 1
            if record.value_bytes < 0:
                kept_nulls[row] += 1
        k += 1


@njit(inline="always")
def _copy(target, p, source, q, n):
    """Copy `n` bytes between arrays that do not overlap; return the position after them."""
    copy_bytes(target, p, source, q, n)
    return p + n


@njit(inline="always")
def _move_down(array, p, q, n):
    """Move `n` bytes from `q` down to `p` in the same array; return the position after them."""
    for i in range(n):
        array[p + i] = array[q + i]
    return p + n


@njit
def _put_span(target, p, source, q, end):
    """Copy a varint length, in its shortest form, and its bytes; return (target, source) positions after them."""
    n, q = read_varint(source, q, end)
    n = max(n, -1)
    p = put_varint(target, p, n)
    if n > 0:
        p = _copy(target, p, source, q, n)
        q += n
    return p, q


@njit
def _normalised_body(target, p, source, q, end):
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

    `horizon_ms` is set on batches that keep a null value and have no delete horizon; a negative one is not set.
    `first_ms` is the timestamp of the first retained record if that is in an earlier piece of the batch, else
    NOT_EARLIER. With `by_file_time` no batch has a horizon, even if its source has one (CLEANING.md 16). `blocks` must
    have room for the bodies plus MOST_GROWTH_BYTES per record. `out` is int64[4]: rebuilt rows, bytes used, code, bad
    row. Fields follow CLEANING.md, "Rebuilt batch"; with `keep_magic`, those of magic 0 and 1 follow LEGACY.md 5.
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
        attributes = np.int64(batch.attributes) & 0x3F
        if by_file_time:
            horizon = np.int64(-1)
        elif batch.attributes & 0x40 != 0:
            horizon = np.int64(batch.base_timestamp_ms)
        elif kept_nulls[row] > 0:
            horizon = np.int64(horizon_ms)
        else:
            horizon = np.int64(-1)
        is_old = batch.magic < 2
        keeps = is_old and keep_magic
        if keeps:
            attributes &= 0x0F if batch.magic == 1 else 0x07
            horizon = np.int64(-1)
        if batch.producer_id >= 0 and (
            batch.producer_epoch < 0 or (batch.base_sequence < 0 and not attributes & 0x20)
        ):
            code = PRODUCER_FIELDS_INVALID
            out[3] = row
            break
        base_timestamp = np.int64(-1)
        max_timestamp = np.int64(-1)
        if horizon >= 0:
            attributes |= 0x40
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
                # As Kafka's builder: with magic 1 the distance from the first kept offset, and the wrapper's append
                # time.
                at = np.int64(record.offset) - (base_offset if batch.magic == 1 else np.int64(0))
                if attributes & 0x08:
                    timestamp = np.int64(batch.max_timestamp_ms)
                body = np.int64(record.body_start)
                p = put_message(
                    blocks, p, at, np.int64(batch.magic), attributes & 0x08, timestamp,
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
                p = _copy(blocks, p, a, record.body_start, record.body_bytes)
            else:
                # The length precedes the body but is known last: write the body where the longest prefix would end.
                body_at = p + 5 + 1 + deltas_bytes
                stop = _normalised_body(
                    blocks, body_at, a, record.body_start, record.body_start + record.body_bytes
                )
                length = 1 + deltas_bytes + stop - body_at
                shift = 5 - varint_bytes(length)
                p = put_varint(blocks, p, length)
                blocks[p] = 0
                p = put_varint(blocks, p + 1, time_delta)
                p = put_varint(blocks, p, offset_delta)
                p = _move_down(blocks, p, p + shift, stop - body_at)
        if code != OK:
            break
        if batch.attributes & 0x08:
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


@njit(inline="always")
def _put_be(a, p, value, n):
    v = np.uint64(value)
    for i in range(n):
        a[p + i] = np.uint8((v >> np.uint64(8 * (n - 1 - i))) & np.uint64(0xFF))


@njit
def put_header(
    a, p, batch, base_offset, last_offset, total, attributes, base_timestamp, max_timestamp, record_count
):
    """Write a header before the block `a[p + 61:p + total]`; return its CRC. `batch` gives epochs and producer."""
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


@kernel
def assembled_bytes(table, action, row_from, row_to, rebuilt, n_rebuilt):
    """Return how many bytes `assemble` will write for these rows."""
    total = np.int64(0)
    for row in range(row_from, row_to):
        if action[row] == COPY:
            total += table[row].size_bytes
        elif action[row] == EMPTY:
            total += v2.HEADER_BYTES
    for k in range(n_rebuilt):
        total += _header_bytes(rebuilt[k].magic) + rebuilt[k].block_bytes
    return total


@njit
def _header_bytes(magic):
    return v2.HEADER_BYTES if magic == 2 else wrapper_bytes(magic)


@kernel
def assemble(
    raw,
    stride_position,
    table,
    action,
    row_from,
    row_to,
    blocks,
    packed,
    rebuilt,
    target,
    at,
    position,
    new_table,
):
    """Write the surviving batches of rows `row_from` .. `row_to` to `target[at:]`; return (bytes, rows of `new_table`).

    `position` is the byte position of `target[at]` in the new segment. Copied batches keep every byte; emptied and
    rebuilt ones follow CLEANING.md, "Rebuilt batch" and "Emptied batch"; a rebuilt one that keeps its magic, 0 or 1, is
    a message around others.
    """
    p = at
    rows = 0
    k = 0
    row = row_from
    while row < row_to:
        what = action[row]
        if what == DROP:
            row += 1
            continue
        batch = table[row]
        new = new_table[rows]
        new.position = position + p - at
        new.base_offset = batch.base_offset
        new.last_offset = batch.last_offset
        new.leader_epoch = batch.leader_epoch
        new.producer_id = batch.producer_id
        new.producer_epoch = batch.producer_epoch
        new.base_sequence = batch.base_sequence
        new.control_type = batch.control_type
        new.coordinator_epoch = batch.coordinator_epoch
        new.magic = 2
        rows += 1
        if what == COPY:
            new.magic = batch.magic
            size = np.int64(batch.size_bytes)
            p = _copy(target, p, raw, batch.position - stride_position, size)
            new.size_bytes = size
            new.crc = batch.crc
            new.attributes = batch.attributes
            new.base_timestamp_ms = batch.base_timestamp_ms
            new.max_timestamp_ms = batch.max_timestamp_ms
            new.record_count = batch.record_count
        elif what == EMPTY:
            attributes = np.int64(batch.attributes) & 0x38
            new.size_bytes = v2.HEADER_BYTES
            new.attributes = attributes
            new.base_timestamp_ms = -1
            new.max_timestamp_ms = batch.max_timestamp_ms
            new.record_count = 0
            new.crc = put_header(
                target,
                p,
                batch,
                batch.base_offset,
                batch.last_offset,
                v2.HEADER_BYTES,
                attributes,
                -1,
                batch.max_timestamp_ms,
                0,
            )
            p += v2.HEADER_BYTES
        else:
            made = rebuilt[k]
            k += 1
            header = _header_bytes(made.magic)
            size = header + np.int64(made.block_bytes)
            block = blocks if made.where == 0 else packed
            _copy(target, p + header, block, made.block_start, made.block_bytes)
            new.magic = made.magic
            new.size_bytes = size
            new.base_offset = made.base_offset
            new.last_offset = made.last_offset
            new.attributes = made.attributes
            new.base_timestamp_ms = made.base_timestamp_ms
            new.max_timestamp_ms = made.max_timestamp_ms
            new.record_count = made.record_count
            if made.magic < 2:
                new.crc = put_wrapper(
                    target, p, made.last_offset, size, np.int64(made.magic), made.attributes, made.max_timestamp_ms
                )
            else:
                new.crc = put_header(
                    target,
                    p,
                    batch,
                    made.base_offset,
                    made.last_offset,
                    size,
                    np.int64(made.attributes),
                    made.base_timestamp_ms,
                    made.max_timestamp_ms,
                    np.int64(made.record_count),
                )
            p += size
        row += 1
    return p - at, rows
