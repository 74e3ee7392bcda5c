"""Computes the state that a broker keeps of one producer after each of the producer's batches. Nothing is refused here.

Both replay (producers.py) and append (log/append/live_producers.py) follow these rules, which are described in
format/SNAPSHOT.md, "Replay".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from keytail.format.batch import NO_SEQUENCE, TRANSACTIONAL
from keytail.format.producers import ProducerEntry

SEQUENCES = 2**31  # the sequence after the largest int32 is 0


@dataclass(frozen=True)
class SentBatch:
    """A producer's data batch in the log."""

    first_sequence: int
    last_sequence: int
    first_offset: int
    last_offset: int

    @classmethod
    def of(cls, row: np.void) -> SentBatch:
        """Return the batch that a row of BATCH_TABLE describes."""
        first, last = int(row["base_offset"]), int(row["last_offset"])
        sequence = int(row["base_sequence"])
        last_sequence = NO_SEQUENCE if sequence == NO_SEQUENCE else (sequence + last - first) % SEQUENCES
        return cls(sequence, last_sequence, first, last)


NOTHING_SENT = SentBatch(NO_SEQUENCE, NO_SEQUENCE, -1, -1)


@dataclass(frozen=True)
class Producer:
    """The state of a producer id; -1 means "none". `sent` has the latest batches of the producer with the epoch
    `epoch`, in log order."""

    epoch: int = -1
    timestamp_ms: int = -1
    coordinator_epoch: int = -1
    txn_first_offset: int = -1
    sent: tuple[SentBatch, ...] = ()

    @classmethod
    def of(cls, entry: ProducerEntry) -> Producer:
        sent: tuple[SentBatch, ...] = ()
        if entry.last_offset >= 0:
            first_sequence = (entry.last_sequence - entry.offset_delta) % SEQUENCES
            first_offset = entry.last_offset - entry.offset_delta
            sent = (SentBatch(first_sequence, entry.last_sequence, first_offset, entry.last_offset),)
        return cls(
            entry.epoch, entry.timestamp_ms, entry.coordinator_epoch, entry.current_txn_first_offset, sent
        )

    def entry(self, producer_id: int) -> ProducerEntry:
        """Return the producer's snapshot entry, which contains its latest batch only."""
        newest = self.newest
        return ProducerEntry(
            producer_id,
            self.epoch,
            newest.last_sequence,
            newest.last_offset,
            newest.last_offset - newest.first_offset,
            self.timestamp_ms,
            self.coordinator_epoch,
            self.txn_first_offset,
        )

    @property
    def newest(self) -> SentBatch:
        return self.sent[-1] if self.sent else NOTHING_SENT

    def after_data(self, row: np.void, keep: int = 1) -> Producer:
        """Return the state after a data batch, which may open a transaction. In the new state, `sent` has at most the
        latest `keep` batches."""
        batch = SentBatch.of(row)
        opens = self.txn_first_offset < 0 and row["attributes"] & TRANSACTIONAL
        epoch = int(row["producer_epoch"])
        before = self.sent if epoch == self.epoch else ()
        return Producer(
            epoch,
            int(row["max_timestamp_ms"]),
            self.coordinator_epoch,
            batch.first_offset if opens else self.txn_first_offset,
            (*before, batch)[-keep:],
        )

    def after_marker(self, row: np.void) -> Producer:
        """Return the state after a marker, which ends the open transaction. A new epoch clears `sent`."""
        epoch = int(row["producer_epoch"])
        return replace(
            self,
            epoch=epoch,
            timestamp_ms=int(row["max_timestamp_ms"]),
            coordinator_epoch=int(row["coordinator_epoch"]),
            txn_first_offset=-1,
            sent=self.sent if epoch == self.epoch else (),
        )


def not_idle(entries: Iterable[ProducerEntry], *, expiration_ms: int, now_ms: int) -> Iterator[ProducerEntry]:
    """Yield the entries of a snapshot that a broker keeps when it loads the snapshot at `now_ms`."""
    for entry in entries:
        if entry.current_txn_first_offset >= 0 or now_ms - entry.timestamp_ms < expiration_ms:
            yield entry
