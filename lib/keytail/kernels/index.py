"""Computes the offset and time index entries of a run of batches (format/INDEX.md, "When an entry is written")."""

from __future__ import annotations

import numpy as np

from keytail.kernels.jit import kernel

# Positions in the `state` array, which is kept throughout a segment.
SINCE_LAST, MAX_TIMESTAMP, MAX_TIMESTAMP_OFFSET, LAST_TIME_ENTRY, OFFSET_ENTRIES, TIME_ENTRIES = range(6)

@kernel
def index_rows(
    table, n, base_offset, interval_bytes, max_offset_entries, max_time_entries, state, offsets, times, out
):
    """Write the entries of rows `table[:n]` to `offsets` (int64[m, 2]) and `times` (int64[m, 2]), m >= n.

    The kernel stops before a row whose entry has no room in its index. `state` is int64[6] (new segment: 0, -1, base
    offset, -1, 0, 0). `out` is int64[3]: entries written to `offsets` and `times`, and rows done. Entries are (relative
    offset, position) and (timestamp, relative offset).
    """
    written = 0
    timed = 0
    done = 0
    for i in range(n):
        row = table[i]
        max_timestamp, max_timestamp_offset = state[MAX_TIMESTAMP], state[MAX_TIMESTAMP_OFFSET]
        if row.max_timestamp_ms > max_timestamp:
            max_timestamp, max_timestamp_offset = row.max_timestamp_ms, row.last_offset
        if state[SINCE_LAST] > interval_bytes:
            grew = max_timestamp > state[LAST_TIME_ENTRY]
            # One slot of the time index is kept free for the entry that closes the segment.
            if state[OFFSET_ENTRIES] >= max_offset_entries or (grew and state[TIME_ENTRIES] >= max_time_entries - 1):
                break
            offsets[written, 0] = row.last_offset - base_offset
            offsets[written, 1] = row.position
            written += 1
            state[OFFSET_ENTRIES] += 1
            if grew:
                times[timed, 0] = max_timestamp
                times[timed, 1] = max_timestamp_offset - base_offset
                timed += 1
                state[TIME_ENTRIES] += 1
                state[LAST_TIME_ENTRY] = max_timestamp
            state[SINCE_LAST] = 0
        state[MAX_TIMESTAMP] = max_timestamp
        state[MAX_TIMESTAMP_OFFSET] = max_timestamp_offset
        state[SINCE_LAST] += np.int64(row.size_bytes)
        done += 1
    out[0] = written
    out[1] = timed
    out[2] = done
