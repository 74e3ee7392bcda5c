"""Whether the index files of a segment are true of its log, though they need not be what a recovery would write.

A broker that was started again while a segment was active, or under another `index.interval.bytes`, leaves other
entries than a recovery does, and all of them right (format/INDEX.md). Wrong is what would be answered wrongly, or
found only by reading much of the log.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from keytail.format.index import OFFSET_ENTRY, TIME_ENTRY, parse_offset_index, parse_time_index
from keytail.log.stride import Stride

# Without entries over so many bytes, and over several times what the interval explains, an index is incomplete.
UNINDEXED_BYTES = 1 << 20
_INTERVALS = 4


def why_wrong(
    offset_index: bytes,
    time_index: bytes,
    strides: Iterable[Stride],
    *,
    base_offset: int,
    index_interval_bytes: int,
    is_in_use: bool,
) -> tuple[str, str]:
    """What is wrong with the two files, by the segment's batches; "" where nothing is.

    `is_in_use`: of the segment that a broker writes to. Its files have room behind their entries, and its time
    index lacks the entry that closes it.
    """
    offsets = _Entries(parse_offset_index(_used(offset_index, OFFSET_ENTRY, is_in_use)), "position", "relative_offset")
    times = _Entries(parse_time_index(_used(time_index, TIME_ENTRY, is_in_use)), "relative_offset", "timestamp_ms")
    offsets.why = _why_not_whole(offset_index, OFFSET_ENTRY) or offsets.why_not_rising()
    times.why = _why_not_whole(time_index, TIME_ENTRY) or times.why_not_rising()
    largest_ms, largest_batch_bytes, end = -1, 0, 0
    for stride in strides:
        table = stride.table
        last = table["last_offset"] - base_offset
        offsets.compare(table["position"], last, np.ones(len(table), bool), "the batch at byte position")
        reached = np.maximum.accumulate(np.maximum(table["max_timestamp_ms"], largest_ms))
        rises = np.diff(reached, prepend=largest_ms) > 0
        times.compare(last, reached, rises, "the largest timestamp up to relative offset")
        largest_ms = int(reached[-1])
        largest_batch_bytes = max(largest_batch_bytes, int(table["size_bytes"].max()))
        end = stride.position + len(stride.raw)
    offsets.finish("lies behind the last batch")
    times.finish("lies behind the last batch")
    if not offsets.why:
        gap = int(np.diff([0, *offsets.keys.tolist(), end]).max())
        if gap > max(UNINDEXED_BYTES, _INTERVALS * (index_interval_bytes + largest_batch_bytes)):
            offsets.why = f"{gap} bytes of the log have no entry"
    if not times.why and not is_in_use:
        last_ms = int(times.values[-1]) if len(times.values) else -1
        if last_ms != largest_ms:
            times.why = f"its last timestamp is {last_ms}, the largest of the log {largest_ms}"
    return offsets.why, times.why


class _Entries:
    """Entries of one index, of which those that lie in a stride are compared with it; `why` says what is wrong."""

    def __init__(self, entries: np.ndarray, key: str, value: str) -> None:
        self.keys = entries[key].astype(np.int64)
        self.values = entries[value].astype(np.int64)
        self.why = ""
        self._done = 0

    def why_not_rising(self) -> str:
        falls = np.zeros(len(self.keys), bool)
        for column in (self.keys, self.values):
            falls |= np.diff(column, prepend=-1) <= 0
        # The first entry may name relative offset 0 or timestamp 0.
        return f"entry {int(np.argmax(falls))} does not rise" if falls.any() else ""

    def compare(self, keys: np.ndarray, values: np.ndarray, may: np.ndarray, what: str) -> None:
        """Entries up to the last of `keys` (ascending) must be among them, where `may`, and have their values."""
        end = int(np.searchsorted(self.keys, keys[-1], side="right"))
        mine = slice(self._done, end)
        self._done = max(end, self._done)
        if self.why or mine.start >= mine.stop:
            return
        at = np.searchsorted(keys, self.keys[mine])
        wrong = (keys[at] != self.keys[mine]) | ~may[at] | (values[at] != self.values[mine])
        if wrong.any():
            number = mine.start + int(np.argmax(wrong))
            self.why = f"entry {number} is not true: {what} {int(self.keys[number])} is not {int(self.values[number])}"

    def finish(self, what: str) -> None:
        if not self.why and self._done < len(self.keys):
            self.why = f"entry {self._done} {what}"


def _used(data: bytes, entry: np.dtype, is_in_use: bool) -> bytes:
    if not is_in_use or len(data) <= entry.itemsize:
        return data
    return data[: -(-len(data.rstrip(b"\0")) // entry.itemsize) * entry.itemsize]


def _why_not_whole(data: bytes, entry: np.dtype) -> str:
    rest = len(data) % entry.itemsize
    return f"its size of {len(data)} bytes is not a multiple of {entry.itemsize}" if rest else ""
