"""Explains missing records by the keys that replicas have, and follows transactions over all replicas."""

from __future__ import annotations

import numpy as np
from numba import njit

from keytail.kernels.audit.differences import seen
from keytail.kernels.audit.entries import (
    HIGH,
    IS_CONTROL,
    IS_TRANSACTIONAL,
    KEYLESS,
    LOW,
    NULL,
    OFFSET,
    PRODUCER,
    WHAT,
    mixed,
)
from keytail.kernels.jit import kernel
from keytail.kernels.proof.markers import next_marker
from keytail.kernels.transactions import ABORT, COMMIT

# Reasons why a record is missing from a replica, the most serious last.
SUPERSEDED, DELETED, ABORTED, MARKER, DROPPED_KEYLESS, UNKNOWN, LOST, REASONS = range(8)

# Columns of transaction events, kinds of findings on transactions, and columns of these findings.
E_PRODUCER, E_OFFSET, E_KIND, E_REPLICA, EVENT_COLUMNS = range(5)
DATA = 2  # an event's kind, besides ABORT and COMMIT
DECIDED_OTHERWISE, MARKER_LOST, MARKER_EARLY, TRANSACTION_KINDS = range(4)
F_KIND, F_PRODUCER, F_FIRST, F_OFFSET, F_ABORTED, F_COMMITTED, F_REPLICAS, FOUND_COLUMNS = range(8)


@njit
def _fate(markers, producer, offset):
    """Return how the transaction with this offset ended, by sorted markers (producer, offset, kind); -1: still open."""
    row = next_marker(markers, producer, offset)
    return markers[row, 2] if row >= 0 else np.int64(-1)


@njit
def _slot(slots, keys, low, high):
    """Return the slot of the key, or the free slot for it, in the table `slots` of numbers of `keys` + 1 (0: free)."""
    mask = slots.shape[0] - 1
    i = np.int64(mixed(low)) & mask
    while slots[i] != 0 and (keys[slots[i] - 1, 0] != low or keys[slots[i] - 1, 1] != high):
        i = (i + 1) & mask
    return i


@kernel
def index_keys(entries, missing_at, slots, keys):
    """Number the keys of the missing records; return how many there are.

    `slots` is zeroed, and its length is a power of two and more than twice the number of missing records.
    """
    used = 0
    for m in range(missing_at.shape[0]):
        at = missing_at[m]
        if entries[at, WHAT] & (IS_CONTROL | KEYLESS):
            continue
        slot = _slot(slots, keys, entries[at, LOW], entries[at, HIGH])
        if slots[slot] == 0:
            keys[used, 0] = entries[at, LOW]
            keys[used, 1] = entries[at, HIGH]
            used += 1
            slots[slot] = used
    return used


@kernel
def note_keys(entries, begin, end, end_offset, markers, slots, keys, newest, oldest, tombstone):
    """Note what the replicas hold of each numbered key, in committed transactions and outside of transactions.

    `newest[key, replica]` is the last offset in that replica; `oldest[key]` is the first offset in any replica,
    `tombstone[key]` that of the last tombstone below `end_offset`. The caller initialises all to -1, `oldest` to the
    largest number.
    """
    for r in range(begin.shape[0]):
        for i in range(begin[r], end[r]):
            what = entries[i, WHAT]
            if what & (IS_CONTROL | KEYLESS):
                continue
            slot = _slot(slots, keys, entries[i, LOW], entries[i, HIGH])
            if slots[slot] == 0:
                continue
            key, offset = slots[slot] - 1, entries[i, OFFSET]
            if what & IS_TRANSACTIONAL and _fate(markers, entries[i, PRODUCER], offset) != COMMIT:
                continue
            newest[key, r] = max(newest[key, r], offset)
            oldest[key] = min(oldest[key], offset)
            if what & NULL and offset < end_offset:
                tombstone[key] = max(tombstone[key], offset)


@kernel
def judge(
    entries, missing_at, missing_in, replicas, limit, keyless_limit, gaps, markers, slots, keys, newest, oldest,
    tombstone, verdicts, early,
):  # fmt: skip
    """Determine why each missing record is missing: the most serious reason of all replicas that lack it.

    Cleaning removes records below `limit`, and records without a key below `keyless_limit`. `early[m]` is 1 for a
    tombstone that one replica has removed while another still has older records of its key.
    """
    for m in range(missing_at.shape[0]):
        at = missing_at[m]
        what, offset = entries[at, WHAT], entries[at, OFFSET]
        early[m] = 0
        worst = np.int64(0)
        if what & IS_CONTROL:
            kind = (what >> 8 & 0xFF) - 1
            verdicts[m] = MARKER if kind in (ABORT, COMMIT) else LOST
            continue
        if what & IS_TRANSACTIONAL and _fate(markers, entries[at, PRODUCER], offset) == ABORT:
            verdicts[m] = ABORTED
            continue
        key = np.int64(-1)
        if what & KEYLESS == 0:
            key = slots[_slot(slots, keys, entries[at, LOW], entries[at, HIGH])] - 1
        for r in range(replicas):
            if missing_in[m] >> r & 1 == 0:
                continue
            reason = LOST
            if key < 0:
                if offset < keyless_limit:
                    reason = DROPPED_KEYLESS
            elif offset < limit:
                if newest[key, r] > offset:
                    reason = SUPERSEDED
                elif newest[key, r] < 0 and offset <= tombstone[key] < limit:
                    reason = DELETED
                    if what & NULL and oldest[key] < offset:
                        early[m] = 1
                else:
                    for g in range(gaps.shape[0]):
                        if gaps[g, 0] == r and gaps[g, 2] > offset:
                            reason = UNKNOWN
            worst = max(worst, np.int64(reason))
        verdicts[m] = worst


@njit
def _found(found, n, kind, producer, first, offset, aborted, committed, replicas):
    if n < found.shape[0]:
        found[n, F_KIND] = kind
        found[n, F_PRODUCER] = producer
        found[n, F_FIRST] = first
        found[n, F_OFFSET] = offset
        found[n, F_ABORTED] = aborted
        found[n, F_COMMITTED] = committed
        found[n, F_REPLICAS] = replicas
        return n + 1
    return n


@kernel
def settle(events, replicas, log_starts, end_offset, gaps, counts, found, markers):
    """Follow the transactions of all replicas together; return (rows of `found`, rows of `markers`) in use.

    `events` are sorted by producer, offset and kind. `markers` receives the markers that any replica has: producer,
    offset, kind (ABORT if they disagree). Counted, and noted while `found` has room, are transactions that ended
    differently, and replicas that have data without the marker that the others have. Markers that one replica has
    dropped while another still has data are only counted.
    """
    n_found = n_markers = np.int64(0)
    i, n = 0, events.shape[0]
    producer, holding, first = np.int64(-2), np.int64(0), np.int64(-1)
    while i < n:
        if events[i, E_PRODUCER] != producer:
            producer, holding, first = events[i, E_PRODUCER], np.int64(0), np.int64(-1)
        offset = events[i, E_OFFSET]
        if events[i, E_KIND] == DATA:
            r = events[i, E_REPLICA]
            if offset >= log_starts[r]:
                holding |= np.int64(1) << r
                if first < 0:
                    first = offset
            i += 1
            continue
        aborted = committed = np.int64(0)
        while i < n and events[i, E_PRODUCER] == producer and events[i, E_OFFSET] == offset:
            if events[i, E_KIND] == DATA:
                break
            if events[i, E_KIND] == ABORT:
                aborted |= np.int64(1) << events[i, E_REPLICA]
            else:
                committed |= np.int64(1) << events[i, E_REPLICA]
            i += 1
        markers[n_markers, 0] = producer
        markers[n_markers, 1] = offset
        markers[n_markers, 2] = ABORT if aborted != 0 else COMMIT
        n_markers += 1
        if offset < end_offset:
            if aborted != 0 and committed != 0 and holding != 0:
                counts[DECIDED_OTHERWISE] += 1
                n_found = _found(
                    found, n_found, DECIDED_OTHERWISE, producer, first, offset, aborted, committed, aborted | committed
                )
            lost = early = np.int64(0)
            for r in range(replicas):
                bit = np.int64(1) << r
                if (aborted | committed) & bit or not seen(r, offset, log_starts, gaps):
                    continue
                if holding & bit:
                    lost |= bit
                elif holding != 0:
                    early |= bit
            if lost != 0:
                counts[MARKER_LOST] += 1
                n_found = _found(found, n_found, MARKER_LOST, producer, first, offset, aborted, committed, lost)
            if early != 0:
                counts[MARKER_EARLY] += 1
        holding, first = np.int64(0), np.int64(-1)
    return n_found, n_markers
