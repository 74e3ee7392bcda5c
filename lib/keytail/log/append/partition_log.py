"""Appends to a partition directory, as a leader or a follower does: `PartitionLog`.

After each append, roll and close, the files equal those of a broker for the same batches, settings and times, byte
for byte. APPEND.md beside this file specifies what is written when, what is durable when, how a broker treats a log
that was not closed, and what is not done here. The caller is responsible for the lock and the checkpoints of the log
dir, and for `partition.metadata`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np

from keytail.errors import KeytailError, Refused
from keytail.format.index import MAX_RELATIVE_OFFSET
from keytail.log.append import incoming
from keytail.log.append.closed_log import survey_closed
from keytail.log.append.incoming import NOTHING_WRITTEN, Incoming
from keytail.log.append.index_plan import IndexState, plan_entries, set_positions
from keytail.log.append.open_log import OpenLog
from keytail.log.append.rolling import AppendConfig, RollState, is_flush_due
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.index.files import OffsetEntry
from keytail.log.producer import SentBatch

DEFAULTS = AppendConfig()


@dataclass(frozen=True)
class Appended:
    """The offsets and number of the appended batches; if there are none, `last_offset` is `first_offset` - 1.

    `duplicates` describes the batches that their producer had sent before, with the offsets that they have in the log.
    """

    first_offset: int
    last_offset: int
    batches: int
    duplicates: tuple[SentBatch, ...] = ()


@dataclass(frozen=True)
class Closed:
    """The entries that the log dir's checkpoints need for a closed partition.

    `recovery_point` goes into `recovery-point-offset-checkpoint`; `log_start_offset` into
    `log-start-offset-checkpoint` unless it is None: it is set only if it is above the base offset of the first segment.
    """

    log_end_offset: int
    recovery_point: int
    log_start_offset: int | None


class PartitionLog:
    """The log of one partition, open for appending; a context manager that closes the log.

    Created by `open`. After an error while files are changed, the object refuses all changes and can only be
    abandoned; the files are then as after a broker's crash.
    """

    def __init__(self, log: OpenLog) -> None:
        self.path = log.path
        self.config = log.config
        self._log = log
        self._broken = False

    @classmethod
    def open(
        cls,
        path: str,
        config: AppendConfig = DEFAULTS,
        *,
        now_ms: int,
        log_start_offset: int = 0,
        rng: random.Random | None = None,
        fs: FileSystem = LOCAL,
    ) -> Self:
        """Open the log in the directory `path`, or create a log if there is no segment; forget expired producers.

        Raises Refused if the log was not closed cleanly, or if the log dir still has `.kafka_cleanshutdown` (APPEND.md,
        "Before a log is opened"). A new log begins at `log_start_offset`; for an existing log, give the offset in the
        checkpoint.
        """
        facts = survey_closed(fs, path, log_start_offset)
        log = OpenLog(fs, facts, config, rng or random.Random(), now_ms)
        try:
            if facts.segments:
                log.load(facts, now_ms)
            else:
                log.begin(now_ms)
        except BaseException:
            log.segments.abandon()
            raise
        return cls(log)

    # Appending

    def append(self, batches: bytes | np.ndarray, *, leader_epoch: int, now_ms: int) -> Appended:
        """Append whole batches as a leader: each batch is a separate set, and gets the next offsets and the leader
        epoch.

        The batches' own offsets are ignored. Markers are treated as sent by a transaction coordinator. Raises Refused
        or CorruptLog if a leader would refuse a batch; in this case no batch was appended, except for batches before a
        duplicate.
        """
        self._refuse_if_broken()
        if leader_epoch < 0:
            what = f"invalid leader epoch {leader_epoch}: it must not be negative"
            raise Refused(what, path=self.path, remedy=NOTHING_WRITTEN, slug="invalid-leader-epoch")
        first, count, duplicates, rest = self.log_end_offset, 0, [], batches
        while True:
            taken = incoming.as_leader(rest, self.log_end_offset, leader_epoch, self.config, now_ms)
            self._ensure_indexes()
            checked_set = self._log.producers.check_set(taken.table, as_leader=True)
            if checked_set.rows:
                self._change(lambda: self._log.append_each(taken, checked_set, now_ms))  # noqa: B023 (called at once)
            count += checked_set.rows
            if checked_set.duplicate is None:
                break
            duplicates.append(checked_set.duplicate)
            same = taken.rows(checked_set.rows, checked_set.rows + 1)
            self._change(lambda: self._log.handle_duplicate(same, now_ms))  # noqa: B023 (called at once)
            rest = taken.rows(checked_set.rows + 1, len(taken.table)).data
            if not len(rest):
                break
        self.flush_if_due(now_ms)
        return Appended(first, self.log_end_offset - 1, count, tuple(duplicates))

    def append_as_follower(
        self, batches: bytes | np.ndarray, *, now_ms: int, leader_epoch: int | None = None
    ) -> Appended:
        """Append whole batches as a follower: as one set, with the leader's offsets, to one segment.

        The batches must begin at or above the log end offset. The first batch with an epoch above `leader_epoch`, and
        all later batches, are omitted. Raises Refused or CorruptLog if a follower would refuse a batch; in this case
        no batch was written.
        """
        self._refuse_if_broken()
        taken = incoming.as_follower(batches, self.log_end_offset, leader_epoch, self.config)
        if taken is None:
            return Appended(self.log_end_offset, self.log_end_offset - 1, 0)
        self._ensure_indexes()
        checked_set = self._log.producers.check_set(taken.table, as_leader=False)
        self._refuse_too_many_entries(taken, now_ms)
        first = int(taken.table["base_offset"][0])
        self._change(lambda: self._log.append_set(taken, checked_set, now_ms))
        self.flush_if_due(now_ms)
        return Appended(first, self.log_end_offset - 1, len(taken.table))

    def _ensure_indexes(self) -> None:
        """Create the indexes of a new segment. A broker creates them, at the latest, when it checks whether they are
        full."""
        self._change(self._log.active.open_indexes)

    def _refuse_too_many_entries(self, taken: Incoming, now_ms: int) -> None:
        """Refuse a set with more index entries or offsets than fit into a segment: a broker fails, in the case of index
        entries after it has written the set."""
        segment, first = self._log.active, int(taken.table["base_offset"][0])
        base, state, size_bytes = segment.base_offset, segment.index_state, segment.size_bytes
        if self._log.rolls_before(taken.as_one_row, now_ms):
            base, state, size_bytes = first, IndexState.of_new_segment(first, self.config), 0
        set_positions(taken.table, size_bytes)
        plan = plan_entries(taken.table, base, state, self.config.index_interval_bytes)
        span = int(taken.table["last_offset"][-1]) - base
        if plan.rows < len(taken.table) or span > MAX_RELATIVE_OFFSET:
            entries, offsets = "more index entries than an index can hold", "more offsets than a segment can hold"
            raise Refused(
                f"a set of {len(taken.table)} batches has {offsets if span > MAX_RELATIVE_OFFSET else entries}",
                path=self.path,
                offset=first,
                remedy=f"{NOTHING_WRITTEN}; append it in smaller sets",
                slug="set-exceeds-segment",
            )

    # Contents

    @property
    def log_start_offset(self) -> int:
        return self._log.log_start_offset

    @property
    def log_end_offset(self) -> int:
        return self._log.log_end_offset

    @property
    def recovery_point(self) -> int:
        """The recovery point: all batches below this offset are durable."""
        return self._log.recovery_point

    @property
    def segments(self) -> tuple[int, ...]:
        """The base offsets of the segments, ascending; the last segment is the active one."""
        return tuple(self._log.segments.bases)

    @property
    def active(self) -> RollState:
        return self._log.active.roll_state

    @property
    def leader_epochs(self) -> tuple[tuple[int, int], ...]:
        """The leader epochs and their start offsets."""
        return tuple(self._log.epochs.entries)

    def floor(self, offset: int) -> tuple[int, OffsetEntry]:
        """Return the base offset of the segment in which a read of `offset` begins, and the index entry at which the
        read begins. Raises Refused for an offset that is neither in the log nor its end."""
        if not self.log_start_offset <= offset <= self.log_end_offset:
            held = f"{self.log_start_offset} to {self.log_end_offset - 1}"
            what = f"offset out of range: the log contains offsets {held}"
            raise Refused(
                what, path=self.path, offset=offset, remedy="Read at an offset of the log", slug="offset-out-of-range"
            )
        return self._log.segments.floor(offset)

    def roll(self, *, now_ms: int) -> int:
        """Close the active segment and create a segment at the log end offset, or reset an active segment that begins
        there; return that segment's base offset."""
        self._refuse_if_broken()
        self._change(lambda: self._log.roll(self.log_end_offset, now_ms))
        return self._log.segments.bases[-1]

    # Durability

    def flush_if_due(self, now_ms: int) -> bool:
        """Flush if `flush.messages` or `flush.ms` require a flush, and return whether they do. Appends call this
        method."""
        self._refuse_if_broken()
        due = is_flush_due(self.log_end_offset, self.recovery_point, self._log.last_flush_ms, now_ms, self.config)
        if due:
            self.flush(now_ms=now_ms)
        return due

    def flush(self, *, now_ms: int) -> None:
        """Make all batches durable; the log end offset becomes the recovery point."""
        self._refuse_if_broken()
        self._change(lambda: self._log.flush(now_ms))

    # The end

    def close(self) -> Closed:
        """Close the log as a broker's clean shutdown does, durably; return the entries for the log dir's
        checkpoints."""
        self._refuse_if_broken()
        self._change(self._log.close)
        starts_late = self.log_start_offset > self._log.segments.bases[0]
        return Closed(self.log_end_offset, self.log_end_offset, self.log_start_offset if starts_late else None)

    def abandon(self) -> None:
        """Close the files and leave them as they are, as after a broker's crash."""
        self._log.segments.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._broken:
            self.abandon()
        elif self._log.segments.is_open:
            self.close()

    def _change(self, action: Callable[[], object]) -> None:
        """Run `action`. An error leaves files with unknown contents, so the log then refuses all changes."""
        self._broken = True
        action()
        self._broken = False

    def _refuse_if_broken(self) -> None:
        if self._broken:
            raise KeytailError(
                "an operation on this log failed before it was complete; the log accepts no more batches",
                path=self.path,
                remedy="Recover the log with a broker or with `keytail rebuild-index --truncate`, then open it again",
                slug="log-operation-failed",
            )
        _ = self._log.active

