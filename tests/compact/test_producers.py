"""Batches that are retained because the state of an active producer depends on them."""

from __future__ import annotations

import numpy as np

from keytail.compact.producers import ActiveProducers
from keytail.format.batch import BATCH_TABLE
from tests.log.test_producers import batch
from tests.reference.batches import decode_log


def table_of(*batches: bytes) -> np.ndarray:
    table = np.zeros(len(batches), BATCH_TABLE)
    for row, raw in zip(table, batches, strict=True):
        (found,) = decode_log(raw)
        row["base_offset"], row["last_offset"] = found.base_offset, found.last_offset
        row["producer_id"], row["producer_epoch"] = found.producer_id, found.producer_epoch
        row["attributes"], row["record_count"] = found.attributes, found.record_count
    return table


def test_batches_that_an_active_producer_needs_are_found() -> None:
    known = ActiveProducers(np.array([1, 5, 9]), np.array([20, -1, -1]), np.array([0, 3, -1]))
    table = table_of(
        batch("data", 19, 1, count=2),  # it is the last data batch of its producer
        batch("data", 21, 1),
        batch("COMMIT", 20, 1),  # it has the same last offset, and Kafka compares only offsets
        batch("COMMIT", 22, 1),
        batch("COMMIT", 23, 5, epoch=3),  # without known data, every control batch of the epoch is needed
        batch("emptied marker", 24, 5, epoch=3),
        batch("COMMIT", 25, 5, epoch=2),
        batch("data", 26, 5, epoch=3),
        batch("data", 20, 2),
        batch("none", 20),
    )
    assert known.ends_a_producer(table).tolist() == [True, False, True, False, True, True] + [False] * 4
    nobody = ActiveProducers(*(np.empty(0, np.int64) for _ in range(3)))
    assert not nobody.ends_a_producer(table).any()
