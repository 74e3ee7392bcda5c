"""Walks the records of opened batches and finds, hashes and numbers their keys, a few at a time.

A few keys remain in the CPU cache between the steps. The spans of a whole chunk do not remain there: writing and
rereading them took as long as the walk itself. A single loop of all steps was slower than both alternatives.
"""

from __future__ import annotations

import numpy as np

from keytail.kernels.jit import kernel
from keytail.kernels.records import BAD_ROW, CODE, COUNT, NEXT_ROW, OK, hash_keys, number_records, scan_records
from keytail.kernels.rewriting.records import note_nulls


@kernel
def scan_keys(
    raw, arena, table, where, block_start, block_bytes, row_from, row_to, from_offset, seed, first_ordinal,
    nulls, first_batch, records, no_bits, low, high, ordinals, keyless, out,
):  # fmt: skip
    """Write hashes (uint64 `low`, `high`) and ordinals (int64) of the keys of opened rows `row_from` .. `row_to`.

    Scans whole batches. The ordinal of a record without a key or below `from_offset` is -1. `first_ordinal` and
    `keyless` are as in `number_records`, `nulls` and `first_batch` as in `note_nulls`, `out` as in `scan_records`.
    `records` contains the few records of a step; the scan stops before a batch that might not fit there, or into the
    rest of `low`. `no_bits` is -1 for each row.
    """
    n = np.int64(0)
    row = row_from
    out[CODE] = OK
    bits = nulls[:0]
    while row < row_to:
        room = min(records.shape[0], low.shape[0] - n)
        scan_records(
            raw, arena, table, where, block_start, block_bytes, row, row_to, bits, no_bits, records[:room], out
        )
        found = out[COUNT]
        if out[CODE] != OK or out[NEXT_ROW] == row:
            break
        hash_keys(raw, arena, where, records, found, seed, low[n:], high[n:])
        number_records(records, found, first_ordinal, from_offset, ordinals[n:], keyless)
        note_nulls(records, found, nulls, first_batch)
        n += found
        row = out[NEXT_ROW]
    if out[CODE] == OK:
        out[BAD_ROW] = row
    out[NEXT_ROW] = row
    out[COUNT] = n
