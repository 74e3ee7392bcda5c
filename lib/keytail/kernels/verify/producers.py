"""Follows producers over the batches of a log, so that other files can be checked against the log.

A producer's state is one row of the array `state`, indexed by a small number that the caller assigns to each producer
id.
"""

from __future__ import annotations

from keytail.kernels import batch_header as v2
from keytail.kernels.jit import kernel
from keytail.kernels.verify import columns

# Columns of `state`, int64; -1: unknown. LAST_OFFSET, OFFSET_DELTA and LAST_SEQUENCE are values of the last data batch,
# OPEN_FROM is the first remaining data of an open transaction, LAST_MARKER the offset of the last marker.
EPOCH, LAST_SEQUENCE, LAST_OFFSET, OFFSET_DELTA, OPEN_FROM, LAST_MARKER, STATE_COLUMNS = range(7)

# Columns of `markers`. MARKER_DATA: first remaining data of the transaction that the marker ended; -1: none.
MARKER_OFFSET, MARKER_POSITION, MARKER_PRODUCER, MARKER_ABORTS, MARKER_DATA, MARKER_COLUMNS = range(6)

_ABORT, _COMMIT = 0, 1
_MAX_SEQUENCE = 2**31 - 1


@kernel
def follow(rows, producers, first, log_start_offset, state, markers):
    """Process `rows[first:]` (columns ROW_...) in order; return the number of `markers` written, and the next row.

    `producers[row]` is the number of the row's producer. The kernel stops after a row of data outside a transaction
    whose producer has an open transaction; if there is no such row, the next row is the number of rows. Data that ends
    below the log start offset is skipped.
    """
    written = 0
    for i in range(first, rows.shape[0]):
        row = rows[i]
        p = state[producers[i]]
        if row[columns.ROW_ATTRIBUTES] & v2.CONTROL:
            if row[columns.ROW_COUNT] < 1 or row[columns.ROW_CONTROL] not in (_ABORT, _COMMIT):
                continue
            markers[written, MARKER_OFFSET] = row[columns.ROW_BASE]
            markers[written, MARKER_POSITION] = row[columns.ROW_POSITION]
            markers[written, MARKER_PRODUCER] = producers[i]
            markers[written, MARKER_ABORTS] = row[columns.ROW_CONTROL] == _ABORT
            markers[written, MARKER_DATA] = p[OPEN_FROM]
            written += 1
            if p[EPOCH] != row[columns.ROW_EPOCH]:
                p[LAST_OFFSET] = -1
            p[EPOCH] = row[columns.ROW_EPOCH]
            p[OPEN_FROM] = -1
            p[LAST_MARKER] = row[columns.ROW_BASE]
            continue
        if row[columns.ROW_LAST] < log_start_offset:
            continue
        delta = row[columns.ROW_LAST] - row[columns.ROW_BASE]
        p[EPOCH] = row[columns.ROW_EPOCH]
        p[LAST_OFFSET] = row[columns.ROW_LAST]
        p[OFFSET_DELTA] = delta
        sequence = row[columns.ROW_SEQUENCE] + delta
        p[LAST_SEQUENCE] = sequence if sequence <= _MAX_SEQUENCE else sequence - _MAX_SEQUENCE - 1
        if row[columns.ROW_ATTRIBUTES] & v2.TRANSACTIONAL:
            if p[OPEN_FROM] < 0:
                p[OPEN_FROM] = row[columns.ROW_BASE]
        elif p[OPEN_FROM] >= 0:
            return written, i + 1
    return written, rows.shape[0]
