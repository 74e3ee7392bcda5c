"""Reads a segment, damaged or not, in parts: rows of batches, each with its validity, and their records.

Damage does not end the reading if the size of the batch is known: the part has the problem and the records that could
be read before the damage, and the next part continues after the batch. dump/legacy.py reads batches of magic 0 and 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from keytail.dump.legacy import LegacyRecords, legacy_records
from keytail.errors import CorruptLog, KeytailError, Refused
from keytail.format.batch import BATCH_TABLE, CODEC_MASK, HEADER_BYTES, LOG_APPEND_TIME
from keytail.format.codecs.table import codec_name
from keytail.format.compression import decompress
from keytail.format.record import find_fields
from keytail.kernels.dump import batches as kernels
from keytail.kernels.records import IN_RAW, RECORD_TABLE
from keytail.log.fs import FileSystem
from keytail.log.records.chunk import CHUNK_BYTES
from keytail.log.records.opening import BlockOpener, Chunk
from keytail.log.records.pieces import WHOLE_BLOCK_BYTES
from keytail.log.records.scan import RecordScanner
from keytail.log.records.table import RecordTable

_ROWS = 1 << 16
_NOTHING = np.empty(0, np.uint8)


@dataclass(frozen=True)
class Problem:
    """A problem at byte `position` of a file, with the `offset` if it is known."""

    what: str
    position: int
    offset: int | None = None


@dataclass
class Part:
    """Consecutive batches, all of magic 2 or all older, and their records if requested.

    `records.records["row"]` is an index into `batches`. The records of batch i are `first_record[i]` to before
    `first_record[i + 1]` (int64). The arrays are views of buffers that the next part overwrites. `continues`: the part
    has one batch, the last batch of the previous part, with more of its records.
    """

    batches: np.ndarray
    valid: np.ndarray
    records: RecordTable | None = None
    first_record: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    legacy: LegacyRecords | None = None
    problems: list[Problem] = field(default_factory=list)
    continues: bool = False


@dataclass
class Extent:
    """The position where reading ended, and the problem that ended it."""

    position: int
    problem: Problem | None = None


class LogReader:
    """Reads logs into its own buffers."""

    def __init__(self, fs: FileSystem) -> None:
        self._fs = fs
        self._raw = np.empty(CHUNK_BYTES, np.uint8)
        self._rows = np.empty(_ROWS, BATCH_TABLE)
        self._valid = np.empty(_ROWS, np.bool_)
        self._opener = BlockOpener()
        self._scanner = RecordScanner()
        self.extent = Extent(0)

    def parts(
        self,
        path: str,
        start: int,
        end: int,
        *,
        deep: bool,
        wanted: Callable[[np.ndarray], slice] | None = None,
    ) -> Iterator[Part]:
        """Yield the batches from byte `start`, where a batch begins, up to `end`; afterwards `extent` has the position
        where these batches end.

        `wanted` returns the slice of the given rows (BATCH_TABLE) to yield; if this slice omits the last rows, reading
        ends.
        """
        for chunk, valid in self._chunks(path, start, end):
            chosen = slice(0, len(chunk.table)) if wanted is None else wanted(chunk.table)
            some = Chunk(path, chunk.position, chunk.raw, chunk.table[chosen])
            yield from self._parts(some, valid[chosen], deep)
            if chosen.stop < len(chunk.table):
                self.extent = Extent(int(chunk.table["position"][chosen.stop]))
                return

    def parts_of(self, raw: np.ndarray) -> Iterator[Part]:
        """Yield the whole batches of `raw`, with their records."""
        self._rows = np.empty(max(_ROWS, len(raw) // 26), BATCH_TABLE)
        self._valid = np.empty(len(self._rows), np.bool_)
        out = np.zeros(4, np.int64)
        kernels.index_any(raw, len(raw), 0, self._rows, self._valid, out)
        rows = int(out[kernels.ROWS])
        if rows:
            yield from self._parts(Chunk("", 0, raw, self._rows[:rows]), self._valid[:rows], True)

    def _chunks(self, path: str, position: int, end: int) -> Iterator[tuple[Chunk, np.ndarray]]:
        fd = self._fs.open_read(path)
        out = np.zeros(4, np.int64)
        self.extent = Extent(position)
        try:
            while position < end:
                filled = self._fs.read_into(fd, self._raw[: min(len(self._raw), end - position)], position)
                kernels.index_any(self._raw, filled, position, self._rows, self._valid, out)
                rows, consumed, code, needed = (int(x) for x in out)
                if rows:
                    raw = self._raw[:consumed]
                    yield Chunk(path, position, raw, self._rows[:rows]), self._valid[:rows]
                    position += consumed
                    self.extent = Extent(position)
                elif needed and position + needed <= end and filled == len(self._raw):
                    self._raw = np.empty(needed, np.uint8)
                else:
                    if code == kernels.SIZE_TOO_SMALL:
                        self.extent.problem = Problem(self._bad_size(end - position), position)
                    return
        finally:
            self._fs.close(fd)

    def _bad_size(self, left: int) -> str:
        size = int.from_bytes(self._raw[8:12].tobytes(), "big", signed=True)
        if not self._raw[: min(left, len(self._raw))].any():
            return f"there are {left} zero bytes where a batch should begin"
        return f"a batch has the invalid size {size}; {left} bytes from here on cannot be read"

    def _parts(self, chunk: Chunk, valid: np.ndarray, deep: bool) -> Iterator[Part]:
        """Yield the rows of a chunk, split where the format changes."""
        is_old = chunk.table["magic"] < 2
        bounds = [0, *(np.flatnonzero(is_old[1:] != is_old[:-1]) + 1).tolist(), len(is_old)]
        for first, last in itertools.pairwise(bounds):
            if first == last:
                continue
            if not deep:
                yield Part(chunk.table[first:last], valid[first:last])
            elif is_old[first]:
                yield from self._old(chunk, valid, first, last)
            else:
                yield from self._new(chunk, valid, first, last)

    def _new(self, chunk: Chunk, valid: np.ndarray, row: int, end: int) -> Iterator[Part]:
        """Yield rows of magic 2. A batch that the kernels cannot read is a part by itself, read record by record."""
        counts, sizes = chunk.table["record_count"], chunk.table["size_bytes"]
        unreadable = np.flatnonzero((counts < 0) | (sizes < HEADER_BYTES))
        while row < end:
            coming = unreadable[np.searchsorted(unreadable, row) :]
            limit = min(end, int(coming[0]) if len(coming) else end)
            while row < limit:
                some = Chunk(chunk.path, chunk.position, chunk.raw, chunk.table[row:limit])
                try:
                    for part in self._sound(some, valid[row:limit]):
                        row += len(part.batches) * (not part.continues)
                        yield part
                except (CorruptLog, Refused) as damage:
                    limit = int(np.searchsorted(chunk.table["position"], damage.byte_position or 0))
                    if row > limit or isinstance(damage, Refused):
                        yield _unopened(chunk, valid, limit, damage, continues=row > limit)
                        row = limit + 1
                        break
            else:
                if limit < end:
                    yield self._spoiled(chunk, valid, limit)
                    row = limit + 1

    def _sound(self, chunk: Chunk, valid: np.ndarray) -> Iterator[Part]:
        wanted = (chunk.table["record_count"] > 0) | (chunk.table["size_bytes"] > HEADER_BYTES)
        for opened in self._opener.open_rows(chunk, wanted):
            for portion in self._scanner.portions(chunk, opened):
                first, end = portion.first_row, portion.end_row
                records = portion.record_table
                rows = records.records["row"]
                first_record = np.searchsorted(rows, np.arange(first, end + 1))
                records.records["row"] -= first
                table = RecordTable(
                    chunk.table[first:end], records.records, records.raw, records.arena, records.where[first:end]
                )
                yield Part(
                    table.batches, valid[first:end], table, first_record, continues=opened.records_before > 0
                )

    def _spoiled(self, chunk: Chunk, valid: np.ndarray, row: int) -> Part:
        """Return one batch with its readable records, and the problem that makes its other records unreadable."""
        batch = chunk.table[row]
        start = int(batch["position"]) - chunk.position
        raw = chunk.raw[start + HEADER_BYTES : start + int(batch["size_bytes"])]
        spans, what = np.zeros(0, RECORD_TABLE), ""
        try:
            if int(batch["record_count"]) < 0:
                raise ValueError(f"the record count is {batch['record_count']}")
            if int(batch["size_bytes"]) < HEADER_BYTES:
                raise ValueError(f"the batch has {batch['size_bytes']} bytes, fewer than its header")
            codec = int(batch["attributes"]) & CODEC_MASK
            if codec:
                try:
                    raw = np.frombuffer(decompress(codec, memoryview(raw), limit_bytes=WHOLE_BLOCK_BYTES), np.uint8)
                except ValueError as reason:
                    raise ValueError(f"{codec_name(codec)}: {reason}") from reason
            spans, what = _spans(raw, batch)
        except ValueError as reason:
            what = str(reason)
        except Refused as reason:
            what = reason.what
        table = RecordTable(chunk.table[row : row + 1], spans, raw, _NOTHING, np.full(1, IN_RAW, np.int8))
        base = int(batch["base_offset"])
        problem = Problem(f"the records of a batch cannot be read: {what}", int(batch["position"]), base)
        first_record = np.array([0, len(spans)], np.int64)
        return Part(chunk.table[row : row + 1], valid[row : row + 1], table, first_record, None, [problem])

    def _old(self, chunk: Chunk, valid: np.ndarray, first: int, end: int) -> Iterator[Part]:
        for row in range(first, end, 1 << 12):
            last = min(row + (1 << 12), end)
            found = legacy_records(chunk, row, last)
            problems = [
                Problem(
                    f"a message cannot be read: {what}",
                    int(chunk.table["position"][at]),
                    int(chunk.table["last_offset"][at]),
                )
                for at, what in found.problems
            ]
            where = np.full(last - row, IN_RAW, np.int8)
            table = RecordTable(chunk.table[row:last], found.spans, found.raw, _NOTHING, where)
            first_record = np.searchsorted(found.spans["row"], np.arange(last - row + 1))
            yield Part(table.batches, valid[row:last], table, first_record, found, problems)


def _unopened(chunk: Chunk, valid: np.ndarray, row: int, why: KeytailError, *, continues: bool) -> Part:
    """Return a batch without its records, or, if `continues`, without the records after its previous parts."""
    batches = chunk.table[row : row + 1]
    table = RecordTable(batches, np.zeros(0, RECORD_TABLE), _NOTHING, _NOTHING, np.full(1, IN_RAW, np.int8))
    problem = Problem(why.what, int(batches["position"][0]), int(batches["base_offset"][0]))
    return Part(batches, valid[row : row + 1], table, np.zeros(2, np.int64), None, [problem], continues)


def _spans(block: np.ndarray, batch: np.void) -> tuple[np.ndarray, str]:
    """Return the records (RECORD_TABLE) of `block` before the first invalid record, and the problem (never empty)."""
    data, at = block.tobytes(), 0
    base = int(batch["base_offset"])
    append_time = bool(int(batch["attributes"]) & LOG_APPEND_TIME)
    time = int(batch["max_timestamp_ms"] if append_time else batch["base_timestamp_ms"])
    rows: list[tuple[int, ...]] = []
    what = ""
    try:
        for _ in range(int(batch["record_count"])):
            row, at = _span(data, at, base, time, append_time)
            rows.append(row)
        if at != len(data):
            what = f"{len(data) - at} bytes follow the last record"
    except ValueError as reason:
        what = f"record {len(rows)} of {batch['record_count']}: {reason}"
    spans = np.array(rows, RECORD_TABLE) if rows else np.zeros(0, RECORD_TABLE)
    offsets = spans["offset"]
    if not what and ((np.diff(offsets) <= 0).any() or (offsets > int(batch["last_offset"])).any()):
        what = "offsets of records are not in ascending order, or are above the batch's last offset"
    return spans, what or "offsets of records are not in ascending order"


def _span(data: bytes, at: int, base: int, time: int, append_time: bool) -> tuple[tuple[int, ...], int]:
    """Return the record at byte `at` as a row of RECORD_TABLE, and the position of its end."""
    found = find_fields(data, at)
    stamp = time if append_time else time + found.timestamp_delta
    stamp = (stamp + 2**63) % 2**64 - 2**63
    offset = (base + found.offset_delta + 2**63) % 2**64 - 2**63
    (key_start, key_bytes), (value_start, value_bytes), body = found.key, found.value, found.body
    row = (offset, stamp, key_start, body, found.end - body, key_bytes, value_bytes, value_start - body, 0, 0)
    return row, found.end
