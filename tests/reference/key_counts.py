"""Counts records per key with a Counter: the reference model of one or several counting offset maps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from tests.reference.batches import decode_log

MAX_COUNTED = 2**32 - 1
SIZES = 33


def by_size(counts: Iterable[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return how many keys have 1, 2, 3 to 4, 5 to 8 ... records, and how many records those are."""
    keys, records = [0] * SIZES, [0] * SIZES
    for count in counts:
        size = next(size for size in range(SIZES) if count <= 2**size)
        keys[size] += 1
        records[size] += count
    return tuple(keys), tuple(records)


def hottest(records: Sequence[tuple[bytes, int]], most: int) -> list[tuple[int, int, bytes]]:
    """Return (number, last place, key) for the keys that two or more of the records (key, place) have; places must
    ascend.

    Larger numbers come first, and among equal numbers the one with the later last place.
    """
    counts, last = Counter(key for key, _ in records), dict(records)
    found = sorted(((counts[key], last[key], key) for key in last if counts[key] > 1), reverse=True)
    return found[:most]


def records_of(logs: Iterable[bytes], start: int, end: int) -> list[tuple[bytes, int]]:
    """Return key and offset of the data records in [start, end) that have a key, for logs without transactions."""
    batches = [batch for log in logs for batch in decode_log(log) if not batch.control]
    records = [record for batch in batches for record in batch.records if start <= record.offset < end]
    return [(record.key, record.offset) for record in records if record.key is not None]
