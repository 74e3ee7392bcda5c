"""Converts columns of bytes to Arrow arrays, merges Arrow batches, and divides record tables that become batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from keytail.format.columns import BytesColumn
from keytail.log.records.table import RecordTable

# Maximum size of one Arrow batch, which is passed to the JVM as a whole; a batch of one record may be larger. Arrow's
# offsets have 32 bits here, since pyspark does not accept large types for binary columns.
BATCH_BYTES = 4 << 20
BATCH_RECORDS = 8192


def joined(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the Arrow batches, with neighbouring batches merged up to BATCH_RECORDS rows and BATCH_BYTES bytes."""
    waiting: list[Any] = []
    rows = size = 0
    for batch in batches:
        if waiting and (rows + batch.num_rows > BATCH_RECORDS or size + batch.nbytes > BATCH_BYTES):
            yield from _as_one(waiting)
            waiting, rows, size = [], 0, 0
        waiting.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
    if waiting:
        yield from _as_one(waiting)


def _as_one(batches: list[Any]) -> list[Any]:
    import pyarrow  # noqa: PLC0415 (only where Spark runs)

    if len(batches) == 1:
        return batches
    item: list[Any] = pyarrow.Table.from_batches(batches).combine_chunks().to_batches()
    return item


def cut(table: RecordTable, most_bytes: int = BATCH_BYTES) -> Iterator[RecordTable]:
    """Yield the parts of a table in order. The record bodies of a part have at most `most_bytes` bytes, unless the part
    is one larger record."""
    ends = np.cumsum(table.records["body_bytes"].astype(np.int64))
    start = 0
    while start < len(table):
        before = int(ends[start - 1]) if start else 0
        end = max(start + 1, int(np.searchsorted(ends, before + most_bytes, side="right")))
        yield replace(table, records=table.records[start:end])
        start = end


def binary(column: BytesColumn) -> Any:
    """Return an Arrow array of the binary values, without copying the column's data."""
    import pyarrow  # noqa: PLC0415 (only where Spark runs)

    validity = None
    if not column.valid.all():
        validity = pyarrow.py_buffer(np.packbits(column.valid, bitorder="little"))
    offsets = pyarrow.py_buffer(column.offsets.astype(np.int32))
    data = pyarrow.py_buffer(np.ascontiguousarray(column.data))
    return pyarrow.Array.from_buffers(pyarrow.binary(), len(column), [validity, offsets, data])


def header_names(column: BytesColumn) -> Any:
    """Return an Arrow array of strings, decoded as by Kafka's consumer: invalid UTF-8 becomes U+FFFD."""
    import pyarrow  # noqa: PLC0415 (only where Spark runs)

    raw = binary(column)
    try:
        return raw.cast(pyarrow.string())
    except pyarrow.ArrowInvalid:
        return pyarrow.array([name.decode(errors="replace") for name in raw.to_pylist()], pyarrow.string())
