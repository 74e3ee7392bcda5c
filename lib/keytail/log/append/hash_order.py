"""The iteration order of producer ids in a broker's hash table, in which it writes snapshots (APPEND.md, "Producers").

This is Java's HashMap. A table begins with 16 buckets and doubles when it, or one of its buckets, contains too many
ids. The bits of an id determine its bucket, and within a bucket ids are in insertion order.
"""

from __future__ import annotations

from collections.abc import Sequence

_FIRST_BUCKETS = 16
_MOST_IDS_PER_BUCKET = 8  # maximum number of ids in a bucket; if it is exceeded, a table of fewer than 64 is doubled
_MOST_DOUBLED_BUCKETS = 64  # a table with this many buckets is not doubled because of a full bucket


def hash_order(producer_ids: Sequence[int], *, in_front: bool = False) -> list[int]:
    """Return distinct producer ids, given in insertion order, in the table's order.

    `in_front`: the ids are inserted by `computeIfAbsent`, which puts the latest id first in its bucket, and doubles the
    table if it was too full before. If eight ids or more share one of 64 buckets, a broker's order may differ.
    """
    buckets = _FIRST_BUCKETS
    for count, producer_id in enumerate(producer_ids, 1):
        if buckets >= _MOST_DOUBLED_BUCKETS:
            break
        if in_front and _is_too_full(count - 1, buckets):
            buckets *= 2
        bucket = _bucket(producer_id, buckets)
        same_bucket = sum(_bucket(other, buckets) == bucket for other in producer_ids[:count])
        if same_bucket > _MOST_IDS_PER_BUCKET - in_front and buckets < _MOST_DOUBLED_BUCKETS:
            buckets *= 2
        if not in_front and _is_too_full(count, buckets):
            buckets *= 2
    while _is_too_full(len(producer_ids) - in_front, buckets):
        buckets *= 2
    return sorted(reversed(producer_ids) if in_front else producer_ids, key=lambda i: _bucket(i, buckets))


def _is_too_full(count: int, buckets: int) -> bool:
    return count > buckets * 3 // 4


def _bucket(producer_id: int, buckets: int) -> int:
    folded = (producer_id ^ (producer_id >> 32)) & 0xFFFFFFFF
    return (folded ^ (folded >> 16)) & (buckets - 1)
