"""The command `lookup`: find an offset or a time in the chosen partitions, and show how a broker finds it.

Takes no lock, changes nothing and starts no Spark; works beside a live broker.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from rich.markup import escape
from rich.table import Table

from keytail.cli import rows as show
from keytail.cli.selection import Choice, choose
from keytail.errors import KeytailError, UsageProblem
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.listed import again_beside_a_broker
from keytail.log.partition import LogDirFacts, PartitionEntry, PartitionFacts, survey_partition
from keytail.lookup.steps import Lookup, lookup_offset, lookup_time
from keytail.run.rows import status_of

_PREVIEW_CHARACTERS = 60
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class LookupRow:
    """One partition. `status`: `found`, `none`, `out-of-range`, or `corrupt` and `failed` with an `error`.

    `key` and `value` are previews, null if the record's are; `byte_position` is that of the batch in the
    segment file whose base offset is `segment`; `control` is the type of a control record (`COMMIT`, `ABORT`, ...).
    """

    topic: str
    partition: int
    log_dir: str
    status: str
    error: str = ""
    offset: int | None = None
    timestamp_ms: int | None = None
    leader_epoch: int | None = None
    batch_base_offset: int | None = None
    batch_last_offset: int | None = None
    byte_position: int | None = None
    batch_bytes: int | None = None
    codec: str | None = None
    segment: int | None = None
    key: str | None = None
    value: str | None = None
    control: str | None = None
    reason: str = ""
    notes: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.topic}-{self.partition}"


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


def lookup(
    choice: Choice, *, offset: int | None, timestamp: str | None, explain: bool, fs: FileSystem = LOCAL
) -> list[LookupRow]:
    """Return a row for each chosen partition, for one offset or one time."""
    if offset is not None and timestamp is not None:
        raise UsageProblem(
            "--offset and --timestamp exclude each other", remedy="Give one of them", slug="conflicting-flags"
        )
    if offset is None and timestamp is None:
        raise UsageProblem(
            "no offset or time to look up", remedy="Give one of --offset and --timestamp", slug="missing-flag"
        )
    timestamp_ms = parse_time(timestamp) if timestamp is not None else None
    return [
        _look(fs, log_dir, entry, offset, timestamp_ms, explain) for log_dir, entry in choose(fs, choice).partitions
    ]


def _look(
    fs: FileSystem,
    log_dir: LogDirFacts,
    entry: PartitionEntry,
    offset: int | None,
    timestamp_ms: int | None,
    explain: bool,
) -> LookupRow:
    def look() -> LookupRow:
        facts = survey_partition(fs, log_dir, entry)
        if not facts.segments:
            problem = facts.problems[-1] if facts.problems else f"no segments in {entry.path}"
            raise KeytailError(
                problem, remedy="Run `keytail verify`, which lists what is wrong with the partition", slug="no-segments"
            )
        if offset is not None:
            result = lookup_offset(fs, facts, offset)
        else:
            assert timestamp_ms is not None
            result = lookup_time(fs, facts, timestamp_ms)
        return _row(facts, result, explain)

    try:
        return again_beside_a_broker(look, clean_shutdown=log_dir.clean_shutdown)
    except (KeytailError, OSError) as problem:
        status = status_of(problem) if isinstance(problem, KeytailError) else "failed"
        return LookupRow(entry.topic, entry.partition, entry.log_dir, status, str(problem))


def _row(facts: PartitionFacts, result: Lookup, explain: bool) -> LookupRow:
    record = result.record
    place = (facts.topic, facts.partition, facts.log_dir, result.status)
    rest = {"reason": result.reason, "notes": (*facts.problems, *result.notes)}
    steps = result.steps if explain else ()
    if record is None:
        return LookupRow(*place, **rest, steps=steps)  # type: ignore[arg-type]
    return LookupRow(
        *place,
        offset=record.offset,
        timestamp_ms=record.timestamp_ms,
        leader_epoch=record.leader_epoch,
        batch_base_offset=record.batch_base_offset,
        batch_last_offset=record.batch_last_offset,
        byte_position=record.byte_position,
        batch_bytes=record.batch_bytes,
        codec=record.codec,
        segment=record.segment,
        key=preview(record.key),
        value=preview(record.value),
        control=record.control or None,
        **rest,  # type: ignore[arg-type]
        steps=steps,
    )


def preview(data: bytes | None) -> str | None:
    """Return the beginning of a key or value as printable text, other bytes as \\x escapes; None for null."""
    if data is None:
        return None
    text = data[: 4 * _PREVIEW_CHARACTERS].decode("utf-8", "backslashreplace")
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    if len(text) <= _PREVIEW_CHARACTERS and len(data) <= 4 * _PREVIEW_CHARACTERS:
        return text
    return f"{text[:_PREVIEW_CHARACTERS]}... ({len(data):,} bytes)"


def exit_status(rows: Sequence[LookupRow]) -> int:
    """Return 0 if each partition has an answer (including "none"), 3 if some have one, 1 if none has."""
    bad = sum(row.status in ("corrupt", "failed") for row in rows)
    return 0 if not bad else 1 if bad == len(rows) else 3


def print_table(rows: Sequence[LookupRow]) -> None:
    """Print a line for each partition, then errors, reasons and notes, then the numbered steps."""
    console = show.output_console()
    table = Table(title="Lookup", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name in ("partition", "status"):
        table.add_column(name, overflow="fold")
    for name in ("offset", "timestamp", "epoch", "segment", "byte", "batch"):
        table.add_column(name, justify="right", overflow="fold")
    for name in ("key", "value"):
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*_cells(row))
    console.print(table)
    for row in rows:
        for text in (row.error, row.reason, *row.notes):
            if text:
                console.print(f"\n{escape(row.name)} {show.styled(row.status)}: {escape(text)}.", soft_wrap=True)
    for row in rows:
        if row.steps:
            console.print(f"\n{escape(row.name)}, step by step:", style="bold")
        for number, step in enumerate(row.steps, 1):
            console.print(f"{number:3}. {escape(step)}", soft_wrap=True)


def _cells(row: LookupRow) -> list[str]:
    cells = [escape(row.name), show.styled(row.status)]
    if row.offset is None or row.timestamp_ms is None:
        return cells
    control = f"({row.control} marker)" if row.control in ("COMMIT", "ABORT") else f"(control: {row.control})"
    return [
        *cells,
        str(row.offset),
        str(row.timestamp_ms),
        str(row.leader_epoch),
        str(row.segment),
        str(row.byte_position),
        f"{row.batch_base_offset}..{row.batch_last_offset}",
        control if row.control else _shown(row.key),
        "" if row.control else _shown(row.value),
    ]


def _shown(text: str | None) -> str:
    return "[dim]null[/]" if text is None else escape(text)
