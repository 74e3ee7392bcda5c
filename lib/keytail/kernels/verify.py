"""The inspection of a segment, batch by batch: checksums, order, records, and the index entries it has.

`inspect` stops at each thing worth a finding and goes on behind it when called again; the caller
words it. Uses the reader of `walk.py`, not the one that cleaning uses.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from keytail.kernels.jit import kernel
from keytail.kernels.native import crc32c
from keytail.kernels.walk import be_16, be_32, be_64, be_u32, read_record

# What `inspect` returns: first what it needs, then what it found.
DONE, NEED_MORE, NEED_BLOCK, LEGACY = range(4)
FIRST_FINDING = 10
(
    CUT,
    SIZE,
    MAGIC,
    CRC,
    ORDER,
    SEGMENT_RANGE,
    NEXT_SEGMENT,
    CODEC,
    COUNT,
    RECORD,
    RECORD_OFFSET,
    INDEX_POSITION,
    INDEX_OFFSET,
    TIME_OFFSET,
    TIME_ENTRY,
) = range(FIRST_FINDING, FIRST_FINDING + 15)
ENDS_THE_WALK = (CUT, SIZE, MAGIC)

# `state`, int64.
(
    FROM,
    TO,
    IS_ALL,
    POSITION,  # of the window's first byte in its file
    STAGE,  # how far the batch at FROM has been looked at
    SEGMENT_BASE,
    NEXT_BASE,  # of the next segment; a very large number for the last one
    LAST_OFFSET,
    MAX_TIMESTAMP,
    INDEX_AT,
    TIME_AT,
    WANTED_BYTES,
    FOUND_OFFSET,
    BATCHES,
    RECORDS,
    STATE_SIZE,
) = range(16)

_HEADER = 61
_SMALLEST = 14  # of a batch's stated size, of any magic
# Stages of a batch.
_CRC, _ORDER, _RANGE, _NEXT, _RECORDS, INDEX, _TIME = range(7)


@register_jitable
def _check_records(data, at, end, base, last, count, state):
    """0 or what is wrong with the records `data[at:end]` of one batch."""
    if count < 0 or count > end - at:
        return COUNT
    before = base - 1
    for _ in range(count):
        _t, delta, _k, _kn, _v, _vn, _h, at = read_record(data, at, end)
        if at < 0:
            state[FOUND_OFFSET] = before + 1
            return RECORD
        if base + delta <= before or base + delta > last:
            state[FOUND_OFFSET] = base + delta
            return RECORD_OFFSET
        before = base + delta
    state[RECORDS] += count
    return 0 if at == end else COUNT


@kernel
def check_block(block, base, last, count, state):
    """The same for a decompressed block."""
    return _check_records(block, np.int64(0), np.int64(block.shape[0]), base, last, count, state)


@register_jitable
def _check_index(position, last, index_offsets, index_positions, state):
    i = state[INDEX_AT]
    if i < index_positions.shape[0] and index_positions[i] <= position:
        state[INDEX_AT] = i + 1
        if index_positions[i] < position:
            return INDEX_POSITION
        if index_offsets[i] != last:
            return INDEX_OFFSET
    return 0


@register_jitable
def _check_time(last, max_timestamp, rose, times, time_offsets, state):
    i = state[TIME_AT]
    if i < times.shape[0] and time_offsets[i] <= last:
        state[TIME_AT] = i + 1
        if time_offsets[i] < last:
            return TIME_OFFSET
        if times[i] != max_timestamp or not rose:
            return TIME_ENTRY
    return 0


@kernel
def inspect(window, index_offsets, index_positions, times, time_offsets, state):
    """Look at the batches of the window from FROM on; a code from the list above."""
    while True:
        p, to = state[FROM], state[TO]
        left = to - p
        if left == 0 and state[IS_ALL] != 0:
            return DONE
        size = np.int64(0)
        if left >= 12:
            size = be_32(window, p + 8) + 12
            if size < _SMALLEST + 12:
                state[FOUND_OFFSET] = -1
                return SIZE
        if left < 17 or size > left:
            if state[IS_ALL] != 0:
                state[FOUND_OFFSET] = -1
                return CUT
            state[WANTED_BYTES] = max(np.int64(17), size)
            return NEED_MORE
        base = be_64(window, p)
        last = base
        magic = np.int64(window[p + 16])
        state[FOUND_OFFSET] = base
        if magic > 2:
            return MAGIC
        if magic == 2 and size < _HEADER:
            return SIZE
        max_timestamp = np.int64(-1)
        if magic == 2:
            last = base + be_32(window, p + 23)
            max_timestamp = be_64(window, p + 35)
        elif magic == 1 and size >= 26:
            max_timestamp = be_64(window, p + 18)
        if state[STAGE] == _CRC:
            if magic < 2:
                return LEGACY  # the caller looks at it and sets the next stage
            state[STAGE] = _ORDER
            if np.int64(crc32c(window, p + 21, size - 21)) != be_u32(window, p + 17):
                state[STAGE] = -_ORDER  # its records are not worth parsing
                return CRC
        trusted = state[STAGE] > 0
        stage = abs(state[STAGE])
        sign = 1 if trusted else -1
        if stage == _ORDER:
            state[STAGE] = sign * _RANGE
            stage = _RANGE
            if base <= state[LAST_OFFSET] or last < base:
                return ORDER
        if stage == _RANGE:
            state[STAGE] = sign * _NEXT
            stage = _NEXT
            if base < state[SEGMENT_BASE] or last - state[SEGMENT_BASE] > 0x7FFFFFFF:
                return SEGMENT_RANGE
        if stage == _NEXT:
            state[STAGE] = sign * _RECORDS
            stage = _RECORDS
            if last >= state[NEXT_BASE]:
                return NEXT_SEGMENT
        if stage == _RECORDS:
            state[STAGE] = INDEX
            stage = INDEX
            if trusted and magic == 2:
                count = be_32(window, p + 57)
                codec = be_16(window, p + 21) & 7
                if codec > 4:
                    return CODEC
                if codec != 0 and count > 0:
                    return NEED_BLOCK
                code = _check_records(window, p + _HEADER, p + size, base, last, count, state)
                if code != 0:
                    return code
        # An untrusted header still tells where the batch is, which is all an index entry is about.
        rose = max_timestamp > state[MAX_TIMESTAMP]
        if stage == INDEX:
            code = _check_index(state[POSITION] + p, last, index_offsets, index_positions, state)
            if code != 0:
                if code == INDEX_OFFSET:
                    state[STAGE] = _TIME
                return code
            state[STAGE] = _TIME
        code = _check_time(last, max(max_timestamp, state[MAX_TIMESTAMP]), rose, times, time_offsets, state)
        if code != 0:
            return code
        state[MAX_TIMESTAMP] = max(max_timestamp, state[MAX_TIMESTAMP])
        state[LAST_OFFSET] = max(last, state[LAST_OFFSET])
        state[STAGE] = _CRC
        state[BATCHES] += 1
        state[FROM] = p + size
