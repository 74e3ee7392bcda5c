"""The active producers of a partition, and the batches of each producer that cleaning must retain (CLEANING.md, 6)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keytail.format.batch import CONTROL
from keytail.log.producers import ProducerStates


@dataclass(frozen=True)
class ActiveProducers:
    """The producers by ascending `ids` (int64), their last data offsets (int64, -1: unknown), and epochs (int64)."""

    ids: np.ndarray
    last_data_offsets: np.ndarray
    epochs: np.ndarray

    @classmethod
    def of(cls, producers: ProducerStates) -> ActiveProducers:
        states = producers.states
        ids = sorted(states)
        return cls(
            np.array(ids, np.int64),
            np.array([states[i].newest.last_offset for i in ids], np.int64),
            np.array([states[i].epoch for i in ids], np.int64),
        )

    def ends_a_producer(self, table: np.ndarray) -> np.ndarray:
        """Return for each batch (rows of BATCH_TABLE) whether it carries the state of an active producer: it is the
        producer's last data batch or, if the last data batch is unknown, a control batch of the producer's epoch.
        """
        if not len(self.ids):
            return np.zeros(len(table), bool)
        at = np.minimum(np.searchsorted(self.ids, table["producer_id"]), len(self.ids) - 1)
        is_active = (self.ids[at] == table["producer_id"]) & (table["producer_id"] >= 0)
        last = self.last_data_offsets[at]
        is_control = (table["attributes"] & CONTROL) != 0
        by_epoch = is_control & (self.epochs[at] == table["producer_epoch"])
        return is_active & np.where(last >= 0, last == table["last_offset"], by_epoch)
