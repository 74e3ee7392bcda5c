"""The transactions of a partition, settled before anything is rewritten: aborted data, unneeded markers.

One ordered pass over checked batch headers and control records feeds a tracker; what it leaves is small and
says for any batch, in any order, whether it may be discarded (format/CLEANING.md, "Transactions"). Aborted
transactions come from the `.txnindex` files, and from the log itself where those are missing or contradict it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from keytail.errors import CorruptLog
from keytail.format import names
from keytail.format.index import TXN_ENTRY, encode_txn_index, parse_txn_index
from keytail.kernels import transactions as kernels
from keytail.log.fs import FileSystem
from keytail.log.partition import SegmentFacts

NATIVE_ENTRY = TXN_ENTRY.newbyteorder("=")


class Contradiction(Exception):
    """Log and transaction indexes do not agree at `offset`: the aborted transactions must come from the log."""

    def __init__(self, offset: int) -> None:
        super().__init__(offset)
        self.offset = offset


def read_aborted(
    fs: FileSystem, partition_path: str, segments: Sequence[SegmentFacts], log_start_offset: int
) -> np.ndarray:
    """All entries (TXN_ENTRY, native) that end at or above the log start offset, by first offset.

    Raises Contradiction for a file that cannot be an index of its segment.
    """
    found = [np.empty(0, NATIVE_ENTRY)]
    for segment in segments:
        if not segment.txn_index_bytes:
            continue
        path = os.path.join(partition_path, names.segment_file(segment.base_offset, names.TXN_INDEX))
        data = fs.read_bytes(path)
        entries = parse_txn_index(data)
        sane = (
            len(data) % TXN_ENTRY.itemsize == 0
            and (entries["version"] == 0).all()
            and (entries["last_offset"] >= segment.base_offset).all()
            and (entries["first_offset"] >= 0).all()
            and (entries["first_offset"] <= entries["last_offset"]).all()
            and (np.diff(entries["last_offset"]) > 0).all()
        )
        if not sane:
            raise Contradiction(segment.base_offset)
        found.append(entries)
    return sorted_entries(np.concatenate(found), log_start_offset)


def sorted_entries(entries: np.ndarray, log_start_offset: int) -> np.ndarray:
    """Those that end at or above the log start offset, by first offset; what lies below it is not served."""
    entries = entries[entries["last_offset"] >= log_start_offset]
    return entries[np.argsort(entries["first_offset"], kind="stable")]


@dataclass(frozen=True)
class Transactions:
    """What the pass over the log left. Intervals are sorted by producer id and first offset."""

    entries: np.ndarray
    interval_producer: np.ndarray
    interval_first: np.ndarray
    interval_end: np.ndarray
    marker_offsets: np.ndarray
    marker_discard: np.ndarray
    kept_offsets: np.ndarray
    kept_entries: np.ndarray

    def aborted(self, table: np.ndarray) -> np.ndarray:
        """For each batch (BATCH_TABLE rows): does it hold data of an aborted transaction?"""
        out = np.zeros(len(table), np.uint8)
        if len(self.interval_producer):
            kernels.aborted_rows(table, self.interval_producer, self.interval_first, self.interval_end, out)
        return out.view(bool)

    def unneeded_markers(self, table: np.ndarray) -> np.ndarray:
        """For each batch: is it a control batch whose transaction has no data left, nor an entry to keep?"""
        out = np.zeros(len(table), np.uint8)
        if len(self.marker_offsets):
            kernels.marker_flags(table, self.marker_offsets, self.marker_discard, out)
        return out.view(bool)

    def index_bytes(self, from_offset: int, to_offset: int) -> bytes:
        """The `.txnindex` of a segment that takes the markers of [from_offset, to_offset)."""
        a, b = np.searchsorted(self.kept_offsets, [from_offset, to_offset])
        return encode_txn_index(self.entries[self.kept_entries[a:b]])


class TransactionTracker:
    """Follows batches in the order of the log. Aborted transactions are `entries`, by first offset."""

    def __init__(self, entries: np.ndarray, log_start_offset: int) -> None:
        self._entries = entries
        self._log_start = log_start_offset
        self._number_of: dict[int, int] = {}
        self._state = np.empty((0, 4), np.int64)
        self._entry_producer = self._numbers(entries["producer_id"])
        self._entry_first = np.ascontiguousarray(entries["first_offset"])
        self._entry_last = np.ascontiguousarray(entries["last_offset"])
        self._cursor = np.array([0, 0, 0, 0, -1], np.int64)
        self._markers: list[np.ndarray] = []
        self._kept: list[np.ndarray] = []
        self._intervals: list[np.ndarray] = []

    def _numbers(self, producer_ids: np.ndarray) -> np.ndarray:
        distinct, inverse = np.unique(producer_ids, return_inverse=True)
        numbers = [self._number_of.setdefault(int(i), len(self._number_of)) for i in distinct]
        if len(self._state) < len(self._number_of):
            larger = np.tile(np.array([-1, 0, 0, -1], np.int64), (2 * len(self._number_of), 1))
            larger[: len(self._state)] = self._state
            self._state = larger
        return np.array(numbers, np.int64)[inverse]

    def follow(self, table: np.ndarray) -> np.ndarray:
        """The next batches of the log; for each (bool): aborted data, or a marker that nobody needs."""
        discard = np.zeros(len(table), np.uint8)
        special = (table["attributes"] & kernels.TRANSACTIONAL_OR_CONTROL) != 0
        if not special.any():
            return discard.view(bool)
        producers = np.zeros(len(table), np.int64)
        producers[special] = self._numbers(table["producer_id"][special])
        n_control = int(np.count_nonzero(table["attributes"] & kernels.CONTROL))
        markers, kept, intervals = (np.empty((n_control, 2), np.int64) for _ in range(3))
        self._cursor[kernels.MARKERS : kernels.CONTRADICTION] = 0
        kernels.track(
            table, producers, self._log_start, self._entry_first, self._entry_last, self._entry_producer,
            self._state, self._cursor, discard, markers, kept, intervals,
        )  # fmt: skip
        self._markers.append(markers[: self._cursor[kernels.MARKERS]].copy())
        self._kept.append(kept[: self._cursor[kernels.KEPT]].copy())
        self._intervals.append(intervals[: self._cursor[kernels.INTERVALS]].copy())
        return discard.view(bool)

    def finish(self) -> Transactions:
        """What is known after the last batch of the log; Contradiction if indexes and log do not agree."""
        if self._cursor[kernels.CONTRADICTION] >= 0:
            raise Contradiction(int(self._cursor[kernels.CONTRADICTION]))
        unended = self._state[: len(self._number_of), kernels.ENTRY]
        unended = unended[unended >= 0]
        if len(unended) or self._cursor[kernels.NEXT_ENTRY] < len(self._entries):
            first = int(unended[0]) if len(unended) else int(self._cursor[kernels.NEXT_ENTRY])
            raise Contradiction(int(self._entry_last[first]))
        markers, kept, intervals = (_joined(parts) for parts in (self._markers, self._kept, self._intervals))
        entries = self._entries[intervals[:, 0]]
        order = np.lexsort((entries["first_offset"], entries["producer_id"]))
        return Transactions(
            entries=self._entries,
            interval_producer=np.ascontiguousarray(entries["producer_id"][order]),
            interval_first=np.ascontiguousarray(entries["first_offset"][order]),
            interval_end=np.ascontiguousarray(intervals[order, 1]),
            marker_offsets=np.ascontiguousarray(markers[:, 0]),
            marker_discard=markers[:, 1].astype(np.uint8),
            kept_offsets=np.ascontiguousarray(kept[:, 0]),
            kept_entries=np.ascontiguousarray(kept[:, 1]),
        )


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([*parts, np.empty((0, 2), np.int64)])


def aborted_from_log(tables: Iterable[np.ndarray], known: np.ndarray, log_start_offset: int) -> np.ndarray:
    """The entries that a broker's recovery would write for these batches, the whole log in order.

    An entry of `known` that can be of the same transaction is taken as it is: its offsets may speak of batches
    that are gone. Raises CorruptLog for a marker without a known type.
    """
    same = {(int(e["producer_id"]), int(e["last_offset"])): e for e in known}
    open_from: dict[int, int] = {}
    ended_at: dict[int, int] = {}
    found = []
    for table in tables:
        for row in table[(table["attributes"] & kernels.TRANSACTIONAL_OR_CONTROL) != 0]:
            producer, base = int(row["producer_id"]), int(row["base_offset"])
            if not row["attributes"] & kernels.CONTROL:
                open_from.setdefault(producer, base)
            elif row["record_count"] and row["control_type"] in (kernels.ABORT, kernels.COMMIT):
                first = open_from.pop(producer, None)
                earlier_marker, ended_at[producer] = ended_at.get(producer, -1), base
                if first is None or row["control_type"] == kernels.COMMIT:
                    continue
                entry = np.zeros((), NATIVE_ENTRY)
                entry["producer_id"], entry["first_offset"], entry["last_offset"] = producer, first, base
                entry["last_stable_offset"] = min(open_from.values(), default=base + 1)
                old = same.get((producer, base))
                is_same = old is not None and earlier_marker < old["first_offset"] <= first
                found.append(old if is_same else entry)
            elif row["record_count"]:
                raise CorruptLog("a control batch is of no type that ends a transaction", offset=base)
    entries = np.array(found, NATIVE_ENTRY) if found else np.empty(0, NATIVE_ENTRY)
    return sorted_entries(entries, log_start_offset)
