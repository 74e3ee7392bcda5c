"""The write phase of a compaction without files: the output is counted, not written.

The file system accepts every change and makes none, so a measurement cannot write to a log dir.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from keytail.compact.task import CleaningTask
from keytail.compact.write_phase.rewrite import Rewriter, RowDecisions
from keytail.format.batch import BATCH_TABLE, CONTROL, DELETE_HORIZON
from keytail.kernels.rewriting import records as record_kernels
from keytail.log.pace import Pace
from keytail.log.quiet import QuietFileSystem
from keytail.log.records.chunk import Chunk
from keytail.log.writer import Mark, OutputWriter, SegmentWriter

# The columns of batches that a new segment needs if the batches are moved to it when an output is split.
_COLUMNS = ("base_offset", "last_offset", "max_timestamp_ms", "size_bytes", "record_count")
_MOVED = np.dtype([(name, BATCH_TABLE[name]) for name in _COLUMNS])


class CountingFileSystem(QuietFileSystem):
    """Reads the real file system as QuietFileSystem does, for a broker that may run. Operations that would change
    something do nothing."""

    def __init__(self, pace: Pace | None = None) -> None:
        super().__init__(pace)
        self._last_fd = -1  # descriptors of files that do not exist are negative

    def _change(self, operation: str, arguments: tuple[Any, ...], action: Callable[[], Any]) -> Any:
        if operation == "create":
            self._last_fd -= 1
            return self._last_fd
        return len(arguments[1]) if operation in ("write", "write_at") else None

    def write(self, fd: int, buffer: Any) -> int:
        """Return the number of bytes in `buffer`. Nothing is written, and no rate limit applies."""
        return memoryview(buffer).nbytes

    def fsync(self, fd: int) -> None:
        """Do nothing."""

    def close(self, fd: int) -> None:
        if fd >= 0:
            super().close(fd)


class CountedSegment(SegmentWriter):
    """Counts the batches of a new segment. The BATCH_TABLE rows appended since the last mark are kept in memory,
    because there is no file to read them from."""

    _rows: list[np.ndarray] | None = None

    def append(self, data: np.ndarray, table: np.ndarray) -> int:
        taken = super().append(data, table)
        if self._rows is not None and taken:
            self._rows.append(table[:taken][list(_COLUMNS)].astype(_MOVED))
        return taken

    def mark(self) -> Mark:
        self._rows = []
        return super().mark()

    def since(self, mark: Mark) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for rows in self._rows or ():
            table = np.zeros(len(rows), BATCH_TABLE)
            for name in _COLUMNS:
                table[name] = rows[name]
            yield np.empty(0, np.uint8), table


class CountingWriter(OutputWriter):
    """Counts the outputs of one partition, and writes nothing."""

    writes_with = CountedSegment


class CountingRewriter(Rewriter):
    """A Rewriter that counts the retained tombstones. To count them, the class opens batches that a compaction copies
    unopened."""

    def __init__(self, task: CleaningTask, *arguments: Any, **named: Any) -> None:
        super().__init__(task, *arguments, **named)
        self._task = task
        self.tombstones = 0

    def _decide_rows(
        self, chunk: Chunk, number: int, records: int, batches: int, file_is_old: bool
    ) -> RowDecisions:
        rows = super()._decide_rows(chunk, number, records, batches, file_is_old)
        table = chunk.table
        uncounted = (rows.action == record_kernels.COPY) & ((table["attributes"] & CONTROL) == 0)
        # Without `by_file_time`, batches that are copied unopened have tombstones only if they have a delete horizon.
        if not self._task.by_file_time:
            uncounted &= (table["attributes"] & DELETE_HORIZON) != 0
        rows.action[uncounted & (table["record_count"] > 0)] = record_kernels.OPEN
        return rows

    def _append(self, chunk: Chunk, part: tuple[int, int], rows: RowDecisions, *more: Any) -> None:
        super()._append(chunk, part, rows, *more)
        self._count_tombstones(chunk, slice(*part), rows)

    def _count_tombstones(self, chunk: Chunk, part: slice, rows: RowDecisions) -> None:
        action = rows.action[part]
        retained = (action == record_kernels.COPY) | (action == record_kernels.REBUILD)
        retained &= (chunk.table["attributes"][part] & CONTROL) == 0
        self.tombstones += int(rows.kept_nulls[part][retained].sum())
