"""Reads rows of a ledger with the deltalake package, which needs no JVM, or with a Spark session.

With both, the same rows of a table's latest commit are returned, as plain Python values.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import pyarrow
import pyarrow.compute as pc

from keytail.acting_user import as_caller
from keytail.errors import KeytailError, UsageProblem
from keytail.ledger.tables import INTENT, OUTCOME, TABLES
from keytail.run.ended import first_line

# By name of a column: the string that the value must equal, or a collection of strings that must contain the value.
Filters = Mapping[str, str | Collection[str]]


def read_rows(path: str, table: str, filters: Filters, spark: Any = None) -> list[dict[str, Any]]:
    """Return those rows of one of the ledger's tables that match `filters`, as dictionaries by column. The session
    `spark` is needed if deltalake is not installed, or if `path` is a URI of remote storage.

    The value of a column that an older table lacks is None. Raises UsageProblem if there is no ledger, and KeytailError
    if the ledger cannot be read.
    """
    if spark is None:
        wanted = " AND ".join(f'"{key}" IN ({_literals(value)})' for key, value in filters.items())
        return _rows(path, table, partial(_by_deltalake, query=f"SELECT * FROM found WHERE {wanted or 'true'}"))
    return _rows(path, table, partial(_by_spark, spark, filters=filters))


def intents_without_outcome(path: str, table: str, keys: Sequence[str], spark: Any = None) -> list[dict[str, Any]]:
    """Return the rows of those intents for which there is no outcome with the same values of the columns `keys`, as
    `read_rows` does. Raises the errors of `read_rows`."""
    equal = " AND ".join(f"intents.{key} = outcomes.{key}" for key in keys)
    query = (
        f"SELECT intents.* FROM (SELECT * FROM {{found}} WHERE event = '{INTENT}') AS intents "
        f"LEFT ANTI JOIN (SELECT * FROM {{found}} WHERE event = '{OUTCOME}') AS outcomes ON {equal}"
    )
    if spark is None:
        return _rows(path, table, partial(_by_deltalake, query=query.format(found="found")))
    return _rows(path, table, partial(_by_spark, spark, query=query))


def _rows(path: str, table: str, read: Callable[[str], pyarrow.Table]) -> list[dict[str, Any]]:
    place = os.path.join(path, table)
    try:
        found = read(place)
    except KeytailError:
        raise
    except Exception as problem:
        raise _unreadable(place, problem) from problem
    missing = dict.fromkeys(set(TABLES[table]) - set(found.column_names))
    return [{**row, **missing} for row in found.to_pylist(maps_as_pydicts="lossy")]


@as_caller()
def _by_deltalake(place: str, query: str) -> pyarrow.Table:
    """Return the result of `query`, in which `found` is the table at `place`. deltalake's own engine runs the query,
    because threads of Arrow's datasets may outlive the interpreter and abort the process."""
    from deltalake import DeltaTable, QueryBuilder  # noqa: PLC0415 (optional)

    return pyarrow.table(QueryBuilder().register("found", DeltaTable(place)).execute(query).read_all())


def _literals(value: Any) -> str:
    values = list(value) if _is_many(value) else [value]
    return ", ".join("'" + str(item).replace("'", "''") + "'" for item in values)


def _by_spark(spark: Any, place: str, filters: Filters | None = None, query: str = "") -> pyarrow.Table:
    frame = spark.read.format("delta").load(place)
    if query:
        frame = spark.sql(query, found=frame)
    for key, value in (filters or {}).items():
        frame = frame.where(frame[key].isin(list(value)) if _is_many(value) else frame[key] == value)
    found = frame.toArrow()
    return found.set_column(
        found.schema.get_field_index("at"), "at", pc.cast(found["at"], pyarrow.timestamp("us", "UTC"))
    )


def _is_many(value: Any) -> bool:
    return isinstance(value, Collection) and not isinstance(value, str)


def _unreadable(place: str, problem: Exception) -> KeytailError:
    text = first_line(problem)
    if any(word in text for word in ("does not exist", "Not found", "not a Delta table", "PATH_NOT_FOUND", "No files")):
        remedy = "Give the --ledger of earlier runs; the first run with it creates the ledger"
        return UsageProblem("there is no ledger", path=place, remedy=remedy, slug="no-ledger")
    return KeytailError(
        f"the ledger cannot be read: {text}",
        path=place,
        remedy="Check the path and the permissions of its files",
        slug="unreadable-ledger",
    )
