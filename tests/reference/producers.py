"""The producers that a broker knows after loading a log: the reference model of `keytail.log.producers`.

Works on decoded batches, one at a time, and keeps up to five batches per producer, like Kafka's ProducerStateManager.
Shares no code with keytail.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from tests.reference.batches import Batch


@dataclass
class Producer:
    """A producer. `batches` has the last sequence, the last offset and the offset delta of the latest batches."""

    epoch: int = -1
    batches: list[tuple[int, int, int]] = field(default_factory=list)
    last_timestamp: int = -1
    coordinator_epoch: int = -1
    txn_first_offset: int | None = None

    @property
    def last_data_offset(self) -> int | None:
        return self.batches[-1][1] if self.batches else None


@dataclass(frozen=True)
class Completed:
    first_offset: int
    marker_offset: int
    aborted: bool


@dataclass
class Producers:
    known: dict[int, Producer] = field(default_factory=dict)
    completed: list[Completed] = field(default_factory=list)

    def take(self, batch: Batch) -> None:
        if batch.producer_id < 0:
            return
        new = batch.producer_id not in self.known
        producer = self.known.setdefault(batch.producer_id, Producer())
        if batch.control:
            if batch.records:
                self._end(producer, batch)
            elif new:
                producer.epoch = -1
            return
        self._epoch(producer, batch.producer_epoch)
        delta = batch.last_offset - batch.base_offset
        last_sequence = -1 if batch.base_sequence < 0 else (batch.base_sequence + delta) % 2**31
        producer.batches = [*producer.batches, (last_sequence, batch.last_offset, delta)][-5:]
        producer.last_timestamp = batch.max_timestamp
        if batch.transactional and producer.txn_first_offset is None:
            producer.txn_first_offset = batch.base_offset

    def _end(self, producer: Producer, batch: Batch) -> None:
        (record,) = batch.records
        assert record.key is not None and record.value is not None
        (kind,) = struct.unpack_from(">h", record.key, 2)
        (producer.coordinator_epoch,) = struct.unpack_from(">i", record.value, 2)
        self._epoch(producer, batch.producer_epoch)
        producer.last_timestamp = record.timestamp
        if producer.txn_first_offset is not None:
            self.completed.append(Completed(producer.txn_first_offset, batch.base_offset, kind == 0))
            producer.txn_first_offset = None

    @staticmethod
    def _epoch(producer: Producer, epoch: int) -> None:
        if producer.epoch != epoch:
            producer.epoch, producer.batches = epoch, []

    def first_unstable(self, high_watermark: int) -> int | None:
        firsts = [p.txn_first_offset for p in self.known.values() if p.txn_first_offset is not None]
        firsts += [done.first_offset for done in self.completed if done.marker_offset >= high_watermark]
        return min(firsts, default=None)


def loaded(
    batches: Iterable[Batch],
    snapshots: Mapping[int, Mapping[int, Producer] | None],
    *,
    log_start_offset: int,
    log_end_offset: int,
    clean_shutdown: bool,
    expiration_ms: int,
    now_ms: int,
) -> Producers:
    """Return the producers after loading. `snapshots` has, by offset, the producers in each snapshot; None for a
    damaged one.
    """
    usable = [offset for offset, known in snapshots.items() if known is not None and offset <= log_end_offset]
    producers = Producers()
    start = log_start_offset
    if usable:
        start = max(usable)
        for producer_id, producer in (snapshots[start] or {}).items():
            if producer.txn_first_offset is not None or now_ms - producer.last_timestamp < expiration_ms:
                producers.known[producer_id] = replace(producer, batches=list(producer.batches))
    elif clean_shutdown:
        return producers
    for batch in batches:
        if start <= batch.last_offset < log_end_offset:
            producers.take(batch)
    return producers
