"""Computes the transaction indexes that a log should have, from the few batches that determine them.

Each task that reads a part of a log returns the batches that are needed (`Needed`). From all of these batches in the
order of the log, and the entries on disk, `right_entries` computes the correct entries. format/CLEANING.md,
"Where the indexes are wrong", describes what can be derived from a log, and which other entries are trusted.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from keytail.format.batch import BATCH_TABLE
from keytail.kernels.batch_header import CONTROL, TRANSACTIONAL, TRANSACTIONAL_OR_CONTROL
from keytail.kernels.transactions import ABORT, COMMIT
from keytail.log.transactions import Contradiction, TransactionTracker, sorted_entries

# Number of buffered rows above which rows are removed that later rows have made unnecessary.
_MANY_ROWS = 1 << 16


def asked_offsets(entries: np.ndarray) -> np.ndarray:
    """Return the offsets (int64, ascending) whose batches are needed to check these entries."""
    return np.unique(np.concatenate([entries["first_offset"], entries["last_stable_offset"]]))


class Needed:
    """Selects the batches of a part of a log that show which transactions were aborted in it, or that contain one of
    the `asked` offsets.

    Of the data between two markers of a producer, the first batch is needed, and the first batch that reaches the log
    start offset. If the part contains no ABORT marker, batches between a producer's first and last marker are omitted:
    such batches do not affect entries of other parts.
    """

    def __init__(self, asked: np.ndarray, log_start_offset: int) -> None:
        self._asked = asked
        self._log_start = log_start_offset
        self._parts: list[np.ndarray] = []
        self._rows = 0

    def add(self, table: np.ndarray) -> None:
        """Add the next batches (BATCH_TABLE rows)."""
        wanted = (table["attributes"] & TRANSACTIONAL_OR_CONTROL) != 0
        if len(self._asked) and len(table):
            first, end = np.searchsorted(self._asked, [table["base_offset"][0], table["last_offset"][-1] + 1])
            if first < end:
                wanted |= self._contains_asked(table)
        if not wanted.any():
            return
        self._parts.append(self._first_of_runs(table[wanted]))
        self._rows += len(self._parts[-1])
        if self._rows > _MANY_ROWS:
            rows = self._first_of_runs(np.concatenate(self._parts))
            self._parts, self._rows = [rows], len(rows) // 2  # half are counted, to delay the next removal

    def rows(self) -> np.ndarray:
        """Return the needed batches, in order."""
        rows = self._first_of_runs(np.concatenate([*self._parts, np.empty(0, BATCH_TABLE)]))
        is_marker = _is_marker(rows)
        if (is_marker & (rows["control_type"] == ABORT)).any():
            return rows
        return self._first_and_last(rows, is_marker)

    def _contains_asked(self, rows: np.ndarray) -> np.ndarray:
        first = np.searchsorted(self._asked, rows["base_offset"])
        return first < np.searchsorted(self._asked, rows["last_offset"], side="right")

    def _first_of_runs(self, rows: np.ndarray) -> np.ndarray:
        order = np.argsort(rows["producer_id"], kind="stable")
        by_producer = rows[order]
        is_data = (by_producer["attributes"] & TRANSACTIONAL_OR_CONTROL) == TRANSACTIONAL
        reaches = by_producer["last_offset"] >= self._log_start
        again = (by_producer["producer_id"][1:] == by_producer["producer_id"][:-1]) & is_data[1:] & is_data[:-1]
        again &= reaches[:-1] | ~reaches[1:]
        needed = np.ones(len(rows), bool)
        needed[order[1:][again]] = False
        return rows[needed | self._contains_asked(rows)]

    def _first_and_last(self, rows: np.ndarray, is_marker: np.ndarray) -> np.ndarray:
        """Return the rows without the batches of each producer between its first and its last marker."""
        if not is_marker.any():
            return rows
        _, producer = np.unique(rows["producer_id"], return_inverse=True)
        number = np.arange(len(rows))
        first = np.full(producer.max() + 1, len(rows))
        last = np.full(producer.max() + 1, -1)
        np.minimum.at(first, producer[is_marker], number[is_marker])
        np.maximum.at(last, producer[is_marker], number[is_marker])
        return rows[(number <= first[producer]) | (number >= last[producer]) | self._contains_asked(rows)]


def _is_marker(rows: np.ndarray) -> np.ndarray:
    is_control = ((rows["attributes"] & CONTROL) != 0) & (rows["record_count"] > 0)
    return is_control & ((rows["control_type"] == ABORT) | (rows["control_type"] == COMMIT))


def right_entries(
    parts: Iterable[np.ndarray], known: np.ndarray, first_offset: int, log_start_offset: int
) -> np.ndarray:
    """Return all entries (TXN_ENTRY, native, in the order of their markers) that the indexes of a log should have.

    `parts` are the needed batches of the log's parts, in order; `known` are the entries on disk, by first offset;
    `first_offset` is the base offset of the log's first segment. Entries below the log start offset are not served, and
    a cleaned log contains less evidence for them. Such entries are retained nevertheless, because the log start offset
    may be lost.
    """
    rows = np.concatenate([*parts, np.empty(0, BATCH_TABLE)])
    entries = _entries(rows, known, log_start_offset)
    if log_start_offset > first_offset:
        below = _entries(rows, known, first_offset)
        entries = np.concatenate([below[below["last_offset"] < log_start_offset], entries])
    return entries[np.argsort(entries["last_offset"], kind="stable")]


def _entries(rows: np.ndarray, known: np.ndarray, log_start_offset: int) -> np.ndarray:
    tracker = TransactionTracker(sorted_entries(known, log_start_offset), log_start_offset)
    tracker.follow(rows)
    try:
        return tracker.finish().entries
    except Contradiction as contradiction:
        return contradiction.entries
