"""Assembles the surviving batches: copied, emptied or rebuilt."""

from __future__ import annotations

import numpy as np
from numba import njit

from keytail.kernels import batch_header as v2
from keytail.kernels.jit import kernel
from keytail.kernels.legacy import put_wrapper, wrapper_bytes
from keytail.kernels.rewriting.blocks import copy
from keytail.kernels.rewriting.headers import put_header
from keytail.kernels.rewriting.records import COPY, DROP, EMPTY


@kernel
def assembled_bytes(table, action, row_from, row_to, rebuilt, n_rebuilt):
    """Return how many bytes `assemble` writes for rows `row_from` .. `row_to`."""
    total = np.int64(0)
    for row in range(row_from, row_to):
        if action[row] == COPY:
            total += table[row].size_bytes
        elif action[row] == EMPTY:
            total += v2.HEADER_BYTES
    for k in range(n_rebuilt):
        total += _header_bytes(rebuilt[k].magic) + rebuilt[k].block_bytes
    return total


@njit
def _header_bytes(magic):
    return v2.HEADER_BYTES if magic == 2 else wrapper_bytes(magic)


@kernel
def assemble(
    raw,
    chunk_position,
    table,
    action,
    row_from,
    row_to,
    blocks,
    packed,
    rebuilt,
    target,
    at,
    position,
    new_table,
):
    """Write the surviving batches of rows `row_from` .. `row_to` to `target[at:]`; return (bytes, rows of `new_table`).

    `position` is the byte position of `target[at]` in the new segment. Copied batches keep every byte; emptied and
    rebuilt batches follow CLEANING.md, "Rebuilt batch" and "Emptied batch"; a rebuilt batch of magic 0 or 1 that keeps
    its magic is a wrapper message.
    """
    p = at
    rows = 0
    k = 0
    row = row_from
    while row < row_to:
        what = action[row]
        if what == DROP:
            row += 1
            continue
        batch = table[row]
        new = new_table[rows]
        new.position = position + p - at
        new.base_offset = batch.base_offset
        new.last_offset = batch.last_offset
        new.leader_epoch = batch.leader_epoch
        new.producer_id = batch.producer_id
        new.producer_epoch = batch.producer_epoch
        new.base_sequence = batch.base_sequence
        new.control_type = batch.control_type
        new.coordinator_epoch = batch.coordinator_epoch
        new.magic = 2
        rows += 1
        if what == COPY:
            new.magic = batch.magic
            size = np.int64(batch.size_bytes)
            p = copy(target, p, raw, batch.position - chunk_position, size)
            new.size_bytes = size
            new.crc = batch.crc
            new.attributes = batch.attributes
            new.base_timestamp_ms = batch.base_timestamp_ms
            new.max_timestamp_ms = batch.max_timestamp_ms
            new.record_count = batch.record_count
        elif what == EMPTY:
            attributes = np.int64(batch.attributes) & v2.PRESERVED_ATTRIBUTES
            new.size_bytes = v2.HEADER_BYTES
            new.attributes = attributes
            new.base_timestamp_ms = -1
            new.max_timestamp_ms = batch.max_timestamp_ms
            new.record_count = 0
            new.crc = put_header(
                target,
                p,
                batch,
                batch.base_offset,
                batch.last_offset,
                v2.HEADER_BYTES,
                attributes,
                np.int64(-1),  # not a literal, for which the function would be compiled again
                batch.max_timestamp_ms,
                np.int64(0),
            )
            p += v2.HEADER_BYTES
        else:
            made = rebuilt[k]
            k += 1
            header = _header_bytes(made.magic)
            size = header + np.int64(made.block_bytes)
            block = blocks if made.where == 0 else packed
            copy(target, p + header, block, made.block_start, made.block_bytes)
            new.magic = made.magic
            new.size_bytes = size
            new.base_offset = made.base_offset
            new.last_offset = made.last_offset
            new.attributes = made.attributes
            new.base_timestamp_ms = made.base_timestamp_ms
            new.max_timestamp_ms = made.max_timestamp_ms
            new.record_count = made.record_count
            if made.magic < 2:
                new.crc = put_wrapper(
                    target, p, made.last_offset, size, np.int64(made.magic), made.attributes, made.max_timestamp_ms
                )
            else:
                new.crc = put_header(
                    target,
                    p,
                    batch,
                    made.base_offset,
                    made.last_offset,
                    size,
                    np.int64(made.attributes),
                    made.base_timestamp_ms,
                    made.max_timestamp_ms,
                    np.int64(made.record_count),
                )
            p += size
        row += 1
    return p - at, rows
