"""Open addressing over 24-byte slots: a 128-bit key hash and the ordinal of the key's last record.

A slot is free while its `value` is 0; used slots hold ordinal + 1. The home slot grows with the hash's high
word, so that rehashing into a larger table is one nearly sequential sweep.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from keytail.kernels.jit import kernel
from keytail.kernels.native import prefetch

SLOT = np.dtype([("low", "u8"), ("high", "u8"), ("value", "i8")])
_AHEAD = 16  # probes in flight: about a memory latency's worth of work


@njit(inline="always")
def _home(high, capacity):
    return np.int64(((high >> np.uint64(32)) * np.uint64(capacity)) >> np.uint64(32))


@njit(inline="always")
def _find(slots, low, high, capacity):
    """Slot that holds the hash, or the free slot where it belongs; -1 when neither exists (a full table)."""
    slot = _home(high, capacity)
    for _ in range(capacity):
        entry = slots[slot]
        if entry.value == 0 or (entry.low == low and entry.high == high):
            return slot
        slot += 1
        if slot == capacity:
            slot = 0
    return np.int64(-1)


@kernel
def put_all(slots, used, limit, low, high, ordinals, n, start):
    """Put items `start` .. `n`; an ordinal below 0 is no item. Returns (items done, used slots).

    Stops in front of an item when `used` has reached `limit`, even for a key already present: the rule of
    CLEANING.md, "Full map".
    """
    capacity = slots.shape[0]
    i = start
    while i < n:
        if i + _AHEAD < n:
            prefetch(slots, _home(high[i + _AHEAD], capacity))
        if ordinals[i] >= 0:
            if used >= limit:
                break
            slot = _find(slots, low[i], high[i], capacity)
            entry = slots[slot]
            if entry.value == 0:
                entry.low = low[i]
                entry.high = high[i]
                used += 1
            entry.value = ordinals[i] + 1
        i += 1
    return i, used


@kernel
def note_present(slots, present):
    """Set a bit of `present` (uint8, a power of two of them) for each used slot."""
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
    """`found[i]` = ordinal of hash i, or -1 when absent or when `wanted[i]` is below 0.

    `present` is what `note_present` made of the slots: in a table this full it takes a dozen slots to see that a hash
    is not there, and most of what a clean section holds is not.
    """
    capacity = slots.shape[0]
    mask = np.uint64(8 * present.shape[0] - 1)
    for i in range(n):
        if i + _AHEAD < n and _may_be_present(present, low[i + _AHEAD], mask):
            prefetch(slots, _home(high[i + _AHEAD], capacity))
        found[i] = -1
        if wanted[i] >= 0 and _may_be_present(present, low[i], mask):
            slot = _find(slots, low[i], high[i], capacity)
            if slot >= 0:
                found[i] = slots[slot].value - 1


@kernel
def rehash(old, new):
    """Move every used slot of `old` into the larger, empty `new`."""
    capacity = new.shape[0]
    for i in range(old.shape[0]):
        entry = old[i]
        if entry.value != 0:
            slot = _find(new, entry.low, entry.high, capacity)
            new[slot].low = entry.low
            new[slot].high = entry.high
            new[slot].value = entry.value


@kernel
def mark_survivors(slots, segment_starts, first_segment, bits):
    """Set the bit of every ordinal in the map: `segment_starts[segment - first_segment]` + record number."""
    for i in range(slots.shape[0]):
        value = slots[i].value
        if value != 0:
            ordinal = value - 1
            bit = segment_starts[(ordinal >> 32) - first_segment] + (ordinal & 0xFFFFFFFF)
            bits[bit >> 3] |= np.uint8(1 << (bit & 7))


@kernel
def check_slots(slots, out):
    """`out` = (used slots, slots not reachable by probing from their home, duplicates of an earlier slot)."""
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
