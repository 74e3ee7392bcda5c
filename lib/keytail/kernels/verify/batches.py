"""The inspection of a segment, batch by batch: checksums, order, records, and its index entries.

`inspect` stops at each finding and continues after it when called again; the caller words the finding. It uses the
reader of `walk.py`, not the one that cleaning uses. Facts for later checks are written to `rows` (batches with a
producer id) and `epochs` (runs of batches of one leader epoch).
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from keytail.kernels import batch_header as v2
from keytail.kernels.jit import kernel
from keytail.kernels.legacy import MESSAGE_CRC, check_message
from keytail.kernels.native import crc32c
from keytail.kernels.walk import be_16, be_32, be_64, be_u32, control_type, read_record

# Codes that `inspect` returns: first what it needs, then findings.
DONE, NEED_MORE, NEED_BLOCK, NEED_WRAPPER, NEED_ROOM = range(5)
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
    RECORD_TIMESTAMP,
    MAX_TIMESTAMP_OFF,
    PRODUCER,
    CONTROL_UNREADABLE,
    INDEX_POSITION,
    INDEX_OFFSET,
    TIME_OFFSET,
    TIME_ENTRY,
) = range(FIRST_FINDING, FIRST_FINDING + 19)
ENDS_THE_WALK = (CUT, SIZE, MAGIC)

# `state`, int64.
(
    FROM,
    TO,
    IS_ALL,
    POSITION,  # position of the window's first byte in its file
    STAGE,  # how far the batch at FROM has been inspected
    SEGMENT_BASE,
    NEXT_BASE,  # base offset of the next segment; a very large number for the last one
    LAST_OFFSET,
    MAX_TIMESTAMP,
    INDEX_AT,
    TIME_AT,
    WANTED_BYTES,
    FOUND_OFFSET,
    FOUND_TIMESTAMP,
    BATCHES,
    RECORDS,
    SPOILED,  # set by the caller: `rows` and `epochs` are not written any more
    ROWS,  # how many of `rows` are in use
    RUNS,  # how many of `epochs` are in use
    WITHOUT_EPOCH,  # batches without a leader epoch, or of an old format
    SET_IS_OPEN,  # the offset entry before INDEX_AT has an offset after the batches so far
    LAST_RECORD,  # offset of the batch's last record, or _UNKNOWN
    NAMED_OFFSET,  # offset in the next time entry that is not below the batch; -1: none
    NAMED_TIMESTAMP,  # timestamp of the record at that offset; _NO_SUCH_RECORD; _UNKNOWN if the records were not read
    STATE_SIZE,
) = range(25)
_UNKNOWN, _NO_SUCH_RECORD = -(2**63), -(2**63) + 1

# Columns of `rows`.
(
    ROW_POSITION,
    ROW_BASE,
    ROW_LAST,
    ROW_PRODUCER,
    ROW_EPOCH,
    ROW_SEQUENCE,
    ROW_ATTRIBUTES,
    ROW_COUNT,
    ROW_CONTROL,
    ROW_COLUMNS,
) = range(10)
# Columns of `epochs`: a run of batches of one leader epoch, its first batch, and the base offset of its last.
RUN_EPOCH, RUN_BASE, RUN_POSITION, RUN_LAST_BASE, RUN_COLUMNS = range(5)


_MAX_OFFSET = 2**63 - 1  # no record can have it: the offset after it is not representable
_SMALLEST = 14  # smallest size field of a batch, of any magic
_APPEND_TIME, _TRANSACTIONAL, _CONTROL = 0x08, 0x10, 0x20
_ABORT, _COMMIT = 0, 1
# Stages of a batch.
_CRC, _ORDER, _RANGE, _NEXT, _FIELDS, _RECORDS, INDEX, _TIME = range(8)


@register_jitable
def _walk_records(data, at, end, base, before, last, count, base_timestamp, largest, oldest, state):
    """Return (0 or a finding on the records `data[at:end]`, last offset, largest timestamp, oldest timestamp)."""
    if count < 0 or count > end - at:
        return COUNT, before, largest, oldest
    if state[NAMED_TIMESTAMP] == _UNKNOWN:
        state[NAMED_TIMESTAMP] = _NO_SUCH_RECORD
    for _ in range(count):
        record = read_record(data, at, end)
        delta, timestamp, at = record.offset_delta, base_timestamp + record.timestamp_delta, record.end
        if at < 0:
            state[FOUND_OFFSET] = before + 1
            return RECORD, before, largest, oldest
        if base + delta <= before or base + delta > last:
            state[FOUND_OFFSET] = base + delta
            return RECORD_OFFSET, before, largest, oldest
        before = base + delta
        if before == state[NAMED_OFFSET]:
            state[NAMED_TIMESTAMP] = timestamp
        largest = max(largest, timestamp)
        oldest = min(oldest, timestamp)
    state[RECORDS] += count
    state[LAST_RECORD] = before
    return (0 if at == end else COUNT), before, largest, oldest


@register_jitable
def _check_times(count, largest, oldest, max_timestamp, attributes, state):
    """Return 0 or a finding on the timestamps of a batch, given those of its records."""
    if count == 0 or attributes & _APPEND_TIME:
        return 0
    if oldest < -1:
        state[FOUND_TIMESTAMP] = oldest
        return RECORD_TIMESTAMP
    state[FOUND_TIMESTAMP] = largest
    return 0 if largest == max_timestamp else MAX_TIMESTAMP_OFF


@register_jitable
def _check_records(data, at, end, base, last, count, base_timestamp, max_timestamp, attributes, state):
    """Return 0 or a finding on the records `data[at:end]` of one batch."""
    code, _, largest, oldest = _walk_records(
        data, at, end, base, base - 1, last, count, base_timestamp, np.int64(-1), np.int64(0), state
    )
    return code if code != 0 else _check_times(count, largest, oldest, max_timestamp, attributes, state)


@kernel
def check_block(block, base, last, count, base_timestamp, max_timestamp, attributes, state):
    """Return 0 or a finding on the records of a decompressed block."""
    end = np.int64(block.shape[0])
    return _check_records(block, np.int64(0), end, base, last, count, base_timestamp, max_timestamp, attributes, state)


# Sums of `check_piece` over the pieces of a block, int64: the last offset, the largest and the oldest timestamp.
LAST_SEEN, LARGEST_MS, OLDEST_MS, SUMS = range(4)


@kernel
def check_piece(block, base, last, count, base_timestamp, sums, state):
    """Return 0 or a finding on the `count` records of `block`, one piece of a block that is read in pieces."""
    code, sums[LAST_SEEN], sums[LARGEST_MS], sums[OLDEST_MS] = _walk_records(
        block, np.int64(0), np.int64(block.shape[0]), base, sums[LAST_SEEN], last, count, base_timestamp,
        sums[LARGEST_MS], sums[OLDEST_MS], state,
    )  # fmt: skip
    return code


@kernel
def check_sums(count, max_timestamp, attributes, sums, state):
    """Return 0 or a finding on the timestamps of a block whose pieces were all checked."""
    return _check_times(count, sums[LARGEST_MS], sums[OLDEST_MS], max_timestamp, attributes, state)


@register_jitable
def _check_fields(window, p, size):
    """Return 0 or a finding on the producer fields, or on the marker, of a batch."""
    attributes = be_16(window, p + v2.ATTRIBUTES)
    producer, epoch = be_64(window, p + v2.PRODUCER_ID), be_16(window, p + v2.PRODUCER_EPOCH)
    if producer < 0:
        return PRODUCER if attributes & _TRANSACTIONAL else 0
    if epoch < 0:
        return PRODUCER
    if not attributes & _CONTROL:
        return PRODUCER if be_32(window, p + v2.BASE_SEQUENCE) < 0 else 0
    if be_32(window, p + v2.RECORD_COUNT) < 1:
        return 0
    if control_type(window, p, size) not in (_ABORT, _COMMIT):
        return CONTROL_UNREADABLE
    record = read_record(window, p + v2.HEADER_BYTES, p + size)
    if be_16(window, record.key) < 0 or record.value_bytes < 6 or be_16(window, record.value) < 0:
        return CONTROL_UNREADABLE
    return 0


@register_jitable
def _check_index(position, base, last, index_offsets, index_positions, state):
    """Return 0 or a finding on the next offset index entry, by the batch at `position` (format/INDEX.md, 2 and 8).

    An entry has the position of a batch, and the last offset of that batch or of a later one before the next entry. A
    cleaner before 4.0 writes the last record that it retained, which may be before the batch's last offset.
    """
    i = state[INDEX_AT]
    comes = i < index_positions.shape[0] and index_positions[i] <= position
    if state[SET_IS_OPEN] != 0:
        named = index_offsets[i - 1]
        if comes or named <= last:
            state[SET_IS_OPEN] = 0
            if comes or not _ends_with(named, base, last, state):
                return INDEX_OFFSET
    elif comes:
        state[INDEX_AT] = i + 1
        if index_positions[i] < position:
            return INDEX_POSITION
        if index_offsets[i] > last:
            state[SET_IS_OPEN] = 1
        elif not _ends_with(index_offsets[i], base, last, state):
            return INDEX_OFFSET
    return 0


@register_jitable
def _ends_with(named, base, last, state):
    """Return whether the batch ends with that offset, or with a record at it. Unknown records are accepted."""
    return named == last or (base <= named < last and state[LAST_RECORD] in (named, _UNKNOWN))


@register_jitable
def _check_time(base, last, max_timestamp, rose, is_append_time, times, time_offsets, state):
    """Return 0 or a finding on the next time index entry.

    Its offset is the batch's last offset, or that of the record with the timestamp.
    """
    i = state[TIME_AT]
    if i < times.shape[0] and time_offsets[i] <= last:
        state[TIME_AT] = i + 1
        if time_offsets[i] < base:
            return TIME_OFFSET
        if time_offsets[i] < last and time_offsets[i] == state[NAMED_OFFSET]:
            named = state[NAMED_TIMESTAMP]
            if named == _NO_SUCH_RECORD or not (is_append_time or named in (times[i], _UNKNOWN)):
                return TIME_OFFSET
        if times[i] != max_timestamp or not rose:
            return TIME_ENTRY
    return 0


@register_jitable
def _name_record(base, times, time_offsets, state):
    """Note the offset of the next time index entry that is not below `base`."""
    i = state[TIME_AT]
    while i < times.shape[0] and time_offsets[i] < base:
        i += 1
    state[NAMED_OFFSET] = time_offsets[i] if i < times.shape[0] else -1
    state[NAMED_TIMESTAMP] = _UNKNOWN
    state[LAST_RECORD] = _UNKNOWN


@register_jitable
def _write_down(window, p, size, rows, epochs, state):
    """Write a batch to `rows` and `epochs`, for later comparison of the log with other files."""
    if window[p + v2.MAGIC] < 2:
        state[WITHOUT_EPOCH] += 1
        return
    base = be_64(window, p)
    epoch = be_32(window, p + v2.LEADER_EPOCH)
    run = state[RUNS] - 1
    if epoch == -1:
        state[WITHOUT_EPOCH] += 1
    elif run >= 0 and epochs[run, RUN_EPOCH] == epoch:
        epochs[run, RUN_LAST_BASE] = base
    else:
        epochs[run + 1, RUN_EPOCH] = epoch
        epochs[run + 1, RUN_BASE] = base
        epochs[run + 1, RUN_POSITION] = state[POSITION] + p
        epochs[run + 1, RUN_LAST_BASE] = base
        state[RUNS] += 1
    if be_64(window, p + v2.PRODUCER_ID) >= 0:
        row = rows[state[ROWS]]
        row[ROW_POSITION] = state[POSITION] + p
        row[ROW_BASE] = base
        row[ROW_LAST] = base + be_32(window, p + v2.LAST_OFFSET_DELTA)
        row[ROW_PRODUCER] = be_64(window, p + v2.PRODUCER_ID)
        row[ROW_EPOCH] = be_16(window, p + v2.PRODUCER_EPOCH)
        row[ROW_SEQUENCE] = be_32(window, p + v2.BASE_SEQUENCE)
        row[ROW_ATTRIBUTES] = be_16(window, p + v2.ATTRIBUTES)
        row[ROW_COUNT] = be_32(window, p + v2.RECORD_COUNT)
        is_control = be_16(window, p + v2.ATTRIBUTES) & _CONTROL != 0
        row[ROW_CONTROL] = control_type(window, p, size) if is_control else np.int64(-1)
        state[ROWS] += 1


@kernel
def inspect(window, index_offsets, index_positions, times, time_offsets, rows, epochs, scratch, state):
    """Inspect the batches of the window from FROM on; return a code from the list above. `scratch` is int64[6]."""
    while True:
        p, to = state[FROM], state[TO]
        left = to - p
        if left == 0 and state[IS_ALL] != 0:
            return DONE
        if state[ROWS] == rows.shape[0] or state[RUNS] == epochs.shape[0]:
            return NEED_ROOM
        size = np.int64(0)
        if left >= 12:
            size = be_32(window, p + v2.BATCH_LENGTH) + v2.LENGTH_PREFIX_BYTES
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
        magic = np.int64(window[p + v2.MAGIC])
        state[FOUND_OFFSET] = base
        if magic > 2:
            return MAGIC
        if magic == 2 and size < v2.HEADER_BYTES:
            return SIZE
        max_timestamp = np.int64(-1)
        if magic == 2:
            last = base + be_32(window, p + v2.LAST_OFFSET_DELTA)
            max_timestamp = be_64(window, p + v2.MAX_TIMESTAMP)
        elif magic == 1 and size >= 26:
            max_timestamp = be_64(window, p + 18)
        if state[STAGE] == _CRC:
            state[STAGE] = _ORDER
            crc = np.int64(crc32c(window, p + v2.ATTRIBUTES, size - v2.ATTRIBUTES)) if magic == 2 else np.int64(0)
            if magic == 2 and crc != be_u32(window, p + v2.CRC):
                state[STAGE] = -_ORDER  # its records are not parsed
                return CRC
            if magic < 2:
                check_message(window, p + 12, p + size, scratch)
                if scratch[0] != 0:
                    state[STAGE] = -_ORDER
                    return CRC if scratch[0] == MESSAGE_CRC else RECORD
                if window[p + 17] & 7:
                    return NEED_WRAPPER
                state[RECORDS] += 1
        trusted = state[STAGE] > 0
        stage = abs(state[STAGE])
        sign = 1 if trusted else -1
        if stage == _ORDER:
            state[STAGE] = sign * _RANGE
            stage = _RANGE
            if base <= state[LAST_OFFSET] or last < base or last == _MAX_OFFSET:
                return ORDER
        if stage == _RANGE:
            state[STAGE] = sign * _NEXT
            stage = _NEXT
            if base < state[SEGMENT_BASE] or last - state[SEGMENT_BASE] > 0x7FFFFFFF:
                return SEGMENT_RANGE
        if stage == _NEXT:
            state[STAGE] = sign * _FIELDS
            stage = _FIELDS
            if last >= state[NEXT_BASE]:
                return NEXT_SEGMENT
        if stage == _FIELDS:
            state[STAGE] = sign * _RECORDS
            stage = _RECORDS
            if trusted and magic == 2:
                code = _check_fields(window, p, size)
                if code != 0:
                    return code
        if stage == _RECORDS:
            state[STAGE] = INDEX
            stage = INDEX
            _name_record(base, times, time_offsets, state)
            if trusted and magic == 2:
                count = be_32(window, p + v2.RECORD_COUNT)
                attributes = be_16(window, p + v2.ATTRIBUTES)
                if attributes & 7 > 4:
                    return CODEC
                if attributes & 7 != 0 and count > 0:
                    return NEED_BLOCK
                code = _check_records(
                    window, p + v2.HEADER_BYTES, p + size, base, last, count,
                    be_64(window, p + v2.BASE_TIMESTAMP), max_timestamp, attributes, state,
                )  # fmt: skip
                if code != 0:
                    return code
        # An untrusted header still locates the batch, which is all that an index entry refers to.
        rose = max_timestamp > state[MAX_TIMESTAMP]
        if stage == INDEX:
            code = _check_index(state[POSITION] + p, base, last, index_offsets, index_positions, state)
            if code != 0:
                return code
            state[STAGE] = _TIME
        is_append_time = magic == 2 and be_16(window, p + v2.ATTRIBUTES) & _APPEND_TIME != 0
        largest = max(max_timestamp, state[MAX_TIMESTAMP])
        code = _check_time(base, last, largest, rose, is_append_time, times, time_offsets, state)
        if code != 0:
            return code
        if state[SPOILED] == 0:
            _write_down(window, p, size, rows, epochs, state)
        state[MAX_TIMESTAMP] = max(max_timestamp, state[MAX_TIMESTAMP])
        state[LAST_OFFSET] = max(last, state[LAST_OFFSET])
        state[STAGE] = _CRC
        state[BATCHES] += 1
        state[FROM] = p + size
