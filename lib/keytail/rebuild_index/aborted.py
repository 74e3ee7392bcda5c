"""The transaction indexes that a log should have: which batches say so, and what they say together.

Tasks that read a part of a log each hand on the few batches that matter (`Needed`); all of these in the order of
the log, and the entries that are on disk, give the right entries (`right_entries`). What a log can say, and which
entries are believed beyond that, is format/CLEANING.md, "Where the indexes are wrong".
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from keytail.format.batch import BATCH_TABLE
from keytail.kernels.transactions import ABORT, COMMIT, CONTROL, TRANSACTIONAL, TRANSACTIONAL_OR_CONTROL
from keytail.log.transactions import Contradiction, TransactionTracker, sorted_entries

# Rows kept in hand before those that later ones made needless are looked for again.
_MANY_ROWS = 1 << 16


def asked_offsets(entries: np.ndarray) -> np.ndarray:
    """Of which offsets (int64, ascending) it must be known what lies there, to judge these entries."""
    return np.unique(np.concatenate([entries["first_offset"], entries["last_stable_offset"]]))


class Needed:
    """Of the batches of a part of a log, those that say what was aborted there, or lie at an asked offset.

    Of the data between two markers of a producer that is the first batch, and the first that reaches the log start
    offset. Where nothing was aborted, what ended within the part says nothing about entries of others.
    """

    def __init__(self, asked: np.ndarray, log_start_offset: int) -> None:
        self._asked = asked
        self._log_start = log_start_offset
        self._parts: list[np.ndarray] = []
        self._rows = 0

    def add(self, table: np.ndarray) -> None:
        """The next batches (BATCH_TABLE rows)."""
        wanted = (table["attributes"] & TRANSACTIONAL_OR_CONTROL) != 0
        if len(self._asked) and len(table):
            first, end = np.searchsorted(self._asked, [table["base_offset"][0], table["last_offset"][-1] + 1])
            if first < end:
                wanted |= self._holds_asked(table)
        if not wanted.any():
            return
        self._parts.append(self._first_of_runs(table[wanted]))
        self._rows += len(self._parts[-1])
        if self._rows > _MANY_ROWS:
            rows = self._first_of_runs(np.concatenate(self._parts))
            self._parts, self._rows = [rows], len(rows) // 2  # again after as many more at least

    def rows(self) -> np.ndarray:
        """The batches that are needed, in order."""
        rows = self._first_of_runs(np.concatenate([*self._parts, np.empty(0, BATCH_TABLE)]))
        is_marker = _is_marker(rows)
        if (is_marker & (rows["control_type"] == ABORT)).any():
            return rows
        return self._first_and_last(rows, is_marker)

    def _holds_asked(self, rows: np.ndarray) -> np.ndarray:
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
        return rows[needed | self._holds_asked(rows)]

    def _first_and_last(self, rows: np.ndarray, is_marker: np.ndarray) -> np.ndarray:
        """Without what each producer wrote between its first marker and its last one."""
        if not is_marker.any():
            return rows
        _, producer = np.unique(rows["producer_id"], return_inverse=True)
        number = np.arange(len(rows))
        first = np.full(producer.max() + 1, len(rows))
        last = np.full(producer.max() + 1, -1)
        np.minimum.at(first, producer[is_marker], number[is_marker])
        np.maximum.at(last, producer[is_marker], number[is_marker])
        return rows[(number <= first[producer]) | (number >= last[producer]) | self._holds_asked(rows)]


def _is_marker(rows: np.ndarray) -> np.ndarray:
    is_control = ((rows["attributes"] & CONTROL) != 0) & (rows["record_count"] > 0)
    return is_control & ((rows["control_type"] == ABORT) | (rows["control_type"] == COMMIT))


def right_entries(
    parts: Iterable[np.ndarray], known: np.ndarray, first_offset: int, log_start_offset: int
) -> np.ndarray:
    """All entries (TXN_ENTRY, native, by their markers) that the indexes of a log should have.

    `parts` are the needed batches of its parts, in order; `known` the entries on disk, by first offset;
    `first_offset` the base of its first segment. Nobody is served what lies below the log start offset, and a log
    that was cleaned says less of it; but the log start offset may be lost, so entries for it are kept as well.
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
