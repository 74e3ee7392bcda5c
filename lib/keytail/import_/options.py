"""The flags of `import` alone; those shared with other commands are in cli/options.py."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from keytail.cli.options import RUN, SAFETY, size_bytes, within

_SOURCE = "Source"
_TARGET = "Target"


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
        help="Table to import: a file or directory that the driver and all executors can read.",
        show_default=False,
    ),
]
FormatFlag = Annotated[
    Format,
    typer.Option(
        "--format",
        help="Format of SOURCE. parquet: the fastest without --sort-by, as no record passes through the JVM. json: one "
        "object per line. delta: Spark fetches Delta's jars when it starts; under spark-submit, pass them to it.",
        rich_help_panel=_SOURCE,
    ),
]
KeyColumn = Annotated[
    str,
    typer.Option(
        "--key-column", metavar="NAME", help="Column of the keys: binary or string.", rich_help_panel=_SOURCE
    ),
]
ValueColumn = Annotated[
    str,
    typer.Option(
        "--value-column",
        metavar="NAME",
        help="Column of the values: binary or string; null is a tombstone.",
        rich_help_panel=_SOURCE,
    ),
]
HeadersColumn = Annotated[
    str | None,
    typer.Option(
        "--headers-column",
        metavar="NAME",
        help="Column of the headers: an array of structs of key and value. Default: headers, if it exists.",
        rich_help_panel=_SOURCE,
    ),
]
TimestampColumn = Annotated[
    str | None,
    typer.Option(
        "--timestamp-column",
        metavar="NAME",
        help="Column of the timestamps: timestamp, or ms since 1970; null means the time of the import. "
        "Default: timestamp, if it exists.",
        rich_help_panel=_SOURCE,
    ),
]
PartitionColumn = Annotated[
    str | None,
    typer.Option(
        "--partition-column",
        metavar="NAME",
        help="Column of the partition numbers. Default: partition, if it exists. If null or absent, the key "
        "determines the partition as in Kafka's producer; keyless records are spread over all partitions.",
        rich_help_panel=_SOURCE,
    ),
]
SortBy = Annotated[
    list[str] | None,
    typer.Option(
        "--sort-by",
        metavar="A,B",
        help="Columns of SOURCE by which Spark sorts each partition. Without it, and among equal values, records of "
        "one file keep their order.",
        rich_help_panel=_SOURCE,
    ),
]
OneTopic = Annotated[
    str, typer.Option("--topic", metavar="NAME", help="Full name of the topic.", rich_help_panel=_TARGET)
]
ReplicaLogDirs = Annotated[
    list[str] | None,
    typer.Option(
        "--replica-log-dirs",
        metavar="DIR[,DIR]",
        help="Log dirs of another stopped broker that has replicas, which get the same bytes; repeat for each such "
        "broker.",
        rich_help_panel=_TARGET,
    ),
]
Append = Annotated[
    bool,
    typer.Option("--append", help="Append to partitions that already have records.", rich_help_panel=_TARGET),
]
TopicId = Annotated[
    str | None,
    typer.Option(
        "--topic-id",
        metavar="ID",
        help="Topic id as shown by `kafka-topics.sh --describe`, if partition.metadata is missing.",
        rich_help_panel=_TARGET,
    ),
]
PartitionCount = Annotated[
    int | None,
    typer.Option(
        "--partition-count",
        metavar="N",
        parser=within(1, 1_000_000),
        help="Number of partitions of the topic, if the log dirs do not determine it. For a topic that does not exist "
        "yet, all are created.",
        rich_help_panel=_TARGET,
    ),
]
CodecFlag = Annotated[
    Codec | None,
    typer.Option(
        "--codec", help="Compression of the batches. Default: the topic's compression.type, else none.",
        rich_help_panel=_TARGET,
    ),
]  # fmt: skip
BatchBytes = Annotated[
    int | None,
    typer.Option(
        "--batch-bytes",
        metavar="SIZE",
        parser=size_bytes,
        help="Maximum bytes of a batch before compression; a single record may have more, up to max.message.bytes. "
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
        help="Maximum bytes of a segment. Default: the topic's segment.bytes.",
        rich_help_panel=_TARGET,
    ),
]
SingleReplica = Annotated[
    bool,
    typer.Option(
        "--single-replica",
        help="Assert that no partition of the topic has a replica on another broker.",
        rich_help_panel=SAFETY,
    ),
]
ImportId = Annotated[
    str | None,
    typer.Option(
        "--import-id",
        metavar="NAME",
        help="Id of the import; each id is imported into a partition only once. Default: derived from topic, flags, "
        "and the source's files with their sizes and modification times.",
        rich_help_panel=RUN,
    ),
]
