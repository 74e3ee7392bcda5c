"""Holds the producer state of an open log, and writes producer snapshots.

live_producers.py applies batches. APPEND.md beside this file specifies when a snapshot is taken or removed;
format/SNAPSHOT.md specifies its bytes.
"""

from __future__ import annotations

import os

import numpy as np

from keytail.format import names
from keytail.format.producers import encode_snapshot
from keytail.log.append.live_producers import CheckedSet, LiveProducers
from keytail.log.fs import FileStat, FileSystem
from keytail.log.partition import PartitionFacts
from keytail.log.producer import not_idle
from keytail.log.producers import newest_snapshot


class ProducerState:
    """The state of producers after the batches below `end`, and its snapshots. Created by `new` or `loaded`."""

    def __init__(self, fs: FileSystem, directory: str, like: FileStat, end: int, last_snapshot: int) -> None:
        self.end = end
        self._fs = fs
        self._directory = directory
        self._like = like
        self._last_snapshot = last_snapshot
        self._producers = LiveProducers()

    @classmethod
    def new(cls, fs: FileSystem, directory: str, like: FileStat, log_start_offset: int) -> ProducerState:
        """Create the state of a new log; write a snapshot if the log does not begin at 0."""
        state = cls(fs, directory, like, log_start_offset, 0)
        state.take_snapshot()
        return state

    @classmethod
    def loaded(
        cls, fs: FileSystem, like: FileStat, facts: PartitionFacts, *, expiration_ms: int, now_ms: int
    ) -> ProducerState:
        """Load the state of a closed log as a broker does. Stray snapshots are removed."""
        end, bases = facts.log_end_offset, [segment.base_offset for segment in facts.segments]
        if not facts.snapshots:  # all batches are below the log start, so a broker writes snapshots without producers
            state = cls(fs, facts.path, like, end, 0)
            for offset in (*bases[-2:], end):
                state.end = offset
                state.take_snapshot()
            return state
        state = cls(fs, facts.path, like, end, end)
        strays = {s for s in facts.snapshots if s <= facts.log_start_offset or (s != end and s not in bases)}
        found = newest_snapshot(fs, facts.path, sorted(set(facts.snapshots) - strays), end)
        if found is not None:
            state._producers = LiveProducers.of(not_idle(found[1], expiration_ms=expiration_ms, now_ms=now_ms))
        for snapshot in sorted(strays):
            fs.unlink(state._path(snapshot))
        return state

    def check_set(self, table: np.ndarray, *, as_leader: bool) -> CheckedSet:
        """Return the changes that the batches of `table` (BATCH_TABLE rows) make. Raises Refused for batches that a
        broker refuses."""
        return self._producers.check_set(table, as_leader=as_leader)

    def take(self, checked_set: CheckedSet, end: int) -> None:
        """Apply the changes of batches that are now in the log, which ends at `end`."""
        self._producers.take(checked_set)
        self.end = end

    def take_snapshot(self) -> None:
        """Write a snapshot, durable except for its name, unless the last snapshot already has this offset."""
        if self.end <= self._last_snapshot:
            return
        path = self._path(self.end)
        if self._fs.exists(path):
            self._fs.unlink(path)
        self._fs.write_file(path, encode_snapshot(self._producers.entries()), self._like)
        self._last_snapshot = self.end

    def _path(self, offset: int) -> str:
        return os.path.join(self._directory, names.segment_file(offset, names.SNAPSHOT))
