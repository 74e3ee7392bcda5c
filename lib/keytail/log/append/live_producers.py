"""The state that a broker keeps of each producer while it appends: it determines which batches are refused, and which
transactions end.

`check_set` returns the changes that a set of batches would make; `take` applies them. The rules are in APPEND.md,
"Producers"; format/SNAPSHOT.md specifies what a snapshot contains of this state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np

from keytail.errors import Refused
from keytail.format.batch import CONTROL, TRANSACTIONAL
from keytail.format.control import ControlType
from keytail.format.producers import ProducerEntry
from keytail.log.index.files import AbortedTransaction
from keytail.log.producer import SEQUENCES, Producer, SentBatch

BATCHES_KEPT = 5  # number of latest batches that are retained per producer, to recognise a batch that is sent again
_NOTHING_WRITTEN = "No batch of this set was written"


@dataclass(frozen=True)
class CheckedSet:
    """The changes that batches make: `producers` by id, `open_transactions`, and new entries of the transaction index.

    Only the first `rows` batches are included. On a leader, further batches may follow: if `duplicate` is set, the next
    batch was sent before, and `duplicate` describes that batch in the log.
    """

    rows: int
    producers: dict[int, Producer]
    open_transactions: dict[int, int]
    aborted: tuple[AbortedTransaction, ...]
    duplicate: SentBatch | None = None


@dataclass
class LiveProducers:
    """All producers of a partition by id, and the producer ids of open transactions by first offset."""

    producers: dict[int, Producer] = field(default_factory=dict)
    open_transactions: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, entries: Iterable[ProducerEntry]) -> LiveProducers:
        known = {entry.producer_id: Producer.of(entry) for entry in entries}
        return cls(known, {p.txn_first_offset: i for i, p in known.items() if p.txn_first_offset >= 0})

    def entries(self) -> list[ProducerEntry]:
        """Return the entries of a snapshot, in the order in which a broker writes them."""
        return [self.producers[producer_id].entry(producer_id) for producer_id in hash_order(list(self.producers))]

    def check_set(self, table: np.ndarray, *, as_leader: bool) -> CheckedSet:
        """Return the changes that these batches make. On a leader, each batch is a separate set and is checked; on a
        follower, all batches are one set.

        Raises Refused for batches that a broker refuses.
        """
        numbers = np.flatnonzero(table["producer_id"] >= 0)
        change = _Change(self)
        if not as_leader:
            change.add_set([table[number] for number in numbers], as_leader=False)
            return change.in_hash_order().checked_set(len(table))
        for number in numbers:
            row = table[number]
            duplicate = None if row["attributes"] & CONTROL else change.duplicate_of(row)
            if duplicate is not None:
                return change.checked_set(int(number), duplicate)
            change.add_set([row], as_leader=True)
        return change.checked_set(len(table))

    def take(self, checked_set: CheckedSet) -> None:
        self.producers.update(checked_set.producers)
        self.open_transactions = checked_set.open_transactions


class _Change:
    """Collects the changes that batches make to the producers `before`."""

    def __init__(self, before: LiveProducers) -> None:
        self._before = before.producers
        self._after: dict[int, Producer] = {}
        self._open = dict(before.open_transactions)
        self._aborted: list[AbortedTransaction] = []

    def checked_set(self, rows: int, duplicate: SentBatch | None = None) -> CheckedSet:
        return CheckedSet(rows, self._after, self._open, tuple(self._aborted), duplicate)

    def in_hash_order(self) -> _Change:
        """Sort the producers as a broker does, and return this object. A broker collects the producers of a set in a
        hash table, and adds new producers in the order of that table.
        """
        order = hash_order(list(self._after), in_front=True)
        self._after = {producer_id: self._after[producer_id] for producer_id in order}
        return self

    def _of(self, producer_id: int) -> Producer:
        known = self._after.get(producer_id)
        return known if known is not None else self._before.get(producer_id, Producer())

    def duplicate_of(self, row: np.void) -> SentBatch | None:
        producer, again = self._of(int(row["producer_id"])), SentBatch.of(row)
        if producer.epoch != row["producer_epoch"]:
            return None
        for sent in producer.sent:
            if (sent.first_sequence, sent.last_sequence) == (again.first_sequence, again.last_sequence):
                return sent
        return None

    def add_set(self, rows: Sequence[np.void], *, as_leader: bool) -> None:
        ended = []
        for row in rows:
            producer_id = int(row["producer_id"])
            producer = self._of(producer_id)
            if not row["attributes"] & CONTROL:
                producer = self._after_data(producer, row, as_leader=as_leader)
            elif row["record_count"]:
                _refuse_marker(producer, row, as_leader=as_leader)
                if producer.txn_first_offset >= 0:
                    ended.append((producer_id, producer.txn_first_offset, row))
                producer = producer.after_marker(row)
            self._after[producer_id] = producer
        # A broker looks for other open transactions after the whole set, so transactions that begin after the marker
        # are included.
        for producer_id, first_offset, row in ended:
            marker = int(row["base_offset"])
            if row["control_type"] == ControlType.ABORT:
                others = [first for first, owner in self._open.items() if owner != producer_id]
                stable = min(others, default=marker + 1)
                self._aborted.append(AbortedTransaction(producer_id, first_offset, marker, stable))
            del self._open[first_offset]

    def _after_data(self, producer: Producer, row: np.void, *, as_leader: bool) -> Producer:
        if as_leader:
            _refuse_sequence(producer, row)
        if producer.txn_first_offset >= 0 and not row["attributes"] & TRANSACTIONAL:
            _refuse(row, f"this batch is not part of the transaction that begins at offset {producer.txn_first_offset}")
        after = producer.after_data(row, BATCHES_KEPT)
        if after.txn_first_offset != producer.txn_first_offset:
            self._open[after.txn_first_offset] = int(row["producer_id"])
        return after


def _refuse_sequence(producer: Producer, row: np.void) -> None:
    epoch, sequence = int(row["producer_epoch"]), int(row["base_sequence"])
    if epoch < producer.epoch:
        _refuse(row, f"epoch {epoch} is older than the current epoch {producer.epoch}")
    if producer.epoch == -1:
        return  # from an unknown producer, a broker accepts any sequence
    if epoch != producer.epoch:
        if sequence:
            _refuse(row, f"epoch {epoch} begins with sequence {sequence}, not 0")
    elif sequence != (producer.newest.last_sequence + 1) % SEQUENCES:
        _refuse(row, f"sequence {sequence} does not follow {producer.newest.last_sequence}")


def _refuse_marker(producer: Producer, row: np.void, *, as_leader: bool) -> None:
    if row["control_type"] not in (ControlType.ABORT, ControlType.COMMIT):
        _refuse(row, f"a control record of type {row['control_type']} does not end a transaction")
    if not as_leader:
        return
    if row["producer_epoch"] < producer.epoch:
        _refuse(row, f"marker epoch {row['producer_epoch']} is older than the current epoch {producer.epoch}")
    if row["coordinator_epoch"] < producer.coordinator_epoch:
        _refuse(
            row,
            f"coordinator epoch {row['coordinator_epoch']} of the marker is older than the current epoch "
            f"{producer.coordinator_epoch}",
        )


def _refuse(row: np.void, what: str) -> NoReturn:
    raise Refused(
        f"producer id {row['producer_id']}: {what}",
        offset=int(row["base_offset"]),
        remedy=_NOTHING_WRITTEN,
        slug="batch-contradicts-producer-state",
    )


# The order in which a broker writes a snapshot is that of its hash table (APPEND.md, "Producers"), which is Java's
# HashMap. Such a table begins with 16 buckets and doubles when it, or one of its buckets, contains too many ids. The
# bits of an id determine its bucket, and within a bucket ids are in insertion order.
_FIRST_BUCKETS = 16
_MAX_IDS_PER_BUCKET = 8  # with one more id in a bucket, a table of fewer than 64 buckets is doubled
_MAX_DOUBLED_BUCKETS = 64


def hash_order(producer_ids: Sequence[int], *, in_front: bool = False) -> list[int]:
    """Return distinct producer ids, given in insertion order, in the order of the hash table.

    `in_front`: the ids are inserted by `computeIfAbsent`, where the latest id is the first in its bucket, and the table
    is doubled if it was too full before. If eight ids or more share one of 64 buckets, a broker's order may differ.
    """
    buckets = _FIRST_BUCKETS
    for count, producer_id in enumerate(producer_ids, 1):
        if buckets >= _MAX_DOUBLED_BUCKETS:
            break
        if in_front and _is_too_full(count - 1, buckets):
            buckets *= 2
        bucket = _bucket(producer_id, buckets)
        same_bucket = sum(_bucket(other, buckets) == bucket for other in producer_ids[:count])
        if same_bucket > _MAX_IDS_PER_BUCKET - in_front and buckets < _MAX_DOUBLED_BUCKETS:
            buckets *= 2
        if not in_front and _is_too_full(count, buckets):
            buckets *= 2
    while _is_too_full(len(producer_ids) - in_front, buckets):
        buckets *= 2
    return sorted(reversed(producer_ids) if in_front else producer_ids, key=lambda i: _bucket(i, buckets))


def _is_too_full(count: int, buckets: int) -> bool:
    return count > buckets * 3 // 4


def _bucket(producer_id: int, buckets: int) -> int:
    folded = (producer_id ^ (producer_id >> 32)) & 0xFFFFFFFF
    return (folded ^ (folded >> 16)) & (buckets - 1)
