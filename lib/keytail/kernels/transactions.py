"""Determines from batch headers which data is aborted, and which markers are no longer needed.

The rules are those of `format/CLEANING.md`, "Transactions". A producer's state is one row of the array `state`, indexed
by a small number that `log/transactions.py` assigns to each producer id.
"""

from __future__ import annotations

import numpy as np

from keytail.kernels.batch_header import CONTROL, TRANSACTIONAL, TRANSACTIONAL_OR_CONTROL
from keytail.kernels.jit import kernel

ABORT, COMMIT = 0, 1

NO_OFFSET = 2**63 - 1

# Columns of the int64 state, one row per producer. ENTRY: the entry of the producer's open aborted transaction, or -1;
# SEEN: 1 if data of that transaction was seen; COMMITTED: 1 if data was seen, since the last COMMIT marker, that no
# entry marks as aborted; FIRST_DATA: base offset of the first remaining data of the open transaction, or NO_OFFSET;
# LAST_MARKER: base offset of the producer's latest marker, or -1.
ENTRY, SEEN, COMMITTED, FIRST_DATA, LAST_MARKER = 0, 1, 2, 3, 4

# Positions of `cursor`. NEXT_ENTRY: the next entry to open; MARKERS, ABORTS: rows of `markers` and `aborts` filled;
# EARLIEST: earliest first data of the transactions that ended since the last ABORT marker.
NEXT_ENTRY, MARKERS, ABORTS, EARLIEST = 0, 1, 2, 3

# Columns of `aborts`, one row per ABORT marker. MARKER: its base offset; PRODUCER: the number of its producer id; DATA:
# base offset of the transaction's first remaining data; BEHIND: the previous marker of the producer, or -1; SINCE:
# earliest first data of the transactions that ended after the previous ABORT marker, including this marker's
# transaction; OF_ENTRY: the entry that the marker ends, or -1; KEPT: 1 if the marker is retained. DATA and SINCE are
# NO_OFFSET without such data.
MARKER, PRODUCER, DATA, BEHIND, SINCE, OF_ENTRY, KEPT, ABORT_COLUMNS = 0, 1, 2, 3, 4, 5, 6, 7


@kernel
def track(table, producers, log_start_offset, entry_first, entry_producer, state, cursor, discard, markers, aborts):
    """Process the batches of `table` in order: decide which are discarded, and collect the markers.

    `producers[row]` is the number of the row's producer id if the batch is transactional or control. Entries of the
    transaction indexes come in the order of their first offsets; they decide which data is discarded. The function
    writes `discard[row]` for each row, a row of `markers` (base offset, discard) for each control batch, and a row of
    `aborts` for each ABORT marker. `cursor` is int64[4]. Data that ends below `log_start_offset` does not count as
    first data, because the marker of such data may have been removed.
    """
    n_entries = entry_first.shape[0]
    for i in range(table.shape[0]):
        row = table[i]
        discard[i] = 0
        if row.attributes & TRANSACTIONAL_OR_CONTROL == 0:
            continue
        while cursor[NEXT_ENTRY] < n_entries and entry_first[cursor[NEXT_ENTRY]] <= row.last_offset:
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
                state[p, SEEN] = 1
                discard[i] = 1
            else:
                state[p, COMMITTED] = 1
            if state[p, FIRST_DATA] == NO_OFFSET and row.last_offset >= log_start_offset:
                state[p, FIRST_DATA] = row.base_offset
            continue
        if row.record_count == 0:
            discard[i] = 1
        elif row.control_type in (ABORT, COMMIT):
            cursor[EARLIEST] = min(cursor[EARLIEST], state[p, FIRST_DATA])
            if row.control_type == ABORT:
                discard[i] = 0 if entry >= 0 and state[p, SEEN] == 1 else 1
                at = cursor[ABORTS]
                aborts[at, MARKER] = row.base_offset
                aborts[at, PRODUCER] = p
                aborts[at, DATA] = state[p, FIRST_DATA]
                aborts[at, BEHIND] = state[p, LAST_MARKER]
                aborts[at, SINCE] = cursor[EARLIEST]
                aborts[at, OF_ENTRY] = entry
                aborts[at, KEPT] = 1 - discard[i]
                cursor[ABORTS] += 1
                cursor[EARLIEST] = NO_OFFSET
                state[p, ENTRY] = -1
                state[p, SEEN] = 0
            else:
                discard[i] = 0 if state[p, COMMITTED] == 1 else 1
                state[p, COMMITTED] = 0
            state[p, FIRST_DATA] = NO_OFFSET
            state[p, LAST_MARKER] = row.base_offset
        markers[cursor[MARKERS], 0] = row.base_offset
        markers[cursor[MARKERS], 1] = discard[i]
        cursor[MARKERS] += 1


@kernel
def aborted_rows(table, producer_ids, first_offsets, end_offsets, aborted):
    """Set `aborted[row]` for transactional data of a producer within one of the producer's aborted intervals.

    The intervals are sorted by producer id and first offset; an interval contains data that reaches the first offset
    and begins below the end offset.
    """
    n = producer_ids.shape[0]
    for i in range(table.shape[0]):
        row = table[i]
        aborted[i] = 0
        if row.attributes & TRANSACTIONAL_OR_CONTROL != TRANSACTIONAL:
            continue
        # The last interval that does not begin after the row, by (producer id, first offset).
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
    """Set `out[row]` of each control batch to the flag of the marker at its base offset (`offsets` ascending)."""
    for i in range(table.shape[0]):
        out[i] = 0
        if table[i].attributes & CONTROL:
            at = np.searchsorted(offsets, table[i].base_offset)
            if at < offsets.shape[0] and offsets[at] == table[i].base_offset:
                out[i] = flags[at]
