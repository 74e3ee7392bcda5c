"""Packs records into rows of eight words (entries); groups the entries, and short forms of them (places), by shard.

`entries` is int64[n, WORDS]: the entries of each replica in log order, one replica after the other. The possible
differences and their reasons are described in audit/AUDIT.md.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from keytail.kernels.batch_header import CONTROL, TRANSACTIONAL
from keytail.kernels.jit import kernel
from keytail.kernels.native import copy_bytes, xxh3_128
from keytail.kernels.records import IN_RAW, put_varint, read_varint
from keytail.kernels.shards import move_back, shard_of, sum_up

# Words of an entry. LOW and HIGH: hash of the key, or of the offset if the record has no key. CONTENT: hashes of the
# value (upper half) and of the headers. EPOCHS: leader epoch (upper half) and sequence, both as 32 bits.
OFFSET, LOW, HIGH, CONTENT, TIMESTAMP, PRODUCER, EPOCHS, WHAT, WORDS = range(9)

# Bits of WHAT; bits 8 to 15 contain the control type + 1, bits 16 to 31 the producer epoch.
NULL, KEYLESS, IS_CONTROL, IS_TRANSACTIONAL, TIMELESS = 1, 2, 4, 8, 16

# Words of a place, a short form of an entry: the offset, and the upper 48 bits of LOW with the _PLACE_BITS of WHAT.
PLACE_WORDS = 2
_PLACE_BITS = 0xFF00 | IS_CONTROL


@njit
def mixed(value):
    """Return a hash of a number (SplitMix64)."""
    x = np.uint64(value) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@njit
def _normal_headers(target, source, p, end):
    """Write headers with minimal varints and -1 for every null; return the number of bytes."""
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
    """Append the records at or above `from_offset` to `entries`; return the new number of entries.

    `scratch` (uint8) has room for the longest record body. Headers are hashed as a cleaner would write them.
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
            low, high = mixed(record.offset), np.uint64(0)
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
        if batch.magic < 2 and record.timestamp_ms == -1:  # the record gets the append time if its batch is rebuilt
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


@kernel
def split(entries, n, shards, starts, out):
    """Group the first `n` entries by the shard of their key, in order: shard s has `out[starts[s]:starts[s + 1]]`."""
    starts[:] = 0
    for i in range(n):
        starts[shard_of(entries[i, LOW], shards) + 1] += 1
    sum_up(starts)
    for i in range(n):
        s = shard_of(entries[i, LOW], shards)
        at = starts[s]
        for word in range(WORDS):
            out[at, word] = entries[i, word]
        starts[s] = at + 1
    move_back(starts)


@kernel
def split_places(entries, n, shards, starts, out):
    """Group the places of the first `n` entries by the shard of their offset, as `split` groups entries by key."""
    starts[:] = 0
    for i in range(n):
        starts[shard_of(mixed(entries[i, OFFSET]), shards) + 1] += 1
    sum_up(starts)
    for i in range(n):
        s = shard_of(mixed(entries[i, OFFSET]), shards)
        at = starts[s]
        out[at, 0] = entries[i, OFFSET]
        out[at, 1] = (entries[i, LOW] & ~np.int64(0xFFFF)) | (entries[i, WHAT] & _PLACE_BITS)
        starts[s] = at + 1
    move_back(starts)
