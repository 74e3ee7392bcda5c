"""Compares the entries and the places (entries.py) of replicas, offset by offset."""

from __future__ import annotations

import numpy as np
from numba import njit

from keytail.kernels.audit.entries import (
    CONTENT,
    EPOCHS,
    HIGH,
    IS_CONTROL,
    IS_TRANSACTIONAL,
    KEYLESS,
    LOW,
    NULL,
    OFFSET,
    PRODUCER,
    TIMELESS,
    TIMESTAMP,
    WHAT,
)
from keytail.kernels.jit import kernel

# Kinds of differences between the places of one offset, and the number of kinds.
OTHER_CONTROL, OTHER_CONTROL_TYPE, OTHER_KEY, PLACE_KINDS = range(4)

# Differences between two records of one offset and key.
(
    OTHER_VALUE,
    OTHER_HEADERS,
    OTHER_TIMESTAMP,
    OTHER_LEADER_EPOCH,
    OTHER_PRODUCER_ID,
    OTHER_PRODUCER_EPOCH,
    OTHER_SEQUENCE,
    OTHER_TRANSACTIONAL,
    DIFFERENCES,
) = range(9)
COMMON = DIFFERENCES  # index of one more counter, for records that at least two replicas have
_NOTHING = np.int64(2**63 - 1)


@kernel
def merge_places(places, cursor, end, end_offset, counts, differing):
    """Compare the places at each offset below `end_offset`; return how many rows of `differing` are in use.

    Returns -1 if the offsets of a replica do not increase. `counts` has one counter per kind of difference. Each row of
    `differing` contains the kind and the indexes of the two places; rows are written while there is room.
    """
    replicas = cursor.shape[0]
    used, last = 0, np.int64(-1)
    while True:
        offset = _NOTHING
        for r in range(replicas):
            if cursor[r] < end[r]:
                offset = min(offset, places[cursor[r], 0])
        if offset >= end_offset:
            return used
        if offset <= last:
            return -1
        last = offset
        first, kind = np.int64(-1), np.int64(-1)
        other = np.int64(-1)
        for r in range(replicas):
            if cursor[r] == end[r] or places[cursor[r], 0] != offset:
                continue
            at = cursor[r]
            cursor[r] += 1
            if first < 0:
                first = at
            elif places[at, 1] != places[first, 1] and kind < 0:
                a, b = places[first, 1], places[at, 1]
                kind, other = OTHER_KEY, at
                if (a ^ b) & IS_CONTROL:
                    kind = OTHER_CONTROL
                elif a & IS_CONTROL and (a ^ b) & 0xFF00:
                    kind = OTHER_CONTROL_TYPE
        if kind >= 0:
            counts[kind] += 1
            if used < differing.shape[0]:
                differing[used, 0] = kind
                differing[used, 1] = first
                differing[used, 2] = other
                used += 1


@njit
def seen(replica, offset, log_starts, gaps):
    """Return whether the audit would have read a record of the replica at this offset."""
    if offset < log_starts[replica]:
        return False
    seen = True
    for g in range(gaps.shape[0]):
        if gaps[g, 0] == replica and gaps[g, 1] <= offset < gaps[g, 2]:
            seen = False
    return seen


@njit
def _note(kind, a, b, counts, examples):
    if counts[kind] < examples.shape[1]:
        examples[kind, counts[kind], 0] = a
        examples[kind, counts[kind], 1] = b
    counts[kind] += 1


@njit
def _compare(entries, a, b, counts, examples):
    """Count the differences between two entries of one offset and key."""
    what_a, what_b = entries[a, WHAT], entries[b, WHAT]
    content = entries[a, CONTENT] ^ entries[b, CONTENT]
    if content >> 32 != 0 or (what_a ^ what_b) & NULL:
        _note(OTHER_VALUE, a, b, counts, examples)
    if content & 0xFFFFFFFF != 0:
        _note(OTHER_HEADERS, a, b, counts, examples)
    if entries[a, TIMESTAMP] != entries[b, TIMESTAMP] and (what_a | what_b) & TIMELESS == 0:
        _note(OTHER_TIMESTAMP, a, b, counts, examples)
    epochs = entries[a, EPOCHS] ^ entries[b, EPOCHS]
    if epochs >> 32 != 0:
        _note(OTHER_LEADER_EPOCH, a, b, counts, examples)
    if entries[a, PRODUCER] != entries[b, PRODUCER]:
        _note(OTHER_PRODUCER_ID, a, b, counts, examples)
    if (what_a ^ what_b) >> 16 != 0:
        _note(OTHER_PRODUCER_EPOCH, a, b, counts, examples)
    if epochs & 0xFFFFFFFF != 0:
        _note(OTHER_SEQUENCE, a, b, counts, examples)
    if (what_a ^ what_b) & IS_TRANSACTIONAL:
        _note(OTHER_TRANSACTIONAL, a, b, counts, examples)


@njit(inline="always")
def _same_key(entries, a, b):
    same = entries[a, LOW] == entries[b, LOW] and entries[a, HIGH] == entries[b, HIGH]
    return same and (entries[a, WHAT] ^ entries[b, WHAT]) & (KEYLESS | IS_CONTROL) == 0


@kernel
def merge(entries, cursor, end, log_starts, end_offset, gaps, counts, examples, missing_at, missing_in, spans, in_span):
    """Compare the replicas' entries below `end_offset`, offset by offset; return the number of records that at least
    one replica lacks.

    Replica r has `entries[cursor[r]:end[r]]`, in ascending offsets. An entry of another key at the same offset is
    another record. For a missing record, `missing_at` receives the index of its first entry, and `missing_in` the mask
    of the replicas that should have the record and do not. `counts` and `examples` (two entries each, the first
    examples of a kind) are for the differences between records; `in_span[k]` becomes 1 if two replicas share a record
    within `spans[k]` (from, to).
    """
    replicas = cursor.shape[0]
    missing = np.int64(0)
    while True:
        offset = _NOTHING
        for r in range(replicas):
            if cursor[r] < end[r]:
                offset = min(offset, entries[cursor[r], OFFSET])
        if offset >= end_offset:
            return missing
        first, having, lacking = np.int64(-1), 0, np.int64(0)
        for r in range(replicas):
            at = cursor[r]
            here = at < end[r] and entries[at, OFFSET] == offset
            if here and first < 0:
                first = at
                having = 1
                cursor[r] += 1
            elif here and _same_key(entries, first, at):
                _compare(entries, first, at, counts, examples)
                having += 1
                cursor[r] += 1
            elif seen(r, offset, log_starts, gaps):
                lacking |= np.int64(1) << r
        if lacking != 0:
            missing_at[missing] = first
            missing_in[missing] = lacking
            missing += 1
        if having > 1:
            counts[COMMON] += 1
            for k in range(spans.shape[0]):
                if spans[k, 0] <= offset < spans[k, 1]:
                    in_span[k] = 1
