"""Divides records by partition into cells. A cell has records of one partition, as stored in a scratch file.

A cell begins with eight words (int64 in the byte order of the host; readers run on hosts with the same order): 0 is the
number of records; 1 and 2 are the numbers of bytes of keys and of values; 3 is 1 if there are headers; 4 is the number
of headers; 5 and 6 are the numbers of bytes of header keys and of header values; 7 is 0. The columns of `columns.py`
follow: first, as words, the timestamps and the offsets of keys, values, headers, header keys and header values; then,
for keys, values, header keys and header values, one byte per row that is 1 if the row is not null; then the bytes of
these four columns in the same order; then zeros up to a whole word.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from keytail.format.columns import BytesColumn, HeadersColumn
from keytail.format.encode import RecordColumns, frozen
from keytail.kernels import scatter

_Column = list[tuple[BytesColumn, np.ndarray]]
_WORD = 8
_HEAD_WORDS = 8
_RECORDS, _KEY_BYTES, _VALUE_BYTES, _HAS_HEADERS, _HEADERS, _HEADER_KEY_BYTES, _HEADER_VALUE_BYTES = range(7)


class Divider:
    """Divides records among `n_partitions` partitions, in memory that is reused."""

    def __init__(self, n_partitions: int) -> None:
        self.n_partitions = n_partitions
        self._room = np.empty(0, np.int64)

    def divide(self, parts: Sequence[RecordColumns], partitions: Sequence[np.ndarray]) -> list[tuple[int, np.ndarray]]:
        """Return the cell (uint8) of each partition that has records, ascending; cells are valid until the next call.

        `partitions` has one int32 array per part: each record's partition, or a negative number to omit the record.
        Raises ValueError for offsets that do not ascend inside their data.
        """
        columns = _columns(parts, partitions)
        counted = [self._counted(column) for column in columns]
        heads = np.zeros((self.n_partitions, _HEAD_WORDS), np.int64)
        heads[:, _RECORDS], heads[:, _KEY_BYTES] = counted[0]
        heads[:, _VALUE_BYTES] = counted[1][1]
        if len(columns) > 2:
            heads[:, _HAS_HEADERS] = 1
            heads[:, _HEADERS], heads[:, _HEADER_KEY_BYTES] = counted[2]
            heads[:, _HEADER_VALUE_BYTES] = counted[3][1]
        found = np.flatnonzero(heads[:, _RECORDS])
        sections = _sections(heads)
        sizes = np.where(heads[:, _RECORDS] > 0, sections[-1], 0)
        ends = np.cumsum(sizes)
        starts = ends - sizes
        words = self._room_of(int(ends[-1]) // _WORD)
        for partition in found.tolist():
            at = int(starts[partition]) // _WORD
            words[at : at + _HEAD_WORDS] = heads[partition]
            # `_fill` does not write the padding, so the last word is set to 0 first
            words[int(ends[partition]) // _WORD - 1] = 0
        _fill(words, parts, partitions, columns, [starts + section for section in sections], found)
        of_bytes = words.view(np.uint8)
        return [(partition, of_bytes[starts[partition] : ends[partition]]) for partition in found.tolist()]

    def _counted(self, column: _Column) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of rows and of bytes by partition."""
        rows, sizes = np.zeros(self.n_partitions, np.int64), np.zeros(self.n_partitions, np.int64)
        for part, of in column:
            offsets = part.offsets
            if offsets[0] < 0 or offsets[-1] > len(part.data) or (np.diff(offsets) < 0).any():
                raise ValueError("offsets of a column do not ascend inside their data")
            scatter.count_rows(frozen(of, np.int32), frozen(part.offsets, np.int64), rows, sizes)
        return rows, sizes

    def _room_of(self, n_words: int) -> np.ndarray:
        if len(self._room) < n_words:
            self._room = np.empty(n_words + n_words // 8, np.int64)
        return self._room[:n_words]


def empty_cell() -> np.ndarray:
    """Return a cell without records."""
    return np.zeros((_HEAD_WORDS + 2) * _WORD, np.uint8)


def opened(cell: np.ndarray) -> RecordColumns:
    """Return the records of a whole cell (uint8, aligned to a word), without copying its bytes."""
    head = cell[: _HEAD_WORDS * _WORD].view(np.int64)
    times, *sections, _ = (int(section[0]) for section in _sections(head[None, :]))
    of_offsets, of_valid, of_data = sections[:2] + sections[3:5], sections[5:9], sections[9:13]
    n, m = int(head[_RECORDS]), int(head[_HEADERS])
    sizes = head[[_KEY_BYTES, _VALUE_BYTES, _HEADER_KEY_BYTES, _HEADER_VALUE_BYTES]].tolist()
    columns = [
        BytesColumn(
            cell[data : data + size], _words(cell, offsets, rows + 1), cell[valid : valid + rows].view(np.bool_)
        )
        for offsets, valid, data, size, rows in zip(of_offsets, of_valid, of_data, sizes, (n, n, m, m), strict=True)
    ]
    headers = None
    if head[_HAS_HEADERS]:
        headers = HeadersColumn(_words(cell, sections[2], n + 1), columns[2], columns[3])
    return RecordColumns(_words(cell, times, n), columns[0], columns[1], headers)


def _columns(parts: Sequence[RecordColumns], partitions: Sequence[np.ndarray]) -> list[_Column]:
    """Return the columns of keys, values and, if a part has headers, of header keys and values. A column is a list with
    one item per part: the part's column, and the partition of each row."""
    keys = [(part.keys, of) for part, of in zip(parts, partitions, strict=True)]
    columns = [keys, [(part.values, of) for part, of in zip(parts, partitions, strict=True)]]
    with_headers = [
        (part.headers, np.repeat(of, np.diff(part.headers.offsets)))
        for part, of in zip(parts, partitions, strict=True)
        if part.headers is not None
    ]
    if with_headers:
        columns.append([(headers.keys.rows(*headers.span), of) for headers, of in with_headers])
        columns.append([(headers.values.rows(*headers.span), of) for headers, of in with_headers])
    return columns


def _sections(heads: np.ndarray) -> list[np.ndarray]:
    """Return the byte positions of the sections of a cell, and last the size of the cell in bytes: arrays with one item
    per head."""
    n, m, has_headers = heads[:, _RECORDS], heads[:, _HEADERS], heads[:, _HAS_HEADERS]
    words = [n, n + 1, n + 1, has_headers * (n + 1), has_headers * (m + 1), has_headers * (m + 1)]
    of_bytes = [n, n, m, m, *(heads[:, number] for number in
                              (_KEY_BYTES, _VALUE_BYTES, _HEADER_KEY_BYTES, _HEADER_VALUE_BYTES))]  # fmt: skip
    at = np.full(len(heads), _HEAD_WORDS * _WORD, np.int64)
    starts = []
    for size in (*(_WORD * count for count in words), *of_bytes):
        starts.append(at)
        at = at + size
    return [*starts, -(-at // _WORD) * _WORD]


def _fill(
    words: np.ndarray,
    parts: Sequence[RecordColumns],
    partitions: Sequence[np.ndarray],
    columns: Sequence[_Column],
    sections: Sequence[np.ndarray],
    found: np.ndarray,
) -> None:
    """Write every section of every cell; `sections` has their starts in `words`, in bytes, by partition."""
    times, keys, values, headers, header_keys, header_values = (section // _WORD for section in sections[:6])
    for part, of in zip(parts, partitions, strict=True):
        scatter.scatter_words(frozen(of, np.int32), frozen(part.timestamps_ms, np.int64), words, times)
    of_bytes = words.view(np.uint8)
    for column, at, valid_at, data_at in zip(
        columns, (keys, values, header_keys, header_values), sections[6:10], sections[10:14], strict=False
    ):
        _begin(words, at, found)
        filled = np.zeros(len(at), np.int64)
        for rows, of in column:
            numbers, offsets = frozen(of, np.int32), frozen(rows.offsets, np.int64)
            scatter.scatter_ends(numbers, offsets, words, at, filled)
            data, valid = frozen(rows.data, np.uint8), frozen(rows.valid, np.bool_)
            scatter.scatter_bytes(numbers, data, valid, offsets, of_bytes, valid_at, data_at)
    if len(columns) > 2:
        _begin(words, headers, found)
        filled = np.zeros(len(headers), np.int64)
        for part, of in zip(parts, partitions, strict=True):
            offsets = part.headers.offsets if part.headers is not None else np.zeros(len(part) + 1, np.int64)
            scatter.scatter_ends(frozen(of, np.int32), frozen(offsets, np.int64), words, headers, filled)


def _begin(words: np.ndarray, at: np.ndarray, found: np.ndarray) -> None:
    """Write the 0 with which offsets begin, and advance `at` by one word."""
    words[at[found]] = 0
    at += 1


def _words(cell: np.ndarray, start: int, count: int) -> np.ndarray:
    return cell[start : start + count * _WORD].view(np.int64)

