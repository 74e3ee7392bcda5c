"""Implements the first stage of an audit: reads segments of one replica, and packs their records for shards by key.

Damage does not stop the scan: readable records are compared, and every shard receives the ranges of unreadable offsets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from keytail.audit.cells import pack_entries, pack_places
from keytail.audit.compare import ReplicaLog, shown_cleaned_to
from keytail.errors import CorruptLog
from keytail.format import names
from keytail.format.batch import CONTROL, TRANSACTIONAL
from keytail.kernels.audit import entries, reasons
from keytail.log.fs import FileSystem
from keytail.log.partition import refuse_changed
from keytail.log.records.chunk import Chunk, SegmentReader
from keytail.log.records.scan import RecordScanner
from keytail.run.shuffle import Cell
from keytail.values import to_bytes

# The kinds of cells, in the upper bits of a cell's order: ranges of unreadable offsets (with counts), events of
# transactions, places (offset and short hash of each record), entries of records.
GAPS, EVENTS, PLACES, RECORDS = 0, 1, 2, 3
_KIND_SHIFT, _REPLICA_SHIFT, _SEGMENT_SHIFT = 60, 52, 26
_ENTRIES_AT_ONCE = 1 << 17  # number of entries that are distributed to shards at a time: 8 MiB, and 8 MiB of results
PIECE_BYTES = 64 << 20  # least bytes of a full piece: starting a Spark task takes as long as scanning 10 MiB
_MAX_GAPS = 1000  # maximum number of gaps per segment; a segment with more gaps is not read any further


@dataclass(frozen=True)
class Gap:
    """Offsets [`first_offset`, `end_offset`) of a replica that could not be read. `what` is the reason."""

    replica: int
    first_offset: int
    end_offset: int
    path: str
    byte_position: int
    what: str


@dataclass(frozen=True)
class FromAllShards:
    """The facts of all shards that one shard needs to explain missing records: the `markers` of all transactions
    (producer, offset, kind; sorted), and `first_removable` of each replica (`cleaning_limits`)."""

    markers: np.ndarray
    first_removable: tuple[int, ...]


@dataclass(frozen=True)
class AuditTask:
    """One partition to be audited, for tasks on workers. `spans`: offset ranges in which shards search for records that
    replicas have in common. `from_all` is set only if the stages run a second time."""

    topic: str
    partition: int
    replicas: tuple[ReplicaLog, ...]
    end_offset: int
    shards: int
    examples: int
    seed: int
    spans: tuple[tuple[int, int], ...] = ()
    from_all: FromAllShards | None = None

    @property
    def log_starts(self) -> np.ndarray:
        return np.array([replica.log_start_offset for replica in self.replicas], np.int64)


@dataclass(frozen=True)
class Piece:
    """The segments with indexes [first, end) of replica `replica`."""

    task: AuditTask
    replica: int
    first: int
    end: int

    @property
    def size_bytes(self) -> int:
        return sum(size for _, size, _ in self.task.replicas[self.replica].segments[self.first : self.end])


def pieces_of(task: AuditTask) -> list[Piece]:
    """Return pieces that cover all segments, the largest first; a piece may contain several small segments."""
    pieces = []
    for number, replica in enumerate(task.replicas):
        first = 0
        for end in range(1, len(replica.segments) + 1):
            piece = Piece(task, number, first, end)
            if piece.size_bytes >= PIECE_BYTES or end == len(replica.segments):
                pieces.append(piece)
                first = end
    return sorted(pieces, key=lambda piece: -piece.size_bytes)


def scan(fs: FileSystem, piece: Piece, attempt: str) -> Iterator[Cell]:
    """Yield the cells of the piece's segments. Raises Refused if the file of a closed segment is not the file that
    was listed, because a broker has changed it."""
    for segment in range(piece.first, piece.end):
        yield from _scan_segment(fs, piece, segment)


def _scan_segment(fs: FileSystem, piece: Piece, segment: int) -> Iterator[Cell]:
    replica = piece.task.replicas[piece.replica]
    base, size_bytes, mtime_ns = replica.segments[segment]
    path = f"{replica.path}/{names.segment_file(base, names.LOG)}"
    closed = segment + 1 < len(replica.segments)
    if closed:
        refuse_changed(fs, path, size_bytes, mtime_ns)
    else:
        size_bytes = fs.size(path)  # the active segment may have grown beyond the listed log end
    next_base = replica.segments[segment + 1][0] if closed else None
    yield from _Scan(fs, piece, segment, path, size_bytes, next_base).cells()
    if closed:
        refuse_changed(fs, path, size_bytes, mtime_ns)


class _Scan:
    """The scan of one segment."""

    def __init__(
        self, fs: FileSystem, piece: Piece, segment: int, path: str, size_bytes: int, next_base: int | None
    ) -> None:
        self._task, self._replica = piece.task, piece.replica
        self._path, self._size_bytes, self._next_base = path, size_bytes, next_base
        self._fs, self._reader, self._scanner = fs, SegmentReader(fs), RecordScanner()
        log = piece.task.replicas[piece.replica]
        self._base, self._log = log.segments[segment][0], log
        self._order = piece.replica << _REPLICA_SHIFT | segment << _SEGMENT_SHIFT
        self._cells = 0
        self._entries = np.empty((_ENTRIES_AT_ONCE, entries.WORDS), np.int64)
        self._sorted = np.empty((_ENTRIES_AT_ONCE, entries.WORDS), np.int64)
        self._places = np.empty((_ENTRIES_AT_ONCE, entries.PLACE_WORDS), np.int64)
        self._starts = np.zeros(piece.task.shards + 1, np.int64)
        self._filled = 0
        self._scratch = np.empty(1 << 12, np.uint8)
        self._gaps: list[Gap] = []
        self._cleaned_to = 0  # the largest result of `shown_cleaned_to`
        self.records = 0

    def cells(self) -> Iterator[Cell]:
        position, last = 0, self._base - 1
        is_next = True  # whether the next batch follows the batch that ends at `last`
        while position < self._size_bytes:
            try:
                for chunk in self._reader.chunks_without_prefetch(self._path, self._size_bytes, start=position):
                    good = self._in_order(chunk, last)
                    if len(good.table):
                        yield from self._cells_of_chunk(good)
                        shown = shown_cleaned_to(good.table, last + 1 if is_next else None)
                        self._cleaned_to = max(self._cleaned_to, shown)
                        last, is_next = int(good.table["last_offset"][-1]), True
                    position = chunk.position + len(good.raw)
                    if len(good.table) < len(chunk.table):
                        raise CorruptLog(
                            "batches of this file, or of this file and the next file, have the same offsets",
                            path=self._path,
                            byte_position=position,
                            slug="overlapping-batches",
                        )
                break
            except CorruptLog as damage:
                resumed = self._resume_position(damage, position, last)
                if resumed is None:
                    break
                position, is_next = resumed, False
        yield from self._flush_entries()
        counted = (self._replica, self.records, self._cleaned_to, tuple(self._gaps))
        known = to_bytes(counted)
        for shard in range(self._task.shards):
            yield Cell(shard, GAPS << _KIND_SHIFT | self._order, known)

    def _in_order(self, chunk: Chunk, last: int) -> Chunk:
        """Return the chunk up to the first batch whose offsets decrease or belong to the next segment, since these
        offsets belong to other records."""
        table = chunk.table
        rows = len(table)
        if self._next_base is not None:
            rows = int(np.searchsorted(table["last_offset"], self._next_base))
        if table["base_offset"][0] <= last:
            rows = 0
        if rows == len(table):
            return chunk
        return replace(chunk, table=table[:rows], raw=chunk.raw[: int(table["position"][rows]) - chunk.position])

    def _resume_position(self, damage: CorruptLog, position: int, last: int) -> int | None:
        """Add a gap, unless the damage is the incomplete end of the active segment. Return the byte position after the
        damaged batch, or None if the rest of the segment is not read."""
        at = damage.byte_position if damage.byte_position is not None else position
        end_offset = self._next_base if self._next_base is not None else self._log.log_end_offset
        if self._next_base is None and last + 1 >= self._log.log_end_offset:
            return None  # the incomplete end of the active segment, after the log end offset that was listed
        resumed, first = self._batch_after(at)
        if resumed is None or len(self._gaps) >= _MAX_GAPS:
            self._add_gap(damage, at, last + 1, end_offset)
            return None
        self._add_gap(damage, at, last + 1, first)
        return resumed

    def _batch_after(self, at: int) -> tuple[int | None, int]:
        """Return position and first offset of the batch after the batch at `at`; (None, 0) if the size of the batch at
        `at` does not lead to a valid batch."""
        prefix = self._fs.read_at(self._path, at, 12)
        if len(prefix) < 12:
            return None, 0
        next_position = at + 12 + int.from_bytes(prefix[8:12], "big", signed=True)
        if not at + 12 < next_position < self._size_bytes:
            return None, 0
        try:
            for chunk in self._reader.chunks_without_prefetch(self._path, self._size_bytes, start=next_position):
                return next_position, int(chunk.table["base_offset"][0])
        except CorruptLog:
            pass
        return None, 0

    def _add_gap(self, damage: CorruptLog, at: int, first: int, end: int) -> None:
        self._gaps.append(Gap(self._replica, first, max(first, end), self._path, at, damage.what))

    def _cells_of_chunk(self, chunk: Chunk) -> Iterator[Cell]:
        """Yield the cells of the events and records of a chunk; batches that cannot be opened become gaps."""
        yield from self._events(chunk)
        wanted = (chunk.table["record_count"] > 0) & (chunk.table["last_offset"] >= self._log.log_start_offset)
        try:
            parts = list(self._packed(chunk, wanted))
        except CorruptLog:
            parts = self._row_by_row(chunk, wanted)
        for part in parts:
            yield from self._collect(part)

    def _packed(self, chunk: Chunk, wanted: np.ndarray) -> Iterator[np.ndarray]:
        for opened in self._reader.open_rows(chunk, wanted):
            for portion in self._scanner.portions(chunk, opened):
                n = len(portion.records)
                longest = int(portion.records["body_bytes"].max(initial=0))
                if len(self._scratch) < longest:
                    self._scratch = np.empty(longest, np.uint8)
                part = np.empty((n, entries.WORDS), np.int64)
                filled = entries.pack_records(
                    chunk.raw, opened.arena, opened.where, portion.records, n, chunk.table,
                    self._log.log_start_offset, np.uint64(self._task.seed), self._scratch, part, 0,
                )  # fmt: skip
                yield part[:filled]

    def _row_by_row(self, chunk: Chunk, wanted: np.ndarray) -> list[np.ndarray]:
        parts: list[np.ndarray] = []
        for row in np.flatnonzero(wanted):
            alone = np.zeros(len(wanted), bool)
            alone[row] = True
            try:
                parts.extend(self._packed(chunk, alone))
            except CorruptLog as damage:
                batch = chunk.table[row]
                first, last = int(batch["base_offset"]), int(batch["last_offset"])
                self._add_gap(damage, int(batch["position"]), first, last + 1)
        return parts

    def _collect(self, part: np.ndarray) -> Iterator[Cell]:
        self.records += len(part)
        done = 0
        while done < len(part):
            n = min(len(part) - done, _ENTRIES_AT_ONCE - self._filled)
            self._entries[self._filled : self._filled + n] = part[done : done + n]
            self._filled += n
            done += n
            if self._filled == _ENTRIES_AT_ONCE:
                yield from self._flush_entries()

    def _flush_entries(self) -> Iterator[Cell]:
        """Yield a cell for each shard that gets any of the collected entries, and clear the collected entries."""
        if not self._filled:
            return
        shards, starts = self._task.shards, self._starts
        entries.split(self._entries, self._filled, shards, starts, self._sorted)
        for shard in np.flatnonzero(np.diff(starts)):
            yield self._cell(int(shard), RECORDS, pack_entries(self._sorted[starts[shard] : starts[shard + 1]]))
        entries.split_places(self._entries, self._filled, shards, starts, self._places)
        for shard in np.flatnonzero(np.diff(starts)):
            yield self._cell(int(shard), PLACES, pack_places(self._places[starts[shard] : starts[shard + 1]]))
        self._filled = 0

    def _events(self, chunk: Chunk) -> Iterator[Cell]:
        """Yield cells with the markers and the transactional data batches that have records, for shards by producer."""
        if self._task.from_all is not None:  # the first run of the stages has collected the events
            return
        table = chunk.table
        control = (table["attributes"] & CONTROL) != 0
        special = ((table["attributes"] & TRANSACTIONAL) != 0) | control
        special &= (table["record_count"] > 0) & (table["producer_id"] >= 0)
        # Records below the log start offset are not compared.
        special &= table["base_offset"] >= self._log.log_start_offset
        special &= ~control | np.isin(table["control_type"], (0, 1))
        if not special.any():
            return
        rows = table[special]
        events = np.empty((len(rows), reasons.EVENT_COLUMNS), np.int64)
        events[:, reasons.E_PRODUCER] = rows["producer_id"]
        events[:, reasons.E_OFFSET] = rows["base_offset"]
        events[:, reasons.E_KIND] = np.where(control[special], rows["control_type"], reasons.DATA)
        events[:, reasons.E_REPLICA] = self._replica
        shard_of = rows["producer_id"] % self._task.shards
        for shard in np.unique(shard_of):
            yield self._cell(int(shard), EVENTS, events[shard_of == shard].tobytes())

    def _cell(self, shard: int, kind: int, data: bytes) -> Cell:
        self._cells += 1
        return Cell(shard, kind << _KIND_SHIFT | self._order | self._cells, data)


def order_kind(order: int) -> int:
    return order >> _KIND_SHIFT


def order_replica(order: int) -> int:
    return order >> _REPLICA_SHIFT & 0xFF

