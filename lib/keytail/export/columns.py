"""Converts records to Arrow batches for Spark. Kernels gather columns, which are decoded without an object per record.

Data that a format cannot decode raises an error with its offset; it never becomes null. JSON is treated as text here:
Spark's parser checks it in the JVM (delta_table.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow
from pyarrow import compute

from keytail.errors import KeytailError
from keytail.export.avro import decode_avro
from keytail.export.formats import FIXED, Format, Formats
from keytail.format.columns import BytesColumn
from keytail.log.records.table import RecordTable
from keytail.run.arrow import binary, cut, header_names, joined

# The largest TIMESTAMP of Spark, in ms.
_MOST_MS = 2**63 // 1000 - 1

_UUID = "^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}$"


class Undecodable(KeytailError):
    """A key or value is not valid in the requested format."""

    default_slug = "undecodable-record"


def arrow_batches(tables: Iterable[RecordTable], partition: int, formats: Formats) -> Iterator[Any]:
    """Yield Arrow record batches of the raw schema, of about BATCH_BYTES. Raises Undecodable."""
    return joined(_batch(piece, partition, formats) for table in tables for piece in cut(table))


def _batch(table: RecordTable, partition: int, formats: Formats) -> Any:
    n, records = len(table), table.records
    keys, values, headers = table.keys(), table.values(), table.headers()
    epochs = table.batches["leader_epoch"][records["row"]]
    columns = [
        pyarrow.array(np.full(n, partition, np.int32)),
        decode(keys, formats.key, records["offset"], "key"),
        *([] if formats.key.distinguishes_keys else [binary(keys)]),
        decode(values, formats.value, records["offset"], "value"),
        pyarrow.ListArray.from_arrays(
            pyarrow.array(headers.offsets.astype(np.int32)),
            pyarrow.StructArray.from_arrays([header_names(headers.keys), binary(headers.values)], ["key", "value"]),
        ),
        _timestamps(records),
        pyarrow.array(records["offset"].astype(np.int64)),
        pyarrow.array(epochs.astype(np.int32), mask=epochs < 0),
        pyarrow.array(~values.valid),
    ]
    names = ["partition", "key", "key_bytes", "value", "headers", "timestamp", "offset", "leader_epoch", "deleted"]
    if formats.key.distinguishes_keys:
        names.remove("key_bytes")
    return pyarrow.RecordBatch.from_arrays(columns, names)


def _timestamps(records: np.ndarray) -> Any:
    """Return the timestamps in microseconds, with null for -1. Raises Undecodable for a timestamp out of range."""
    times_ms = records["timestamp_ms"].astype(np.int64)
    beyond = np.flatnonzero(np.abs(times_ms) > _MOST_MS)
    if len(beyond):
        at = int(beyond[0])
        raise Undecodable(
            f"timestamp {times_ms[at]} is out of range for a table",
            offset=int(records["offset"][at]),
            remedy="Leave out this partition; nothing of it was written",
        )
    return pyarrow.array(times_ms * 1000, pyarrow.int64(), mask=times_ms == -1).view(pyarrow.timestamp("us", "UTC"))


def decode(column: BytesColumn, wanted: Format, offsets: np.ndarray, what: str) -> Any:
    """Decode the column to an Arrow array of the format's type; nulls are kept. Raises Undecodable for a bad value."""
    if wanted.name == "binary":
        return binary(column)
    if wanted.name in FIXED:
        return _numbers(column, wanted, offsets, what)
    if wanted.avro is not None:
        rows = np.arange(len(column))
        return decode_avro(column, wanted.avro, lambda row, why: _fail(rows == row, offsets, what, why))
    return _text(column, wanted, offsets, what)


def _fail(bad: np.ndarray, offsets: np.ndarray, what: str, why: str) -> None:
    at = np.flatnonzero(bad)
    if len(at):
        raise Undecodable(
            f"a {what} {why}",
            offset=int(offsets[at[0]]),
            remedy=f"Use another --{what}-format, such as binary; nothing of this partition was written",
        )


def _numbers(column: BytesColumn, wanted: Format, offsets: np.ndarray, what: str) -> Any:
    kind = np.dtype(FIXED[wanted.name][1])
    sizes = np.diff(column.offsets)
    why = f"does not have the {kind.itemsize} bytes of format {wanted.name}"
    _fail(column.valid & (sizes != kind.itemsize), offsets, what, why)
    numbers = np.zeros(len(column), kind.newbyteorder("="))
    numbers[column.valid] = np.frombuffer(column.data[: column.data_bytes].tobytes(), kind)
    return pyarrow.array(numbers, mask=~column.valid)


def _text(column: BytesColumn, wanted: Format, offsets: np.ndarray, what: str) -> Any:
    raw = binary(column)
    try:
        text = raw.cast(pyarrow.string())
    except pyarrow.ArrowInvalid:
        _fail(np.array([not _is_utf8(item) for item in raw.to_pylist()]), offsets, what, "is not valid UTF-8")
        raise
    if wanted.name == "uuid":
        fits = compute.fill_null(compute.match_substring_regex(text, _UUID), True)
        _fail(~np.asarray(fits), offsets, what, "is not a UUID as Kafka's serializer writes it")
    return text


def _is_utf8(data: bytes | None) -> bool:
    try:
        (data or b"").decode()
    except UnicodeDecodeError:
        return False
    return True
