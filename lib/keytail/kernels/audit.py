"""Compares replicas: packs records into rows of eight words, merges them by offset, and explains missing ones by key.

`entries` is int64[n, WORDS]: the entries of each replica in log order, one replica after the other. A set of replicas
is a bit mask. The possible differences and their reasons are described in audit/AUDIT.md.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from keytail.kernels.jit import kernel
from keytail.kernels.native import copy_bytes, xxh3_128
from keytail.kernels.records import IN_RAW, put_varint, read_varint
from keytail.kernels.transactions import ABORT, COMMIT, CONTROL, TRANSACTIONAL

# Words of an entry. LOW and HIGH: hash of the key, or of the offset if the record has no key. CONTENT: hashes of the
# value (upper half) and of the headers. EPOCHS: leader epoch (upper half) and sequence, both as 32 bits.
OFFSET, LOW, HIGH, CONTENT, TIMESTAMP, PRODUCER, EPOCHS, WHAT, WORDS = range(9)

# Bits of WHAT; bits 8 to 15 contain the control type + 1, bits 16 to 31 the producer epoch.
NULL, KEYLESS, IS_CONTROL, IS_TRANSACTIONAL, TIMELESS = 1, 2, 4, 8, 16

# Words of a place (what is at an offset): the offset, and the upper 48 bits of LOW with the _PLACE_BITS of WHAT.
PLACE_WORDS = 2
_PLACE_BITS = 0xFF00 | IS_CONTROL

# Differences between the places of one offset, and their counters.
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
COMMON = DIFFERENCES  # one more counter: records that at least two replicas have

# Reasons why a record is missing from a replica, the most serious last.
SUPERSEDED, DELETED, ABORTED, MARKER, DROPPED_KEYLESS, UNKNOWN, LOST, REASONS = range(8)

# Columns of transaction events, kinds of findings on transactions, and columns of these findings.
E_PRODUCER, E_OFFSET, E_KIND, E_REPLICA, EVENT_COLUMNS = range(5)
DATA = 2  # an event's kind, besides ABORT and COMMIT
DECIDED_OTHERWISE, MARKER_LOST, MARKER_EARLY, TRANSACTION_KINDS = range(4)
F_KIND, F_PRODUCER, F_FIRST, F_OFFSET, F_ABORTED, F_COMMITTED, F_REPLICAS, FOUND_COLUMNS = range(8)

_NOTHING = np.int64(2**63 - 1)


@njit
def _mixed(value):
    """Return a hash of a number (SplitMix64)."""
    x = np.uint64(value) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@njit
def _normal_headers(target, source, p, end):
    """Write headers with minimal varints and -1 for every null; return the bytes written."""
    count, p = read_varint(source, p, end)
    q = put_varint(target, 0, count)
    for _ in range(2 * count):
        n, p = read_varint(source, p, end)
        n = max(n, np.int64(-1))
        q = put_varint(target, q, n)
        if n > 0:
            copy_bytes(target, q, source, p, n)
            q += n
            p += n
    return q


@kernel
def pack_records(raw, arena, where, records, n, table, from_offset, seed, scratch, entries, filled):
    """Append the records at or above `from_offset` to `entries`; return how many entries it then contains.

    `scratch` has room for the longest body. Headers are hashed as a cleaner would write them.
    """
    for i in range(n):
        record = records[i]
        if record.offset < from_offset:
            continue
        row = np.int64(record.row)
        batch = table[row]
        a = raw if where[row] == IN_RAW else arena
        attributes = np.int64(batch.attributes)
        what = np.int64(0)
        if record.key_bytes < 0:
            what |= KEYLESS
            low, high = _mixed(record.offset), np.uint64(0)
        else:
            low, high = xxh3_128(a, record.key_start, record.key_bytes, seed)
        value_start = record.body_start + record.value_skip
        value_bytes = max(np.int64(record.value_bytes), np.int64(0))
        if record.value_bytes < 0:
            what |= NULL
        value_hash, _ = xxh3_128(a, value_start, value_bytes, seed)
        start = value_start + value_bytes
        size = record.body_start + record.body_bytes - start
        if record.canonical == 1:
            headers_hash, _ = xxh3_128(a, start, size, seed)
        else:
            size = _normal_headers(scratch, a, start, start + size)
            headers_hash, _ = xxh3_128(scratch, 0, size, seed)
        if attributes & CONTROL:
            what |= IS_CONTROL | ((np.int64(batch.control_type) + 1) & 0xFF) << 8
        if attributes & TRANSACTIONAL:
            what |= IS_TRANSACTIONAL
        if batch.magic < 2 and record.timestamp_ms == -1:  # a rebuilt batch with append time gives the record that time
            what |= TIMELESS
        what |= (np.int64(batch.producer_epoch) & 0xFFFF) << 16
        sequence = np.int64(-1)
        if batch.base_sequence >= 0:
            sequence = (np.int64(batch.base_sequence) + record.offset - batch.base_offset) & 0x7FFFFFFF
        entries[filled, OFFSET] = record.offset
        entries[filled, LOW] = np.int64(low)
        entries[filled, HIGH] = np.int64(high)
        entries[filled, CONTENT] = np.int64((value_hash << np.uint64(32)) | (headers_hash & np.uint64(0xFFFFFFFF)))
        entries[filled, TIMESTAMP] = record.timestamp_ms
        entries[filled, PRODUCER] = batch.producer_id
        entries[filled, EPOCHS] = np.int64(batch.leader_epoch) << 32 | (sequence & 0xFFFFFFFF)
        entries[filled, WHAT] = what
        filled += 1
    return filled


@njit(inline="always")
def _shard_of(low, shards):
    return np.int64(((np.uint64(low) >> np.uint64(32)) * np.uint64(shards)) >> np.uint64(32))


@kernel
def split(entries, n, shards, starts, out):
    """Group the first `n` entries by the shard of their key, in order: shard s has `out[starts[s]:starts[s + 1]]`."""
    for s in range(shards + 1):
        starts[s] = 0
    for i in range(n):
        starts[_shard_of(entries[i, LOW], shards) + 1] += 1
    for s in range(shards):
        starts[s + 1] += starts[s]
    for i in range(n):
        s = _shard_of(entries[i, LOW], shards)
        at = starts[s]
        for word in range(WORDS):
            out[at, word] = entries[i, word]
        starts[s] = at + 1
    for s in range(shards, 0, -1):
        starts[s] = starts[s - 1]
    starts[0] = 0


@kernel
def split_places(entries, n, shards, starts, out):
    """Group the places of the first `n` entries by the shard of their offset, as `split` groups entries by key."""
    for s in range(shards + 1):
        starts[s] = 0
    for i in range(n):
        starts[_shard_of(_mixed(entries[i, OFFSET]), shards) + 1] += 1
    for s in range(shards):
        starts[s + 1] += starts[s]
    for i in range(n):
        s = _shard_of(_mixed(entries[i, OFFSET]), shards)
        at = starts[s]
        out[at, 0] = entries[i, OFFSET]
        out[at, 1] = (entries[i, LOW] & ~np.int64(0xFFFF)) | (entries[i, WHAT] & _PLACE_BITS)
        starts[s] = at + 1
    for s in range(shards, 0, -1):
        starts[s] = starts[s - 1]
    starts[0] = 0


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
def _seen(replica, offset, log_starts, gaps):
    """Return whether a record of the replica at this offset would have been seen."""
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
    """Compare the replicas' entries below `end_offset`, offset by offset; return how many records some replica lacks.

    Replica r has `entries[cursor[r]:end[r]]`, in ascending offsets. An entry of another key at the same offset is
    another record. For a missing record, `missing_at` receives the first entry that has it, and `missing_in` the mask
    of replicas that should have it and do not. `counts` and `examples` (two entries each, the first ones of a kind)
    cover the differences above; `in_span[k]` becomes 1 if two replicas have a record within `spans[k]` (from, to).
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
            elif _seen(r, offset, log_starts, gaps):
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


@njit
def _fate(markers, producer, offset):
    """Return how the transaction with this offset ended, by sorted markers (producer, offset, kind); -1: still open."""
    low, high = np.int64(0), np.int64(markers.shape[0])
    while low < high:
        middle = (low + high) // 2
        if markers[middle, 0] < producer or (markers[middle, 0] == producer and markers[middle, 1] < offset):
            low = middle + 1
        else:
            high = middle
    if low < markers.shape[0] and markers[low, 0] == producer:
        return markers[low, 2]
    return np.int64(-1)


@njit
def _slot(slots, keys, low, high):
    """Return the slot of the key, or the free slot for it, in the table `slots` of numbers of `keys` + 1 (0: free)."""
    mask = slots.shape[0] - 1
    i = np.int64(_mixed(low)) & mask
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
                if (aborted | committed) & bit or not _seen(r, offset, log_starts, gaps):
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
