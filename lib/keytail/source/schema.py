"""Defines the columns of the `kafka-log` data sources with the types of pyspark, and the schema of a read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pyspark.sql import types as T  # noqa: N812 (its usual name)

from keytail.errors import UsageProblem
from keytail.source.column_types import HEADERS, OF_BATCHES, OF_RECORDS, chosen_columns

_HEADER = T.StructType([T.StructField("key", T.StringType()), T.StructField("value", T.BinaryType())])
_PLAIN = (
    T.BinaryType(), T.StringType(), T.ByteType(), T.ShortType(), T.IntegerType(), T.LongType(), T.BooleanType(),
    T.TimestampType(),
)  # fmt: skip
_TYPES: dict[str, T.DataType] = {kind.simpleString(): kind for kind in _PLAIN} | {HEADERS: T.ArrayType(_HEADER)}
RECORD_COLUMNS: dict[str, T.DataType] = {name: _TYPES[kind] for name, kind in OF_RECORDS.items()}
BATCH_COLUMNS: dict[str, T.DataType] = {name: _TYPES[kind] for name, kind in OF_BATCHES.items()}


def schema_of(columns: Mapping[str, T.DataType], wanted: Sequence[str] | None, *, headers: bool = True) -> T.StructType:
    """Return the schema of the columns that `chosen_columns` returns for these arguments."""
    chosen = chosen_columns(columns, wanted, headers=headers)
    return T.StructType([T.StructField(name, kind) for name, kind in chosen.items()])


def check_asked(columns: Mapping[str, T.DataType], schema: T.StructType) -> None:
    """Raise UsageProblem if a column of `schema`, which the user has given, is not in `columns` or has another type."""
    for field in schema:
        wanted = columns.get(field.name)
        if wanted is None:
            raise UsageProblem(
                f"there is no column {field.name}",
                remedy=f"The columns are: {', '.join(columns)}",
                slug="unknown-column",
            )
        if wanted != field.dataType:
            both = (wanted.simpleString(), field.dataType.simpleString())
            raise UsageProblem("column {} has type {}, not {}".format(field.name, *both), slug="column-type-mismatch")
