"""Compares the producer batches of a log with its producer snapshots and transaction indexes.

Cleaning removes records, so only facts that it preserves are checked: every batch in the log was written before the
snapshots above it, a marker is removed only after its data, and an index entry is removed when its marker is, or before
(VERIFY.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from keytail.format import names
from keytail.format.index import TXN_ENTRY, parse_txn_index
from keytail.format.producers import ProducerEntry, check_snapshot, parse_snapshot
from keytail.kernels.batch_header import TRANSACTIONAL_OR_CONTROL
from keytail.kernels.verify import columns
from keytail.kernels.verify import producers as kernels
from keytail.verify.scope import Scope

_SNAPSHOT_HEAD_BYTES, _SNAPSHOT_ENTRY_BYTES = 10, 46
T = TypeVar("T")


class ProducerChecks:
    """Checks the batches of a partition's producers. Pass the batches in order, and call `close_segment` after each
    segment and `close` at the end."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._snapshots = scope.offsets_of(names.SNAPSHOT)
        self._numbers: dict[int, int] = {}
        self._ids: list[int] = []
        self._state = np.full((16, kernels.STATE_COLUMNS), -1, dtype=np.int64)
        self._markers: list[np.ndarray] = []
        # The highest last stable offset of the entries so far: (offset, file, byte position of the entry).
        self._highest_stable: tuple[int, str, int] | None = None
        self.index_entries = 0

    def on_batches(self, base: int, rows: np.ndarray) -> None:
        """Check the next batches (columns ROW_... of the kernel), of the segment at `base`."""
        if not len(rows):
            return
        while self._snapshots and self._snapshots[0] <= rows[-1, columns.ROW_BASE]:
            at = self._snapshots.pop(0)
            split = int(np.searchsorted(rows[:, columns.ROW_BASE], at))
            self._follow(base, rows[:split])
            rows = rows[split:]
            if at > self._scope.log_start:
                self._check_snapshot(at)
            else:
                self._read_snapshot(at, check_snapshot)  # a broker that starts removes this snapshot
        self._follow(base, rows)

    def _follow(self, base: int, rows: np.ndarray) -> None:
        if not len(rows):
            return
        ids, inverse = np.unique(rows[:, columns.ROW_PRODUCER], return_inverse=True)
        numbers = np.array([self._number(int(producer)) for producer in ids], dtype=np.int64)[inverse]
        markers = np.empty((len(rows), kernels.MARKER_COLUMNS), dtype=np.int64)
        first = 0
        while first < len(rows):
            written, first_after = kernels.follow(rows, numbers, first, self._scope.log_start, self._state, markers)
            self._markers.append(markers[:written].copy())
            if first_after < len(rows) or self._is_outside(rows[-1], numbers[-1]):
                self._add_outside(base, rows[first_after - 1], numbers[first_after - 1])
            first = first_after

    def _is_outside(self, row: np.ndarray, number: int) -> bool:
        """Return whether the row is data outside of a transaction while its producer has an open transaction."""
        return (
            row[columns.ROW_ATTRIBUTES] & TRANSACTIONAL_OR_CONTROL == 0
            and row[columns.ROW_LAST] >= self._scope.log_start
            and self._state[number, kernels.OPEN_FROM] >= 0
        )

    def _add_outside(self, base: int, row: np.ndarray, number: int) -> None:
        state = self._state[number]
        self._scope.findings.add(
            "transaction", names.segment_file(base, names.LOG), int(row[columns.ROW_POSITION]),
            int(row[columns.ROW_BASE]), producer=self._ids[number], first=int(state[kernels.OPEN_FROM]),
        )  # fmt: skip
        state[kernels.OPEN_FROM] = -1  # report the transaction only once

    def _number(self, producer_id: int) -> int:
        number = self._numbers.setdefault(producer_id, len(self._ids))
        if number == len(self._ids):
            self._ids.append(producer_id)
            if number == len(self._state):
                self._state = np.vstack((self._state, np.full_like(self._state, -1)))
        return number

    # Snapshots

    def _check_snapshot(self, at: int) -> None:
        file = names.segment_file(at, names.SNAPSHOT)
        entries = self._read_snapshot(at, parse_snapshot)
        if entries is None:
            return
        known = set()
        for i, entry in enumerate(entries):
            known.add(entry.producer_id)
            number = self._numbers.get(entry.producer_id)
            reason = _impossibility(entry, at)
            if not reason and number is not None:
                reason = _contradiction(entry, self._state[number])
            if reason:
                position = _SNAPSHOT_HEAD_BYTES + _SNAPSHOT_ENTRY_BYTES * i
                self._scope.findings.add(
                    "snapshot-entry", file, position, at, producer=entry.producer_id, reason=reason
                )
        opened = self._state[: len(self._ids), kernels.OPEN_FROM]
        for still_open in map(int, np.flatnonzero(opened >= 0)):
            producer = self._ids[still_open]
            if producer not in known:
                reason = f"it has no entry, but in the log its transaction was opened at offset {opened[still_open]}"
                self._scope.findings.add("snapshot-entry", file, None, at, producer=producer, reason=reason)

    def _read_snapshot(self, at: int, parse: Callable[[bytes], T]) -> T | None:
        """Return the parsed snapshot at offset `at`. If the snapshot is not valid, return None and add a finding."""
        file = names.segment_file(at, names.SNAPSHOT)
        data = self._scope.read(file)
        try:
            return None if data is None else parse(data)
        except ValueError as problem:
            self._scope.findings.add("snapshot", file, 0, at, reason=str(problem))
            return None

    # Transaction indexes

    def close_segment(self, base: int, *, is_valid: bool) -> None:
        """Compare the segment's transaction index with its markers; `is_valid`: the segment's batches are valid."""
        found = np.concatenate(self._markers) if self._markers else np.empty((0, kernels.MARKER_COLUMNS), np.int64)
        self._markers = []
        aborts = found[found[:, kernels.MARKER_ABORTS] == 1]
        entries = self._read_index(base)
        if not is_valid or entries is None:
            return
        file = names.segment_file(base, names.TXN_INDEX)
        places = np.searchsorted(aborts[:, kernels.MARKER_OFFSET], entries["last_offset"])
        of_marker = np.full(len(aborts), -1, dtype=np.int64)
        for i, entry in enumerate(entries):
            marker = aborts[places[i]] if places[i] < len(aborts) else None
            if marker is not None and (entry["last_offset"], entry["producer_id"]) == (
                marker[kernels.MARKER_OFFSET], self._ids[marker[kernels.MARKER_PRODUCER]]
            ):  # fmt: skip
                of_marker[places[i]] = i
            else:
                self._add(base, "txn-no-marker", file, i, int(entry["last_offset"]), producer=int(entry["producer_id"]))
        for marker, of in zip(aborts, of_marker, strict=True):
            self._check_abort(base, file, marker, None if of < 0 else entries[of], int(of))

    def _check_abort(self, base: int, file: str, marker: np.ndarray, entry: np.void | None, i: int) -> None:
        """Check one ABORT marker, and its entry if it has one."""
        at, first = int(marker[kernels.MARKER_OFFSET]), int(marker[kernels.MARKER_DATA])
        producer = self._ids[marker[kernels.MARKER_PRODUCER]]
        if first >= 0 and self._highest_stable is not None and first < self._highest_stable[0]:
            # A look-up of this data ends at that entry, before it reaches the entry of this marker.
            stable, earlier, position = self._highest_stable
            self._scope.findings.add("txn-stable-offset", earlier, position, at, stated=stable, most=first)
            self._highest_stable = None
        if entry is None:
            # The log start offset of a running broker may have advanced since it was checkpointed.
            if first >= 0 and at >= self._scope.log_start and not self._scope.live:
                self._add(base, "txn-no-entry", file, None, at, producer=producer, first=first)
            return
        if 0 <= first < entry["first_offset"]:
            self._add(base, "txn-first-offset", file, i, at, stated=int(entry["first_offset"]), first=first)
        stable = int(entry["last_stable_offset"])
        if stable > at + 1:
            self._add(base, "txn-stable-offset", file, i, at, stated=stable, most=at + 1)
        elif self._highest_stable is None or stable > self._highest_stable[0]:
            self._highest_stable = stable, file, TXN_ENTRY.itemsize * i

    def _read_index(self, base: int) -> np.ndarray | None:
        """Return the entries (TXN_ENTRY); an empty array if there is no file. Return None if the file cannot be read,
        has an invalid entry, or may contain entries of batches that were not read (running broker)."""
        file = names.segment_file(base, names.TXN_INDEX)
        if file not in self._scope.files:
            return np.empty(0, TXN_ENTRY)
        data = self._scope.read(file)
        if data is None:
            return None
        recovered = self._scope.is_recovered(base)
        rest = len(data) % TXN_ENTRY.itemsize
        if rest:
            size, entry_bytes = len(data), TXN_ENTRY.itemsize
            self._scope.findings.add(
                "index-size", file, len(data) - rest, recovered=recovered, size=size, entry=entry_bytes
            )
        entries = parse_txn_index(data)
        bad = (entries["version"] != 0) | (entries["first_offset"] > entries["last_offset"])
        bad |= np.diff(entries["last_offset"], prepend=base - 1) <= 0
        count = int(np.argmax(bad)) if bad.any() else len(entries)
        if count < len(entries):
            self._add(base, "txn-entry", file, count, int(entries["last_offset"][count]))
            return None
        self.index_entries += count
        if self._scope.live and self._scope.is_active(base):  # entries may be newer than the bytes that were walked
            return None
        return entries

    def _add(self, base: int, kind: str, file: str, i: int | None, offset: int, **facts: int | str) -> None:
        position = None if i is None else TXN_ENTRY.itemsize * i
        recovered = self._scope.is_recovered(base)
        self._scope.findings.add(kind, file, position, offset, recovered=recovered, **facts)

    def close(self, log_end_offset: int, *, is_valid: bool, is_whole: bool = True) -> None:
        """Check the remaining snapshots after all batches, and whether there are any; `is_valid`: all batches up to the
        log end are valid.
        `is_whole`: all batches were read; if not, entries of snapshots are not compared with them."""
        for at in self._snapshots:
            if at > log_end_offset and not self._scope.live and is_valid:
                file = names.segment_file(at, names.SNAPSHOT)
                self._scope.findings.add("snapshot-beyond", file, offset=at, end=log_end_offset)
            elif at <= log_end_offset and is_valid and is_whole and at > self._scope.log_start:
                self._check_snapshot(at)
            else:
                self._read_snapshot(at, check_snapshot)
        some = self._scope.offsets_of(names.SNAPSHOT)
        if self._ids and not some and self._scope.claims.clean_shutdown and not self._scope.live:
            self._scope.findings.add("snapshots-missing", "")


def _impossibility(entry: ProducerEntry, at: int) -> str:
    """Return the reason why no broker writes `entry` into a snapshot at offset `at`; empty if a broker may write it."""
    if entry.last_offset >= at:
        return f"its last offset {entry.last_offset} is not below the offset of the snapshot"
    if entry.current_txn_first_offset >= at:
        first = entry.current_txn_first_offset
        return f"its open transaction begins at offset {first}, which is not below the offset of the snapshot"
    if entry.last_offset >= 0 and not 0 <= entry.offset_delta <= entry.last_offset:
        return (
            f"its last batch, which ends with offset {entry.last_offset}, has an offset delta of {entry.offset_delta}"
        )
    return ""


def _contradiction(entry: ProducerEntry, state: np.ndarray) -> str:
    """Return how an entry contradicts the batches below the snapshot (their `state`); "" if it does not.

    Batches may have been removed, so an entry with a later state than `state` is no contradiction.
    """
    epoch, sequence, last, delta, opened, marker = (int(value) for value in state)
    if entry.epoch < epoch:
        return f"its epoch is {entry.epoch}, but the log has batches of epoch {epoch}"
    if entry.epoch == epoch and 0 <= entry.last_offset < last:
        return f"its last offset is {entry.last_offset}, but the log has data up to offset {last}"
    if 0 <= last == entry.last_offset and (entry.last_sequence, entry.offset_delta) != (sequence, delta):
        return (
            f"its last batch has last sequence {entry.last_sequence} and offset delta {entry.offset_delta}, but in "
            f"the log they are {sequence} and {delta}"
        )
    current = entry.current_txn_first_offset
    if opened >= 0 and current < 0:
        return f"it has no open transaction, but in the log a transaction has been open since offset {opened}"
    if opened >= 0 and current > opened:
        return f"its open transaction begins at offset {current}, but in the log at offset {opened} or before"
    if 0 <= current < marker:
        return f"its transaction has been open since offset {current}, but in the log it ended at offset {marker}"
    return ""
