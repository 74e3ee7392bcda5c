"""The flags of the verbs, each declared once: name, help, and how its text becomes a value.

Parsing only: what contradicts the machine (a missing directory, a clock) is found by the verb.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, TypeVar

import typer

_SELECT = "Which partitions"
_CONFIG = "Configuration"
_RUN = "How to run"
_SAFETY = "Statements that only you can make"

E = TypeVar("E", bound=StrEnum)

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class Output(StrEnum):
    table = "table"
    json = "json"


class Grouping(StrEnum):
    measured = "measured"
    kafka = "kafka"


class FanOut(StrEnum):
    auto = "auto"
    never = "never"
    always = "always"


class HighWatermark(StrEnum):
    checkpoint = "checkpoint"
    log_end = "log-end"


def size_bytes(text: str) -> int:
    """Bytes of `4096`, `512m`, `4g`, `1.5GiB` (units of 1024)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if match is None:
        raise typer.BadParameter(f"{text!r} is no size; give bytes, or a number with k, m, g or t as in 512m")
    return int(float(match[1]) * _UNITS[match[2]])


def one_of(kind: type[E]) -> Callable[[str], E]:
    """A value of `kind` by its name. Typer's own way of choosing says "Value error" before what is wrong."""

    def parse(text: str) -> E:
        try:
            return kind(text)
        except ValueError:
            raise typer.BadParameter(f"{text!r} is not one of {', '.join(kind)}") from None

    return parse


def _choices(kind: type[StrEnum]) -> str:
    return "|".join(kind)


LogDirs = Annotated[
    list[str] | None,
    typer.Option(
        "--log-dirs",
        metavar="DIR[,DIR]",
        help="The broker's log directories: those that hold meta.properties and TOPIC-N folders. "
        "Default: log.dirs of the file given by --config.",
        rich_help_panel=_SELECT,
    ),
]
Topic = Annotated[
    list[str] | None,
    typer.Option(
        "--topic",
        metavar="REGEX",
        help="Topics whose whole name matches. Repeatable.",
        rich_help_panel=_SELECT,
    ),
]
TopicList = Annotated[
    list[str] | None,
    typer.Option("--topic-list", metavar="A,B", help="Topics by name.", rich_help_panel=_SELECT),
]
Partitions = Annotated[
    list[str] | None,
    typer.Option(
        "--partitions",
        metavar="T-0,T-1",
        help="Partitions by name. One named here that is skipped counts as refused.",
        rich_help_panel=_SELECT,
    ),
]
Config = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="The broker's server.properties. Only keys that keytail knows are read.",
        rich_help_panel=_CONFIG,
    ),
]
TopicConfig = Annotated[
    list[str] | None,
    typer.Option(
        "--topic-config",
        metavar="[TOPIC:]KEY=VALUE",
        help="A setting under Kafka's name, for one topic or for all. Repeatable. cleanup.policy needs a topic.",
        rich_help_panel=_CONFIG,
    ),
]
NoOverrides = Annotated[
    bool,
    typer.Option(
        "--topics-have-no-overrides",
        help="State that no selected topic has settings of its own but those given by --topic-config.",
        rich_help_panel=_SAFETY,
    ),
]
Execute = Annotated[
    bool,
    typer.Option(
        "--execute",
        help="Change files. Without it the verb prints what it would do. The broker must be stopped.",
        rich_help_panel=_RUN,
    ),
]
RebuildAll = Annotated[
    bool,
    typer.Option(
        "--all",
        help="Make anew every index file that is not what a recovering broker writes, though it is true of its log: "
        "one that lived through a restart of the broker, or was written under another index.interval.bytes.",
        rich_help_panel=_RUN,
    ),
]
Truncate = Annotated[
    bool,
    typer.Option(
        "--truncate",
        help="Cut a log that a crash left torn where a broker would cut it at its start; what is lost is printed. "
        "Only above the recovery point, and only where the broker did not stop cleanly.",
        rich_help_panel=_SAFETY,
    ),
]
Now = Annotated[
    int | None,
    typer.Option(
        "--now",
        metavar="MS",
        help="The time to decide by, in ms since 1970; for dry runs and tests.",
        rich_help_panel=_RUN,
    ),
]
UnsafeClock = Annotated[
    bool,
    typer.Option(
        "--unsafe-clock",
        help="Allow --execute with a --now more than 60 s from the clock, or a clock older than the logs.",
        rich_help_panel=_SAFETY,
    ),
]
Force = Annotated[
    bool,
    typer.Option(
        "--force",
        help="Compact whatever the dirty ratio and the maximum lag say (and nothing else).",
        rich_help_panel=_RUN,
    ),
]
FromLogStart = Annotated[
    bool,
    typer.Option(
        "--from-log-start",
        help="Compact from the log's start, whatever the cleaner's checkpoint says.",
        rich_help_panel=_RUN,
    ),
]
Deadline = Annotated[
    float | None,
    typer.Option(
        "--deadline",
        metavar="MINUTES",
        min=0.0,
        help="Begin nothing new after this many minutes, no partition and no round of groups; what has begun is "
        "finished.",
        rich_help_panel=_RUN,
    ),
]
Master = Annotated[
    str | None,
    typer.Option(
        "--master",
        metavar="URL",
        help="Spark master of the session that this command starts. Default: local[*]",
        rich_help_panel=_RUN,
    ),
]
GroupingFlag = Annotated[
    Grouping,
    typer.Option(
        "--grouping",
        metavar=_choices(Grouping),
        parser=one_of(Grouping),
        help="How segments are merged. measured: by the bytes that are left of them. kafka: by those before, as "
        "Kafka's cleaner does, whose first pass merges little and leaves empty segments, which spoil time lookups.",
        rich_help_panel=_RUN,
    ),
]
MapMemory = Annotated[
    int | None,
    typer.Option(
        "--map-memory",
        metavar="SIZE",
        parser=size_bytes,
        help="Memory of one task's map of keys, such as 512m. Default: half of the memory over the tasks.",
        rich_help_panel=_RUN,
    ),
]
FanOutFlag = Annotated[
    FanOut,
    typer.Option(
        "--fan-out",
        metavar=_choices(FanOut),
        parser=one_of(FanOut),
        help="Whether the tasks of all hosts share one partition. auto: where its keys do not fit into --map-memory. "
        "never: such a partition is compacted as far as they do, as by Kafka's cleaner. always: every partition.",
        rich_help_panel=_RUN,
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
        rich_help_panel=_RUN,
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
        rich_help_panel=_RUN,
    ),
]
DropKeyless = Annotated[
    bool,
    typer.Option(
        "--drop-keyless",
        help="Drop records without a key, as Kafka does. They mostly mean a wrong cleanup.policy.",
        rich_help_panel=_SAFETY,
    ),
]
HighWatermarkFlag = Annotated[
    HighWatermark,
    typer.Option(
        "--high-watermark",
        metavar=_choices(HighWatermark),
        parser=one_of(HighWatermark),
        help="log-end states that this copy never rejoins a cluster, or that all replicas were stopped.",
        rich_help_panel=_SAFETY,
    ),
]
SharedStorage = Annotated[
    bool,
    typer.Option(
        "--shared-storage",
        help="State that no broker can reach the log dirs, which are on a network file system.",
        rich_help_panel=_SAFETY,
    ),
]
Replica = Annotated[
    list[str] | None,
    typer.Option(
        "--replica",
        metavar="[NAME=]DIR[,DIR]",
        help="The log directories of one other broker that holds replicas. Repeatable, once for each broker. They "
        "are only read. Tombstones and markers then go only below the offset to which all replicas have been cleaned.",
        rich_help_panel=_RUN,
    ),
]
Replicas = Annotated[
    list[str] | None,
    typer.Option(
        "--replica",
        metavar="[NAME=]DIR[,DIR]",
        help="The log directories of one broker, all of them. Give it once for each broker, at least twice.",
        rich_help_panel=_SELECT,
    ),
]
Examples = Annotated[
    int,
    typer.Option(
        "--examples",
        metavar="N",
        min=1,
        help="Most examples of each kind of difference.",
        rich_help_panel=_RUN,
    ),
]
KeepOriginals = Annotated[
    str | None,
    typer.Option(
        "--keep-originals",
        metavar="DIR",
        help="Keep what is replaced as hard links in DIR, for `keytail undo`; until that forgets them no space becomes "
        "free. Outside of every log dir, on the same file system.",
        rich_help_panel=_RUN,
    ),
]
CopyOriginals = Annotated[
    bool,
    typer.Option(
        "--copy-originals",
        help="Copy them instead: --keep-originals may lead to another file system, and takes room there.",
        rich_help_panel=_RUN,
    ),
]
OutputDir = Annotated[
    list[str] | None,
    typer.Option(
        "--output-dir",
        metavar="DIR[,DIR]",
        help="Leave the log dirs as they are, and write what they would become to these directories, one for each, or "
        "to an object store (s3://bucket/prefix). What is there already and has not changed is not read again.",
        rich_help_panel=_RUN,
    ),
]
ScratchDir = Annotated[
    str | None,
    typer.Option(
        "--scratch-dir",
        metavar="DIR",
        help="Where partitions are compacted that then go to an object store. Default: the system's directory for "
        "temporary files, on each host.",
        rich_help_panel=_RUN,
    ),
]
LedgerFlag = Annotated[
    str | None,
    typer.Option(
        "--ledger",
        metavar="PATH",
        help="A folder of Delta tables to which the run appends what it is about to do and what it did; made if it is "
        "not there. Many runs may share it. `keytail history` reads it. Starts Spark. A dry run writes nothing.",
        rich_help_panel=_RUN,
    ),
]
DeltaJars = Annotated[
    str | None,
    typer.Option(
        "--delta-jars",
        metavar="DIR",
        help="A folder with Delta's jars, where no Maven repository can be reached. Default: Spark fetches them once "
        "(about 30 s) and keeps them. Under spark-submit: its own --packages or --jars.",
        rich_help_panel=_RUN,
    ),
]
Offset = Annotated[
    int | None,
    typer.Option(
        "--offset",
        metavar="N",
        help="Find the first record at this offset or behind it.",
        rich_help_panel=_RUN,
    ),
]
Timestamp = Annotated[
    str | None,
    typer.Option(
        "--timestamp",
        metavar="MS-OR-TIME",
        help="Find the first record at or after this time: ms since 1970, or ISO 8601 such as 2023-11-14T22:13:20Z "
        "(UTC unless it names a zone).",
        rich_help_panel=_RUN,
    ),
]
Explain = Annotated[
    bool,
    typer.Option("--explain", help="Say each step of the search, with its numbers.", rich_help_panel=_RUN),
]
AllSettings = Annotated[
    bool,
    typer.Option("--all", help="Show every setting, Kafka's defaults too, each with where it comes from."),
]
CountRecords = Annotated[
    bool,
    typer.Option("--records", help="Count the records: reads every batch. Without it only offsets are known."),
]
QuarantineReport = Annotated[
    str | None,
    typer.Option(
        "--quarantine-report",
        metavar="FILE",
        help="Write a JSON array of the partitions that were left alone: what is wrong, where, and what would help. "
        "Outside of every log dir.",
        rich_help_panel=_RUN,
    ),
]
RowsFile = Annotated[
    str | None,
    typer.Option(
        "--rows-file",
        metavar="FILE",
        help="Write the rows of --output json to a file as well, where standard output is not to be had alone. Whole "
        "or not at all, and outside of every log dir.",
        rich_help_panel=_RUN,
    ),
]
ReportFile = Annotated[
    str | None,
    typer.Option(
        "--report",
        metavar="FILE.html",
        help="Write what the run did as one HTML page, also where it ends early. Outside of every log dir. Needs "
        "keytail[report].",
        rich_help_panel=_RUN,
    ),
]
OutputFlag = Annotated[
    Output,
    typer.Option(
        "--output",
        metavar=_choices(Output),
        parser=one_of(Output),
        help="json: an array of rows on standard output, and all else on standard error.",
        rich_help_panel=_RUN,
    ),
]


def comma_lists(values: list[str] | None) -> tuple[str, ...]:
    """The items of a repeatable comma list, in order, each once."""
    return tuple(dict.fromkeys(comma_items(values)))


def comma_items(values: list[str] | None) -> tuple[str, ...]:
    """The same, each as often as it stands there."""
    items = [item.strip() for value in values or () for item in value.split(",")]
    return tuple(item for item in items if item)
