"""Reads the hottest keys of a dirty section, each from the key's last record: the offset map contains the ordinal of
each key's last record (offset_map.py), but not the key.

The log is read from the nearest earlier place whose ordinal is known (the start of a chunk or, in a fan-out, of a
slice) to the last wanted record before the next such place.
"""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from keytail.compact.map_phase.key_counts import Counted, HotKey, KeyCounts, hot_key
from keytail.compact.map_phase.survivors import Survivors
from keytail.compact.task import CleaningTask
from keytail.errors import CorruptLog
from keytail.format import names
from keytail.log.fs import FileSystem
from keytail.log.records.chunk import Chunk, SegmentReader
from keytail.log.records.scan import RecordScanner

Place = tuple[int, int]  # the ordinal of the first record of a batch, and the batch's byte position


def count_keys(fs: FileSystem, task: CleaningTask, reader: SegmentReader, survivors: Survivors) -> KeyCounts:
    """Return the counts of the map, and the hottest keys read from the log; free the memory of the counts."""
    counted = survivors.offset_map.counted(task.hottest_keys)
    survivors.offset_map.forget_counts()
    found: list[HotKey] = []
    for place, hottest in by_place(survivors.places, counted.hottest):
        found += _read(fs, reader, HotPart(task, place, hottest))
    survivors.places.clear()
    return key_counts_of(counted, found)


@dataclass(frozen=True)
class HotPart:
    """Keys to be read, as pairs (number of records, ordinal of the last record) by ascending ordinal. The last records
    are in the segment of `place`, at or after that place.
    """

    task: CleaningTask
    place: Place
    hottest: tuple[tuple[int, int], ...]


def by_place(
    places: Sequence[Place], hottest: Iterable[tuple[int, int]]
) -> list[tuple[Place, tuple[tuple[int, int], ...]]]:
    """Return the keys grouped by the last of the ascending `places` that is at or before a key's last record."""
    ordinals = [ordinal for ordinal, _ in places]
    ascending = sorted(hottest, key=lambda item: item[1])
    found = groupby(ascending, lambda item: bisect_right(ordinals, item[1]) - 1)
    return [(places[at], tuple(those)) for at, those in found]


def read_hottest(fs: FileSystem, part: HotPart, attempt: str) -> list[HotKey]:
    """Return the keys of a part, in a task of a fan-out. Writes nothing; raises what reading a log raises."""
    return _read(fs, SegmentReader(fs), part)


def key_counts_of(counted: Counted, found: Iterable[HotKey]) -> KeyCounts:
    """Return the counts and the keys that were read, by descending number of records, then descending
    offset: the order of `counted`."""
    hottest = sorted(found, key=lambda item: (item.records, item.offset), reverse=True)
    return KeyCounts(counted.keys, counted.records, tuple(hottest))


def _read(fs: FileSystem, reader: SegmentReader, part: HotPart) -> list[HotKey]:
    task, (first, position) = part.task, part.place
    segment = task.segments[first >> 32]
    path = task.path(segment.base_offset, names.LOG)
    scanner = RecordScanner()
    waiting = list(part.hottest)
    found: list[HotKey] = []
    with contextlib.closing(reader.chunks_without_prefetch(path, segment.log_bytes, start=position)) as chunks:
        for chunk in chunks:
            end = first + int(chunk.table["record_count"].sum(dtype=np.int64))
            here = [item for item in waiting if item[1] < end]
            if here:
                numbers = np.array([ordinal - first for _, ordinal in here], np.int64)
                for (records, _), (offset, key) in zip(here, _keys(reader, scanner, chunk, numbers), strict=True):
                    found.append(hot_key(records, offset, key, show=task.show_keys))
                waiting = waiting[len(here) :]
            if not waiting:
                return found
            first = end
    raise CorruptLog(
        "the segment has fewer records than when its keys were counted",
        path=path,
        remedy=f"Stop the process that writes to {os.path.dirname(path)}, and run again",
        slug="segment-changed",
    )


def _keys(
    reader: SegmentReader, scanner: RecordScanner, chunk: Chunk, numbers: np.ndarray
) -> Iterator[tuple[int, bytes]]:
    """Yield offset and key of the records with these `numbers` (int64, ascending, counted from the chunk's start)."""
    counts = chunk.table["record_count"].astype(np.int64)
    ends = np.cumsum(counts)
    wanted = np.zeros(len(counts), bool)
    wanted[np.searchsorted(ends, numbers, side="right")] = True
    is_wanted = np.zeros(int(ends[-1]), bool)
    is_wanted[numbers] = True
    bits = np.packbits(is_wanted, bitorder="little")
    for opened in reader.open_rows(chunk, wanted):
        for portion in scanner.portions(chunk, opened, bits, ends - counts):
            keys = portion.record_table.keys()
            for number, offset in enumerate(portion.records["offset"].tolist()):
                yield offset, keys.data[keys.offsets[number] : keys.offsets[number + 1]].tobytes()
