"""Builds the offset and time index of one segment from the tables of its batches, in order.

Entries follow format/INDEX.md, "When an entry is written". The bytes are those that a broker's recovery writes, and
include the entry that closes a segment.
"""

from __future__ import annotations

import numpy as np

from keytail.format.index import OFFSET_ENTRY, TIME_ENTRY
from keytail.kernels import index as kernels


class SegmentIndexer:
    """Collects the index entries of the segment with `base_offset`: add every batch once, in order, then call `close`.

    With `part`, the indexer is for a part of the segment, whose first batch is assumed to get an offset entry; later,
    the indexer of the preceding batches joins the part. An indexer is small enough to be sent to another host.
    """

    stored_fields = ("_base", "_interval", "_max_offset_entries", "_max_time_entries", "_state", "_offsets", "_times")

    def __init__(
        self, base_offset: int, interval_bytes: int, max_index_bytes: int, *, part: bool = False
    ) -> None:
        self._base = base_offset
        self._interval = interval_bytes
        self._max_offset_entries = max_index_bytes // OFFSET_ENTRY.itemsize
        self._max_time_entries = max_index_bytes // TIME_ENTRY.itemsize
        self._state = np.array([0, -1, base_offset, -1, 0, 0], np.int64)
        if part:
            self._state[kernels.SINCE_LAST] = interval_bytes + 1
        self._offsets: list[np.ndarray] = []
        self._times: list[np.ndarray] = []

    def add(self, table: np.ndarray) -> int:
        """Add batches (BATCH_TABLE rows) of the segment until an index is full; return how many batches were added."""
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

    def reset_to(self, mark: tuple[np.ndarray, int]) -> None:
        """Undo all calls of `add` and `join` since `mark`."""
        self._state = mark[0].copy()
        del self._offsets[mark[1] :], self._times[mark[1] :]

    @property
    def size_bytes(self) -> int:
        """The maximum total size in bytes that both index files would have if they were closed now."""
        offsets, times = int(self._state[kernels.OFFSET_ENTRIES]), int(self._state[kernels.TIME_ENTRIES])
        return offsets * OFFSET_ENTRY.itemsize + (times + 1) * TIME_ENTRY.itemsize

    @property
    def next_gets_entry(self) -> bool:
        """Whether the next batch, if there is one, gets an offset entry."""
        return bool(self._state[kernels.SINCE_LAST] > self._interval)

    @property
    def last_entry_position(self) -> int:
        """The byte position of the batch with the last offset entry; -1 if there is none."""
        last = next((entries[-1] for entries in reversed(self._offsets) if len(entries)), None)
        return -1 if last is None else int(last[1])

    def meets(self, part: SegmentIndexer) -> bool:
        """Return whether the last offset entry so far is also in `part`; if so, both indexers would have the same
        offset entries after that entry."""
        positions = _joined(part._offsets)[:, 1]
        at = np.searchsorted(positions, self.last_entry_position)
        return bool(at < len(positions) and positions[at] == self.last_entry_position)

    def join(self, part: SegmentIndexer) -> None:
        """Add the entries of `part` that follow the last entry so far, and adopt the state of `part`.

        The first batch of `part` must follow all batches so far and get an entry (`next_gets_entry`), or the last
        offset entry so far must be in `part` (`meets`).
        """
        offsets, times = _joined(part._offsets), _joined(part._times)
        offsets = offsets[offsets[:, 1] > self.last_entry_position]
        # The part does not know the preceding batches: only its time entries above the largest time so far count.
        largest, largest_offset = (int(self._state[i]) for i in (kernels.MAX_TIMESTAMP, kernels.MAX_TIMESTAMP_OFFSET))
        later = times[times[:, 0] > largest]
        # A largest time without an entry gets one with the next offset entry, unless a larger time precedes that entry.
        waits = len(offsets) and largest > self._state[kernels.LAST_TIME_ENTRY]
        if waits and not (len(later) and later[0, 1] <= offsets[0, 0]):
            later = np.concatenate([[[largest, largest_offset - self._base]], later])
        self._offsets.append(offsets)
        self._times.append(later)
        state = part._state.copy()
        if state[kernels.MAX_TIMESTAMP] <= largest:
            state[kernels.MAX_TIMESTAMP], state[kernels.MAX_TIMESTAMP_OFFSET] = largest, largest_offset
        state[kernels.LAST_TIME_ENTRY] = later[-1, 0] if len(later) else self._state[kernels.LAST_TIME_ENTRY]
        state[kernels.OFFSET_ENTRIES] = self._state[kernels.OFFSET_ENTRIES] + len(offsets)
        state[kernels.TIME_ENTRIES] = self._state[kernels.TIME_ENTRIES] + len(later)
        self._state = state

    @property
    def is_over_full(self) -> bool:
        """Whether joined parts have more entries than the indexes may have; one slot of the time index is reserved for
        the closing entry."""
        too_many_offsets = self._state[kernels.OFFSET_ENTRIES] > self._max_offset_entries
        times = self._state[kernels.TIME_ENTRIES]
        return bool(too_many_offsets or (times and times > self._max_time_entries - 1))

    def entries(self) -> tuple[bytes, bytes]:
        """Return the bytes of the offset index and the time index so far, without the closing time entry."""
        return _packed(_joined(self._offsets), OFFSET_ENTRY), _packed(_joined(self._times), TIME_ENTRY)

    def close(self) -> tuple[bytes, bytes]:
        """Return the complete `.index` and `.timeindex`, with the closing time entry."""
        times = _joined(self._times)
        if self._state[kernels.MAX_TIMESTAMP] > self._state[kernels.LAST_TIME_ENTRY]:
            closing = [
                self._state[kernels.MAX_TIMESTAMP],
                self._state[kernels.MAX_TIMESTAMP_OFFSET] - self._base,
            ]
            times = np.concatenate([times, np.array([closing], np.int64)])
        return _packed(_joined(self._offsets), OFFSET_ENTRY), _packed(times, TIME_ENTRY)


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([*parts, np.empty((0, 2), np.int64)])


def _packed(entries: np.ndarray, dtype: np.dtype) -> bytes:
    packed = np.empty(len(entries), dtype)
    for column, name in enumerate(dtype.names or ()):
        packed[name] = entries[:, column]
    return packed.tobytes()
