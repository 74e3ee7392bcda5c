"""Defines the columns of the ledger's three Delta tables, and converts rows to Arrow.

Runs only append rows. `event` is `intent` in a row that is written before the files of its run or partition are
changed, `outcome` in a row that is written after these changes, and `downtime` in a row that only has the downtime of a
broker. LEDGER.md beside this file describes how these rows are read together.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import pyarrow

from keytail.errors import stored
from keytail.log.records.contents import SegmentContents
from keytail.run.rows import RECORDED, Recorded, RowOfPartition

VERSION = 1
INTENT, OUTCOME, DOWNTIME = "intent", "outcome", "downtime"

# The columns by name: (type by Spark's name, comment). A column may be added only if older rows may lack its value.
_KEY = {
    "day": ("date", "UTC day of `at`, by which the table is partitioned"),
    "run_id": ("string", "id of the run"),
    "at": ("timestamp", "when the row was created, by the driver's clock"),
    "host": ("string", "host of the driver"),
    "command": ("string", "command of the run"),
}
_EVENT = {"event": ("string", "intent (written before the changes), outcome (written after the changes) or downtime")}
_REPAIRED = {"repaired_by": ("string", "id of the later run that determined this outcome from the disk")}

_NOT_NUMBERS = {field.name for field in fields(RowOfPartition)}
_NUMBERS = {name: ("bigint", "as in the result row") for name in RECORDED if name not in _NOT_NUMBERS}

RUNS = {
    **_KEY,
    **_EVENT,
    "arguments": ("array<string>", "command line"),
    "log_dirs": ("array<string>", "log dirs of the run"),
    "versions": ("map<string,string>", "versions of keytail, Python and packages, by name"),
    "now_ms": ("bigint", "time on which decisions were based, in ms"),
    "config": ("map<string,string>", "given settings, by Kafka's names; secrets are never included"),
    "status": ("string", "done, partly, failed or interrupted"),
    "error": ("string", "why the run failed or ended early"),
    "partitions": ("bigint", "number of chosen partitions"),
    "counts": ("map<string,bigint>", "number of partitions by status"),
    "bytes_before": ("bigint", "size of the .log files of the changed partitions, before the run"),
    "bytes_after": ("bigint", ""),
    "records_before": ("bigint", "number of records of the changed partitions, before the run; null if not counted"),
    "records_after": ("bigint", ""),
    **_REPAIRED,
    "broker": ("string", "for a downtime: the broker that was down"),
    "down_at_ms": ("bigint", "for a downtime: when the stop of the broker began"),
    "reachable_at_ms": ("bigint", "for a downtime: when the broker answered again; null if unknown"),
    "in_sync_at_ms": ("bigint", "for a downtime: when all replicas were in sync again; null if unknown"),
}
PARTITIONS = {
    **_KEY,
    **_EVENT,
    "bundle": ("bigint", "number of the bundle; null if nothing had to be done"),
    "log_dir": ("string", ""),
    "topic": ("string", ""),
    "partition": ("int", ""),
    "status": ("string", "status of the result row; for an intent: begun"),
    "error": ("string", ""),
    **_NUMBERS,
    **_REPAIRED,
}
SEGMENTS = {
    **_KEY,
    "bundle": ("bigint", ""),
    "log_dir": ("string", ""),
    "topic": ("string", ""),
    "partition": ("int", ""),
    "base_offset": ("bigint", ""),
    "next_offset": ("bigint", "offset after the last batch of the segment"),
    "log_bytes": ("bigint", "size of the .log file"),
    "records": ("bigint", "number of data records, which excludes markers"),
    "tombstones": ("bigint", "number of data records with a key and a null value"),
    "min_timestamp_ms": ("bigint", ""),
    "max_timestamp_ms": ("bigint", ""),
    "batches_by_codec": ("map<string,bigint>", ""),
    "batches_by_magic": ("map<int,bigint>", ""),
    "xxh3_128": ("string", "digest of the .log file"),
    "index_status": ("string", "good, missing or bad"),
    "error": ("string", "why the columns with the contents of the segment are unknown"),
    **_REPAIRED,
}
TABLES: Mapping[str, Mapping[str, tuple[str, str]]] = {"runs": RUNS, "partitions": PARTITIONS, "segments": SEGMENTS}

_ARROW = {
    "date": pyarrow.date32(),
    "timestamp": pyarrow.timestamp("us", "UTC"),
    "string": pyarrow.string(),
    "int": pyarrow.int32(),
    "bigint": pyarrow.int64(),
    "array<string>": pyarrow.list_(pyarrow.string()),
    "map<string,string>": pyarrow.map_(pyarrow.string(), pyarrow.string()),
    "map<string,bigint>": pyarrow.map_(pyarrow.string(), pyarrow.int64()),
    "map<int,bigint>": pyarrow.map_(pyarrow.int32(), pyarrow.int64()),
}


@dataclass(frozen=True)
class Stamp:
    """The values that all rows of a run have: the run's id, host and command, and the time of the row (`at_ms`)."""

    run_id: str
    host: str
    at_ms: int
    command: str = "compact"

    def fields(self) -> dict[str, Any]:
        at = datetime.datetime.fromtimestamp(self.at_ms / 1000, datetime.UTC)
        return {"day": at.date(), "run_id": self.run_id, "at": at, "host": self.host, "command": self.command}


def partition_fields(stamp: Stamp, event: str, bundle: int | None, row: Recorded, **more: Any) -> dict[str, Any]:
    of_row = {name: getattr(row, name) for name in RECORDED} | {"error": stored(row.error)}
    if event == INTENT:
        of_row["status"] = "begun"
    return {**stamp.fields(), "event": event, "bundle": bundle, **of_row, **more}


def segment_fields(
    stamp: Stamp, bundle: int | None, row: Recorded, contents: SegmentContents | None, **more: Any
) -> dict[str, Any]:
    """Return the columns of the table `segments` for a segment of the row's partition. If `contents` is None, `more`
    has the base offset of the segment."""
    known = {field.name: getattr(contents, field.name) for field in fields(SegmentContents)} if contents else {}
    place = {"log_dir": row.log_dir, "topic": row.topic, "partition": row.partition}
    return {**stamp.fields(), "bundle": bundle, **place, **known, **more}


def as_arrow(table: str, rows: Iterable[Mapping[str, Any]]) -> pyarrow.Table:
    """Return `rows` as an Arrow table with the columns of `table`; values that a row lacks are null."""
    schema = pyarrow.schema([(name, _ARROW[kind]) for name, (kind, _) in TABLES[table].items()])
    rows = list(rows)
    columns = [
        pyarrow.array([_plain(row.get(field.name)) for row in rows], field.type) for field in schema
    ]
    return pyarrow.Table.from_arrays(columns, schema=schema)


def _plain(value: Any) -> Any:
    return list(value.items()) if isinstance(value, Mapping) else value
