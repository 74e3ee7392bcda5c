"""The segment to which batches are appended: its log, the two indexes that grow with it, and its transaction index.

rolling.py decides which batches are appended to the segment; this module writes and indexes a set of batches, and
closes the segment as a broker does. APPEND.md specifies when each file is created, and what is durable when.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack

import numpy as np

from keytail.format import names
from keytail.kernels import index as kernels
from keytail.log.append.index_plan import NO_TIMESTAMP, IndexPlan, IndexState
from keytail.log.append.rolling import AppendConfig, RollState
from keytail.log.fs import FileStat, FileSystem
from keytail.log.index.files import AbortedTransaction, OffsetIndex, TimeIndex, TransactionIndex


class ActiveSegment:
    """The last segment of a log, created by `create` or `reopen`. Do not use the object after `close` or `abandon`."""

    def __init__(
        self, fs: FileSystem, directory: str, base_offset: int, config: AppendConfig, like: FileStat, opened: RollState
    ) -> None:
        self.base_offset = base_offset
        self.size_bytes = opened.size_bytes
        self.is_dirty = False  # bytes were written since the last flush
        self._fs = fs
        self._directory = directory
        self._config = config
        self._like = like
        self._opened = opened
        self._first_timestamp_ms = opened.first_timestamp_ms
        self._indexes: tuple[OffsetIndex, TimeIndex] | None = None
        self._transactions = TransactionIndex(fs, self._path(names.TXN_INDEX), base_offset, like)
        self.index_state = IndexState.of_new_segment(base_offset, config)
        self._fd = fs.open_write(self._path(names.LOG))

    @classmethod
    def create(
        cls, fs: FileSystem, directory: str, base_offset: int, config: AppendConfig, like: FileStat, *,
        now_ms: int, jitter_ms: int,
    ) -> ActiveSegment:  # fmt: skip
        """Create the segment's `.log`; the caller makes its name durable. The first append creates the indexes."""
        path = os.path.join(directory, names.segment_file(base_offset, names.LOG))
        fs.close(fs.create(path, like))
        opened = RollState(base_offset, 0, NO_TIMESTAMP, now_ms, jitter_ms)
        segment = cls(fs, directory, base_offset, config, like, opened)
        try:
            segment._preallocate()
        except BaseException:
            segment.abandon()
            raise
        return segment

    @classmethod
    def reopen(
        cls, fs: FileSystem, directory: str, opened: RollState, config: AppendConfig, like: FileStat
    ) -> ActiveSegment:
        """Open the last segment of a closed log. Raises CorruptLog if an index cannot be continued."""
        segment = cls(fs, directory, opened.base_offset, config, like, opened)
        try:
            offsets, times = segment.open_indexes()
        except BaseException:
            segment.abandon()
            raise
        last = times.last
        values = [0, last.timestamp_ms, last.offset, last.timestamp_ms, len(offsets), len(times)]
        segment.index_state = IndexState(np.array(values, np.int64), offsets.max_entries, times.max_entries)
        return segment

    @property
    def log_path(self) -> str:
        return self._path(names.LOG)

    @property
    def roll_state(self) -> RollState:
        opened = self._opened
        return RollState(
            self.base_offset, self.size_bytes, self._first_timestamp_ms, opened.created_ms, opened.jitter_ms,
            self.index_state.is_full,
        )  # fmt: skip

    def renew(self, now_ms: int, jitter_ms: int) -> None:
        """Reset an empty segment, as a broker's roll does, to the state of a segment created now, without indexes."""
        for index in self._indexes or ():
            index.close()
            self._fs.unlink(index.path)
        self._indexes = None
        self.index_state = IndexState.of_new_segment(self.base_offset, self._config)
        self._preallocate()
        self._opened = RollState(self.base_offset, 0, NO_TIMESTAMP, now_ms, jitter_ms)

    def append(self, data: np.ndarray, table: np.ndarray, plan: IndexPlan) -> None:
        """Write a set of batches and the planned index entries. `data` are the set's bytes, `table` its BATCH_TABLE
        rows with positions in this segment."""
        offsets, times = self.open_indexes()
        if self.size_bytes == 0:
            self._first_timestamp_ms = int(table["max_timestamp_ms"][0])
        self.is_dirty = True
        self._fs.write_at(self._fd, data, self.size_bytes)
        self.size_bytes += len(data)
        offsets.append_rows(plan.offsets)
        times.append_rows(plan.times)
        self.index_state = plan.state

    def append_aborted(self, aborted: Iterable[AbortedTransaction]) -> None:
        for transaction in aborted:
            self._transactions.append(transaction)

    def flush(self) -> None:
        """Make the contents of log and indexes durable, but not the names of these files. Missing indexes of an empty
        segment are created."""
        self._fs.fsync(self._fd)
        for index in self.open_indexes():
            index.flush()
        self._transactions.flush()
        self.is_dirty = False

    def close(self) -> None:
        """Close the segment: write the closing entry of the time index, truncate all files to their contents, and make
        them durable.

        The log is made durable first, so that no durable index points beyond it.
        """
        offsets, times = self.open_indexes()
        if self._fs.fd_stat(self._fd).size_bytes != self.size_bytes:
            self._fs.truncate(self._fd, self.size_bytes)
        self._fs.fsync(self._fd)
        values = self.index_state.values
        times.maybe_append(int(values[kernels.MAX_TIMESTAMP]), int(values[kernels.MAX_TIMESTAMP_OFFSET]), closing=True)
        offsets.trim()
        times.trim()
        self._transactions.flush()
        self.abandon()

    def abandon(self) -> None:
        """Close all files without changing them, even if closing one of them fails."""
        with ExitStack() as files:
            if self._fd >= 0:
                files.callback(self._fs.close, self._fd)
            for index in self._indexes or ():
                files.callback(index.close)
            self._fd, self._indexes = -1, None

    def open_indexes(self) -> tuple[OffsetIndex, TimeIndex]:
        """Return the offset and the time index, preallocated at their full size; create missing indexes."""
        if self._indexes is None:
            where = self._config.index_bytes, self._like
            offsets = OffsetIndex.open_for_append(self._fs, self._path(names.INDEX), self.base_offset, *where)
            try:
                times = TimeIndex.open_for_append(self._fs, self._path(names.TIME_INDEX), self.base_offset, *where)
            except BaseException:
                offsets.close()
                raise
            self._indexes = offsets, times
        return self._indexes

    def _preallocate(self) -> None:
        if self._config.preallocate:
            self._fs.truncate(self._fd, self._config.segment_bytes)

    def _path(self, suffix: str) -> str:
        return os.path.join(self._directory, names.segment_file(self.base_offset, suffix))
