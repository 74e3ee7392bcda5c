"""Declares the command `export`: flags, rows, statuses, next step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Annotated, Literal

from keytail.cli import options as o
from keytail.cli import rows as show
from keytail.cli.command import Command
from keytail.cli.configuration import BrokerSettings, Configuration
from keytail.cli.flags import FromFlags
from keytail.cli.selection import PartitionFilterFlags
from keytail.cli.statuses import FAILURES, Status, exit_status_of
from keytail.cli.table import (
    PARTITION,
    STATUS,
    TOOK,
    Column,
    about_each,
    notes_of,
    print_below,
    print_line,
    print_rows,
    total,
)
from keytail.errors import UsageProblem
from keytail.export.formats import Format, FormatName, Formats
from keytail.extras import DELTA
from keytail.run.rows import RowOfPartition

_what_flag = o.panel("What to export")
_target_flag = o.panel("Where to")

To = Annotated[str, _target_flag(
    "--to DIR",
    "Directory or URI (s3a://bucket/path) of the tables, one per topic at DIR/TOPIC. Driver and executors must have "
    "access to a directory at this path.",
)]
_FORMATS = (
    "binary: unchanged. utf8: text. json: validated text. short, int, long, float, double, uuid: as Kafka's "
    "serializers write them. avro: Confluent's wire format, with --key-schema and --value-schema."
)
KeyFormat = Annotated[FormatName, _what_flag(
    "--key-format FORMAT", f"Format of keys. {_FORMATS}", parser=o.one_of(FormatName)
)]
ValueFormat = Annotated[FormatName, _what_flag(
    "--value-format FORMAT", "Format of values, with the same names as --key-format.", parser=o.one_of(FormatName)
)]
_SCHEMA = "and its id in the registry; repeatable. Records of all schemas are resolved to the first schema."
KeySchema = Annotated[list[str] | None, _what_flag("--key-schema ID=FILE", f"Avro schema of keys {_SCHEMA}")]
ValueSchema = Annotated[list[str] | None, _what_flag("--value-schema ID=FILE", f"Avro schema of values {_SCHEMA}")]
AsOfOffset = Annotated[int | None, _what_flag(
    "--as-of-offset N",
    "Export the state of each partition before offset N (exclusive). The export needs a separate table.",
    parser=o.within(0, o.LONG_MAX),
)]
AsOfTimestamp = Annotated[str | None, _what_flag(
    "--as-of-timestamp MS-OR-TIME",
    "Export the state before the first record at or after this time (ms since 1970, or ISO 8601). The export needs a "
    "separate table.",
)]
Full = Annotated[bool, o.run_flag("--full", "Export all records again, including those that the table already has.")]
ChangeFeed = Annotated[bool, o.run_flag(
    "--change-feed",
    "Make Delta record the changes of rows (delta.enableChangeDataFeed), also in an existing table, from this export "
    "on.",
)]
Execute = Annotated[bool, o.run_flag(
    "--execute", "Write the tables. Without this flag the command prints what it would do. Log dirs are only read."
)]


def format_of(what: Literal["key", "value"], name: FormatName, schemas: Sequence[str] | None) -> Format:
    """Return the format of keys or values (`what`). Raises UsageProblem unless avro and schemas are given together."""
    flag = f"--{what}-schema"
    if (name == "avro") != bool(schemas):
        raise UsageProblem(
            f"--{what}-format avro and {flag} must be given together",
            remedy=f"Give both (for example {flag} 17=FILE), or neither",
            slug="missing-flag",
        )
    from keytail.export.avro import read_schemas  # noqa: PLC0415 (--help needs no log code)

    return Format(name, read_schemas(flag, schemas) if schemas else None)


def _formats(
    key_format: KeyFormat = "binary",
    value_format: ValueFormat = "binary",
    key_schema: KeySchema = None,
    value_schema: ValueSchema = None,
) -> Formats:
    return Formats(format_of("key", key_format, key_schema), format_of("value", value_format, value_schema))


@dataclass(frozen=True)
class Request:
    """All parameters of `export`, with the defaults of its flags."""

    partition_filter: PartitionFilterFlags
    target: To
    formats: Annotated[Formats, FromFlags(_formats)] = field(default_factory=Formats)
    _: KW_ONLY
    configuration: BrokerSettings = field(default_factory=Configuration)
    as_of_offset: AsOfOffset = None
    as_of_timestamp: AsOfTimestamp = None
    full: Full = False
    change_feed: ChangeFeed = False
    high_watermark: o.HighWatermarkFlag = "checkpoint"
    drop_keyless: o.DropKeyless = False
    map_memory_bytes: o.MapMemory = None
    delta_jars: o.DeltaJars = None
    execute: Execute = False
    master: o.Master = None
    submitted: bool = False  # spark-submit runs this process and sets the master

    @property
    def as_of(self) -> str:
        if self.as_of_offset is not None:
            return f"offset {self.as_of_offset}"
        return "" if self.as_of_timestamp is None else f"timestamp {o.parse_time(self.as_of_timestamp)}"


@dataclass(frozen=True)
class ExportRow(RowOfPartition):
    """The result for one partition."""

    strategy: Annotated[str, "the strategy: `full` or `incremental`"] = ""
    why: Annotated[str, "the reason for the strategy, or why nothing is exported"] = ""
    from_offset: Annotated[int | None, "first offset that is read"] = None
    end_offset: Annotated[int | None, "end of the offsets that are read, exclusive"] = None
    log_bytes: Annotated[int | None, "size of the segments that are read"] = None
    records: Annotated[int | None, "number of rows that were written"] = None
    tombstones: Annotated[int | None, "number of tombstones that are the latest records of their keys"] = None
    keyless: Annotated[int | None, "number of records without a key, which were left out"] = None
    table: Annotated[str, "directory or URI of the table"] = ""
    notes: tuple[str, ...] = ()
    start_ms: int | None = None
    end_ms: int | None = None


def exit_status(rows: Sequence[ExportRow], request: Request | None = None) -> int:
    return exit_status_of(rows)


_COLUMNS: tuple[Column[ExportRow], ...] = (
    PARTITION,
    STATUS,
    Column("strategy", lambda row: row.strategy, is_number=False),
    Column("offsets", lambda row: show.offsets(row.from_offset, row.end_offset)),
    Column("log size", lambda row: show.human_bytes(row.log_bytes)),
    Column("records", lambda row: show.count(row.records)),
    Column("tombstones", lambda row: show.count(row.tombstones)),
    TOOK,
)


def show_rows(rows: Sequence[ExportRow], request: Request) -> None:
    """Print a line for each partition, the reasons, then totals."""
    print_rows("Export" if request.execute else "Dry run: nothing was changed", _COLUMNS, rows)
    reasons = ((row.name, row.why) for row in rows if row.why and not row.error)
    print_below(rows, [*about_each(reasons), *notes_of(rows)])
    text = total(rows)
    done = [row for row in rows if row.status == "exported"]
    if done:
        size = show.human_bytes(sum(row.log_bytes or 0 for row in done))
        text += f" {sum(row.records or 0 for row in done):,} records, from {size} of log."
    print_line(f"\n{text}")


def next_step(rows: Sequence[ExportRow], request: Request) -> str:
    if not request.execute and any(row.status == "would-export" for row in rows):
        return "This was a dry run. To export, run the same command with --execute."
    if any(row.status in FAILURES for row in rows):
        return "Partitions that were not exported are unchanged in the table; the reasons are given above."
    if any(row.status == "exported" for row in rows):
        return f"The table of each topic is the folder with its name in {request.target}."
    return ""


EXPORT = Command(
    name="export",
    also_called=("extract", "delta", "consume", "unload", "snapshot"),
    help="Write the latest state of compacted topics to Delta tables: the latest committed record of each key.\n\n"
    "The log dirs are only read. An existing table is updated with the new records. Without --execute the command "
    "prints what it would do.",
    request=Request,
    run="keytail.export.driver:export",
    extras=lambda request: [("export", DELTA)],
    examples=("keytail export --log-dirs /var/lib/kafka --topic-list users --to /lake --key-format utf8 --execute",),
    rows={"": ExportRow},
    statuses={
        "would-export": Status("dry run: with --execute, records would be exported", "done"),
        "exported": Status("records were exported", "done"),
        "clean": Status("there are no new records"),
        **FAILURES,
    },
    exits={1: "nothing could be exported"},
    show=show_rows,
    next_step=next_step,
    exit_status=exit_status,
    reads_records=True,
)
