"""Finds the records whose keys are to be erased, by the 128-bit hashes of the keys.

The proof (`kernels/proof`) does the same with another hash and another search.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba.extending import register_jitable

from keytail.kernels.jit import kernel
from keytail.kernels.native import xxh3_128


class KeyTable(NamedTuple):
    """Hashes of keys: the words `low` and `high` (uint64[n]), sorted by the low word, and then by the high word.

    `starts` (int64[2**bits + 1]) has at index i the index of the first hash whose low word has upper `bits` bits of at
    least i; `shift` (uint64) is 64 - bits.
    """

    low: np.ndarray
    high: np.ndarray
    starts: np.ndarray
    shift: np.uint64


@kernel
def hash_keys(data, ends, seed, low, high):
    """Write the hashes (uint64[n]) of n byte strings, which are consecutive in `data` (uint8) and end at `ends`."""
    start = np.int64(0)
    for i in range(ends.shape[0]):
        low[i], high[i] = xxh3_128(data, start, ends[i] - start, seed)
        start = ends[i]


@register_jitable
def _index_of(table, low, high):
    """Return the index of a hash in the table, or -1 if the table does not contain it."""
    part = np.int64(low >> table.shift)
    for i in range(table.starts[part], table.starts[part + 1]):
        if table.low[i] == low and table.high[i] == high:
            return i
    return np.int64(-1)


@kernel
def mark_erased(low, high, ordinals, table, erased, found):
    """Set `erased[ordinal]` (uint8) for each record whose key is in the table, and `found[index]` (bool) for that key.

    `ordinals` (int64) are the results of `scan_keys`, with -1 for a record without a key. Returns the number of marked
    records.
    """
    n = 0
    for i in range(ordinals.shape[0]):
        if ordinals[i] >= 0:
            index = _index_of(table, low[i], high[i])
            if index >= 0:
                erased[ordinals[i]] = 1
                found[index] = True
                n += 1
    return n
