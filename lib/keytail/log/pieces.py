"""A record block of more bytes or records than memory is for, as pieces that hold whole records.

A piece is about as large as a stride, or one record. Kafka's cleaner takes such blocks, a record at a time: a batch of
some KiB may open to gigabytes. A single record is held as a whole, by Kafka too; beyond `max_record_bytes` it is
refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from keytail.errors import Refused
from keytail.format.block_stream import decompressed
from keytail.format.compression import LARGER_REMEDY, Buffer
from keytail.kernels import pieces as kernels
from keytail.limits import max_record_bytes

# A batch that opens to more bytes, or has more records, is taken in pieces.
WHOLE_BLOCK_BYTES = 32 << 20
WHOLE_BLOCK_RECORDS = 1 << 18

PIECE_BYTES = 8 << 20
PIECE_RECORDS = 1 << 17

_NO_DELTA = 2**31


@dataclass(frozen=True)
class Piece:
    """`block[:n_bytes]` holds records number `first` up to `first + count` of a batch; the last has `last_delta`.

    The last piece has whatever is left of block and count, also where these do not agree.
    """

    block: np.ndarray
    n_bytes: int
    first: int
    count: int
    last_delta: int
    is_last: bool


class RecordStream:
    """The records of one block, in parts that are asked for one after the other, in two arenas in turn.

    `arenas` (two arrays of uint8, replaced by larger ones as needed) hold a part until the part after the next.
    """

    def __init__(self, codec: int, data: Buffer, records: int, arenas: list[np.ndarray]) -> None:
        self._parts = decompressed(codec, data)
        self._part, self._part_at = np.empty(0, np.uint8), 0
        self._arenas = arenas
        self._used = self._filled = 0  # of the arena in use: bytes handed out, and bytes there
        self._out = np.zeros(5, np.int64)
        self.left = records
        self.last_delta = -1

    def take(
        self, most: int, room_bytes: int, up_to_delta: int = _NO_DELTA
    ) -> tuple[np.ndarray, int, int]:
        """(block, its bytes, records): the next whole records, at most `most`, as many as `room_bytes` hold, or one;
        none where the next one is behind `up_to_delta`, is no record, or is cut.

        `last_delta` is the largest offset delta so far. ValueError for what the codec refuses, and for offsets that go
        back; Refused for a record of more than `max_record_bytes`.
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
                    break  # a length that is none: the block ends within the record
                raise Refused(
                    f"a record of {wanted} bytes; of one at most {max_record_bytes()} are held in memory",
                    remedy=LARGER_REMEDY,
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
        """(block, its bytes) taken last, with what follows it, as far as it is at hand: a byte at least, if any."""
        self._fill(self._filled + 1 if self._used == self._filled else self._filled)
        self._used = self._filled
        return self._arenas[0], self._filled

    def take_last(self) -> tuple[np.ndarray, int, int, bool]:
        """`take`, and whether these are the last; then with whatever is left of block and count, also where these do
        not agree."""
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
        """Whether the block has so many bytes from the next record on; those beyond the arena are passed, not held."""
        n = self._filled
        while n < n_bytes and (there := self._peek()):
            n, self._part_at = n + there, len(self._part)
        return n >= n_bytes

    def _turn(self) -> None:
        """What is left of one arena to the front of the other."""
        left = self._filled - self._used
        self._arenas.reverse()
        if len(self._arenas[0]) < max(left, PIECE_BYTES):
            self._arenas[0] = np.empty(max(left, PIECE_BYTES), np.uint8)
        self._arenas[0][:left] = self._arenas[1][self._used : self._filled]
        self._used, self._filled = 0, left

    def _fill(self, n_bytes: int) -> None:
        """Let the arena hold `n_bytes`, if the block has as many."""
        arena = self._arenas[0]
        if len(arena) < n_bytes:
            self._arenas[0] = np.empty(n_bytes, np.uint8)
            self._arenas[0][: self._filled] = arena[: self._filled]
            arena = self._arenas[0]
        while self._filled < n_bytes and (there := self._peek()):
            n = min(there, n_bytes - self._filled)
            arena[self._filled : self._filled + n] = self._part[self._part_at : self._part_at + n]
            self._filled, self._part_at = self._filled + n, self._part_at + n


def pieces(codec: int, data: Buffer, records: int, arenas: list[np.ndarray]) -> Iterator[Piece]:
    """The block `data` of `records` records. Raises as `RecordStream.take`."""
    stream, first, is_last = RecordStream(codec, data, records, arenas), 0, False
    while not is_last:
        block, n_bytes, count, is_last = stream.take_last()
        yield Piece(block, n_bytes, first, count, stream.last_delta, is_last)
        first += count
