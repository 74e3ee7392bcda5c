"""Dumps the index files of a segment and compares their entries with its log (format/DUMP.md).

Where Kafka's tool ends with an exception (no batch at an entry's position, no log), a finding is reported and the dump
continues.
"""

from __future__ import annotations

import os

import numpy as np

from keytail.dump.command import IndexChecks
from keytail.dump.range import offset_entries, used_entries
from keytail.dump.report import Report
from keytail.dump.segment import LogReader
from keytail.dump.templates import LineWriter, Literals, Rows, Template
from keytail.format import index, names
from keytail.format.batch import HEADER_BYTES
from keytail.kernels.dump import batches as kernels
from keytail.log.fs import FileSystem

_WINDOW_BYTES = 1 << 20
_PROBE_BYTES = 8 << 20
_NO_OFFSET = -1
_NO_TIMESTAMP = -1
_NOT_FOUND = -2


def dump_offset_index(fs: FileSystem, path: str, base: int, checks: IndexChecks, report: Report) -> None:
    data = fs.read_bytes(path)
    entries = index.parse_offset_index(data)
    if not len(entries):
        report.line(f"{path} is empty.", type="empty", file=path)
        _check_size(path, data, index.OFFSET_ENTRY.itemsize, report)
        return
    offsets = entries["relative_offset"].astype(np.int64) + base
    positions = entries["position"].astype(np.int64)
    if checks.sanity_only:
        _check_sanity(path, data, index.OFFSET_ENTRY.itemsize, offsets, base, report)
        return
    used = used_entries(offsets, base)
    _check_rising(path, index.OFFSET_ENTRY.itemsize, report, offsets[:used], positions[:used])
    with _Log(fs, path) as log:
        if not log.is_there:
            report.problem("there is no log for the index, so its entries are not checked", path)
        for i in range(used if log.is_there else 0):
            last, size_bytes = log.batch_at(int(positions[i]))
            where = index.OFFSET_ENTRY.itemsize * i
            if checks.max_message_size_bytes is not None and size_bytes > checks.max_message_size_bytes:
                what = f"the batch at byte {positions[i]} of the log has {size_bytes} bytes, more than "
                what += f"--max-message-size {checks.max_message_size_bytes}"
                report.problem(what, path, where, int(offsets[i]))
            if last is None:
                report.problem(f"no batch begins at byte {positions[i]} of the log", path, where, int(offsets[i]))
            elif last != offsets[i]:
                report.index_mismatch(path, int(offsets[i]), last)
    if not checks.verify_only:
        numbers = {"offset": offsets[:used], "position": positions[:used]}
        _write(report, "offsetIndexEntry", (("offset", "offset"), ("position", "position")), used, numbers)


def dump_time_index(fs: FileSystem, path: str, base: int, checks: IndexChecks, report: Report) -> None:
    data = fs.read_bytes(path)
    entries = index.parse_time_index(data)
    offsets = entries["relative_offset"].astype(np.int64) + base
    times = entries["timestamp_ms"]
    if checks.sanity_only:
        backwards = len(times) > 0 and times[-1] < times[0]
        if backwards:
            report.problem(f"the last timestamp {times[-1]} is less than the first timestamp {times[0]}", path)
        _check_sanity(path, data, index.TIME_ENTRY.itemsize, offsets, base, report, backwards)
        return
    used = used_entries(offsets, base)
    _check_rising(path, index.TIME_ENTRY.itemsize, report, offsets[:used])
    with _Log(fs, path) as log:
        if log.is_there:
            _check_times(fs, log, path, base, offsets[:used], times[:used], report)
        else:
            report.problem("there is no log for the index, so its entries are not checked", path)
    if not checks.verify_only:
        numbers = {"timestamp": times[:used], "offset": offsets[:used]}
        _write(report, "timeIndexEntry", (("timestamp", "timestamp"), ("offset", "offset")), used, numbers)


def dump_txn_index(fs: FileSystem, path: str, base: int, report: Report) -> None:
    data = fs.read_bytes(path)
    entries = index.parse_txn_index(data)
    unknown = np.flatnonzero(entries["version"] > 0)
    used = int(unknown[0]) if len(unknown) else len(entries)
    numbers = {name: entries[name][:used] for name in entries.dtype.names or ()}
    fields = (
        ("version", "version"),
        ("producerId", "producer_id"),
        ("firstOffset", "first_offset"),
        ("lastOffset", "last_offset"),
        ("lastStableOffset", "last_stable_offset"),
    )
    _write(report, "transactionIndexEntry", fields, used, numbers)
    size = index.TXN_ENTRY.itemsize
    _check_rising(path, size, report, entries["last_offset"][:used])
    if used and entries["last_offset"][0] < base:
        what = f"the last offset {entries['last_offset'][0]} is below the segment's base offset {base}"
        report.problem(what, path, 0)
    if used < len(entries):
        report.problem(f"an entry has the unknown version {entries['version'][used]}", path, size * used)
    _check_size(path, data, size, report)


def _check_rising(path: str, entry_bytes: int, report: Report, *columns: np.ndarray) -> None:
    """Report, for each column, the first entry that is not in ascending order: a search among such entries would fail.
    Kafka's tool does not check the order of offset index entries."""
    for column in columns:
        back = np.flatnonzero(np.diff(column) <= 0)
        if len(back):
            slot = int(back[0]) + 1
            what = f"entries are not in ascending order: {column[slot]} follows {column[slot - 1]}"
            report.problem(what, path, entry_bytes * slot)


def _check_size(path: str, data: bytes, entry_bytes: int, report: Report) -> bool:
    rest = len(data) % entry_bytes
    if rest:
        what = f"the size of the file, {len(data)} bytes, is not a multiple of the entry size {entry_bytes}"
        report.problem(what, path, len(data) - rest)
    return not rest


def _check_sanity(
    path: str, data: bytes, entry_bytes: int, offsets: np.ndarray, base: int, report: Report, wrong: bool = False
) -> None:
    if len(offsets) and offsets[-1] < base:
        report.problem(f"the last offset {offsets[-1]} is less than the base offset", path, None, base)
        wrong = True
    if _check_size(path, data, entry_bytes, report) and not wrong:
        report.line(f"{path} passed sanity check.", type="sane", file=path)


def _write(
    report: Report, kind: str, fields: tuple[tuple[str, str], ...], count: int, numbers: dict[str, np.ndarray]
) -> None:
    literals = Literals()
    line = Template(literals)
    if report.as_json:
        line.text(f'{{"type":"{kind}"')
        for shown, name in fields:
            line.number(f',"{shown}":', name)
        line.text("}\n")
    else:
        for i, (shown, name) in enumerate(fields):
            line.number(f"{' ' if i else ''}{shown}: ", name)
        line.text("\n")
    LineWriter(report.out, literals).write(line, Rows(count, numbers))


def _check_times(
    fs: FileSystem, log: _Log, path: str, base: int, offsets: np.ndarray, times: np.ndarray, report: Report
) -> None:
    index_path = os.path.splitext(path)[0] + names.INDEX
    floor_offsets, floor_positions, why = offset_entries(fs, index_path, base)
    if why:
        report.note(why)
    slots = np.searchsorted(floor_offsets, offsets, side="right") - 1
    previous = -1
    found: list[tuple[int, bytes]] = []
    largest: dict[int, int] = {}
    size = at = 0
    for i, target in enumerate(offsets.tolist()):
        start = int(floor_positions[slots[i]]) if slots[i] >= 0 else 0
        # Entries ascend, and so do the positions of their batches, so the same batches are not read again.
        if i and target > int(offsets[i - 1]):
            start = max(start, at)
        at, size_bytes, last = log.find(start, target)
        if last == target:
            found.append((i, log.read(at, size_bytes)))
            size += size_bytes
        else:
            at = 0
            largest[i] = _NOT_FOUND
            report.time_offset(path, target, last)
        if size >= _PROBE_BYTES:
            largest |= _largest(fs, found, times)
            found, size = [], 0
    largest |= _largest(fs, found, times)
    for i, time in enumerate(times.tolist()):
        if largest[i] == _NOT_FOUND:
            previous = time
            continue
        if largest[i] != time:
            report.time_mismatch(path, time, largest[i])
        if previous >= time:
            report.time_order(path, time, previous)
        previous = time


def _largest(fs: FileSystem, found: list[tuple[int, bytes]], times: np.ndarray) -> dict[int, int]:
    """Return the largest timestamp of each batch's records by entry number; -1 for a batch without records, as in
    Kafka.

    A batch that a cleaner emptied retains the timestamp in its header, which is returned if it equals the entry's
    timestamp.
    """
    if not found:
        return {}
    raw = np.frombuffer(bytearray().join(data for _, data in found), np.uint8)
    largest: list[int] = []
    for part in LogReader(fs).parts_of(raw):
        assert part.records is not None
        stamps, first = part.records.records["timestamp_ms"], part.first_record
        for row, batch in enumerate(part.batches):
            some = stamps[first[row] : first[row + 1]]
            newest = int(some.max(initial=_NO_TIMESTAMP))
            if part.continues:
                largest[-1] = max(largest[-1], newest)
                continue
            largest.append(newest)
            emptied = batch["magic"] >= 2 and batch["record_count"] == 0
            expected = int(times[found[len(largest) - 1][0]])
            if emptied and int(batch["max_timestamp_ms"]) == expected:
                largest[-1] = expected
    return {i: time for (i, _), time in zip(found, largest, strict=True)}


class _Log:
    """Reads single batches of the log beside an index file."""

    def __init__(self, fs: FileSystem, index_path: str) -> None:
        self._fs = fs
        self.path = os.path.splitext(index_path)[0] + names.LOG
        self._window = np.empty(0, np.uint8)
        self._position = 0
        self._out = np.zeros(4, np.int64)

    def __enter__(self) -> _Log:
        self.is_there = self._fs.exists(self.path)
        if self.is_there:
            self._fd = self._fs.open_read(self.path)
            self._size = self._fs.fd_stat(self._fd).size_bytes
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_there:
            self._fs.close(self._fd)

    def read(self, position: int, size: int) -> bytes:
        buffer = bytearray(size)
        return bytes(buffer[: self._fs.read_into(self._fd, buffer, position)])

    def batch_at(self, position: int) -> tuple[int | None, int]:
        """Return the last offset and the size in bytes of the batch that begins at `position`; (None, 0) if there is no
        complete batch."""
        if not 0 <= position < self._size:
            return None, 0
        head = np.frombuffer(self.read(position, HEADER_BYTES), np.uint8)
        kernels.find_batch(head, len(head), 0, -(2**63), self._out)
        code, _, size, last = (int(x) for x in self._out)
        return (last, size) if code == kernels.FOUND and position + size <= self._size else (None, 0)

    def find(self, position: int, target: int) -> tuple[int, int, int]:
        """Return position, size and last offset of the first batch from `position` on that ends at `target` or above.

        The last offset is -1 if there is no such batch.
        """
        while position < self._size:
            start = position - self._position
            if start < 0 or len(self._window) - start < HEADER_BYTES:
                self._window = np.frombuffer(self.read(position, _WINDOW_BYTES), np.uint8)
                self._position, start = position, 0
            kernels.find_batch(self._window, len(self._window), start, target, self._out)
            code, at, size, last = (int(x) for x in self._out)
            at += self._position
            if code == kernels.FOUND and at + size <= self._size:
                return at, size, last
            if code != kernels.CONTINUE or at == position:
                break
            position = at
        return 0, 0, _NO_OFFSET
