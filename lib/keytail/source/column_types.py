"""Lists the columns of the `kafka-log` data sources, and chooses the columns of a read. Neither Spark nor Arrow is
imported.

The columns of records are those of Spark's own Kafka source (SOURCE.md). Types are named as in Spark's SQL: `schema.py`
maps these names to the types of pyspark, and `columns.py` to the types of Arrow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from keytail.errors import UsageProblem

K = TypeVar("K")

HEADERS = "array<struct<key:string,value:binary>>"
OF_RECORDS = {
    "key": "binary",
    "value": "binary",
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "timestamp": "timestamp",
    "timestampType": "int",
    "headers": HEADERS,
}
OF_BATCHES = {
    "topic": "string",
    "partition": "int",
    "segment_base_offset": "bigint",
    "position": "bigint",
    "size_bytes": "int",
    "base_offset": "bigint",
    "last_offset": "bigint",
    "record_count": "int",
    "magic": "tinyint",
    "attributes": "smallint",
    "codec": "string",
    "timestamp_type": "int",
    "is_transactional": "boolean",
    "is_control": "boolean",
    "base_timestamp": "timestamp",
    "max_timestamp": "timestamp",
    "delete_horizon": "timestamp",
    "leader_epoch": "int",
    "producer_id": "bigint",
    "producer_epoch": "smallint",
    "base_sequence": "int",
    "control_type": "smallint",
    "coordinator_epoch": "int",
    "crc": "bigint",
}


def chosen_columns(columns: Mapping[str, K], wanted: Sequence[str] | None, *, headers: bool = True) -> dict[str, K]:
    """Return the columns to read, with their types: the columns `wanted`, in that order, or all columns if `wanted` is
    None. The column `headers` exists only if `headers` is True. Raises UsageProblem if a wanted column does not exist,
    and if no column is wanted."""
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
    return {name: there[name] for name in names}
