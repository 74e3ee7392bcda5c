"""Inspects a segment batch by batch: checksums, order, records, and index entries.

`inspect` stops at each finding and continues after it when called again; the caller formulates the message. `inspect`
uses the reader of `walk.py`, not the reader that cleaning uses. Facts for later checks are written to `rows` (batches
with a producer id) and `epochs` (runs of batches of one leader epoch).
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from keytail.kernels import batch_header as v2
from keytail.kernels.jit import kernel
from keytail.kernels.legacy import MESSAGE_CRC, check_message
from keytail.kernels.native import crc32c
from keytail.kernels.verify import codes, columns
from keytail.kernels.walk import be_16, be_32, be_64, be_u32, control_type, read_record

_MAX_OFFSET = 2**63 - 1  # no record can have this offset, because the next offset is not representable
_SMALLEST = 14  # smallest size field of a batch, of any magic
_ABORT, _COMMIT = 0, 1
# Stages of a batch.
_CRC, _ORDER, _RANGE, _NEXT, _FIELDS, _RECORDS, _INDEX, _TIME = range(8)


@register_jitable
def _walk_records(data, at, end, base, before, last, count, base_timestamp, largest, oldest, state):
    """Return (0 or a finding on the records `data[at:end]`, last offset, largest timestamp, oldest timestamp)."""
    if count < 0 or count > end - at:
        return codes.COUNT, before, largest, oldest
    if state[columns.NAMED_TIMESTAMP] == columns.UNKNOWN:
        state[columns.NAMED_TIMESTAMP] = columns.NO_SUCH_RECORD
    for _ in range(count):
        record = read_record(data, at, end)
        delta, timestamp, at = record.offset_delta, base_timestamp + record.timestamp_delta, record.end
        if at < 0:
            state[columns.FOUND_OFFSET] = before + 1
            return codes.RECORD, before, largest, oldest
        if base + delta <= before or base + delta > last:
            state[columns.FOUND_OFFSET] = base + delta
            return codes.RECORD_OFFSET, before, largest, oldest
        before = base + delta
        if before == state[columns.NAMED_OFFSET]:
            state[columns.NAMED_TIMESTAMP] = timestamp
        largest = max(largest, timestamp)
        oldest = min(oldest, timestamp)
    state[columns.RECORDS] += count
    state[columns.LAST_RECORD] = before
    return (0 if at == end else codes.COUNT), before, largest, oldest


@register_jitable
def _check_times(count, largest, oldest, max_timestamp, attributes, state):
    """Return 0 or a finding on the timestamps of a batch, given the largest and the oldest timestamp of its records."""
    if count == 0 or attributes & v2.LOG_APPEND_TIME:
        return 0
    if oldest < -1:
        state[columns.FOUND_TIMESTAMP] = oldest
        return codes.RECORD_TIMESTAMP
    state[columns.FOUND_TIMESTAMP] = largest
    return 0 if largest == max_timestamp else codes.MAX_TIMESTAMP_OFF


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


@kernel
def check_piece(block, base, last, count, base_timestamp, sums, state):
    """Return 0 or a finding on the `count` records of `block`, one piece of a block that is read in pieces."""
    code, sums[columns.LAST_SEEN], sums[columns.LARGEST_MS], sums[columns.OLDEST_MS] = _walk_records(
        block, np.int64(0), np.int64(block.shape[0]), base, sums[columns.LAST_SEEN], last, count, base_timestamp,
        sums[columns.LARGEST_MS], sums[columns.OLDEST_MS], state,
    )  # fmt: skip
    return code


@kernel
def check_sums(count, max_timestamp, attributes, sums, state):
    """Return 0 or a finding on the timestamps of a block whose pieces were all checked."""
    return _check_times(count, sums[columns.LARGEST_MS], sums[columns.OLDEST_MS], max_timestamp, attributes, state)


@register_jitable
def _check_fields(window, p, size):
    """Return 0 or a finding on the producer fields, or on the marker, of a batch."""
    attributes = be_16(window, p + v2.ATTRIBUTES)
    producer, epoch = be_64(window, p + v2.PRODUCER_ID), be_16(window, p + v2.PRODUCER_EPOCH)
    if producer < 0:
        return codes.PRODUCER if attributes & v2.TRANSACTIONAL else 0
    if epoch < 0:
        return codes.PRODUCER
    if not attributes & v2.CONTROL:
        return codes.PRODUCER if be_32(window, p + v2.BASE_SEQUENCE) < 0 else 0
    if be_32(window, p + v2.RECORD_COUNT) < 1:
        return 0
    if control_type(window, p, size) not in (_ABORT, _COMMIT):
        return codes.CONTROL_UNREADABLE
    record = read_record(window, p + v2.HEADER_BYTES, p + size)
    if be_16(window, record.key) < 0 or record.value_bytes < 6 or be_16(window, record.value) < 0:
        return codes.CONTROL_UNREADABLE
    return 0


@register_jitable
def _check_index(position, base, last, index_offsets, index_positions, state):
    """Return 0 or a finding on the next offset index entry, given the batch at `position` (format/INDEX.md, 2 and 8).

    An entry has the position of a batch, and the last offset of that batch or of a later batch before the next entry. A
    cleaner before 4.0 writes the offset of the last record that it retained, which may be below the batch's last
    offset.
    """
    i = state[columns.INDEX_AT]
    comes = i < index_positions.shape[0] and index_positions[i] <= position
    if state[columns.SET_IS_OPEN] != 0:
        named = index_offsets[i - 1]
        if comes or named <= last:
            state[columns.SET_IS_OPEN] = 0
            if comes or not _ends_with(named, base, last, state):
                return codes.INDEX_OFFSET
    elif comes:
        state[columns.INDEX_AT] = i + 1
        if index_positions[i] < position:
            return codes.INDEX_POSITION
        if index_offsets[i] > last:
            state[columns.SET_IS_OPEN] = 1
        elif not _ends_with(index_offsets[i], base, last, state):
            return codes.INDEX_OFFSET
    return 0


@register_jitable
def _ends_with(named, base, last, state):
    """Return whether `named` is the last offset of the batch, or the offset of its last record. If the records were not
    read, every offset of the batch is accepted."""
    return named == last or (base <= named < last and state[columns.LAST_RECORD] in (named, columns.UNKNOWN))


@register_jitable
def _check_time(base, last, max_timestamp, rose, is_append_time, times, time_offsets, state):
    """Return 0 or a finding on the next time index entry.

    The offset of an entry is the batch's last offset, or the offset of the record with the timestamp.
    """
    i = state[columns.TIME_AT]
    if i < times.shape[0] and time_offsets[i] <= last:
        state[columns.TIME_AT] = i + 1
        if time_offsets[i] < base:
            return codes.TIME_OFFSET
        if time_offsets[i] < last and time_offsets[i] == state[columns.NAMED_OFFSET]:
            named = state[columns.NAMED_TIMESTAMP]
            if named == columns.NO_SUCH_RECORD or not (is_append_time or named in (times[i], columns.UNKNOWN)):
                return codes.TIME_OFFSET
        if times[i] != max_timestamp or not rose:
            return codes.TIME_ENTRY
    return 0


@register_jitable
def _name_record(base, times, time_offsets, state):
    """Store the offset of the next time index entry that is not below `base` in `state`."""
    i = state[columns.TIME_AT]
    while i < times.shape[0] and time_offsets[i] < base:
        i += 1
    state[columns.NAMED_OFFSET] = time_offsets[i] if i < times.shape[0] else -1
    state[columns.NAMED_TIMESTAMP] = columns.UNKNOWN
    state[columns.LAST_RECORD] = columns.UNKNOWN


@register_jitable
def _write_down(window, p, size, rows, epochs, state):
    """Write a batch to `rows` and `epochs`, for later comparison of the log with other files."""
    if window[p + v2.MAGIC] < 2:
        state[columns.WITHOUT_EPOCH] += 1
        return
    base = be_64(window, p)
    epoch = be_32(window, p + v2.LEADER_EPOCH)
    run = state[columns.RUNS] - 1
    if epoch == -1:
        state[columns.WITHOUT_EPOCH] += 1
    elif run >= 0 and epochs[run, columns.RUN_EPOCH] == epoch:
        epochs[run, columns.RUN_LAST_BASE] = base
    else:
        epochs[run + 1, columns.RUN_EPOCH] = epoch
        epochs[run + 1, columns.RUN_BASE] = base
        epochs[run + 1, columns.RUN_POSITION] = state[columns.POSITION] + p
        epochs[run + 1, columns.RUN_LAST_BASE] = base
        state[columns.RUNS] += 1
    if be_64(window, p + v2.PRODUCER_ID) >= 0:
        row = rows[state[columns.ROWS]]
        row[columns.ROW_POSITION] = state[columns.POSITION] + p
        row[columns.ROW_BASE] = base
        row[columns.ROW_LAST] = base + be_32(window, p + v2.LAST_OFFSET_DELTA)
        row[columns.ROW_PRODUCER] = be_64(window, p + v2.PRODUCER_ID)
        row[columns.ROW_EPOCH] = be_16(window, p + v2.PRODUCER_EPOCH)
        row[columns.ROW_SEQUENCE] = be_32(window, p + v2.BASE_SEQUENCE)
        row[columns.ROW_ATTRIBUTES] = be_16(window, p + v2.ATTRIBUTES)
        row[columns.ROW_COUNT] = be_32(window, p + v2.RECORD_COUNT)
        is_control = be_16(window, p + v2.ATTRIBUTES) & v2.CONTROL != 0
        row[columns.ROW_CONTROL] = control_type(window, p, size) if is_control else np.int64(-1)
        state[columns.ROWS] += 1


@kernel
def inspect(window, index_offsets, index_positions, times, time_offsets, rows, epochs, scratch, state):
    """Inspect the batches of the window from `state[FROM]` on; return a code of codes.py. `scratch` is int64[6]."""
    while True:
        p, to = state[columns.FROM], state[columns.TO]
        left = to - p
        if left == 0 and state[columns.IS_ALL] != 0:
            return codes.DONE
        if state[columns.ROWS] == rows.shape[0] or state[columns.RUNS] == epochs.shape[0]:
            return codes.NEED_ROOM
        size = np.int64(0)
        if left >= 12:
            size = be_32(window, p + v2.BATCH_LENGTH) + v2.LENGTH_PREFIX_BYTES
            if size < _SMALLEST + 12:
                state[columns.FOUND_OFFSET] = -1
                return codes.SIZE
        if left < 17 or size > left:
            if state[columns.IS_ALL] != 0:
                state[columns.FOUND_OFFSET] = -1
                return codes.CUT
            state[columns.WANTED_BYTES] = max(np.int64(17), size)
            return codes.NEED_MORE
        base = be_64(window, p)
        last = base
        magic = np.int64(window[p + v2.MAGIC])
        state[columns.FOUND_OFFSET] = base
        if magic > 2:
            return codes.MAGIC
        if magic == 2 and size < v2.HEADER_BYTES:
            return codes.SIZE
        max_timestamp = np.int64(-1)
        if magic == 2:
            last = base + be_32(window, p + v2.LAST_OFFSET_DELTA)
            max_timestamp = be_64(window, p + v2.MAX_TIMESTAMP)
        elif magic == 1 and size >= 26:
            max_timestamp = be_64(window, p + 18)
        if state[columns.STAGE] == _CRC:
            state[columns.STAGE] = _ORDER
            crc = np.int64(crc32c(window, p + v2.ATTRIBUTES, size - v2.ATTRIBUTES)) if magic == 2 else np.int64(0)
            if magic == 2 and crc != be_u32(window, p + v2.CRC):
                state[columns.STAGE] = -_ORDER  # continue at ORDER without parsing the records
                return codes.CRC
            if magic < 2:
                check_message(window, p + 12, p + size, scratch)
                if scratch[0] != 0:
                    state[columns.STAGE] = -_ORDER
                    return codes.CRC if scratch[0] == MESSAGE_CRC else codes.RECORD
                if window[p + 17] & v2.CODEC_MASK:
                    return codes.NEED_WRAPPER
                state[columns.RECORDS] += 1
        trusted = state[columns.STAGE] > 0
        stage = abs(state[columns.STAGE])
        sign = 1 if trusted else -1
        if stage == _ORDER:
            state[columns.STAGE] = sign * _RANGE
            stage = _RANGE
            if base <= state[columns.LAST_OFFSET] or last < base or last == _MAX_OFFSET:
                return codes.ORDER
        if stage == _RANGE:
            state[columns.STAGE] = sign * _NEXT
            stage = _NEXT
            if base < state[columns.SEGMENT_BASE] or last - state[columns.SEGMENT_BASE] > 0x7FFFFFFF:
                return codes.SEGMENT_RANGE
        if stage == _NEXT:
            state[columns.STAGE] = sign * _FIELDS
            stage = _FIELDS
            if last >= state[columns.NEXT_BASE]:
                return codes.NEXT_SEGMENT
        if stage == _FIELDS:
            state[columns.STAGE] = sign * _RECORDS
            stage = _RECORDS
            if trusted and magic == 2:
                code = _check_fields(window, p, size)
                if code != 0:
                    return code
        if stage == _RECORDS:
            state[columns.STAGE] = _INDEX
            stage = _INDEX
            _name_record(base, times, time_offsets, state)
            if trusted and magic == 2:
                count = be_32(window, p + v2.RECORD_COUNT)
                attributes = be_16(window, p + v2.ATTRIBUTES)
                if attributes & v2.CODEC_MASK > v2.MAX_CODEC:
                    return codes.CODEC
                if attributes & v2.CODEC_MASK != 0 and count > 0:
                    return codes.NEED_BLOCK
                code = _check_records(
                    window, p + v2.HEADER_BYTES, p + size, base, last, count,
                    be_64(window, p + v2.BASE_TIMESTAMP), max_timestamp, attributes, state,
                )  # fmt: skip
                if code != 0:
                    return code
        # An untrusted header still locates the batch, to which entries of the offset index refer.
        rose = max_timestamp > state[columns.MAX_TIMESTAMP]
        if stage == _INDEX:
            code = _check_index(state[columns.POSITION] + p, base, last, index_offsets, index_positions, state)
            if code != 0:
                return code
            state[columns.STAGE] = _TIME
        is_append_time = magic == 2 and be_16(window, p + v2.ATTRIBUTES) & v2.LOG_APPEND_TIME != 0
        largest = max(max_timestamp, state[columns.MAX_TIMESTAMP])
        code = _check_time(base, last, largest, rose, is_append_time, times, time_offsets, state)
        if code != 0:
            return code
        if state[columns.SPOILED] == 0:
            _write_down(window, p, size, rows, epochs, state)
        state[columns.MAX_TIMESTAMP] = max(max_timestamp, state[columns.MAX_TIMESTAMP])
        state[columns.LAST_OFFSET] = max(last, state[columns.LAST_OFFSET])
        state[columns.STAGE] = _CRC
        state[columns.BATCHES] += 1
        state[columns.FROM] = p + size
