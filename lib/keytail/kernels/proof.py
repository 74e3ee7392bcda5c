"""The proof of a compaction, batch by batch: sources and their output are walked in lockstep.

Kernels get windows of the files and return a code when they need more bytes, a decompressed block or a larger table, or
when something is wrong; the caller (`compact/proof/prove.py`) reads, decompresses and raises. The fate of each key's
latest record is noted in the table of `proof_table.py`.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from keytail.kernels import batch_header as v2
from keytail.kernels.jit import kernel
from keytail.kernels.native import copy_bytes, crc32c
from keytail.kernels.opening import NOT_PLAIN, SNAPPY, decompress_plain
from keytail.kernels.proof_markers import ABORT, COMMIT, FIRST_DATA, KIND, OFFSET, OUTPUT, next_marker
from keytail.kernels.proof_table import DROPPED, EXPIRED, KEPT
from keytail.kernels.walk import (
    batch_size,
    be_16,
    be_32,
    be_64,
    be_u32,
    control_type,
    read_record,
    same_bytes,
    same_headers,
    wanted_bytes,
)

# Codes that `step` returns: first what it needs, then what is wrong.
SOURCE_DONE, NEED_SOURCE, NEED_OUTPUT, NEED_SOURCE_BLOCK, NEED_OUTPUT_BLOCK, NEED_NOTES = range(6)
NEED_MARKERS, NEED_NEXT_OUTPUT, NEED_LEGACY = range(6, 9)
FIRST_VIOLATION = 9
(
    SOURCE_CUT,
    SOURCE_SIZE,
    SOURCE_MAGIC,
    SOURCE_CRC,
    SOURCE_ORDER,
    SOURCE_RECORD,
    SOURCE_COUNT,
    OUTPUT_CUT,
    OUTPUT_SIZE,
    OUTPUT_MAGIC,
    OUTPUT_CRC,
    OUTPUT_ORDER,
    OUTPUT_RANGE,
    OUTPUT_UNKNOWN,
    OUTPUT_LAST_OFFSET,
    OUTPUT_LEADER_EPOCH,
    OUTPUT_PRODUCER,
    OUTPUT_ATTRIBUTES,
    OUTPUT_CODEC,
    OUTPUT_BASE_TIMESTAMP,
    OUTPUT_HORIZON,
    OUTPUT_MAX_TIMESTAMP,
    OUTPUT_COUNT,
    OUTPUT_EMPTY,
    OUTPUT_RECORD,
    OUTPUT_EXTRA_RECORD,
    OUTPUT_RECORD_DIFFERS,
    OUTPUT_REBUILT_WHOLE,
    LOST_LAST_BATCH,
    LOST_BEYOND_END,
    LOST_KEYLESS,
    INDEX_ENTRY,
    INDEX_MISSING,
    TIME_ENTRY,
    TIME_MISSING,
    LOST_PRODUCER,
    LOST_OPEN,
    LOST_MARKER,
    LOST_MARKER_EARLY,
    LOST_MARKER_HELD,
    OUTPUT_ABORTED,
    WOULD_LOSE_KEYLESS,
) = range(FIRST_VIOLATION, FIRST_VIOLATION + 42)
LAST_VIOLATION = WOULD_LOSE_KEYLESS

# `state`, int64. The caller sets the first ones; the others are kept between calls.
(
    SOURCE_FROM,
    SOURCE_TO,
    SOURCE_IS_ALL,  # 1: nothing follows SOURCE_TO
    OUTPUT_FROM,
    OUTPUT_TO,
    OUTPUT_IS_ALL,
    OUTPUT_POSITION,  # byte position of the output window in its file
    OUTPUT_BASE,  # base offset of the output segment
    OUTPUT_NUMBER,
    NEXT_OUTPUT_BASE,  # base offset of the next output or segment
    LOG_START,
    MARKERS_KNOWN,
    SOURCE_BLOCK_BYTES,  # of the decompressed block given, -1: none
    OUTPUT_BLOCK_BYTES,
    FIRST_DIRTY,
    END_OFFSET,
    FIRST_UNCLEANABLE,
    NOW_MS,
    HORIZON_MS,  # delete horizon for a batch that has none; -1: none
    INTERVAL_BYTES,
    DROP_KEYLESS,
    REMOVAL_LIMIT,  # no tombstone or marker at or above this offset may be removed
    NOTED,  # columns of `pending` in use
    NOTED_KEY_BYTES,  # bytes of `keys` in use
    WANTED_KEY_BYTES,  # room in `keys` that the next batch may need
    SOURCE_LAST_OFFSET,
    OUTPUT_LAST_OFFSET_SEEN,
    OUTPUT_CHECKED,  # 1: the batch at OUTPUT_FROM has passed `_check_output`
    SINCE_LAST_ENTRY,
    MAX_TIMESTAMP,
    MAX_TIMESTAMP_OFFSET,
    LAST_TIME_ENTRY,
    INDEX_AT,
    TIME_AT,
    WANTED_BYTES,
    FAIL_OFFSET,
    FAIL_AT,  # index of the violation in the window
    RECORDS_READ,
    RECORDS_KEPT,
    BATCHES_READ,
    BATCHES_KEPT,
    FATE,  # of the source's batch: see `_settle`
    AT_OUTPUT,  # index of the batch's output in the output window, -1: dropped
    IS_WHOLE,  # 1: source and output are the same bytes
    KEEP_MAGIC,  # 1: rewritten messages of magic 0 or 1 keep their magic
    BY_FILE_TIME,  # 1: FILE_IS_OLD decides on tombstones and markers; no horizon is set or kept (CLEANING.md 16)
    FILE_IS_OLD,  # 1: by the time of the source's file
    STATE_SIZE,
) = range(48)

# Sums of `walk_piece` over the pieces of a batch, int64: the last offset, and of the records kept their number, the
# first timestamp, the largest timestamp, and whether one has no value.
LAST_OFFSET, KEPT_COUNT, FIRST_MS, NEWEST_MS, HAS_NULLS, SUMS = range(6)

# Meaning of a batch's records: values of their keys; nothing (aborted data and markers); a marker without data.
_COUNTS, _SILENT, _UNNEEDED = range(3)
SMALLEST_RECORD_BYTES = 7  # length, attributes, two deltas, null key, null value, no headers


@register_jitable
def _fail(state, code, at, offset):
    state[FAIL_AT] = at
    state[FAIL_OFFSET] = offset
    return code


@register_jitable
def check_source(source, p, size, state):
    base = be_64(source, p)
    if source[p + v2.MAGIC] != 2:
        return _fail(state, SOURCE_MAGIC, p, base)
    if np.int64(crc32c(source, p + v2.ATTRIBUTES, size - v2.ATTRIBUTES)) != be_u32(source, p + v2.CRC):
        return _fail(state, SOURCE_CRC, p, base)
    delta = be_32(source, p + v2.LAST_OFFSET_DELTA)
    if base <= state[SOURCE_LAST_OFFSET] or delta < 0 or base > (1 << 62):
        return _fail(state, SOURCE_ORDER, p, base)
    if be_32(source, p + v2.RECORD_COUNT) < 0:
        return _fail(state, SOURCE_COUNT, p, base)
    return 0


@register_jitable
def _check_index(p, size, last, max_timestamp, state, index, time_index):
    """Compare the index entries due for this batch (format/INDEX.md) with the next ones of the files."""
    if max_timestamp > state[MAX_TIMESTAMP]:
        state[MAX_TIMESTAMP] = max_timestamp
        state[MAX_TIMESTAMP_OFFSET] = last
    if state[SINCE_LAST_ENTRY] > state[INTERVAL_BYTES]:
        at = state[INDEX_AT]
        if at + 8 > index.shape[0]:
            return _fail(state, INDEX_MISSING, at, last)
        same = be_u32(index, at) == last - state[OUTPUT_BASE]
        if not same or be_u32(index, at + 4) != state[OUTPUT_POSITION] + p:
            return _fail(state, INDEX_ENTRY, at, last)
        state[INDEX_AT] += 8
        code = _check_time_entry(state, time_index)
        if code != 0:
            return code
        state[SINCE_LAST_ENTRY] = 0
    state[SINCE_LAST_ENTRY] += size
    return 0


@register_jitable
def _check_time_entry(state, time_index):
    if state[MAX_TIMESTAMP] <= state[LAST_TIME_ENTRY]:
        return 0
    at = state[TIME_AT]
    if at + 12 > time_index.shape[0]:
        return _fail(state, TIME_MISSING, at, state[MAX_TIMESTAMP_OFFSET])
    same = be_64(time_index, at) == state[MAX_TIMESTAMP]
    if not same or be_u32(time_index, at + 8) != state[MAX_TIMESTAMP_OFFSET] - state[OUTPUT_BASE]:
        return _fail(state, TIME_ENTRY, at, state[MAX_TIMESTAMP_OFFSET])
    state[TIME_AT] += 12
    state[LAST_TIME_ENTRY] = state[MAX_TIMESTAMP]
    return 0


@kernel
def close_time_index(state, time_index):
    """Check the entry that closes a segment's time index; return 0 or a violation."""
    return _check_time_entry(state, time_index)


@register_jitable
def _check_output(output, p, size, state, index, time_index):
    base = be_64(output, p)
    magic = output[p + v2.MAGIC]
    if magic == 2:
        last, max_timestamp = base + be_32(output, p + v2.LAST_OFFSET_DELTA), be_64(output, p + v2.MAX_TIMESTAMP)
        if np.int64(crc32c(output, p + v2.ATTRIBUTES, size - v2.ATTRIBUTES)) != be_u32(output, p + v2.CRC):
            return _fail(state, OUTPUT_CRC, p, base)
    elif state[KEEP_MAGIC] != 0 and magic < 2:  # its checksum is compared when its source is known
        last, max_timestamp = base, be_64(output, p + 18) if magic == 1 else np.int64(-1)
    else:
        return _fail(state, OUTPUT_MAGIC, p, base)
    if base <= state[OUTPUT_LAST_OFFSET_SEEN] or last < base:
        return _fail(state, OUTPUT_ORDER, p, base)
    too_far = last - state[OUTPUT_BASE] > 0x7FFFFFFF or last >= state[NEXT_OUTPUT_BASE]
    if base < state[OUTPUT_BASE] or too_far:
        return _fail(state, OUTPUT_RANGE, p, base)
    state[OUTPUT_LAST_OFFSET_SEEN] = last
    return _check_index(p, size, last, max_timestamp, state, index, time_index)


@register_jitable
def _check_fields(source, p, output, q, q_size, state):
    """Check the header fields that every rewrite preserves, and those of an emptied batch."""
    base = be_64(source, p)
    if be_32(output, q + v2.LAST_OFFSET_DELTA) != be_32(source, p + v2.LAST_OFFSET_DELTA):
        return _fail(state, OUTPUT_LAST_OFFSET, q, base)
    if be_32(output, q + v2.LEADER_EPOCH) != be_32(source, p + v2.LEADER_EPOCH):
        return _fail(state, OUTPUT_LEADER_EPOCH, q, base)
    if not same_bytes(output, q + v2.PRODUCER_ID, source, p + v2.PRODUCER_ID, 14):  # producer id, epoch, base sequence
        return _fail(state, OUTPUT_PRODUCER, q, base)
    attributes, before = be_16(output, q + v2.ATTRIBUTES), be_16(source, p + v2.ATTRIBUTES)
    if attributes & ~0x7F or attributes & 0x38 != before & 0x38:
        return _fail(state, OUTPUT_ATTRIBUTES, q, base)
    count = be_32(output, q + v2.RECORD_COUNT)
    if count < 0:
        return _fail(state, OUTPUT_COUNT, q, base)
    if count > 0:
        if attributes & 7 != before & 7:
            return _fail(state, OUTPUT_CODEC, q, base)
        return 0
    emptied = q_size == v2.HEADER_BYTES and attributes & 0x47 == 0 and be_64(output, q + v2.BASE_TIMESTAMP) == -1
    if not emptied or be_64(output, q + v2.MAX_TIMESTAMP) != be_64(source, p + v2.MAX_TIMESTAMP):
        return _fail(state, OUTPUT_EMPTY, q, base)
    return 0


@register_jitable
def _check_times(source, p, output, q, first, newest, nulls, state):
    """Check base and maximum timestamp of a rebuilt batch, and its delete horizon."""
    base = be_64(source, p)
    attributes, before = be_16(output, q + v2.ATTRIBUTES), be_16(source, p + v2.ATTRIBUTES)
    horizon = np.int64(-1)
    if state[BY_FILE_TIME] != 0:
        pass
    elif before & 0x40:
        horizon = be_64(source, p + v2.BASE_TIMESTAMP)
    elif nulls:
        horizon = state[HORIZON_MS]
    if (attributes & 0x40 != 0) != (horizon >= 0):
        return _fail(state, OUTPUT_HORIZON, q, base)
    if be_64(output, q + v2.BASE_TIMESTAMP) != (horizon if horizon >= 0 else first):
        return _fail(state, OUTPUT_BASE_TIMESTAMP, q, base)
    if be_64(output, q + v2.MAX_TIMESTAMP) != (be_64(source, p + v2.MAX_TIMESTAMP) if before & 8 else newest):
        return _fail(state, OUTPUT_MAX_TIMESTAMP, q, base)
    return 0


@register_jitable
def _attributes_of(data, p):
    """Return the attributes byte of the checked record at `p`, after its length; every rewrite sets it to 0."""
    while data[p] >= 128:
        p += 1
    return data[p + 1]


@register_jitable
def _is_over(source, p, state):
    """Return whether the retention of the tombstones in the batch at `p`, or of the marker that it is, has expired."""
    if state[BY_FILE_TIME] != 0:
        return state[FILE_IS_OLD] != 0
    return be_16(source, p + v2.ATTRIBUTES) & 0x40 != 0 and be_64(source, p + v2.BASE_TIMESTAMP) <= state[NOW_MS]


@register_jitable
def _walk(
    source, p, s_data, s, s_end, count, before, output, q, o_data, o, o_end, o_left, whole, fate, state, pending, keys
):  # fmt: skip
    """Walk `count` records of a source batch and `o_left` of its output, and note its keys; return a code and SUMS.

    The batches' headers are at `p` and `q` (-1: dropped), their records in `s_data[s:s_end]` and `o_data[o:o_end]`;
    `whole`: the two batches are the same bytes. `fate`: see `_settle`. `before`: the offset before the records.
    """
    base = be_64(source, p)
    attributes = be_16(source, p + v2.ATTRIBUTES)
    append_time = be_64(source, p + v2.MAX_TIMESTAMP) if attributes & 8 else np.int64(-1)
    base_timestamp = be_64(source, p + v2.BASE_TIMESTAMP)
    expired = _is_over(source, p, state)
    last = base + be_32(source, p + v2.LAST_OFFSET_DELTA)
    o_base_timestamp = np.int64(0)
    if q >= 0 and not whole:
        o_base_timestamp = be_64(output, q + v2.BASE_TIMESTAMP)
    first, newest, nulls, kept_count = np.int64(-1), np.int64(-1), False, np.int64(0)
    no_sums = (before, kept_count, first, newest, nulls)
    t_offset = np.int64(-1)
    t_delta, t_key, t_key_bytes = np.int64(0), np.int64(0), np.int64(0)
    t_value, t_value_bytes, t_headers, t_end = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    noted, key_at = state[NOTED], state[NOTED_KEY_BYTES]
    for _ in range(count):
        delta, offset_delta, key, key_bytes, value, value_bytes, headers, end = read_record(s_data, s, s_end)
        offset = base + offset_delta
        if end < 0 or offset <= before or offset > last:
            return _fail(state, SOURCE_RECORD, p, offset if end >= 0 else before + 1), no_sums
        s, before = end, offset
        kept = whole
        if not whole and q >= 0:
            if t_offset < 0 and o_left > 0:
                t_delta, t_od, t_key, t_key_bytes, t_value, t_value_bytes, t_headers, t_end = read_record(
                    o_data, o, o_end
                )
                if t_end >= 0 and _attributes_of(o_data, o) != 0:
                    t_end = np.int64(-1)
                if t_end < 0 or base + t_od < offset:
                    code = OUTPUT_RECORD if t_end < 0 else OUTPUT_EXTRA_RECORD
                    return _fail(state, code, q, offset if t_end < 0 else base + t_od), no_sums
                t_offset = base + t_od
                o = t_end
                o_left -= 1
            if t_offset == offset:
                kept = True
                t_offset = np.int64(-1)
                timestamp = append_time if attributes & 8 else base_timestamp + delta
                # A rewrite gives records of an append-time batch the append time, and nulls the length -1.
                same = timestamp == o_base_timestamp + t_delta
                same = same and max(key_bytes, -1) == t_key_bytes
                same = same and max(value_bytes, -1) == t_value_bytes
                if key_bytes > 0:
                    same = same and same_bytes(s_data, key, o_data, t_key, key_bytes)
                if value_bytes > 0:
                    same = same and same_bytes(s_data, value, o_data, t_value, value_bytes)
                if not same or not same_headers(s_data, headers, end, o_data, t_headers, t_end):
                    return _fail(state, OUTPUT_RECORD_DIFFERS, q, offset), no_sums
                if kept_count == 0:
                    first = timestamp
                newest = max(newest, timestamp)
        if kept:
            kept_count += 1
            nulls = nulls or value_bytes < 0
        may_go = value_bytes < 0 and expired and offset < state[REMOVAL_LIMIT]
        if fate != _COUNTS or (state[MARKERS_KNOWN] != 0 and offset < state[LOG_START]):
            pass  # not a value of its key, or one that is not served to consumers
        elif offset >= state[END_OFFSET]:
            if not kept:
                return _fail(state, LOST_BEYOND_END, p, offset), no_sums
        elif key_bytes < 0:
            if not kept and state[DROP_KEYLESS] == 0:
                return _fail(state, LOST_KEYLESS, p, offset), no_sums
        elif offset < state[FIRST_DIRTY] and (kept or may_go):
            pass  # of the clean section, only removals that the dirty section must justify are noted
        else:
            copy_bytes(keys, key_at, s_data, key, key_bytes)
            pending[0, noted] = key_at
            key_at += key_bytes
            pending[1, noted] = key_bytes
            pending[2, noted] = offset
            became = KEPT if kept else DROPPED
            if not kept and may_go:
                became = EXPIRED
            pending[3, noted] = became
            noted += 1
    if s != s_end:
        return _fail(state, SOURCE_COUNT, p, base), no_sums
    state[NOTED], state[NOTED_KEY_BYTES] = noted, key_at
    state[RECORDS_READ] += count
    state[RECORDS_KEPT] += kept_count
    if t_offset >= 0 or o_left > 0:
        return _fail(state, OUTPUT_EXTRA_RECORD, q, t_offset if t_offset >= 0 else last + 1), no_sums
    if q >= 0 and not whole and o != o_end:
        return _fail(state, OUTPUT_COUNT, q, base), no_sums
    return 0, (before, kept_count, first, newest, nulls)


@register_jitable
def _check_kept(source, p, output, q, whole, fate, kept_count, first, newest, nulls, state):
    """Check the output's header fields that depend on its `kept_count` kept records; return a code."""
    base, attributes, count = be_64(source, p), be_16(source, p + v2.ATTRIBUTES), be_32(source, p + v2.RECORD_COUNT)
    if q < 0:
        return 0
    if whole:
        if nulls and attributes & 0x40 == 0 and state[HORIZON_MS] >= 0:
            return _fail(state, OUTPUT_HORIZON, q, base)
        return 0
    if kept_count == 0:
        return 0
    if attributes & 0x20:
        if kept_count < count:
            return _fail(state, OUTPUT_COUNT, q, base)
        nulls = nulls or fate == _UNNEEDED
    needs_horizon = nulls and attributes & 0x40 == 0 and state[BY_FILE_TIME] == 0
    if kept_count == count and not needs_horizon:
        return _fail(state, OUTPUT_REBUILT_WHOLE, q, base)
    return _check_times(source, p, output, q, first, newest, nulls, state)


@register_jitable
def _settle(source, p, size, output, q, markers, state):
    """Return (code, fate) of a transactional or control batch, whose output is at `q` (-1: dropped).

    Checks the output against the outcome of the transaction, and updates `markers`.
    """
    base, last = be_64(source, p), be_64(source, p) + be_32(source, p + v2.LAST_OFFSET_DELTA)
    attributes, producer = be_16(source, p + v2.ATTRIBUTES), be_64(source, p + v2.PRODUCER_ID)
    count = be_32(source, p + v2.RECORD_COUNT)
    kept = np.int64(0) if q < 0 else be_32(output, q + v2.RECORD_COUNT)
    if attributes & 0x20 == 0:
        if last < state[LOG_START]:  # not served to consumers; Kafka treats aborted data there as committed
            return 0, _SILENT
        row = next_marker(markers, producer, last + 1)
        if row < 0:
            if q < 0 or (count > 0 and kept == 0):
                return _fail(state, LOST_OPEN, p, base), _COUNTS
            return 0, _COUNTS
        if markers[row, FIRST_DATA] < 0:
            markers[row, FIRST_DATA] = base
        if markers[row, KIND] != ABORT:
            return 0, _COUNTS
        if kept > 0:
            return _fail(state, OUTPUT_ABORTED, q, base), _SILENT
        return 0, _SILENT
    if count == 0:
        return 0, _SILENT
    kind = control_type(source, p, size)
    if kind not in (ABORT, COMMIT):
        if kept == 0:
            return _fail(state, LOST_MARKER, p, base), _SILENT
        return 0, _SILENT
    row = next_marker(markers, producer, base)
    if row < 0 or markers[row, OFFSET] != base:
        return _fail(state, SOURCE_ORDER, p, base), _SILENT
    has_data = markers[row, FIRST_DATA] >= 0 and base >= state[LOG_START]
    if kept > 0:
        markers[row, OUTPUT] = state[OUTPUT_NUMBER]
    elif has_data:
        return _fail(state, LOST_MARKER, p, base), _SILENT
    elif not _is_over(source, p, state):
        return _fail(state, LOST_MARKER_EARLY, p, base), _SILENT
    elif base >= state[REMOVAL_LIMIT]:
        return _fail(state, LOST_MARKER_HELD, p, base), _SILENT
    return 0, _SILENT if has_data else _UNNEEDED


@register_jitable
def _ends_a_producer(source, p, producers):
    """Return whether the state of an active producer depends on this batch (`producers`: id, last offset, epoch)."""
    producer = be_64(source, p + v2.PRODUCER_ID)
    if producer < 0:
        return False
    at = np.searchsorted(producers[0], producer)
    if at == producers.shape[1] or producers[0, at] != producer:
        return False
    if producers[1, at] >= 0:
        return producers[1, at] == be_64(source, p) + be_32(source, p + v2.LAST_OFFSET_DELTA)
    return be_16(source, p + v2.ATTRIBUTES) & 0x20 != 0 and be_16(source, p + v2.PRODUCER_EPOCH) == producers[2, at]


@register_jitable
def _output_at(output, state, index, time_index):
    """Return (code, size) of the output's current batch, which is checked once; size 0: the output has no more."""
    q, to, is_all = state[OUTPUT_FROM], state[OUTPUT_TO], state[OUTPUT_IS_ALL] != 0
    if q == to and is_all:
        return 0, np.int64(0)
    size = batch_size(output, q, to, is_all)
    if size == 0:
        state[WANTED_BYTES] = wanted_bytes(output, q, to)
        return NEED_OUTPUT, size
    if size < 0:
        return _fail(state, OUTPUT_CUT if size == -1 else OUTPUT_SIZE, q, -1), size
    if state[OUTPUT_CHECKED] == 0:
        code = _check_output(output, q, size, state, index, time_index)
        if code != 0:
            return code, size
        state[OUTPUT_CHECKED] = 1
    return 0, size


@kernel
def step(
    source, output, s_block, o_block, index, time_index, pending, keys, markers, producers, tools, state
):  # fmt: skip
    """Prove as many source batches as the windows contain; return a code from the list above.

    Keys are noted in `pending` (position in `keys`, length, offset, fate); the caller puts them into the table: all of
    them, in this order, when NEED_NOTES is returned, and at the end. Plain blocks are decompressed by `tools` into
    `s_block` and `o_block`; the caller puts the other ones there for NEED_SOURCE_BLOCK and NEED_OUTPUT_BLOCK.
    """
    code = 0
    while True:
        p, to = state[SOURCE_FROM], state[SOURCE_TO]
        if p == to and state[SOURCE_IS_ALL] != 0:
            code = SOURCE_DONE
            break
        size = batch_size(source, p, to, state[SOURCE_IS_ALL] != 0)
        if size <= 0:
            if size == 0:
                state[WANTED_BYTES] = wanted_bytes(source, p, to)
                code = NEED_SOURCE
            else:
                code = _fail(state, SOURCE_CUT if size == -1 else SOURCE_SIZE, p, -1)
            break
        code, q_size = _output_at(output, state, index, time_index)
        if code != 0:
            break
        if source[p + v2.MAGIC] < 2:
            code = NEED_LEGACY
            break
        opened = state[SOURCE_BLOCK_BYTES] >= 0
        if not opened:
            code = check_source(source, p, size, state)
            if code != 0:
                break
        q = state[OUTPUT_FROM]
        base, last = be_64(source, p), be_64(source, p) + be_32(source, p + v2.LAST_OFFSET_DELTA)
        if base >= state[NEXT_OUTPUT_BASE]:
            code = NEED_NEXT_OUTPUT if q_size == 0 else _fail(state, OUTPUT_UNKNOWN, q, be_64(output, q))
            break
        if q_size == 0:
            q = np.int64(-1)
        elif be_64(output, q) < base:
            code = _fail(state, OUTPUT_UNKNOWN, q, be_64(output, q))
            break
        elif be_64(output, q) > base:
            q = np.int64(-1)
        if q < 0 and last + 1 == state[FIRST_UNCLEANABLE] and state[BY_FILE_TIME] == 0:
            code = _fail(state, LOST_LAST_BATCH, p, base)
            break
        if q < 0 and producers.shape[1] > 0 and _ends_a_producer(source, p, producers):
            code = _fail(state, LOST_PRODUCER, p, base)
            break
        if q >= 0 and output[q + v2.MAGIC] != 2:
            code = _fail(state, OUTPUT_MAGIC, q, base)
            break
        whole = q >= 0 and size == q_size and same_bytes(source, p, output, q, size)
        if q >= 0 and not whole:
            code = _check_fields(source, p, output, q, q_size, state)
            if code != 0:
                break
        fate = _COUNTS
        if be_16(source, p + v2.ATTRIBUTES) & 0x30:
            if state[MARKERS_KNOWN] == 0:
                code = NEED_MARKERS
                break
            code, fate = _settle(source, p, size, output, q, markers, state)
            if code != 0:
                break
        count = be_32(source, p + v2.RECORD_COUNT)
        state[FATE], state[AT_OUTPUT], state[IS_WHOLE] = fate, q, whole
        compressed = be_16(source, p + v2.ATTRIBUTES) & 7 != 0 and count > 0
        o_compressed = q >= 0 and not whole and be_16(output, q + v2.ATTRIBUTES) & 7 != 0
        if compressed and not opened:
            codec = be_16(source, p + v2.ATTRIBUTES) & 7
            n = np.int64(NOT_PLAIN)
            if codec != SNAPPY:  # its decoder is keytail's own and the writer's: an error would affect both
                n = decompress_plain(tools, codec, source, p + v2.HEADER_BYTES, size - v2.HEADER_BYTES, s_block, 0)
            if n < 0:
                code = NEED_SOURCE_BLOCK
                break
            state[SOURCE_BLOCK_BYTES] = n
        if o_compressed and state[OUTPUT_BLOCK_BYTES] < 0:
            codec = be_16(output, q + v2.ATTRIBUTES) & 7
            n = decompress_plain(tools, codec, output, q + v2.HEADER_BYTES, q_size - v2.HEADER_BYTES, o_block, 0)
            if n < 0:
                code = NEED_OUTPUT_BLOCK
                break
            state[OUTPUT_BLOCK_BYTES] = n
        s_data, s, s_end = source, p + v2.HEADER_BYTES, p + size
        if compressed:
            s_data, s, s_end = s_block, np.int64(0), state[SOURCE_BLOCK_BYTES]
        if count > (s_end - s) // SMALLEST_RECORD_BYTES:
            code = _fail(state, SOURCE_COUNT, p, base)
            break
        if count > pending.shape[1] - state[NOTED] or s_end - s > keys.shape[0] - state[NOTED_KEY_BYTES]:
            state[WANTED_BYTES] = count
            state[WANTED_KEY_BYTES] = s_end - s
            code = NEED_NOTES
            break
        o_data, o, o_end = output, q + v2.HEADER_BYTES, q + q_size
        if o_compressed:
            o_data, o, o_end = o_block, np.int64(0), state[OUTPUT_BLOCK_BYTES]
        o_left = be_32(output, q + v2.RECORD_COUNT) if q >= 0 and not whole else np.int64(0)
        code, sums = _walk(
            source, p, s_data, s, s_end, count, base - 1, output, q, o_data, o, o_end, o_left, whole, fate, state,
            pending, keys,
        )  # fmt: skip
        if code != 0:
            break
        _, kept_count, first, newest, nulls = sums
        code = _check_kept(source, p, output, q, whole, fate, kept_count, first, newest, nulls, state)
        if code != 0:
            break
        _pass_batch(source, p, output, q, state)
    return code


@register_jitable
def _pass_batch(source, p, output, q, state):
    """Move on to the batches after a proven source batch and its output."""
    state[SOURCE_BLOCK_BYTES] = -1
    state[OUTPUT_BLOCK_BYTES] = -1
    state[SOURCE_LAST_OFFSET] = be_64(source, p) + be_32(source, p + v2.LAST_OFFSET_DELTA)
    state[SOURCE_FROM] = p + be_32(source, p + v2.BATCH_LENGTH) + v2.LENGTH_PREFIX_BYTES
    state[BATCHES_READ] += 1
    if q >= 0:
        state[OUTPUT_FROM] = q + be_32(output, q + v2.BATCH_LENGTH) + v2.LENGTH_PREFIX_BYTES
        state[OUTPUT_CHECKED] = 0
        state[BATCHES_KEPT] += 1


@kernel
def walk_piece(
    source, s_data, s_end, count, output, o_data, o_end, o_count, pending, keys, state, sums
):  # fmt: skip
    """Prove records `s_data[:s_end]` of the source batch for which `step` needed a block or notes; return a code.

    `o_data[:o_end]` contains the records of its output in their range of offsets. `sums` contains the sums of the
    pieces before, and is updated.
    """
    p, q, whole = state[SOURCE_FROM], state[AT_OUTPUT], state[IS_WHOLE] != 0
    code, found = _walk(
        source, p, s_data, np.int64(0), s_end, count, sums[LAST_OFFSET], output, q, o_data, np.int64(0), o_end,
        o_count, whole, state[FATE], state, pending, keys,
    )  # fmt: skip
    if code == 0:
        before, kept_count, first, newest, nulls = found
        sums[LAST_OFFSET] = before
        if sums[KEPT_COUNT] == 0:
            sums[FIRST_MS] = first
        sums[KEPT_COUNT] += kept_count
        sums[NEWEST_MS] = max(sums[NEWEST_MS], newest)
        if nulls:
            sums[HAS_NULLS] = 1
    return code


@kernel
def close_pieces(source, output, state, sums):
    """Check the header fields of a batch whose records were all walked, and move on; return a code."""
    p, q = state[SOURCE_FROM], state[AT_OUTPUT]
    code = _check_kept(
        source, p, output, q, state[IS_WHOLE] != 0, state[FATE], sums[KEPT_COUNT], sums[FIRST_MS], sums[NEWEST_MS],
        sums[HAS_NULLS] != 0, state,
    )  # fmt: skip
    if code == 0:
        _pass_batch(source, p, output, q, state)
    return code


@kernel
def end_of_output(output, state):
    """Return the code of an output whose sources are all read: 0, NEED_OUTPUT, or OUTPUT_UNKNOWN for an extra batch."""
    if state[OUTPUT_FROM] == state[OUTPUT_TO]:
        return 0 if state[OUTPUT_IS_ALL] != 0 else NEED_OUTPUT
    q = state[OUTPUT_FROM]
    return _fail(state, OUTPUT_UNKNOWN, q, be_64(output, q) if state[OUTPUT_TO] - q >= 8 else np.int64(-1))


@kernel
def read_records(block, spans):
    """Return whether `block` is exactly as many records as `spans` has rows, with attributes 0 and without headers.

    Each row receives timestamp delta, offset delta, and start and length of key and value.
    """
    p = np.int64(0)
    for i in range(spans.shape[0]):
        if p >= block.shape[0]:
            return False
        time, offset, key, key_bytes, value, value_bytes, headers, end = read_record(block, p, block.shape[0])
        if end < 0 or end - headers != 1 or _attributes_of(block, p) != 0:
            return False
        spans[i, 0], spans[i, 1] = time, offset
        spans[i, 2], spans[i, 3] = key, key_bytes
        spans[i, 4], spans[i, 5] = value, value_bytes
        p = end
    return p == block.shape[0]
