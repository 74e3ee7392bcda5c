"""Determines from the headers of a whole log which batches a repack must not change because of their producers, and
which batches may lose their producer (REPACK.md, "Forgotten producers")."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import numpy as np

from keytail.format.batch import CONTROL, TRANSACTIONAL
from keytail.kernels.transactions import COMMIT
from keytail.log.producers import ProducerStates

# Number of batches of each producer that a broker keeps in memory, to recognise duplicates.
_KEPT_BATCHES = 5
_MERGED_ROWS = 1 << 16
_MARKER = ("base_offset", "control_type", "producer_id")

_no_numbers = partial(np.empty, 0, np.int64)


@dataclass(frozen=True)
class Forgotten:
    """Producers that have expired, and the markers of their transactions.

    `ids` (int64, sorted) are the ids of the producers. `markers` and `kinds` (int64) are the offsets and control types
    of their transaction markers below the end of the section, in log order; `marker_ids` (int64) are the producer ids
    of these markers.
    """

    ids: np.ndarray = field(default_factory=_no_numbers)
    markers: np.ndarray = field(default_factory=_no_numbers)
    kinds: np.ndarray = field(default_factory=_no_numbers)
    marker_ids: np.ndarray = field(default_factory=_no_numbers)
    _order: np.ndarray = field(default_factory=_no_numbers, init=False)
    _ranks: np.ndarray = field(default_factory=_no_numbers, init=False)

    def __post_init__(self) -> None:
        numbers = np.searchsorted(self.ids, self.marker_ids) if len(self.ids) else np.zeros(len(self.markers), np.int64)
        keys = numbers * (len(self.markers) + 1) + np.arange(len(self.markers))
        order = np.argsort(keys, kind="stable")
        object.__setattr__(self, "_order", order)
        object.__setattr__(self, "_ranks", keys[order])

    def may_lose(self, table: np.ndarray) -> np.ndarray:
        """Return for each row of `table` (BATCH_TABLE) whether its batch may lose its producer: the producer has
        expired, and the transaction, if there is one, was committed. Values of control batches have no meaning."""
        is_one = np.zeros(len(table), bool)
        if not len(self.ids):
            return is_one
        at = np.minimum(np.searchsorted(self.ids, table["producer_id"]), len(self.ids) - 1)
        is_one |= self.ids[at] == table["producer_id"]
        of_transactions = np.flatnonzero(is_one & ((table["attributes"] & TRANSACTIONAL) != 0))
        if len(of_transactions):
            is_one[of_transactions] = self._are_committed(table[of_transactions], at[of_transactions])
        return is_one

    def _are_committed(self, rows: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Return for each row of producer `ids[numbers]` whether the next marker of that producer is a COMMIT."""
        count = len(self.markers)
        if not count:
            return np.zeros(len(rows), bool)
        keys = numbers * (count + 1) + np.searchsorted(self.markers, rows["last_offset"], side="right")
        at = np.searchsorted(self._ranks, keys)
        within = np.minimum(at, count - 1)
        found = self._order[within]
        is_of_producer = (at < count) & (self.marker_ids[found] == rows["producer_id"])
        return is_of_producer & (self.kinds[found] == COMMIT)


@dataclass(frozen=True)
class ProducersOfLog:
    """Facts about producers from the headers of a log. `kept` are the base offsets (int64, sorted) of batches that must
    not be changed; `forgotten` are the expired producers."""

    kept: np.ndarray
    forgotten: Forgotten


def live_ids(producers: ProducerStates, expired_before_ms: int | None) -> np.ndarray:
    """Return the ids (int64, sorted) of the producers that have an open transaction or were active after
    `expired_before_ms`; the ids of all producers if this is None."""
    states = producers.states
    found = [
        producer_id
        for producer_id, state in states.items()
        if expired_before_ms is None or state.txn_first_offset >= 0 or state.timestamp_ms > expired_before_ms
    ]
    return np.array(sorted(found), np.int64)


class HeaderPass:
    """One pass over the headers of a log, in log order.

    `live` (int64, sorted) are the ids of the producers whose last batches must not be changed. Other producers are
    forgotten if none of their batches is newer than `expired_before_ms`; if that is None, no producer is forgotten.
    """

    def __init__(self, live: np.ndarray, expired_before_ms: int | None) -> None:
        self._live = live
        self._expired_before_ms = expired_before_ms
        self._latest: dict[int, list[int]] = {}
        self._newest = _NewestTimes()
        self._markers: list[np.ndarray] = []

    def add(self, table: np.ndarray, *, is_in_section: bool) -> None:
        """Add the next batches (BATCH_TABLE rows). `is_in_section` is True if their segment is repacked."""
        self._note_latest(table)
        if self._expired_before_ms is None:
            return
        rows = table[(table["producer_id"] >= 0) & (table["magic"] == 2)]
        self._newest.add(rows)
        if is_in_section:
            markers = rows[(rows["attributes"] & CONTROL) != 0]
            self._markers.append(np.stack([markers[name].astype(np.int64) for name in _MARKER]))

    def _note_latest(self, table: np.ndarray) -> None:
        ids = self._live
        if not len(ids):
            return
        rows = table[((table["attributes"] & CONTROL) == 0) & (table["magic"] == 2)]
        at = np.minimum(np.searchsorted(ids, rows["producer_id"]), len(ids) - 1)
        rows = rows[ids[at] == rows["producer_id"]]
        rows = rows[np.argsort(rows["producer_id"], kind="stable")]
        producers, first = np.unique(rows["producer_id"], return_index=True)
        ends = np.append(first, len(rows))[1:]
        for producer, begin, end in zip(producers.tolist(), first.tolist(), ends.tolist(), strict=True):
            bases = rows["base_offset"][max(begin, end - _KEPT_BATCHES) : end].tolist()
            self._latest[producer] = (self._latest.get(producer, []) + bases)[-_KEPT_BATCHES:]

    def finish(self) -> ProducersOfLog:
        kept = np.array(sorted(base for bases in self._latest.values() for base in bases), np.int64)
        if self._expired_before_ms is None:
            return ProducersOfLog(kept, Forgotten())
        ids, newest_ms = self._newest.totals()
        forgotten = ids[(newest_ms <= self._expired_before_ms) & ~np.isin(ids, self._live)]
        markers = np.concatenate([np.empty((len(_MARKER), 0), np.int64), *self._markers], axis=1)
        offsets, kinds, producers = np.ascontiguousarray(markers[:, np.isin(markers[2], forgotten)])
        return ProducersOfLog(kept, Forgotten(forgotten, offsets, kinds, producers))


class _NewestTimes:
    """The largest timestamp of each producer's batches. Parts are merged only when together they are large, so that the
    time of a pass remains proportional to the number of batches."""

    def __init__(self) -> None:
        self._parts: list[tuple[np.ndarray, np.ndarray]] = []
        self._rows = 0

    def add(self, rows: np.ndarray) -> None:
        if not len(rows):
            return
        part = _newest_of(rows["producer_id"], rows["max_timestamp_ms"])
        self._parts.append(part)
        self._rows += len(part[0])
        if self._rows > max(_MERGED_ROWS, 2 * len(self._parts[0][0])):
            self.totals()

    def totals(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the producer ids (int64, sorted), and the largest timestamp of each (int64, ms)."""
        if self._parts:
            ids, times = (np.concatenate(columns) for columns in zip(*self._parts, strict=True))
            self._parts = [_newest_of(ids, times)]
            self._rows = len(self._parts[0][0])
        return self._parts[0] if self._parts else (_no_numbers(), _no_numbers())


def _newest_of(ids: np.ndarray, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(ids, kind="stable")
    distinct, first = np.unique(ids[order], return_index=True)
    return distinct, np.maximum.reduceat(times[order], first)
