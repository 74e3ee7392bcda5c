"""Declares the command `import`: flags, rows, statuses, next step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Annotated, Literal

import typer

from keytail.cli import options as o
from keytail.cli import rows as show
from keytail.cli.command import Command
from keytail.cli.configuration import Configuration, ConfigurationByFlags
from keytail.cli.flags import FromFlags
from keytail.cli.selection import chosen_log_dirs
from keytail.cli.statuses import FAILURES, Status
from keytail.cli.table import PARTITION, STATUS, Column, notes_of, print_below, print_line, print_rows, total
from keytail.errors import UsageProblem
from keytail.extras import DELTA, SPARK, Needs
from keytail.format.codecs.table import CODECS
from keytail.import_.source import Columns, Source
from keytail.run.rows import RowOfPartition
from keytail.run.spark.stores import refuse_credentials

Format = Literal["parquet", "delta", "json"]

_source_flag = o.panel("Source")
_target_flag = o.panel("Target")

SourcePath = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="Table to import: a file or directory that the driver and all executors can read.",
        show_default=False,
    ),
]
FormatFlag = Annotated[Format, _source_flag(
    "--format",
    "Format of SOURCE. parquet is the fastest: without --sort-by, no record passes through the JVM. json: one object "
    "per line. delta: Spark fetches Delta's jars when it starts; with spark-submit, pass the jars to it.",
    Format,
)]
KeyColumn = Annotated[str, _source_flag("--key-column NAME", "Column of the keys: binary or string.")]
ValueColumn = Annotated[str, _source_flag(
    "--value-column NAME", "Column of the values: binary or string; null is a tombstone."
)]
HeadersColumn = Annotated[str | None, _source_flag(
    "--headers-column NAME",
    "Column of the headers: an array of structs of key and value. Default: headers, if it exists.",
)]
TimestampColumn = Annotated[str | None, _source_flag(
    "--timestamp-column NAME",
    "Column of the timestamps: timestamp, or ms since 1970; null means the time of the import. Default: timestamp, "
    "if it exists.",
)]
PartitionColumn = Annotated[str | None, _source_flag(
    "--partition-column NAME",
    "Column of the partition numbers. Default: partition, if it exists. Without a number, the key determines the "
    "partition as in Kafka's producer; keyless records without a number are spread over all partitions.",
)]
SortBy = Annotated[list[str] | None, _source_flag(
    "--sort-by A,B",
    "Columns of SOURCE by which Spark sorts each partition. Without the flag, and among equal values, records of one "
    "file keep their order.",
)]
OneTopic = Annotated[str, _target_flag(
    "--topic NAME", "Full name of the one topic to write. In all other commands, --topic is a regular expression."
)]
ReplicaLogDirs = Annotated[list[str] | None, _target_flag(
    "--replica-log-dirs DIR[,DIR]",
    "Log dirs of another stopped broker; its replicas of the topic get the same bytes. Repeatable.",
)]
Append = Annotated[bool, _target_flag("--append", "Append to partitions that already have records.")]
TopicId = Annotated[str | None, _target_flag(
    "--topic-id ID", "Topic id as shown by `kafka-topics.sh --describe`, if partition.metadata is missing."
)]
PartitionCount = Annotated[int | None, _target_flag(
    "--partition-count N",
    "Number of partitions of the topic, if the log dirs do not determine it. If the topic does not exist yet, all its "
    "partitions are created.",
    parser=o.within(1, 1_000_000),
)]
CodecFlag = Annotated[str | None, _target_flag(
    "--codec", "Compression of the batches. Default: the topic's compression.type, or none.", Literal[CODECS]
)]
BatchBytes = Annotated[int | None, _target_flag(
    "--batch-bytes SIZE",
    "Maximum bytes of a batch before compression; a single record may have more, up to max.message.bytes. Default: "
    "128k.",
)]
SegmentBytes = Annotated[int | None, _target_flag(
    "--segment-bytes SIZE", "Maximum bytes of a segment. Default: the topic's segment.bytes."
)]
SingleReplica = Annotated[bool, o.safety_flag(
    "--single-replica", "Assert that no partition of the topic has a replica on another broker."
)]
ImportId = Annotated[str | None, o.run_flag(
    "--import-id NAME",
    "Id of the import; each id is imported into a partition only once. Default: derived from topic, flags, and the "
    "source's files with their sizes and modification times.",
)]


def _source(
    source: SourcePath,
    format_: FormatFlag = "parquet",
    key_column: KeyColumn = "key",
    value_column: ValueColumn = "value",
    headers_column: HeadersColumn = None,
    timestamp_column: TimestampColumn = None,
    partition_column: PartitionColumn = None,
    sort_by: SortBy = None,
) -> Source:
    columns = Columns(key_column, value_column, headers_column, timestamp_column, partition_column)
    return Source(source, format_, columns, o.comma_lists(sort_by))


def _log_dirs(configuration: Configuration, log_dirs: o.LogDirs = None) -> tuple[str, ...]:
    return chosen_log_dirs(o.comma_lists(log_dirs), configuration)


def _replicas(configuration: Configuration, replica_log_dirs: ReplicaLogDirs = None) -> tuple[tuple[str, ...], ...]:
    return tuple(chosen_log_dirs(o.comma_lists([item]), configuration) for item in replica_log_dirs or ())


@dataclass(frozen=True)
class Request:
    """All parameters of `import`, with the defaults of its flags."""

    source: Annotated[Source, FromFlags(_source)]
    topic: OneTopic
    log_dirs: Annotated[tuple[str, ...], FromFlags(_log_dirs)]
    _: KW_ONLY
    replica_log_dirs: Annotated[tuple[tuple[str, ...], ...], FromFlags(_replicas)] = ()
    append: Append = False
    topic_id: TopicId = None
    partition_count: PartitionCount = None
    codec: CodecFlag = None
    batch_bytes: BatchBytes = None
    segment_bytes: SegmentBytes = None
    configuration: ConfigurationByFlags = field(default_factory=Configuration)
    single_replica: SingleReplica = False
    shared_storage: o.SharedStorage = False
    import_id: ImportId = None
    execute: o.Execute = False
    master: o.Master = None
    submitted: bool = False  # spark-submit runs this process and sets the master

    def __post_init__(self) -> None:
        refuse_credentials(self.source.path, "SOURCE")
        if self.single_replica and self.replica_log_dirs:
            raise UsageProblem(
                "--single-replica and --replica-log-dirs cannot be combined",
                remedy="Give --single-replica only if no partition of the topic has another replica",
                slug="conflicting-flags",
            )

    @property
    def all_log_dirs(self) -> tuple[str, ...]:
        return (*self.log_dirs, *(path for dirs in self.replica_log_dirs for path in dirs))


@dataclass(frozen=True)
class ImportRow(RowOfPartition):
    """The result for one partition of the topic."""

    records: int = 0
    source_bytes: Annotated[int | None, "size of keys and values; only in a dry run"] = None
    log_bytes: Annotated[int | None, "size of the new segments, per replica"] = None
    segments: Annotated[int | None, "number of new segments, per replica"] = None
    first_offset: Annotated[int | None, "first offset of the imported records"] = None
    end_offset: Annotated[int | None, "end of the imported offsets, exclusive"] = None
    replicas: Annotated[int, "number of replicas that are written"] = 1
    import_id: Annotated[str, "id of the import, by which a repetition is recognized"] = ""
    notes: tuple[str, ...] = ()
    start_ms: int | None = None
    end_ms: int | None = None


def exit_status(rows: Sequence[ImportRow], request: Request | None = None) -> int:
    """Return 0 if no partition has a problem. If some partitions have one, return 3 if records of other partitions were
    or can be imported, and 1 if not. A partition with the status `unchanged` counts neither as a problem nor as
    imported."""
    if all(row.status not in FAILURES for row in rows):
        return 0
    return 3 if any(row.status.startswith("imported") or row.status == "would-import" for row in rows) else 1


_COLUMNS: tuple[Column[ImportRow], ...] = (
    PARTITION,
    STATUS,
    Column("records", lambda row: show.count(row.records)),
    Column("keys and values", lambda row: show.human_bytes(row.source_bytes)),
    Column("log size", lambda row: show.human_bytes(row.log_bytes)),
    Column("segments", lambda row: show.plain(row.segments)),
    Column("offsets", lambda row: show.offsets(row.first_offset, row.end_offset)),
    Column("took", lambda row: "" if row.log_bytes is None else show.human_seconds(row.start_ms, row.end_ms)),
)


def show_rows(rows: Sequence[ImportRow], request: Request) -> None:
    """Print a line for each partition, the reasons, then totals."""
    print_rows("Import" if request.execute else "Dry run: nothing was changed", _COLUMNS, rows)
    print_below(rows, notes_of(rows))
    text = total(rows)
    done = [row for row in rows if row.status == "imported"]
    if done:
        size = sum((row.log_bytes or 0) * row.replicas for row in done)
        text += f" {sum(row.records for row in done):,} records, {show.human_bytes(size)} of log."
    print_line(f"\n{text}")


def next_step(rows: Sequence[ImportRow], request: Request) -> str:
    if not request.execute and any(row.status == "would-import" for row in rows):
        return "This was a dry run. To import, stop the brokers, and run the same command with --execute."
    if any(row.status in FAILURES for row in rows):
        return "The reasons why partitions were not imported, and the remedies, are given above."
    return "Next: start the brokers." if any(row.status == "imported" for row in rows) else ""


def _extras(request: Request) -> Needs:
    yield ("--format delta", DELTA) if request.source.format == "delta" else ("import", SPARK)


IMPORT = Command(
    name="import",
    also_called=("load", "bulk-load", "write", "produce", "ingest", "append"),
    help="Write a table of records directly into partition directories of stopped brokers.\n\n"
    "An import bypasses the leader, quotas, ACLs and schema checks. Without --execute the command counts the records "
    "for each partition.",
    request=Request,
    run="keytail.import_.driver:import_records",
    extras=_extras,
    examples=(
        "keytail import orders.parquet --topic orders --log-dirs /var/lib/kafka --codec zstd",
        "keytail import orders.parquet --topic orders --log-dirs /var/lib/kafka --codec zstd --execute",
    ),
    rows={"": ImportRow},
    statuses={
        "would-import": Status("dry run: with --execute, records would be imported", "done"),
        "imported": Status("the records were imported", "done"),
        "imported-before": Status("an earlier run of the same import imported the records"),
        "unchanged": Status("the source has no records for the partition"),
        **FAILURES,
    },
    exits={1: "nothing could be imported"},
    show=show_rows,
    next_step=next_step,
    exit_status=exit_status,
)
