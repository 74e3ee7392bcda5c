"""Columns of the arrays in which `inspect` keeps its state, and of the arrays that it writes for later checks."""

from __future__ import annotations

# `state`, int64.
(
    FROM,  # index in the window of the batch to inspect
    TO,  # end of the bytes in the window
    IS_ALL,  # 1: the log ends at TO
    POSITION,  # position of the window's first byte in its file
    STAGE,  # how far the batch at FROM has been inspected
    SEGMENT_BASE,
    NEXT_BASE,  # base offset of the next segment; a very large number for the last segment
    LAST_OFFSET,  # the largest offset of the batches so far
    MAX_TIMESTAMP,  # the largest timestamp of the batches so far
    INDEX_AT,  # the next offset index entry
    TIME_AT,  # the next time index entry
    WANTED_BYTES,  # bytes from FROM on that the window needs (NEED_MORE)
    FOUND_OFFSET,  # offset and timestamp of a finding
    FOUND_TIMESTAMP,
    BATCHES,  # inspected so far
    RECORDS,
    SPOILED,  # set by the caller: `rows` and `epochs` are no longer written
    ROWS,  # how many of `rows` are in use
    RUNS,  # how many of `epochs` are in use
    WITHOUT_EPOCH,  # batches without a leader epoch, or of an old format
    SET_IS_OPEN,  # the offset entry before INDEX_AT has an offset above the batches so far
    LAST_RECORD,  # offset of the batch's last record, or UNKNOWN
    NAMED_OFFSET,  # offset in the next time entry that is not below the batch; -1: none
    NAMED_TIMESTAMP,  # timestamp of the record at NAMED_OFFSET; NO_SUCH_RECORD; UNKNOWN if records were not read
    STATE_SIZE,
) = range(25)
UNKNOWN, NO_SUCH_RECORD = -(2**63), -(2**63) + 1

# Columns of `rows`.
(
    ROW_POSITION,
    ROW_BASE,
    ROW_LAST,
    ROW_PRODUCER,
    ROW_EPOCH,
    ROW_SEQUENCE,
    ROW_ATTRIBUTES,
    ROW_COUNT,
    ROW_CONTROL,
    ROW_COLUMNS,
) = range(10)
# Columns of `epochs`: a run of batches of one leader epoch, its first batch, and the base offset of its last batch.
RUN_EPOCH, RUN_BASE, RUN_POSITION, RUN_LAST_BASE, RUN_COLUMNS = range(5)

# Sums of `check_piece` over the pieces of a block, int64: the last offset, the largest and the oldest timestamp.
LAST_SEEN, LARGEST_MS, OLDEST_MS = range(3)
