"""Keep a ledger small: remove old rows, compact small files, and remove files that no table references any more.

May run while others append: Delta allows appends while files are rewritten.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from keytail.errors import KeytailError
from keytail.ledger.tables import TABLES
from keytail.ledger.write import Ledger, again
from keytail.run.delta import alone, with_settings
from keytail.run.session import first_line
from keytail.run.tasks import name_jobs

# Delta's own default, below which it refuses: a reader or writer may still be using the files.
VACUUM_HOURS = 168
# Fewer tasks: Spark's 200 per shuffle, and Delta's for each step of a VACUUM, suit tables of terabytes.
_FEW = {"spark.sql.shuffle.partitions": "8", "spark.sql.sources.parallelPartitionDiscovery.parallelism": "8"}


@dataclass(frozen=True)
class MaintainRow:
    """The result for one table. `removed_rows` are those of days before `oldest_day` (None: all are kept); the other
    numbers are those of the table.

    `status`: `maintained`, `would-maintain`, or `failed`.
    """

    table: str
    status: str
    error: str = ""
    oldest_day: str | None = None
    rows: int | None = None
    removed_rows: int | None = None
    files_before: int | None = None
    files_after: int | None = None
    bytes_before: int | None = None
    bytes_after: int | None = None


def maintain(
    spark: Any, path: str, today: datetime.date, retain_days: int | None, *, execute: bool
) -> list[MaintainRow]:
    """Return a row for each table. Without `execute` the rows report what would be removed."""
    oldest = None if retain_days is None else today - datetime.timedelta(days=retain_days)
    ledger = Ledger(spark, path, "maintain")
    with with_settings(spark, _FEW):
        return [_maintain(ledger, table, oldest, execute) for table in TABLES]


def _maintain(ledger: Ledger, table: str, oldest: datetime.date | None, execute: bool) -> MaintainRow:
    from delta.tables import DeltaTable  # noqa: PLC0415 (brings in pyspark.sql)

    day = oldest.isoformat() if oldest else None
    try:
        name_jobs(ledger.spark.sparkContext, f"ledger: {table} maintained")
        place = ledger.path_of(table)
        delta = DeltaTable.forPath(ledger.spark, place)
        files, size = _files(delta)
        frame = ledger.read(table)
        rows = frame.count()
        old = frame.where(frame.day < oldest).count() if oldest else 0
        if not execute:
            return MaintainRow(table, "would-maintain", "", day, rows, old, files, None, size, None)
        if old:
            _commit(ledger.path, lambda: delta.delete(f"day < DATE'{day}'"))
        _commit(ledger.path, delta.optimize().executeCompaction)
        delta.vacuum(VACUUM_HOURS)
        return MaintainRow(table, "maintained", "", day, rows, old, files, _files(delta)[0], size, _files(delta)[1])
    except Exception as problem:
        text = str(problem) if isinstance(problem, KeytailError) else first_line(problem)
        return MaintainRow(table, "failed", text, day)


def _commit(folder: str, work: Callable[[], Any]) -> None:
    with alone(folder):
        again(work)


def _files(delta: Any) -> tuple[int, int]:
    detail = delta.detail().select("numFiles", "sizeInBytes").first()
    return int(detail["numFiles"]), int(detail["sizeInBytes"])
