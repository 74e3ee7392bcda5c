"""Defines the columns of the `kafka-log` data sources with names and types, and the schema of a read.

The columns of records are those of Spark's own Kafka source (SOURCE.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pyspark.sql import types as T  # noqa: N812 (its usual name)

from keytail.errors import UsageProblem

_HEADER = T.StructType([T.StructField("key", T.StringType()), T.StructField("value", T.BinaryType())])
RECORD_COLUMNS: dict[str, T.DataType] = {
    "key": T.BinaryType(),
    "value": T.BinaryType(),
    "topic": T.StringType(),
    "partition": T.IntegerType(),
    "offset": T.LongType(),
    "timestamp": T.TimestampType(),
    "timestampType": T.IntegerType(),
    "headers": T.ArrayType(_HEADER),
}
BATCH_COLUMNS: dict[str, T.DataType] = {
    "topic": T.StringType(),
    "partition": T.IntegerType(),
    "segment_base_offset": T.LongType(),
    "position": T.LongType(),
    "size_bytes": T.IntegerType(),
    "base_offset": T.LongType(),
    "last_offset": T.LongType(),
    "record_count": T.IntegerType(),
    "magic": T.ByteType(),
    "attributes": T.ShortType(),
    "codec": T.StringType(),
    "timestamp_type": T.IntegerType(),
    "is_transactional": T.BooleanType(),
    "is_control": T.BooleanType(),
    "base_timestamp": T.TimestampType(),
    "max_timestamp": T.TimestampType(),
    "delete_horizon": T.TimestampType(),
    "leader_epoch": T.IntegerType(),
    "producer_id": T.LongType(),
    "producer_epoch": T.ShortType(),
    "base_sequence": T.IntegerType(),
    "control_type": T.ShortType(),
    "coordinator_epoch": T.IntegerType(),
    "crc": T.LongType(),
}


def schema_of(columns: Mapping[str, T.DataType], wanted: Sequence[str] | None, *, headers: bool = True) -> T.StructType:
    """Return the schema of the columns `wanted`, in that order, or, if it is None, of all columns; the column headers
    only with `headers`. Raises UsageProblem for an unknown column, and if there are no columns."""
    there = {name: kind for name, kind in columns.items() if headers or name != "headers"}
    names = wanted if wanted is not None else tuple(there)
    for name in names:
        if name not in there:
            remedy = f"The columns are: {', '.join(there)}"
            if name in columns:
                remedy = "Set includeHeaders to true"
            raise UsageProblem(f"option columns: there is no column {name}", remedy=remedy, slug="unknown-column")
    if not names:
        raise UsageProblem(
            "option columns contains no column name", remedy="Give names, separated by commas", slug="empty-option"
        )
    return T.StructType([T.StructField(name, there[name]) for name in names])


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
