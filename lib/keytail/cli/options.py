"""Declares each flag that several commands have: its name, its help, and the conversion of its text to a value.

Values are only parsed here; the command checks them against the machine (a missing directory, a wrong clock).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Annotated, Any, Literal, get_args

import typer

from keytail.errors import UsageProblem

HighWatermark = Literal["checkpoint", "log-end"]

LONG_MAX = 2**63 - 1  # the largest number that fits into an 8-byte field of Kafka's files
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

    def parse(text: str | int) -> int:  # an int is the default of the flag
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


def panel(title: str | None) -> Callable[..., Any]:
    """Return a function that declares a flag in this panel of the help."""

    def flag(usage: str, about: str, kind: Any = None, **more: Any) -> Any:
        """Declare a flag. `usage` is as in the help, such as `--map-memory SIZE`; `kind` is a Literal of the values."""
        names = [part for part in usage.split() if part.startswith("-")]
        metavar = usage.removeprefix(" ".join(names)).strip()
        if kind is not None:
            metavar, more["parser"] = choices(kind), one_of(kind)
        elif metavar == "SIZE":
            more["parser"] = size_bytes
        return typer.Option(*names, metavar=metavar or None, help=about, rich_help_panel=title, **more)

    return flag


flag = panel(None)
select_flag = panel("Which partitions")
config_flag = panel("Configuration")
run_flag = panel("How to run")
safety_flag = panel("Safety assertions")

LogDirs = Annotated[list[str] | None, select_flag(
    "--log-dirs DIR[,DIR]",
    "The broker's log dirs: the directories that contain meta.properties and TOPIC-N directories. Default: log.dirs "
    "of the file given with --config.",
)]
Topic = Annotated[list[str] | None, select_flag(
    "--topic REGEX",
    "Select topics whose whole name matches this regular expression; at least one must match. Repeatable.",
)]
TopicList = Annotated[list[str] | None, select_flag("--topic-list A,B", "Select topics by name; all must exist.")]
Partitions = Annotated[list[str] | None, select_flag(
    "--partitions T-0,T-1", "Select partitions by name. A partition named here that is skipped counts as refused."
)]
Config = Annotated[str | None, config_flag(
    "--config FILE", "The broker's server.properties. Keys that keytail does not use are ignored."
)]
TopicConfig = Annotated[list[str] | None, config_flag(
    "--topic-config [TOPIC:]KEY=VALUE",
    "Setting by Kafka's name, for one topic or for all; cleanup.policy requires a topic. Repeatable.",
)]
TopicConfigs = Annotated[str | None, config_flag(
    "--topic-configs FILE",
    "Settings of many topics: the output of kafka-configs.sh --describe --entity-type topics --all, or lines "
    "TOPIC:KEY=VALUE. The file overrides the metadata log, and --topic-config overrides the file.",
)]
NoOverrides = Annotated[bool, safety_flag(
    "--topics-have-no-overrides",
    "Assert that no selected topic has settings of its own besides those given. The flag does not apply to "
    "cleanup.policy, which must be read or given for each topic.",
)]
MetadataIsCurrent = Annotated[bool, safety_flag(
    "--metadata-is-current",
    "Assert that the metadata log in the log dirs has the current settings, even if it looks outdated or the cluster "
    "seems to have been reverted to ZooKeeper.",
)]
Execute = Annotated[bool, run_flag(
    "--execute", "Change files. Without this flag the command prints what it would do. The broker must be stopped."
)]
Now = Annotated[int | None, run_flag(
    "--now MS",
    "Time for all decisions, in ms since 1970, for dry runs and tests. Default: the clock.",
    parser=within(0, _LATEST_MS),
)]
UnsafeClock = Annotated[bool, safety_flag(
    "--unsafe-clock",
    "Allow --execute with a --now more than 60 s from the clock, and a clock that is behind the newest segment.",
)]
Master = Annotated[str | None, run_flag(
    "--master URL", "Use Spark with this master. Default: local[*] if the run needs Spark or is long, else no Spark."
)]
MapMemory = Annotated[int | None, run_flag(
    "--map-memory SIZE",
    "Memory of one task's offset map, such as 512m. Default: half of the host's memory, divided by the number of "
    "tasks that run at a time.",
)]
DropKeyless = Annotated[bool, safety_flag(
    "--drop-keyless", "Remove records without a key, as Kafka does. Such records usually mean a wrong cleanup.policy."
)]
HighWatermarkFlag = Annotated[HighWatermark, safety_flag(
    "--high-watermark",
    "Source of the high watermark; log-end asserts that this copy never rejoins a cluster, or that all replicas were "
    "stopped.",
    HighWatermark,
)]
SharedStorage = Annotated[bool, safety_flag(
    "--shared-storage",
    "Assert that no broker can reach the log dirs, which are on a file system not known to be local.",
)]
LedgerFlag = Annotated[str | None, run_flag(
    "--ledger PATH",
    "Directory or URI (s3a://bucket/path) of Delta tables to which the run appends what it is about to do and what it "
    "did. A missing directory is created. Many runs may share the tables, which `keytail history` reads. The run "
    "starts Spark for a URI, or if the Python package deltalake is not installed. A dry run writes nothing.",
)]
DeltaJars = Annotated[str | None, run_flag(
    "--delta-jars DIR",
    "Directory with Delta's jars, for hosts that cannot reach a Maven repository. Default: Spark downloads the jars "
    "once (about 30 s) and keeps the jars. Under spark-submit use the --packages or --jars of spark-submit.",
)]

# Flags of other tools, each with the flags of keytail that may be meant.
FLAGS_MEANT: dict[str, tuple[str, ...]] = {
    "--yes": ("--execute",), "-y": ("--execute",), "--apply": ("--execute",), "--run": ("--execute",),
    "--confirm": ("--execute",), "--no-dry-run": ("--execute",), "--force": ("--execute",), "-f": ("--execute",),
    "--json": ("--output json",), "--format": ("--output",), "-o": ("--output",),
    "--dir": ("--log-dirs",), "--path": ("--log-dirs",), "--data-dir": ("--log-dirs",), "--log-dir": ("--log-dirs",),
    "--properties": ("--config",), "--config-file": ("--config",), "-c": ("--config",),
    "--topics": ("--topic-list", "--topic"), "-t": ("--topic", "--topic-list"), "--all-topics": ("--topic '.*'",),
    "--partition": ("--partitions",), "-p": ("--partitions",),
    "--threads": ("--master 'local[N]'",), "--parallelism": ("--master 'local[N]'",),
    "--jobs": ("--master 'local[N]'",), "-j": ("--master 'local[N]'",), "--processes": ("--master 'local[N]'",),
    "--memory": ("--map-memory",), "--timeout": ("--deadline",),
    "--debug": ("--verbose",), "--silent": ("--quiet",), "-s": ("--quiet",),
    "--backup": ("--keep-originals",), "--originals": ("--keep-originals",),
    "--out": ("--output-dir", "--to"), "--destination": ("--to", "--output-dir"), "--target": ("--to", "--output-dir"),
    "--time": ("--timestamp",),
}  # fmt: skip


def comma_lists(values: list[str] | None) -> tuple[str, ...]:
    """Return the items of a repeatable comma list, in order, without duplicates."""
    return tuple(dict.fromkeys(comma_items(values)))


def comma_items(values: list[str] | None) -> tuple[str, ...]:
    """Return the items of a repeatable comma list, in order, with duplicates."""
    items = [item.strip() for value in values or () for item in value.split(",")]
    return tuple(item for item in items if item)


def parse_time(text: str, flag: str = "--timestamp") -> int:
    """Return milliseconds since 1970, given as a number or as an ISO 8601 time (UTC unless it has a time zone)."""
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
