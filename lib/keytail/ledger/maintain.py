"""Keeps a ledger small: removes old rows, merges small files, and removes files that were not referenced for a week.

Runs may append at the same time: Delta allows appends while files are rewritten.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

from keytail.errors import NO_ERROR, ErrorText, KeytailError
from keytail.ledger.command import MaintainRow
from keytail.ledger.tables import TABLES
from keytail.ledger.write import Ledger, again
from keytail.run.ended import first_line
from keytail.run.engine import Engine
from keytail.run.spark.delta import alone, changed_settings
from keytail.run.spark.engine import name_jobs

# Age in hours at which unreferenced files are removed. Delta refuses an age below its default of a week, because a
# reader or writer may still use the files.
VACUUM_HOURS = 168
# Spark's default numbers of tasks, 200 for each shuffle and 10,000 for the listing of Delta's VACUUM, are for large
# tables.
_FEW = {"spark.sql.shuffle.partitions": "8", "spark.sql.sources.parallelPartitionDiscovery.parallelism": "8"}


def maintain(
    engine: Engine, path: str, today: datetime.date, retain_days: int | None, *, execute: bool
) -> list[MaintainRow]:
    """Maintain the ledger at `path`, and return a row for each table. Without `execute` nothing is changed."""
    oldest = None if retain_days is None else today - datetime.timedelta(days=retain_days)
    ledger = Ledger(engine, path, "maintain")
    with changed_settings(engine.session, _FEW):
        return [_maintain(ledger, table, oldest, execute) for table in TABLES]


def _maintain(ledger: Ledger, table: str, oldest: datetime.date | None, execute: bool) -> MaintainRow:
    from delta.tables import DeltaTable  # noqa: PLC0415 (brings in pyspark.sql)

    day = oldest.isoformat() if oldest else None
    try:
        name_jobs(ledger.engine.session.sparkContext, f"ledger: {table} maintained")
        place = ledger.path_of(table)
        delta = DeltaTable.forPath(ledger.engine.session, place)
        files, size = _files(delta)
        frame = ledger.engine.session.read.format("delta").load(place)
        rows = frame.count()
        old = frame.where(frame.day < oldest).count() if oldest else 0
        if not execute:
            return MaintainRow(table, "would-maintain", NO_ERROR, day, rows, old, files, None, size, None)
        if old:
            _commit(ledger.path, lambda: delta.delete(f"day < DATE'{day}'"))
        _commit(ledger.path, delta.optimize().executeCompaction)
        delta.vacuum(VACUUM_HOURS)
        after, after_bytes = _files(delta)
        return MaintainRow(table, "maintained", NO_ERROR, day, rows, old, files, after, size, after_bytes)
    except Exception as problem:
        text = ErrorText(problem if isinstance(problem, KeytailError) else first_line(problem))
        return MaintainRow(table, "failed", text, day)


def _commit(folder: str, work: Callable[[], Any]) -> None:
    with alone(folder):
        again(work)


def _files(delta: Any) -> tuple[int, int]:
    detail = delta.detail().select("numFiles", "sizeInBytes").first()
    return int(detail["numFiles"]), int(detail["sizeInBytes"])
