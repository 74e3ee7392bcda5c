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
SUPERSEDED, DELETED, ABORTED, MARKER, DROPPED_KEYLESS, CLEANING_UNKNOWN, UNKNOWN, LOST, REASONS = range(9)

# Rows of the limits of cleaning: the offset that cleaning is known to have reached, and the offset that it may have
# reached.
KNOWN, POSSIBLE = range(2)
_NOWHERE = np.int64(2**63 - 1)

# Columns of transaction events, kinds of findings on transactions, and columns of these findings. F_FIRST: offset of
# the transaction's first data; F_ABORTED, F_COMMITTED, F_REPLICAS: bit masks of the replicas with an ABORT or a COMMIT
# marker, and of the replicas concerned.
E_PRODUCER, E_OFFSET, E_KIND, E_REPLICA, EVENT_COLUMNS = range(5)
DATA = 2  # an event's kind, besides ABORT and COMMIT
DECIDED_OTHERWISE, MARKER_LOST, MARKER_EARLY, TRANSACTION_KINDS = range(4)
F_KIND, F_PRODUCER, F_FIRST, F_OFFSET, F_ABORTED, F_COMMITTED, F_REPLICAS, FOUND_COLUMNS = range(8)


@njit
def _fate(markers, producer, offset):
    """Return how the producer's transaction with this offset ended, or -1. `markers` (producer, offset, kind) are
    sorted."""
    row = next_marker(markers, producer, offset)
    return markers[row, 2] if row >= 0 else np.int64(-1)


@njit
def _slot(slots, keys, low, high):
    """Return the slot of the key, or the free slot for the key; `slots` contain indexes of `keys` + 1 (0: free)."""
    mask = slots.shape[0] - 1
    i = np.int64(mixed(low)) & mask
    while slots[i] != 0 and (keys[slots[i] - 1, 0] != low or keys[slots[i] - 1, 1] != high):
        i = (i + 1) & mask
    return i


@kernel
def index_keys(entries, missing_at, slots, keys):
    """Number the keys of the missing records in `keys` (int64[n, 2]); return how many keys there are.

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
def first_removable(entries, begin, end, replica, slots):
    """Return the first offset that no cleaner of the replica can have reached; the largest number if there is no such
    offset.

    At this offset the replica has a record without a key, or any replica has a record whose key has an older record in
    this replica: a cleaner would have removed the record without a key, or the older record. Records in transactions
    are omitted, because aborted records supersede nothing. `slots` is zeroed, and its length is a power of two and more
    than twice the number of the replica's entries.
    """
    found = _NOWHERE
    for i in range(begin[replica], end[replica]):
        what = entries[i, WHAT]
        if what & IS_CONTROL == 0 and (what & KEYLESS or (what & IS_TRANSACTIONAL == 0 and _add(slots, entries, i))):
            found = entries[i, OFFSET]
            break
    for r in range(begin.shape[0]):
        for i in range(begin[r], end[r]):
            if r == replica or entries[i, OFFSET] >= found:
                break
            if entries[i, WHAT] & (IS_CONTROL | KEYLESS | IS_TRANSACTIONAL):
                continue
            at = _place(slots, entries, i)
            if slots[at] != 0 and entries[slots[at] - 1, OFFSET] < entries[i, OFFSET]:
                found = entries[i, OFFSET]
    return found


@njit
def _place(slots, entries, i):
    """Return the slot of the key of entry `i`, or the free slot for the key; `slots` contain indexes + 1 (0: free)."""
    mask = slots.shape[0] - 1
    at = np.int64(mixed(entries[i, LOW])) & mask
    while slots[at] != 0:
        other = slots[at] - 1
        if entries[other, LOW] == entries[i, LOW] and entries[other, HIGH] == entries[i, HIGH]:
            break
        at = (at + 1) & mask
    return at


@njit
def _add(slots, entries, i):
    """Return whether the table has an entry of the same key as entry `i`; if the table has none, add entry `i`."""
    at = _place(slots, entries, i)
    if slots[at] != 0:
        return True
    slots[at] = i + 1
    return False


@kernel
def note_keys(entries, begin, end, end_offset, last, markers, slots, keys, newest, oldest, later, anywhere, tombstones):
    """Note the offsets of the numbered keys in each replica, in committed transactions and outside of transactions.

    `newest[key, replica]` is the last offset in that replica; `oldest[key]` is the first offset in any replica. For
    both limits of each replica (`last`, int64[2, replicas], inclusive), `later[limit, key, replica]` is the last offset
    up to the limit in that replica, `anywhere` the last offset in any replica, and `tombstones` the offset of the last
    tombstone in any replica below `end_offset`. The caller initialises all arrays to -1, `oldest` to the largest
    number.
    """
    replicas = begin.shape[0]
    for r in range(replicas):
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
            for which in range(2):
                if offset <= last[which, r]:
                    later[which, key, r] = max(later[which, key, r], offset)
                for other in range(replicas):
                    if offset <= last[which, other]:
                        anywhere[which, key, other] = max(anywhere[which, key, other], offset)
                        if what & NULL and offset < end_offset:
                            tombstones[which, key, other] = max(tombstones[which, key, other], offset)


@njit
def _by_cleaning(offset, is_all_seen, newest, later, anywhere, tombstone):
    """Return why a cleaner has removed a record of a key, or LOST if none would have.

    `newest` is the last record of the key in the replica. Of the records below the offset that the cleaner reached,
    `later` is the last record in the replica, `anywhere` the last record in any replica, and `tombstone` the last
    tombstone in any replica. A later record above that offset explains the removal only if a tombstone of the key may
    have removed the record before: a tombstone was found, or the audit may have missed one. If the later record is also
    missing, the replica has lost it, unless an older record shows that the cleaner did not reach it.
    """
    if later > offset or (newest > offset and (tombstone >= offset or not is_all_seen)):
        return SUPERSEDED
    if newest < 0 and tombstone >= offset:
        return DELETED
    if anywhere > offset and (newest < 0 or newest > offset):
        return SUPERSEDED
    return LOST


@kernel
def judge(
    entries, missing_at, missing_in, replicas, end_offset, limits, last, gaps, markers, slots, keys, newest, oldest,
    later, anywhere, tombstones, verdicts, early,
):  # fmt: skip
    """Determine the reason why each missing record is missing: the most serious reason of all replicas that lack the
    record.

    `limits` (int64[2, replicas]; rows KNOWN and POSSIBLE) are the offsets below which cleaning may have removed
    records. `last` and the arrays from `markers` to `tombstones` are those of `note_keys`. `early[m]` is 1
    for a tombstone that one replica has removed while another still has older records of its key.
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
        always = np.int64(LOST)  # a reason for its removal that does not depend on other records
        if what & IS_TRANSACTIONAL and _fate(markers, entries[at, PRODUCER], offset) == ABORT:
            always = np.int64(ABORTED)
        elif what & KEYLESS:
            always = np.int64(DROPPED_KEYLESS)
        key = np.int64(-1)
        if what & KEYLESS == 0:
            key = slots[_slot(slots, keys, entries[at, LOW], entries[at, HIGH])] - 1
        for r in range(replicas):
            if missing_in[m] >> r & 1 == 0:
                continue
            reason = np.int64(LOST)
            for which in range(2):
                if offset >= limits[which, r]:
                    continue
                found = always
                if always == LOST:
                    is_all_seen = last[which, r] < end_offset and gaps.shape[0] == 0
                    found = np.int64(_by_cleaning(
                        offset, is_all_seen, newest[key, r], later[which, key, r], anywhere[which, key, r],
                        tombstones[which, key, r],
                    ))  # fmt: skip
                if found != LOST:
                    reason = found if which == KNOWN else np.int64(CLEANING_UNKNOWN)
                    break
            if reason == DELETED and what & NULL and oldest[key] < offset:
                early[m] = 1
            if reason == LOST and always == LOST and offset < limits[POSSIBLE, r]:
                for g in range(gaps.shape[0]):
                    if gaps[g, 0] == r and gaps[g, 2] > offset:
                        reason = np.int64(UNKNOWN)
            worst = max(worst, reason)
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
    offset, kind (ABORT if they disagree). Transactions that ended differently, and replicas that have data without the
    marker that other replicas have, are counted, and written to `found` while it has room. Markers that one replica has
    removed while another replica still has data are only counted.
    """
    n_found = n_markers = np.int64(0)
    i, n = 0, events.shape[0]
    producer, holding, first = np.int64(-2), np.int64(0), np.int64(-1)
    while i < n:
        if events[i, E_PRODUCER] != producer:
            producer, holding, first = events[i, E_PRODUCER], np.int64(0), np.int64(-1)
        offset = events[i, E_OFFSET]
        if events[i, E_KIND] == DATA:
            holding |= np.int64(1) << events[i, E_REPLICA]
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
