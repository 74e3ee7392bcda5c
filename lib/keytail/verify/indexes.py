"""Checks the index files of a segment by themselves, and, after its batches were read, for entries without a batch."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from keytail.format import names
from keytail.format.batch import HEADER_BYTES
from keytail.format.index import OFFSET_ENTRY, TIME_ENTRY, parse_offset_index, parse_time_index
from keytail.kernels.verify import columns
from keytail.verify.scope import Scope

_UNINDEXED_BYTES = 1 << 20  # a larger segment of several batches must have offset index entries


@dataclass(frozen=True)
class Entries:
    """The entries of a segment's offset and time index, up to the first entry that does not ascend, as int64 arrays.
    `offsets` and `time_offsets` are absolute offsets, `base` is the segment's base offset."""

    base: int
    offsets: np.ndarray
    positions: np.ndarray
    times: np.ndarray
    time_offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) + len(self.times)

    def last_in_order(self) -> tuple[int, int]:
        """Return the numbers of the last offset entry, and of the first time entry that may refer to the same batch or
        a later batch; both are 0 if there is at most one offset entry."""
        at = max(len(self.offsets) - 1, 0)
        return at, int(np.searchsorted(self.time_offsets, self.offsets[at])) if at else 0

    def add_offset_entry(self, scope: Scope, i: int, *, at_batch: bool) -> None:
        """Add a finding about the offset of offset index entry `i` if a batch begins at the entry's position
        (`at_batch`); if not, add a finding about the position."""
        kind = "index-offset" if at_batch else "index-position"
        self._add(scope, kind, names.INDEX, OFFSET_ENTRY.itemsize * i, self.offsets[i], position=self.positions[i])

    def add_time_entry(self, scope: Scope, i: int, *, at_batch: bool) -> None:
        """Add a finding about the timestamp of time index entry `i` if a batch ends with the entry's offset
        (`at_batch`); if not, add a finding about the offset."""
        kind = "time-entry" if at_batch else "time-offset"
        self._add(scope, kind, names.TIME_INDEX, TIME_ENTRY.itemsize * i, self.time_offsets[i], timestamp=self.times[i])

    def _add(self, scope: Scope, kind: str, suffix: str, at: int, offset: int, **facts: int) -> None:
        facts = {name: int(value) for name, value in facts.items()}
        recovered = scope.is_recovered(self.base)
        file = names.segment_file(self.base, suffix)
        scope.findings.add(kind, file, at, int(offset), recovered=recovered, **facts)


def read_entries(scope: Scope, base: int) -> Entries:
    """Return the entries of the segment's index files, and add the findings about these files themselves."""
    log_bytes = scope.files[names.segment_file(base, names.LOG)].size_bytes
    index = parse_offset_index(_used_bytes(scope, base, names.INDEX, OFFSET_ENTRY.itemsize, log_bytes))
    pairs = np.column_stack((index["relative_offset"], index["position"])).astype(np.int64)
    pairs = pairs[: _ascending(scope, base, names.INDEX, pairs, OFFSET_ENTRY.itemsize, "index-order")]
    if scope.live and scope.is_active(base):  # entries may be newer than the size that was listed
        pairs = pairs[pairs[:, 1] < log_bytes]
    time_index = parse_time_index(_used_bytes(scope, base, names.TIME_INDEX, TIME_ENTRY.itemsize, log_bytes))
    times = np.column_stack((time_index["timestamp_ms"], time_index["relative_offset"])).astype(np.int64)
    times = times[: _ascending(scope, base, names.TIME_INDEX, times, TIME_ENTRY.itemsize, "time-order")]
    return Entries(
        base,
        offsets=np.ascontiguousarray(pairs[:, 0]) + base,
        positions=np.ascontiguousarray(pairs[:, 1]),
        times=np.ascontiguousarray(times[:, 0]),
        time_offsets=np.ascontiguousarray(times[:, 1]) + base,
    )


def _used_bytes(scope: Scope, base: int, suffix: str, entry_bytes: int, log_bytes: int) -> bytes:
    """Return the bytes of the file's used entries; empty if the file is missing or cannot be read. Add findings."""
    file = names.segment_file(base, suffix)
    time = "time-" if suffix == names.TIME_INDEX else ""
    recovered = scope.is_recovered(base)
    if file not in scope.files:
        if log_bytes > 0 and not scope.live:
            scope.findings.add(f"{time}index-missing", file, offset=base, recovered=recovered)
        return b""
    data = scope.read(file)
    if data is None:
        return b""
    rest = len(data) % entry_bytes
    if rest:
        at = len(data) - rest
        scope.findings.add("index-size", file, at, recovered=recovered, size=len(data), entry=entry_bytes)
        data = data[:at]
    used = -(-len(data.rstrip(b"\0")) // entry_bytes) * entry_bytes
    if time and len(data) == entry_bytes and used == 0 and _begins_at_zero(scope, base):
        return data
    # Until a clean shutdown, the file of the active segment is longer than its entries.
    presized = scope.is_active(base) and (scope.live or not scope.claims.clean_shutdown)
    if used < len(data) and not presized:
        kind = f"{time}index-{'zeros' if used == 0 else 'untrimmed'}"
        count = (len(data) - used) // entry_bytes
        scope.findings.add(kind, file, used, base, recovered=recovered, count=count)
    return data[:used]


def _begins_at_zero(scope: Scope, base: int) -> bool:
    """Return whether the first batch ends at the base offset and has timestamp 0: its time index entry is all zeros."""
    try:
        header = scope.fs.read_at(f"{scope.path}/{names.segment_file(base, names.LOG)}", 0, HEADER_BYTES)
    except OSError:
        return False
    if len(header) < 34 or struct.unpack_from(">q", header)[0] != base:
        return False
    if header[16] == 2 and len(header) == HEADER_BYTES:
        return struct.unpack_from(">i", header, 23) == (0,) and struct.unpack_from(">q", header, 35) == (0,)
    return header[16] == 1 and struct.unpack_from(">q", header, 18) == (0,)


def _ascending(scope: Scope, base: int, suffix: str, entries: np.ndarray, entry_bytes: int, kind: str) -> int:
    """Return the number of entries before the first entry that does not ascend in both columns or has a negative
    value; add a finding about that entry."""
    bad: np.ndarray = np.asarray((entries < 0).any(axis=1))
    bad[1:] |= (entries[1:] <= entries[:-1]).any(axis=1)
    if not bad.any():
        return len(entries)
    first = int(np.argmax(bad))
    file = names.segment_file(base, suffix)
    scope.findings.add(kind, file, entry_bytes * first, recovered=scope.is_recovered(base))
    return first


def check_ends(scope: Scope, entries: Entries, state: np.ndarray, batches: int) -> None:
    """After a complete walk, add findings about index entries that matched no batch (not in the active segment of a
    running broker), and about missing entries (not in an active segment without a clean shutdown). `state` is the
    kernel's state, `batches` the number of batches in the segment.
    """
    base, active = entries.base, scope.is_active(entries.base)
    unmet, largest_timestamp_ms = int(state[columns.INDEX_AT]), int(state[columns.MAX_TIMESTAMP])
    if not (scope.live and active):
        if state[columns.SET_IS_OPEN]:
            entries.add_offset_entry(scope, unmet - 1, at_batch=True)
        for i in range(unmet, len(entries.offsets)):
            entries.add_offset_entry(scope, i, at_batch=False)
        for i in range(int(state[columns.TIME_AT]), len(entries.times)):
            entries.add_time_entry(scope, i, at_batch=False)
    if active and (scope.live or not scope.claims.clean_shutdown):
        return
    recovered = scope.is_recovered(base)
    file = names.segment_file(base, names.TIME_INDEX)
    if file in scope.files and largest_timestamp_ms > max(entries.times, default=-1):
        at = TIME_ENTRY.itemsize * len(entries.times)
        scope.findings.add("time-incomplete", file, at, base, recovered=recovered, timestamp=largest_timestamp_ms)
    file = names.segment_file(base, names.INDEX)
    size_bytes = scope.files[names.segment_file(base, names.LOG)].size_bytes
    if file in scope.files and not len(entries.offsets) and batches > 2 and size_bytes > _UNINDEXED_BYTES:
        scope.findings.add("index-empty", file, 0, base, recovered=recovered, size=size_bytes)
