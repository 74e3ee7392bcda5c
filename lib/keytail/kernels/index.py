"""The offset and time index entries that a run of batches earns (format/INDEX.md, "When an entry is written")."""

from __future__ import annotations

import numpy as np

from keytail.kernels.jit import kernel

# Positions in the `state` array, which runs through a segment.
SINCE_LAST, MAX_TIMESTAMP, MAX_TIMESTAMP_OFFSET, LAST_TIME_ENTRY, OFFSET_ENTRIES, TIME_ENTRIES = range(6)

OK = 0
OFFSET_INDEX_FULL = 60
TIME_INDEX_FULL = 61
RELATIVE_OFFSET_TOO_LARGE = 62


@kernel
def index_rows(
    table, n, base_offset, interval_bytes, max_offset_entries, max_time_entries, state, offsets, times, out
):
    """Append the entries of rows `table[:n]` to `offsets` (int64[m, 2]) and `times` (int64[m, 2]), m >= n.

    `state` is int64[6] (new segment: 0, -1, base offset, -1, 0, 0). `out` is int64[4]: entries written to
    `offsets` and `times`, a code, the row it speaks of. Entries are (relative offset, position) and
    (timestamp, relative offset).
    """
    written = 0
    timed = 0
    code = OK
    for i in range(n):
        row = table[i]
        if row.last_offset - base_offset > 0x7FFFFFFF:
            code = RELATIVE_OFFSET_TOO_LARGE
            out[3] = i
            break
        if row.max_timestamp_ms > state[MAX_TIMESTAMP]:
            state[MAX_TIMESTAMP] = row.max_timestamp_ms
            state[MAX_TIMESTAMP_OFFSET] = row.last_offset
        if state[SINCE_LAST] > interval_bytes:
            if state[OFFSET_ENTRIES] >= max_offset_entries:
                code = OFFSET_INDEX_FULL
                out[3] = i
                break
            offsets[written, 0] = row.last_offset - base_offset
            offsets[written, 1] = row.position
            written += 1
            state[OFFSET_ENTRIES] += 1
            if state[MAX_TIMESTAMP] > state[LAST_TIME_ENTRY]:
                # One slot is kept free for the entry that closes the segment.
                if state[TIME_ENTRIES] >= max_time_entries - 1:
                    code = TIME_INDEX_FULL
                    out[3] = i
                    break
                times[timed, 0] = state[MAX_TIMESTAMP]
                times[timed, 1] = state[MAX_TIMESTAMP_OFFSET] - base_offset
                timed += 1
                state[TIME_ENTRIES] += 1
                state[LAST_TIME_ENTRY] = state[MAX_TIMESTAMP]
            state[SINCE_LAST] = 0
        state[SINCE_LAST] += np.int64(row.size_bytes)
    out[0] = written
    out[1] = timed
    out[2] = code
