"""Prints the rows of `compact --repack`, and states the next step."""

from __future__ import annotations

from collections.abc import Sequence

from keytail.cli import rows as show
from keytail.cli.statuses import FAILURES
from keytail.cli.table import PARTITION, STATUS, TOOK, Column, print_below, print_line, print_remarkable, total
from keytail.run.rows import ResultRow

_COLUMNS: tuple[Column[ResultRow], ...] = (
    PARTITION,
    STATUS,
    Column("segments", lambda row: show.change(show.count(row.segments_before), show.count(row.segments_after))),
    Column("log size", lambda row: show.change(show.human_bytes(row.bytes_before), show.human_bytes(row.bytes_after))),
    Column("batches", lambda row: show.change(show.count(row.batches_before), show.count(row.batches_after))),
    TOOK,
)


def show_repack(rows: Sequence[ResultRow], *, execute: bool) -> None:
    """Print a line for each partition, then reasons and totals. Partitions with status `clean` may be only counted."""
    title = "Repacked" if execute else "Dry run: nothing was changed"
    changes = [row for row in rows if row.status != "clean"]
    if changes:
        print_remarkable(title, _COLUMNS, rows, lambda row: row.status == "clean")
        print_below(changes)
    text = total(rows)
    done = [row for row in rows if row.status == "repacked"]
    if done:
        before, after = (sum(getattr(row, name) or 0 for row in done) for name in ("bytes_before", "bytes_after"))
        text += f" Repacked: {show.human_bytes(before)} -> {show.human_bytes(after)}"
        before, after = (sum(getattr(row, name) or 0 for row in done) for name in ("batches_before", "batches_after"))
        text += f", {before:,} -> {after:,} batches."
    would = sum(row.bytes_before or 0 for row in rows if row.status == "would-repack")
    if would:
        text += f" To read: up to {show.human_bytes(would)}."
    print_line(f"\n{text}" if changes else text)


def next_step_of_repack(rows: Sequence[ResultRow], *, execute: bool) -> str:
    """Return what the operator should do after a repack or its dry run."""
    failed = sum(row.status in FAILURES for row in rows)
    rest = f" Partitions not repacked: {failed}. Reasons and remedies are given above." if failed else ""
    if any(row.status == "repacked" for row in rows):
        return f"Next: run `keytail verify` on the same partitions, then start the broker.{rest}"
    if any(row.status == "would-repack" for row in rows):
        return f"This was a dry run. To repack, stop the broker, and run the same command with --execute.{rest}"
    nothing = "No batch was changed." if execute else "This was a dry run, and there is nothing to repack."
    return rest.strip() or nothing
