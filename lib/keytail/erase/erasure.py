"""Carries out an erasure in many partitions: finds the records, rewrites and replaces segments in passes, and checks
the disk."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from keytail.compact.running.replacing import Replacing, planned_row, remove_unneeded, value_of, written
from keytail.compact.task import CleaningResult, CleaningTask
from keytail.erase.command import EraseRow
from keytail.erase.examining import Examined, is_in_active, refuse_linked, refuse_roll
from keytail.erase.finding import FoundInPartition, FoundInSegment, find_in_partition, longest_without_records
from keytail.erase.keys import ErasedKeys
from keytail.erase.rewriting import RewriteTask, refuse_remaining, rewrite
from keytail.errors import EXPLAINED, ErrorText, Explained, KeytailError, in_words
from keytail.log.append.roll_closed import roll
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.replacement.recover import remove_lost_scratch
from keytail.run.batching import in_bundles
from keytail.run.ended import sweep
from keytail.run.engine import Engine, end_tasks
from keytail.run.hosts import refuse_network_here, refuse_unseen
from keytail.run.rows import status_of
from keytail.run.tasks import Outcome, as_problem
from keytail.run.watching import sending_progress
from keytail.threads import Threads

# Maximum total size of the segments, and maximum number of partitions, that one job rewrites before it replaces any.
BUNDLE_BYTES = 16 << 30
BUNDLE_PARTITIONS = 256
# Maximum number of adjacent segments without a record before a row has a warning. A fetch ends at the end of a segment,
# and librdkafka doubles its fetch size, 1 MiB at first, after each fetch without a record; above 1 GiB it reports an
# error.
MAX_EMPTIED_SEGMENTS = 8


@dataclass
class _State:
    """The state of one partition: its row, the records found in it, and the segments still to be rewritten, by pass."""

    item: Examined
    row: EraseRow
    found: FoundInPartition | None = None
    passes: deque[list[FoundInSegment]] = field(default_factory=deque)
    ended: bool = False

    @property
    def pass_bytes(self) -> int:
        """Total size of the segments of the next pass."""
        bases = {segment.base_offset for segment in self.passes[0]}
        return sum(segment.log_bytes for segment in self.item.facts.segments if segment.base_offset in bases)


@dataclass
class Erasure:
    """One run over many partitions. `on_row` is called with the row of each partition that has ended, `on_trace` with
    the Python traceback of a failed task, `on_note` with other messages. The caller holds the locks.
    """

    engine: Engine
    items: Sequence[Examined]
    keys: ErasedKeys
    run_id: str
    now_ms: int
    execute: bool
    on_row: Callable[[EraseRow], None] = lambda row: None
    on_trace: Callable[[str], None] = lambda text: None
    on_note: Callable[[str], None] = lambda text: None
    fs: FileSystem = LOCAL
    shared_storage: bool = False
    made: dict[str, list[int]] = field(default_factory=dict)  # base offsets of new segments, by partition
    done: list[EraseRow] = field(default_factory=list)  # rows of the partitions that have ended
    _stopped: bool = field(default=False, init=False)

    def run(self) -> list[EraseRow]:
        """Run the erasure, and return a row for each partition, in the order of `items`."""
        states = [_State(item, item.row()) for item in self.items]
        with Threads(1, "erase") as pool:
            work = pool.submit(self._run, states)
            try:
                work.result()
            except BaseException:  # after a signal, an installation in progress is completed, and nothing else starts
                self._stopped = True
                pool.shutdown(wait=False, cancel_futures=True)
                end_tasks(self.engine, work.running)
                sweep(lambda: sum(remove_lost_scratch(self.fs, item.facts.path, self.run_id) for item in self.items))
                raise
        return [state.row for state in states]

    def _run(self, states: Sequence[_State]) -> None:
        for state in states:
            if state.item.config is None:
                self._end(state, state.row)
        open_states = [state for state in states if not state.ended]
        self._find(open_states)
        if not self.execute:
            return
        waiting = [state for state in open_states if not state.ended and state.passes]
        while waiting and not self._stopped:
            most_bytes = self._most_bytes(waiting)
            self._rewrite(next(in_bundles(waiting, lambda state: state.pass_bytes, most_bytes, BUNDLE_PARTITIONS)))
            waiting = [state for state in waiting if not state.ended and state.passes]
        self._check([state for state in open_states if not state.ended])

    def _most_bytes(self, states: Sequence[_State]) -> int:
        """Return the maximum bytes of segments to rewrite before any is replaced: BUNDLE_BYTES, but at most half of the
        free space in the log dir that has least."""
        free = min(self.fs.free_bytes(log_dir) for log_dir in {state.item.facts.log_dir for state in states})
        return min(BUNDLE_BYTES, free // 2)

    def _tasks(self, payloads: Sequence[Any], function: Callable[..., Any], name: str) -> list[Outcome[Any]]:
        """Run a task for each payload, in workers if the engine has them, and return the outcomes in this order."""
        if not payloads:
            return []
        fs = None if self.engine.has_workers else self.fs
        outcomes = self.engine.run_bundle(
            payloads, partial(function, fs=fs, shared_storage=self.shared_storage or not self.execute), name=name,
            stopped=lambda: self._stopped, before_again=self._remove_scratch,
        )  # fmt: skip
        for outcome in outcomes:
            if outcome.trace:
                self.on_trace(outcome.trace)
        return outcomes

    def _remove_scratch(self, payload: Any) -> None:
        if isinstance(payload, RewriteTask):
            remove_unneeded(self.fs, payload.cleaning)

    def _cleaning(self, item: Examined) -> CleaningTask:
        """Return a cleaning task of the whole log, as an argument for functions that erase shares with compaction."""
        facts = item.facts
        assert item.config is not None
        return CleaningTask.of(
            facts, first_dirty_offset=facts.segments[0].base_offset, first_uncleanable_offset=facts.log_end_offset,
            now_ms=self.now_ms, config=item.config, run_id=self.run_id, grouping="kafka", message_format="keep",
        )  # fmt: skip

    def _find(self, states: Sequence[_State]) -> None:
        """Find the records to be erased; without `execute`, end each partition with the found numbers in its row."""
        payloads = [(self._cleaning(state.item), self.keys) for state in states]
        for state, outcome in zip(states, self._tasks(payloads, find_task, "erase: find keys"), strict=True):
            state.row = replace(state.row, start_ms=outcome.start_ms or None)
            try:
                state.found = found = value_of(outcome)
                self._note_found(state, found)
                bases = [segment.base_offset for segment in found.segments]
                if is_in_active(state.item.facts, bases) and state.item.facts.clean_shutdown:
                    refuse_roll(self.fs, state.item.facts)
                refuse_linked(self.fs, state.item.facts, bases)
            except EXPLAINED as problem:
                self._fail(state, problem)
                continue
            if not self.execute:
                self._end(state, replace(state.row, end_ms=outcome.end_ms or None))

    def _note_found(self, state: _State, found: FoundInPartition) -> None:
        bases = [segment.base_offset for segment in found.segments]
        in_active = is_in_active(state.item.facts, bases)
        state.row = replace(
            state.row, status="would-erase" if bases else "absent", keys_found=found.keys_found,
            records_erased=found.erased, records_before=found.records, segments_rewritten=len(bases),
            records_after=found.records - found.erased, active_segment="would-roll" if in_active else "",
            found_keys=found.keys.tobytes(),
        )  # fmt: skip
        if not self.execute and bases:
            state.row = replace(state.row, segments_after=None, bytes_after=None)
        sizes = {segment.base_offset: segment.log_bytes for segment in state.item.facts.segments}
        if (adjacent := longest_without_records(list(sizes), found.segments)) > MAX_EMPTIED_SEGMENTS:
            note = f"{adjacent} adjacent segments have no records after the erasure: there, a consumer that uses "
            note += "librdkafka may report MSG_SIZE_TOO_LARGE (a message is too large) and then continue"
            state.row = replace(state.row, notes=(*state.row.notes, note))
        limit = self._most_bytes([state]) if bases and self.execute else BUNDLE_BYTES
        state.passes.extend(in_bundles(found.segments, lambda segment: sizes[segment.base_offset], limit))

    def _rewrite(self, states: Sequence[_State]) -> None:
        """Rewrite and replace the segments of the next pass of each partition."""
        ready: list[tuple[_State, RewriteTask]] = []
        for state in states:
            try:
                self._refuse_stopped()
                ready.append((state, self._prepared(state)))
            except EXPLAINED as problem:
                self._fail(state, problem)
        outcomes = self._tasks([task for _, task in ready], rewrite_task, "erase: rewrite segments")
        for (state, task), outcome in zip(ready, outcomes, strict=True):
            self._install(state, task.cleaning, outcome)

    def _prepared(self, state: _State) -> RewriteTask:
        """Return the task of the next pass, after rolling the active segment if this pass rewrites that segment."""
        found, segments = state.found, state.passes.popleft()
        assert found is not None
        bases = tuple(segment.base_offset for segment in segments)
        if is_in_active(state.item.facts, bases):
            facts = state.item.facts
            refuse_roll(self.fs, facts)
            roll(self.fs, facts.path, facts.segments[-1], facts.log_end_offset)
            state.row = replace(state.row, active_segment="rolled")
            state.item = state.item.again(self.fs)
        erased = sum(segment.erased for segment in segments)
        return RewriteTask(self._cleaning(state.item), self.keys, bases, found.transactions, erased)

    def _install(self, state: _State, cleaning: CleaningTask, outcome: Outcome[CleaningResult]) -> None:
        part = Replacing(self.fs, None, cleaning, planned_row(cleaning))
        try:
            self._refuse_stopped()
            result = value_of(outcome)
            refuse_unseen(self.fs, cleaning.scratch_path, sorted(written(result)), outcome.host)
            remove_unneeded(self.fs, cleaning, result)
            part.install(result, lambda: self._stopped)
            part.remove_unneeded()
            for warning in part.warnings():
                self.on_note(warning)
            state.item = state.item.again(self.fs)
        except EXPLAINED as problem:
            part.fail(as_problem(problem))
            status = "failed" if part.row.status == "skipped" else part.row.status  # "skipped": a signal stopped it
            state.row = replace(state.row, status=status, error=part.row.error)
        self.made.setdefault(state.row.name, []).extend(part.made)
        if part.problem is not None:
            self._end(state, self._measured(state))

    def _check(self, states: Sequence[_State]) -> None:
        """Read all segments from the disk again, with the reader and the hash of the proof, and end each partition."""
        ready = []
        for state in states:
            try:
                self._refuse_stopped()
                if state.item.facts.leftovers:
                    raise KeytailError(
                        f"leftover files may have records to be erased: {', '.join(state.item.facts.leftovers)}",
                        path=state.item.facts.path, remedy="Run the same command again, which removes these files",
                        slug="leftover-files",
                    )  # fmt: skip
                ready.append(state)
            except EXPLAINED as problem:
                self._fail(state, problem)
        payloads = [(self._cleaning(state.item), self.keys) for state in ready]
        for state, outcome in zip(ready, self._tasks(payloads, check_task, "erase: check the disk"), strict=True):
            try:
                value_of(outcome)
            except EXPLAINED as problem:
                self._fail(state, problem)
                continue
            if state.row.status == "would-erase":
                state.row = replace(state.row, status="erased")
            self._end(state, self._measured(state))

    def _measured(self, state: _State) -> EraseRow:
        """Return the row with the number and the size of the segments that exist now."""
        try:
            item = state.item.again(self.fs)
        except EXPLAINED:
            return replace(state.row, segments_after=None, bytes_after=None)
        return replace(state.row, segments_after=len(item.facts.segments), bytes_after=item.facts.log_bytes)

    def _refuse_stopped(self) -> None:
        if self._stopped:
            raise KeytailError("interrupted", slug="run-interrupted")

    def _fail(self, state: _State, problem: Explained) -> None:
        error = as_problem(problem)
        text: ErrorText = in_words(error)
        if state.row.active_segment == "rolled":
            text = text + ". The active segment was rolled before the error; a broker accepts the rolled log"
        status = status_of(error)
        if self.made.get(state.row.name):
            status, text = "failed", text + ". Some segments were rewritten; run again for the others"
        self._end(state, replace(self._measured(state), status=status, error=text))

    def _end(self, state: _State, row: EraseRow) -> None:
        if row.status not in ("erased", "absent", "would-erase"):
            rolled = "rolled" if row.active_segment == "rolled" else ""
            row = replace(row, records_erased=None, records_after=None, segments_rewritten=None, active_segment=rolled)
        end_ms = row.end_ms or (time.time_ns() // 1_000_000 if row.start_ms else None)
        state.row, state.ended = replace(row, end_ms=end_ms), True
        self.done.append(state.row)
        self.on_row(state.row)


def _file_system(fs: FileSystem | None, path: str, *, shared_storage: bool) -> FileSystem:
    """Return the file system for a task: `fs`, or the local file system of its host if `fs` is None (in a worker)."""
    if fs is None and not shared_storage:
        refuse_network_here(LOCAL, os.path.dirname(path))
    return fs or LOCAL


def find_task(
    payload: tuple[CleaningTask, ErasedKeys], attempt: str, *, fs: FileSystem | None, shared_storage: bool
) -> FoundInPartition:
    """Return the records to be erased in one partition."""
    task, keys = payload
    with sending_progress(task.partition_path, attempt):
        return find_in_partition(_file_system(fs, task.partition_path, shared_storage=shared_storage), task, keys)


def rewrite_task(task: RewriteTask, attempt: str, *, fs: FileSystem | None, shared_storage: bool) -> CleaningResult:
    """Rewrite the segments of one pass of a partition as scratch files, prove these files, and return the result."""
    path = task.cleaning.partition_path
    with sending_progress(path, attempt):
        cleaning = replace(task.cleaning, attempt=attempt)
        return rewrite(_file_system(fs, path, shared_storage=shared_storage), replace(task, cleaning=cleaning))


def check_task(
    payload: tuple[CleaningTask, ErasedKeys], attempt: str, *, fs: FileSystem | None, shared_storage: bool
) -> int:
    """Read a partition and return the bytes read. Raises KeytailError if a record with an erased key is left."""
    task, keys = payload
    with sending_progress(task.partition_path, attempt, "check"):
        return refuse_remaining(_file_system(fs, task.partition_path, shared_storage=shared_storage), task, keys)
