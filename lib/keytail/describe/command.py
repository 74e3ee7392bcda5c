"""Declares the command `describe`: flags, rows, exit status."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Annotated, Any

from rich.markup import escape

from keytail.cli import options as o
from keytail.cli import rows as show
from keytail.cli.command import BROKER, Command
from keytail.cli.configuration import Configuration, ConfigurationByFlags
from keytail.cli.selection import PartitionFilterFlags
from keytail.cli.table import Column, print_line, print_paragraph, print_rows
from keytail.config.message_format import MessageFormat
from keytail.durations import duration_text
from keytail.errors import NO_ERROR, ErrorText
from keytail.run.rows import OfPartition

_OF_OLD_MESSAGES = {
    "v2": "Compaction writes messages of formats v0 and v1 in format v2",
    "keep": "Compaction writes messages of formats v0 and v1 in their own format, which a broker before 3.0 may need",
    "unknown": "Compaction refuses messages of formats v0 and v1; to compact them, give --message-format v2 or keep",
}

AllSettings = Annotated[bool, o.flag("--all", "Show every setting, including Kafka's defaults, each with its source.")]
CountRecords = Annotated[bool, o.flag(
    "--records", "Count the records, by reading every batch. Without the flag, only offsets are shown."
)]


@dataclass(frozen=True)
class Request:
    """All parameters of `describe`, with the defaults of its flags."""

    partition_filter: PartitionFilterFlags
    configuration: ConfigurationByFlags = field(default_factory=Configuration)
    _: KW_ONLY
    every_setting: AllSettings = False
    count_records: CountRecords = False
    now_ms: o.Now = None
    high_watermark: o.HighWatermarkFlag = "checkpoint"


@dataclass(frozen=True)
class DescribeRow(OfPartition):
    """The description of one partition."""

    topic: str
    partition: int
    log_dir: str
    segments: int
    bytes: Annotated[int, "size of the `.log` files"]
    offsets: Annotated[int, "number of offsets from log start offset to log end offset"]
    records: Annotated[int | None, "number of records, including markers; `null` if they were not counted"]
    log_start_offset: int
    log_end_offset: int
    high_watermark: int | None
    cleaner_checkpoint: int | None
    clean_shutdown: Annotated[bool, "whether the last broker stopped cleanly"]
    live: Annotated[bool, "a broker is running, so the numbers may have changed since they were read"]
    eligible: Annotated[bool, "whether `compact` would process the partition now"]
    blocker: Annotated[str, "the reason why the partition is not eligible"]
    first_dirty_offset: Annotated[int | None, "`null` if the offset cannot be determined"]
    end_dirty_offset: Annotated[int | None, "end of the dirty offsets, exclusive"]
    clean_bytes: Annotated[int | None, "size of the segments below the first dirty offset"]
    cleanable_bytes: Annotated[int | None, "size of the segments from `first_dirty_offset` to `end_dirty_offset`"]
    dirty_ratio: Annotated[float | None, "`cleanable_bytes`, divided by the sum of `clean_bytes` and `cleanable_bytes`"]
    overrides_known: Annotated[bool, "whether all of the topic's own settings are known"]
    message_format: Annotated[
        MessageFormat,
        "how a compaction writes messages of formats v0 and v1: `v2`, `keep` (in their own format), or `unknown` (such "
        "messages are refused)",
    ]
    settings: Annotated[
        Mapping[str, Mapping[str, Any]],
        "`value` and `source` by Kafka's name, and `note` if the setting has no effect",
    ]
    kafka: Annotated[
        Mapping[str, Any],
        "`versions` that may have written the log dirs, and `evidence`: what was found, and what it means",
    ]
    error: ErrorText = NO_ERROR


def exit_status(rows: Sequence[DescribeRow], request: Request | None = None) -> int:
    """Return 0 if all partitions were read, and their records counted if requested; 3 if only some partitions were; 1
    if none were."""
    bad = sum(bool(row.error) for row in rows)
    return 0 if not bad else 1 if bad == len(rows) else 3


def _is_unreadable(row: DescribeRow) -> bool:
    return bool(row.error) and not row.segments


def _known(row: DescribeRow, text: str) -> str:
    return "" if _is_unreadable(row) else text


def _due(row: DescribeRow) -> str:
    return "unreadable" if _is_unreadable(row) else "yes" if row.eligible else "no"


_RECORDS: Column[DescribeRow] = Column("records", lambda row: _known(row, show.count(row.records)))
_COLUMNS: tuple[Column[DescribeRow], ...] = (
    Column("partition", lambda row: row.name + (" (in use)" if row.live else ""), is_number=False),
    Column("segments", lambda row: _known(row, show.count(row.segments))),
    Column("log size", lambda row: _known(row, show.human_bytes(row.bytes))),
    _RECORDS,
    Column("offsets", lambda row: _known(row, show.count(row.offsets))),
    Column("log start", lambda row: _known(row, str(row.log_start_offset))),
    Column("log end", lambda row: _known(row, str(row.log_end_offset))),
    Column("first dirty", lambda row: show.plain(row.first_dirty_offset)),
    Column("dirty ratio", lambda row: "" if row.dirty_ratio is None else f"{row.dirty_ratio:.3f}"),
    Column("due", _due, is_number=False),
)


_SETTING_COLUMNS: tuple[Column[tuple[str, Mapping[str, Any]]], ...] = (
    Column("setting", lambda item: item[0], is_number=False),
    Column("value", lambda item: _value_text(item[0], item[1]["value"]), is_number=False),
    Column("from", lambda item: item[1]["source"], is_number=False),
    Column("note", lambda item: item[1].get("note", ""), is_number=False),
)


def show_rows(rows: Sequence[DescribeRow], request: Request) -> None:
    """Print a line for each partition, then the Kafka versions, the reasons why compactions are not due and errors, the
    formats for old messages, then each topic's settings."""
    counted = any(row.records is not None for row in rows)
    print_rows("Partitions", [column for column in _COLUMNS if counted or column is not _RECORDS], rows)
    if rows:
        print_line(f"\nKafka version that wrote the log dirs: {escape(rows[0].kafka['versions'])}")
        for seen, means in rows[0].kafka["evidence"].items():
            print_line(f"  {escape(seen)}: {escape(means)}")
    blocked = [row for row in rows if row.blocker and not _is_unreadable(row)]
    reasons = [(row.name, "not due for compaction", row.blocker) for row in blocked]
    for row in rows:
        if row.error:
            reasons.append((row.name, f"could not be {'read' if _is_unreadable(row) else 'counted'}", row.error))
    print_paragraph(reasons)
    _print_message_formats(rows)
    topics = {row.topic: row for row in reversed(rows)}
    for topic in sorted(topics):
        _print_settings(topics[topic])
    if not request.every_setting:
        print_line("\nAll other settings have Kafka's defaults; give --all to list them.")


def _print_message_formats(rows: Sequence[DescribeRow]) -> None:
    by_format: dict[str, set[str]] = {}
    for row in rows:
        by_format.setdefault(row.message_format, set()).add(row.topic)
    for message_format, topics in sorted(by_format.items()):
        which = "all" if len(by_format) == 1 else ", ".join(sorted(topics))
        print_line(escape(f"\n{_OF_OLD_MESSAGES[message_format]}. Topics: {which}"))


def _print_settings(row: DescribeRow) -> None:
    doubt = "" if row.overrides_known else " (its own settings are unknown)"
    print_line("")
    print_rows(f"Settings of {row.topic}{doubt}", _SETTING_COLUMNS, list(row.settings.items()))


def _value_text(name: str, value: Any) -> str:
    if isinstance(value, list):
        return ",".join(value) or "(none)"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and name.endswith(".ms") and value >= 1000:
        return f"{value} (unlimited)" if value == 2**63 - 1 else f"{value} ({duration_text(value)})"
    return "(none)" if value is None else str(value)


DESCRIBE = Command(
    name="describe",
    also_called=("info", "show", "stat", "stats", "status", "inspect", "summary", "size", "config", "settings"),
    help="Show what partitions contain, whether a compaction is due, what prevents it, and the effective settings.",
    request=Request,
    run="keytail.describe.driver:describe",
    examples=(f"keytail describe {BROKER} --topic orders --all",),
    rows={"": DescribeRow},
    exits={0: "unless a partition could not be read, or its records could not be counted"},
    show=show_rows,
    exit_status=exit_status,
    reads_records=True,
)
