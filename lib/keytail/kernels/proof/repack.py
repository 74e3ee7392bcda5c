"""The proof of a repack, batch by batch: sources and outputs are walked as two streams of records.

An output batch either has the bytes of its source batch, or all records of consecutive source batches, whose headers
allow that (compact/repack/REPACK.md). As in `step.py`, kernels return a code when they need something or when something
is wrong. Nothing is shared with the code that writes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba.extending import register_jitable

from keytail.kernels import batch_header as v2
from keytail.kernels.jit import kernel
from keytail.kernels.proof.checks import check_output, check_source, next_batch
from keytail.kernels.proof.codes import (
    NEED_NEXT_OUTPUT,
    NEED_OUTPUT_BLOCK,
    NEED_SOURCE_BLOCK,
    OUTPUT_ATTRIBUTES,
    OUTPUT_BASE_TIMESTAMP,
    OUTPUT_CODEC,
    OUTPUT_COUNT,
    OUTPUT_EXTRA_RECORD,
    OUTPUT_HORIZON,
    OUTPUT_LAST_OFFSET,
    OUTPUT_LEADER_EPOCH,
    OUTPUT_MAGIC,
    OUTPUT_MAX_TIMESTAMP,
    OUTPUT_PRODUCER,
    OUTPUT_REBUILT_WHOLE,
    OUTPUT_RECORD,
    OUTPUT_RECORD_DIFFERS,
    OUTPUT_UNKNOWN,
    PASSED,
    SOURCE_COUNT,
    SOURCE_DONE,
    SOURCE_RECORD,
)
from keytail.kernels.proof.markers import COMMIT, FOUND_ONE, FROM, KIND, LAST_OFFSET, OFFSET, next_header, next_marker
from keytail.kernels.proof.records import SMALLEST_RECORD_BYTES, Records, is_same_record, read_rewritten
from keytail.kernels.proof.state import fail
from keytail.kernels.proof.step import decompress_block, is_compressed, next_output, pass_source, source_records
from keytail.kernels.walk import be_16, be_32, be_64, read_record, same_bytes

# Further violations. Codes below FIRST_OF_OUTPUT are for violations at the source.
LOST_BATCH, LOST_RECORD, OUTPUT_CHANGED, OUTPUT_MERGED, OUTPUT_LARGE = range(100, 105)
FIRST_OF_OUTPUT = OUTPUT_CHANGED

# The rules and the state of the proof in `run` (int64). The open batch is an output batch with the records of several
# sources, or with another codec than its source; AT is a position in its block.
(
    MAX_BLOCK_BYTES,  # of merged records; -1: nothing may be merged
    MAX_BATCH_BYTES,
    CODEC,  # codec of all batches that differ from their source; -1: the codec of the source
    IS_OPEN,
    AT,
    LEFT,  # records of the open batch that no source has had yet
    SOURCES,  # source batches in the open batch, including the current one
    CODECS_CHANGED,  # not 0: a source of the open batch has another codec
    FIRST_MS,  # timestamp of the first record of the open batch
    NEWEST_MS,  # largest timestamp of its records so far
    IS_CHECKED,  # the source batch has been checked
    END_OFFSET,  # a batch may lose its transaction if the transaction was committed below this offset
    RUN,
) = range(13)


class Producers(NamedTuple):
    """`kept` (int64, sorted): base offsets of batches that must have their bytes. `forgotten` (int64, sorted): ids of
    producers that merged batches may lose. `markers`: the table of the markers of all transactions (markers.py)."""

    kept: np.ndarray
    forgotten: np.ndarray
    markers: np.ndarray


_inlined = register_jitable(forceinline=True)


@kernel
def step(windows, indexes, producers, tools, state, run):
    """Prove as many source batches as the windows contain; return a code that is not PASSED."""
    code = PASSED
    while code == PASSED:
        code = _prove_batch(windows, indexes, producers, tools, state, run)
    return code


@_inlined
def _prove_batch(windows, indexes, producers, tools, state, run):
    source, output = windows.source, windows.output
    code, size = next_batch(source, state)
    if code == SOURCE_DONE and run[IS_OPEN]:  # the source has no batch with the last offset of the output batch
        return fail(state, OUTPUT_LAST_OFFSET, state.output.at, be_64(output, state.output.at))
    if code != PASSED:
        return code
    code, q_size = next_output(output, state)
    if code != PASSED:
        return code
    p, q = state.source.at, state.output.at
    base = be_64(source, p)
    is_new = run[IS_OPEN] == 0
    if is_new and base >= state.output.next_base and q_size == 0:
        return NEED_NEXT_OUTPUT
    if q_size == 0:
        return fail(state, LOST_BATCH, p, base)
    is_same = is_new and q_size == size and same_bytes(source, p, output, q, size)
    if state.output.is_checked == 0:
        if not is_same and output[q + v2.MAGIC] != 2:
            return fail(state, OUTPUT_MAGIC, q, be_64(output, q))
        code = check_output(output, q, q_size, is_same, indexes, state)
        if code != PASSED:
            return code
        state.output.is_checked = 1
    if source[p + v2.MAGIC] < 2:
        if not is_same:
            return fail(state, OUTPUT_CHANGED, q, base)
        state.source.last_offset = base
        state.source.at = p + size
        return _pass_output(q_size, state)
    if run[IS_CHECKED] == 0:
        code = check_source(source, p, size, state)
        if code != PASSED:
            return code
        run[IS_CHECKED] = 1
    if is_same:
        _pass_source(source, state, run)
        return _pass_output(q_size, state)
    if is_new:
        if be_64(output, q) != base:
            return fail(state, OUTPUT_UNKNOWN, q, be_64(output, q))
        if q_size > run[MAX_BATCH_BYTES]:
            return fail(state, OUTPUT_LARGE, q, base)
    code = _check_header(source, p, output, q, producers, state, run)
    if code != PASSED:
        return code
    code = _open_blocks(windows, size, q_size, is_new, tools, state, run)
    if code != PASSED:
        return code
    if is_new:
        _open(output, q, state, run)
    run[SOURCES] += 1
    run[CODECS_CHANGED] |= (be_16(output, q + v2.ATTRIBUTES) ^ be_16(source, p + v2.ATTRIBUTES)) & v2.CODEC_MASK
    records = source_records(source, windows.source_block, size, state)
    data, begin, end = output, q + v2.HEADER_BYTES, q + q_size
    if state.output.block_bytes >= 0:
        data, begin, end = windows.output_block, np.int64(0), state.output.block_bytes
    code = _walk(source, output, records, Records(data, begin, end, run[LEFT]), state, run)
    if code != PASSED:
        return code
    last = be_64(source, p) + be_32(source, p + v2.LAST_OFFSET_DELTA)
    _pass_source(source, state, run)
    if last < be_64(output, q) + be_32(output, q + v2.LAST_OFFSET_DELTA):
        return PASSED
    code = _close(output, q, end - begin, state, run)
    return _pass_output(q_size, state) if code == PASSED else code


@_inlined
def _open(output, q, state, run):
    run[IS_OPEN] = 1
    run[AT] = run[SOURCES] = run[CODECS_CHANGED] = 0
    run[LEFT] = be_32(output, q + v2.RECORD_COUNT)
    run[FIRST_MS] = run[NEWEST_MS] = -1


@_inlined
def _pass_source(source, state, run):
    pass_source(source, state)
    run[IS_CHECKED] = 0
    state.totals.batches_read += 1


@_inlined
def _pass_output(q_size, state):
    state.output.at += q_size
    state.output.is_checked = 0
    state.output.block_bytes = -1
    state.totals.batches_kept += 1
    return PASSED


@_inlined
def _place_of(number, numbers):
    """Return the index of a number among sorted numbers (int64), or -1 if the number is absent."""
    low, high = np.int64(0), np.int64(numbers.shape[0])
    while low < high:
        middle = (low + high) // 2
        if numbers[middle] < number:
            low = middle + 1
        else:
            high = middle
    return low if low < numbers.shape[0] and numbers[low] == number else np.int64(-1)


@_inlined
def _loses_producer(source, p, output, q, producers, run):
    """Return whether the output batch at `q` lawfully lacks the producer of the source batch at `p`."""
    producer = be_64(source, p + v2.PRODUCER_ID)
    if producer < 0 or _place_of(producer, producers.forgotten) < 0:
        return False
    if be_64(output, q + v2.PRODUCER_ID) != -1 or be_16(output, q + v2.PRODUCER_EPOCH) != -1:
        return False
    if be_32(output, q + v2.BASE_SEQUENCE) != -1:
        return False
    if be_16(source, p + v2.ATTRIBUTES) & v2.TRANSACTIONAL == 0:
        return True
    last = be_64(source, p) + be_32(source, p + v2.LAST_OFFSET_DELTA)
    row = next_marker(producers.markers, producer, last + 1)
    if row < 0:
        return False
    return producers.markers[row, KIND] == COMMIT and producers.markers[row, OFFSET] < run[END_OFFSET]


@_inlined
def _check_header(source, p, output, q, producers, state, run):
    """Check whether the header of the output batch at `q` is lawful for the source batch at `p`, one of its sources."""
    base, last = be_64(source, p), be_64(source, p) + be_32(source, p + v2.LAST_OFFSET_DELTA)
    attributes, before = be_16(output, q + v2.ATTRIBUTES), be_16(source, p + v2.ATTRIBUTES)
    output_last = be_64(output, q) + be_32(output, q + v2.LAST_OFFSET_DELTA)
    if last > output_last:
        return fail(state, OUTPUT_LAST_OFFSET, q, base)
    is_empty = be_32(source, p + v2.RECORD_COUNT) == 0
    if before & (v2.CONTROL | ~v2.KNOWN_ATTRIBUTES) or is_empty or _place_of(base, producers.kept) >= 0:
        return fail(state, OUTPUT_CHANGED, q, base)
    is_one_of_several = base > be_64(output, q) or last < output_last
    loses = is_one_of_several and _loses_producer(source, p, output, q, producers, run)
    if loses:
        before &= ~v2.TRANSACTIONAL
    if (attributes ^ before) & ~v2.CODEC_MASK:
        return fail(state, OUTPUT_ATTRIBUTES, q, base)
    if attributes & v2.CODEC_MASK != (before & v2.CODEC_MASK if run[CODEC] < 0 else run[CODEC]):
        return fail(state, OUTPUT_CODEC, q, base)
    if be_32(output, q + v2.LEADER_EPOCH) != be_32(source, p + v2.LEADER_EPOCH):
        return fail(state, OUTPUT_LEADER_EPOCH, q, base)
    # The producer's id and epoch, and the base sequence.
    if not (loses or same_bytes(output, q + v2.PRODUCER_ID, source, p + v2.PRODUCER_ID, 14)):
        return fail(state, OUTPUT_PRODUCER, q, base)
    if is_one_of_several:
        if run[MAX_BLOCK_BYTES] < 0:
            return fail(state, OUTPUT_MERGED, q, base)
        if before & v2.TRANSACTIONAL or be_64(output, q + v2.PRODUCER_ID) != -1:
            return fail(state, OUTPUT_PRODUCER, q, base)
    if attributes & v2.DELETE_HORIZON and be_64(output, q + v2.BASE_TIMESTAMP) != be_64(source, p + v2.BASE_TIMESTAMP):
        return fail(state, OUTPUT_HORIZON, q, base)
    if attributes & v2.LOG_APPEND_TIME and be_64(output, q + v2.MAX_TIMESTAMP) != be_64(source, p + v2.MAX_TIMESTAMP):
        return fail(state, OUTPUT_MAX_TIMESTAMP, q, base)
    return PASSED


@_inlined
def _open_blocks(windows, size, q_size, is_new, tools, state, run):
    """Decompress the block of the source batch and, once, the block of the output batch; return a code."""
    source, output = windows.source, windows.output
    p, q = state.source.at, state.output.at
    if state.source.block_bytes < 0 and is_compressed(source, p):
        n = decompress_block(source, p, size, tools, windows.source_block)
        if n < 0:
            return NEED_SOURCE_BLOCK
        state.source.block_bytes = n
    if is_new and state.output.block_bytes < 0 and is_compressed(output, q):
        n = decompress_block(output, q, q_size, tools, windows.output_block)
        if n < 0:
            return NEED_OUTPUT_BLOCK
        state.output.block_bytes = n
    return PASSED


@_inlined
def _walk(source, output, records, others, state, run):
    """Compare the records of the source batch with the next records of the open batch; return a code."""
    p, q = state.source.at, state.output.at
    base, attributes = be_64(source, p), be_16(source, p + v2.ATTRIBUTES)
    last = base + be_32(source, p + v2.LAST_OFFSET_DELTA)
    append_time, base_timestamp = be_64(source, p + v2.MAX_TIMESTAMP), be_64(source, p + v2.BASE_TIMESTAMP)
    other_base, other_base_timestamp = be_64(output, q), be_64(output, q + v2.BASE_TIMESTAMP)
    if records.n > (records.end - records.at) // SMALLEST_RECORD_BYTES:
        return fail(state, SOURCE_COUNT, p, base)
    at, other_at, before, left = records.at, others.at + run[AT], base - 1, others.n
    first, newest = run[FIRST_MS], run[NEWEST_MS]
    is_first = run[SOURCES] == 1
    for _ in range(records.n):
        record = read_record(records.data, at, records.end)
        offset = base + record.offset_delta
        if record.end < 0 or offset <= before or offset > last:
            return fail(state, SOURCE_RECORD, p, offset if record.end >= 0 else before + 1)
        if left <= 0:
            return fail(state, LOST_RECORD, p, offset)
        other = read_rewritten(others.data, other_at, others.end)
        if other.end < 0:
            return fail(state, OUTPUT_RECORD, q, offset)
        other_offset = other_base + other.offset_delta
        if other_offset < offset:
            return fail(state, OUTPUT_EXTRA_RECORD, q, other_offset)
        if other_offset > offset:
            return fail(state, LOST_RECORD, p, offset)
        timestamp = append_time if attributes & v2.LOG_APPEND_TIME else base_timestamp + record.timestamp_delta
        same_time = timestamp == other_base_timestamp + other.timestamp_delta
        if not same_time or not is_same_record(records.data, record, others.data, other):
            return fail(state, OUTPUT_RECORD_DIFFERS, q, offset)
        if is_first:
            first, is_first = timestamp, False
        newest = max(newest, timestamp)
        at, other_at, before = record.end, other.end, offset
        left -= 1
    if at != records.end:
        return fail(state, SOURCE_COUNT, p, base)
    run[AT], run[LEFT], run[FIRST_MS], run[NEWEST_MS] = other_at - others.at, left, first, newest
    state.totals.records_read += records.n
    return PASSED


@_inlined
def _close(output, q, block_bytes, state, run):
    """Check the header fields of an output batch that depend on all of its records; return a code."""
    base, attributes = be_64(output, q), be_16(output, q + v2.ATTRIBUTES)
    if run[LEFT] != 0:
        return fail(state, OUTPUT_EXTRA_RECORD, q, base)
    if run[AT] != block_bytes:
        return fail(state, OUTPUT_COUNT, q, base)
    if run[SOURCES] == 1 and run[CODECS_CHANGED] == 0:
        return fail(state, OUTPUT_REBUILT_WHOLE, q, base)
    if run[SOURCES] > 1 and block_bytes > run[MAX_BLOCK_BYTES]:
        return fail(state, OUTPUT_LARGE, q, base)
    if attributes & v2.DELETE_HORIZON == 0 and be_64(output, q + v2.BASE_TIMESTAMP) != run[FIRST_MS]:
        return fail(state, OUTPUT_BASE_TIMESTAMP, q, base)
    if attributes & v2.LOG_APPEND_TIME == 0 and be_64(output, q + v2.MAX_TIMESTAMP) != run[NEWEST_MS]:
        return fail(state, OUTPUT_MAX_TIMESTAMP, q, base)
    run[IS_OPEN] = 0
    return PASSED


@kernel
def note_producers(data, cursor, ids, latest, forgotten, newest_ms):
    """Note the producers' batches of a segment, in log order; return a code, as `collect` does.

    `latest` is int64[n, m]: the base offsets of the last m data batches of each of `ids` (int64, sorted), the latest
    first, -1 if there are fewer. `newest_ms` (int64): the largest timestamp of each of `forgotten` (int64, sorted).
    """
    while True:
        code, size = next_header(data, cursor)
        if code != FOUND_ONE:
            return code
        p = cursor[FROM]
        if data[p + v2.MAGIC] == 2:
            producer = be_64(data, p + v2.PRODUCER_ID)
            place = _place_of(producer, ids)
            if place >= 0 and be_16(data, p + v2.ATTRIBUTES) & v2.CONTROL == 0:
                for k in range(latest.shape[1] - 1, 0, -1):
                    latest[place, k] = latest[place, k - 1]
                latest[place, 0] = be_64(data, p)
            place = _place_of(producer, forgotten)
            if place >= 0:
                newest_ms[place] = max(newest_ms[place], be_64(data, p + v2.MAX_TIMESTAMP))
            cursor[LAST_OFFSET] = be_64(data, p) + be_32(data, p + v2.LAST_OFFSET_DELTA)
        cursor[FROM] = p + size
