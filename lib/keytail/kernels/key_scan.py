"""Walks the records of batches, and hashes and numbers their keys on the way.

Each record is read once, while its bytes are in the CPU cache, and no table of records is written.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from keytail.kernels.jit import kernel
from keytail.kernels.native import xxh3_128
from keytail.kernels.records import (
    BAD_ROW,
    BYTES_LEFT_OVER,
    CLOSED,
    CODE,
    COUNT,
    IN_RAW,
    MIN_RECORD_BYTES,
    NEXT_ROW,
    OFFSET_BEYOND_BATCH,
    OFFSETS_NOT_INCREASING,
    OK,
    RECORD_COUNT_IMPOSSIBLE,
    walk_record,
)


@njit
def _scan_batch(
    a, p, end, base_offset, last_offset, count, from_offset, seed, first_ordinal, low, high, ordinals, n, keyless
):
    """Hash and number the keys of the block `a[p:end]`, from item `n` on; return (code, 1 if a value is null)."""
    previous = base_offset - 1
    nulls = 0
    for k in range(count):
        found = walk_record(a, p, end)
        if found.code != OK:
            return found.code, nulls
        offset = base_offset + found.offset_delta
        if offset <= previous:
            return OFFSETS_NOT_INCREASING, nulls
        previous = offset
        p = found.stop
        if found.value_bytes < 0:
            nulls = 1
        i = np.uint64(n + k)
        low[i], high[i], ordinals[i] = 0, 0, -1
        if found.key_bytes >= 0:
            low[i], high[i] = xxh3_128(a, found.key, found.key_bytes, seed)
        if offset >= from_offset:
            if found.key_bytes >= 0:
                ordinals[i] = first_ordinal + k
            else:
                if keyless[0] == 0:
                    keyless[1] = offset
                keyless[0] += 1
    if previous > last_offset:
        return OFFSET_BEYOND_BATCH, nulls
    return OK if p == end else BYTES_LEFT_OVER, nulls


@kernel
def scan_keys(
    raw, arena, table, where, block_start, block_bytes, row_from, row_to, from_offset, seed, first_ordinal,
    nulls, first_batch, low, high, ordinals, keyless, out,
):  # fmt: skip
    """Write hashes (uint64 `low`, `high`) and ordinals (int64) of the keys of the rows from `row_from` to before
    `row_to` that are not CLOSED.

    Whole batches are scanned; the scan stops before a batch that does not fit into the rest of `low`. The ordinal of a
    record without a key or below `from_offset` is -1, and the hash of a record without a key is 0. `first_ordinal[row]`
    is the ordinal of the row's first record. `keyless` (int64[2]) has the number of records so far at or above
    `from_offset` without a key, and the first offset of these records. The bit `first_batch` + row of `nulls` is set if
    the batch has a null value. `out` is as in `scan_records`.
    """
    n = np.int64(0)
    row = row_from
    code = np.int64(OK)
    while row < row_to:
        if where[row] != CLOSED:
            batch = table[row]
            count = np.int64(batch.record_count)
            if count * MIN_RECORD_BYTES > block_bytes[row]:
                code = np.int64(RECORD_COUNT_IMPOSSIBLE)
                break
            if n + count > low.shape[0]:
                break
            start = block_start[row]
            end = start + block_bytes[row]
            # There is one call for each array: choosing an array before a single call takes longer than a small batch.
            if where[row] == IN_RAW:
                code, has_null = _scan_batch(
                    raw, start, end, batch.base_offset, batch.last_offset, count, from_offset, seed,
                    first_ordinal[row], low, high, ordinals, n, keyless,
                )  # fmt: skip
            else:
                code, has_null = _scan_batch(
                    arena, start, end, batch.base_offset, batch.last_offset, count, from_offset, seed,
                    first_ordinal[row], low, high, ordinals, n, keyless,
                )  # fmt: skip
            if code != OK:
                break
            if has_null:
                bit = first_batch + row
                nulls[bit >> 3] |= np.uint8(1 << (bit & 7))
            n += count
        row += 1
    out[NEXT_ROW] = row
    out[COUNT] = n
    out[CODE] = code
    out[BAD_ROW] = row
