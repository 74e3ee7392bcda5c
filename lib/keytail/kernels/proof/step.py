"""The proof of a compaction, batch by batch: sources and their output are walked in lockstep.

Kernels get windows of the files and return a code when they need more bytes, a decompressed block or room for notes, or
when something is wrong; the caller (`compact/proof/prove.py`) reads, decompresses and raises. The outcome of each key's
latest record is noted in the table of `table.py`.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from keytail.kernels import batch_header as v2
from keytail.kernels.jit import kernel
from keytail.kernels.opening.plain import decompress_plain
from keytail.kernels.proof.checks import (
    check_fields,
    check_kept,
    check_output,
    check_source,
    check_time_of_empty,
    next_batch,
)
from keytail.kernels.proof.codes import (
    LOST_BATCH,
    LOST_LAST_BATCH,
    LOST_PRODUCER,
    NEED_LEGACY,
    NEED_MARKERS,
    NEED_NEXT_OUTPUT,
    NEED_OUTPUT,
    NEED_OUTPUT_BLOCK,
    NEED_SOURCE_BLOCK,
    OUTPUT_CUT,
    OUTPUT_MAGIC,
    OUTPUT_SIZE,
    OUTPUT_UNKNOWN,
    PASSED,
)
from keytail.kernels.proof.meaning import COUNTS, ends_a_producer, settle
from keytail.kernels.proof.records import Records, check_room, walk_records
from keytail.kernels.proof.snappy import decode_snappy
from keytail.kernels.proof.state import fail
from keytail.kernels.walk import batch_size, be_16, be_32, be_64, same_bytes, wanted_bytes

_inlined = register_jitable(forceinline=True)


@kernel
def step(windows, indexes, notes, markers, producers, tools, state):
    """Prove as many source batches as the windows contain; return a code that is not PASSED.

    Keys are noted in `notes`. When NEED_NOTES is returned, and at the end, the caller puts all noted keys into the
    table, in their order. Blocks with the framing of Kafka's producers are decompressed here, into the blocks of
    `windows`; for NEED_SOURCE_BLOCK and NEED_OUTPUT_BLOCK, the caller decompresses the block.
    """
    code = PASSED
    while code == PASSED:
        code = _prove_batch(windows, indexes, notes, markers, producers, tools, state)
    return code


@_inlined
def _prove_batch(windows, indexes, notes, markers, producers, tools, state):
    source, output = windows.source, windows.output
    code, size = next_batch(source, state)
    if code != PASSED:
        return code
    code, q_size = next_output(output, state)
    if code != PASSED:
        return code
    p = state.source.at
    is_whole = q_size == size and same_bytes(source, p, output, state.output.at, size)
    if q_size > 0 and state.output.is_checked == 0:
        code = check_output(output, state.output.at, q_size, is_whole, indexes, state)
        if code != PASSED:
            return code
        state.output.is_checked = 1
    if source[p + v2.MAGIC] < 2:
        return NEED_LEGACY
    if state.source.block_bytes < 0:
        code = check_source(source, p, size, state)
        if code != PASSED:
            return code
    code, q = _place(source, p, output, q_size, producers, state)
    if code != PASSED:
        return code
    if q >= 0 and not is_whole:
        code = check_fields(source, p, output, q, q_size, state)
        if code != PASSED:
            return code
    if q >= 0 and state.rules.erases != 0:
        code = check_time_of_empty(source, p, output, q, producers, state)
        if code != PASSED:
            return code
    meaning = COUNTS
    if be_16(source, p + v2.ATTRIBUTES) & v2.TRANSACTIONAL_OR_CONTROL:
        if state.knows_markers == 0:
            return NEED_MARKERS
        code, meaning = settle(source, p, size, output, q, markers, state)
        if code != PASSED:
            return code
    _start_batch(source, p, q, is_whole, meaning, state)
    code = _open_blocks(windows, size, q_size, tools, state)
    if code != PASSED:
        return code
    records = source_records(source, windows.source_block, size, state)
    code = check_room(records, p, be_64(source, p), notes, state)
    if code != PASSED:
        return code
    code = walk_records(source, output, records, _output_records(windows, q_size, state), notes, state)
    if code != PASSED:
        return code
    return close_batch(source, output, state)


@_inlined
def next_output(output, state):
    """Return (code, size) of the output's next batch; size 0: the output has no further batch."""
    q, to, is_all = state.output.at, state.output.to, state.output.is_all != 0
    if q == to and is_all:
        return PASSED, np.int64(0)
    size = batch_size(output, q, to, is_all)
    if size == 0:
        state.wanted.bytes = wanted_bytes(output, q, to)
        return NEED_OUTPUT, size
    if size < 0:
        return fail(state, OUTPUT_CUT if size == -1 else OUTPUT_SIZE, q, -1), size
    return PASSED, size


@_inlined
def _place(source, p, output, q_size, producers, state):
    """Return (code, position in the output window of the batch for the source batch at `p`, or -1 without one)."""
    q, base = state.output.at, be_64(source, p)
    dropped = np.int64(-1)
    if base >= state.output.next_base:
        return NEED_NEXT_OUTPUT if q_size == 0 else fail(state, OUTPUT_UNKNOWN, q, be_64(output, q)), dropped
    if q_size > 0 and be_64(output, q) < base:
        return fail(state, OUTPUT_UNKNOWN, q, be_64(output, q)), dropped
    if q_size > 0 and be_64(output, q) == base:
        return PASSED if output[q + v2.MAGIC] == 2 else fail(state, OUTPUT_MAGIC, q, base), q
    if state.rules.erases != 0:
        return fail(state, LOST_BATCH, p, base), dropped
    last = base + be_32(source, p + v2.LAST_OFFSET_DELTA)
    if last + 1 == state.rules.first_uncleanable and state.rules.by_file_time == 0:
        return fail(state, LOST_LAST_BATCH, p, base), dropped
    if producers.shape[1] > 0 and ends_a_producer(source, p, producers):
        return fail(state, LOST_PRODUCER, p, base), dropped
    return PASSED, dropped


@_inlined
def _start_batch(source, p, q, is_whole, meaning, state):
    batch = state.batch
    batch.at_output, batch.is_whole, batch.meaning = q, is_whole, meaning
    batch.last_offset, batch.kept_count = be_64(source, p) - 1, 0
    batch.first_ms, batch.newest_ms, batch.has_nulls = -1, -1, 0


@_inlined
def is_compressed(data, p):
    return be_16(data, p + v2.ATTRIBUTES) & 7 != 0 and be_32(data, p + v2.RECORD_COUNT) > 0


@register_jitable
def decompress_block(data, p, size, tools, block):
    """Decompress the block of the batch at `p`; return the number of bytes, or a negative number if the caller must
    decompress the block.
    """
    codec = be_16(data, p + v2.ATTRIBUTES) & 7
    if codec == v2.SNAPPY:
        return decode_snappy(data, p + v2.HEADER_BYTES, size - v2.HEADER_BYTES, block)
    return decompress_plain(tools, codec, data, p + v2.HEADER_BYTES, size - v2.HEADER_BYTES, block, np.int64(0))


@_inlined
def _open_blocks(windows, size, q_size, tools, state):
    """Decompress the block of the source batch and, if the batches differ, that of the output; return a code."""
    source, output = windows.source, windows.output
    p, q = state.source.at, state.batch.at_output
    if state.source.block_bytes < 0 and is_compressed(source, p):
        n = decompress_block(source, p, size, tools, windows.source_block)
        if n < 0:
            return NEED_SOURCE_BLOCK
        state.source.block_bytes = n
    is_compared = q >= 0 and state.batch.is_whole == 0
    if is_compared and state.output.block_bytes < 0 and be_16(output, q + v2.ATTRIBUTES) & 7 != 0:
        n = decompress_block(output, q, q_size, tools, windows.output_block)
        if n < 0:
            return NEED_OUTPUT_BLOCK
        state.output.block_bytes = n
    return PASSED


@_inlined
def source_records(source, block, size, state):
    """Return the records of the source's next batch; `block` is its decompressed block, if it has one."""
    p = state.source.at
    data, at, end = source, p + v2.HEADER_BYTES, p + size
    if is_compressed(source, p):
        data, at, end = block, np.int64(0), state.source.block_bytes
    return Records(data, at, end, be_32(source, p + v2.RECORD_COUNT))


@_inlined
def _output_records(windows, q_size, state):
    """Return the records of the output batch that belongs to the source's next batch.

    The result has no records if the source's batch was dropped or is byte-identical in the output.
    """
    output, q = windows.output, state.batch.at_output
    data, at, end, n = output, np.int64(0), np.int64(0), np.int64(0)
    if q >= 0 and state.batch.is_whole == 0:
        at, end, n = q + v2.HEADER_BYTES, q + q_size, be_32(output, q + v2.RECORD_COUNT)
        if be_16(output, q + v2.ATTRIBUTES) & 7 != 0:
            data, at, end = windows.output_block, np.int64(0), state.output.block_bytes
    return Records(data, at, end, n)


@register_jitable
def pass_source(source, state):
    """Advance the source by one batch."""
    p = state.source.at
    state.source.block_bytes = -1
    state.source.last_offset = be_64(source, p) + be_32(source, p + v2.LAST_OFFSET_DELTA)
    state.source.at = p + be_32(source, p + v2.BATCH_LENGTH) + v2.LENGTH_PREFIX_BYTES


@kernel
def walk_piece(source, records, output, others, notes, state):
    """Prove some records of the source batch for which `step` needed a block or notes; return a code.

    `others` are the records of the output batch in the same range of offsets.
    """
    return walk_records(source, output, records, others, notes, state)


@kernel
def close_batch(source, output, state):
    """Check the header fields of a batch after all of its records were walked, and advance by one batch; return a
    code."""
    code = check_kept(source, output, state)
    if code != PASSED:
        return code
    q = state.batch.at_output
    pass_source(source, state)
    state.output.block_bytes = -1
    state.totals.batches_read += 1
    if q >= 0:
        state.output.at = q + be_32(output, q + v2.BATCH_LENGTH) + v2.LENGTH_PREFIX_BYTES
        state.output.is_checked = 0
        state.totals.batches_kept += 1
    return PASSED


@kernel
def end_of_output(output, state):
    """Return PASSED if an output whose sources are all read has ended, NEED_OUTPUT if more bytes are needed, or
    OUTPUT_UNKNOWN for an extra batch."""
    q, to = state.output.at, state.output.to
    if q == to:
        return PASSED if state.output.is_all != 0 else NEED_OUTPUT
    return fail(state, OUTPUT_UNKNOWN, q, be_64(output, q) if to - q >= 8 else np.int64(-1))
