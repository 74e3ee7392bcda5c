"""Flags that only `plan` and `compact` have."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated

import typer

from keytail.cli.options import RUN, choices, one_of, size_bytes
from keytail.config.broker_version import BrokerVersion, parse_broker_version


class Grouping(StrEnum):
    measured = "measured"
    kafka = "kafka"


class FanOut(StrEnum):
    auto = "auto"
    never = "never"
    always = "always"


class OldMessages(StrEnum):
    v2 = "v2"
    keep = "keep"


Force = Annotated[
    bool,
    typer.Option(
        "--force",
        help="Compact whatever the dirty ratio and the maximum lag say (and nothing else).",
        rich_help_panel=RUN,
    ),
]
FromLogStart = Annotated[
    bool,
    typer.Option(
        "--from-log-start",
        help="Compact from the log's start, whatever the cleaner's checkpoint says.",
        rich_help_panel=RUN,
    ),
]

def _minutes(text: str) -> float:
    if not re.fullmatch(r"\d{1,9}(\.\d+)?|\.\d+", text, re.ASCII):
        raise typer.BadParameter(f"{text!r} is not a number of minutes from 0 to 999999999")
    return float(text)


Deadline = Annotated[
    float | None,
    typer.Option(
        "--deadline",
        metavar="MINUTES",
        parser=_minutes,
        help="Begin nothing new after this many minutes, no partition and no round of groups; what has begun is "
        "finished.",
        rich_help_panel=RUN,
    ),
]
GroupingFlag = Annotated[
    Grouping,
    typer.Option(
        "--grouping",
        metavar=choices(Grouping),
        parser=one_of(Grouping),
        help="How segments are merged. measured: by the bytes that are left of them. kafka: by those before, as "
        "Kafka's cleaner does, whose first pass merges little and leaves empty segments, which spoil time lookups.",
        rich_help_panel=RUN,
    ),
]
FanOutFlag = Annotated[
    FanOut,
    typer.Option(
        "--fan-out",
        metavar=choices(FanOut),
        parser=one_of(FanOut),
        help="Whether the tasks of all hosts share one partition. auto: where its keys do not fit into --map-memory. "
        "never: such a partition is compacted as far as they do, as by Kafka's cleaner. always: every partition.",
        rich_help_panel=RUN,
    ),
]
MessageFormatFlag = Annotated[
    OldMessages | None,
    typer.Option(
        "--message-format",
        metavar=choices(OldMessages),
        parser=one_of(OldMessages),
        help="What messages of magic 0 and 1 become. keep: messages of the same magic, which all brokers and clients "
        "can read. v2: batches of version 2, for brokers from 3.0 on. Default: by message.format.version and "
        "inter.broker.protocol.version; a partition with such messages is refused where nothing is known.",
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
        help="Version of Kafka, such as 2.8, whose cleaner decides when tombstones and markers are removed. Below 3.1: "
        "by the time of their file, and no delete horizon is written. Default, and from 3.1 on: by delete horizons, "
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
        help="Most bytes of new files beside the old ones, per file system; what needs more is replaced in rounds. "
        "Default: half of what is free.",
        rich_help_panel=RUN,
    ),
]
Throttle = Annotated[
    int | None,
    typer.Option(
        "--throttle",
        metavar="SIZE",
        parser=size_bytes,
        help="Most bytes that the tasks of a host read and write a second, together, such as 100m. Each task has an "
        "equal share.",
        rich_help_panel=RUN,
    ),
]
Replica = Annotated[
    list[str] | None,
    typer.Option(
        "--replica",
        metavar="[NAME=]DIR[,DIR]",
        help="The log directories of one other broker that holds replicas. Repeatable, once for each broker. They "
        "are only read. Tombstones and markers then go only below the offset to which all replicas have been cleaned.",
        rich_help_panel=RUN,
    ),
]
KeepOriginals = Annotated[
    str | None,
    typer.Option(
        "--keep-originals",
        metavar="DIR",
        help="Keep what is replaced as hard links in DIR, for `keytail undo`; until that forgets them no space becomes "
        "free. Outside of every log dir, on the same file system.",
        rich_help_panel=RUN,
    ),
]
CopyOriginals = Annotated[
    bool,
    typer.Option(
        "--copy-originals",
        help="Copy them instead: --keep-originals may lead to another file system, and takes room there.",
        rich_help_panel=RUN,
    ),
]
OutputDir = Annotated[
    list[str] | None,
    typer.Option(
        "--output-dir",
        metavar="DIR[,DIR]",
        help="Leave the log dirs as they are, and write what they would become to these directories, one for each, or "
        "to an object store (s3://bucket/prefix). What is there already and has not changed is not read again.",
        rich_help_panel=RUN,
    ),
]
ScratchDir = Annotated[
    str | None,
    typer.Option(
        "--scratch-dir",
        metavar="DIR",
        help="Where partitions are compacted that then go to an object store. Default: the system's directory for "
        "temporary files, on each host.",
        rich_help_panel=RUN,
    ),
]
ShowKeys = Annotated[
    bool,
    typer.Option(
        "--show-keys",
        help="The page of --report shows the hottest keys as they are, where it has hashes of them else. It then holds "
        "data: keep it where that may be.",
        rich_help_panel=RUN,
    ),
]
