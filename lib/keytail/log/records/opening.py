"""Opens the record blocks of chunks: decompresses them, or converts messages of magic 0 and 1, into reused arenas."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NoReturn

import numpy as np

from keytail.errors import CORRUPT_REMEDY, CorruptLog, Refused
from keytail.format.batch import CODEC_MASK, HEADER_BYTES
from keytail.format.codecs.errors import Buffer, TooLarge
from keytail.format.codecs.table import CODECS
from keytail.format.compression import decompress
from keytail.format.legacy import transcode
from keytail.kernels import records as record_kernels
from keytail.kernels.legacy import transcode_plain
from keytail.kernels.opening import plain as plain_kernels
from keytail.kernels.opening.decoders import Decoders
from keytail.limits import max_record_bytes
from keytail.log.records.pieces import WHOLE_BLOCK_BYTES, WHOLE_BLOCK_RECORDS, Piece, pieces

# Number of decompressed bytes opened at a time: they stay in the CPU cache until they are walked and copied.
ARENA_BYTES = 4 << 20

_RECORD_ERRORS = {
    record_kernels.RECORD_COUNT_IMPOSSIBLE: "batch declares more records than its bytes can contain",
    record_kernels.PREMATURE_END: "batch has fewer records than it declares",
    record_kernels.RECORD_SIZE_INVALID: "a record's length does not match its fields",
    record_kernels.HEADER_COUNT_INVALID: "a record has an invalid header count",
    record_kernels.HEADER_KEY_NEGATIVE: "a record has a header key of negative length",
    record_kernels.VARINT_INVALID: "a record contains an invalid varint",
    record_kernels.BYTES_LEFT_OVER: "batch has bytes after its last record",
    record_kernels.OFFSETS_NOT_INCREASING: "record offsets do not increase within a batch",
    record_kernels.OFFSET_BEYOND_BATCH: "a record's offset is above the last offset of its batch",
}


@dataclass
class Chunk:
    """Whole batches of one segment: `table` (BATCH_TABLE rows) over `raw` (uint8), whose first byte is at byte
    `position` of the file.

    Both arrays are views of buffers that the reader, by default, overwrites with the chunk after the next one.
    """

    path: str
    position: int
    raw: np.ndarray
    table: np.ndarray

    def codecs(self) -> np.ndarray:
        return self.table["attributes"] & CODEC_MASK

    def fail_record(self, code: int, row: int) -> NoReturn:
        raise CorruptLog(
            _RECORD_ERRORS[code],
            path=self.path,
            byte_position=int(self.table["position"][row]),
            offset=int(self.table["base_offset"][row]),
            remedy=CORRUPT_REMEDY,
            slug="invalid-record",
        )


@dataclass
class OpenedRows:
    """The rows of a chunk from `first` to before `end`, with the record blocks of the wanted ("opened") rows.

    The arrays have an item for each row of the whole chunk, valid from `first` to before `end`: `where` is CLOSED,
    IN_RAW or IN_ARENA; `start` and `size` are the position of the row's block in the chunk's `raw` or in `arena`, and
    the size of the block, in bytes. A block that has too many bytes or records is returned in pieces, each as an
    OpenedRows of that row alone. For a piece, `table` is the table of the chunk with the record count and last offset
    of the piece in that row. `records_before` is the number of records in earlier pieces; more pieces follow unless
    `is_end`.
    """

    first: int
    end: int
    arena: np.ndarray
    where: np.ndarray
    start: np.ndarray
    size: np.ndarray
    table: np.ndarray | None = None
    records_before: int = 0
    is_end: bool = True

    @property
    def is_piece(self) -> bool:
        return self.table is not None

    def of(self, chunk: Chunk) -> Chunk:
        """Return the chunk; for a piece, a copy with the `table` of the piece."""
        return chunk if self.table is None else replace(chunk, table=self.table)

    def from_here(self, first: np.ndarray) -> np.ndarray:
        """Return `first`, the number of each row's first record; for a piece, a copy with the number of the piece's
        first record in its row."""
        if not self.records_before:
            return first
        first = first.copy()
        first[self.first] += self.records_before * (first[self.first] >= 0)
        return first


class _Large(Exception):
    """Raised for a block that must be opened in pieces."""


@dataclass(frozen=True)
class _Layout:
    """The positions of the blocks of a chunk's rows, as in OpenedRows."""

    chunk: Chunk
    where: np.ndarray
    start: np.ndarray
    size: np.ndarray

    def part(self, first: int, end: int, arena: np.ndarray) -> OpenedRows:
        return OpenedRows(first, end, arena, self.where, self.start, self.size)

    def raw_start(self, row: int) -> tuple[int, int]:
        """Return the position of a row's block in the chunk, and its size in bytes as stored."""
        batch = self.chunk.table[row]
        at = int(batch["position"]) - self.chunk.position + HEADER_BYTES
        return at, int(batch["size_bytes"]) - HEADER_BYTES

    def piece(self, row: int, piece: Piece) -> OpenedRows:
        where, start, size = self.where.copy(), self.start.copy(), self.size.copy()
        where[row], start[row], size[row] = record_kernels.IN_ARENA, 0, piece.n_bytes
        table = self.chunk.table.copy()
        table["record_count"][row] = piece.count
        if not piece.is_last:
            table["last_offset"][row] = table["base_offset"][row] + piece.last_delta
        return OpenedRows(row, row + 1, piece.block, where, start, size, table, piece.first, piece.is_last)


class BlockOpener:
    """Opens blocks into its own two arenas in turn; use one opener per thread."""

    def __init__(self, arena_bytes: int = ARENA_BYTES) -> None:
        self._arenas = [np.empty(0, np.uint8), np.empty(0, np.uint8)]
        self._piece_arenas = [np.empty(0, np.uint8), np.empty(0, np.uint8)]
        self._arena_bytes = arena_bytes
        self._made_decoders: Decoders | None = None

    def open_rows(self, chunk: Chunk, wanted: np.ndarray) -> Iterator[OpenedRows]:
        """Open the record blocks of the rows that `wanted` (bool) selects, and yield them in parts that cover all rows
        in order.

        Decompressed blocks, and messages of magic 0 and 1 converted to v2 records, are in an arena that the part after
        the next one overwrites. A part has up to about `arena_bytes` in the arena, or one block of at most
        WHOLE_BLOCK_BYTES, or is a piece of a block that is larger or has more than WHOLE_BLOCK_RECORDS records. Raises
        CorruptLog for a block that cannot be decompressed or converted. Raises Refused if one record of a piece, or the
        decompressed content of one message of magic 0 or 1, has more than `max_record_bytes`.
        """
        table = chunk.table
        n = len(table)
        where, start, size = np.empty(n, np.int8), np.empty(n, np.int64), np.empty(n, np.int64)
        packed, old = plain_kernels.lay_out(table, wanted, chunk.position, where, start, size)
        layout = _Layout(chunk, where, start, size)
        floor = 0
        self._arenas.reverse()
        if old and (plain := wanted & (table["magic"] < 2) & (chunk.codecs() == 0)).any():
            self._ensure_arena(int(table["size_bytes"][plain].sum(dtype=np.int64)), 0)
            _, floor = transcode_plain(
                chunk.raw, chunk.position, table, 0, n, where, start, size, self._arenas[0], 0
            )
        first = 0
        many = (where == record_kernels.IN_RAW) & (table["magic"] == 2)
        for row in np.flatnonzero(many & (table["record_count"] > WHOLE_BLOCK_RECORDS)):
            yield from self._open_span(layout, first, int(row), packed, floor)
            yield from self._open_pieces(layout, int(row))
            first = int(row) + 1
        yield from self._open_span(layout, first, n, packed, floor)

    def reopen(self, chunk: Chunk, opened: OpenedRows) -> Iterator[OpenedRows]:
        """Yield again all pieces of the batch of which `opened` is a piece."""
        row, n = opened.first, len(chunk.table)
        where, start, size = np.empty(n, np.int8), np.empty(n, np.int64), np.empty(n, np.int64)
        plain_kernels.lay_out(chunk.table, np.arange(n) == row, chunk.position, where, start, size)
        return self._open_pieces(_Layout(chunk, where, start, size), row)

    def _open_span(
        self, layout: _Layout, row: int, end: int, packed: int, floor: int
    ) -> Iterator[OpenedRows]:
        """Open and yield the rows from `row` to before `end`, none of which may have more than WHOLE_BLOCK_RECORDS
        records. The first `floor` bytes of an arena contain converted messages of magic 0 and 1."""
        chunk, where, start, size = layout.chunk, layout.where, layout.start, layout.size
        first, used, limit = row, floor, floor + self._arena_bytes
        if packed and row < end:
            self._ensure_arena(limit, floor)
            raw = chunk.raw.view()
            raw.flags.writeable = False  # read-only as in a proof, so that the decoders are compiled only once
            while True:
                row, used = plain_kernels.open_blocks(
                    self._decoders().tools, raw, chunk.table[:end], row, self._arenas[0], used, where, start,
                    size,
                )  # fmt: skip
                if row == end:
                    break
                # The block is of an old format, damaged, not in plain framing, or too large for the rest of the arena:
                # such a block is opened into an empty arena, or by itself.
                block, is_large = None, False
                if used - floor <= self._arena_bytes // 2:
                    try:
                        block = _open_row(chunk, row, int(start[row]), int(size[row]))
                    except _Large:
                        is_large = True
                if (used > floor or is_large) and (block is None or used + len(block) > limit):
                    if row > first:
                        yield layout.part(first, row, self._arenas[0])
                    if is_large:
                        yield from self._open_pieces(layout, row)
                        row += 1
                    first, used = row, floor
                    self._arenas.reverse()
                    self._ensure_arena(limit, 0)
                    self._arenas[0][:floor] = self._arenas[1][:floor]
                if block is None:
                    if row == end:
                        break
                    continue
                self._ensure_arena(used + len(block), used)
                self._arenas[0][used : used + len(block)] = np.frombuffer(block, np.uint8)
                where[row], start[row], size[row] = record_kernels.IN_ARENA, used, len(block)
                used, row = used + len(block), row + 1
        if first < end:
            yield layout.part(first, end, self._arenas[0])

    def _open_pieces(self, layout: _Layout, row: int) -> Iterator[OpenedRows]:
        """Open the records of one row of magic 2, and yield them in pieces."""
        chunk, batch = layout.chunk, layout.chunk.table[row]
        at, n_bytes = layout.raw_start(row)
        codec = int(batch["attributes"]) & CODEC_MASK
        data = memoryview(chunk.raw)[at : at + n_bytes]
        try:
            for piece in pieces(codec, data, int(batch["record_count"]), self._piece_arenas):
                yield layout.piece(row, piece)
        except ValueError as reason:
            raise _cannot_be_opened(chunk, row, codec, reason) from reason
        except Refused as reason:
            raise _too_large(chunk, row, reason) from reason

    def _decoders(self) -> Decoders:
        if self._made_decoders is None:
            self._made_decoders = Decoders()
        return self._made_decoders

    def _ensure_arena(self, n: int, used: int) -> None:
        arena = self._arenas[0]
        if len(arena) < n:
            larger = np.empty(n, np.uint8)
            larger[:used] = arena[:used]
            self._arenas[0] = larger


def _open_row(chunk: Chunk, row: int, start: int, n_bytes: int) -> Buffer | np.ndarray:
    """Return the records of one compressed batch. Raises CorruptLog if its codec cannot decompress them, Refused for a
    message of magic 0 or 1 that is too large, and _Large for a block of more than WHOLE_BLOCK_BYTES."""
    codec = int(chunk.table["attributes"][row]) & CODEC_MASK
    try:
        if chunk.table["magic"][row] < 2:
            return _transcode_row(chunk, row)
        return decompress(codec, memoryview(chunk.raw)[start : start + n_bytes], limit_bytes=WHOLE_BLOCK_BYTES)
    except TooLarge as reason:
        if chunk.table["magic"][row] < 2:
            raise _too_large(chunk, row, reason) from reason
        raise _Large from reason
    except ValueError as reason:
        raise _cannot_be_opened(chunk, row, codec, reason) from reason


def _transcode_row(chunk: Chunk, row: int) -> np.ndarray:
    """Convert the records of a compressed message of magic 0 or 1 to a v2 record block."""
    batch = chunk.table[row]
    position = int(batch["position"]) - chunk.position
    base, base_timestamp = int(batch["base_offset"]), int(batch["base_timestamp_ms"])
    return transcode(chunk.raw, position, int(batch["size_bytes"]), base, base_timestamp, max_record_bytes())


def _too_large(chunk: Chunk, row: int, reason: Refused) -> Refused:
    batch = chunk.table[row]
    return TooLarge(
        f"a batch of {batch['size_bytes']} bytes and {batch['record_count']} records is not read: {reason.what}",
        path=chunk.path,
        byte_position=int(batch["position"]),
        offset=int(batch["base_offset"]),
        remedy=reason.remedy,
    )


def _cannot_be_opened(chunk: Chunk, row: int, codec: int, reason: ValueError) -> CorruptLog:
    name = CODECS[codec] if codec < len(CODECS) else f"unknown codec {codec}"
    return CorruptLog(
        f"the records of the batch cannot be read ({name}: {reason})",
        path=chunk.path,
        byte_position=int(chunk.table["position"][row]),
        offset=int(chunk.table["base_offset"][row]),
        remedy=CORRUPT_REMEDY,
        slug="decompression-failed",
    )
