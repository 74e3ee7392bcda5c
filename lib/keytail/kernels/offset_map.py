"""An open-addressing table of 24-byte slots, each with a 128-bit key hash and the ordinal of the key's latest record.

A slot is free while its `value` is 0; used slots contain ordinal + 1. The home slot increases with the hash's high
word, so that rehashing into a larger table is one nearly sequential sweep.

The array `counts` (uint32, one item per slot, or empty) has the number of records that were put with the slot's key. A
count that has reached MAX_COUNTED does not increase further.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from keytail.kernels.jit import kernel
from keytail.kernels.native import prefetch

SLOT = np.dtype([("low", "u8"), ("high", "u8"), ("value", "i8")])
MAX_COUNTED = 2**32 - 1
SIZES = 33  # number of classes: 1, 2, 3 to 4, 5 to 8 ... records per key
_PREFETCH_DISTANCE = 16  # number of probes in flight, whose work takes about as long as one access to memory
# Distance in slots of the next cache line, in which a search in a nearly full table often ends.
_NEXT_LINE = 2


@njit(inline="always")
def _home(high, capacity):
    return np.int64(((high >> np.uint64(32)) * np.uint64(capacity)) >> np.uint64(32))


@njit(inline="always")
def _find(slots, low, high, capacity):
    """Return the slot with the hash, or the free slot in which the hash belongs; -1 if neither exists (a full
    table)."""
    slot = _home(high, capacity)
    for _ in range(capacity):
        entry = slots[np.uint64(slot)]  # an index that could be negative costs a comparison
        if entry.value == 0 or (entry.low == low and entry.high == high):
            return slot
        slot += 1
        if slot == capacity:
            slot = 0
    return np.int64(-1)


@njit(inline="always")
def _count(counts, slot, times):
    left = MAX_COUNTED - np.int64(counts[slot])
    counts[slot] += np.uint32(min(np.int64(times), left))


@kernel
def put_all(slots, counts, used, limit, low, high, ordinals, times, n, start):
    """Put items `start` .. `n`, except items with an ordinal below 0; return (next item, used slots).

    Item i counts as `times[i]` records (uint32), or as one record if `times` is empty. If `counts` is empty, nothing is
    counted.

    The kernel stops before an item when `used` has reached `limit`, even if its key is already present (CLEANING.md,
    "Full map").
    """
    capacity = slots.shape[0]
    counting = counts.shape[0] != 0
    is_one = times.shape[0] == 0
    i = start
    while i < n:
        if i + _PREFETCH_DISTANCE < n:
            home = _home(high[i + _PREFETCH_DISTANCE], capacity)
            prefetch(slots, home)
            prefetch(slots, home + _NEXT_LINE)
            if counting:
                prefetch(counts, home)
        if ordinals[i] >= 0:
            if used >= limit:
                break
            slot = _find(slots, low[i], high[i], capacity)
            entry = slots[np.uint64(slot)]
            if entry.value == 0:
                entry.low = low[i]
                entry.high = high[i]
                used += 1
            entry.value = ordinals[i] + 1
            if counting:
                _count(counts, slot, 1 if is_one else times[i])
        i += 1
    return i, used


@kernel
def note_present(slots, present):
    """Set a bit of `present` (uint8, its length a power of two) for each used slot."""
    mask = np.uint64(8 * present.shape[0] - 1)
    for i in range(slots.shape[0]):
        if slots[i].value != 0:
            bit = slots[i].low & mask
            present[bit >> np.uint64(3)] |= np.uint8(1 << (bit & np.uint64(7)))


@njit(inline="always")
def _may_be_present(present, low, mask):
    bit = low & mask
    return (present[bit >> np.uint64(3)] >> np.uint8(bit & np.uint64(7))) & 1 != 0


@kernel
def get_all(slots, present, low, high, wanted, n, found):
    """Set `found[i]` to the ordinal of hash i, or to -1 if the hash is absent or `wanted[i]` is below 0.

    `present` is the result of `note_present` for the slots. These bits save searches: in a full table, a search for an
    absent hash visits a dozen slots, and most hashes of a clean section are absent.
    """
    capacity = slots.shape[0]
    mask = np.uint64(8 * present.shape[0] - 1)
    for i in range(n):
        if i + _PREFETCH_DISTANCE < n and _may_be_present(present, low[i + _PREFETCH_DISTANCE], mask):
            prefetch(slots, _home(high[i + _PREFETCH_DISTANCE], capacity))
        found[i] = -1
        if wanted[i] >= 0 and _may_be_present(present, low[i], mask):
            slot = _find(slots, low[i], high[i], capacity)
            if slot >= 0:
                found[i] = slots[slot].value - 1


@kernel
def rehash(old, old_counts, new, new_counts):
    """Move every used slot of `old`, and its count, into the larger, empty `new`."""
    capacity = new.shape[0]
    counting = old_counts.shape[0] != 0
    for i in range(old.shape[0]):
        entry = old[i]
        if entry.value != 0:
            slot = _find(new, entry.low, entry.high, capacity)
            new[slot].low = entry.low
            new[slot].high = entry.high
            new[slot].value = entry.value
            if counting:
                new_counts[slot] = old_counts[i]


@kernel
def sum_by_size(counts, keys, records):
    """Add up the number of keys with 1, 2, 3 to 4, 5 to 8 ... records, and the number of their records (`keys`,
    `records`: int64[SIZES]).

    The count of a free slot is 0.
    """
    keys[:] = 0
    records[:] = 0
    for i in range(counts.shape[0]):
        count = np.int64(counts[i])
        if count != 0:
            size = 0
            while np.int64(1) << size < count:
                size += 1
            keys[size] += 1
            records[size] += count


@kernel
def most_counted(slots, counts, top):
    """Write the count and the ordinal of the keys with the most records, each at least 2, to `top` (int64[n, 2]), by
    descending count and descending ordinal.

    Returns the number of rows filled.
    """
    filled = 0
    for i in range(slots.shape[0]):
        count = np.int64(counts[i])
        if count < 2:
            continue
        ordinal = slots[i].value - 1
        at = filled
        while at > 0 and (top[at - 1, 0] < count or (top[at - 1, 0] == count and top[at - 1, 1] < ordinal)):
            at -= 1
        if at == top.shape[0]:
            continue
        filled = min(filled + 1, top.shape[0])
        for row in range(filled - 1, at, -1):
            top[row, 0] = top[row - 1, 0]
            top[row, 1] = top[row - 1, 1]
        top[at, 0] = count
        top[at, 1] = ordinal
    return filled


@kernel
def mark_survivors(slots, segment_starts, first_segment, bits):
    """Set in `bits` the bit of every ordinal in the map: `segment_starts[segment - first_segment]` + record number."""
    for i in range(slots.shape[0]):
        value = slots[i].value
        if value != 0:
            ordinal = value - 1
            bit = segment_starts[(ordinal >> 32) - first_segment] + (ordinal & 0xFFFFFFFF)
            bits[bit >> 3] |= np.uint8(1 << (bit & 7))


@kernel
def check_slots(slots, out):
    """Set `out` to the number of used slots, of used slots not reachable by probing from their home slot, and of
    duplicates."""
    capacity = slots.shape[0]
    out[:] = 0
    for i in range(capacity):
        if slots[i].value != 0:
            out[0] += 1
            found = _find(slots, slots[i].low, slots[i].high, capacity)
            if slots[found].value == 0:
                out[1] += 1
            elif found != i:
                out[2] += 1
