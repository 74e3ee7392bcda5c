"""Builds the columns of the `kafka-log` data sources as Arrow arrays, from records and from batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow

from keytail.errors import CorruptLog
from keytail.format.batch import BATCH_TABLE, CODEC_MASK, CONTROL, DELETE_HORIZON, LOG_APPEND_TIME, TRANSACTIONAL
from keytail.format.codecs.table import CODECS
from keytail.log.fs import FileSystem
from keytail.log.records.slices import batches, records
from keytail.log.records.table import RecordTable
from keytail.run.arrow import binary, cut, header_names, joined
from keytail.source.column_types import HEADERS
from keytail.source.plan import Piece

_MAX_MS = 2**63 // 1000 - 1  # the largest timestamp of Spark, in ms
_TYPES = {
    "binary": pyarrow.binary(),
    "string": pyarrow.string(),
    "tinyint": pyarrow.int8(),
    "smallint": pyarrow.int16(),
    "int": pyarrow.int32(),
    "bigint": pyarrow.int64(),
    "boolean": pyarrow.bool_(),
    "timestamp": pyarrow.timestamp("us", "UTC"),
}
_HEADER = pyarrow.struct([("key", _TYPES["string"]), ("value", _TYPES["binary"])])
_TYPES[HEADERS] = pyarrow.list_(pyarrow.field("element", _HEADER))


def arrow_schema(columns: Mapping[str, str]) -> Any:
    """Return the Arrow schema of `columns` (names and types of `column_types.py`); pyspark derives an equal schema."""
    return pyarrow.schema([(name, _TYPES[kind]) for name, kind in columns.items()])


def record_batches(fs: FileSystem, pieces: Sequence[Piece], schema: Any) -> Iterator[Any]:
    """Yield Arrow batches of the data records of `pieces`. `schema` is an Arrow schema of some of RECORD_COLUMNS.

    Keys, values and headers are gathered only if the schema has them.
    """
    for piece in pieces:
        make = partial(_of_records, piece, schema)
        yield from joined(make(part) for table in records(fs, piece.slice) for part in cut(table))


def _of_records(piece: Piece, schema: Any, table: RecordTable) -> Any:
    makers: dict[str, Callable[[], Any]] = {
        "key": lambda: binary(table.keys()),
        "value": lambda: binary(table.values()),
        "topic": lambda: pyarrow.repeat(piece.topic, len(table)),
        "partition": lambda: np.full(len(table), piece.partition, np.int32),
        "offset": lambda: table.records["offset"].astype(np.int64),
        "timestamp": lambda: _micros(table.records["timestamp_ms"], table.records["offset"], piece),
        "timestampType": lambda: _timestamp_types(table.batches)[table.records["row"]],
        "headers": lambda: _headers(table, schema.field("headers").type),
    }
    columns = [pyarrow.array(makers[field.name](), field.type) for field in schema]
    return pyarrow.RecordBatch.from_arrays(columns, schema=schema)


def batch_tables(fs: FileSystem, pieces: Sequence[Piece], schema: Any, *, ended: bool = False) -> Iterator[Any]:
    """Yield Arrow batches with a row for each record batch that overlaps the range of a piece. With `ended`, only
    record batches whose last offset is in the range have rows: adjacent ranges then have no row in common. `schema` is
    an Arrow schema of some of BATCH_COLUMNS."""
    for piece in pieces:
        yield from joined(_of_batches(piece, schema, chunk.table, ended) for chunk in batches(fs, piece.slice))


def _of_batches(piece: Piece, schema: Any, table: np.ndarray, ended: bool) -> Any:
    deciding = table["last_offset" if ended else "base_offset"]
    table = table[(table["last_offset"] >= piece.slice.from_offset) & (deciding < piece.slice.end_offset)]
    attributes, n, offsets = table["attributes"], len(table), table["base_offset"]
    has_horizon = (attributes & DELETE_HORIZON) != 0
    none = table["magic"] == 0  # a message of magic 0 has no timestamp

    def time(column: str, where: np.ndarray) -> Any:
        times_ms = np.where(where, table[column], -1)
        return pyarrow.array(_micros(times_ms, offsets, piece), pyarrow.int64(), mask=times_ms == -1)

    makers: dict[str, Callable[[], Any]] = {
        "topic": lambda: pyarrow.repeat(piece.topic, n),
        "partition": lambda: np.full(n, piece.partition, np.int32),
        "segment_base_offset": lambda: np.full(n, piece.slice.segment.base_offset, np.int64),
        "codec": lambda: pyarrow.array(_CODEC_NAMES[attributes & CODEC_MASK].tolist()),
        "timestamp_type": lambda: _timestamp_types(table),
        "is_transactional": lambda: (attributes & TRANSACTIONAL) != 0,
        "is_control": lambda: (attributes & CONTROL) != 0,
        "base_timestamp": lambda: time("base_timestamp_ms", ~has_horizon & ~none),
        "max_timestamp": lambda: time("max_timestamp_ms", ~none),
        "delete_horizon": lambda: time("base_timestamp_ms", has_horizon),
    }

    def made(field: Any) -> Any:
        maker = makers.get(field.name, lambda: np.ascontiguousarray(table[field.name]))
        return pyarrow.array(maker()).cast(field.type)

    return pyarrow.RecordBatch.from_arrays([made(field) for field in schema], schema=schema)


assert {"position", "crc", "magic"} < set(BATCH_TABLE.names or ())
_CODEC_NAMES = np.array([*CODECS, *(f"unknown {code}" for code in range(len(CODECS), CODEC_MASK + 1))])


def _timestamp_types(table: np.ndarray) -> np.ndarray:
    """Return, as in a consumer, the timestamp types (int32) of BATCH_TABLE rows: 0 for the producer's time, 1 for the
    broker's time, -1 for no time."""
    kinds = ((table["attributes"] & LOG_APPEND_TIME) != 0).astype(np.int32)
    return np.where(table["magic"] == 0, np.int32(-1), kinds)


def _micros(times_ms: np.ndarray, offsets: np.ndarray, piece: Piece) -> np.ndarray:
    beyond = np.flatnonzero(np.abs(times_ms) > _MAX_MS)
    if len(beyond):
        at = int(beyond[0])
        raise CorruptLog(
            f"timestamp {times_ms[at]} is out of range for Spark's timestamp type",
            path=piece.slice.path,
            offset=int(offsets[at]),
            remedy="To read without this timestamp, set the option columns to the names of the other columns",
            slug="timestamp-out-of-range",
        )
    return times_ms.astype(np.int64) * 1000


def _headers(table: RecordTable, kind: Any) -> Any:
    """Return the headers of records as an Arrow list array; null for a record without headers, as in Spark's Kafka
    source."""
    headers = table.headers()
    offsets = headers.offsets.astype(np.int32)
    fields = [header_names(headers.keys), binary(headers.values)]
    pairs = pyarrow.StructArray.from_arrays(fields, fields=list(kind.value_type))
    return pyarrow.ListArray.from_arrays(
        pyarrow.array(offsets), pairs, type=kind, mask=pyarrow.array(offsets[1:] == offsets[:-1])
    )
