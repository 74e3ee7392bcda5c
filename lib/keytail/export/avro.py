"""Decodes Avro in Confluent's wire format (a zero byte, four bytes of schema id, the encoded value) into Arrow columns.

fastavro decodes each key or value to a Python object, which no other export format requires. If several schemas are
given, data of all schemas is resolved to the first schema by Avro's rules of schema resolution.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from keytail.cli.avro_schemas import parse_schema, read_schema, schema_id
from keytail.errors import UsageProblem
from keytail.extras import AVRO, SPARK, require
from keytail.format.columns import BytesColumn

FRAME_BYTES = 5
# Logical types that fastavro decodes. Other logical types are read as the type that they annotate, and then converted
# by Arrow if Arrow knows them.
_KEPT = ("decimal",)
_PLAIN = {
    "boolean": "bool_",
    "int": "int32",
    "long": "int64",
    "float": "float32",
    "double": "float64",
    "bytes": "binary",
    "string": "string",
}
_MAX_DIGITS = 38

Fail = Callable[[int, str], None]


@dataclass(frozen=True)
class AvroSchemas:
    """The schemas by their ids in the registry, as JSON text. The first schema determines the type of the column."""

    by_id: tuple[tuple[int, str], ...]

    @property
    def digest(self) -> str:
        """The digest of the first schema, which depends neither on the other schemas nor on any id."""
        plain = json.dumps(json.loads(self.by_id[0][1]), sort_keys=True)
        return hashlib.blake2b(plain.encode(), digest_size=6).hexdigest()

    @property
    def arrow_type(self) -> Any:
        return _of(self).column_type

    @property
    def sql_type(self) -> str:
        from pyspark.sql.pandas.types import from_arrow_type  # noqa: PLC0415 (imports pyspark.sql)

        return str(from_arrow_type(self.arrow_type, prefer_timestamp_ntz=False).simpleString())


def read_schemas(flag: str, given: Sequence[str]) -> AvroSchemas:
    """Read the schemas of `ID=FILE` arguments of `flag`. Raises UsageProblem if an argument or a schema is invalid, a
    file cannot be read, or tables have no type for the first schema."""
    by_id: dict[int, str] = {}
    for item in given:
        text, equals, path = item.partition("=")
        number = schema_id(text) if equals else None
        if number is None:
            raise UsageProblem(
                f"invalid {flag} '{item}': expected ID=FILE",
                remedy="Give the schema's id in the registry and its file, as 17=FILE",
                slug="invalid-schema-argument",
            )
        by_id[number] = read_schema(flag, path)
    schemas = AvroSchemas(tuple(by_id.items()))
    try:
        _ = schemas.arrow_type
    except UsageProblem as problem:
        problem.what = f"{flag}: {problem.what}"
        raise
    return schemas


def decode_avro(column: BytesColumn, schemas: AvroSchemas, fail: Fail) -> Any:
    """Decode the column to an Arrow array of `schemas.arrow_type`; nulls are kept. `fail(row, why)`, which must raise
    an error, is called for a row that is not in the wire format, or does not match its schema, or is out of range."""
    import pyarrow  # noqa: PLC0415 (only where Spark runs)

    readers = _of(schemas)
    starts, ends = column.offsets[:-1], column.offsets[1:]
    data = np.ascontiguousarray(column.data[: column.data_bytes]).tobytes()
    rows: list[Any] = [None] * len(column)
    for row in np.flatnonzero(column.valid).tolist():
        framed = data[starts[row] : ends[row]]
        if len(framed) < FRAME_BYTES or framed[0] != 0:
            fail(row, "is not in Confluent's wire format (a zero byte, then four bytes of schema id)")
        read = readers.by_id.get(int.from_bytes(framed[1:FRAME_BYTES], "big"))
        if read is None:
            number = int.from_bytes(framed[1:FRAME_BYTES], "big")
            fail(row, f"has schema id {number}, for which no schema was given")
        else:
            try:
                rows[row] = read(framed[FRAME_BYTES:])
            except Exception as reason:  # an error of any type, since the bytes are not trusted
                fail(row, f"does not match its schema: {reason}")
    try:
        return pyarrow.array(rows, readers.built_type).cast(readers.column_type)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, OverflowError) as reason:
        for row, value in enumerate(rows):  # find the row that caused the error
            try:
                pyarrow.array([value], readers.built_type).cast(readers.column_type)
            except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, OverflowError) as its:
                fail(row, f"cannot be stored in a table: {its}")
        raise AssertionError("each value can be converted by itself") from reason


@dataclass(frozen=True)
class _Readers:
    by_id: Mapping[int, Callable[[bytes], Any]]
    built_type: Any
    column_type: Any


@lru_cache(maxsize=8)
def _of(schemas: AvroSchemas) -> _Readers:
    fastavro = _fastavro()
    parsed = {number: _parsed(fastavro, text) for number, text in schemas.by_id}
    wanted = next(iter(parsed.values()))
    built, column = _Types(wanted).both()
    return _Readers({number: _reader(fastavro, schema, wanted) for number, schema in parsed.items()}, built, column)


def _fastavro() -> Any:
    require("Avro", AVRO)
    require("Avro", SPARK)
    import fastavro  # noqa: PLC0415 (optional)

    return fastavro


def _parsed(fastavro: Any, text: str) -> Any:
    return parse_schema(lambda schema: fastavro.parse_schema(_without_annotations(schema)), text)


def _without_annotations(schema: Any) -> Any:
    """Return the schema with each logical type, except decimal, moved to the key `keytail`: fastavro then returns plain
    numbers, and Arrow converts whole columns of dates and times faster."""
    if isinstance(schema, list):
        return [_without_annotations(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    drop = schema.get("logicalType") not in _KEPT
    kept = {name: value for name, value in schema.items() if not (drop and name == "logicalType")}
    if drop and "logicalType" in schema:
        kept["keytail"] = schema["logicalType"]
    for name in ("type", "items", "values"):
        if isinstance(kept.get(name), dict | list):
            kept[name] = _without_annotations(kept[name])
    if isinstance(kept.get("fields"), list):
        kept["fields"] = [
            {**item, "type": _without_annotations(item["type"])} if isinstance(item, dict) and "type" in item else item
            for item in kept["fields"]
        ]
    return kept


def _reader(fastavro: Any, written: Any, wanted: Any) -> Callable[[bytes], Any]:
    reader = None if written is wanted else wanted

    def read(data: bytes) -> Any:
        stream = io.BytesIO(data)
        value = fastavro.schemaless_reader(stream, written, reader)
        if stream.tell() != len(data):
            raise ValueError(f"{len(data) - stream.tell()} bytes follow the record")
        return value

    return read


class _Types:
    """The Arrow types of a schema: for the values of fastavro, and for the column, whose times have microseconds."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._named: dict[str, Any] = {}
        self._open: list[str] = []

    def both(self) -> tuple[Any, Any]:
        return self._of(self._schema, built=True), self._of(self._schema, built=False)

    def _of(self, schema: Any, *, built: bool) -> Any:
        import pyarrow as pa  # noqa: PLC0415 (only where Spark runs)

        if isinstance(schema, list):
            return self._of(self._one_of(schema), built=built)
        if isinstance(schema, str):
            if schema in _PLAIN:
                return getattr(pa, _PLAIN[schema])()
            if schema not in self._named:
                raise UsageProblem(f"a table has no type for Avro type {schema}", slug="unsupported-avro-type")
            return self._of(self._named[schema], built=built)
        kind = schema["type"]
        if isinstance(kind, dict | list):
            return self._of(kind, built=built)
        if "name" in schema and kind in ("record", "enum", "fixed", "error"):
            self._named[schema["name"]] = schema
        annotated = schema.get("keytail") or schema.get("logicalType")
        if annotated == "decimal" and kind in ("bytes", "fixed"):
            if schema["precision"] > _MAX_DIGITS:
                raise UsageProblem(
                    f"a table has no type for decimals of {schema['precision']} digits, only up to {_MAX_DIGITS}",
                    slug="unsupported-avro-type",
                )
            return pa.decimal128(schema["precision"], schema.get("scale", 0))
        if annotated == "date" and kind == "int":
            return pa.date32()
        if annotated in ("timestamp-millis", "timestamp-micros") and kind == "long":
            return pa.timestamp("ms" if built and annotated.endswith("millis") else "us", "UTC")
        if kind == "array":
            return pa.list_(self._of(schema["items"], built=built))
        if kind == "map":
            return pa.map_(pa.string(), self._of(schema["values"], built=built))
        if kind == "enum":
            return pa.string()
        if kind == "fixed":
            return pa.binary()
        if kind in ("record", "error"):
            return pa.struct(list(self._fields(schema, built=built)))
        return self._of(kind, built=built)

    def _fields(self, schema: Any, *, built: bool) -> Iterator[tuple[str, Any]]:
        name = schema["name"]
        if name in self._open:
            raise UsageProblem(
                f"a table has no type for record {name}, which contains itself", slug="unsupported-avro-type"
            )
        if not schema["fields"]:
            raise UsageProblem(
                f"a table has no type for record {name}, which has no fields", slug="unsupported-avro-type"
            )
        self._open.append(name)
        for item in schema["fields"]:
            yield item["name"], self._of(item["type"], built=built)
        self._open.pop()

    @staticmethod
    def _one_of(union: Sequence[Any]) -> Any:
        others = [item for item in union if item != "null"]
        if len(others) != 1:
            raise UsageProblem(
                f"a table has no type for a union of {len(others)} types besides null", slug="unsupported-avro-type"
            )
        return others[0]
