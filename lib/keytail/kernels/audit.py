"""Replicas compared: records packed into rows of eight words, merged by offset, and what is missing explained by key.

`entries` is int64[n, WORDS]. Of each replica they come in the order of its log, one replica behind the other. A set of
replicas is a bit mask. Which differences there may be, and why, is told in audit/AUDIT.md.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from keytail.kernels.jit import kernel
from keytail.kernels.native import copy_bytes, xxh3_128
from keytail.kernels.records import IN_RAW, put_varint, read_varint
from keytail.kernels.transactions import ABORT, COMMIT, CONTROL, TRANSACTIONAL

# Words of an entry. LOW and HIGH: the key's hash, of a record without a key that of its offset. CONTENT: hashes of the
# value (upper half) and of the headers. EPOCHS: leader epoch (upper half) and sequence, both as 32 bits.
OFFSET, LOW, HIGH, CONTENT, TIMESTAMP, PRODUCER, EPOCHS, WHAT, WORDS = range(9)

# Bits of WHAT; the control type + 1 stands in bits 8 to 15, the producer epoch in 16 to 31.
NULL, KEYLESS, IS_CONTROL, IS_TRANSACTIONAL, TIMELESS = 1, 2, 4, 8, 16

# Words of a place: what lies at an offset, the upper 48 bits of LOW and the lower 16 of WHAT.
PLACE_WORDS = 2
_PLACE_BITS = 0xFF00 | IS_CONTROL

# How what lies at one offset can differ, by places: numbers of counters.
OTHER_CONTROL, OTHER_CONTROL_TYPE, OTHER_KEY, PLACE_KINDS = range(4)

# How two records of one offset and key can differ.
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

# Why a record is missing somewhere, the gravest last.
SUPERSEDED, DELETED, ABORTED, MARKER, DROPPED_KEYLESS, UNKNOWN, LOST, REASONS = range(8)

# Columns of a transaction's events, of markers, and of what is wrong with transactions.
E_PRODUCER, E_OFFSET, E_KIND, E_REPLICA, EVENT_COLUMNS = range(5)
DATA = 2  # a kind beside ABORT and COMMIT
DECIDED_OTHERWISE, MARKER_LOST, MARKER_EARLY, TRANSACTION_KINDS = range(4)
F_KIND, F_PRODUCER, F_FIRST, F_OFFSET, F_ABORTED, F_COMMITTED, F_REPLICAS, FOUND_COLUMNS = range(8)

_NOTHING = np.int64(2**63 - 1)


@njit
def _mixed(value):
    """A hash of a number (SplitMix64's)."""
    x = np.uint64(value) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@njit
def _normal_headers(target, source, p, end):
    """Headers with varints in their shortest form and every null -1: how many bytes."""
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
    """Append the records at or above `from_offset` to `entries`; how many are in it then.

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
        if batch.magic < 2 and record.timestamp_ms == -1:  # in a batch by append time it will show that
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
    """The first `n` entries by shard of their key, in their order: shard s has `out[starts[s]:starts[s + 1]]`."""
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
    """The places of the first `n` entries by shard of their offset, as `split` has entries by their key."""
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
    """Compare what lies at each offset below `end_offset`; how many rows of `differing` are in use, -1 as `merge`.

    `counts` are of the kinds of places. Each row of `differing`: kind, and the two places, as long as there is room.
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
    """Whether a record of the replica at this offset would have been seen."""
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
    """Count what differs between two entries of one offset and key."""
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
    """Compare the replicas' entries below `end_offset`, offset by offset; how many records are missing somewhere.

    Replica r has `entries[cursor[r]:end[r]]`, in growing offsets. One of another key at the same offset is another
    record. Missing records are noted as
    the first entry that has them and the mask of replicas that should and do not. `counts` and `examples` (two entries
    each, the first ones of a kind) are of the differences above; `in_span[k]` becomes 1 where two replicas have a
    record within `spans[k]` (from, to).
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
    """How the transaction that has this offset ended, by markers (producer, offset, kind) in order; -1: it has not."""
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
    """Where the key is, or would be, in the table `slots` of numbers of `keys` + 1 (0: free)."""
    mask = slots.shape[0] - 1
    i = np.int64(_mixed(low)) & mask
    while slots[i] != 0 and (keys[slots[i] - 1, 0] != low or keys[slots[i] - 1, 1] != high):
        i = (i + 1) & mask
    return i


@kernel
def index_keys(entries, missing_at, slots, keys):
    """Number the keys of the missing records; how many there are. `slots` has a power of two of zeros, and more than
    twice as many as there are missing records."""
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
    """Of each numbered key what the replicas hold of it, data of committed transactions and of none.

    `newest[key, replica]` is its last offset; `oldest[key]` its first one anywhere, `tombstone[key]` that of its last
    tombstone below `end_offset`. All come as -1, `oldest` as the largest number.
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
    """Why each missing record is missing: the gravest reason of all replicas that lack it.

    What cleaning removes lies below `limit`, and where it has no key below `keyless_limit`. `early[m]`: it is a
    tombstone that one replica has no more, and older records of its key are left in another.
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
    """Follow the transactions of all replicas side by side; (rows of `found`, rows of `markers`) in use.

    `events` are sorted by producer, offset and kind. `markers` gets those that any replica has: producer, offset, kind
    (ABORT where they disagree). Counted, and noted as long as `found` has room: transactions that ended otherwise,
    replicas that have data without the marker that the others have, and markers that one has dropped while another
    still has data.
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
