"""Reads the segments of a partition, calls the kernel that checks their batches, and adds the findings.

Valid batches are passed to the caller, which compares the log with other files.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from keytail.errors import KeytailError, Refused
from keytail.format import names
from keytail.format.batch import HEADER_BYTES, LENGTH_PREFIX_BYTES
from keytail.format.legacy import summarize
from keytail.kernels.verify import codes, columns
from keytail.kernels.verify.batches import inspect
from keytail.limits import max_record_bytes
from keytail.log.records.block_check import check_block
from keytail.log.window import Window
from keytail.verify.findings import Findings
from keytail.verify.indexes import Entries, check_ends
from keytail.verify.scope import Scope

_BEYOND_ALL = 2**63 - 1
_ROWS, _RUNS = 16384, 1024
_KINDS = {
    codes.CRC: "checksum",
    codes.ORDER: "offset-order",
    codes.SEGMENT_RANGE: "offset-range",
    codes.NEXT_SEGMENT: "overlap",
    codes.CODEC: "codec",
    codes.COUNT: "record-count",
    codes.RECORD: "record",
    codes.RECORD_OFFSET: "record-offset",
    codes.RECORD_TIMESTAMP: "record-timestamp",
    codes.MAX_TIMESTAMP_OFF: "max-timestamp",
    codes.PRODUCER: "producer",
    codes.CONTROL_UNREADABLE: "control",
}
# A batch with a wrong timestamp is otherwise valid.
_HARMLESS = {codes.RECORD_TIMESTAMP, codes.MAX_TIMESTAMP_OFF}

# Called with a segment's base offset, and with the rows and runs that the kernel (kernels/verify/batches.py) wrote.
OnBatches = Callable[[int, np.ndarray, np.ndarray], None]


class BatchWalk:
    """Reads and checks the segments of one partition, in the order of their base offsets. `only_ends`: of each segment,
    only the batches from its last offset index entry on are read, unless a starting broker reads the whole segment, or
    the place of a finding at its end must be determined.
    """

    def __init__(self, scope: Scope, on_result: OnBatches, *, only_ends: bool = False) -> None:
        self.scope = scope
        self._on_batches = on_result
        self._only_ends = only_ends
        self._trial = replace(scope, findings=Findings(scope.path))
        self._window = Window(scope.fs)
        self._state = np.zeros(columns.STATE_SIZE, dtype=np.int64)
        self._state[columns.LAST_OFFSET] = -1
        self._rows = np.empty((_ROWS, columns.ROW_COLUMNS), dtype=np.int64)
        self._runs = np.empty((_RUNS, columns.RUN_COLUMNS), dtype=np.int64)
        self._scratch = np.zeros(6, dtype=np.int64)
        self._base = 0
        self.bytes_read = 0

    @property
    def last_offset(self) -> int:
        """The last offset of all batches so far; -1 before the first batch."""
        return int(self._state[columns.LAST_OFFSET])

    @property
    def batches(self) -> int:
        return int(self._state[columns.BATCHES])

    @property
    def records(self) -> int:
        return int(self._state[columns.RECORDS])

    @property
    def has_invalid_batch(self) -> bool:
        """Whether an invalid batch was found, or a segment, except the active one of a running broker, was not read to
        its end; later batches are not passed on."""
        return bool(self._state[columns.SPOILED])

    @property
    def without_epoch(self) -> int:
        """The number of batches without a leader epoch."""
        return int(self._state[columns.WITHOUT_EPOCH])

    def close(self) -> None:
        self._window.close()

    def segment(self, base: int, next_base: int | None, entries: Entries) -> None:
        """Check the segment at `base`, and if its end is reached, the ends of its indexes."""
        bounds = base, _BEYOND_ALL if next_base is None else next_base
        if not (self._only_ends and not self.scope.is_recovered(base) and self._has_good_end(bounds, entries)):
            self._inspect(bounds, entries)

    def _has_good_end(self, bounds: tuple[int, int], entries: Entries) -> bool:
        """Check only the batches from the last offset index entry on. If anything is found there, restore the earlier
        state and return False: the finding and its place are known only after the whole segment is read.
        """
        scope, state, on_batches, bytes_read = self.scope, self._state.copy(), self._on_batches, self.bytes_read
        passed: list[tuple[int, np.ndarray, np.ndarray]] = []
        self.scope, self.scope.findings = self._trial, Findings(scope.path)
        self._on_batches = lambda base, rows, runs: passed.append((base, rows.copy(), runs.copy()))
        try:
            is_good = self._inspect(bounds, entries, entries.last_in_order()) and not self.scope.findings.found
        finally:
            self.scope, self._on_batches = scope, on_batches
        if not is_good:
            self._state, self.bytes_read = state, bytes_read
            return False
        for item in passed:
            on_batches(*item)
        return True

    def _inspect(self, bounds: tuple[int, int], entries: Entries, first: tuple[int, int] = (0, 0)) -> bool:
        """Check the segment from the batch to which the `first` entries of its indexes refer (from the beginning if
        both are 0); return whether its end was reached. `bounds`: the base offsets of this and the next segment."""
        base, next_base = bounds
        self._base, batches_before = base, self.batches
        log = names.segment_file(base, names.LOG)
        size_bytes = self.scope.files[log].size_bytes
        index_at, time_at = first
        position = int(entries.positions[index_at]) if index_at else 0
        self._state[[columns.FROM, columns.STAGE, columns.SET_IS_OPEN]] = 0
        self._state[[columns.INDEX_AT, columns.TIME_AT]] = index_at, time_at
        self._state[columns.SEGMENT_BASE] = base
        self._state[columns.NEXT_BASE] = next_base
        self._state[columns.MAX_TIMESTAMP] = -1
        whole = False
        try:
            self._window.open(f"{self.scope.path}/{log}", size_bytes, min(position, size_bytes))
            whole = self._walk(log, entries)
            self.bytes_read += size_bytes
        except KeytailError as problem:  # the file became shorter, for example because a broker truncated it
            if not self.scope.live:
                self.scope.findings.add("shrunk", log, problem.byte_position)
        except OSError as problem:
            self.scope.unreadable(log, problem)
        self._save_ends()
        if whole:
            check_ends(self.scope, entries, self._state, self.batches - batches_before)
        elif not (self.scope.live and self.scope.is_active(base)):
            self._state[columns.SPOILED] = 1
        return whole

    def _save_ends(self) -> None:
        rows, runs = int(self._state[columns.ROWS]), int(self._state[columns.RUNS])
        self._on_batches(self._base, self._rows[:rows], self._runs[:runs])
        self._state[columns.ROWS] = self._state[columns.RUNS] = 0

    def _walk(self, log: str, entries: Entries) -> bool:
        state, window = self._state, self._window
        while True:
            state[columns.TO], state[columns.IS_ALL] = window.filled, window.is_all
            state[columns.POSITION] = window.position
            code = inspect(
                window.bytes, entries.offsets, entries.positions, entries.times, entries.time_offsets,
                self._rows, self._runs, self._scratch, state,
            )  # fmt: skip
            at = int(state[columns.FROM])
            if code == codes.DONE:
                return True
            if code == codes.NEED_MORE:
                window.advance(at, int(state[columns.WANTED_BYTES]))
                state[columns.FROM] = 0
            elif code == codes.NEED_ROOM:
                self._save_ends()
            elif code == codes.NEED_BLOCK:
                self._check_block(log, at)
            elif code == codes.NEED_WRAPPER:
                self._check_wrapper(log, at)
            elif code in codes.ENDS_THE_WALK:
                self._end(log, at, code)
                return False
            else:
                self._found(log, code, at, entries)

    def _found(self, log: str, code: int, at: int, entries: Entries) -> None:
        """Add a finding for the kernel's `code` at index `at` of the window, or for the index entry compared last."""
        state = self._state
        if code in _KINDS:
            self._add_batch(log, code, at)
        elif code in (codes.INDEX_POSITION, codes.INDEX_OFFSET):
            i = int(state[columns.INDEX_AT]) - 1
            entries.add_offset_entry(self.scope, i, at_batch=code == codes.INDEX_OFFSET)
        else:
            i = int(state[columns.TIME_AT]) - 1
            entries.add_time_entry(self.scope, i, at_batch=code == codes.TIME_ENTRY)

    def _add_batch(self, log: str, code: int, at: int) -> None:
        facts = {}
        if code in (codes.RECORD_TIMESTAMP, codes.MAX_TIMESTAMP_OFF):
            header = self._window.bytes[at : at + HEADER_BYTES].tobytes()
            (stated,) = struct.unpack_from(">q", header, 35)
            facts = {"timestamp": int(self._state[columns.FOUND_TIMESTAMP]), "stated": stated}
        self._add(log, _KINDS[code], at, int(self._state[columns.FOUND_OFFSET]), **facts)
        if code not in _HARMLESS:
            self._state[columns.SPOILED] = 1

    def _add(self, log: str, kind: str, at: int, offset: int | None = None, **facts: int | str) -> None:
        position = self._window.position + at
        recovered = self.scope.is_recovered(self._base)
        self.scope.findings.add(kind, log, position, offset, recovered=recovered, **facts)

    def _end(self, log: str, at: int, code: int) -> None:
        """Add a finding that the bytes from index `at` on are not batches. The active segment of a running broker may
        end with an incomplete batch."""
        window = self._window
        left = window.size_bytes - window.position - at
        active = self.scope.is_active(self._base)
        if code == codes.CUT:
            if not (self.scope.live and active):
                self._add(log, "cut-active" if active else "cut", at, left=left)
        elif code == codes.MAGIC:
            self._add(log, "magic", at, magic=int(window.bytes[at + 16]), left=left)
        else:
            (size,) = struct.unpack(">i", window.bytes[at + 8 : at + 12].tobytes())
            zeros = size == 0 and not window.bytes[at : window.filled].any()
            if zeros and self.scope.live and active:  # the file is preallocated
                return
            self._add(log, "zeros" if zeros else "size", at, size=size, left=left)

    def _check_block(self, log: str, at: int) -> None:
        """Decompress the batch at index `at` and check its records."""
        window, state = self._window, self._state
        header = window.bytes[at : at + HEADER_BYTES].tobytes()
        base, length = struct.unpack_from(">qi", header)
        last_delta, base_timestamp, max_timestamp = struct.unpack_from(">iqq", header, 23)
        (count,) = struct.unpack_from(">i", header, 57)
        data = window.bytes[at + HEADER_BYTES : at + LENGTH_PREFIX_BYTES + length].data
        state[columns.FOUND_OFFSET] = base
        last = max(min(base + last_delta, 2**63 - 1), -(2**63))  # the walk has reported offsets outside int64
        try:
            code = check_block(
                data, base=base, last=last, count=count, base_timestamp_ms=base_timestamp,
                max_timestamp_ms=max_timestamp, attributes=header[22], state=state,
            )  # fmt: skip
        except Refused as problem:
            self._add(log, "not-opened", at, base, reason=problem.what)
            return
        except ValueError as problem:
            self._add(log, "decompress", at, base, reason=str(problem))
            state[columns.SPOILED] = 1
            return
        if code != 0:
            self._add_batch(log, code, at)

    def _check_wrapper(self, log: str, at: int) -> None:
        """Decompress the message of magic 0 or 1 at index `at` and check the messages inside."""
        window, state = self._window, self._state
        offset, length = struct.unpack(">qi", window.bytes[at : at + 12].tobytes())
        try:
            inside = summarize(window.bytes, at, length + 12, max_record_bytes())
        except Refused as problem:
            self._add(log, "not-opened", at, offset, reason=problem.what)
            return
        except ValueError as problem:
            self._add(log, "legacy", at, offset, reason=str(problem))
            state[columns.SPOILED] = 1
            return
        state[columns.RECORDS] += inside.record_count
        if inside.base_offset <= self.last_offset < offset:
            self._add(log, "offset-order", at, inside.base_offset)
            state[columns.SPOILED] = 1
