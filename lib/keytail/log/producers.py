"""Determines the states of a partition's producers, and which transactions are not settled.

As when a broker loads the log, the state begins with the latest valid producer snapshot at or below the log end,
without expired producers; then the batches after the snapshot are replayed (format/SNAPSHOT.md).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from keytail.durations import duration_text
from keytail.format import names
from keytail.format.batch import CONTROL, TRANSACTIONAL
from keytail.format.producers import ProducerEntry, parse_snapshot
from keytail.log.fs import FileSystem
from keytail.log.partition import PartitionFacts, SegmentFacts
from keytail.log.producer import Producer, not_idle
from keytail.log.records.chunk import SegmentReader


@dataclass
class ProducerStates:
    """All producers of a partition up to some offset, and the transactions that ended in the replayed batches."""

    states: dict[int, Producer] = field(default_factory=dict)  # by producer id, each with its latest batch
    completed: list[tuple[int, int]] = field(default_factory=list)  # pairs of first offset and offset of the marker

    @classmethod
    def of(cls, entries: Iterable[ProducerEntry]) -> ProducerStates:
        return cls({entry.producer_id: Producer.of(entry) for entry in entries})

    def entries(self) -> list[ProducerEntry]:
        """Return the entries of a snapshot of this state, sorted by producer id."""
        return [producer.entry(producer_id) for producer_id, producer in sorted(self.states.items())]

    def replay(self, table: np.ndarray, start: int, end: int) -> None:
        """Apply the batches (BATCH_TABLE rows) that end at or above `start` and below `end`, as a follower does
        (format/SNAPSHOT.md, "Replay")."""
        rows = table[(table["producer_id"] >= 0) & (table["last_offset"] >= start) & (table["last_offset"] < end)]
        for row in rows[_rows_that_count(rows)]:
            producer_id = int(row["producer_id"])
            producer = self.states.get(producer_id, Producer())
            if not row["attributes"] & CONTROL:
                producer = producer.after_data(row)
            elif row["record_count"]:
                if producer.txn_first_offset >= 0:
                    self.completed.append((producer.txn_first_offset, int(row["base_offset"])))
                producer = producer.after_marker(row)
            self.states[producer_id] = producer

    def earliest_unsettled(self, high_watermark: int) -> tuple[int, int] | None:
        """Return the first offset and the producer id of the earliest transaction that is open, or that ended with a
        marker not below the high watermark; None if there is no such transaction. The producer id is -1 if the
        transaction has ended."""
        unsettled = [(s.txn_first_offset, i) for i, s in self.states.items() if s.txn_first_offset >= 0]
        unsettled += [(first, -1) for first, marker in self.completed if marker >= high_watermark]
        return min(unsettled, default=None)


def _rows_that_count(rows: np.ndarray) -> np.ndarray:
    """Return the ascending numbers of the rows that suffice to reach the same state as all rows.

    The result contains all control batches and, of the data batches of a producer between two control batches: the last
    batch, and every transactional batch that is the first or follows a non-transactional batch. Any other batch is
    superseded by the next batch, and opens no transaction.
    """
    if not len(rows):
        return np.empty(0, np.int64)
    order = np.argsort(rows["producer_id"], kind="stable")
    producer = rows["producer_id"][order]
    is_control = (rows["attributes"][order] & CONTROL) != 0
    begins = np.ones(len(rows), bool)
    begins[1:] = (producer[1:] != producer[:-1]) | is_control[1:] | is_control[:-1]
    transactional = (rows["attributes"][order] & TRANSACTIONAL) != 0
    counts = np.append(begins[1:], True)  # the last row of each run counts
    counts |= transactional & (begins | ~np.append(False, transactional[:-1]))
    return np.sort(order[counts])


def newest_snapshot(
    fs: FileSystem, partition_path: str, snapshots: Sequence[int], log_end_offset: int
) -> tuple[int, list[ProducerEntry]] | None:
    """Return the offset and the entries of the latest valid snapshot at or below `log_end_offset`, or None."""
    for offset in sorted(snapshots, reverse=True):
        if offset <= log_end_offset:
            path = os.path.join(partition_path, names.segment_file(offset, names.SNAPSHOT))
            data = fs.read_bytes(path, whole=True)
            try:
                return offset, parse_snapshot(data)
            except ValueError:
                continue  # a broker deletes a damaged snapshot and uses the previous one
    return None


class Log(Protocol):
    """The fields of PartitionFacts, and of tasks, that `load_producers` uses."""

    @property
    def segments(self) -> Sequence[SegmentFacts]: ...

    @property
    def snapshots(self) -> Sequence[int]: ...

    @property
    def log_start_offset(self) -> int: ...

    @property
    def log_end_offset(self) -> int: ...

    @property
    def clean_shutdown(self) -> bool: ...


def load_producers(
    fs: FileSystem,
    reader: SegmentReader | None,
    partition_path: str,
    log: Log,
    *,
    expiration_ms: int,
    now_ms: int,
) -> ProducerStates:
    """Return the state that a broker would have after loading the log at `now_ms`. Without a `reader`, a reader is
    created only if batches must be read: if the latest snapshot is at the log end, allocating a reader's buffers would
    take longer than everything else."""
    segments, log_end_offset = log.segments, log.log_end_offset
    found = newest_snapshot(fs, partition_path, log.snapshots, log_end_offset)
    if found is None and log.clean_shutdown:
        return ProducerStates()  # as in a broker, whatever the log contains
    start, entries = found if found is not None else (log.log_start_offset, [])
    producers = ProducerStates.of(not_idle(entries, expiration_ms=expiration_ms, now_ms=now_ms))
    for number, segment in enumerate(segments):
        is_last = number + 1 == len(segments)
        is_needed = is_last or segments[number + 1].base_offset > start
        if start < log_end_offset and is_needed and segment.base_offset < log_end_offset:
            path = os.path.join(partition_path, names.segment_file(segment.base_offset, names.LOG))
            torn_tail = is_last and not log.clean_shutdown
            reader = reader or SegmentReader(fs)
            for chunk in reader.chunks(path, segment.log_bytes, torn_tail=torn_tail):
                producers.replay(chunk.table, start, log_end_offset)
    return producers


@dataclass(frozen=True)
class Unstable:
    """Transactions are not settled from `offset` on; `why` describes the earliest such transaction."""

    offset: int
    why: str


def first_unstable(fs: FileSystem, facts: PartitionFacts, *, now_ms: int) -> Unstable | None:
    """Return the start of the earliest transaction that is open or whose marker is not below the high watermark.

    Returns None if all transactions are settled. Without a high watermark, the log end offset is used instead. As in a
    starting broker, a transaction that ended before the latest snapshot was taken is settled, wherever its marker is.
    When producers expire does not matter: a producer with an open transaction never does, and others open none.
    `now_ms` is used only for the age in `why`.
    """
    limit = facts.log_end_offset
    if facts.high_watermark is not None:
        limit = min(limit, facts.high_watermark)
    producers = load_producers(fs, None, facts.path, facts, expiration_ms=names.MAX_OFFSET, now_ms=0)
    earliest = producers.earliest_unsettled(limit)
    if earliest is None:
        return None
    offset, producer_id = earliest
    if producer_id >= 0:
        state = producers.states[producer_id]
        why = (
            f"producer id {producer_id}, epoch {state.epoch}, has an open transaction with first offset {offset} and "
            f"age {duration_text(now_ms - state.timestamp_ms)}"
        )
    else:
        why = f"the transaction that begins at offset {offset} ended at or above the high watermark {limit}"
    if offset < facts.log_start_offset:
        offset = _batch_at_or_after(SegmentReader(fs), facts, facts.log_start_offset)
    return Unstable(offset, why)


def _batch_at_or_after(reader: SegmentReader, facts: PartitionFacts, offset: int) -> int:
    """Return the base offset of the first batch that ends at or above `offset`, as a broker's look-up does; return
    `offset` if there is no such batch."""
    for number, segment in enumerate(facts.segments):
        is_last = number + 1 == len(facts.segments)
        if is_last or facts.segments[number + 1].base_offset > offset:
            path = os.path.join(facts.path, names.segment_file(segment.base_offset, names.LOG))
            torn_tail = is_last and not facts.clean_shutdown
            for chunk in reader.chunks(path, segment.log_bytes, torn_tail=torn_tail):
                at = int(np.searchsorted(chunk.table["last_offset"], offset))
                if at < len(chunk.table):
                    return int(chunk.table["base_offset"][at])
    return offset
