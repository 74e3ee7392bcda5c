"""Follows transactions over the headers of batches: which data is aborted, which markers nobody needs.

The rules are those of `format/CLEANING.md`, "Transactions". A producer's state is one row of arrays indexed by
a small number that `clean/transactions.py` gives each producer id.
"""

from __future__ import annotations

import numpy as np

from keytail.kernels.jit import kernel

ABORT, COMMIT = 0, 1
TRANSACTIONAL_OR_CONTROL = 0x30
CONTROL = 0x20

# Columns of the int64 state, one row a producer.
ENTRY, SEEN, COMMITTED, OPEN_FROM = 0, 1, 2, 3

# Positions of `cursor`.
NEXT_ENTRY, MARKERS, KEPT, INTERVALS, CONTRADICTION = 0, 1, 2, 3, 4


@kernel
def track(
    table, producers, log_start_offset, entry_first, entry_last, entry_producer, state, cursor, discard, markers,
    kept, intervals,
):
    """Follow the rows of `table` in order.

    `producers[row]` is the number of its producer id where the batch is transactional or control. Entries of
    the transaction indexes come in order of their first offsets. Written: `discard[row]`; per control batch
    `markers` (base offset, discard); per marker whose entry stays `kept` (base offset, entry); per aborted
    transaction met `intervals` (entry, marker offset). `cursor` is int64[5]: next entry, rows written to the
    three, and the first offset at which log and indexes contradict each other, or -1.
    """
    for i in range(table.shape[0]):
        row = table[i]
        discard[i] = 0
        if row.attributes & TRANSACTIONAL_OR_CONTROL == 0:
            continue
        while cursor[NEXT_ENTRY] < entry_first.shape[0] and entry_first[cursor[NEXT_ENTRY]] <= row.last_offset:
            entry = cursor[NEXT_ENTRY]
            cursor[NEXT_ENTRY] += 1
            p = entry_producer[entry]
            if state[p, ENTRY] < 0:
                state[p, ENTRY] = entry
                state[p, SEEN] = 0
        p = producers[i]
        entry = state[p, ENTRY]
        if row.attributes & CONTROL == 0:
            if entry >= 0:
                begins_late = entry_first[entry] > row.base_offset and row.base_offset >= log_start_offset
                if begins_late and cursor[CONTRADICTION] < 0:
                    cursor[CONTRADICTION] = row.base_offset
                state[p, SEEN] = 1
                discard[i] = 1
            else:
                state[p, COMMITTED] = 1
                if state[p, OPEN_FROM] < 0 and row.base_offset >= log_start_offset:
                    state[p, OPEN_FROM] = row.base_offset
            continue
        if row.record_count == 0:
            discard[i] = 1
        elif row.control_type == ABORT:
            # Data that no entry covers would pass for committed; an entry that another marker ends is no entry.
            uncovered = state[p, OPEN_FROM] >= 0 and row.base_offset >= log_start_offset
            if cursor[CONTRADICTION] < 0 and (uncovered or (entry >= 0 and entry_last[entry] != row.base_offset)):
                cursor[CONTRADICTION] = row.base_offset
            discard[i] = 1
            if entry >= 0:
                intervals[cursor[INTERVALS], 0] = entry
                intervals[cursor[INTERVALS], 1] = row.base_offset
                cursor[INTERVALS] += 1
                if state[p, SEEN] == 1:
                    discard[i] = 0
                    kept[cursor[KEPT], 0] = row.base_offset
                    kept[cursor[KEPT], 1] = entry
                    cursor[KEPT] += 1
                state[p, ENTRY] = -1
                state[p, SEEN] = 0
            state[p, OPEN_FROM] = -1
        elif row.control_type == COMMIT:
            if entry >= 0 and cursor[CONTRADICTION] < 0:
                cursor[CONTRADICTION] = row.base_offset
            discard[i] = 0 if state[p, COMMITTED] == 1 else 1
            state[p, COMMITTED] = 0
            state[p, OPEN_FROM] = -1
        markers[cursor[MARKERS], 0] = row.base_offset
        markers[cursor[MARKERS], 1] = discard[i]
        cursor[MARKERS] += 1


@kernel
def aborted_rows(table, producer_ids, first_offsets, end_offsets, aborted):
    """`aborted[row]`: transactional data of a producer within one of its aborted intervals.

    The intervals are sorted by producer id and first offset: data that reaches the first offset and begins
    below the end offset.
    """
    n = producer_ids.shape[0]
    for i in range(table.shape[0]):
        row = table[i]
        aborted[i] = 0
        if row.attributes & TRANSACTIONAL_OR_CONTROL != 0x10:
            continue
        # The last interval that is not behind the row, by (producer id, first offset).
        low, high = 0, n
        while low < high:
            middle = (low + high) // 2
            before = producer_ids[middle] < row.producer_id or (
                producer_ids[middle] == row.producer_id and first_offsets[middle] <= row.last_offset
            )
            if before:
                low = middle + 1
            else:
                high = middle
        if low > 0 and producer_ids[low - 1] == row.producer_id and row.base_offset < end_offsets[low - 1]:
            aborted[i] = 1


@kernel
def marker_flags(table, offsets, flags, out):
    """`out[row]` for control batches: the flag of the marker at its base offset (`offsets` ascending)."""
    for i in range(table.shape[0]):
        out[i] = 0
        if table[i].attributes & CONTROL:
            at = np.searchsorted(offsets, table[i].base_offset)
            if at < offsets.shape[0] and offsets[at] == table[i].base_offset:
                out[i] = flags[at]
