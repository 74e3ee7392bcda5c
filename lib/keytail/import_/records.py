"""Converts Arrow batches of records to RecordColumns, which are then encoded. All strategies of an import use this
module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow

from keytail.format.columns import BytesColumn, HeadersColumn
from keytail.format.encode import RecordColumns

# A function that divides an Arrow batch of a task into runs of records, each with its target partition.
Unpack = Callable[[Any], Iterator[tuple[int, RecordColumns]]]


@dataclass(frozen=True)
class Load:
    """The counts of the source's records for one partition: number, bytes of keys and values, and number without a
    key."""

    partition: int
    records: int
    key_bytes: int
    value_bytes: int
    keyless: int


def columns_of(batch: Any) -> RecordColumns:
    """Convert an Arrow batch with the columns key, value, and optionally timestamp (ms, -1 if null) and headers. Bytes
    of records are not copied."""
    names = batch.schema.names
    if "timestamp" in names:
        given = batch.column("timestamp")
        times = (given.fill_null(-1) if given.null_count else given).to_numpy(zero_copy_only=False)
    else:
        times = np.full(len(batch), -1, np.int64)
    headers = _headers(batch.column("headers")) if "headers" in names else None
    return RecordColumns(times, bytes_column(batch.column("key")), bytes_column(batch.column("value")), headers)


def bytes_column(array: Any) -> BytesColumn:
    """Return an Arrow binary, string, large binary or large string array as a BytesColumn."""
    wide = pyarrow.types.is_large_binary(array.type) or pyarrow.types.is_large_string(array.type)
    return BytesColumn.from_buffers(len(array), *array.buffers(), start=array.offset, wide=wide)


def _headers(array: Any) -> HeadersColumn | None:
    """Convert an Arrow array of lists of (key, value) structs; return None if there are no headers. A null struct
    becomes a header with a null key."""
    if array.null_count == len(array):
        return None
    offsets = array.offsets.to_numpy().astype(np.int64)
    pairs = array.values
    if not offsets[-1] - offsets[0]:
        return None
    keys, values = pairs.flatten()
    return HeadersColumn(offsets, bytes_column(keys), bytes_column(values))
