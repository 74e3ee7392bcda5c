"""Which producers are active, and the last data batch of each: what compaction must not let vanish.

The state is that of the newest good producer snapshot at or below the log end, with the batches behind it
replayed, and idle producers forgotten, as a broker does when it loads the log (format/SNAPSHOT.md).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from keytail.format import names
from keytail.format.producers import ProducerEntry, parse_snapshot
from keytail.log.fs import FileSystem
from keytail.log.partition import SegmentFacts
from keytail.log.stride import SegmentReader


@dataclass(frozen=True)
class ActiveProducers:
    """Sorted `ids` (int64) and the last data offset of each (int64, -1: none is known)."""

    ids: np.ndarray
    last_data_offsets: np.ndarray

    def ends_a_producer(self, table: np.ndarray) -> np.ndarray:
        """For each batch (BATCH_TABLE rows): is it the last data batch of an active producer?"""
        if not len(self.ids):
            return np.zeros(len(table), bool)
        at = np.minimum(np.searchsorted(self.ids, table["producer_id"]), len(self.ids) - 1)
        is_active = (self.ids[at] == table["producer_id"]) & (table["producer_id"] >= 0)
        return is_active & (self.last_data_offsets[at] == table["last_offset"])


def newest_snapshot(
    fs: FileSystem, partition_path: str, snapshots: Sequence[int], log_end_offset: int
) -> tuple[int, list[ProducerEntry]] | None:
    """Offset and entries of the newest snapshot at or below `log_end_offset` whose checksum is right."""
    for offset in sorted(snapshots, reverse=True):
        if offset <= log_end_offset:
            data = fs.read_bytes(os.path.join(partition_path, names.segment_file(offset, names.SNAPSHOT)))
            try:
                return offset, parse_snapshot(data)
            except ValueError:
                continue  # a broker deletes a damaged snapshot and takes the one before it
    return None


def active_producers(
    fs: FileSystem,
    reader: SegmentReader,
    partition_path: str,
    segments: Sequence[SegmentFacts],
    snapshots: Sequence[int],
    log_start_offset: int,
    log_end_offset: int,
    *,
    clean_shutdown: bool,
    expiration_ms: int,
    now_ms: int,
) -> ActiveProducers:
    """The state a broker would have after loading the log at `now_ms`."""
    found = newest_snapshot(fs, partition_path, snapshots, log_end_offset)
    if found is None and clean_shutdown:
        return _sorted({})  # a broker starts with no producers then, whatever the log holds
    start, entries = found if found is not None else (log_start_offset, [])
    state = {
        entry.producer_id: entry.last_offset
        for entry in entries
        if entry.current_txn_first_offset >= 0 or now_ms - entry.timestamp_ms < expiration_ms
    }
    for number, segment in enumerate(segments):
        is_last = number + 1 == len(segments)
        if is_last or segments[number + 1].base_offset > start:
            path = os.path.join(partition_path, names.segment_file(segment.base_offset, names.LOG))
            if segment.base_offset < log_end_offset and start < log_end_offset:
                for stride in reader.strides(
                    path, segment.log_bytes, torn_tail=is_last and not clean_shutdown
                ):
                    _replay(state, stride.table, start, log_end_offset)
    return _sorted(state)


def _replay(state: dict[int, int], table: np.ndarray, start: int, end: int) -> None:
    rows = table[(table["producer_id"] >= 0) & (table["base_offset"] >= start) & (table["last_offset"] < end)]
    # The last batch of each producer: first occurrence from behind.
    ids, at = np.unique(rows["producer_id"][::-1], return_index=True)
    for producer_id, k in zip(ids, at, strict=True):
        state[int(producer_id)] = int(rows["last_offset"][len(rows) - 1 - k])


def _sorted(state: dict[int, int]) -> ActiveProducers:
    ids = np.array(sorted(state), np.int64)
    return ActiveProducers(ids, np.array([state[int(i)] for i in ids], np.int64))
