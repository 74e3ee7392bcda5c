"""Flags that several commands have, each declared once: name, help, and the conversion of its text to a value.

This is parsing only: conflicts with the machine (a missing directory, a clock) are detected by the command.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Annotated, Any, Literal, get_args

import typer

from keytail.errors import UsageProblem

# Panels of the help.
SELECT = "Which partitions"
CONFIG = "Configuration"
RUN = "How to run"
SAFETY = "Safety assertions"

HighWatermark = Literal["checkpoint", "log-end"]

LONG_MAX = 2**63 - 1  # the largest offset, byte position and size that fits in the files
_LATEST_MS = 253_402_300_799_999  # the end of the year 9999, the latest time that can be printed

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def size_bytes(text: str) -> int:
    """Return the number of bytes for `4096`, `512m`, `4g` or `1.5GiB` (units of 1024)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if match is None:
        raise typer.BadParameter(f"invalid size {text!r}: use bytes or a suffix k, m, g or t, such as 512m")
    size = Decimal(match[1]) * _UNITS[match[2]]
    if size > LONG_MAX:
        raise typer.BadParameter(f"invalid size {text!r}: use 0 to {LONG_MAX} bytes")
    return int(size)


def within(low: int, high: int) -> Callable[[str | int], int]:
    """Return a parser of whole numbers in this range, both ends included."""

    def parse(text: str | int) -> int:  # an int is the flag's default
        if not re.fullmatch(r"-?\d{1,19}", str(text), re.ASCII) or not low <= int(text) <= high:
            raise typer.BadParameter(f"{text!r} is not a whole number from {low} to {high}")
        return int(text)

    return parse


def one_of(kind: Any) -> Callable[[str], str]:
    """Return a parser of a value of a Literal. Typer's own parser prefixes the error with "Value error"."""

    def parse(text: str) -> str:
        if text not in get_args(kind):
            raise typer.BadParameter(f"{text!r} is not one of {', '.join(get_args(kind))}")
        return text

    return parse


def choices(kind: Any) -> str:
    """Return the values of a Literal as the help prints them."""
    return "|".join(get_args(kind))


LogDirs = Annotated[
    list[str] | None,
    typer.Option(
        "--log-dirs",
        metavar="DIR[,DIR]",
        help="The broker's log dirs: the directories that contain meta.properties and TOPIC-N directories. "
        "Default: log.dirs of the file given with --config.",
        rich_help_panel=SELECT,
    ),
]
Topic = Annotated[
    list[str] | None,
    typer.Option(
        "--topic",
        metavar="REGEX",
        help="Select topics whose whole name matches. Repeatable.",
        rich_help_panel=SELECT,
    ),
]
TopicList = Annotated[
    list[str] | None,
    typer.Option("--topic-list", metavar="A,B", help="Select topics by name.", rich_help_panel=SELECT),
]
Partitions = Annotated[
    list[str] | None,
    typer.Option(
        "--partitions",
        metavar="T-0,T-1",
        help="Select partitions by name. A partition named here that is skipped counts as refused.",
        rich_help_panel=SELECT,
    ),
]
Config = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="The broker's server.properties. Keys that keytail does not use are ignored.",
        rich_help_panel=CONFIG,
    ),
]
TopicConfig = Annotated[
    list[str] | None,
    typer.Option(
        "--topic-config",
        metavar="[TOPIC:]KEY=VALUE",
        help="Setting by Kafka's name, for one topic or for all; cleanup.policy requires a topic. Repeatable.",
        rich_help_panel=CONFIG,
    ),
]
TopicConfigs = Annotated[
    str | None,
    typer.Option(
        "--topic-configs",
        metavar="FILE",
        help="Settings of many topics: the output of kafka-configs.sh --describe --entity-type topics --all, or lines "
        "TOPIC:KEY=VALUE. It overrides the metadata log, and --topic-config overrides it.",
        rich_help_panel=CONFIG,
    ),
]
NoOverrides = Annotated[
    bool,
    typer.Option(
        "--topics-have-no-overrides",
        help="Assert that no selected topic has settings of its own besides those given. Does not apply to "
        "cleanup.policy, which must be read or given for each topic.",
        rich_help_panel=SAFETY,
    ),
]
MetadataIsCurrent = Annotated[
    bool,
    typer.Option(
        "--metadata-is-current",
        help="Assert that the metadata log in the log dirs has the current settings, although it looks outdated, or "
        "left behind by a cluster that was reverted to ZooKeeper.",
        rich_help_panel=SAFETY,
    ),
]
Execute = Annotated[
    bool,
    typer.Option(
        "--execute",
        help="Change files. Without it the command prints what it would do. The broker must be stopped.",
        rich_help_panel=RUN,
    ),
]
RebuildAll = Annotated[
    bool,
    typer.Option(
        "--all",
        help="Rebuild every index file that differs from what a recovering broker writes, even if it is valid: it "
        "differs after a restart of the broker, or if index.interval.bytes was changed.",
        rich_help_panel=RUN,
    ),
]
Truncate = Annotated[
    bool,
    typer.Option(
        "--truncate",
        help="Truncate a log that was torn by a crash, where a broker would at its start, and print what is lost. "
        "Only above the recovery point, and only if the broker did not stop cleanly.",
        rich_help_panel=SAFETY,
    ),
]
Now = Annotated[
    int | None,
    typer.Option(
        "--now",
        metavar="MS",
        parser=within(0, _LATEST_MS),
        help="Time for all decisions, in ms since 1970, for dry runs and tests. Default: the clock.",
        rich_help_panel=RUN,
    ),
]
UnsafeClock = Annotated[
    bool,
    typer.Option(
        "--unsafe-clock",
        help="Allow --execute with a --now more than 60 s from the clock, or with a clock older than the logs.",
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
        help="Memory of one task's offset map, such as 512m. Default: half of the memory divided by the tasks.",
        rich_help_panel=RUN,
    ),
]
DropKeyless = Annotated[
    bool,
    typer.Option(
        "--drop-keyless",
        help="Remove records without a key, as Kafka does. They usually mean a wrong cleanup.policy.",
        rich_help_panel=SAFETY,
    ),
]
HighWatermarkFlag = Annotated[
    HighWatermark,
    typer.Option(
        "--high-watermark",
        metavar=choices(HighWatermark),
        parser=one_of(HighWatermark),
        help="Source of the high watermark; log-end asserts that this copy never rejoins a cluster, or that all "
        "replicas were stopped.",
        rich_help_panel=SAFETY,
    ),
]
SharedStorage = Annotated[
    bool,
    typer.Option(
        "--shared-storage",
        help="Assert that no broker can reach the log dirs, which are on a file system not known to be local.",
        rich_help_panel=SAFETY,
    ),
]
LedgerFlag = Annotated[
    str | None,
    typer.Option(
        "--ledger",
        metavar="PATH",
        help="Directory of Delta tables to which the run appends what it is about to do and what it did; created if it "
        "does not exist. Many runs may share it. `keytail history` reads it. Starts Spark. A dry run writes nothing.",
        rich_help_panel=RUN,
    ),
]
DeltaJars = Annotated[
    str | None,
    typer.Option(
        "--delta-jars",
        metavar="DIR",
        help="Directory with Delta's jars, for hosts that cannot reach a Maven repository. Default: Spark downloads "
        "them once (about 30 s) and keeps them. Under spark-submit use its own --packages or --jars.",
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


def parse_time(text: str, flag: str = "--timestamp") -> int:
    """Return milliseconds since 1970, given such a number or an ISO 8601 time (UTC unless it has a time zone)."""
    if re.fullmatch(r"-?\d+", text):
        timestamp_ms = int(text) if len(text) < 20 else -1  # 2^63 has 19 digits
    else:
        try:
            moment = datetime.fromisoformat(text)
        except ValueError as problem:
            raise UsageProblem(
                f"invalid time {text!r} for {flag}",
                remedy="Give milliseconds since 1970, or a time such as 2023-11-14T22:13:20Z",
                slug="invalid-time",
            ) from problem
        since = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - _EPOCH
        timestamp_ms = -(-since // timedelta(milliseconds=1))  # rounded up, so that no earlier record is found
    if not 0 <= timestamp_ms < 2**63:
        raise UsageProblem(
            f"time {text!r} for {flag} is out of range",
            remedy="Give a time from 1970 on; negative numbers, which mean the first and the last offset in Kafka's "
            "tools, are not supported",
            slug="time-out-of-range",
        )
    return timestamp_ms
