"""Stages 6, 8 and 9 of a fan-out: a task proves each range, and another task the latest records of each shard of keys.

A group and its sources are read in the same way as in compact/proof/prove.py. The keys of the records are put into a
table, which is split into shards when it is full, and at the end. A shard merges the entries of all groups and reports
whether a key has lost its latest record. Before groups are proven, transaction markers are collected with the start of
each transaction's data, which may be in an earlier group.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from keytail.compact.cleaner import proof_spec
from keytail.compact.fan_out.slices import Settled
from keytail.compact.proof.keys import SLOT_BYTES, Keys
from keytail.compact.proof.markers import collect_markers, note_first_data
from keytail.compact.proof.prove import prove
from keytail.compact.proof.state import PartOfProof
from keytail.compact.saved_state import load_state, save_state
from keytail.compact.table_memory import zeros
from keytail.compact.task import CleaningTask
from keytail.errors import KeytailError
from keytail.format import names
from keytail.kernels import fan_out as kernels
from keytail.kernels.proof import table as proof_table
from keytail.log.fs import FileSystem
from keytail.log.replacement.replace import CleanFile, GroupOutput
from keytail.run.shuffle import Cell
from keytail.threads import inheriting

_WORDS = proof_table.SLOT_WORDS
_CELL_ENTRIES = 1 << 17
# Maximum size of a group's table: a larger table sends fewer entries, but misses the cache more often
_TABLE_BYTES = 64 << 20
_FIRST_SLOTS = 1 << 14
_LOAD = 0.75


@dataclass(frozen=True)
class ProofPart:
    """The input of one task of a proof: the groups that replace the segments `numbers` (first, end) or, without
    `groups`, the segments `present` (first, end), which are replaced in later passes."""

    task: CleaningTask
    numbers: tuple[int, int]
    groups: tuple[GroupOutput, ...]
    present: tuple[int, int]
    settled: CleanFile
    markers: CleanFile | None
    shards: int


@dataclass(frozen=True)
class ProofContext:
    """The input that all shards share. `proofs`: the tables of the shards after the previous pass; `continues`: whether
    a pass follows."""

    task: CleaningTask
    proofs: tuple[CleanFile, ...]
    continues: bool


@dataclass(frozen=True)
class Verdict:
    """The result of one shard: the lowest offset of a key's latest record that was removed without reason (-1: none), 1
    in `older_retained` if an older record of that key was retained, the number of keys, and the table for the next
    pass, or None if no pass follows.
    """

    offset: int
    older_retained: int
    keys: int
    table: CleanFile | None


def markers_of(fs: FileSystem, task: CleaningTask, attempt: str) -> CleanFile:
    """Write the table of all markers of the log, with the first data offset of each, to a scratch file; return the
    file. One task reads the headers of the log twice, in order; only a log with transactions needs this table.
    """
    limit_bytes = max(task.map_memory_bytes // 2, 1 << 20)
    markers = collect_markers(fs, task.partition_path, task.segments, limit_bytes)
    if markers is None:
        raise KeytailError(
            f"the markers of transactions need more than {limit_bytes} bytes of memory",
            path=task.partition_path,
            remedy="Nothing was replaced. Raise --map-memory",
            slug="proof-memory-exceeded",
        )
    note_first_data(fs, task.partition_path, task.segments, markers, task.log_start_offset)
    return save_state(fs, replace(task, attempt=attempt), names.PROOF, markers)


def prove_part(fs: FileSystem, part: ProofPart, attempt: str) -> Iterator[Cell]:
    """Prove the groups of a part, or read a segment of later passes; yield the entries of keys by shard. Changes
    nothing."""
    yield from _pushed(lambda push: _prove(fs, part, push))


def _prove(fs: FileSystem, part: ProofPart, push: Callable[[Cell], None]) -> None:
    task = part.task
    settled: Settled = load_state(fs, task, part.settled)
    starts = np.zeros(part.shards + 1, np.int64)
    sent = 0

    def spill(slots: np.ndarray) -> None:
        nonlocal sent
        step = _CELL_ENTRIES * _WORDS
        for start in range(0, len(slots), step):
            some = slots[start : start + step]
            entries = np.empty(len(some), np.uint64)
            kernels.split_entries(some, part.shards, starts, entries)
            for shard in np.flatnonzero(np.diff(starts)):
                data = entries[_WORDS * starts[shard] : _WORDS * starts[shard + 1]].tobytes()
                push(Cell(int(shard), part.numbers[0] << 32 | sent, data))
                sent += 1

    keys = Keys(min(_TABLE_BYTES, max(1 << 20, task.map_memory_bytes // 2)), task.proof_secret, spill=spill)
    end_offset = task.first_uncleanable_offset
    markers = load_state(fs, task, part.markers) if part.markers else None
    prove(
        fs,
        proof_spec(task, part.groups, settled.producers, end_offset, part.numbers),
        part=PartOfProof(keys, markers, task.segments[slice(*part.present)]),
    )


def settle_proof(
    fs: FileSystem, context: ProofContext, shard: int, cells: Iterable[tuple[int, bytes]], attempt: str
) -> Verdict:
    """Merge the entries of one shard (`cells`, in any order) into its table of the previous pass; return its verdict.
    """
    task = replace(context.task, attempt=attempt)
    table = _Table(task.map_memory_bytes, task.partition_path)
    if context.proofs:
        table.continue_(load_state(fs, task, context.proofs[shard]))
    for _, data in cells:
        table.merge(np.frombuffer(bytearray(data), np.uint64))
    offset, older_retained = proof_table.first_unjustified(table.slots)
    file = save_state(fs, task, names.PROOF, table.slots) if context.continues else None
    return Verdict(int(offset), int(older_retained), table.used, file)


class _Table:
    """The key entries of one shard; the table takes at most two thirds of `memory_bytes`. Its sizes are halves of this
    maximum, so that the previous table, of half the size, takes the last third while the table grows."""

    def __init__(self, memory_bytes: int, path: str) -> None:
        self._memory_bytes, self._path = memory_bytes, path
        self._max_slots = max(16, memory_bytes * 2 // (3 * SLOT_BYTES))
        self.slots = self._of(_FIRST_SLOTS // 2)
        self.used = 0

    def _of(self, slots: int) -> np.ndarray:
        """Return an empty table of the smallest size above `slots`."""
        size = self._max_slots
        while size // 2 > slots:
            size //= 2
        return zeros(size * _WORDS, np.dtype(np.uint64))

    def continue_(self, slots: np.ndarray) -> None:
        """Continue with the table of the previous pass."""
        self.slots = slots
        self.used = int(np.count_nonzero(slots.reshape(-1, _WORDS)[:, 2]))

    def merge(self, entries: np.ndarray) -> None:
        """Add entries; free slots among them are skipped."""
        entries = entries.reshape(-1, _WORDS)
        entries = np.ascontiguousarray(entries[entries[:, 2] != 0]).reshape(-1)
        done, n = 0, len(entries) // _WORDS
        while True:
            slots = len(self.slots) // _WORDS
            limit = min(int(slots * _LOAD), slots - 2)
            done, self.used = kernels.merge_entries(self.slots, self.used, limit, entries, done)
            if done == n:
                return
            if slots >= self._max_slots:
                raise KeytailError(
                    f"a shard of the proof needs more than its {self._memory_bytes} bytes of memory",
                    path=self._path,
                    remedy="Nothing was replaced. Raise --map-memory",
                    slug="proof-memory-exceeded",
                )
            larger = self._of(slots)
            proof_table.rehash(self.slots, larger, True)
            self.slots = larger


def _pushed(work: Callable[[Callable[[Cell], None]], None]) -> Iterator[Cell]:
    """Run `work` in a thread, which waits while the queue is full; yield what it pushes, and raise its exceptions."""
    cells: queue.Queue[Any] = queue.Queue(maxsize=4)
    given_up = threading.Event()

    def push(item: Any) -> None:
        while True:
            if given_up.is_set():
                raise _GivenUp
            try:
                return cells.put(item, timeout=0.1)
            except queue.Full:
                continue

    def run() -> None:
        end: Any = None
        try:
            work(push)
        except _GivenUp:
            return
        except BaseException as problem:
            end = problem
        try:
            push(end)
        except _GivenUp:
            return

    thread = threading.Thread(target=inheriting(run), name="proof", daemon=True)
    thread.start()
    try:
        while isinstance(item := cells.get(), Cell):
            yield item
        if item is not None:
            raise item
    finally:
        given_up.set()
        thread.join()


class _GivenUp(Exception):
    """The consumer has stopped."""
