"""Finds batches after damage, checks their records, and determines which of them fit together.

The array is a whole segment file. A candidate is checked by its header first and then by its checksum; the rules are in
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

_LEAST_BYTES = 17  # up to the magic byte
_LEAST_V0_BYTES = 26
_LEAST_RECORD_BYTES = 7
_MOST_CODEC, _MOST_OLD_CODEC = 4, 3

# Positions in `out` of `next_batch`.
FOUND, CHECKED_BYTES = 0, 1


@njit
def _is_header(raw, p, size, most_span):
    """Return whether a broker can have written this header of version 2.

    Few bytes pass this check, which saves slow checksums.
    """
    span, count = np.int64(be32(raw, p + v2.LAST_OFFSET_DELTA)), np.int64(be32(raw, p + v2.RECORD_COUNT))
    codec = raw[p + v2.ATTRIBUTES + 1] & 7
    if span < 0 or span >= most_span or count < 0 or count > span + 1 or codec > _MOST_CODEC:
        return False
    if be32(raw, p + v2.LEADER_EPOCH) < -1:
        return False
    if be64(raw, p + v2.MAX_TIMESTAMP) < -1 or be64(raw, p + v2.PRODUCER_ID) < -1:
        return False
    if be16(raw, p + v2.PRODUCER_EPOCH) < -1 or be32(raw, p + v2.BASE_SEQUENCE) < -1:
        return False
    return codec != 0 or count * _LEAST_RECORD_BYTES <= size - v2.HEADER_BYTES


@njit
def _is_old_header(raw, p, size):
    """Return the same for a message of magic 0 or 1: key and value fill it to its last byte."""
    at = p + 18 if raw[p + 16] == 0 else p + 26
    end = p + size
    if at + 8 > end or raw[p + 17] & 7 > _MOST_OLD_CODEC or raw[p + 17] > 0x0F:
        return False
    key_bytes = max(np.int64(be32(raw, at)), np.int64(0))
    if be32(raw, at) < -1 or key_bytes > end - at - 8:
        return False
    value_bytes = np.int64(be32(raw, at + 4 + key_bytes))
    return value_bytes >= -1 and at + 8 + key_bytes + max(value_bytes, np.int64(0)) == end


@njit
def _batch_bytes(raw, p, n, low, high, out, scratch):
    """Return the size of the batch at `p` if its offsets are within [low, high) and its checksum is correct, else 0."""
    if n - p < _LEAST_BYTES or raw[p + v2.MAGIC] > 2:
        return np.int64(0)
    size = np.int64(be32(raw, p + v2.BATCH_LENGTH)) + v2.LENGTH_PREFIX_BYTES
    if size < _LEAST_V0_BYTES or size > n - p:
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
def _may_be_one(raw, p, left, most_high_bits):
    """Return whether the bytes that are wrong almost anywhere else allow a batch at `p`: cheap, for every byte."""
    q = np.uint64(p)  # unsigned avoids the check for Python's negative positions
    if raw[q + np.uint64(16)] > 2 or raw[q] > most_high_bits:
        return False
    size = (
        np.uint64(raw[q + np.uint64(8)]) << np.uint64(24)
        | np.uint64(raw[q + np.uint64(9)]) << np.uint64(16)
        | np.uint64(raw[q + np.uint64(10)]) << np.uint64(8)
        | np.uint64(raw[q + np.uint64(11)])
    )
    return np.uint64(_LEAST_V0_BYTES - 12) <= size <= left


@njit
def _landing(raw, p, n, low, high, out, scratch):
    """Return where the damaged batch at `p` ends by its own header, if a batch or the end of file follows; else -1."""
    if n - p < _LEAST_BYTES:
        return np.int64(-1)
    size = np.int64(be32(raw, p + v2.BATCH_LENGTH)) + v2.LENGTH_PREFIX_BYTES
    if size < _LEAST_V0_BYTES or size > n - p:
        return np.int64(-1)
    if size == n - p or _batch_bytes(raw, p + size, n, low, high, out, scratch) > 0:
        return p + size
    return np.int64(-1)


@kernel(allocates=True)
def next_batch(raw, p, low, high, most_checked_bytes, out):
    """Find where batches continue after the damage at `p`: `out[FOUND]`, above `p`; the length of `raw` if nowhere.

    If the damaged batch's own length leads to a batch, it is there, unless batches before that place lead there one by
    one: then the length was wrong. `out` is int64[2]; `out[CHECKED_BYTES]` grows by the bytes whose checksum was
    computed, and the search ends when it exceeds `most_checked_bytes`.
    """
    n = np.int64(raw.shape[0])
    scratch = np.zeros(6, np.int64)
    landing = _landing(raw, p, n, low, high, out, scratch)
    end = landing if landing >= 0 else n
    q = np.int64(p) + 1
    most_high_bits = np.uint8((high - 1) >> 56)
    while q < end and n - q >= _LEAST_BYTES:
        if not _may_be_one(raw, q, np.uint64(n - q), most_high_bits):
            q += 1
            continue
        size = _batch_bytes(raw, q, n, low, high, out, scratch)
        if size > 0:
            if landing < 0:
                out[FOUND] = q
                return
            at = q + size
            while at < landing:
                size = _batch_bytes(raw, at, n, low, high, out, scratch)
                if size == 0:
                    break
                at += size
            if at == landing:
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
        if batch.magic != 2 or batch.attributes & 7 or bad[row]:
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
    """Return (score, row) of the best among ranks [0, rank), or (-1, -1)."""
    best, row = np.int64(-1), np.int64(-1)
    while rank > 0:
        if scores[rank] > best:
            best, row = scores[rank], rows[rank]
        rank -= rank & -rank
    return best, row


@kernel(allocates=True)
def best_chain(base, last, below, touching, ranks, first_offset, keep):
    """Mark in `keep` (uint8) a longest chain of batches, in the order given, whose offsets increase without overlap.

    Of equally long chains, the one is chosen that has the fewest steps over rejected batches without skipping an
    offset: such a step leaves no offsets for the rejected batches. `ranks` is the index of each `last` among the
    distinct values of `last`, `below` how many of these are below each `base`, `touching` 1 if the highest of those is
    `base - 1`.
    """
    n = base.shape[0]
    size = np.int64(ranks.max()) + 1
    scores, rows = np.full(size + 1, -1, np.int64), np.full(size + 1, -1, np.int64)
    at_score, at_row = np.full(size, -1, np.int64), np.full(size, -1, np.int64)
    score, before = np.zeros(n, np.int64), np.full(n, -1, np.int64)
    item = np.int64(n) + 2  # more than all other steps together
    for j in range(n):
        score[j] = item + (j == 0 or base[j] != first_offset)
        found, row = _best_below(scores, rows, below[j] - touching[j])
        if found >= 0 and found + item + 1 > score[j]:
            score[j], before[j] = found + item + 1, row
        if touching[j] and at_score[below[j] - 1] >= 0 and at_score[below[j] - 1] + item > score[j]:
            score[j], before[j] = at_score[below[j] - 1] + item, at_row[below[j] - 1]
        if j > 0:
            if last[j - 1] < base[j] and score[j - 1] + item + 1 > score[j]:
                score[j], before[j] = score[j - 1] + item + 1, j - 1
            rank = np.int64(ranks[j - 1])
            if score[j - 1] > at_score[rank]:
                at_score[rank], at_row[rank] = score[j - 1], j - 1
            rank += 1
            while rank <= size:
                if score[j - 1] > scores[rank]:
                    scores[rank], rows[rank] = score[j - 1], j - 1
                rank += rank & -rank
    row = np.int64(np.argmax(score))
    keep[:] = 0
    while row >= 0:
        keep[row] = 1
        row = before[row]
