"""The flags of `import` alone; those shared with other commands are in cli/options.py."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from keytail.cli.options import RUN, SAFETY, size_bytes, within

_SOURCE = "Source"
_TARGET = "Target"


def _source(flag: str, metavar: str | None, help_text: str) -> Any:
    return typer.Option(flag, metavar=metavar, help=help_text, rich_help_panel=_SOURCE)


def _target(flag: str, metavar: str | None, help_text: str, **more: Any) -> Any:
    return typer.Option(flag, metavar=metavar, help=help_text, rich_help_panel=_TARGET, **more)


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


# fmt: off
SourcePath = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="Table to import: a file or directory that the driver and all executors can read.",
        show_default=False,
    ),
]
FormatFlag = Annotated[Format, _source(
    "--format", None,
    "Format of SOURCE. parquet: the fastest without --sort-by, as no record passes through the JVM. json: one object "
    "per line. delta: Spark fetches Delta's jars when it starts; under spark-submit, pass them to it.",
)]
KeyColumn = Annotated[str, _source("--key-column", "NAME", "Column of the keys: binary or string.")]
ValueColumn = Annotated[str, _source(
    "--value-column", "NAME", "Column of the values: binary or string; null is a tombstone."
)]
HeadersColumn = Annotated[str | None, _source(
    "--headers-column", "NAME",
    "Column of the headers: an array of structs of key and value. Default: headers, if it exists.",
)]
TimestampColumn = Annotated[str | None, _source(
    "--timestamp-column", "NAME",
    "Column of the timestamps: timestamp, or ms since 1970; null means the time of the import. Default: timestamp, if "
    "it exists.",
)]
PartitionColumn = Annotated[str | None, _source(
    "--partition-column", "NAME",
    "Column of the partition numbers. Default: partition, if it exists. If null or absent, the key determines the "
    "partition as in Kafka's producer; keyless records are spread over all partitions.",
)]
SortBy = Annotated[list[str] | None, _source(
    "--sort-by", "A,B",
    "Columns of SOURCE by which Spark sorts each partition. Without it, and among equal values, records of one file "
    "keep their order.",
)]
OneTopic = Annotated[str, _target("--topic", "NAME", "Full name of the topic.")]
ReplicaLogDirs = Annotated[list[str] | None, _target(
    "--replica-log-dirs", "DIR[,DIR]",
    "Log dirs of another stopped broker that has replicas, which get the same bytes; repeat for each such broker.",
)]
Append = Annotated[bool, _target("--append", None, "Append to partitions that already have records.")]
TopicId = Annotated[str | None, _target(
    "--topic-id", "ID", "Topic id as shown by `kafka-topics.sh --describe`, if partition.metadata is missing."
)]
PartitionCount = Annotated[int | None, _target(
    "--partition-count", "N",
    "Number of partitions of the topic, if the log dirs do not determine it. For a topic that does not exist yet, all "
    "are created.",
    parser=within(1, 1_000_000),
)]
CodecFlag = Annotated[Codec | None, _target(
    "--codec", None, "Compression of the batches. Default: the topic's compression.type, else none."
)]
BatchBytes = Annotated[int | None, _target(
    "--batch-bytes", "SIZE",
    "Maximum bytes of a batch before compression; a single record may have more, up to max.message.bytes. "
    "Default: 128k.",
    parser=size_bytes,
)]
SegmentBytes = Annotated[int | None, _target(
    "--segment-bytes", "SIZE", "Maximum bytes of a segment. Default: the topic's segment.bytes.", parser=size_bytes
)]
# fmt: on
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
