"""Changes the files of an open log by an append, a roll, a flush and a close: `OpenLog`.

Nothing is refused here: callers check operations first. APPEND.md beside this file specifies the order of operations,
and what is durable when.
"""

from __future__ import annotations

import os
import random

import numpy as np

from keytail.format import names
from keytail.log.append.active_segment import ActiveSegment
from keytail.log.append.incoming import Incoming
from keytail.log.append.index_plan import plan_entries, plan_until_full, set_positions
from keytail.log.append.leader_epochs import LeaderEpochs
from keytail.log.append.live_producers import CheckedSet
from keytail.log.append.open_segments import OpenSegments
from keytail.log.append.producer_state import ProducerState
from keytail.log.append.rolling import AppendConfig, batches_before_roll
from keytail.log.fs import FileSystem
from keytail.log.partition import PartitionFacts


class OpenLog:
    """An open log: its segments, leader epochs, producers and log end offset. Call `begin` or `load` before other
    methods."""

    def __init__(
        self, fs: FileSystem, facts: PartitionFacts, config: AppendConfig, rng: random.Random, now_ms: int
    ) -> None:
        self.path = facts.path
        self.config = config
        self.log_start_offset = facts.log_start_offset
        self.log_end_offset = self.recovery_point = max(facts.log_end_offset, facts.log_start_offset)
        self.last_flush_ms = now_ms
        last = facts.segments[-1:]
        self._fs = fs
        self._like = fs.stat(self._path(last[0].base_offset, names.LOG) if last else self.path)
        self.segments = OpenSegments(fs, self.path, config, self._like, rng)
        self.epochs = LeaderEpochs(fs, self.path)

    def begin(self, now_ms: int) -> None:
        """Create a new log in an empty directory, beginning at its log start offset."""
        start = self.log_start_offset
        self.epochs.create(self._like)
        self.epochs.load(start, start)
        self.segments.create(start, now_ms)
        self.active.open_indexes()  # a broker creates the indexes of a log's initial segment at once
        self.producers = ProducerState.new(self._fs, self.path, self._like, start)
        self._fs.fsync_dir(self.path)  # after a crash, a broker that finds no segment would begin the log at 0

    def load(self, facts: PartitionFacts, now_ms: int) -> None:
        """Load the log as a broker does after a clean shutdown, and remove the files that a broker removes."""
        self.segments.reopen(facts.segments, now_ms)
        expiration_ms = self.config.producer_id_expiration_ms
        self.producers = ProducerState.loaded(
            self._fs, self._like, facts, expiration_ms=expiration_ms, now_ms=now_ms
        )
        self.epochs.load(self.log_start_offset, self.log_end_offset)

    @property
    def active(self) -> ActiveSegment:
        return self.segments.active

    def rolls_before(self, table: np.ndarray, now_ms: int) -> bool:
        """Return whether the active segment must end before the first batch of `table` (BATCH_TABLE rows) is
        appended."""
        return batches_before_roll(self.active.roll_state, table, self.config, now_ms) == 0

    def append_each(self, taken: Incoming, checked_set: CheckedSet, now_ms: int) -> None:
        """Append the batches of `taken` that `checked_set` includes, in runs that each fit into a segment."""
        table = taken.table[: checked_set.rows]
        self.epochs.add(table)
        done = 0
        while done < len(table):
            rest = taken.rows(done, len(table))
            fits = batches_before_roll(self.active.roll_state, rest.table, self.config, now_ms)
            if not fits:
                self.roll(int(rest.table["base_offset"][0]), now_ms)
                fits = max(batches_before_roll(self.active.roll_state, rest.table, self.config, now_ms), 1)
            run = rest.rows(0, fits)
            segment = self.active
            set_positions(run.table, segment.size_bytes)
            plan = plan_until_full(
                run.table, segment.base_offset, segment.index_state, self.config.index_interval_bytes
            )
            run = run.rows(0, plan.rows)
            done += plan.rows
            # A snapshot at the next roll contains the producers as of that roll, so the producers are updated with each
            # run.
            part = checked_set if plan.rows == len(table) else self.producers.check_set(run.table, as_leader=True)
            segment.append(run.data, run.table, plan)
            self._settle(run.table, part)

    def append_set(self, taken: Incoming, checked_set: CheckedSet, now_ms: int) -> None:
        """Append all of `taken` to one segment; roll first if a roll is due."""
        self.epochs.add(taken.table)
        if self.rolls_before(taken.as_one_row, now_ms):
            self.roll(int(taken.table["base_offset"][0]), now_ms)
        segment = self.active
        set_positions(taken.table, segment.size_bytes)
        plan = plan_entries(taken.table, segment.base_offset, segment.index_state, self.config.index_interval_bytes)
        segment.append(taken.data, taken.table, plan)
        self._settle(taken.table, checked_set)

    def handle_duplicate(self, same: Incoming, now_ms: int) -> None:
        """Record the leader epoch, and roll if due: a broker detects a duplicate only after these two steps."""
        self.epochs.add(same.table)
        if self.rolls_before(same.table, now_ms):
            self.roll(int(same.table["base_offset"][0]), now_ms)

    def _settle(self, table: np.ndarray, checked_set: CheckedSet) -> None:
        """Update the log end offset, the producers and the transaction index after a set was appended."""
        self.log_end_offset = int(table["last_offset"][-1]) + 1
        self.producers.take(checked_set, self.log_end_offset)
        self.active.append_aborted(checked_set.aborted)

    def roll(self, base_offset: int, now_ms: int) -> None:
        """Close the active segment and create a segment at `base_offset`, which is not below the log end offset."""
        if self.segments.roll(base_offset, now_ms):
            self.producers.end = base_offset
            self.producers.take_snapshot()
            self._fs.fsync_dir(self.path)
            self._flushed(base_offset, now_ms)

    def flush(self, now_ms: int) -> None:
        """Make everything up to the log end offset durable."""
        self.segments.flush()
        self._flushed(self.log_end_offset, now_ms)

    def _flushed(self, offset: int, now_ms: int) -> None:
        if offset > self.recovery_point:
            self.recovery_point, self.last_flush_ms = offset, now_ms

    def close(self) -> None:
        """Close the log as a broker's clean shutdown does, durably."""
        self.segments.close()
        self.producers.take_snapshot()
        self._fs.fsync_dir(self.path)

    def _path(self, offset: int, suffix: str) -> str:
        return os.path.join(self.path, names.segment_file(offset, suffix))
