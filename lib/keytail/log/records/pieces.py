"""Splits a record block that has too many bytes or records for memory into pieces of whole records.

A piece has at most PIECE_BYTES and PIECE_RECORDS, or is one larger record. A batch of some KiB may decompress to
gigabytes; Kafka's cleaner decompresses such a batch one record at a time. A single record must fit into memory, as in
Kafka; a record that is larger than both `max_record_bytes` and a piece is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from keytail.errors import Refused
from keytail.format.codecs.errors import LARGER_REMEDY, Buffer
from keytail.format.compression import decompress_in_parts
from keytail.kernels import pieces as kernels
from keytail.limits import max_record_bytes

# A batch with more decompressed bytes or more records is processed in pieces.
WHOLE_BLOCK_BYTES = 32 << 20
WHOLE_BLOCK_RECORDS = 1 << 18

PIECE_BYTES = 8 << 20
PIECE_RECORDS = 1 << 17

_NO_DELTA_LIMIT = 2**31  # larger than every offset delta


@dataclass(frozen=True)
class Piece:
    """A part of a batch's records: `block[:n_bytes]` contains the records with numbers `first` to `first + count - 1`;
    `last_delta` is the largest offset delta up to the end of the piece. The last piece counts all remaining records,
    and has at least one of the bytes after its whole records, if there are any: the code that walks it finds the error.
    """

    block: np.ndarray
    n_bytes: int
    first: int
    count: int
    last_delta: int
    is_last: bool


class RecordStream:
    """The records of one block, returned in consecutive parts in two arenas in turn.

    `arenas` are two arrays of uint8, replaced by larger arrays as needed. A returned part is valid until `take` is
    called for the second time after it.
    """

    def __init__(self, codec: int, data: Buffer, records: int, arenas: list[np.ndarray]) -> None:
        self._parts = decompress_in_parts(codec, data)
        self._part, self._part_at = np.empty(0, np.uint8), 0
        self._arenas = arenas
        self._used = self._filled = 0  # bytes returned, and bytes available, in the current arena
        self._out = np.zeros(5, np.int64)
        self.left = records
        self.last_delta = -1

    def take(
        self, most: int, room_bytes: int, up_to_delta: int = _NO_DELTA_LIMIT
    ) -> tuple[np.ndarray, int, int]:
        """Return the arena that begins with the next whole records, and the numbers of their bytes and of these
        records: at most `most` records, and as many as fit into `room_bytes` but at least one. Returns no records if
        none are left, or if the next record has a delta above `up_to_delta`, is invalid, or is incomplete.

        `last_delta` is the largest offset delta so far. Raises ValueError if the codec cannot decompress the block, and
        if the first offset is not above those of earlier parts; Refused for a record larger than both
        `max_record_bytes` and `room_bytes`, or data that need too much memory.
        """
        self._turn()
        self._fill(room_bytes)
        while True:
            arena = self._arenas[0]
            kernels.whole_records(arena, self._filled, min(most, self.left), up_to_delta, self._out)
            end, count, first_delta, largest_delta, wanted = (int(n) for n in self._out)
            if count or not wanted:
                break
            if wanted > max_record_bytes():
                if not self._has(wanted):
                    break  # the length is invalid: the block ends within the record
                raise Refused(
                    f"a record has {wanted} bytes, more than the limit of {max_record_bytes()}",
                    remedy=LARGER_REMEDY,
                    slug="too-large",
                )
            before = self._filled
            self._fill(max(wanted, room_bytes))
            if self._filled == before:
                break  # the block ends within the record
        if -1 < first_delta <= self.last_delta:
            raise ValueError("record offsets do not increase within a batch")
        self._used = end
        self.left -= count
        self.last_delta = max(self.last_delta, largest_delta)
        return arena, end, count

    def rest(self) -> tuple[np.ndarray, int]:
        """Return the arena, and the number of bytes of the last `take` plus the available bytes that follow; if any
        bytes remain, at least one is available."""
        self._fill(self._filled + 1 if self._used == self._filled else self._filled)
        self._used = self._filled
        return self._arenas[0], self._filled

    def take_last(self) -> tuple[np.ndarray, int, int, bool]:
        """Return a part as `take` does, and whether it is the last part, with the bytes and the count of a last Piece.
        """
        block, n_bytes, count = self.take(PIECE_RECORDS, PIECE_BYTES)
        is_last = not self.left or not count
        if is_last:
            block, n_bytes = self.rest()
            count += self.left
        return block, n_bytes, count, is_last

    def _peek(self) -> int:
        while self._part_at == len(self._part):
            part = next(self._parts, None)
            if part is None:
                return 0
            self._part, self._part_at = np.frombuffer(part, np.uint8), 0
        return len(self._part) - self._part_at

    def _has(self, n_bytes: int) -> bool:
        """Return whether the block has `n_bytes` bytes from the next record on. Bytes beyond the arena are skipped, so
        nothing can be taken after this call."""
        n = self._filled
        while n < n_bytes and (available := self._peek()):
            n, self._part_at = n + available, len(self._part)
        return n >= n_bytes

    def _turn(self) -> None:
        """Move the bytes of the current arena that were not yet returned to the start of the other arena."""
        left = self._filled - self._used
        self._arenas.reverse()
        if len(self._arenas[0]) < max(left, PIECE_BYTES):
            self._arenas[0] = np.empty(max(left, PIECE_BYTES), np.uint8)
        self._arenas[0][:left] = self._arenas[1][self._used : self._filled]
        self._used, self._filled = 0, left

    def _fill(self, n_bytes: int) -> None:
        """Fill the arena up to `n_bytes`, or up to the end of the block."""
        arena = self._arenas[0]
        if len(arena) < n_bytes:
            self._arenas[0] = np.empty(n_bytes, np.uint8)
            self._arenas[0][: self._filled] = arena[: self._filled]
            arena = self._arenas[0]
        while self._filled < n_bytes and (available := self._peek()):
            n = min(available, n_bytes - self._filled)
            arena[self._filled : self._filled + n] = self._part[self._part_at : self._part_at + n]
            self._filled, self._part_at = self._filled + n, self._part_at + n


def pieces(codec: int, data: Buffer, records: int, arenas: list[np.ndarray]) -> Iterator[Piece]:
    """Yield the pieces of the block `data`, whose batch declares `records` records. Raises the errors of
    `RecordStream.take`."""
    stream, first, is_last = RecordStream(codec, data, records, arenas), 0, False
    while not is_last:
        block, n_bytes, count, is_last = stream.take_last()
        yield Piece(block, n_bytes, first, count, stream.last_delta, is_last)
        first += count
