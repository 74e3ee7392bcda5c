"""Determines the aborted data and the unneeded markers of a partition before anything is rewritten.

A tracker follows checked batch headers and control records in log order. The result of a tracker is small, and
determines for any batch, in any order, whether the batch may be discarded (format/CLEANING.md, "Transactions"). Aborted
transactions are taken from the `.txnindex` files unless the log contradicts them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from keytail.format import names
from keytail.format.index import TXN_ENTRY, encode_txn_index, parse_txn_index
from keytail.kernels import transactions as kernels
from keytail.kernels.batch_header import CONTROL, TRANSACTIONAL, TRANSACTIONAL_OR_CONTROL
from keytail.log.fs import FileSystem
from keytail.log.partition import SegmentFacts

NATIVE_ENTRY = TXN_ENTRY.newbyteorder("=")


class Contradiction(Exception):
    """The log contradicts the entries of aborted transactions that the tracker was given; the first wrong or missing
    entry ends at `offset`. The log must be followed again, with `entries`."""

    def __init__(self, offset: int, entries: np.ndarray) -> None:
        super().__init__(offset)
        self.offset = offset
        self.entries = entries


def read_aborted(
    fs: FileSystem, partition_path: str, segments: Sequence[SegmentFacts], log_start_offset: int
) -> np.ndarray:
    """Return all entries of transaction indexes (TXN_ENTRY, native byte order) that end at or above the log start
    offset, sorted by first offset.

    Entries with impossible values are omitted: the log shows whether an entry is missing or wrong.
    """
    found = [np.empty(0, NATIVE_ENTRY)]
    for segment in segments:
        if segment.txn_index_bytes:
            path = os.path.join(partition_path, names.segment_file(segment.base_offset, names.TXN_INDEX))
            data = fs.read_bytes(path)
            entries = parse_txn_index(data[: len(data) // TXN_ENTRY.itemsize * TXN_ENTRY.itemsize])
            possible = (entries["version"] == 0) & (entries["first_offset"] >= 0)
            found.append(entries[possible & (entries["first_offset"] < entries["last_offset"])])
    return sorted_entries(np.concatenate(found), log_start_offset)


def sorted_entries(entries: np.ndarray, log_start_offset: int) -> np.ndarray:
    """Return the entries that end at or above the log start offset, sorted by first offset; a broker does not serve
    lower offsets."""
    entries = entries[entries["last_offset"] >= log_start_offset]
    return entries[np.lexsort((entries["last_offset"], entries["first_offset"]))]


@dataclass(frozen=True)
class Transactions:
    """The result of the pass over the log. `entries` are the correct index entries. The arrays `interval_...` describe
    aborted data, sorted by producer id and first offset. The arrays `marker_...` have the offsets of all markers,
    ascending, and whether each is unneeded. The arrays `kept_...` have the marker offsets of the retained entries,
    ascending, and the numbers of these in `entries`."""

    entries: np.ndarray
    interval_producer: np.ndarray
    interval_first: np.ndarray
    interval_end: np.ndarray
    marker_offsets: np.ndarray
    marker_discard: np.ndarray
    kept_offsets: np.ndarray
    kept_entries: np.ndarray

    def aborted(self, table: np.ndarray) -> np.ndarray:
        """Return for each batch (BATCH_TABLE rows) whether it contains data of an aborted transaction (bool array)."""
        out = np.zeros(len(table), np.uint8)
        if len(self.interval_producer):
            kernels.aborted_rows(table, self.interval_producer, self.interval_first, self.interval_end, out)
        return out.view(bool)

    def unneeded_markers(self, table: np.ndarray) -> np.ndarray:
        """Return for each batch (bool array) whether it is a control batch that is no longer needed: its transaction
        has neither data in the log nor an entry to retain."""
        out = np.zeros(len(table), np.uint8)
        if len(self.marker_offsets):
            kernels.marker_flags(table, self.marker_offsets, self.marker_discard, out)
        return out.view(bool)

    def index_bytes(self, from_offset: int, to_offset: int) -> bytes:
        """Return the contents of the `.txnindex` of a segment with the offsets [from_offset, to_offset)."""
        a, b = np.searchsorted(self.kept_offsets, [from_offset, to_offset])
        return encode_txn_index(self.entries[self.kept_entries[a:b]])


class TransactionTracker:
    """Follows batches in log order. `entries` are the aborted transactions, sorted by first offset."""

    def __init__(self, entries: np.ndarray, log_start_offset: int) -> None:
        self._entries = entries
        self._log_start = log_start_offset
        self._number_of: dict[int, int] = {}
        self._state = np.empty((0, 5), np.int64)
        self._entry_producer = self._numbers(entries["producer_id"])
        self._entry_first = np.ascontiguousarray(entries["first_offset"])
        self._cursor = np.array([0, 0, 0, kernels.NO_OFFSET], np.int64)
        self._markers: list[np.ndarray] = []
        self._aborts: list[np.ndarray] = []
        self._named_offsets = _NamedOffsets(np.concatenate([entries["first_offset"], entries["last_stable_offset"]]))

    def _numbers(self, producer_ids: np.ndarray) -> np.ndarray:
        distinct, inverse = np.unique(producer_ids, return_inverse=True)
        numbers = [self._number_of.setdefault(int(i), len(self._number_of)) for i in distinct]
        if len(self._state) < len(self._number_of):
            larger = np.tile(np.array([-1, 0, 0, kernels.NO_OFFSET, -1], np.int64), (2 * len(self._number_of), 1))
            larger[: len(self._state)] = self._state
            self._state = larger
        return np.array(numbers, np.int64)[inverse]

    def follow(self, table: np.ndarray) -> np.ndarray:
        """Process the next batches of the log; return for each batch (bool) whether it is aborted data or an unneeded
        marker."""
        discard = np.zeros(len(table), np.uint8)
        self._named_offsets.record(table)
        special = (table["attributes"] & TRANSACTIONAL_OR_CONTROL) != 0
        if not special.any():
            return discard.view(bool)
        producers = np.zeros(len(table), np.int64)
        producers[special] = self._numbers(table["producer_id"][special])
        n_control = int(np.count_nonzero(table["attributes"] & CONTROL))
        markers, aborts = (np.empty((n_control, columns), np.int64) for columns in (2, kernels.ABORT_COLUMNS))
        self._cursor[kernels.MARKERS] = self._cursor[kernels.ABORTS] = 0
        kernels.track(
            table, producers, self._log_start, self._entry_first, self._entry_producer, self._state, self._cursor,
            discard, markers, aborts,
        )  # fmt: skip
        self._markers.append(markers[: self._cursor[kernels.MARKERS]])
        self._aborts.append(aborts[: self._cursor[kernels.ABORTS]].copy())
        return discard.view(bool)

    def finish(self) -> Transactions:
        """Return the result after the last batch of the log. Raises Contradiction if the entries are wrong."""
        aborts = _joined(self._aborts, kernels.ABORT_COLUMNS)
        right = self._right_entries(aborts)
        followed = ["producer_id", "first_offset", "last_offset"]
        if not np.array_equal(right[followed], self._entries[followed]):
            ours, theirs = ({entry.tobytes() for entry in entries} for entries in (right, self._entries))
            differing = np.frombuffer(b"".join(ours ^ theirs), NATIVE_ENTRY)
            raise Contradiction(int(differing["last_offset"].min(initial=kernels.NO_OFFSET)), right)
        markers = _joined(self._markers, 2)
        kept = aborts[aborts[:, kernels.KEPT] == 1]
        order = np.lexsort((right["first_offset"], right["producer_id"]))
        return Transactions(
            entries=right,
            interval_producer=np.ascontiguousarray(right["producer_id"][order]),
            interval_first=np.ascontiguousarray(right["first_offset"][order]),
            interval_end=np.ascontiguousarray(right["last_offset"][order]),
            marker_offsets=np.ascontiguousarray(markers[:, 0]),
            marker_discard=markers[:, 1].astype(np.uint8),
            kept_offsets=np.ascontiguousarray(kept[:, kernels.MARKER]),
            kept_entries=np.ascontiguousarray(kept[:, kernels.OF_ENTRY]),
        )

    def _right_entries(self, aborts: np.ndarray) -> np.ndarray:
        """Return the entries of the ABORT markers `aborts`, sorted by first offset. Entries that the log does not
        contradict are unchanged (format/CLEANING.md, "Where the indexes are wrong")."""
        known, marker, data = self._entries, aborts[:, kernels.MARKER], aborts[:, kernels.DATA]
        entry_of = np.full(len(aborts), -1)
        if len(aborts):
            at = np.minimum(np.searchsorted(marker, known["last_offset"]), len(aborts) - 1)
            first = known["first_offset"]
            can_be = (marker[at] == known["last_offset"]) & (aborts[at, kernels.PRODUCER] == self._entry_producer)
            can_be &= (aborts[at, kernels.BEHIND] < first) & (first <= data[at])
            can_be &= ~self._named_offsets.are_occupied(first, known["producer_id"])
            which = np.flatnonzero(can_be)[::-1]
            entry_of[at[which]] = which  # of several entries of a marker, the first is used
        is_known = entry_of >= 0
        known_of = np.zeros(len(aborts), NATIVE_ENTRY)
        known_of[is_known] = known[entry_of[is_known]]
        first = np.where(is_known, known_of["first_offset"], data)
        # A transaction that began before a marker and ends after it was open at the marker.
        still_open = int(self._state[: len(self._number_of), kernels.FIRST_DATA].min(initial=kernels.NO_OFFSET))
        earliest = np.minimum(aborts[:, kernels.SINCE], first)
        later = np.append(earliest[1:], min(still_open, int(self._cursor[kernels.EARLIEST])))[: len(aborts)]
        stable = np.minimum(marker + 1, np.minimum.accumulate(later[::-1])[::-1])
        known_stable = known_of["last_stable_offset"]
        keeps = is_known & (known_stable >= 0) & (known_stable < stable)
        keeps[keeps] = (known_stable[keeps] < self._log_start) | ~self._named_offsets.are_occupied(known_stable[keeps])
        right = np.zeros(len(aborts), NATIVE_ENTRY)
        producer_ids = np.fromiter(self._number_of, np.int64, len(self._number_of))
        right["producer_id"] = producer_ids[aborts[:, kernels.PRODUCER]]
        right["first_offset"], right["last_offset"] = first, marker
        right["last_stable_offset"] = np.where(keeps, known_stable, stable)
        return sorted_entries(right[is_known | (data != kernels.NO_OFFSET)], self._log_start)


class _NamedOffsets:
    """The contents of the log at the offsets that the transaction indexes name: a batch of some producer, or
    nothing."""

    def __init__(self, offsets: np.ndarray) -> None:
        self._offsets = np.unique(offsets)
        self._is_taken = np.zeros(len(self._offsets), bool)
        self._begins = np.full(len(self._offsets), -1)  # producer id of transactional data that begins at the offset

    def record(self, table: np.ndarray) -> None:
        """Record the next batches of the log (BATCH_TABLE rows)."""
        if not len(table) or not len(self._offsets):
            return
        a = np.searchsorted(self._offsets, table["base_offset"][0])
        b = np.searchsorted(self._offsets, table["last_offset"][-1], side="right")
        if a == b:
            return
        offsets = self._offsets[a:b]
        rows = table[np.searchsorted(table["base_offset"], offsets, side="right") - 1]
        self._is_taken[a:b] |= offsets <= rows["last_offset"]
        is_data = rows["attributes"] & TRANSACTIONAL_OR_CONTROL == TRANSACTIONAL
        begins = is_data & (rows["base_offset"] == offsets)
        self._begins[a:b] = np.where(begins, rows["producer_id"], self._begins[a:b])

    def are_occupied(self, offsets: np.ndarray, producer_ids: np.ndarray | None = None) -> np.ndarray:
        """Return for each given offset whether it is inside a batch, except where transactional data of its producer
        begins."""
        at = np.searchsorted(self._offsets, offsets)
        taken = self._is_taken[at]
        return taken if producer_ids is None else taken & (self._begins[at] != producer_ids)


def _joined(parts: list[np.ndarray], columns: int) -> np.ndarray:
    return np.concatenate([*parts, np.empty((0, columns), np.int64)])
