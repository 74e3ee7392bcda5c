"""Builds the offset and time index of one segment from the tables of its batches, in order.

Entries follow format/INDEX.md, "When an entry is written", and the entry that closes a segment; the same
bytes as a broker's own recovery would give.
"""

from __future__ import annotations

import numpy as np

from keytail.format.index import OFFSET_ENTRY, TIME_ENTRY
from keytail.kernels import index as kernels


class SegmentIndexer:
    """Index entries of the segment with `base_offset`; give it every batch once, in order, then `close` it."""

    def __init__(self, base_offset: int, interval_bytes: int, max_index_bytes: int) -> None:
        self._base = base_offset
        self._interval = interval_bytes
        self._max_offset_entries = max_index_bytes // OFFSET_ENTRY.itemsize
        self._max_time_entries = max_index_bytes // TIME_ENTRY.itemsize
        self._state = np.array([0, -1, base_offset, -1, 0, 0], np.int64)
        self._offsets: list[np.ndarray] = []
        self._times: list[np.ndarray] = []

    def add(self, table: np.ndarray) -> int:
        """Note batches (BATCH_TABLE rows) that go into the segment, until an index is full; how many were noted."""
        n = len(table)
        offsets, times = np.empty((n, 2), np.int64), np.empty((n, 2), np.int64)
        out = np.zeros(4, np.int64)
        kernels.index_rows(
            table, n, self._base, self._interval, self._max_offset_entries, self._max_time_entries,
            self._state, offsets, times, out,
        )  # fmt: skip
        self._offsets.append(offsets[: out[0]].copy())
        self._times.append(times[: out[1]].copy())
        return int(out[2])

    def mark(self) -> tuple[np.ndarray, int]:
        return self._state.copy(), len(self._offsets)

    def take_back(self, mark: tuple[np.ndarray, int]) -> None:
        """Forget everything added since `mark`."""
        self._state = mark[0].copy()
        del self._offsets[mark[1] :], self._times[mark[1] :]

    def close(self) -> tuple[bytes, bytes]:
        """The whole `.index` and `.timeindex`, with the closing time entry."""
        times = np.concatenate([*self._times, np.empty((0, 2), np.int64)])
        if self._state[kernels.MAX_TIMESTAMP] > self._state[kernels.LAST_TIME_ENTRY]:
            closing = [
                self._state[kernels.MAX_TIMESTAMP],
                self._state[kernels.MAX_TIMESTAMP_OFFSET] - self._base,
            ]
            times = np.concatenate([times, np.array([closing], np.int64)])
        offsets = np.concatenate([*self._offsets, np.empty((0, 2), np.int64)])
        return _packed(offsets, OFFSET_ENTRY), _packed(times, TIME_ENTRY)


def _packed(entries: np.ndarray, dtype: np.dtype) -> bytes:
    packed = np.empty(len(entries), dtype)
    for column, name in enumerate(dtype.names or ()):
        packed[name] = entries[:, column]
    return packed.tobytes()
