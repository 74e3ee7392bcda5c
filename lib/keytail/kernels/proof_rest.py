"""Notes for a proof the records of segments that a later round rewrites: they exist, and justify removals now.

Segments are read one at a time, without outputs; their records are settled in their own round. Codes, `state`, notes
and markers are those of `proof.py`, whose checks of a source are made here as well.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from keytail.kernels import batch_header as v2
from keytail.kernels.jit import kernel
from keytail.kernels.native import copy_bytes
from keytail.kernels.proof import (
    DROP_KEYLESS,
    END_OFFSET,
    FAIL_AT,
    FAIL_OFFSET,
    FIRST_DIRTY,
    LOG_START,
    MARKERS_KNOWN,
    NEED_LEGACY,
    NEED_MARKERS,
    NEED_NOTES,
    NEED_SOURCE,
    NEED_SOURCE_BLOCK,
    NOTED,
    NOTED_KEY_BYTES,
    SMALLEST_RECORD_BYTES,
    SOURCE_BLOCK_BYTES,
    SOURCE_COUNT,
    SOURCE_CUT,
    SOURCE_DONE,
    SOURCE_FROM,
    SOURCE_IS_ALL,
    SOURCE_LAST_OFFSET,
    SOURCE_RECORD,
    SOURCE_SIZE,
    SOURCE_TO,
    WANTED_BYTES,
    WANTED_KEY_BYTES,
    WOULD_LOSE_KEYLESS,
    check_source,
)
from keytail.kernels.proof_markers import ABORT, KIND, next_marker
from keytail.kernels.proof_table import PRESENT
from keytail.kernels.walk import batch_size, be_16, be_32, be_64, read_record, wanted_bytes


@register_jitable
def _fail(state, code, at, offset):
    state[FAIL_AT] = at
    state[FAIL_OFFSET] = offset
    return code


@register_jitable
def _counts(source, p, markers, state):
    """Return whether the records of a transactional or control batch are values of their keys."""
    if be_16(source, p + v2.ATTRIBUTES) & 0x20:
        return False
    last = be_64(source, p) + be_32(source, p + v2.LAST_OFFSET_DELTA)
    if last < state[LOG_START]:
        return False
    row = next_marker(markers, be_64(source, p + v2.PRODUCER_ID), last + 1)
    return row < 0 or markers[row, KIND] != ABORT


@register_jitable
def _note(source, p, data, s, end, count, before, counts, state, pending, keys):
    """Walk `count` records of a batch, `data[s:end]`, after offset `before`; note those that may justify removals.

    Returns a code and the last record's offset.
    """
    base = be_64(source, p)
    last = base + be_32(source, p + v2.LAST_OFFSET_DELTA)
    noted, key_at = state[NOTED], state[NOTED_KEY_BYTES]
    for _ in range(count):
        _, offset_delta, key, key_bytes, _, _, _, after = read_record(data, s, end)
        offset = base + offset_delta
        if after < 0 or offset <= before or offset > last:
            return _fail(state, SOURCE_RECORD, p, offset if after >= 0 else before + 1), before
        s, before = after, offset
        if not counts or offset >= state[END_OFFSET] or (state[MARKERS_KNOWN] != 0 and offset < state[LOG_START]):
            continue
        if key_bytes < 0:
            if state[DROP_KEYLESS] == 0:
                return _fail(state, WOULD_LOSE_KEYLESS, p, offset), before
        elif offset >= state[FIRST_DIRTY]:
            copy_bytes(keys, key_at, data, key, key_bytes)
            pending[0, noted] = key_at
            pending[1, noted] = key_bytes
            pending[2, noted] = offset
            pending[3, noted] = PRESENT
            key_at += key_bytes
            noted += 1
    if s != end:
        return _fail(state, SOURCE_COUNT, p, base), before
    state[NOTED], state[NOTED_KEY_BYTES] = noted, key_at
    return 0, before


@register_jitable
def _pass_batch(source, p, state):
    state[SOURCE_BLOCK_BYTES] = -1
    state[SOURCE_LAST_OFFSET] = be_64(source, p) + be_32(source, p + v2.LAST_OFFSET_DELTA)
    state[SOURCE_FROM] = p + be_32(source, p + v2.BATCH_LENGTH) + v2.LENGTH_PREFIX_BYTES


@kernel
def note_piece(source, data, end, count, pending, keys, markers, state, before):
    """Note the `count` records `data[:end]` of the batch for which `note_rest` needed a block or notes; return a code.

    `before` (int64[1]) is the offset before them, and is set to their last one.
    """
    p = state[SOURCE_FROM]
    counts = be_16(source, p + v2.ATTRIBUTES) & 0x30 == 0 or _counts(source, p, markers, state)
    code, before[0] = _note(source, p, data, np.int64(0), end, count, before[0], counts, state, pending, keys)
    return code


@kernel
def close_noted(source, state):
    """Move on to the batch after one whose records were all noted."""
    _pass_batch(source, state[SOURCE_FROM], state)


@kernel
def note_rest(source, block, pending, keys, markers, state):
    """Note as many batches as the window contains; return SOURCE_DONE, what is needed, or what is wrong."""
    while True:
        p, to, is_all = state[SOURCE_FROM], state[SOURCE_TO], state[SOURCE_IS_ALL] != 0
        if p == to and is_all:
            return SOURCE_DONE
        size = batch_size(source, p, to, is_all)
        if size == 0:
            state[WANTED_BYTES] = wanted_bytes(source, p, to)
            return NEED_SOURCE
        if size < 0:
            return _fail(state, SOURCE_CUT if size == -1 else SOURCE_SIZE, p, -1)
        if source[p + v2.MAGIC] < 2:
            return NEED_LEGACY
        opened = state[SOURCE_BLOCK_BYTES] >= 0
        if not opened:
            code = check_source(source, p, size, state)
            if code != 0:
                return code
        counts = True
        if be_16(source, p + v2.ATTRIBUTES) & 0x30:
            if state[MARKERS_KNOWN] == 0:
                return NEED_MARKERS
            counts = _counts(source, p, markers, state)
        count = be_32(source, p + v2.RECORD_COUNT)
        data, s, end = source, p + v2.HEADER_BYTES, p + size
        if be_16(source, p + v2.ATTRIBUTES) & 7 != 0 and count > 0:
            if not opened:
                return NEED_SOURCE_BLOCK
            data, s, end = block, np.int64(0), state[SOURCE_BLOCK_BYTES]
        if count > (end - s) // SMALLEST_RECORD_BYTES:
            return _fail(state, SOURCE_COUNT, p, be_64(source, p))
        if count > pending.shape[1] - state[NOTED] or end - s > keys.shape[0] - state[NOTED_KEY_BYTES]:
            state[WANTED_BYTES], state[WANTED_KEY_BYTES] = count, end - s
            return NEED_NOTES
        code, _ = _note(source, p, data, s, end, count, be_64(source, p) - 1, counts, state, pending, keys)
        if code != 0:
            return code
        _pass_batch(source, p, state)
