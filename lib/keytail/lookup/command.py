"""Declares the command `lookup`: flags, rows, exit status."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Annotated

from rich.markup import escape

from keytail.cli import options as o
from keytail.cli import rows as show
from keytail.cli.command import Command
from keytail.cli.selection import PartitionFilterWithoutConfig
from keytail.cli.statuses import Status, exit_status_of, styled
from keytail.cli.table import PARTITION, STATUS, Column, about, print_line, print_paragraph, print_rows
from keytail.durations import time_text
from keytail.run.rows import RowOfPartition

_LATEST_MS = 253_402_300_800_000  # the start of the year 10000, which datetime does not support
_PREVIEW_CHARACTERS = 60  # maximum number of characters of a key or value in a table

Offset = Annotated[int | None, o.run_flag(
    "--offset N", "Find the first record at or after this offset.", parser=o.within(0, o.LONG_MAX)
)]
Timestamp = Annotated[str | None, o.run_flag(
    "--timestamp MS-OR-TIME",
    "Find the first record at or after this time: ms since 1970, or ISO 8601 such as 2023-11-14T22:13:20Z (UTC unless "
    "the time contains a time zone).",
)]
Explain = Annotated[bool, o.run_flag("--explain", "Print each step of the search, with its numbers.")]


@dataclass(frozen=True)
class Request:
    """All parameters of `lookup`: one of `offset` and `timestamp` must be given."""

    partition_filter: PartitionFilterWithoutConfig
    _: KW_ONLY
    offset: Offset = None
    timestamp: Timestamp = None
    explain: Explain = False


@dataclass(frozen=True)
class LookupRow(RowOfPartition):
    """The result for one partition."""

    offset: int | None = None
    timestamp_ms: int | None = None
    leader_epoch: int | None = None
    batch_base_offset: int | None = None
    batch_last_offset: int | None = None
    byte_position: Annotated[int | None, "byte position of the batch in the segment file"] = None
    batch_bytes: int | None = None
    codec: str | None = None
    segment: Annotated[int | None, "base offset of the segment"] = None
    key: Annotated[str | None, "the whole key as text; `null` if the key is null or not UTF-8"] = None
    key_base64: Annotated[str | None, "the whole key in base64; `null` if the key is null or UTF-8"] = None
    value: Annotated[str | None, "like `key`"] = None
    value_base64: Annotated[str | None, "like `key_base64`"] = None
    control: Annotated[str | None, "the type of a marker, such as `COMMIT` or `ABORT`"] = None
    reason: Annotated[str, "why no record, or a record at another offset, was found"] = ""
    notes: Annotated[tuple[str, ...], "problems of the indexes, and what a broker returns"] = ()
    steps: Annotated[tuple[str, ...], "the steps of the search, with `--explain`"] = ()


def exit_status(rows: Sequence[LookupRow], request: Request | None = None) -> int:
    return exit_status_of(rows, ("refused", "corrupt", "failed"))


def _of_record(row: LookupRow, text: str) -> str:
    return "" if row.offset is None else text


def _key(row: LookupRow) -> str:
    if not row.control:
        return _shown(row, row.key, row.key_base64)
    return f"({row.control} marker)" if row.control in ("COMMIT", "ABORT") else f"(control: {row.control})"


def _shown(row: LookupRow, text: str | None, in_base64: str | None) -> str:
    data = base64.b64decode(in_base64) if in_base64 is not None else None if text is None else text.encode()
    return _of_record(row, "null" if data is None else preview(data))


def preview(data: bytes) -> str:
    """Return the beginning of a key or value as printable text, with other characters as escapes such as \\x1b."""
    text = data[: 4 * _PREVIEW_CHARACTERS].decode("utf-8", "backslashreplace")
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    if len(text) <= _PREVIEW_CHARACTERS and len(data) <= 4 * _PREVIEW_CHARACTERS:
        return text
    return f"{text[:_PREVIEW_CHARACTERS]}... ({len(data):,} bytes)"


def _time(row: LookupRow) -> str:
    """Return the timestamp in ms as text, with the time in UTC for the years 1970 to 9999; "" for no timestamp."""
    ms = row.timestamp_ms
    if ms is None or not 0 <= ms < _LATEST_MS:
        return show.plain(ms)
    return f"{ms} ({time_text(ms)})"


_COLUMNS: tuple[Column[LookupRow], ...] = (
    PARTITION,
    STATUS,
    Column("offset", lambda row: show.plain(row.offset)),
    Column("timestamp", _time),
    Column("epoch", lambda row: show.plain(row.leader_epoch)),
    Column("segment", lambda row: show.plain(row.segment)),
    Column("byte", lambda row: show.plain(row.byte_position)),
    Column("batch", lambda row: _of_record(row, f"{row.batch_base_offset}..{row.batch_last_offset}")),
    Column("key", _key, is_number=False),
    Column("value", lambda row: "" if row.control else _shown(row, row.value, row.value_base64), is_number=False),
)


def show_rows(rows: Sequence[LookupRow], request: Request) -> None:
    """Print a line for each partition, then errors, reasons and notes, then the numbered steps."""
    print_rows("Lookup", _COLUMNS, rows)
    texts = ((row, text) for row in rows for text in (row.error, row.reason, *row.notes) if text)
    print_paragraph([], [about(row.name, f"{text}.", styled(row.status)) for row, text in texts])
    for row in rows:
        if row.steps:
            print_line(f"\n[bold]{escape(row.name)}, step by step:[/]")
        for number, step in enumerate(row.steps, 1):
            print_line(f"{number:3}. {escape(step)}")


LOOKUP = Command(
    name="lookup",
    also_called=("find", "get", "seek", "search", "offset", "offsets", "timestamp", "locate"),
    help="Find the record at an offset or a time, and its position in the file, as a broker finds it. Reads only.",
    request=Request,
    run="keytail.lookup.driver:lookup",
    examples=(
        "keytail lookup --log-dirs /var/lib/kafka --partitions orders-0 --offset 700",
        "keytail lookup --log-dirs /var/lib/kafka --partitions orders-0 --timestamp 2023-11-14T22:13:20Z --explain",
    ),
    rows={"": LookupRow},
    statuses={
        "found": Status("a record was found"),
        "none": Status("there is no record at or after the offset or time"),
        "out-of-range": Status("the offset is not in the log"),
        "corrupt": Status("the log has damaged bytes; `error` has file and position", "failed"),
        "refused": Status("a file may not be read", "not done"),
        "failed": Status("another error occurred", "failed"),
    },
    exits={0: "if the lookup succeeded in every partition, with or without a record"},
    show=show_rows,
    exit_status=exit_status,
    reads_records=True,
)
