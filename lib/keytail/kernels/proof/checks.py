"""Checks a source batch alone, an output batch alone and with its index entries, and the headers of both together.

Each check returns PASSED or a violation (`codes.py`). `next_batch` returns a code and the batch's size; its code may
also be SOURCE_DONE or NEED_SOURCE.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from keytail.kernels import batch_header as v2
from keytail.kernels.jit import kernel
from keytail.kernels.native import crc32c
from keytail.kernels.proof.codes import (
    INDEX_ENTRY,
    INDEX_MISSING,
    NEED_SOURCE,
    OUTPUT_ATTRIBUTES,
    OUTPUT_BASE_TIMESTAMP,
    OUTPUT_CODEC,
    OUTPUT_COUNT,
    OUTPUT_CRC,
    OUTPUT_EMPTY,
    OUTPUT_HORIZON,
    OUTPUT_LAST_OFFSET,
    OUTPUT_LEADER_EPOCH,
    OUTPUT_MAGIC,
    OUTPUT_MAX_TIMESTAMP,
    OUTPUT_ORDER,
    OUTPUT_PRODUCER,
    OUTPUT_RANGE,
    OUTPUT_REBUILT_WHOLE,
    PASSED,
    SOURCE_COUNT,
    SOURCE_CRC,
    SOURCE_CUT,
    SOURCE_DONE,
    SOURCE_MAGIC,
    SOURCE_ORDER,
    SOURCE_SIZE,
    TIME_ENTRY,
    TIME_MISSING,
)
from keytail.kernels.proof.meaning import UNNEEDED, ends_a_producer
from keytail.kernels.proof.state import fail
from keytail.kernels.walk import batch_size, be_16, be_32, be_64, be_u32, same_bytes, wanted_bytes


@register_jitable
def next_batch(source, state):
    """Return (code, size) of the source's next batch: PASSED, SOURCE_DONE, NEED_SOURCE or a violation."""
    p, to, is_all = state.source.at, state.source.to, state.source.is_all != 0
    if p == to and is_all:
        return SOURCE_DONE, np.int64(0)
    size = batch_size(source, p, to, is_all)
    if size == 0:
        state.wanted.bytes = wanted_bytes(source, p, to)
        return NEED_SOURCE, size
    if size < 0:
        return fail(state, SOURCE_CUT if size == -1 else SOURCE_SIZE, p, -1), size
    return PASSED, size


@register_jitable
def _has_its_checksum(data, p, size):
    return np.int64(crc32c(data, p + v2.ATTRIBUTES, size - v2.ATTRIBUTES)) == be_u32(data, p + v2.CRC)


@register_jitable
def check_source(source, p, size, state):
    """Check magic, checksum, order and record count of a source batch; return PASSED or a violation."""
    base = be_64(source, p)
    if source[p + v2.MAGIC] != 2:
        return fail(state, SOURCE_MAGIC, p, base)
    if not _has_its_checksum(source, p, size):
        return fail(state, SOURCE_CRC, p, base)
    delta = be_32(source, p + v2.LAST_OFFSET_DELTA)
    if base <= state.source.last_offset or delta < 0 or base > (1 << 62):
        return fail(state, SOURCE_ORDER, p, base)
    if be_32(source, p + v2.RECORD_COUNT) < 0:
        return fail(state, SOURCE_COUNT, p, base)
    return PASSED


@register_jitable
def check_output(output, p, size, is_copy, indexes, state):
    """Check an output batch and the index entries due for it; return PASSED or a violation.

    `is_copy`: the batch has the same bytes as its source batch, so that its checksum need not be computed again.
    """
    base = be_64(output, p)
    magic = output[p + v2.MAGIC]
    has_records = True
    if magic == 2:
        last, max_timestamp = base + be_32(output, p + v2.LAST_OFFSET_DELTA), be_64(output, p + v2.MAX_TIMESTAMP)
        has_records = be_32(output, p + v2.RECORD_COUNT) != 0
        if not is_copy and not _has_its_checksum(output, p, size):
            return fail(state, OUTPUT_CRC, p, base)
    elif state.rules.keep_magic != 0 and magic < 2:  # the checksum is compared when the source message is known
        last, max_timestamp = base, be_64(output, p + 18) if magic == 1 else np.int64(-1)
    else:
        return fail(state, OUTPUT_MAGIC, p, base)
    if base <= state.output.last_offset or last < base:
        return fail(state, OUTPUT_ORDER, p, base)
    is_too_wide = last - state.output.base_offset > 0x7FFFFFFF
    if base < state.output.base_offset or last >= state.output.next_base or is_too_wide:
        return fail(state, OUTPUT_RANGE, p, base)
    state.output.last_offset = last
    if has_records:
        state.output.newest_ms = max(state.output.newest_ms, max_timestamp)
    return _check_index(p, size, last, max_timestamp, indexes, state)


@register_jitable
def _check_index(p, size, last, max_timestamp, indexes, state):
    """Compare the index entries due for this batch (format/INDEX.md) with the next entries of the index files."""
    due = state.indexes
    if max_timestamp > due.max_timestamp:
        due.max_timestamp = max_timestamp
        due.max_timestamp_offset = last
    if due.since_last_entry > state.rules.interval_bytes:
        at = due.index_at
        if at + 8 > indexes.offsets.shape[0]:
            return fail(state, INDEX_MISSING, at, last)
        same = be_u32(indexes.offsets, at) == last - state.output.base_offset
        if not same or be_u32(indexes.offsets, at + 4) != state.output.position + p:
            return fail(state, INDEX_ENTRY, at, last)
        due.index_at += 8
        code = _check_time_entry(indexes.times, state)
        if code != PASSED:
            return code
        due.since_last_entry = 0
    due.since_last_entry += size
    return PASSED


@register_jitable
def _check_time_entry(times, state):
    due = state.indexes
    if due.max_timestamp <= due.last_time_entry:
        return PASSED
    at = due.time_at
    if at + 12 > times.shape[0]:
        return fail(state, TIME_MISSING, at, due.max_timestamp_offset)
    same = be_64(times, at) == due.max_timestamp
    if not same or be_u32(times, at + 8) != due.max_timestamp_offset - state.output.base_offset:
        return fail(state, TIME_ENTRY, at, due.max_timestamp_offset)
    due.time_at += 12
    due.last_time_entry = due.max_timestamp
    return PASSED


@kernel
def close_time_index(times, state):
    """Check the entry that closes a segment's time index; return PASSED or a violation."""
    return _check_time_entry(times, state)


@register_jitable
def check_fields(source, p, output, q, q_size, state):
    """Check the header fields that every rewrite preserves, and the fields of an emptied batch."""
    base = be_64(source, p)
    if be_32(output, q + v2.LAST_OFFSET_DELTA) != be_32(source, p + v2.LAST_OFFSET_DELTA):
        return fail(state, OUTPUT_LAST_OFFSET, q, base)
    if be_32(output, q + v2.LEADER_EPOCH) != be_32(source, p + v2.LEADER_EPOCH):
        return fail(state, OUTPUT_LEADER_EPOCH, q, base)
    if not same_bytes(output, q + v2.PRODUCER_ID, source, p + v2.PRODUCER_ID, 14):  # producer id, epoch, base sequence
        return fail(state, OUTPUT_PRODUCER, q, base)
    attributes, before = be_16(output, q + v2.ATTRIBUTES), be_16(source, p + v2.ATTRIBUTES)
    if attributes & ~v2.KNOWN_ATTRIBUTES or (attributes ^ before) & v2.PRESERVED_ATTRIBUTES:
        return fail(state, OUTPUT_ATTRIBUTES, q, base)
    count = be_32(output, q + v2.RECORD_COUNT)
    if count < 0:
        return fail(state, OUTPUT_COUNT, q, base)
    if count > 0:
        if (attributes ^ before) & v2.CODEC_MASK:
            return fail(state, OUTPUT_CODEC, q, base)
        return PASSED
    has_codec_or_horizon = attributes & (v2.CODEC_MASK | v2.DELETE_HORIZON) != 0
    emptied = q_size == v2.HEADER_BYTES and be_64(output, q + v2.BASE_TIMESTAMP) == -1 and not has_codec_or_horizon
    newest, newest_before = be_64(output, q + v2.MAX_TIMESTAMP), be_64(source, p + v2.MAX_TIMESTAMP)
    is_lowered = state.rules.erases != 0 and 0 <= newest < newest_before
    if not emptied or (newest != newest_before and not is_lowered):
        return fail(state, OUTPUT_EMPTY, q, base)
    return PASSED


@register_jitable
def check_time_of_empty(source, p, output, q, producers, state):
    """Check the max timestamp of a batch that has no records in the output of an erasure (erase/ERASE.md)."""
    if be_32(output, q + v2.RECORD_COUNT) != 0 or be_16(source, p + v2.ATTRIBUTES) & v2.CONTROL != 0:
        return PASSED
    needed = be_64(source, p + v2.MAX_TIMESTAMP)
    # The time of an active producer's last batch determines when the producer expires.
    if needed > state.output.newest_ms and not (producers.shape[1] > 0 and ends_a_producer(source, p, producers)):
        needed = state.output.newest_ms
    if be_64(output, q + v2.MAX_TIMESTAMP) != needed:
        return fail(state, OUTPUT_EMPTY, q, be_64(source, p))
    return PASSED


@register_jitable
def check_kept(source, output, state):
    """Check the output's header fields that depend on which records of the batch are retained (`state.batch`)."""
    p, q, batch = state.source.at, state.batch.at_output, state.batch
    base, attributes, count = be_64(source, p), be_16(source, p + v2.ATTRIBUTES), be_32(source, p + v2.RECORD_COUNT)
    nulls = batch.has_nulls != 0
    if q < 0:
        return PASSED
    if state.rules.erases != 0 and batch.is_whole == 0:
        is_lowered = count == 0 and be_64(output, q + v2.MAX_TIMESTAMP) != be_64(source, p + v2.MAX_TIMESTAMP)
        if attributes & v2.CONTROL or (batch.kept_count == count and not is_lowered):
            return fail(state, OUTPUT_REBUILT_WHOLE, q, base)
    if batch.is_whole != 0:  # the batch has the same bytes as its source
        if nulls and attributes & v2.DELETE_HORIZON == 0 and state.rules.horizon_ms >= 0:
            return fail(state, OUTPUT_HORIZON, q, base)
        return PASSED
    if batch.kept_count == 0:
        return PASSED
    if attributes & v2.CONTROL:  # a control batch has one marker, which is retained or removed
        if batch.kept_count < count:
            return fail(state, OUTPUT_COUNT, q, base)
        nulls = nulls or batch.meaning == UNNEEDED
    needs_horizon = nulls and attributes & v2.DELETE_HORIZON == 0 and state.rules.by_file_time == 0
    if batch.kept_count == count and not needs_horizon:
        return fail(state, OUTPUT_REBUILT_WHOLE, q, base)
    return _check_times(source, p, output, q, nulls, state)


@register_jitable
def _check_times(source, p, output, q, nulls, state):
    """Check base and maximum timestamp of a rebuilt batch, and its delete horizon."""
    base = be_64(source, p)
    attributes, before = be_16(output, q + v2.ATTRIBUTES), be_16(source, p + v2.ATTRIBUTES)
    horizon = np.int64(-1)
    if state.rules.by_file_time == 0:
        if before & v2.DELETE_HORIZON:
            horizon = be_64(source, p + v2.BASE_TIMESTAMP)
        elif nulls:
            horizon = state.rules.horizon_ms
    if (attributes & v2.DELETE_HORIZON != 0) != (horizon >= 0):
        return fail(state, OUTPUT_HORIZON, q, base)
    if be_64(output, q + v2.BASE_TIMESTAMP) != (horizon if horizon >= 0 else state.batch.first_ms):
        return fail(state, OUTPUT_BASE_TIMESTAMP, q, base)
    newest = be_64(source, p + v2.MAX_TIMESTAMP) if before & v2.LOG_APPEND_TIME else state.batch.newest_ms
    if be_64(output, q + v2.MAX_TIMESTAMP) != newest:
        return fail(state, OUTPUT_MAX_TIMESTAMP, q, base)
    return PASSED
