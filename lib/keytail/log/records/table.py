"""Presents the records of batches as columns: numbers as arrays; keys, values and headers as copies, on request.

A table refers to the reused buffers of a chunk, an opener and a scanner, which later chunks or portions overwrite.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keytail.format.columns import BytesColumn, HeadersColumn
from keytail.kernels import columns as kernels
from keytail.kernels.records import IN_ARENA


@dataclass(frozen=True)
class RecordTable:
    """`records` (RECORD_TABLE rows) with the buffers that contain their bytes: `raw` or `arena`, depending on `where`
    of their batch.

    `batches` are the BATCH_TABLE rows that `records["row"]` indexes.
    """

    batches: np.ndarray
    records: np.ndarray
    raw: np.ndarray
    arena: np.ndarray
    where: np.ndarray

    def __len__(self) -> int:
        return len(self.records)

    @property
    def in_arena(self) -> np.ndarray:
        """Whether the spans of each record are in `arena` (bool array)."""
        return np.asarray(self.where[self.records["row"]] == IN_ARENA)

    @property
    def value_start(self) -> np.ndarray:
        return np.asarray(self.records["body_start"] + self.records["value_skip"])

    @property
    def headers_start(self) -> np.ndarray:
        """The position of the header count; the headers follow it, up to `body_end`."""
        return np.asarray(self.value_start + np.maximum(self.records["value_bytes"], 0))

    @property
    def body_end(self) -> np.ndarray:
        return np.asarray(self.records["body_start"] + self.records["body_bytes"])

    def keys(self) -> BytesColumn:
        return self._gather(self.in_arena, self.records["key_start"], self.records["key_bytes"])

    def values(self) -> BytesColumn:
        return self._gather(self.in_arena, self.value_start, self.records["value_bytes"])

    def headers(self) -> HeadersColumn:
        in_arena, starts, ends = self.in_arena, self.headers_start, self.body_end
        offsets = np.empty(len(self) + 1, np.int64)

        def walk(n: int) -> tuple[np.ndarray, ...]:
            of_arena = np.empty(n, np.bool_)
            spans = tuple(np.empty(n, np.int64) for _ in range(4))
            kernels.header_spans(self.raw, self.arena, in_arena, starts, ends, offsets, of_arena, *spans)
            return of_arena, *spans

        walk(0)
        of_arena, key_starts, key_sizes, value_starts, value_sizes = walk(int(offsets[-1]))
        return HeadersColumn(
            offsets,
            self._gather(of_arena, key_starts, key_sizes),
            self._gather(of_arena, value_starts, value_sizes),
        )

    def _gather(self, in_arena: np.ndarray, starts: np.ndarray, sizes: np.ndarray) -> BytesColumn:
        starts, sizes = starts.astype(np.int64), sizes.astype(np.int64)
        offsets = np.empty(len(starts) + 1, np.int64)
        data = np.empty(int(np.maximum(sizes, 0).sum()), np.uint8)
        kernels.gather(self.raw, self.arena, in_arena, starts, sizes, offsets, data)
        return BytesColumn(data, offsets, sizes >= 0)
