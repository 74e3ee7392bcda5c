"""The proof's table of keys: the latest record of each key and its outcome, in 24 bytes per slot.

The table uses open addressing by the hash of the key (`key_hash.py`) and stores no key bytes. Offsets are put in
ascending order; an offset put as PRESENT may be put a second time, with its outcome. The caller ensures that one slot
is always free.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from keytail.kernels.jit import kernel
from keytail.kernels.native import prefetch

SLOT_WORDS = 3  # low word of the hash, high word with the flags below in its low bits, offset + 1 (0: free)
_PREFETCH_DISTANCE = 16
_LINE_WORDS = 8

# Outcomes of a record.
DROPPED = 0
KEPT = 1
EXPIRED = 2  # a tombstone that was removed after its retention
PRESENT = 3  # not known yet: a later pass decides
OLDER_KEPT = 4  # an older record of the key is in the output
FLAGS = 7  # bits that are 0 in each hash


@register_jitable
def _slot_of(high, capacity):
    return np.int64((high >> np.uint64(32)) * np.uint64(capacity) >> np.uint64(32))


@register_jitable
def low_slot_of(low, capacity):
    """Return the slot for a hash, by bits that determine neither the shard of an entry nor its slot in the table that
    the entry comes from."""
    return np.int64((low & np.uint64(0xFFFFFFFF)) * np.uint64(capacity) >> np.uint64(32))


@register_jitable(forceinline=True)
def _put(slots, capacity, low, high, offset, outcome):
    """Make `offset` the latest record of a key, unless a later record is known; return 1 if the key is new, else 0."""
    clear = ~np.uint64(FLAGS)
    i = _slot_of(high, capacity)
    while True:
        at = np.uint64(SLOT_WORDS * i)  # unsigned: an index that could be negative costs a comparison
        flags_at, end_at = at + np.uint64(1), at + np.uint64(2)
        if slots[end_at] == 0:
            break
        held = slots[flags_at]
        if slots[at] == low and held & clear == high & clear:
            known = np.int64(slots[end_at]) - 1
            if offset < known:
                if outcome == KEPT:
                    slots[flags_at] = held | np.uint64(OLDER_KEPT)
                return 0
            older = held & np.uint64(OLDER_KEPT)
            if offset > known and held & np.uint64(3) == np.uint64(KEPT):
                older = np.uint64(OLDER_KEPT)
            slots[flags_at] = high & clear | older | np.uint64(outcome)
            slots[end_at] = np.uint64(offset + 1)
            return 0
        i += 1
        if i == capacity:
            i = 0
    slots[at] = low
    slots[flags_at] = high & clear | np.uint64(outcome)
    slots[end_at] = np.uint64(offset + 1)
    return 1


@kernel
def put_keys(hashes, records, n, slots, used):
    """Put the first `n` notes (`state.Notes`) into the table; return (slots used, 1 if the table is full, else 0).

    Slots are prefetched `_PREFETCH_DISTANCE` keys before their use.
    """
    capacity = slots.shape[0] // SLOT_WORDS
    for i in range(min(n, _PREFETCH_DISTANCE)):
        prefetch(slots, SLOT_WORDS * _slot_of(hashes[1, i], capacity))
    for i in range(n):
        if i + _PREFETCH_DISTANCE < n:
            at = SLOT_WORDS * _slot_of(hashes[1, i + _PREFETCH_DISTANCE], capacity)
            prefetch(slots, at)
            prefetch(slots, at + _LINE_WORDS)
        used += _put(slots, capacity, hashes[0, i], hashes[1, i], records[0, i], records[1, i])
        if used >= capacity - 1:  # one slot must stay free so that searches end
            return used, 1
    return used, 0


@kernel
def rehash(old, new, of_shard):
    """Copy every entry of a table into an empty table; `of_shard`: slots are determined by `low_slot_of`."""
    capacity = new.shape[0] // SLOT_WORDS
    for i in range(0, old.shape[0], SLOT_WORDS):
        if old[i + 2] != 0:
            j = low_slot_of(old[i], capacity) if of_shard else _slot_of(old[i + 1], capacity)
            while new[SLOT_WORDS * j + 2] != 0:
                j += 1
                if j == capacity:
                    j = 0
            for word in range(SLOT_WORDS):
                new[SLOT_WORDS * j + word] = old[i + word]


@kernel
def first_unjustified(slots):
    """Return the lowest offset of a key's latest record that was removed without reason (-1: none), and 1 if it is an
    expired tombstone, which must not be removed because an older record of its key was retained, else 0."""
    worst = np.int64(-1)
    older_retained = 0
    for i in range(0, slots.shape[0], SLOT_WORDS):
        if slots[i + 2] != 0:
            action = slots[i + 1] & np.uint64(3)
            older_kept = slots[i + 1] & np.uint64(OLDER_KEPT) != 0
            if action == np.uint64(DROPPED) or (action == np.uint64(EXPIRED) and older_kept):
                offset = np.int64(slots[i + 2]) - 1
                if worst < 0 or offset < worst:
                    worst = offset
                    older_retained = 1 if action == np.uint64(EXPIRED) else 0
    return worst, older_retained
