"""Groups items by shard, in their order, in four steps: count, sum up, place each item, move the starts back.

`starts` is int64[shards + 1]. Count the items of shard s in `starts[s + 1]`; after `sum_up`, the next item of shard s
is placed at `starts[s]`; after `move_back`, shard s has the items `starts[s]` .. `starts[s + 1]`.
"""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(inline="always")
def shard_of(low, shards):
    """Return the shard of a hash with the low word `low`: a shard is a range of that word's upper half."""
    return np.int64(((np.uint64(low) >> np.uint64(32)) * np.uint64(shards)) >> np.uint64(32))


@njit
def sum_up(starts):
    for s in range(1, starts.shape[0]):
        starts[s] += starts[s - 1]


@njit
def move_back(starts):
    for s in range(starts.shape[0] - 1, 0, -1):
        starts[s] = starts[s - 1]
    starts[0] = 0
