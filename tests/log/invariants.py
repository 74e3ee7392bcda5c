"""Invariants of the objects that read and write logs, asserted between the steps of a test."""

from __future__ import annotations

import numpy as np

from keytail.kernels import index as kernels
from keytail.log.append.active_segment import ActiveSegment
from keytail.log.append.live_producers import BATCHES_KEPT, LiveProducers
from keytail.log.append.partition_log import PartitionLog
from keytail.log.checkpoint import read_epochs
from keytail.log.index.files import TransactionIndex
from keytail.log.index.presized import PresizedIndex
from keytail.log.records.opening import Chunk


def check_chunk(chunk: Chunk) -> None:
    """Assert that the table covers the bytes without a gap or an overlap, and that offsets increase."""
    sizes = chunk.table["size_bytes"].astype(np.int64)
    assert int(sizes.sum()) == len(chunk.raw)
    assert np.array_equal(chunk.table["position"], chunk.position + np.concatenate(([0], np.cumsum(sizes)[:-1])))
    assert np.all(chunk.table["base_offset"][1:] > chunk.table["last_offset"][:-1])
    assert np.all(chunk.table["last_offset"] >= chunk.table["base_offset"])


def check_index(index: PresizedIndex | TransactionIndex) -> None:
    fs = index._fs
    if isinstance(index, TransactionIndex):
        assert np.all(np.diff(index.entries()["last_offset"]) > 0)
        assert bytes(index._data) == (fs.read_bytes(index.path) if fs.exists(index.path) else b"")
        return
    assert index._count >= 0
    if index._fd >= 0:
        full_bytes = index._max_entries * index._layout.size
        assert index._count <= index._max_entries
        assert fs.fd_stat(index._fd).size_bytes == len(index._view) == full_bytes
        assert not index._view[index._count * index._layout.size :].strip(b"\0")
    entries = index.entries()
    first, second = (entries[name] for name in index._columns)
    assert np.all(np.diff(first) > 0)
    assert not index._goes_back(second).any()


def check_log(partition_log: PartitionLog) -> None:
    log = partition_log._log
    assert log.log_start_offset <= log.log_end_offset
    assert log.recovery_point <= log.log_end_offset
    assert log.segments.bases == sorted(set(log.segments.bases))
    assert log.segments.bases[-1] == log.segments.active.base_offset
    _check_segment(log.segments.active)
    entries = log.epochs.entries
    assert entries == sorted(entries) == read_epochs(log.epochs._fs, log.epochs._path)
    assert all(start <= log.log_end_offset for _, start in entries)
    _check_producers(log.producers._producers)


def _check_segment(segment: ActiveSegment) -> None:
    assert segment._fs.fd_stat(segment._fd).size_bytes >= segment.size_bytes
    check_index(segment._transactions)
    for index, entries in zip(segment._indexes or (), (kernels.OFFSET_ENTRIES, kernels.TIME_ENTRIES), strict=False):
        check_index(index)
        assert len(index) == segment.index_state.values[entries]


def _check_producers(producers: LiveProducers) -> None:
    opened = {p.txn_first_offset: i for i, p in producers.producers.items() if p.txn_first_offset >= 0}
    assert opened == producers.open_transactions
    for producer in producers.producers.values():
        assert len(producer.sent) <= BATCHES_KEPT
        offsets = [offset for batch in producer.sent for offset in (batch.first_offset, batch.last_offset)]
        assert offsets == sorted(offsets)
