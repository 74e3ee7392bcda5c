"""The iteration order of producer ids in a broker's hash table, in which it writes snapshots (APPEND.md, "Producers").

This is Java's HashMap. A table begins with 16 places (buckets) and doubles when it is too full, or one place is; the
bits of an id determine its place, and within a place ids are in insertion order.
"""

from __future__ import annotations

from collections.abc import Sequence

_FIRST_PLACES = 16
_LONGEST_PLACE = 8  # ids in one place; one more doubles a table of fewer than 64 places
_DOUBLED_PLACES = 64


def hash_order(producer_ids: Sequence[int], *, in_front: bool = False) -> list[int]:
    """Return distinct producer ids, given in insertion order, in the table's order.

    `in_front`: inserted by `computeIfAbsent`, where the latest id is the first in its place, and the table doubles if
    it was too full before. If eight ids or more share one of 64 places, a broker's order may differ.
    """
    places = _FIRST_PLACES
    for count, producer_id in enumerate(producer_ids, 1):
        if places >= _DOUBLED_PLACES:
            break
        if in_front and _is_too_full(count - 1, places):
            places *= 2
        place = _place(producer_id, places)
        same_place = sum(_place(other, places) == place for other in producer_ids[:count])
        if same_place > _LONGEST_PLACE - in_front and places < _DOUBLED_PLACES:
            places *= 2
        if not in_front and _is_too_full(count, places):
            places *= 2
    while _is_too_full(len(producer_ids) - in_front, places):
        places *= 2
    return sorted(reversed(producer_ids) if in_front else producer_ids, key=lambda i: _place(i, places))


def _is_too_full(count: int, places: int) -> bool:
    return count > places * 3 // 4


def _place(producer_id: int, places: int) -> int:
    folded = (producer_id ^ (producer_id >> 32)) & 0xFFFFFFFF
    return (folded ^ (folded >> 16)) & (places - 1)
