"""Flags that several commands have, each declared once: name, help, and the conversion of its text to a value.

This is parsing only: conflicts with the machine (a missing directory, a clock) are detected by the command.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from enum import StrEnum
from typing import Annotated, TypeVar

import typer

# Panels of the help.
SELECT = "Which partitions"
CONFIG = "Configuration"
RUN = "How to run"
SAFETY = "Statements that only you can make"

E = TypeVar("E", bound=StrEnum)

LONG_MAX = 2**63 - 1  # the largest offset, byte position and size that fits in the files
_LATEST_MS = 253_402_300_799_999  # the end of the year 9999, the latest time that can be printed

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class Output(StrEnum):
    table = "table"
    json = "json"


class HighWatermark(StrEnum):
    checkpoint = "checkpoint"
    log_end = "log-end"


def size_bytes(text: str) -> int:
    """Return the number of bytes for `4096`, `512m`, `4g` or `1.5GiB` (units of 1024)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if match is None:
        raise typer.BadParameter(f"{text!r} is no size; give bytes, or a number with k, m, g or t as in 512m")
    size = Decimal(match[1]) * _UNITS[match[2]]
    if size > LONG_MAX:
        raise typer.BadParameter(f"{text!r} is not a size from 0 to {LONG_MAX} bytes")
    return int(size)


def within(low: int, high: int) -> Callable[[str | int], int]:
    """Return a parser of whole numbers in this range, both ends included."""

    def parse(text: str | int) -> int:  # an int is the flag's default
        if not re.fullmatch(r"-?\d{1,19}", str(text), re.ASCII) or not low <= int(text) <= high:
            raise typer.BadParameter(f"{text!r} is not a whole number from {low} to {high}")
        return int(text)

    return parse


def one_of(kind: type[E]) -> Callable[[str], E]:
    """Return a parser of a value of `kind` by its name. Typer's own parser prefixes the error with "Value error"."""

    def parse(text: str) -> E:
        try:
            return kind(text)
        except ValueError:
            raise typer.BadParameter(f"{text!r} is not one of {', '.join(kind)}") from None

    return parse


def choices(kind: type[StrEnum]) -> str:
    """Return the names of the values as the help prints them."""
    return "|".join(kind)


LogDirs = Annotated[
    list[str] | None,
    typer.Option(
        "--log-dirs",
        metavar="DIR[,DIR]",
        help="The broker's log directories: those that hold meta.properties and TOPIC-N folders. "
        "Default: log.dirs of the file given by --config.",
        rich_help_panel=SELECT,
    ),
]
Topic = Annotated[
    list[str] | None,
    typer.Option(
        "--topic",
        metavar="REGEX",
        help="Topics whose whole name matches. Repeatable.",
        rich_help_panel=SELECT,
    ),
]
TopicList = Annotated[
    list[str] | None,
    typer.Option("--topic-list", metavar="A,B", help="Topics by name.", rich_help_panel=SELECT),
]
Partitions = Annotated[
    list[str] | None,
    typer.Option(
        "--partitions",
        metavar="T-0,T-1",
        help="Partitions by name. One named here that is skipped counts as refused.",
        rich_help_panel=SELECT,
    ),
]
Config = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="The broker's server.properties. Only keys that keytail knows are read.",
        rich_help_panel=CONFIG,
    ),
]
TopicConfig = Annotated[
    list[str] | None,
    typer.Option(
        "--topic-config",
        metavar="[TOPIC:]KEY=VALUE",
        help="A setting under Kafka's name, for one topic or for all. Repeatable. cleanup.policy needs a topic.",
        rich_help_panel=CONFIG,
    ),
]
TopicConfigs = Annotated[
    str | None,
    typer.Option(
        "--topic-configs",
        metavar="FILE",
        help="Settings of many topics: what kafka-configs.sh --describe --entity-type topics --all prints, or lines "
        "TOPIC:KEY=VALUE. --topic-config takes precedence over it, and it over the metadata log.",
        rich_help_panel=CONFIG,
    ),
]
NoOverrides = Annotated[
    bool,
    typer.Option(
        "--topics-have-no-overrides",
        help="State that no selected topic has settings of its own beside those given. It says nothing about "
        "cleanup.policy, which must be read or given for each topic.",
        rich_help_panel=SAFETY,
    ),
]
MetadataIsCurrent = Annotated[
    bool,
    typer.Option(
        "--metadata-is-current",
        help="State that the metadata log in the log dirs has the settings of today, though it looks like one that a "
        "cluster left behind when it was reverted to ZooKeeper.",
        rich_help_panel=SAFETY,
    ),
]
Execute = Annotated[
    bool,
    typer.Option(
        "--execute",
        help="Change files. Without it the verb prints what it would do. The broker must be stopped.",
        rich_help_panel=RUN,
    ),
]
RebuildAll = Annotated[
    bool,
    typer.Option(
        "--all",
        help="Make anew every index file that is not what a recovering broker writes, though it is true of its log: "
        "one that lived through a restart of the broker, or was written under another index.interval.bytes.",
        rich_help_panel=RUN,
    ),
]
Truncate = Annotated[
    bool,
    typer.Option(
        "--truncate",
        help="Cut a log that a crash left torn where a broker would cut it at its start; what is lost is printed. "
        "Only above the recovery point, and only where the broker did not stop cleanly.",
        rich_help_panel=SAFETY,
    ),
]
Now = Annotated[
    int | None,
    typer.Option(
        "--now",
        metavar="MS",
        parser=within(0, _LATEST_MS),
        help="The time to decide by, in ms since 1970; for dry runs and tests.",
        rich_help_panel=RUN,
    ),
]
UnsafeClock = Annotated[
    bool,
    typer.Option(
        "--unsafe-clock",
        help="Allow --execute with a --now more than 60 s from the clock, or a clock older than the logs.",
        rich_help_panel=SAFETY,
    ),
]
Master = Annotated[
    str | None,
    typer.Option(
        "--master",
        metavar="URL",
        help="Spark master of the session that this command starts. Default: local[*]",
        rich_help_panel=RUN,
    ),
]
MapMemory = Annotated[
    int | None,
    typer.Option(
        "--map-memory",
        metavar="SIZE",
        parser=size_bytes,
        help="Memory of one task's map of keys, such as 512m. Default: half of the memory over the tasks.",
        rich_help_panel=RUN,
    ),
]
DropKeyless = Annotated[
    bool,
    typer.Option(
        "--drop-keyless",
        help="Drop records without a key, as Kafka does. They mostly mean a wrong cleanup.policy.",
        rich_help_panel=SAFETY,
    ),
]
HighWatermarkFlag = Annotated[
    HighWatermark,
    typer.Option(
        "--high-watermark",
        metavar=choices(HighWatermark),
        parser=one_of(HighWatermark),
        help="log-end states that this copy never rejoins a cluster, or that all replicas were stopped.",
        rich_help_panel=SAFETY,
    ),
]
SharedStorage = Annotated[
    bool,
    typer.Option(
        "--shared-storage",
        help="State that no broker can reach the log dirs, which are on a file system that is not known to be local.",
        rich_help_panel=SAFETY,
    ),
]
LedgerFlag = Annotated[
    str | None,
    typer.Option(
        "--ledger",
        metavar="PATH",
        help="A folder of Delta tables to which the run appends what it is about to do and what it did; made if it is "
        "not there. Many runs may share it. `keytail history` reads it. Starts Spark. A dry run writes nothing.",
        rich_help_panel=RUN,
    ),
]
DeltaJars = Annotated[
    str | None,
    typer.Option(
        "--delta-jars",
        metavar="DIR",
        help="A folder with Delta's jars, where no Maven repository can be reached. Default: Spark fetches them once "
        "(about 30 s) and keeps them. Under spark-submit: its own --packages or --jars.",
        rich_help_panel=RUN,
    ),
]
QuarantineReport = Annotated[
    str | None,
    typer.Option(
        "--quarantine-report",
        metavar="FILE",
        help="Write a JSON array of the partitions that were left alone: what is wrong, where, and what would help. "
        "Outside of every log dir.",
        rich_help_panel=RUN,
    ),
]
RowsFile = Annotated[
    str | None,
    typer.Option(
        "--rows-file",
        metavar="FILE",
        help="Write the rows of --output json to a file as well, where standard output is not to be had alone. Whole "
        "or not at all, and outside of every log dir.",
        rich_help_panel=RUN,
    ),
]
ReportFile = Annotated[
    str | None,
    typer.Option(
        "--report",
        metavar="FILE.html",
        help="Write what the run did as one HTML page, also where it ends early. Outside of every log dir. Needs "
        "keytail[report].",
        rich_help_panel=RUN,
    ),
]
OutputFlag = Annotated[
    Output,
    typer.Option(
        "--output",
        metavar=choices(Output),
        parser=one_of(Output),
        help="json: an array of rows on standard output, and all else on standard error.",
        rich_help_panel=RUN,
    ),
]


def comma_lists(values: list[str] | None) -> tuple[str, ...]:
    """Return the items of a repeatable comma list, in order, without duplicates."""
    return tuple(dict.fromkeys(comma_items(values)))


def comma_items(values: list[str] | None) -> tuple[str, ...]:
    """Return the items of a repeatable comma list, in order, with duplicates."""
    items = [item.strip() for value in values or () for item in value.split(",")]
    return tuple(item for item in items if item)
