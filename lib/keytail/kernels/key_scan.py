"""Walks the records of opened batches for their keys alone: found, hashed and numbered a few at a time.

Between the steps those few stay in the cache. A stride's spans all at once do not, and writing them and reading them
again took as long as the walk itself; all steps in one loop were slower than either.
"""

from __future__ import annotations

import numpy as np

from keytail.kernels.jit import kernel
from keytail.kernels.records import BAD_ROW, CODE, COUNT, NEXT_ROW, OK, hash_keys, number_records, scan_records
from keytail.kernels.rewrite import note_nulls


@kernel
def scan_keys(
    raw, arena, table, where, block_start, block_bytes, row_from, row_to, from_offset, seed, first_ordinal,
    nulls, first_batch, records, no_bits, low, high, ordinals, keyless, out,
):  # fmt: skip
    """Hashes (uint64 `low`, `high`) and ordinals (int64) of the records of opened rows `row_from` .. `row_to`, whole
    batches at a time; ordinal -1: no key, or below `from_offset`.

    `first_ordinal`, `keyless` as of `number_records`, `nulls`, `first_batch` as of `note_nulls`, `out` as of
    `scan_records`. `records` holds those few; it stops in front of a batch that might not fit there, or into the rest
    of `low`. `no_bits` is -1 for each row.
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
