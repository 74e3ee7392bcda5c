"""Writes one of the ledger's tables with the deltalake package, without a JVM. on_spark.py writes the same table.

The package's threads keep the rights of the thread that first called the package, so every call is made as the caller
(acting_user.py).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

# Delta's names of types by Spark's names, for the types whose names differ.
_NAMES = {"bigint": "long", "int": "integer"}


class DeltalakeTable:
    """The Delta table at `path`, with the methods of SparkTable."""

    def __init__(self, path: str) -> None:
        self._path = path

    def create(self, columns: Mapping[str, tuple[str, str]], properties: Mapping[str, str]) -> None:
        from deltalake import DeltaTable, Schema  # noqa: PLC0415 (optional)

        fields = [_field(name, kind, comment) for name, (kind, comment) in columns.items()]
        DeltaTable.create(
            self._path,
            Schema.from_json(json.dumps({"type": "struct", "fields": fields})),
            mode="ignore",
            partition_by=["day"],
            configuration=dict(properties),
            raise_if_key_not_exists=False,  # Delta does not know keytail's properties
        )

    def description(self) -> tuple[Mapping[str, str], Mapping[str, str]]:
        table = self._table()
        fields = json.loads(table.schema().to_json())["fields"]
        return table.metadata().configuration, {field["name"]: _kind(field["type"]) for field in fields}

    def add_columns(self, columns: Mapping[str, tuple[str, str]]) -> None:
        from deltalake import Field  # noqa: PLC0415 (optional)

        fields = [Field.from_json(json.dumps(_field(name, kind))) for name, (kind, _) in columns.items()]
        self._table().alter.add_columns(fields)

    def append(self, rows: Any, app_id: str, number: int) -> None:
        from deltalake import CommitProperties, Transaction, write_deltalake  # noqa: PLC0415 (optional)

        table = self._table()
        last = table.transaction_version(app_id)
        if last is not None and last >= number:
            return
        is_newer = len(table.schema().fields) > rows.num_columns
        write_deltalake(
            table,
            rows,
            mode="append",
            schema_mode="merge" if is_newer else None,  # columns that a newer keytail added are null
            commit_properties=CommitProperties(
                custom_metadata={"isBlindAppend": True},  # otherwise Spark's DELETE conflicts with the append
                app_transactions=[Transaction(app_id, number, time.time_ns() // 1_000_000)],
            ),
        )

    def _table(self) -> Any:
        from deltalake import DeltaTable  # noqa: PLC0415 (optional)

        return DeltaTable(self._path)


def _field(name: str, kind: str, comment: str | None = None) -> dict[str, Any]:
    metadata = {} if comment is None else {"comment": comment}
    return {"name": name, "type": _json_type(kind), "nullable": True, "metadata": metadata}


def _json_type(kind: str) -> Any:
    """Return the type with Spark's name `kind` in Delta's JSON format."""
    if kind.startswith("array<"):
        return {"type": "array", "elementType": _json_type(kind[6:-1]), "containsNull": True}
    if kind.startswith("map<"):
        key, value = kind[4:-1].split(",")
        types = {"keyType": _json_type(key), "valueType": _json_type(value)}
        return {"type": "map", **types, "valueContainsNull": True}
    return _NAMES.get(kind, kind)


def _kind(found: Any) -> str:
    """Return Spark's name of a type in Delta's JSON format. Only types that ledgers have are supported."""
    if isinstance(found, str):
        return next((kind for kind, name in _NAMES.items() if name == found), found)
    if found["type"] == "array":
        return f"array<{_kind(found['elementType'])}>"
    if found["type"] == "map":
        return f"map<{_kind(found['keyType'])},{_kind(found['valueType'])}>"
    return str(found["type"])
