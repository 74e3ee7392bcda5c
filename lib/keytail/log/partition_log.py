"""A partition directory that takes appends, as a leader's and as a follower's does: `PartitionLog`.

What is on disk after each append, roll and close is what a broker leaves for the same batches, settings and times,
byte for byte. What is written when, what is durable when, what a broker makes of a log that was not closed, and
what is not ours, stands in APPEND.md beside this file. Locks, the checkpoints of the log dir and
`partition.metadata` are the caller's.
"""

from __future__ import annotations

import os
import random
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np

from keytail.errors import KeytailError, Refused
from keytail.format import names
from keytail.format.producers import encode_snapshot
from keytail.log import incoming
from keytail.log.active_segment import ActiveSegment, IndexState, plan_entries, plan_until_full
from keytail.log.checkpoint import read_epochs, write_epochs
from keytail.log.closed_log import survey_closed
from keytail.log.fs import LOCAL, FileStat, FileSystem
from keytail.log.incoming import NOTHING_WRITTEN, Incoming
from keytail.log.index_files import OffsetEntry, OffsetIndex
from keytail.log.leader_epochs import assign, truncate_from_end, truncate_from_start
from keytail.log.live_producers import Judgement, LiveProducers, SentBatch
from keytail.log.partition import PartitionFacts
from keytail.log.producers import newest_snapshot
from keytail.log.rolling import (
    AppendConfig,
    Standing,
    batches_before_roll,
    draw_jitter_ms,
    is_flush_due,
    new_base,
)

DEFAULTS = AppendConfig()


@dataclass(frozen=True)
class Appended:
    """Offsets of what was appended; of no batch, `last_offset` is `first_offset` - 1.

    `duplicates`: batches that their producer had sent before. They are in the log already, where these say.
    """

    first_offset: int
    last_offset: int
    batches: int
    duplicates: tuple[SentBatch, ...] = ()


@dataclass(frozen=True)
class Closed:
    """What the checkpoints of the log dir must say of a partition that was closed.

    `recovery_point` goes into `recovery-point-offset-checkpoint`; `log_start_offset` into
    `log-start-offset-checkpoint` where it is not None: where it lies above the first segment's base.
    """

    log_end_offset: int
    recovery_point: int
    log_start_offset: int | None


class PartitionLog:
    """The log of one partition, open for appending. A context manager that closes it.

    Made by `open`. After an error of the file system it takes nothing more and cannot be closed, only abandoned: it
    is then what a broker finds after a crash.
    """

    def __init__(
        self, fs: FileSystem, path: str, config: AppendConfig, like: FileStat, rng: random.Random, now_ms: int
    ) -> None:
        self.path = path
        self.config = config
        self.log_start_offset = 0
        self.log_end_offset = 0
        self.recovery_point = 0
        self._fs = fs
        self._like = like
        self._rng = rng
        self._bases: list[int] = []
        self._epochs: list[tuple[int, int]] = []
        self._producers = LiveProducers()
        self._producers_end = 0  # the offset behind the last batch that the producers' state knows
        self._last_snapshot = -1
        self._last_flush_ms = now_ms
        self._names_durable = True
        self._broken = False
        self._active: ActiveSegment | None = None

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
        """The log in the directory `path`, or a new one if it holds no segment; producers that are idle go.

        Refused for a log that was not closed cleanly, and while the log dir claims a clean shutdown (APPEND.md,
        "Before it is opened"). A new log begins at `log_start_offset`, which of one that exists is that of the
        checkpoint.
        """
        facts = survey_closed(fs, path, log_start_offset)
        like = fs.stat(path)
        log = cls(fs, path, config, like, rng or random.Random(), now_ms)
        try:
            if facts.segments:
                log._load(facts, now_ms)
            else:
                log._begin(log_start_offset, now_ms)
        except BaseException:
            log.abandon()
            raise
        return log

    # Appending

    def append(self, batches: bytes | np.ndarray, *, leader_epoch: int, now_ms: int) -> Appended:
        """As a leader: bytes of whole batches, each a set of its own, get the next offsets and the leader epoch.

        What offsets they have does not matter. Markers count as their coordinator's. Refused or CorruptLog for what
        a leader refuses; then nothing of these batches is in the log, but those before a duplicate.
        """
        self._refuse_broken()
        if leader_epoch < 0:
            raise Refused(f"no leader has the epoch {leader_epoch}", path=self.path, remedy=NOTHING_WRITTEN)
        first, count, duplicates, rest = self.log_end_offset, 0, [], batches
        while True:
            taken = incoming.as_leader(rest, self.log_end_offset, leader_epoch, self.config, now_ms)
            self._ask_indexes()
            judgement = self._producers.judge(taken.table, as_leader=True)
            if judgement.rows:
                self._effects(lambda: self._append_each(taken, judgement, now_ms))  # noqa: B023
            count += judgement.rows
            if judgement.duplicate is None:
                break
            duplicates.append(judgement.duplicate)
            same = taken.rows(judgement.rows, judgement.rows + 1)
            self._effects(lambda: self._meet_duplicate(same, now_ms))  # noqa: B023
            rest = taken.rows(judgement.rows + 1, len(taken.table)).data
            if not len(rest):
                break
        self.flush_if_due(now_ms)
        return Appended(first, self.log_end_offset - 1, count, tuple(duplicates))

    def append_as_follower(
        self, batches: bytes | np.ndarray, *, now_ms: int, leader_epoch: int | None = None
    ) -> Appended:
        """As a follower: bytes of whole batches as the leader has them, one set that goes into one segment.

        They begin at the log end offset or behind it. From the first on whose epoch is above `leader_epoch` they are
        left out. Refused or CorruptLog for what a follower refuses; then nothing was written.
        """
        self._refuse_broken()
        taken = incoming.as_follower(batches, self.log_end_offset, leader_epoch, self.config)
        if taken is None:
            return Appended(self.log_end_offset, self.log_end_offset - 1, 0)
        self._ask_indexes()
        judgement = self._producers.judge(taken.table, as_leader=False)
        rolls = batches_before_roll(self._segment.standing, taken.as_one_row, self.config, now_ms) == 0
        self._refuse_too_many_entries(taken, rolls)
        first = int(taken.table["base_offset"][0])
        self._effects(lambda: self._append_set(taken, judgement, now_ms, rolls))
        self.flush_if_due(now_ms)
        return Appended(first, self.log_end_offset - 1, len(taken.table))

    def _append_each(self, taken: Incoming, judgement: Judgement, now_ms: int) -> None:
        """The first batches of `taken`, as far as they were judged: runs of them, as many as go into a segment."""
        table = taken.table[: judgement.rows]
        self._assign_epochs(table)
        done = 0
        while done < len(table):
            rest = taken.rows(done, len(table))
            fits = batches_before_roll(self._segment.standing, rest.table, self.config, now_ms)
            if not fits:
                self._roll(int(rest.table["base_offset"][0]), now_ms)
                fits = max(batches_before_roll(self._segment.standing, rest.table, self.config, now_ms), 1)
            run = rest.rows(0, fits)
            _place(run.table, self._segment.size_bytes)
            plan = plan_until_full(
                run.table, self._segment.base_offset, self._segment.index_state, self.config.index_interval_bytes
            )
            run = run.rows(0, plan.rows)
            done += plan.rows
            # A snapshot at the next roll holds the producers as they are there, so they go along with the runs.
            part = judgement if plan.rows == len(table) else self._producers.judge(run.table, as_leader=True)
            self._segment.append(run.data, run.table, plan)
            self._settle(run.table, part)

    def _append_set(self, taken: Incoming, judgement: Judgement, now_ms: int, rolls: bool) -> None:
        self._assign_epochs(taken.table)
        if rolls:
            self._roll(int(taken.table["base_offset"][0]), now_ms)
        segment = self._segment
        _place(taken.table, segment.size_bytes)
        plan = plan_entries(taken.table, segment.base_offset, segment.index_state, self.config.index_interval_bytes)
        segment.append(taken.data, taken.table, plan)
        self._settle(taken.table, judgement)

    def _ask_indexes(self) -> None:
        """Whether they are full: with that question, at the latest, a broker makes those of a new segment."""
        self._effects(lambda: self._segment.open_indexes())  # noqa: PLW0108

    def _meet_duplicate(self, same: Incoming, now_ms: int) -> None:
        """A broker finds out only when it has noted the epoch and ended the segment."""
        self._assign_epochs(same.table)
        if not batches_before_roll(self._segment.standing, same.table, self.config, now_ms):
            self._roll(int(same.table["base_offset"][0]), now_ms)

    def _settle(self, table: np.ndarray, judgement: Judgement) -> None:
        """What is known once a set is in the log."""
        self.log_end_offset = int(table["last_offset"][-1]) + 1
        self.recovery_point = min(self.recovery_point, self.log_end_offset)
        self._producers.take(judgement)
        self._segment.append_aborted(judgement.aborted)
        self._producers_end = self.log_end_offset

    def _assign_epochs(self, table: np.ndarray) -> None:
        after = assign(self._epochs, table)
        if after != self._epochs:
            self._epochs = after
            write_epochs(self._fs, os.path.join(self.path, names.LEADER_EPOCHS), after)

    def _refuse_too_many_entries(self, taken: Incoming, rolls: bool) -> None:
        """A broker appends the set, and then fails, where one set earns more entries than an index has room for."""
        segment, base = self._segment, self._segment.base_offset
        state, size_bytes = segment.index_state, segment.size_bytes
        if rolls:
            base = new_base(int(taken.table["base_offset"][0]), self.log_end_offset)
            state, size_bytes = IndexState.of_new_segment(base, self.config), 0
        _place(taken.table, size_bytes)
        plan = plan_entries(taken.table, base, state, self.config.index_interval_bytes)
        span = int(taken.table["last_offset"][-1]) - base
        if plan.rows < len(taken.table) or span >= 2**31:
            what = "more index entries than an index holds" if span < 2**31 else "more offsets than a segment holds"
            raise Refused(
                f"a set of {len(taken.table)} batches has {what}",
                path=self.path,
                offset=int(taken.table["base_offset"][0]),
                remedy=f"{NOTHING_WRITTEN}; append it in smaller sets",
            )

    # Segments

    @property
    def segments(self) -> tuple[int, ...]:
        """Base offsets, ascending; the last one is the active segment's."""
        return tuple(self._bases)

    @property
    def active(self) -> Standing:
        return self._segment.standing

    @property
    def leader_epochs(self) -> tuple[tuple[int, int], ...]:
        """Epochs and where they begin."""
        return tuple(self._epochs)

    def floor(self, offset: int) -> tuple[int, OffsetEntry]:
        """Base offset of the segment where a read of `offset` begins, and the entry of its index to begin at."""
        number = bisect_right(self._bases, offset) - 1
        if number < 0 or not self.log_start_offset <= offset <= self.log_end_offset:
            held = f"{self.log_start_offset} to {self.log_end_offset - 1}"
            raise Refused(f"the log holds offsets {held}", path=self.path, offset=offset)
        base = self._bases[number]
        path = self._path(base, names.INDEX)
        if not self._fs.exists(path):
            return base, OffsetEntry(-1, base, 0)
        with OffsetIndex.open(self._fs, path, base, active=number == len(self._bases) - 1) as index:
            return base, index.lookup(offset)

    def roll(self, *, now_ms: int) -> int:
        """End the active segment and begin one at the log end offset, which is its base."""
        self._refuse_broken()
        self._effects(lambda: self._roll(self.log_end_offset, now_ms))
        return self._bases[-1]

    def _roll(self, first_offset: int, now_ms: int) -> None:
        base = new_base(first_offset, self.log_end_offset)
        jitter_ms = draw_jitter_ms(self._rng, self.config)
        if base == self._segment.base_offset and not self._segment.size_bytes:
            self._segment.renew(now_ms, jitter_ms)
            return
        for suffix in names.SEGMENT_SUFFIXES:
            if self._fs.exists(self._path(base, suffix)):
                self._fs.unlink(self._path(base, suffix))
        # Durable before there is a next one: a broker that recovers this segment and finds it torn drops what follows.
        self._segment.close()
        self._fs.fsync_dir(self.path)
        self._create(base, now_ms, jitter_ms)
        self._producers_end = base
        self._take_snapshot()
        self._fs.fsync_dir(self.path)
        self._flushed(base, now_ms)

    def _create(self, base: int, now_ms: int, jitter_ms: int) -> None:
        self._active = ActiveSegment.create(
            self._fs, self.path, base, self.config, self._like, now_ms=now_ms, jitter_ms=jitter_ms
        )
        self._bases.append(base)
        self._names_durable = False  # its indexes come later

    def _take_snapshot(self) -> None:
        if self._producers_end <= self._last_snapshot:
            return
        path = self._path(self._producers_end, names.SNAPSHOT)
        if self._fs.exists(path):
            self._fs.unlink(path)
        self._fs.write_file(path, encode_snapshot(self._producers.entries()), self._like)
        self._last_snapshot = self._producers_end

    # Durability

    def flush_if_due(self, now_ms: int) -> bool:
        """Flush where `flush.messages` or `flush.ms` ask for it; whether they did. Every append asks."""
        self._refuse_broken()
        due = is_flush_due(self.log_end_offset, self.recovery_point, self._last_flush_ms, now_ms, self.config)
        if due:
            self.flush(now_ms=now_ms)
        return due

    def flush(self, *, now_ms: int) -> None:
        """Make everything up to the log end offset durable; the recovery point then stands there."""
        self._refuse_broken()
        self._effects(lambda: self._flush(now_ms))

    def _flush(self, now_ms: int) -> None:
        if self._segment.is_dirty:
            self._segment.flush()
            if not self._names_durable:
                self._fs.fsync_dir(self.path)
                self._names_durable = True
        self._flushed(self.log_end_offset, now_ms)

    def _flushed(self, offset: int, now_ms: int) -> None:
        if offset > self.recovery_point:
            self.recovery_point, self._last_flush_ms = offset, now_ms

    # Beginning and end

    def close(self) -> Closed:
        """Leave what a broker's clean shutdown leaves, durable; what the log dir's checkpoints must then say."""
        self._refuse_broken()
        self._effects(self._close)
        starts_late = self.log_start_offset > self._bases[0]
        return Closed(
            self.log_end_offset,
            max(self.recovery_point, self.log_end_offset),
            self.log_start_offset if starts_late else None,
        )

    def _close(self) -> None:
        self._segment.close()
        self._active = None
        self._take_snapshot()
        self._fs.fsync_dir(self.path)

    def abandon(self) -> None:
        """Let go of the files as they are: what a broker finds after a crash."""
        active, self._active = self._active, None
        if active is not None:
            active.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._broken:
            self.abandon()
        elif self._active is not None:
            self.close()

    def _begin(self, log_start_offset: int, now_ms: int) -> None:
        self.log_start_offset = self.log_end_offset = self.recovery_point = log_start_offset
        self._producers_end, self._last_snapshot = log_start_offset, 0
        path = os.path.join(self.path, names.LEADER_EPOCHS)
        if not self._fs.exists(path):
            self._fs.write_file(path, b"", self._like)
        self._load_epochs()
        self._create(log_start_offset, now_ms, draw_jitter_ms(self._rng, self.config))
        self._segment.open_indexes()  # of the segment that a log is loaded with a broker makes them at once
        self._take_snapshot()
        self._fs.fsync_dir(self.path)

    def _load(self, facts: PartitionFacts, now_ms: int) -> None:
        """As a broker loads a log after a clean shutdown, with what it removes then."""
        end = facts.log_end_offset
        self._bases = [segment.base_offset for segment in facts.segments]
        self.log_start_offset, self.log_end_offset, self.recovery_point = facts.log_start_offset, end, end
        last = facts.segments[-1]
        opened = Standing(
            last.base_offset, last.log_bytes, last.first_batch_timestamp_ms, now_ms,
            draw_jitter_ms(self._rng, self.config),
        )  # fmt: skip
        self._like = self._fs.stat(self._path(last.base_offset, names.LOG))
        self._active = ActiveSegment.reopen(self._fs, self.path, opened, self.config, self._like)
        self._load_producers(facts, now_ms)
        self._load_epochs()

    def _load_producers(self, facts: PartitionFacts, now_ms: int) -> None:
        end = facts.log_end_offset
        if not facts.snapshots:  # all batches lie below the log start: a broker notes that there are no producers
            self._last_snapshot = 0
            for offset in (*self._bases[-2:], end):
                self._producers_end = offset
                self._take_snapshot()
            return
        strays = {s for s in facts.snapshots if s <= self.log_start_offset or (s != end and s not in self._bases)}
        found = newest_snapshot(self._fs, self.path, sorted(set(facts.snapshots) - strays), end)
        kept_ms = self.config.producer_id_expiration_ms
        self._producers = LiveProducers.of(
            e
            for e in (found[1] if found is not None else ())
            if e.current_txn_first_offset >= 0 or now_ms - e.timestamp_ms < kept_ms
        )
        self._producers_end = self._last_snapshot = end
        for snapshot in sorted(strays):
            self._fs.unlink(self._path(snapshot, names.SNAPSHOT))

    def _load_epochs(self) -> None:
        path = os.path.join(self.path, names.LEADER_EPOCHS)
        epochs = read_epochs(self._fs, path)
        self._epochs = truncate_from_start(truncate_from_end(epochs, self.log_end_offset), self.log_start_offset)
        if self._epochs != epochs:
            write_epochs(self._fs, path, self._epochs)

    def check(self) -> None:
        """Assert what holds at any time."""
        assert self._bases == sorted(set(self._bases))
        assert self._bases[-1] == self._segment.base_offset
        assert self.log_start_offset <= self.log_end_offset
        assert self._epochs == sorted(self._epochs)
        assert self._epochs == read_epochs(self._fs, os.path.join(self.path, names.LEADER_EPOCHS))
        assert all(start <= self.log_end_offset for _, start in self._epochs)
        self._producers.check()
        self._segment.check()

    @property
    def _segment(self) -> ActiveSegment:
        if self._active is None:
            raise KeytailError("this log is closed", path=self.path, remedy="Open it again")
        return self._active

    def _path(self, offset: int, suffix: str) -> str:
        return os.path.join(self.path, names.segment_file(offset, suffix))

    def _effects(self, action: Callable[[], object]) -> None:
        """Whatever goes wrong from here on leaves files of which we do not know what they hold."""
        self._broken = True
        action()
        self._broken = False

    def _refuse_broken(self) -> None:
        if self._broken:
            raise KeytailError(
                "an operation on this log failed half-way, and it takes nothing more",
                path=self.path,
                remedy="Let a broker recover it, or `keytail rebuild-index --truncate`, and open it again",
            )
        _ = self._segment


def _place(table: np.ndarray, size_bytes: int) -> None:
    """Positions of batches that go to the end of a segment of `size_bytes`."""
    sizes = table["size_bytes"].astype(np.int64)
    table["position"] = size_bytes + np.cumsum(sizes) - sizes
