"""Distributes rows of columns to the places reserved for their partitions, in their order within each partition.

`partitions` (int32) has the partition of each row; rows below 0 are skipped. The arrays of counts and places have one
entry per partition. Offsets must ascend inside their data; the caller has checked this.
"""

from __future__ import annotations

from keytail.kernels.jit import kernel
from keytail.kernels.native import copy_bytes


@kernel
def count_rows(partitions, offsets, rows, sizes):
    """Add the number of rows of each partition to `rows`, and the bytes of these rows to `sizes` (both int64)."""
    for i in range(len(partitions)):
        p = partitions[i]
        if p >= 0:
            rows[p] += 1
            sizes[p] += offsets[i + 1] - offsets[i]


@kernel
def scatter_words(partitions, values, words, at):
    """Copy each value to `words[at[partition]]` (both arrays int64), and advance `at`."""
    for i in range(len(partitions)):
        p = partitions[i]
        if p >= 0:
            words[at[p]] = values[i]
            at[p] += 1


@kernel
def scatter_ends(partitions, offsets, words, at, filled):
    """Write where each row's bytes end in the column of its partition; `filled` is the end of that column so far."""
    for i in range(len(partitions)):
        p = partitions[i]
        if p >= 0:
            filled[p] += offsets[i + 1] - offsets[i]
            words[at[p]] = filled[p]
            at[p] += 1


@kernel
def scatter_bytes(partitions, data, valid, offsets, target, valid_at, data_at):
    """Copy each value's bytes to `target[data_at[partition]:]`, and its validity to `target[valid_at[partition]]`.

    Both `valid_at` and `data_at` are advanced.
    """
    for i in range(len(partitions)):
        p = partitions[i]
        if p >= 0:
            size = offsets[i + 1] - offsets[i]
            target[valid_at[p]] = valid[i]
            valid_at[p] += 1
            copy_bytes(target, data_at[p], data, offsets[i], size)
            data_at[p] += size
