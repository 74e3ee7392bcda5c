"""Converts records to Arrow batches for Spark. Only the format `avro` creates a Python object per record.

A key or value that its format cannot decode never becomes null: an error with the record's offset is raised. JSON is
treated as text here: Spark's parser checks it in the JVM (delta_table.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow
from pyarrow import compute

from keytail.errors import KeytailError
from keytail.export.avro import decode_avro
from keytail.export.formats import FIXED, Format, Formats
from keytail.format.columns import BytesColumn, HeadersColumn
from keytail.log.records.table import RecordTable
from keytail.run.arrow import binary, cut, header_names, joined

# The largest TIMESTAMP of Spark, in ms.
_MAX_MS = 2**63 // 1000 - 1
_KEY_BYTES = "key_bytes"

_UUID = "^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}$"


class Undecodable(KeytailError):
    """A key or value is not valid in the requested format."""

    default_slug = "undecodable-record"


@dataclass(frozen=True)
class _Piece:
    """Some records of a partition, with their columns."""

    partition: int
    formats: Formats
    records: np.ndarray
    epochs: np.ndarray
    keys: BytesColumn
    values: BytesColumn
    headers: HeadersColumn

    @classmethod
    def of(cls, table: RecordTable, partition: int, formats: Formats) -> _Piece:
        epochs = table.batches["leader_epoch"][table.records["row"]]
        return cls(partition, formats, table.records, epochs, table.keys(), table.values(), table.headers())


@dataclass(frozen=True)
class ExportColumn:
    """One column of an export. `sql_type`: the column's type in Spark, empty for a key or value, whose format
    determines the type. `values`: returns the column of a piece as an Arrow array. `in_table`: False for a column that
    is not stored."""

    name: str
    sql_type: str
    values: Callable[[_Piece], Any]
    in_table: bool = True


_COLUMNS = (  # in the order of the table
    ExportColumn("partition", "int", lambda p: pyarrow.array(np.full(len(p.records), p.partition, np.int32))),
    ExportColumn("key", "", lambda p: decode(p.keys, p.formats.key, p.records["offset"], "key")),
    ExportColumn(_KEY_BYTES, "binary", lambda p: binary(p.keys)),
    ExportColumn("value", "", lambda p: decode(p.values, p.formats.value, p.records["offset"], "value")),
    ExportColumn("headers", "array<struct<key: string, value: binary>>", lambda p: _headers(p.headers)),
    ExportColumn("timestamp", "timestamp", lambda p: _timestamps(p.records)),
    ExportColumn("offset", "bigint", lambda p: pyarrow.array(p.records["offset"].astype(np.int64))),
    ExportColumn("leader_epoch", "int", lambda p: pyarrow.array(p.epochs.astype(np.int32), mask=p.epochs < 0)),
    ExportColumn("deleted", "boolean", lambda p: pyarrow.array(~p.values.valid), in_table=False),  # a tombstone
)


def columns_of(formats: Formats) -> tuple[ExportColumn, ...]:
    """Return the columns of the rows that tasks of an export return, in order."""
    return tuple(item for item in _COLUMNS if item.name != _KEY_BYTES or not formats.key.distinguishes_keys)


def table_columns() -> list[str]:
    """Return the names of all columns of tables, including `key_bytes`, which only some key formats require."""
    return [column.name for column in _COLUMNS if column.in_table]


def raw_schema(formats: Formats) -> str:
    """Return the Spark schema (as DDL) of the rows that tasks return."""
    types = {"key": formats.key.sql_type, "value": formats.value.sql_type}
    return ", ".join(f"{column.name} {column.sql_type or types[column.name]}" for column in columns_of(formats))


def arrow_batches(tables: Iterable[RecordTable], partition: int, formats: Formats) -> Iterator[Any]:
    """Yield the records as Arrow record batches of `raw_schema`, each of about BATCH_BYTES. Raises Undecodable."""
    return joined(_batch(_Piece.of(part, partition, formats)) for table in tables for part in cut(table))


def _batch(piece: _Piece) -> Any:
    columns = {column.name: column.values(piece) for column in columns_of(piece.formats)}
    return pyarrow.RecordBatch.from_arrays(list(columns.values()), list(columns))


def _headers(headers: HeadersColumn) -> Any:
    pairs = pyarrow.StructArray.from_arrays([header_names(headers.keys), binary(headers.values)], ["key", "value"])
    return pyarrow.ListArray.from_arrays(pyarrow.array(headers.offsets.astype(np.int32)), pairs)


def _timestamps(records: np.ndarray) -> Any:
    """Return the timestamps as Arrow timestamps in microseconds, null for -1. Raises Undecodable if one is out of
    range."""
    times_ms = records["timestamp_ms"].astype(np.int64)
    beyond = np.flatnonzero(np.abs(times_ms) > _MAX_MS)
    if len(beyond):
        at = int(beyond[0])
        raise Undecodable(
            f"timestamp {times_ms[at]} is out of range for a table",
            offset=int(records["offset"][at]),
            remedy="Leave this partition out of the export; nothing of it was written",
        )
    return pyarrow.array(times_ms * 1000, pyarrow.int64(), mask=times_ms == -1).view(pyarrow.timestamp("us", "UTC"))


def decode(column: BytesColumn, wanted: Format, offsets: np.ndarray, what: str) -> Any:
    """Decode keys or values (`what`) to an Arrow array of format `wanted`; nulls are kept. Raises Undecodable."""
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
