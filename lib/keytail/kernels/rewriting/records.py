"""Decides record by record what is retained (format/CLEANING.md, "Which records are retained")."""

from __future__ import annotations

import numpy as np

from keytail.kernels.jit import kernel

# Rules by which the records of a row are decided; BEYOND: all are retained.
BY_BITS, BY_MAP, BEYOND = 0, 1, 2

# Actions for a row; OPEN: its records must be read for the decision.
DROP, COPY, EMPTY, REBUILD, OPEN = 0, 1, 2, 3, 4

# Counters of `decide_records`.
KEYLESS, FIRST_KEYLESS, TOMBSTONES_EXPIRED = 0, 1, 2


@kernel
def note_nulls(records, n, nulls, first_batch):
    """Set the bit of batch `first_batch + row` for every record with a null value (CLEANING.md, "Horizon")."""
    for i in range(n):
        if records[i].value_bytes < 0:
            bit = first_batch + records[i].row
            nulls[bit >> 3] |= np.uint8(1 << (bit & 7))


@kernel
def decide_records(
    records, n, decided_by, first_ordinal, found, latest_offset, tombstones_expired, keep, kept, kept_nulls, counters
):
    """Set `keep[i]` for each record, `kept` and `kept_nulls` for each row (CLEANING.md, "Which records are retained").

    For rows decided by bits, `records` contains only the survivors. `first_ordinal[row]` is the ordinal of the row's
    first record; `tombstones_expired[row]`: whether the retention of the row's tombstones has expired.
    """
    previous = np.int64(-1)
    k = np.int64(0)
    for i in range(n):
        record = records[i]
        row = np.int64(record.row)
        if row != previous:
            previous = row
            k = 0
            kept[row] = 0
            kept_nulls[row] = 0
        rule = decided_by[row]
        stays = True
        if rule != BEYOND and record.offset <= latest_offset:
            if record.key_bytes < 0:
                if counters[KEYLESS] == 0:
                    counters[FIRST_KEYLESS] = record.offset
                counters[KEYLESS] += 1
                stays = False
            elif rule == BY_MAP:
                stays = found[i] <= first_ordinal[row] + k
            if stays and record.value_bytes < 0 and tombstones_expired[row]:
                stays = False
                counters[TOMBSTONES_EXPIRED] += 1
        keep[i] = 1 if stays else 0
        if stays:
            kept[row] += 1
            if record.value_bytes < 0:
                kept_nulls[row] += 1
        k += 1
