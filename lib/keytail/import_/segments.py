"""Writes the records of one partition as new segments with scratch names, in a task of an import.

Records arrive as columns, in pieces of any size; a batch may have records of several pieces. Batches are appended to a
segment until it is full. Brokers ignore files with scratch names; `install.py` gives the files their final names.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keytail.errors import Refused
from keytail.format.encode import Encoding, RecordColumns, encode_batches, joined
from keytail.log.fs import FileSystem
from keytail.log.replacement.replace import OutputSegment
from keytail.log.writer import Limits, OutputWriter, Source

# Bytes of data that are encoded at a time. The size is so large that encoding the last batch of each part again with
# later records takes little time.
PART_BYTES = 8 << 20
_RECORD_BYTES = 16  # approximate size of a record without its key, value and headers


@dataclass(frozen=True, slots=True)
class SegmentsTask:
    """The parameters for writing one partition. `leader_epoch`, `codec` and its `level` apply to every batch."""

    partition_path: str
    base_offset: int
    leader_epoch: int
    codec: int
    level: int | None
    batch_bytes: int
    max_message_bytes: int
    limits: Limits
    keys_required: bool
    log_append_time: bool
    now_ms: int
    run_id: str


@dataclass(frozen=True, slots=True)
class Written:
    """The finished segments, in ascending order and durable. `first_crc` is the CRC of the first batch."""

    segments: tuple[OutputSegment, ...]
    end_offset: int
    records: int
    log_bytes: int
    first_crc: int
    largest_timestamp_ms: int


class SegmentsWriter:
    """Writes the records of a partition to segments. Call `append` with columns of records, in order, then `finish`; or
    call `discard` to remove all files."""

    def __init__(self, fs: FileSystem, task: SegmentsTask, attempt: str) -> None:
        self._task = task
        like = fs.stat(task.partition_path)
        self._output = OutputWriter(
            fs, task.partition_path, task.run_id, attempt, task.limits, lambda first, end: b"", like_of=lambda _: like
        )
        self._pending: list[RecordColumns] = []
        self._pending_bytes = 0
        self._records = 0
        self._next = task.base_offset  # offset of the first pending record
        self._first_crc: int | None = None
        self._largest_ms = -1

    def append(self, columns: RecordColumns) -> None:
        """Add records. Those without a timestamp (-1), and all if `log_append_time` is set, get the time of the import.
        Raises Refused for a record without a key if the topic requires keys."""
        task = self._task
        if not len(columns):
            return
        if task.keys_required and not columns.keys.valid.all():
            row = self._records + int(np.argmin(columns.keys.valid))
            raise Refused(
                f"row {row} of the partition has no key, and the topic is compacted: a broker rejects such records",
                path=task.partition_path,
                remedy="Remove records without a key from the source, or import into a topic that is not compacted",
                slug="null-key-for-compacted-topic",
            )
        self._pending.append(self._with_timestamps(columns))
        self._pending_bytes += columns.data_bytes + _RECORD_BYTES * len(columns)
        self._records += len(columns)
        if self._pending_bytes >= max(PART_BYTES, 2 * task.batch_bytes):
            self._encode(is_last=False)

    def _encode(self, is_last: bool) -> None:
        """Write pending records. Unless `is_last`, the last batch is not written: later records may be added to it."""
        task, columns = self._task, joined(self._pending)
        end, left = self._next + len(columns), 0
        encoding = Encoding(
            leader_epoch=task.leader_epoch,
            codec=task.codec,
            level=task.level,
            batch_bytes=task.batch_bytes,
            max_message_bytes=task.max_message_bytes,
            log_append_time=task.log_append_time,
        )
        for data, table in encode_batches(columns, encoding, self._next, self._next - task.base_offset):
            if is_last or int(table["last_offset"][-1]) < end - 1:
                self._append_batches(data, table)
            else:
                left = int(table["record_count"][-1])
                self._append_batches(data[: -int(table["size_bytes"][-1])], table[:-1])
        self._next = end - left
        kept = columns.rows(len(columns) - left, len(columns))
        self._pending = [joined([kept])] if left else []  # copied, so that the encoded records are released
        self._pending_bytes = kept.data_bytes + _RECORD_BYTES * left

    def _with_timestamps(self, columns: RecordColumns) -> RecordColumns:
        times = columns.timestamps_ms
        if self._task.log_append_time:
            times = np.full(len(columns), self._task.now_ms, np.int64)
        elif (times == -1).any():
            times = np.where(times == -1, self._task.now_ms, times)
        return RecordColumns(times, columns.keys, columns.values, columns.headers)

    def _append_batches(self, data: np.ndarray, table: np.ndarray) -> None:
        if not len(table):
            return
        if self._first_crc is None:
            self._first_crc = int(table["crc"][0])
            self._output.start_output(Source(self._task.base_offset, self._task.now_ms))
        self._largest_ms = max(self._largest_ms, int(table["max_timestamp_ms"].max()))
        self._output.append(data, table)

    def finish(self) -> Written | None:
        """Write the pending records and close the last segment. Returns the segments; None if there were no records."""
        if self._pending:
            self._encode(is_last=True)
        if self._first_crc is None:
            return None
        (group,) = self._output.finish(self._next)
        return Written(
            group.segments, self._next, self._records, self._output.size_bytes, self._first_crc, self._largest_ms
        )

    def discard(self) -> None:
        """Remove every file that was created, as far as possible."""
        self._output.discard()
