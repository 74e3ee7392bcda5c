"""Computes the data on keys for a page: the hottest keys of the run, and the distribution of records over keys.

The same key in two partitions is counted as two keys, because each partition is compacted by itself.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

from keytail.compact.map_phase.key_counts import HOTTEST, MAX_COUNTED, HotKey, KeyCounts, key_text, size_text
from keytail.report.facts import Partition, Report

Cell = tuple[str, Any]  # the text of a cell, and the value by which the cell is sorted
TableOf = tuple[tuple[str, ...], int, list[list[Cell]]]  # headings, number of leading columns that are text, rows


class Size(NamedTuple):
    """A class of keys by their number of records. Each of its `keys` keys has more than half of `most` and at most
    `most` records; together these keys have `records` records."""

    text: str
    most: int
    keys: int
    records: int


def by_size(found: Sequence[Partition]) -> list[Size]:
    """Return the classes of keys up to the class of the key with the most records; an empty list if no key was counted.
    """
    counted = [counts for _, counts in _counted(found)]
    keys = [sum(of_size) for of_size in zip(*(item.keys for item in counted), strict=True)]
    records = [sum(of_size) for of_size in zip(*(item.records for item in counted), strict=True)]
    sizes = max((size + 1 for size, number in enumerate(keys) if number), default=0)
    return [Size(size_text(size), 1 << size, keys[size], records[size]) for size in range(sizes)]


def hottest(found: Sequence[Partition], most: int = HOTTEST) -> list[tuple[Partition, HotKey]]:
    """Return at most `most` pairs of a partition and a key of it: those with the most records, in descending order."""
    of_each = ([(item, hot) for hot in counts.hottest] for item, counts in _counted(found))
    merged = heapq.merge(*of_each, key=lambda pair: (-pair[1].records, pair[0].name, -pair[1].offset))
    return list(islice(merged, most))


def about(report: Report) -> dict[str, Any]:
    sizes = by_size(report.partitions)
    counts_keys = report.command in ("plan", "compact", "compact --output-dir")
    return {
        "is_counted": bool(sizes),
        "is_plan": counts_keys and not report.execute and bool(report.partitions),
        "sentence": _sentence(report.partitions, sizes),
        "are_shown": any(hot.key is not None for _, hot in hottest(report.partitions)),
    }


def tables(found: Sequence[Partition]) -> dict[str, TableOf]:
    return {"hot_keys": _hot_keys(found), "key_sizes": _sizes(found), "topic_keys": _by_topic(found)}


def _sentence(found: Sequence[Partition], sizes: Sequence[Size]) -> str:
    keys, records = sum(item.keys for item in sizes), sum(item.records for item in sizes)
    if not keys:
        return ""
    partitions = sum(sum(counts.keys) > 0 for _, counts in _counted(found))
    older = records - keys
    return (
        f"{records:,} records of {keys:,} keys in {partitions:,} partition{'' if partitions == 1 else 's'}: "
        f"{older:,} of these records ({100 * older / records:.0f}\u00a0%) have a newer record of the same key."
    )


def _hot_keys(found: Sequence[Partition]) -> TableOf:
    heads = ("key", "hash of the key", "partition", "records", "share of partition", "last at offset")
    rows = []
    for item, hot in hottest(found):
        assert item.detail.key_counts is not None
        share = 100 * hot.records / sum(item.detail.key_counts.records)
        rows.append(
            [
                (key_text(hot), None),
                (hot.digest, None),
                (item.name, None),
                (_records(hot.records), hot.records),
                (f"{share:.1f}\u00a0%", round(share, 3)),
                (f"{hot.offset:,}", hot.offset),
            ]
        )
    return heads, 3, rows


def _records(number: int) -> str:
    return f"{number:,}" + (" or more" if number >= MAX_COUNTED else "")


def _sizes(found: Sequence[Partition]) -> TableOf:
    sizes = by_size(found)
    keys, records = sum(item.keys for item in sizes), sum(item.records for item in sizes)
    rows: list[list[Cell]] = [
        [
            (item.text, item.most),
            (f"{item.keys:,}", item.keys),
            (f"{100 * item.keys / keys:.1f}\u00a0%", item.keys),
            (f"{item.records:,}", item.records),
            (f"{100 * item.records / records:.1f}\u00a0%", item.records),
        ]
        for item in sizes
    ]
    return ("records per key", "keys", "share of keys", "records", "share of records"), 1, rows


def _by_topic(found: Sequence[Partition]) -> TableOf:
    """Return the table of topics, in descending order of records. The table has no rows if there is only one topic,
    because the other tables show the same numbers."""
    topics: dict[str, list[Partition]] = defaultdict(list)
    for item, counts in _counted(found):
        if sum(counts.keys):
            topics[item.topic].append(item)
    rows: list[tuple[int, list[Cell]]] = []
    for topic, those in topics.items() if len(topics) > 1 else ():
        sizes = by_size(those)
        keys, records = sum(item.keys for item in sizes), sum(item.records for item in sizes)
        top = hottest(those, 1)
        hot: list[Cell] = [("", None), ("", -1)]
        if top:
            hot = [(key_text(top[0][1]) or top[0][1].digest, None), (_records(top[0][1].records), top[0][1].records)]
        numbers = [(f"{records:,}", records), (f"{keys:,}", keys), (f"{records / keys:.1f}", records / keys)]
        rows.append((records, [(topic, None), hot[0], *numbers, hot[1]]))
    heads = ("topic", "hottest key", "records", "keys", "records per key", "records of hottest key")
    return heads, 2, [row for _, row in sorted(rows, key=lambda pair: (-pair[0], pair[1][0][0]))]


def _counted(found: Iterable[Partition]) -> list[tuple[Partition, KeyCounts]]:
    return [(item, item.detail.key_counts) for item in found if item.detail.key_counts is not None]
