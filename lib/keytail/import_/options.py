"""The flags of `import` alone; those shared with other commands are in cli/options.py."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from keytail.cli.options import RUN, SAFETY, size_bytes, within

_SOURCE = "What to import"
_TARGET = "Where to"


class Format(StrEnum):
    parquet = "parquet"
    delta = "delta"
    json = "json"


class Codec(StrEnum):
    none = "none"
    gzip = "gzip"
    snappy = "snappy"
    lz4 = "lz4"
    zstd = "zstd"


SourcePath = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="The table: a file or directory that the driver and every executor see.",
        show_default=False,
    ),
]
FormatFlag = Annotated[
    Format,
    typer.Option(
        "--format",
        help="What SOURCE is. parquet: the fastest, without --sort-by, as no record passes the JVM. json: one object a "
        "line. delta: Spark fetches Delta's jars when it starts; under spark-submit, give them to it.",
        rich_help_panel=_SOURCE,
    ),
]
KeyColumn = Annotated[
    str, typer.Option("--key-column", metavar="NAME", help="Binary or string.", rich_help_panel=_SOURCE)
]
ValueColumn = Annotated[
    str,
    typer.Option(
        "--value-column", metavar="NAME", help="Binary or string; null is a tombstone.", rich_help_panel=_SOURCE
    ),
]
HeadersColumn = Annotated[
    str | None,
    typer.Option(
        "--headers-column",
        metavar="NAME",
        help="An array of structs of key and value. Default: headers, if there is one.",
        rich_help_panel=_SOURCE,
    ),
]
TimestampColumn = Annotated[
    str | None,
    typer.Option(
        "--timestamp-column",
        metavar="NAME",
        help="A timestamp, or ms since 1970; null is the time of the import. Default: timestamp, if there is one.",
        rich_help_panel=_SOURCE,
    ),
]
PartitionColumn = Annotated[
    str | None,
    typer.Option(
        "--partition-column",
        metavar="NAME",
        help="The partition's number. Default: partition, if there is one. Where it is null or not there, the key "
        "decides as in Kafka's producer, and records without a key go round all partitions.",
        rich_help_panel=_SOURCE,
    ),
]
SortBy = Annotated[
    list[str] | None,
    typer.Option(
        "--sort-by",
        metavar="A,B",
        help="Columns of SOURCE by which each partition is sorted, by Spark. Without it, and among equals, records of "
        "one file keep their order.",
        rich_help_panel=_SOURCE,
    ),
]
OneTopic = Annotated[
    str, typer.Option("--topic", metavar="NAME", help="The topic, by its whole name.", rich_help_panel=_TARGET)
]
ReplicaLogDirs = Annotated[
    list[str] | None,
    typer.Option(
        "--replica-log-dirs",
        metavar="DIR[,DIR]",
        help="The log dirs of another broker that has replicas, stopped too; once for each such broker. They get the "
        "same bytes.",
        rich_help_panel=_TARGET,
    ),
]
Append = Annotated[
    bool,
    typer.Option("--append", help="Put the records behind those that partitions have.", rich_help_panel=_TARGET),
]
TopicId = Annotated[
    str | None,
    typer.Option(
        "--topic-id",
        metavar="ID",
        help="The topic's id as `kafka-topics.sh --describe` shows it, where partition.metadata is missing.",
        rich_help_panel=_TARGET,
    ),
]
PartitionCount = Annotated[
    int | None,
    typer.Option(
        "--partition-count",
        metavar="N",
        parser=within(1, 1_000_000),
        help="How many partitions the topic has, where the log dirs do not tell. Of a topic that is not there yet all "
        "are made.",
        rich_help_panel=_TARGET,
    ),
]
CodecFlag = Annotated[
    Codec | None,
    typer.Option(
        "--codec", help="How batches are compressed. Default: the topic's compression.type, else none.",
        rich_help_panel=_TARGET,
    ),
]  # fmt: skip
BatchBytes = Annotated[
    int | None,
    typer.Option(
        "--batch-bytes",
        metavar="SIZE",
        parser=size_bytes,
        help="Most bytes of a batch before compression; one record may have more, up to max.message.bytes. "
        "Default: 128k.",
        rich_help_panel=_TARGET,
    ),
]
SegmentBytes = Annotated[
    int | None,
    typer.Option(
        "--segment-bytes",
        metavar="SIZE",
        parser=size_bytes,
        help="Most bytes of a segment. Default: the topic's segment.bytes.",
        rich_help_panel=_TARGET,
    ),
]
SingleReplica = Annotated[
    bool,
    typer.Option(
        "--single-replica",
        help="State that no partition of the topic has a replica on another broker.",
        rich_help_panel=SAFETY,
    ),
]
ImportId = Annotated[
    str | None,
    typer.Option(
        "--import-id",
        metavar="NAME",
        help="An import of the same id goes into a partition once. Default: from topic, flags, and the source's files "
        "with their sizes and times.",
        rich_help_panel=RUN,
    ),
]
