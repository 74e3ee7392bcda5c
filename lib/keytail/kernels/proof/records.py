"""Parses the records of a source batch and of its output side by side, compares them, and notes their outcomes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba.extending import register_jitable

from keytail.kernels import batch_header as v2
from keytail.kernels.jit import kernel
from keytail.kernels.proof.codes import (
    LOST_BEYOND_END,
    LOST_KEYLESS,
    LOST_OTHER_KEY,
    NEED_NOTES,
    OUTPUT_COUNT,
    OUTPUT_ERASED_KEY,
    OUTPUT_EXTRA_RECORD,
    OUTPUT_RECORD,
    OUTPUT_RECORD_DIFFERS,
    PASSED,
    SOURCE_COUNT,
    SOURCE_ERASED_KEY,
    SOURCE_RECORD,
    WOULD_LOSE_KEYLESS,
)
from keytail.kernels.proof.key_hash import has_hash, hash_key
from keytail.kernels.proof.meaning import COUNTS, is_over
from keytail.kernels.proof.state import fail
from keytail.kernels.proof.table import DROPPED, EXPIRED, KEPT, PRESENT
from keytail.kernels.walk import NO_RECORD, be_16, be_32, be_64, read_record, same_bytes, same_headers

SMALLEST_RECORD_BYTES = 7  # length, attributes, two deltas, null key, null value, no headers
_NOTE = -1  # `_judge` and `_judge_present` return this for a record whose key is noted

_inlined = register_jitable(forceinline=True)


class Records(NamedTuple):
    """`n` records in `data[at:end]` (uint8)."""

    data: np.ndarray
    at: int
    end: int
    n: int


@_inlined
def check_room(records, p, base, notes, state):
    """Return PASSED, NEED_NOTES if `notes` have no room for the records, or SOURCE_COUNT if there are too many."""
    n_bytes = records.end - records.at
    if records.n > n_bytes // SMALLEST_RECORD_BYTES:
        return fail(state, SOURCE_COUNT, p, base)
    if records.n > notes.records.shape[1] - state.noted.count:
        state.wanted.records = records.n
        return NEED_NOTES
    return PASSED


@_inlined
def walk_records(source, output, records, others, notes, state):
    """Walk `records` of the source's next batch beside `others`, the records of its output in the same range of
    offsets; note the keys.

    The kernel updates `state.batch` and returns a code. `others` are not read if the batch is whole or dropped.
    """
    batch = state.batch
    p, q, is_whole = state.source.at, batch.at_output, batch.is_whole != 0
    compares = q >= 0 and not is_whole
    base, attributes = be_64(source, p), be_16(source, p + v2.ATTRIBUTES)
    last = base + be_32(source, p + v2.LAST_OFFSET_DELTA)
    append_time, base_timestamp = be_64(source, p + v2.MAX_TIMESTAMP), be_64(source, p + v2.BASE_TIMESTAMP)
    other_base_timestamp = be_64(output, q + v2.BASE_TIMESTAMP) if compares else np.int64(0)
    expired = is_over(source, p, state)
    erases = _erases(source, p, state)
    first, newest, nulls = batch.first_ms, batch.newest_ms, batch.has_nulls
    before, kept_count = batch.last_offset, batch.kept_count
    at, other_at, others_left = records.at, others.at, others.n
    other, other_offset = NO_RECORD, np.int64(-1)
    noted = state.noted.count
    for _ in range(records.n):
        record = read_record(records.data, at, records.end)
        offset = base + record.offset_delta
        if record.end < 0 or offset <= before or offset > last:
            return fail(state, SOURCE_RECORD, p, offset if record.end >= 0 else before + 1)
        at, before = record.end, offset
        kept = is_whole
        if compares:
            if other_offset < 0 and others_left > 0:
                other = read_rewritten(others.data, other_at, others.end)
                other_offset = base + other.offset_delta
                if other.end < 0:
                    return fail(state, OUTPUT_RECORD, q, offset)
                if other_offset < offset:
                    return fail(state, OUTPUT_EXTRA_RECORD, q, other_offset)
                other_at = other.end
                others_left -= 1
            if other_offset == offset:
                kept = True
                other_offset = np.int64(-1)
                timestamp = append_time if attributes & v2.LOG_APPEND_TIME else base_timestamp + record.timestamp_delta
                same_time = timestamp == other_base_timestamp + other.timestamp_delta
                if not same_time or not is_same_record(records.data, record, others.data, other):
                    return fail(state, OUTPUT_RECORD_DIFFERS, q, offset)
                if kept_count == 0:
                    first = timestamp
                newest = max(newest, timestamp)
        if kept:
            kept_count += 1
            if record.value_bytes < 0:
                nulls = np.int64(1)
        if erases:
            code = PASSED
            if kept == _is_erased(records.data, record, notes):
                code = OUTPUT_ERASED_KEY if kept else LOST_OTHER_KEY
        else:
            code = _judge(record, offset, kept, expired, state)
        if code == _NOTE:
            action = KEPT if kept else EXPIRED if _may_be_removed(record, offset, expired, state) else DROPPED
            _note(notes, noted, records.data, record, offset, action)
            noted += 1
        elif code != PASSED:
            return fail(state, code, q if code == OUTPUT_ERASED_KEY else p, offset)
    if at != records.end:
        return fail(state, SOURCE_COUNT, p, base)
    if other_offset >= 0 or others_left > 0:
        return fail(state, OUTPUT_EXTRA_RECORD, q, other_offset if other_offset >= 0 else last + 1)
    if compares and other_at != others.end:
        return fail(state, OUTPUT_COUNT, q, base)
    state.noted.count = noted
    state.totals.records_read += records.n
    state.totals.records_kept += kept_count - batch.kept_count
    batch.last_offset, batch.kept_count = before, kept_count
    batch.first_ms, batch.newest_ms, batch.has_nulls = first, newest, nulls
    return PASSED


# Parse.


@register_jitable
def _attributes_of(data, p):
    """Return the attributes byte of the checked record at `p`, which follows the length; every rewrite sets the byte to
    0."""
    while data[p] >= 128:
        p += 1
    return data[p + 1]


@_inlined
def read_rewritten(data, p, end):
    """Return the record that `read_record` returns; a record with attributes is also treated as malformed."""
    record = read_record(data, p, end)
    if record.end >= 0 and _attributes_of(data, p) != 0:
        return NO_RECORD
    return record


# Compare.


@_inlined
def is_same_record(data, record, other_data, other):
    """Return whether key, value and headers of two checked records are the same.

    A rewrite gives nulls the length -1.
    """
    if max(record.key_bytes, -1) != other.key_bytes or max(record.value_bytes, -1) != other.value_bytes:
        return False
    if record.key_bytes > 0 and not same_bytes(data, record.key, other_data, other.key, record.key_bytes):
        return False
    if record.value_bytes > 0 and not same_bytes(data, record.value, other_data, other.value, record.value_bytes):
        return False
    return same_headers(data, record.headers, record.end, other_data, other.headers, other.end)


# Erase.


@_inlined
def _erases(source, p, state):
    """Return whether keys decide which records of the batch at `p` are retained; a control batch is never changed."""
    return state.rules.erases != 0 and be_16(source, p + v2.ATTRIBUTES) & v2.CONTROL == 0


@_inlined
def _is_erased(data, record, notes):
    if record.key_bytes < 0:
        return False
    low, high = hash_key(data, record.key, record.key_bytes, notes.coefficients)
    return has_hash(notes.erased, low, high)


# Note.


@_inlined
def _may_be_removed(record, offset, expired, state):
    """Return whether the record is a tombstone whose retention has expired."""
    return record.value_bytes < 0 and expired and offset < state.rules.removal_limit


@_inlined
def _is_unserved(offset, state):
    return state.knows_markers != 0 and offset < state.rules.log_start


@_inlined
def _judge(record, offset, kept, expired, state):
    """Return PASSED, _NOTE, or a violation for a record that is missing."""
    rules = state.rules
    if state.batch.meaning != COUNTS or _is_unserved(offset, state):
        return PASSED
    if offset >= rules.end_offset:
        return PASSED if kept else LOST_BEYOND_END
    if record.key_bytes < 0:
        return PASSED if kept or rules.drop_keyless != 0 else LOST_KEYLESS
    # In the clean section, only removals that the dirty section must justify are noted.
    if offset < rules.first_dirty and (kept or _may_be_removed(record, offset, expired, state)):
        return PASSED
    return _NOTE


@_inlined
def _judge_present(record, offset, state):
    """Return PASSED, _NOTE, or a violation for a record whose segment a later pass rewrites."""
    if state.batch.meaning != COUNTS or _is_unserved(offset, state) or offset >= state.rules.end_offset:
        return PASSED
    if record.key_bytes < 0:
        return PASSED if state.rules.drop_keyless != 0 else WOULD_LOSE_KEYLESS
    return _NOTE if offset >= state.rules.first_dirty else PASSED


@_inlined
def _note(notes, noted, data, record, offset, outcome):
    low, high = hash_key(data, record.key, record.key_bytes, notes.coefficients)
    notes.hashes[0, noted], notes.hashes[1, noted] = low, high
    notes.records[0, noted], notes.records[1, noted] = offset, outcome


@_inlined
def note_present(source, records, notes, state):
    """Walk records of a batch without an output, and note the records that may justify removals; return a code."""
    p, before = state.source.at, state.batch.last_offset
    base = be_64(source, p)
    last = base + be_32(source, p + v2.LAST_OFFSET_DELTA)
    at, noted = records.at, state.noted.count
    erases = _erases(source, p, state)
    for _ in range(records.n):
        record = read_record(records.data, at, records.end)
        offset = base + record.offset_delta
        if record.end < 0 or offset <= before or offset > last:
            return fail(state, SOURCE_RECORD, p, offset if record.end >= 0 else before + 1)
        at, before = record.end, offset
        if state.rules.erases != 0:
            code = PASSED
            if erases and _is_erased(records.data, record, notes):
                code = SOURCE_ERASED_KEY
        else:
            code = _judge_present(record, offset, state)
        if code == _NOTE:
            _note(notes, noted, records.data, record, offset, PRESENT)
            noted += 1
        elif code != PASSED:
            return fail(state, code, p, offset)
    if at != records.end:
        return fail(state, SOURCE_COUNT, p, base)
    state.batch.last_offset = before
    state.noted.count = noted
    return PASSED


@kernel
def read_records(block, spans):
    """Return whether `block` consists of as many records as `spans` has rows, with attributes 0 and without headers.

    Each row receives timestamp delta, offset delta, and start and length of key and value.
    """
    p = np.int64(0)
    for i in range(spans.shape[0]):
        if p >= block.shape[0]:
            return False
        record = read_rewritten(block, p, block.shape[0])
        if record.end < 0 or record.end - record.headers != 1:
            return False
        spans[i, 0], spans[i, 1] = record.timestamp_delta, record.offset_delta
        spans[i, 2], spans[i, 3] = record.key, record.key_bytes
        spans[i, 4], spans[i, 5] = record.value, record.value_bytes
        p = record.end
    return p == block.shape[0]
