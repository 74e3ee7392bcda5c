"""Finds batches after damage, checks their records, and determines which of them fit together.

`raw` is a whole segment file. The header of a candidate is checked first, and then the checksum; the rules are in
salvage/SALVAGE.md. Positions are bytes of the file.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from keytail.kernels import batch_header as v2
from keytail.kernels.batches import be16, be32, be64
from keytail.kernels.jit import kernel
from keytail.kernels.legacy import check_message
from keytail.kernels.native import crc32c
from keytail.kernels.verify.batches import check_block
from keytail.kernels.verify.codes import MAX_TIMESTAMP_OFF, RECORD_TIMESTAMP
from keytail.kernels.verify.columns import STATE_SIZE

_MIN_BYTES = 17  # bytes up to the magic byte
_MIN_V0_BYTES = 26
_MIN_RECORD_BYTES = 7

# Positions in `out` of `next_batch`.
FOUND, CHECKED_BYTES = 0, 1


@njit
def _is_header(raw, p, size, most_span):
    """Return whether a broker can have written this header of version 2.

    Few byte sequences pass this check, which saves slow checksums.
    """
    span, count = np.int64(be32(raw, p + v2.LAST_OFFSET_DELTA)), np.int64(be32(raw, p + v2.RECORD_COUNT))
    codec = raw[p + v2.ATTRIBUTES + 1] & v2.CODEC_MASK
    if span < 0 or span >= most_span or count < 0 or count > span + 1 or codec > v2.MAX_CODEC:
        return False
    if be32(raw, p + v2.LEADER_EPOCH) < -1:
        return False
    if be64(raw, p + v2.MAX_TIMESTAMP) < -1 or be64(raw, p + v2.PRODUCER_ID) < -1:
        return False
    if be16(raw, p + v2.PRODUCER_EPOCH) < -1 or be32(raw, p + v2.BASE_SEQUENCE) < -1:
        return False
    return codec != 0 or count * _MIN_RECORD_BYTES <= size - v2.HEADER_BYTES


@njit
def _is_old_header(raw, p, size):
    """Return whether a broker can have written this message of magic 0 or 1: key and value fill it exactly."""
    at = p + 18 if raw[p + 16] == 0 else p + 26
    end = p + size
    attributes = raw[p + 17]
    if attributes & v2.CODEC_MASK > v2.MAX_OLD_CODEC or attributes > v2.CODEC_MASK | v2.LOG_APPEND_TIME or at + 8 > end:
        return False
    key_bytes = max(np.int64(be32(raw, at)), np.int64(0))
    if be32(raw, at) < -1 or key_bytes > end - at - 8:
        return False
    value_bytes = np.int64(be32(raw, at + 4 + key_bytes))
    return value_bytes >= -1 and at + 8 + key_bytes + max(value_bytes, np.int64(0)) == end


@njit
def _batch_bytes(raw, p, n, low, high, out, scratch):
    """Return the size of the batch at `p` if its offsets are within [low, high) and its checksum is correct, else 0."""
    if n - p < _MIN_BYTES or raw[p + v2.MAGIC] > 2:
        return np.int64(0)
    size = np.int64(be32(raw, p + v2.BATCH_LENGTH)) + v2.LENGTH_PREFIX_BYTES
    if size < _MIN_V0_BYTES or size > n - p:
        return np.int64(0)
    base = be64(raw, p)
    if base < low or base >= high:
        return np.int64(0)
    if raw[p + v2.MAGIC] == 2:
        if size < v2.HEADER_BYTES or not _is_header(raw, p, size, high - base):
            return np.int64(0)
        out[CHECKED_BYTES] += size
        crc = crc32c(raw, p + v2.ATTRIBUTES, size - v2.ATTRIBUTES)
        return size if crc == np.uint32(be32(raw, p + v2.CRC)) else np.int64(0)
    if not _is_old_header(raw, p, size):
        return np.int64(0)
    out[CHECKED_BYTES] += size
    check_message(raw, p + 12, p + size, scratch)
    return size if scratch[0] == 0 else np.int64(0)


@njit(inline="always")
def _may_be_batch(raw, p, left, most_high_bits):
    """Return whether a batch may begin at `p`. Only the magic, the high byte of the offset, and the length are checked,
    which is cheap enough for every byte."""
    q = np.uint64(p)  # an unsigned position avoids the check for Python's negative positions
    if raw[q + np.uint64(16)] > 2 or raw[q] > most_high_bits:
        return False
    size = (
        np.uint64(raw[q + np.uint64(8)]) << np.uint64(24)
        | np.uint64(raw[q + np.uint64(9)]) << np.uint64(16)
        | np.uint64(raw[q + np.uint64(10)]) << np.uint64(8)
        | np.uint64(raw[q + np.uint64(11)])
    )
    return np.uint64(_MIN_V0_BYTES - 12) <= size <= left


@njit
def _end_by_header(raw, p, n, low, high, out, scratch):
    """Return the end of the damaged batch at `p` according to its own header, if a batch or the end of the file
    follows; else -1."""
    if n - p < _MIN_BYTES:
        return np.int64(-1)
    size = np.int64(be32(raw, p + v2.BATCH_LENGTH)) + v2.LENGTH_PREFIX_BYTES
    if size < _MIN_V0_BYTES or size > n - p:
        return np.int64(-1)
    if size == n - p or _batch_bytes(raw, p + size, n, low, high, out, scratch) > 0:
        return p + size
    return np.int64(-1)


@kernel(allocates=True)
def next_batch(raw, p, low, high, most_checked_bytes, out):
    """Find the next batch after damage at `p`, and store its position in `out[FOUND]` (the length of `raw`: none).

    The length in the damaged header is trusted if a batch or the end of the file follows at that place, unless a chain
    of valid batches in between leads exactly to that place: in that case the chain's first batch is the result. `out`
    is int64[2]; `out[CHECKED_BYTES]` is increased by the bytes whose checksum was computed, and the search ends when
    that number exceeds `most_checked_bytes`.
    """
    n = np.int64(raw.shape[0])
    scratch = np.zeros(6, np.int64)
    claimed_end = _end_by_header(raw, p, n, low, high, out, scratch)
    end = claimed_end if claimed_end >= 0 else n
    q = np.int64(p) + 1
    most_high_bits = np.uint8((high - 1) >> 56)
    while q < end and n - q >= _MIN_BYTES:
        if not _may_be_batch(raw, q, np.uint64(n - q), most_high_bits):
            q += 1
            continue
        size = _batch_bytes(raw, q, n, low, high, out, scratch)
        if size > 0:
            if claimed_end < 0:
                out[FOUND] = q
                return
            at = q + size
            while at < claimed_end:
                size = _batch_bytes(raw, at, n, low, high, out, scratch)
                if size == 0:
                    break
                at += size
            if at == claimed_end:
                out[FOUND] = q
                return
        if out[CHECKED_BYTES] > most_checked_bytes:
            break
        q += 1
    out[FOUND] = end


@kernel(allocates=True)
def check_records(raw, table, bad):
    """Set `bad[row]` (uint8) of uncompressed magic 2 batches whose records (timestamps aside) do not fit the header."""
    state = np.zeros(STATE_SIZE, np.int64)
    for row in range(table.shape[0]):
        batch = table[row]
        if batch.magic != 2 or batch.attributes & v2.CODEC_MASK or bad[row]:
            continue
        start = np.int64(batch.position) + v2.HEADER_BYTES
        code = check_block(
            raw[start : np.int64(batch.position) + batch.size_bytes], batch.base_offset, batch.last_offset,
            np.int64(batch.record_count), batch.base_timestamp_ms, batch.max_timestamp_ms,
            np.int64(batch.attributes), state,
        )  # fmt: skip
        bad[row] = code not in (0, RECORD_TIMESTAMP, MAX_TIMESTAMP_OFF)


@njit(inline="always")
def _best_below(scores, rows, rank):
    """Query the Fenwick tree `scores`/`rows`: return (score, row) of the best among ranks [0, rank), or (-1, -1)."""
    best, row = np.int64(-1), np.int64(-1)
    while rank > 0:
        if scores[rank] > best:
            best, row = scores[rank], rows[rank]
        rank -= rank & -rank
    return best, row


@kernel(allocates=True)
def best_chain(base, last, below, touching, ranks, first_offset, keep):
    """Mark in `keep` (uint8) a longest chain of batches, in file order, whose offsets increase without overlap.

    Among the longest chains, prefer steps that pass over one batch with as many offsets as are missing: in such a chain
    the base offset of the omitted batch is wrong, and not that of its neighbour. Avoid steps that pass over batches
    although no offset is missing between the two ends of the step: no offsets are left for the batches in between.

    Dynamic programming in O(n log n): `scores` is a Fenwick tree of the best score by rank of `last`. `ranks`: index of
    each `last` among its distinct values; `below`: how many of these values are below each `base`; `touching`: 1 if the
    highest value below is `base - 1`.
    """
    n = base.shape[0]
    size = np.int64(ranks.max()) + 1
    scores, rows = np.full(size + 1, -1, np.int64), np.full(size + 1, -1, np.int64)
    score_ending_at, row_ending_at = np.full(size, -1, np.int64), np.full(size, -1, np.int64)
    score, previous = np.zeros(n, np.int64), np.full(n, -1, np.int64)
    batch_score = 2 * np.int64(n) + 2  # more than all bonuses together, so that the length decides first
    for j in range(n):
        score[j] = batch_score + (j == 0 or base[j] != first_offset)
        # A step over a gap in the offsets.
        found, row = _best_below(scores, rows, below[j] - touching[j])
        if found >= 0 and found + batch_score + 1 > score[j]:
            score[j], previous[j] = found + batch_score + 1, row
        # A step without a gap, over rejected batches: no bonus.
        touched = below[j] - 1
        if touching[j] and score_ending_at[touched] >= 0 and score_ending_at[touched] + batch_score > score[j]:
            score[j], previous[j] = score_ending_at[touched] + batch_score, row_ending_at[touched]
        if j > 0:
            # A step from the preceding batch of the file.
            if last[j - 1] < base[j] and score[j - 1] + batch_score + 1 > score[j]:
                score[j], previous[j] = score[j - 1] + batch_score + 1, j - 1
            # A step over one batch that would fill the gap.
            fills = j > 1 and base[j] - last[j - 2] - 1 == last[j - 1] - base[j - 1] + 1
            if fills and score[j - 2] + batch_score + 2 > score[j]:
                score[j], previous[j] = score[j - 2] + batch_score + 2, j - 2
            # Insert the preceding batch into the tree.
            rank = np.int64(ranks[j - 1])
            if score[j - 1] > score_ending_at[rank]:
                score_ending_at[rank], row_ending_at[rank] = score[j - 1], j - 1
            rank += 1
            while rank <= size:
                if score[j - 1] > scores[rank]:
                    scores[rank], rows[rank] = score[j - 1], j - 1
                rank += rank & -rank
    row = np.int64(np.argmax(score))
    keep[:] = 0
    while row >= 0:
        keep[row] = 1
        row = previous[row]
