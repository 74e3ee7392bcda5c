"""Encodes columns of records as batches of version 2: the reverse of `log/records/table.py`.

BATCH.md 6 specifies where a batch ends and what is refused. Batches have no producer id and belong to no transaction,
like those of a producer without idempotence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from keytail.errors import Refused, UsageProblem
from keytail.format.batch import (
    BATCH_TABLE,
    HEADER_BYTES,
    LOG_APPEND_TIME,
    NO_CONTROL_TYPE,
    NO_PRODUCER_ID,
    NO_SEQUENCE,
)
from keytail.format.codecs.table import NONE
from keytail.format.columns import BytesColumn, HeadersColumn
from keytail.format.compression import check_level, compress
from keytail.kernels import encode as kernels

MAX_BATCH_BYTES = 1 << 30  # maximum size of a batch before compression, since it is in memory while it is built
MAX_BATCH_RECORDS = 2**31 - 1
BATCH_BYTES = 16384  # the default of a producer's `batch.size`
PART_BYTES = 4 << 20  # default of `Encoding.part_bytes`
_PART_BATCHES = 1 << 14  # maximum number of batches per step

_OFFSETS = "the offsets of the {} are not ascending or exceed their data"
_REFUSALS = {
    kernels.KEY_OFFSETS: _OFFSETS.format("keys"),
    kernels.VALUE_OFFSETS: _OFFSETS.format("values"),
    kernels.HEADER_OFFSETS: _OFFSETS.format("headers"),
    kernels.HEADER_KEY_OFFSETS: _OFFSETS.format("header keys"),
    kernels.HEADER_VALUE_OFFSETS: _OFFSETS.format("header values"),
    kernels.HEADER_KEY_NULL: "a header's key is null",
    kernels.NEGATIVE_TIMESTAMP: "its timestamp is below -1, the value for a record without a timestamp",
}


@dataclass(frozen=True)
class RecordColumns:
    """Records, one per row: `timestamps_ms` (int64, -1: no timestamp) and columns of the same length. If `headers` is
    None, no record has headers."""

    timestamps_ms: np.ndarray
    keys: BytesColumn
    values: BytesColumn
    headers: HeadersColumn | None = None

    def __len__(self) -> int:
        return len(self.timestamps_ms)

    @property
    def data_bytes(self) -> int:
        """The number of bytes of all keys, values and headers."""
        columns = [self.keys, self.values]
        if self.headers is not None:
            keys, values = self.headers.keys, self.headers.values
            columns += [keys.rows(*self.headers.span), values.rows(*self.headers.span)]
        return sum(column.data_bytes for column in columns)

    def rows(self, start: int, end: int) -> RecordColumns:
        """Return the rows [start, end); the bytes of keys, values and headers are shared, not copied."""
        headers = None if self.headers is None else self.headers.rows(start, end)
        return RecordColumns(
            self.timestamps_ms[start:end], self.keys.rows(start, end), self.values.rows(start, end), headers
        )


def joined(parts: Sequence[RecordColumns]) -> RecordColumns:
    """Return a copy of the concatenated parts. There must be at least one part."""
    headers = None
    if any(part.headers is not None for part in parts):
        headers = HeadersColumn.joined([part.headers or HeadersColumn.none(len(part)) for part in parts])
    return RecordColumns(
        np.concatenate([part.timestamps_ms for part in parts]),
        BytesColumn.joined([part.keys for part in parts]),
        BytesColumn.joined([part.values for part in parts]),
        headers,
    )


@dataclass(frozen=True)
class Encoding:
    """The parameters of `encode_batches`. `level` None is the codec's default. `log_append_time`: the timestamps are
    append times.

    A batch has at most `batch_bytes` before compression, unless one record needs more, and at most `max_message_bytes`
    in the log. Each step of `encode_batches` encodes about `part_bytes` before compression. Raises UsageProblem for an
    invalid codec, level or limit.
    """

    leader_epoch: int
    codec: int = NONE
    level: int | None = None
    batch_bytes: int = BATCH_BYTES
    batch_records: int = MAX_BATCH_RECORDS
    max_message_bytes: int = MAX_BATCH_BYTES
    part_bytes: int = PART_BYTES
    log_append_time: bool = False

    def __post_init__(self) -> None:
        check_level(self.codec, self.level)
        bytes_fit, records_fit = 0 < self.batch_bytes <= MAX_BATCH_BYTES, 0 < self.batch_records <= MAX_BATCH_RECORDS
        if not (bytes_fit and records_fit and self.part_bytes > 0):
            raise UsageProblem(
                f"invalid batch limits: {self.batch_bytes} bytes (1 to {MAX_BATCH_BYTES}) and "
                f"{self.batch_records} records",
                slug="invalid-batch-limits",
            )

    @property
    def most_bytes(self) -> int:
        """The maximum size of a batch in the log."""
        return min(self.max_message_bytes, MAX_BATCH_BYTES)


def encode_batches(
    columns: RecordColumns, encoding: Encoding, base_offset: int, first_row: int = 0
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Return an iterator over batches with consecutive offsets from `base_offset` on: bytes, and BATCH_TABLE rows.

    Each step yields whole batches; the positions in its rows are relative to the first byte of that step. The caller
    owns both arrays. In error messages, the first row has the number `first_row`. Raises Refused for a row that no
    batch can contain, before anything is yielded; UsageProblem for an invalid offset; ValueError if append times or the
    lengths of columns differ. The iterator raises Refused at a record that exceeds `max_message_bytes` even when
    compressed.
    """
    if base_offset < 0 or base_offset + len(columns) > 2**63 - 1:
        raise UsageProblem(
            f"invalid base offset {base_offset}: {len(columns)} records from there exceed the range of offsets",
            slug="invalid-base-offset",
        )
    if encoding.log_append_time and len(columns) and (columns.timestamps_ms != columns.timestamps_ms[0]).any():
        raise ValueError("the append times of the records differ")
    arrays = _arrays(columns)
    largest = _check(arrays, first_row, encoding.most_bytes if encoding.codec == NONE else MAX_BATCH_BYTES)
    return _parts(arrays, encoding, base_offset, first_row, largest)


def _parts(
    arrays: tuple, encoding: Encoding, base_offset: int, first_row: int, largest_bytes: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    records, n = len(arrays[0]), 0
    batch_bytes = min(encoding.batch_bytes, encoding.most_bytes)
    while n < records:
        target = np.empty(encoding.part_bytes + max(largest_bytes, batch_bytes), np.uint8)
        table = np.zeros(_PART_BATCHES, BATCH_TABLE)
        n, n_bytes, rows = kernels.write_blocks(
            *arrays, n, base_offset, batch_bytes, encoding.batch_records, encoding.part_bytes, target, table
        )
        target, table = target[:n_bytes], table[:rows]
        table["magic"] = 2
        table["leader_epoch"] = encoding.leader_epoch
        table["producer_id"] = NO_PRODUCER_ID
        table["producer_epoch"] = table["coordinator_epoch"] = -1
        table["base_sequence"] = NO_SEQUENCE
        table["control_type"] = NO_CONTROL_TYPE
        if encoding.codec != NONE:
            target = _compressed(target, table, encoding, first_row - base_offset)
        if encoding.log_append_time:
            table["attributes"] |= LOG_APPEND_TIME
        kernels.put_headers(target, table)
        yield target, table


def _compressed(plain: np.ndarray, table: np.ndarray, encoding: Encoding, row_of_offset_0: int) -> np.ndarray:
    """Return the bytes of the batches with compressed blocks and room for the headers; update the rows of `table`.

    A batch that only compression makes longer than `max_message_bytes` is left uncompressed (BATCH.md 6).
    """
    view, at, max_message_bytes = memoryview(plain), 0, encoding.most_bytes
    blocks: list[bytes | memoryview] = []
    for row in table:
        start, end = int(row["position"]) + HEADER_BYTES, int(row["position"]) + int(row["size_bytes"])
        block: memoryview | bytes = compress(encoding.codec, view[start:end], encoding.level)
        row["attributes"] = encoding.codec
        if HEADER_BYTES + len(block) > max_message_bytes:
            size = HEADER_BYTES + len(block)
            if HEADER_BYTES + end - start > max_message_bytes:
                raise _too_large(int(row["base_offset"]) + row_of_offset_0, max_message_bytes, size)
            block, row["attributes"] = view[start:end], NONE
        blocks.append(block)
        row["position"], row["size_bytes"] = at, HEADER_BYTES + len(block)
        at += HEADER_BYTES + len(block)
    target = np.empty(at, np.uint8)
    whole, end = memoryview(target), 0
    for block in blocks:
        start, end = end + HEADER_BYTES, end + HEADER_BYTES + len(block)
        whole[start:end] = block
    return target


def _check(arrays: tuple, first_row: int, most_bytes: int) -> int:
    """Return the size in bytes of a batch with only the largest record. Raises Refused if this size is above
    `most_bytes`, and for an invalid row."""
    code, row, largest = kernels.check_records(*arrays, most_bytes)
    if code == kernels.RECORD_TOO_LARGE:
        raise _too_large(first_row + row, most_bytes, largest)
    if code != kernels.OK:
        raise Refused(f"row {first_row + row} is not a valid record: {_REFUSALS[code]}", slug="invalid-row")
    return int(largest)


def _too_large(row: int, most_bytes: int, size_bytes: int) -> Refused:
    return Refused(
        f"row {row} needs a batch of {size_bytes} bytes; the limit is {most_bytes}",
        remedy="Remove the row, or raise max.message.bytes of the topic and the fetch limits of its consumers",
        slug="record-too-large",
    )


def _arrays(columns: RecordColumns) -> tuple:
    """Return the columns for kernels: read-only and always with the same dtypes, so that kernels are compiled once."""
    n, headers = len(columns), columns.headers
    _require_length("keys", columns.keys, n)
    _require_length("values", columns.values, n)
    if headers is None:
        none = BytesColumn(np.empty(0, np.uint8), np.zeros(1, np.int64), np.empty(0, np.bool_))
        headers = HeadersColumn(np.empty(0, np.int64), none, none)
    else:
        if len(headers.offsets) != n + 1:
            raise ValueError(f"{len(headers.offsets)} offsets of headers for {n} records")
        _require_length("header keys", headers.keys, len(headers.keys.valid))
        _require_length("header values", headers.values, len(headers.keys.valid))
    return (
        frozen(columns.timestamps_ms, np.int64),
        _column(columns.keys),
        _column(columns.values),
        (frozen(headers.offsets, np.int64), _column(headers.keys), _column(headers.values)),
    )


def _require_length(name: str, column: BytesColumn, n: int) -> None:
    if len(column.valid) != n or len(column.offsets) != n + 1:
        raise ValueError(f"{name}: {len(column.valid)} rows and {len(column.offsets)} offsets for {n} rows")


def _column(column: BytesColumn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return frozen(column.data, np.uint8), frozen(column.offsets, np.int64), frozen(column.valid, np.bool_)


def frozen(array: np.ndarray, dtype: type) -> np.ndarray:
    """Return `array` in the form that kernels require of columns: read-only, aligned, contiguous."""
    view: np.ndarray = np.require(array, dtype, ["C", "ALIGNED"]).view()  # columns of a cell may be unaligned
    view.flags.writeable = False
    return view
