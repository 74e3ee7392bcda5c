"""Splits runs of keys by shard, and merges them into the tables of the shards.

A key run is three arrays of one length: the two words of the keys' hashes, and ordinals; if records are counted, a
fourth array contains how many records each item represents. A shard is a range of the low word's upper half. Keys that
are read from one table in slot order must be put into the next table in another order: in slot order, all keys would
belong to the first slots of a table that is still small, and each search would pass all of these keys.
"""

from __future__ import annotations

import numpy as np

from keytail.kernels.jit import kernel
from keytail.kernels.native import prefetch
from keytail.kernels.proof.table import FLAGS, KEPT, OLDER_KEPT, PRESENT, SLOT_WORDS, low_slot_of
from keytail.kernels.shards import move_back, shard_of, sum_up

_PREFETCH_DISTANCE = 16


@kernel
def number_records(records, n, first_ordinal, is_put, from_offset, puts, probes, keyless):
    """Set `puts[i]` or `probes[i]` to the ordinal of record i and the other to -1; set both to -1 if the record has no
    key.

    A record is to be put if `is_put[row]` is set for its row and its offset is at or above `from_offset`; the other
    records are to be probed. `keyless` is int64[4]: the number of keyless records to be put so far, and the first
    offset of these; then the same for the records to be probed.
    """
    previous = np.int64(-1)
    k = np.int64(0)
    for i in range(n):
        record = records[i]
        row = np.int64(record.row)
        if row != previous:
            previous = row
            k = 0
        puts[i] = -1
        probes[i] = -1
        putting = is_put[row] and record.offset >= from_offset
        if record.key_bytes < 0:
            at = 0 if putting else 2
            if keyless[at] == 0:
                keyless[at + 1] = record.offset
            keyless[at] += 1
        elif putting:
            puts[i] = first_ordinal[row] + k
        else:
            probes[i] = first_ordinal[row] + k
        k += 1


@kernel
def gather(low, high, ordinals, n, start, to_low, to_high, to_ordinals, filled):
    """Append items `start` .. `n` with ordinals of 0 or more to the run, after its first `filled` items.

    Returns (next item, filled).
    """
    room = to_low.shape[0]
    i = start
    while i < n:
        if ordinals[i] >= 0:
            if filled == room:
                break
            to_low[filled] = low[i]
            to_high[filled] = high[i]
            to_ordinals[filled] = ordinals[i]
            filled += 1
        i += 1
    return i, filled


@kernel
def drain(slots, counts, start, to_low, to_high, to_ordinals, to_times, filled):
    """Append the used slots of an offset map from slot `start` on to a run, and free them; return (next slot, filled).

    If the map has `counts`, the counts are moved to `to_times`.
    """
    room = to_low.shape[0]
    counting = counts.shape[0] != 0
    i = start
    while i < slots.shape[0]:
        if slots[i].value != 0:
            if filled == room:
                break
            to_low[filled] = slots[i].low
            to_high[filled] = slots[i].high
            to_ordinals[filled] = slots[i].value - 1
            if counting:
                to_times[filled] = counts[i]
                counts[i] = 0
            filled += 1
            slots[i].value = 0
        i += 1
    return i, filled


@kernel
def split(low, high, ordinals, times, n, shards, starts, to_low, to_high, to_ordinals, to_times):
    """Group the run's first `n` items by shard, in their order: shard s has items `starts[s]` .. `starts[s + 1]`.

    `times` may be empty.
    """
    counting = times.shape[0] != 0
    starts[:] = 0
    for i in range(n):
        starts[shard_of(low[i], shards) + 1] += 1
    sum_up(starts)
    for i in range(n):
        s = shard_of(low[i], shards)
        at = starts[s]
        to_low[at] = low[i]
        to_high[at] = high[i]
        to_ordinals[at] = ordinals[i]
        if counting:
            to_times[at] = times[i]
        starts[s] = at + 1
    move_back(starts)


@kernel
def split_entries(entries, shards, starts, out):
    """Group the used slots of a proof's table by shard, as `split` groups keys; `out` has room for all entries."""
    starts[:] = 0
    for i in range(0, entries.shape[0], SLOT_WORDS):
        if entries[i + 2] != 0:
            starts[shard_of(entries[i], shards) + 1] += 1
    sum_up(starts)
    for i in range(0, entries.shape[0], SLOT_WORDS):
        if entries[i + 2] != 0:
            s = shard_of(entries[i], shards)
            for word in range(SLOT_WORDS):
                out[SLOT_WORDS * starts[s] + word] = entries[i + word]
            starts[s] += 1
    move_back(starts)


@kernel
def set_bits(numbers, start, bits):
    """Set bit `start + numbers[i]` for each i."""
    for i in range(numbers.shape[0]):
        bit = start + np.int64(numbers[i])
        bits[bit >> 3] |= np.uint8(1 << (bit & 7))


@kernel
def copy_bits(source, n, start, bits):
    """Set bit `start + i` for each of the first `n` bits i that are set in `source`."""
    for i in range(n):
        if source[i >> 3] & np.uint8(1 << (i & 7)):
            bit = start + i
            bits[bit >> 3] |= np.uint8(1 << (bit & 7))


@kernel
def merge_entries(slots, used, limit, entries, start):
    """Merge entries of the proof's table, from number `start` on, into the table of a shard; return (next, slots used).

    An entry is the latest record of its key in one part of the log, its outcome, and whether the part keeps an older
    record. The parts may come in any order: the final table for the whole log is the same. A record that is
    PRESENT may come a second time, with its outcome. The kernel stops before a new key once `used` has reached `limit`.
    """
    clear = ~np.uint64(FLAGS)
    actions = np.uint64(3)
    capacity = slots.shape[0] // SLOT_WORDS
    n = entries.shape[0] // SLOT_WORDS
    for k in range(start, n):
        if k + _PREFETCH_DISTANCE < n:
            prefetch(slots, SLOT_WORDS * low_slot_of(entries[SLOT_WORDS * (k + _PREFETCH_DISTANCE)], capacity))
        low, high, offset = entries[SLOT_WORDS * k], entries[SLOT_WORDS * k + 1], entries[SLOT_WORDS * k + 2]
        i = low_slot_of(low, capacity)
        while slots[SLOT_WORDS * i + 2] != 0:
            held = slots[SLOT_WORDS * i + 1]
            if slots[SLOT_WORDS * i] == low and held & clear == high & clear:
                break
            i += 1
            if i == capacity:
                i = 0
        known = slots[SLOT_WORDS * i + 2]
        if known == 0:
            if used >= limit:
                return k, used
            used += 1
            slots[SLOT_WORDS * i] = low
            slots[SLOT_WORDS * i + 1] = high
            slots[SLOT_WORDS * i + 2] = offset
            continue
        held = slots[SLOT_WORDS * i + 1]
        older = (held | high) & np.uint64(OLDER_KEPT)
        newest = held
        if offset > known:
            newest = high
            if held & actions == np.uint64(KEPT):
                older = np.uint64(OLDER_KEPT)
            slots[SLOT_WORDS * i + 2] = offset
        elif offset < known:
            if high & actions == np.uint64(KEPT):
                older = np.uint64(OLDER_KEPT)
        elif held & actions == np.uint64(PRESENT):
            newest = high
        slots[SLOT_WORDS * i + 1] = newest & ~np.uint64(OLDER_KEPT) | older
    return n, used
