"""Decides about whole batches of a chunk before any records are read, by bits or by the batch headers. The rules are
those of `format/CLEANING.md`; decisions that depend on a batch's records are made later (`records.py`).
"""

from __future__ import annotations

import numpy as np
from numba import njit

from keytail.kernels.batch_header import CONTROL, DELETE_HORIZON, TRANSACTIONAL
from keytail.kernels.jit import kernel
from keytail.kernels.rewriting.records import BEYOND, BY_BITS, BY_MAP, COPY, DROP, EMPTY, OPEN

# Facts for `decide_rows` (int64) about the round and about the part of the segment before the chunk.
(
    LATEST_OFFSET,
    FIRST_DIRTY,
    FIRST_UNCLEANABLE,
    NOW_MS,
    ASK_MAP,  # 1: bits do not decide about transactional batches
    SEGMENT,  # number of the segment
    RECORDS,  # records of the segment before the chunk
    RECORD_BIT,  # bit of the segment's first record, -1: none
    BATCH_BIT,  # bit of the chunk's first batch
    FILE_IS_OLD,  # 1: tombstones and markers whose retention depends on the file's time are due for removal
    REMOVAL_LIMIT,  # tombstones and markers from this offset on are retained
    BY_FILE_TIME,  # 1: FILE_IS_OLD applies to version 2, too, and horizons are ignored (CLEANING.md 16)
    FACTS,
) = range(13)


@njit
def _count_bits(bits, bit, end):
    total = np.int64(0)
    while bit < end and bit & 7:
        total += (bits[bit >> 3] >> np.uint8(bit & 7)) & 1
        bit += 1
    while bit + 8 <= end:
        b = np.int64(bits[bit >> 3])
        b = b - ((b >> 1) & 0x55)
        b = (b & 0x33) + ((b >> 2) & 0x33)
        total += (b + (b >> 4)) & 0x0F
        bit += 8
    while bit < end:
        total += (bits[bit >> 3] >> np.uint8(bit & 7)) & 1
        bit += 1
    return total


@kernel
def decide_rows(
    table, facts, bits, null_bits, ends_a_producer, unneeded, aborted,
    decided_by, first_bit, first_ordinal, retain_empty, tombstones_expired, action,
):  # fmt: skip
    """Decide about each row of a chunk without reading records; return how many markers are removed.

    `ends_a_producer`, `unneeded` (markers) and `aborted` (data) have one item per row, as do the last six arrays, which
    are filled. `first_bit` is the bit of the row's first record in `bits` if bits decide about the row, else -1. A bit
    of `null_bits` is set if the batch may contain a null.
    """
    records, markers = facts[RECORDS], np.int64(0)
    for i in range(table.shape[0]):
        row = table[i]
        attributes, count = np.int64(row.attributes), np.int64(row.record_count)
        by_file = facts[BY_FILE_TIME] != 0
        has_horizon = attributes & DELETE_HORIZON != 0 and not by_file
        is_control = attributes & CONTROL != 0
        by_bits = row.base_offset >= facts[FIRST_DIRTY] and row.last_offset <= facts[LATEST_OFFSET]
        by_bits = by_bits and facts[RECORD_BIT] >= 0 and not (facts[ASK_MAP] != 0 and attributes & TRANSACTIONAL != 0)
        held = row.last_offset >= facts[REMOVAL_LIMIT]
        if by_file or row.magic < 2:
            is_over = facts[FILE_IS_OLD] != 0
        else:
            is_over = has_horizon and facts[NOW_MS] >= row.base_timestamp_ms
        is_over = is_over and not held
        # Whether a batch of version 2 that loses no record is copied even if it contains tombstones or is a marker.
        needs_none = has_horizon or by_file
        rule = BEYOND if row.base_offset > facts[LATEST_OFFSET] else BY_MAP
        bit, live, what = np.int64(-1), np.int64(0), OPEN
        if is_control:
            rule = BEYOND
            if needs_none:
                what = COPY
        elif by_bits:
            rule = BY_BITS
            bit = facts[RECORD_BIT] + records
            live = _count_bits(bits, bit, bit + count)
            if row.magic == 2 and live == count:  # messages of older formats are never copied, but rebuilt
                batch = facts[BATCH_BIT] + i
                has_null = (null_bits[batch >> 3] >> np.uint8(batch & 7)) & 1 != 0
                if not has_null or (needs_none and not is_over):
                    what = COPY
        elif rule == BEYOND and row.magic == 2 and needs_none:
            what = COPY
        expired = unneeded[i] and is_over
        retain = ends_a_producer[i] or (not by_file and row.last_offset + 1 == facts[FIRST_UNCLEANABLE])
        if count == 0 or expired or aborted[i] or (by_bits and live == 0 and not is_control):
            what = EMPTY if retain else DROP
            if is_control and count > 0:
                markers += 1
        decided_by[i] = rule
        first_bit[i] = bit
        first_ordinal[i] = (facts[SEGMENT] << 32) + records
        retain_empty[i] = retain
        tombstones_expired[i] = is_over
        action[i] = what
        records += count
    return markers
