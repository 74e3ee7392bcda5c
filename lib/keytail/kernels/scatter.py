"""Rows of columns to where their partitions have room for them, each partition's in their order.

`partitions` (int32) has the partition of each row; rows below 0 go nowhere. The arrays that count and place have an
entry a partition. Offsets must ascend inside their data: the caller has looked.
"""

from __future__ import annotations

from keytail.kernels.jit import kernel
from keytail.kernels.native import copy_bytes


@kernel
def count_rows(partitions, offsets, rows, sizes):
    """Add the rows of each partition to `rows`, what lies between their offsets to `sizes` (both int64)."""
    for i in range(len(partitions)):
        p = partitions[i]
        if p >= 0:
            rows[p] += 1
            sizes[p] += offsets[i + 1] - offsets[i]


@kernel
def scatter_words(partitions, values, words, at):
    """Each value to `words[at[partition]]`, both int64; `at` moves on."""
    for i in range(len(partitions)):
        p = partitions[i]
        if p >= 0:
            words[at[p]] = values[i]
            at[p] += 1


@kernel
def scatter_ends(partitions, offsets, words, at, filled):
    """Where each row ends in a column of its partition alone; `filled` is where that column's rows end until now."""
    for i in range(len(partitions)):
        p = partitions[i]
        if p >= 0:
            filled[p] += offsets[i + 1] - offsets[i]
            words[at[p]] = filled[p]
            at[p] += 1


@kernel
def scatter_bytes(partitions, data, valid, offsets, target, valid_at, data_at):
    """Each value's bytes to `target[data_at[partition]:]`, whether it is valid to `target[valid_at[partition]]`; both
    move on."""
    for i in range(len(partitions)):
        p = partitions[i]
        if p >= 0:
            size = offsets[i + 1] - offsets[i]
            target[valid_at[p]] = valid[i]
            valid_at[p] += 1
            copy_bytes(target, data_at[p], data, offsets[i], size)
            data_at[p] += size
