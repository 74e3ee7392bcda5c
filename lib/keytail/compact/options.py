"""Flags that only `plan` and `compact` have."""

from __future__ import annotations

import re
from typing import Annotated, Literal

import typer

from keytail.cli.options import RUN, choices, one_of, size_bytes
from keytail.config.broker_version import BrokerVersion, parse_broker_version

Grouping = Literal["measured", "kafka"]
FanOut = Literal["auto", "never", "always"]
OldMessages = Literal["v2", "keep"]

Force = Annotated[
    bool,
    typer.Option(
        "--force",
        help="Compact regardless of the dirty ratio and the maximum lag; all other conditions apply.",
        rich_help_panel=RUN,
    ),
]
FromLogStart = Annotated[
    bool,
    typer.Option(
        "--from-log-start",
        help="Compact from the log start offset, regardless of the cleaner's checkpoint.",
        rich_help_panel=RUN,
    ),
]


def _minutes(text: str) -> float:
    if not re.fullmatch(r"\d{1,9}(\.\d+)?|\.\d+", text, re.ASCII):
        raise typer.BadParameter(f"invalid number of minutes {text!r}: use a number from 0 to 999999999")
    return float(text)


Deadline = Annotated[
    float | None,
    typer.Option(
        "--deadline",
        metavar="MINUTES",
        parser=_minutes,
        help="Start no partition and no round of groups after this many minutes; what was started is finished. "
        "Default: no limit.",
        rich_help_panel=RUN,
    ),
]
GroupingFlag = Annotated[
    Grouping,
    typer.Option(
        "--grouping",
        metavar=choices(Grouping),
        parser=one_of(Grouping),
        help="How segments are merged. measured: by their sizes after cleaning. kafka: by their sizes before, as by "
        "Kafka's cleaner, whose first pass merges little and leaves empty segments, which impair lookups by time.",
        rich_help_panel=RUN,
    ),
]
FanOutFlag = Annotated[
    FanOut,
    typer.Option(
        "--fan-out",
        metavar=choices(FanOut),
        parser=one_of(FanOut),
        help="Whether the tasks of all hosts share one partition. auto: if its keys do not fit into --map-memory. "
        "never: such a partition is compacted as far as its keys fit, as by Kafka's cleaner. always: every partition.",
        rich_help_panel=RUN,
    ),
]
MessageFormatFlag = Annotated[
    OldMessages | None,
    typer.Option(
        "--message-format",
        metavar=choices(OldMessages),
        parser=one_of(OldMessages),
        help="Format for messages of magic 0 and 1. keep: the same magic, which all brokers and clients can read. "
        "v2: batches of version 2, for brokers from 3.0 on. Default: by message.format.version and "
        "inter.broker.protocol.version; if the format is unknown, partitions with such messages are refused.",
        rich_help_panel=RUN,
    ),
]


def _version(text: str) -> BrokerVersion:
    try:
        return parse_broker_version(text)
    except ValueError as problem:
        raise typer.BadParameter(str(problem)) from None


BrokerVersionFlag = Annotated[
    BrokerVersion | None,
    typer.Option(
        "--broker-version",
        metavar="VERSION",
        parser=_version,
        help="Version of Kafka, such as 2.8, whose rules determine when tombstones and markers are removed. Below 3.1: "
        "by the time of their file, and no delete horizons are written. Default, and from 3.1 on: by delete horizons, "
        "which older brokers can read, and which remove nothing earlier.",
        rich_help_panel=RUN,
    ),
]
MaxScratch = Annotated[
    int | None,
    typer.Option(
        "--max-scratch-bytes",
        metavar="SIZE",
        parser=size_bytes,
        help="Maximum bytes of new files beside the old ones, per file system; partitions that need more are replaced "
        "in rounds. Default: half of the free space.",
        rich_help_panel=RUN,
    ),
]
Throttle = Annotated[
    int | None,
    typer.Option(
        "--throttle",
        metavar="SIZE",
        parser=size_bytes,
        help="Maximum bytes per second that all tasks of a host together read and write, such as 100m. Each task has "
        "an equal share. Default: no limit.",
        rich_help_panel=RUN,
    ),
]
Replica = Annotated[
    list[str] | None,
    typer.Option(
        "--replica",
        metavar="[NAME=]DIR[,DIR]",
        help="Log directories of another broker that holds replicas; they are only read. Repeatable, once per broker. "
        "Tombstones and markers are then removed only below the offset to which all replicas have been cleaned.",
        rich_help_panel=RUN,
    ),
]
KeepBackup = Annotated[
    str | None,
    typer.Option(
        "--keep-originals",
        metavar="DIR",
        help="Keep replaced files as hard links in DIR, for `keytail undo`; no space is freed until `keytail undo "
        "--forget` removes them. DIR must be outside every log dir, on the same file system.",
        rich_help_panel=RUN,
    ),
]
CopyBackup = Annotated[
    bool,
    typer.Option(
        "--copy-originals",
        help="Copy replaced files instead of linking them: --keep-originals may be on another file system, and needs "
        "space there.",
        rich_help_panel=RUN,
    ),
]
OutputDir = Annotated[
    list[str] | None,
    typer.Option(
        "--output-dir",
        metavar="DIR[,DIR]",
        help="Leave the log dirs unchanged and write the result to these directories, one for each, or to an object "
        "store (s3://bucket/prefix). Partitions already written there that have not changed are not read again.",
        rich_help_panel=RUN,
    ),
]
ScratchDir = Annotated[
    str | None,
    typer.Option(
        "--scratch-dir",
        metavar="DIR",
        help="Directory in which partitions are compacted before they are sent to an object store. Default: the "
        "system's directory for temporary files, on each host.",
        rich_help_panel=RUN,
    ),
]
ShowKeys = Annotated[
    bool,
    typer.Option(
        "--show-keys",
        help="Show the hottest keys in the page of --report, instead of their hashes. The page then contains data: "
        "protect it accordingly.",
        rich_help_panel=RUN,
    ),
]
