"""Defines columns of byte strings and headers of many records, laid out like Arrow's binary and list arrays.

`log/records/table.py` decodes records into these columns, `encode.py` encodes them as batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from keytail.format.codecs.errors import Buffer


@dataclass(frozen=True)
class BytesColumn:
    """A column of byte strings: `data[offsets[i]:offsets[i + 1]]` is the value of row i, unless it is null.

    `data` is uint8; `offsets` is int64, with one element more than there are rows; `valid` is bool. The three arrays
    are the buffers of an Arrow large binary array, except that Arrow's validity has one bit per row.
    """

    data: np.ndarray
    offsets: np.ndarray
    valid: np.ndarray

    def __len__(self) -> int:
        return len(self.valid)

    @classmethod
    def of(cls, values: Sequence[bytes | None]) -> BytesColumn:
        ends = np.cumsum([0, *(len(value or b"") for value in values)], dtype=np.int64)
        data = np.frombuffer(b"".join(value or b"" for value in values), np.uint8)
        return cls(data, ends, np.array([value is not None for value in values], np.bool_))

    @classmethod
    def from_buffers(
        cls,
        n: int,
        validity: Buffer | None,
        offsets: Buffer,
        data: Buffer | None,
        *,
        start: int = 0,
        wide: bool = False,
    ) -> BytesColumn:
        """Return rows [`start`, `start + n`) of an Arrow binary or string array, given its three buffers.

        `wide`: offsets have 64 bits (Arrow's large types). `validity` has one bit per row, the lowest bit first; None
        means that no row is null. Bytes are not copied. Raises ValueError if there are too few offsets or validity bits
        for the rows.
        """
        if n == 0:  # an empty array may have no offset at all
            return cls(np.empty(0, np.uint8), np.zeros(1, np.int64), np.empty(0, np.bool_))
        of = np.frombuffer(offsets, np.int64 if wide else np.int32)[start : start + n + 1]
        if len(of) != n + 1:
            raise ValueError(f"{len(of)} offsets from row {start} on, {n + 1} needed")
        if validity is None:
            valid = np.ones(n, np.bool_)
        else:
            bits = np.unpackbits(np.frombuffer(validity, np.uint8), bitorder="little")
            valid = bits[start : start + n].view(np.bool_)
            if len(valid) != n:
                raise ValueError(f"{len(valid)} bits of validity from row {start} on, {n} needed")
        return cls(np.frombuffer(b"" if data is None else data, np.uint8), of.astype(np.int64, copy=False), valid)

    @property
    def data_bytes(self) -> int:
        """The number of bytes of the rows' values; `data` may contain more bytes."""
        return int(self.offsets[-1] - self.offsets[0])

    def rows(self, start: int, end: int) -> BytesColumn:
        """Return the rows [start, end); `data` is shared, not copied."""
        return BytesColumn(self.data, self.offsets[start : end + 1], self.valid[start:end])

    @classmethod
    def joined(cls, parts: Sequence[BytesColumn]) -> BytesColumn:
        """Return a copy of the concatenated parts."""
        return cls(
            np.concatenate([part.data[part.offsets[0] : part.offsets[-1]] for part in parts]),
            _joined_offsets([part.offsets for part in parts]),
            np.concatenate([part.valid for part in parts]),
        )

    def to_list(self) -> list[bytes | None]:
        data, offsets = self.data.tobytes(), self.offsets.tolist()
        return [
            data[start:end] if valid else None
            for start, end, valid in zip(offsets, offsets[1:], self.valid.tolist(), strict=False)
        ]


@dataclass(frozen=True)
class HeadersColumn:
    """A column of headers: row i has the items [`offsets[i]`, `offsets[i + 1]`) (int64) of `keys` and `values`."""

    offsets: np.ndarray
    keys: BytesColumn
    values: BytesColumn

    @classmethod
    def none(cls, n: int) -> HeadersColumn:
        """Return a column of `n` rows without headers."""
        empty = BytesColumn(np.empty(0, np.uint8), np.zeros(1, np.int64), np.empty(0, np.bool_))
        return cls(np.zeros(n + 1, np.int64), empty, empty)

    @property
    def span(self) -> tuple[int, int]:
        """The range of items of `keys` and `values` that belong to the rows of this column."""
        return int(self.offsets[0]), int(self.offsets[-1])

    def rows(self, start: int, end: int) -> HeadersColumn:
        """Return the rows [start, end); keys and values are shared, not copied."""
        return HeadersColumn(self.offsets[start : end + 1], self.keys, self.values)

    @classmethod
    def joined(cls, parts: Sequence[HeadersColumn]) -> HeadersColumn:
        """Return a copy of the concatenated parts."""
        return cls(
            _joined_offsets([part.offsets for part in parts]),
            BytesColumn.joined([part.keys.rows(*part.span) for part in parts]),
            BytesColumn.joined([part.values.rows(*part.span) for part in parts]),
        )


def _joined_offsets(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate the offsets of parts, each of which may begin at any number, into one column that begins at 0."""
    ends = np.cumsum([0, *(part[-1] - part[0] for part in parts)])
    return np.concatenate([[0], *(part[1:] - part[0] + end for part, end in zip(parts, ends, strict=False))])
