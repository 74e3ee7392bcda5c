"""Hashes and numbers the keys of chunks for the map phase: in portions and reused buffers, or all at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from keytail.kernels import key_scan as kernels
from keytail.kernels import records as record_kernels
from keytail.log.records.chunk import Chunk, OpenedRows

# Maximum number of records in a portion of several batches: a chunk with records of 64 bytes has about as many. Smaller
# portions take longer: waking the thread that looks up the keys takes as long as thousands of look-ups.
_KEYS = 1 << 17


class _Columns:
    def __init__(self, n: int) -> None:
        self.low = np.empty(n, np.uint64)
        self.high = np.empty(n, np.uint64)
        self.ordinals = np.empty(n, np.int64)


@dataclass
class KeyPortion:
    """The hashed keys of the records in the opened rows of a chunk from `first_row` to before `end_row`.

    `low` and `high` are the halves of each hash. `ordinals[i]` is `first_ordinal` of the record's row plus the record's
    number in the batch; or -1 if the record does not belong in the map, because it has no key or is below the start
    offset. `keyless` is the number of records without a key from the start offset on; the first of these records is at
    `first_keyless_offset`. The portion after the next one overwrites `low`, `high` and `ordinals`.
    """

    chunk: Chunk
    opened: OpenedRows
    first_row: int
    end_row: int
    low: np.ndarray
    high: np.ndarray
    ordinals: np.ndarray
    first_ordinal: np.ndarray
    keyless: int
    first_keyless_offset: int

    def row_of(self, ordinal: int) -> int:
        """Return the row that contains the record of an ordinal."""
        return int(np.searchsorted(self.first_ordinal, ordinal, side="right")) - 1

    def of_each_record(self, of_rows: np.ndarray) -> np.ndarray:
        """Return for each record of the portion the value of its row in `of_rows` (one value for each row of the
        chunk)."""
        return np.repeat(of_rows[self.first_row : self.end_row], self._counts(self.end_row))

    def _counts(self, end_row: int) -> np.ndarray:
        """Return the number of opened records in each row of the portion before `end_row`."""
        rows = slice(self.first_row, end_row)
        is_open = self.opened.where[rows] != record_kernels.CLOSED
        return np.where(is_open, self.chunk.table["record_count"][rows], 0)

    def records_up_to(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the records (RECORD_TABLE) of the portion's opened rows up to and including `row`, and the ordinal of
        each."""
        chunk, opened = self.chunk, self.opened
        counts = self._counts(row + 1)
        records = np.empty(int(counts.sum()), record_kernels.RECORD_TABLE)
        out, no_bits = np.zeros(4, np.int64), np.full(len(chunk.table), -1, np.int64)
        record_kernels.scan_records(
            chunk.raw, opened.arena, chunk.table, opened.where, opened.start, opened.size,
            self.first_row, row + 1, np.zeros(1, np.uint8), no_bits, records, out,
        )  # fmt: skip
        numbers = np.arange(len(records)) - np.repeat(np.cumsum(counts) - counts, counts)
        return records, self.first_ordinal[records["row"]] + numbers


@dataclass(frozen=True)
class ChunkKeys:
    """All hashed keys of one chunk, as in KeyPortion. `nulls` has one bit for each batch, which is set if the batch is
    opened and has a null value."""

    low: np.ndarray
    high: np.ndarray
    ordinals: np.ndarray
    nulls: np.ndarray
    keyless: int
    first_keyless_offset: int


class KeyScanner:
    """Produces the hashed keys of chunks; use one scanner per thread."""

    def __init__(self, seed: int, portion_keys: int = _KEYS) -> None:
        self._seed = np.uint64(seed)
        self._columns = [_Columns(portion_keys), _Columns(portion_keys)]
        self._out = np.zeros(4, np.int64)

    def portions(
        self,
        chunk: Chunk,
        opened: OpenedRows,
        from_offset: int,
        first_ordinal: np.ndarray,
        nulls: np.ndarray,
        first_batch: int,
    ) -> Iterator[KeyPortion]:
        """Yield portions that cover all rows of `opened`, in order; set the bit `first_batch` + row of `nulls` for each
        opened batch that contains a null value.

        Raises CorruptLog at a batch whose records cannot be parsed.
        """
        chunk, first_ordinal = opened.of(chunk), opened.from_here(first_ordinal)
        row = opened.first
        while row < opened.end:
            columns, keyless = self._columns[0], np.zeros(2, np.int64)
            kernels.scan_keys(
                chunk.raw, opened.arena, chunk.table, opened.where, opened.start, opened.size, row, opened.end,
                from_offset, self._seed, first_ordinal, nulls, first_batch,
                columns.low, columns.high, columns.ordinals, keyless, self._out,
            )  # fmt: skip
            next_row, n, code, bad_row = (int(x) for x in self._out)
            if code != record_kernels.OK:
                chunk.fail_record(code, bad_row)
            if next_row == row:  # the batch has more records than fit
                self._columns[0] = _Columns(int(chunk.table["record_count"][row]))
                continue
            self._columns.reverse()
            yield KeyPortion(
                chunk, opened, row, next_row, columns.low[:n], columns.high[:n], columns.ordinals[:n], first_ordinal,
                int(keyless[0]), int(keyless[1]),
            )  # fmt: skip
            row = next_row

    def keys_of(
        self, chunk: Chunk, parts: Iterable[OpenedRows], from_offset: int, first_ordinal: np.ndarray, keys: int
    ) -> ChunkKeys:
        """Return the hashed keys of the `parts` of a chunk, which have at most `keys` records, in new arrays.

        Raises CorruptLog as `portions` does.
        """
        low, high, ordinals = np.empty(keys, np.uint64), np.empty(keys, np.uint64), np.empty(keys, np.int64)
        nulls, keyless = np.zeros((len(chunk.table) + 7) // 8, np.uint8), np.zeros(2, np.int64)
        done = 0
        for opened in parts:
            part, first, row = opened.of(chunk), opened.from_here(first_ordinal), opened.first
            while row < opened.end:
                kernels.scan_keys(
                    part.raw, opened.arena, part.table, opened.where, opened.start, opened.size, row, opened.end,
                    from_offset, self._seed, first, nulls, 0,
                    low[done:], high[done:], ordinals[done:], keyless, self._out,
                )  # fmt: skip
                next_row, n, code, bad_row = (int(x) for x in self._out)
                if code != record_kernels.OK:
                    part.fail_record(code, bad_row)
                assert next_row > row, "the parts have more records than stated"
                done, row = done + n, next_row
        return ChunkKeys(low[:done], high[:done], ordinals[:done], nulls, int(keyless[0]), int(keyless[1]))
