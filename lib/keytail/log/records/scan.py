"""Parses the records of chunks, a portion at a time, and hashes their keys on request, in reused buffers.

A portion contains whole batches, with about as many records as stay in a core's cache between two kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from keytail.kernels import records as kernels
from keytail.log.records.chunk import Chunk, OpenedRows
from keytail.log.records.table import RecordTable

PORTION_RECORDS = 8192  # maximum number of records of a portion; a batch with more records is one portion
_NO_BITS = np.zeros(1, np.uint8)


class Columns:
    """The arrays of a portion's records, and of the values that later steps store for each record."""

    def __init__(self, n: int) -> None:
        self.records = np.empty(n, kernels.RECORD_TABLE)
        self.low = np.empty(n, np.uint64)
        self.high = np.empty(n, np.uint64)
        self.ordinals = np.empty(n, np.int64)
        self.found = np.empty(n, np.int64)
        self.keep = np.empty(n, np.uint8)


@dataclass
class Portion:
    """The rows of a chunk from `first_row` to before `end_row`, and the selected records (RECORD_TABLE) of opened rows.

    The portion after the next one overwrites `records` and `columns`: the next portion may be produced in advance.
    """

    chunk: Chunk
    opened: OpenedRows
    first_row: int
    end_row: int
    records: np.ndarray
    columns: Columns

    @property
    def record_table(self) -> RecordTable:
        """The same records with the buffers of their spans, for columns of keys, values and headers."""
        chunk, opened = self.chunk, self.opened
        return RecordTable(chunk.table, self.records, chunk.raw, opened.arena, opened.where)

    def hash_keys(self, seed: int) -> None:
        """Write the hashes of the records' keys to the columns `low` and `high`."""
        kernels.hash_keys(
            self.chunk.raw, self.opened.arena, self.opened.where, self.records, len(self.records),
            np.uint64(seed), self.columns.low, self.columns.high,
        )  # fmt: skip


class RecordScanner:
    """Produces the portions of chunks; use one scanner per thread."""

    def __init__(self, portion_records: int = PORTION_RECORDS) -> None:
        self._columns = [Columns(portion_records), Columns(portion_records)]
        self._out = np.zeros(4, np.int64)

    def portions(
        self,
        chunk: Chunk,
        opened: OpenedRows,
        bits: np.ndarray = _NO_BITS,
        first_bit: np.ndarray | None = None,
    ) -> Iterator[Portion]:
        """Yield portions that cover all rows of `opened`, in order. Raises CorruptLog if records cannot be parsed.

        `first_bit` (int64 for each row) is the number in `bits` of the row's first record: only records whose bit is
        set are included. In rows whose number is negative, all are included.
        """
        row, chunk = opened.first, opened.of(chunk)
        first_bit = np.full(len(chunk.table), -1, np.int64) if first_bit is None else opened.from_here(first_bit)
        while row < opened.end:
            columns = self._columns[0]
            kernels.scan_records(
                chunk.raw, opened.arena, chunk.table, opened.where, opened.start, opened.size,
                row, opened.end, bits, first_bit, columns.records, self._out,
            )  # fmt: skip
            next_row, n, code, bad_row = (int(x) for x in self._out)
            if code != kernels.OK:
                chunk.fail_record(code, bad_row)
            if next_row == row:  # the batch has more records than fit
                self._columns[0] = Columns(int(chunk.table["record_count"][row]))
                continue
            self._columns.reverse()
            yield Portion(chunk, opened, row, next_row, columns.records[:n], columns)
            row = next_row

