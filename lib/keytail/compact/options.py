"""Flags that only `plan` and `compact` have."""

from __future__ import annotations

import re
from typing import Annotated, Literal

import typer

from keytail.cli import options as o
from keytail.config.broker_version import BrokerVersion, parse_broker_version
from keytail.errors import UsageProblem

Grouping = Literal["measured", "kafka"]
FanOut = Literal["auto", "never", "always"]
OldMessages = Literal["v2", "keep"]
Measure = Literal["not", "exactly", "from a sample"]

Force = Annotated[bool, o.run_flag(
    "--force", "Compact regardless of the dirty ratio and the maximum lag; all other conditions apply."
)]
FromLogStart = Annotated[bool, o.run_flag(
    "--from-log-start", "Compact from the log start offset, regardless of the cleaner's checkpoint."
)]

MeasureFlag = Annotated[bool, o.run_flag(
    "--measure",
    "Read the partitions that are due, and report exactly what a compaction would leave: bytes, records, tombstones. "
    "Nothing is written; a broker may run.",
)]
EstimateFlag = Annotated[bool, o.run_flag(
    "--estimate",
    "Like --measure, but report an interval for each figure, from a sample of the record batches. This takes less "
    "time if the log is compressed.",
)]


def _minutes(text: str) -> float:
    if not re.fullmatch(r"\d{1,9}(\.\d+)?|\.\d+", text, re.ASCII):
        raise typer.BadParameter(f"invalid number of minutes {text!r}: use a number from 0 to 999999999")
    return float(text)


Deadline = Annotated[float | None, o.run_flag(
    "--deadline MINUTES",
    "Start no partition and no pass after this many minutes, but finish those that were started. Partitions "
    "that are expected to free the most bytes per second are first. Default: no limit.",
    parser=_minutes,
)]
PrepareFlag = Annotated[bool, o.run_flag(
    "--prepare",
    "Do all of a compaction except its commit, beside a running broker or on a stopped one: the new segments are "
    "written beside the old ones and proven. --execute on the stopped broker then commits them in seconds, if their "
    "sources have not changed.",
)]
PreparedOnly = Annotated[bool, o.run_flag(
    "--prepared-only", "With --execute: commit what was prepared, and compact nothing else."
)]
RollActive = Annotated[bool, o.run_flag(
    "--roll-active",
    "First roll the active segment, as a broker does by segment.ms, and compact its records too, if a compaction is "
    "then due and all of them are below the high watermark. Kafka's cleaner never cleans the active segment.",
)]


def check_roll_active(roll_active: bool, prepare: bool, prepared_only: bool, output_dirs: tuple[str, ...]) -> None:
    """Raise UsageProblem for flags that cannot be combined with --roll-active."""
    reasons = {
        "--prepare": (prepare, "the active segment can be rolled only while the broker is stopped"),
        "--prepared-only": (prepared_only, "nothing was prepared for an active segment"),
        "--output-dir": (bool(output_dirs), "the log dirs are left unchanged"),
    }
    for flag, (is_given, why) in reasons.items():
        if roll_active and is_given:
            raise UsageProblem(
                f"--roll-active cannot be combined with {flag}: {why}",
                remedy=f"Omit --roll-active, or run without {flag}",
                slug="conflicting-flags",
            )


GroupingFlag = Annotated[Grouping, o.run_flag(
    "--grouping",
    "How segments are merged. measured: by size after cleaning. kafka: by size before cleaning, as Kafka's cleaner "
    "does: its first round merges little and leaves empty segments, which impair lookups by time.",
    Grouping,
)]
FanOutFlag = Annotated[FanOut, o.run_flag(
    "--fan-out",
    "Whether the work on one partition is divided among the tasks of all hosts. auto: if its keys do not fit into "
    "--map-memory. never: such a partition is compacted as far as its keys fit, as Kafka's cleaner does. always: for "
    "every partition.",
    FanOut,
)]
MessageFormatFlag = Annotated[OldMessages | None, o.run_flag(
    "--message-format",
    "Format for messages of magic 0 and 1. keep: the same magic, which all brokers and clients can read. v2: batches "
    "of version 2, for brokers from 3.0 on. Default: by inter.broker.protocol.version and message.format.version; if "
    "the format is unknown, partitions with such messages are refused.",
    OldMessages,
)]


def _version(text: str) -> BrokerVersion:
    try:
        return parse_broker_version(text)
    except ValueError as problem:
        raise typer.BadParameter(str(problem)) from None


BrokerVersionFlag = Annotated[BrokerVersion | None, o.run_flag(
    "--broker-version VERSION",
    "Version of Kafka, such as 2.8, whose rules determine when tombstones and markers are removed. Below 3.1: based on "
    "the time of their file, and no delete horizons are written. By default and from 3.1 on: based on delete "
    "horizons, which older brokers can read, too; nothing is removed earlier than by their own cleaner. Below 3.4, "
    "producers expire after the same idle time as transactional ids.",
    parser=_version,
)]
MaxScratch = Annotated[int | None, o.run_flag(
    "--max-scratch-bytes SIZE",
    "Maximum bytes of new files beside the old ones, per file system; partitions that need more are replaced in "
    "several passes. Default: half of the free space.",
)]
Throttle = Annotated[int | None, o.run_flag(
    "--throttle SIZE",
    "Maximum bytes per second that all tasks of a host together read and write, such as 100m. Each task has an equal "
    "share. Default: no limit.",
)]
Replica = Annotated[list[str] | None, o.run_flag(
    "--replica [NAME=]DIR[,DIR]",
    "Log directories of another broker that holds replicas; they are only read. Repeatable, once per broker. "
    "Tombstones and markers are then removed only below the offset to which all replicas have been cleaned.",
)]
KeepBackup = Annotated[str | None, o.run_flag(
    "--keep-originals DIR",
    "Keep replaced files as hard links in DIR, for `keytail undo`; no space is freed until `keytail undo --forget` "
    "removes them. DIR must be outside every log dir, on the same file system.",
)]
CopyBackup = Annotated[bool, o.run_flag(
    "--copy-originals",
    "Copy replaced files instead of linking them: the directory of --keep-originals may then be on another file "
    "system, and the copies need space there.",
)]
OutputDir = Annotated[list[str] | None, o.run_flag(
    "--output-dir DIR[,DIR]",
    "Leave the log dirs unchanged and write the result to these directories, one per log dir, or to an object store "
    "(s3://bucket/prefix). Partitions already written there that have not changed are not read again.",
)]
ScratchDir = Annotated[str | None, o.run_flag(
    "--scratch-dir DIR",
    "Directory in which partitions are compacted before they are sent to an object store. Default: the system's "
    "directory for temporary files, on each host.",
)]
ShowKeys = Annotated[bool, o.run_flag(
    "--show-keys",
    "Show the hottest keys in the page of --report, instead of their hashes. The page then contains data: protect it "
    "accordingly.",
)]
