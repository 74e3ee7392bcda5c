"""Divides a partition's log into slices for many tasks: byte ranges of segments. The offset indexes provide the
positions of batches, at which slices can begin.

Every batch is read exactly once: a slice ends where the next slice begins, and reading a slice fails if its last batch
does not end at that byte.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from keytail.errors import CORRUPT_REMEDY, CorruptLog
from keytail.format import names
from keytail.format.batch import BATCH_HEADER, CONTROL, HEADER_BYTES, TRANSACTIONAL
from keytail.format.control import ControlType
from keytail.format.index import OFFSET_ENTRY, parse_offset_index
from keytail.kernels import transactions as kernels
from keytail.log.fs import FileSystem
from keytail.log.listed import unchanged, whole_bytes
from keytail.log.partition import PartitionFacts, SegmentFacts
from keytail.log.records.chunk import Chunk, SegmentReader, check_ends_below, refuse_unsupported
from keytail.log.records.scan import RecordScanner
from keytail.log.records.table import RecordTable


@dataclass(frozen=True)
class LogSlice:
    """Bytes `start` to before `stop` of a segment; the offsets from `from_offset` to below `end_offset` are wanted.

    `segment` is the file as it was listed; if `is_last`, it is the active segment. All offsets in the slice are below
    `next_offset` (None: no limit, at the end of the log). `aborted` are all entries of transaction indexes (TXN_ENTRY,
    native byte order) that concern the slice, sorted by producer and first offset; None if aborted data is treated like
    other data.
    """

    partition_path: str
    segment: SegmentFacts
    is_last: bool
    next_offset: int | None
    start: int
    stop: int
    from_offset: int
    end_offset: int
    aborted: np.ndarray | None = None

    @property
    def path(self) -> str:
        return os.path.join(self.partition_path, names.segment_file(self.segment.base_offset, names.LOG))

    @property
    def size_bytes(self) -> int:
        return self.stop - self.start


def slices_of(
    fs: FileSystem,
    facts: PartitionFacts,
    from_offset: int,
    end_offset: int,
    slice_bytes: int,
    aborted: np.ndarray | None = None,
) -> list[LogSlice]:
    """Return slices of about `slice_bytes` that cover all batches with offsets in the range, in log order.

    If an index is missing, or contradicts the batch headers at the chosen positions, its segment is one slice.
    `aborted` is the result of `read_aborted`, or None.
    """
    slices: list[LogSlice] = []
    if from_offset >= end_offset:
        return slices
    for number, segment in enumerate(facts.segments):
        is_last = number + 1 == len(facts.segments)
        next_base = None if is_last else facts.segments[number + 1].base_offset
        if segment.base_offset >= end_offset or (next_base is not None and next_base <= from_offset):
            continue
        n_bytes = segment.log_bytes
        if is_last:
            path = os.path.join(facts.path, names.segment_file(segment.base_offset, names.LOG))
            n_bytes = whole_bytes(fs, path, segment.base_offset, end_offset)
        bounds_of = _slice_bounds(fs, facts.path, segment, n_bytes, from_offset, end_offset, slice_bytes)
        for start, stop, low, high in bounds_of:
            if start < stop:
                next_offset = next_base if high == _NO_OFFSET else high
                upper = end_offset if next_offset is None else min(next_offset, end_offset)
                concerned = None if aborted is None else _concerning(aborted, max(low, from_offset), upper)
                bounds = (start, stop, from_offset, end_offset)
                slices.append(LogSlice(facts.path, segment, is_last, next_offset, *bounds, concerned))
    return slices


_NO_OFFSET = 2**63 - 1


def _slice_bounds(
    fs: FileSystem,
    partition_path: str,
    segment: SegmentFacts,
    n_bytes: int,
    from_offset: int,
    end_offset: int,
    slice_bytes: int,
) -> list[tuple[int, int, int, int]]:
    """Divide the first `n_bytes` of a segment; return for each slice the first byte, the byte after the last, an offset
    not above the last offset of its first batch, and an offset above all of its offsets."""
    whole = [(0, n_bytes, segment.base_offset, _NO_OFFSET)]
    if n_bytes <= slice_bytes and from_offset <= segment.base_offset:
        return whole
    offsets, positions = _index(fs, partition_path, segment, n_bytes)
    first = int(np.searchsorted(offsets, from_offset, side="right")) - 1
    # The entry of the first batch that ends at or above the end may cover offsets below the end; the next entry does
    # not.
    end_slot = int(np.searchsorted(offsets, end_offset)) + 1
    slots = [first] if first >= 0 else []
    last = int(positions[end_slot]) if end_slot < len(positions) else n_bytes
    at = int(positions[first]) if first >= 0 else 0
    while last - at > slice_bytes + slice_bytes // 2:
        slot = int(np.searchsorted(positions, at + slice_bytes))
        if slot >= min(end_slot, len(positions)):
            break
        slots.append(slot)
        at = int(positions[slot])
    if end_slot < len(positions):
        slots.append(end_slot)
    ends = _ends_of_batches(fs, partition_path, segment, offsets[slots], positions[slots])
    if ends is None:
        return whole
    begins = [(int(positions[slot]), end) for slot, end in zip(slots, ends, strict=True)]
    if first < 0:
        begins.insert(0, (0, segment.base_offset))
    if end_slot >= len(positions):
        begins.append((n_bytes, _NO_OFFSET))
    # Offsets before the start of a slice are below the last offset of its first batch.
    return [(a[0], b[0], begins[0][1] if i == 0 else begins[i - 1][1], b[1])
            for i, (a, b) in enumerate(pairwise(begins))]  # fmt: skip


def _index(
    fs: FileSystem, partition_path: str, segment: SegmentFacts, n_bytes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return offsets and positions of the index entries before the first entry that does not ascend or points outside
    of the file, such as the zeros of a preallocated file."""
    if not segment.index_bytes:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    data = fs.read_bytes(os.path.join(partition_path, names.segment_file(segment.base_offset, names.INDEX)))
    entries = parse_offset_index(data[: len(data) // OFFSET_ENTRY.itemsize * OFFSET_ENTRY.itemsize])
    offsets = entries["relative_offset"].astype(np.int64) + segment.base_offset
    positions = entries["position"].astype(np.int64)
    good = (offsets >= segment.base_offset) & (positions > 0) & (positions < n_bytes)
    good[1:] &= (offsets[1:] > offsets[:-1]) & (positions[1:] > positions[:-1])
    n = len(good) if good.all() else int(np.argmin(good))
    return offsets[:n], positions[:n]


def _ends_of_batches(
    fs: FileSystem, partition_path: str, segment: SegmentFacts, offsets: np.ndarray, positions: np.ndarray
) -> list[int] | None:
    """Return the last offset of the batch at each position, from its header; None if a header is invalid, or if a batch
    begins above the offset of its entry (a later batch may have that offset: format/INDEX.md, 8)."""
    found: list[int] = []
    if not len(offsets):
        return found
    header = np.empty(HEADER_BYTES, np.uint8)
    fd = fs.open_read(os.path.join(partition_path, names.segment_file(segment.base_offset, names.LOG)))
    try:
        for offset, position in zip(offsets.tolist(), positions.tolist(), strict=True):
            got = fs.read_into(fd, header, position)
            if got < HEADER_BYTES and not (got > 17 and header[16] < 2):
                return None
            row = header.view(BATCH_HEADER)[0]
            ends = int(row["base_offset"]) + (int(row["last_offset_delta"]) if row["magic"] == 2 else 0)
            begins = int(row["base_offset"])
            if not segment.base_offset <= begins <= min(offset, ends) or not 0 <= row["magic"] <= 2:
                return None
            found.append(ends)
    finally:
        fs.close(fd)
    return found


def _concerning(aborted: np.ndarray, low: int, high: int) -> np.ndarray:
    """Return the entries of transactions with offsets from `low` to `high` - 1, sorted by producer and first offset."""
    found = aborted[(aborted["last_offset"] >= low) & (aborted["first_offset"] < high)]
    return found[np.lexsort((found["first_offset"], found["producer_id"]))]


def batches(fs: FileSystem, piece: LogSlice) -> Iterator[Chunk]:
    """Yield the chunks of the slice; some of their rows may be outside of the wanted offsets. Raises CorruptLog for
    damage, Refused for an unreadable control batch, or if the file is not, or is no longer, the file that was listed.
    """
    reader = SegmentReader(fs)
    with unchanged(fs, piece.partition_path, (piece.segment,), is_last=piece.is_last):
        yield from _chunks(reader, piece)


def _chunks(reader: SegmentReader, piece: LogSlice) -> Iterator[Chunk]:
    for chunk in reader.chunks(piece.path, piece.stop, start=piece.start):
        refuse_unsupported(chunk)
        check_ends_below(chunk, piece.next_offset)
        _refuse_below_segment(chunk, piece)
        yield chunk


def _refuse_below_segment(chunk: Chunk, piece: LogSlice) -> None:
    """Raise CorruptLog for a batch below its segment's base offset: no checksum covers the offset of a batch."""
    first = chunk.table[0]
    if first["base_offset"] < piece.segment.base_offset:
        raise CorruptLog(
            f"the batch begins at offset {first['base_offset']}, below the base offset "
            f"{piece.segment.base_offset} of its segment",
            path=chunk.path,
            byte_position=int(first["position"]),
            offset=int(first["base_offset"]),
            remedy=CORRUPT_REMEDY,
            slug="batch-below-segment",
        )


def records(fs: FileSystem, piece: LogSlice) -> Iterator[RecordTable]:
    """Yield the wanted data records, some thousands at a time; a table is valid until the next table is requested.
    Raises the same errors as `batches` and `BlockOpener.open_rows`, and CorruptLog if the transaction index lacks an
    aborted transaction that has data in the chunk of its marker."""
    reader, scanner = SegmentReader(fs), RecordScanner()
    with unchanged(fs, piece.partition_path, (piece.segment,), is_last=piece.is_last):
        for chunk in _chunks(reader, piece):
            table = chunk.table
            wanted = (table["last_offset"] >= piece.from_offset) & (table["base_offset"] < piece.end_offset)
            wanted &= ((table["attributes"] & CONTROL) == 0) & (table["record_count"] > 0)
            if piece.aborted is not None:
                wanted &= ~_aborted(chunk, piece, piece.aborted)
            if not wanted.any():
                continue
            for opened in reader.open_rows(chunk, wanted):
                for portion in scanner.portions(chunk, opened):
                    found = portion.record_table
                    offsets = found.records["offset"]
                    inside = (offsets >= piece.from_offset) & (offsets < piece.end_offset)
                    if not inside.all():
                        found = replace(found, records=found.records[inside])
                    if len(found):
                        yield found


def _aborted(chunk: Chunk, piece: LogSlice, entries: np.ndarray) -> np.ndarray:
    """Return for each row (bool) whether it is data of an aborted transaction of `entries`, which a consumer skips."""
    table = chunk.table
    out = np.zeros(len(table), np.uint8)
    special = (table["attributes"] & (CONTROL | TRANSACTIONAL)) != 0
    if not special.any():
        return out.view(bool)
    if len(entries):
        columns = (np.ascontiguousarray(entries[name]) for name in ("producer_id", "first_offset", "last_offset"))
        kernels.aborted_rows(table, *columns, out)
    aborted = out.view(bool)
    _refuse_unlisted(chunk, piece, entries, aborted)
    return aborted


def _refuse_unlisted(chunk: Chunk, piece: LogSlice, entries: np.ndarray, aborted: np.ndarray) -> None:
    """Raise CorruptLog if an ABORT marker ends a transaction with data in this chunk that no entry covers: the data
    would be read as committed."""
    table = chunk.table
    is_control = (table["attributes"] & CONTROL) != 0
    is_abort = is_control & (table["control_type"] == ControlType.ABORT)
    is_abort &= (table["base_offset"] >= piece.from_offset) & (table["base_offset"] < piece.end_offset)
    for row in np.flatnonzero(is_abort & ~np.isin(table["base_offset"], entries["last_offset"])):
        of_producer = table["producer_id"][:row] == table["producer_id"][row]
        before = np.flatnonzero(of_producer & is_control[:row])
        begin = int(before[-1]) + 1 if len(before) else 0
        data = (of_producer & ((table["attributes"][:row] & TRANSACTIONAL) != 0))[begin:] & ~aborted[begin:row]
        if data.any():
            raise CorruptLog(
                f"the marker at offset {table['base_offset'][row]} aborts a transaction that the transaction index "
                "does not contain: its records would be read as committed",
                path=chunk.path,
                byte_position=int(table["position"][begin + int(np.argmax(data))]),
                offset=int(table["base_offset"][begin + int(np.argmax(data))]),
                remedy=f"Rebuild the index with `keytail rebuild-index`. {CORRUPT_REMEDY}",
                slug="unindexed-aborted-transaction",
            )
