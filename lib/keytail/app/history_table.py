"""What `history` prints: runs, one run, partitions over time, and what became of the ledger's own tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from keytail.app import rows as show
from keytail.app.history import PartitionRow, RunRow
from keytail.app.undo import time_text

if TYPE_CHECKING:
    from keytail.spark.ledger_maintain import MaintainRow


def print_runs(rows: Sequence[RunRow], path: str) -> None:
    words = ("run", "begun", "host", "command", "status")
    table = _table(f"Runs in {path}", words, ("partitions", "log size", "took"))
    for row in rows:
        sizes = show.change(show.human_bytes(row.bytes_before), show.human_bytes(row.bytes_after))
        table.add_row(
            row.run_id,
            "" if row.start_ms is None else time_text(row.start_ms),
            escape(row.host),
            escape(row.command),
            show.styled(row.status),
            _counts(row),
            sizes if row.bytes_before else "",
            show.human_seconds(row.start_ms, row.end_ms),
        )
    console = show.output_console()
    console.print(table)
    show.print_reasons([(row.run_id, row.status, row.error) for row in rows if row.error])
    console.print(f"\n{len(rows)} run{'s' if len(rows) != 1 else ''}.")


def print_run(run: RunRow, rows: Sequence[PartitionRow]) -> None:
    console = show.output_console()
    lines = {
        "run": run.run_id,
        "begun": "" if run.start_ms is None else time_text(run.start_ms),
        "took": show.human_seconds(run.start_ms, run.end_ms),
        "status": run.status,
        "host": run.host,
        "command line": " ".join(run.arguments),
        "log dirs": ", ".join(run.log_dirs),
        "versions": ", ".join(f"{name} {value}" for name, value in run.versions.items()),
        "settings given": ", ".join(f"{name}={value}" for name, value in sorted(run.config.items())),
        "told by run": run.repaired_by or "",
    }
    for name, value in lines.items():
        if value:
            console.print(f"{name}: {escape(value)}", soft_wrap=True)
    console.print()
    print_partitions(rows, "Its partitions", with_run=False)


def print_partitions(rows: Sequence[PartitionRow], title: str, *, with_run: bool = True) -> None:
    first = ("run", "command") if with_run else ()
    table = _table(title, (*first, "partition", "status"), ("segments", "log size", "records", "cleaned up to", "took"))
    for row in rows:
        start = [row.run_id, escape(row.command)] if with_run else []
        table.add_row(
            *start,
            escape(row.name),
            show.styled(row.status),
            show.change(_text(row.segments_before), _text(row.segments_after)),
            show.change(show.human_bytes(row.bytes_before), show.human_bytes(row.bytes_after)),
            show.change(_text(row.records_before), _text(row.records_after)),
            _text(row.end_dirty_offset) if row.status == "compacted" else "",
            show.human_seconds(row.start_ms, row.end_ms),
        )
    console = show.output_console()
    console.print(table)
    show.print_reasons([(row.name, row.status, row.error) for row in rows if row.error])
    console.print(f"\n{len(rows)} row{'s' if len(rows) != 1 else ''}.")


def print_maintained(rows: Sequence[MaintainRow], path: str, *, execute: bool) -> None:
    title = f"Ledger {path}" if execute else f"Dry run: nothing was changed in {path}"
    table = _table(title, ("table", "status", "rows before"), ("rows", "to remove", "files", "size"))
    for row in rows:
        table.add_row(
            row.table,
            show.styled(row.status),
            row.oldest_day or "all kept",
            _text(row.rows),
            _text(row.removed_rows),
            show.change(_text(row.files_before), _text(row.files_after)),
            show.change(show.human_bytes(row.bytes_before), show.human_bytes(row.bytes_after)),
        )
    show.output_console().print(table)
    show.print_reasons([(row.table, row.status, row.error) for row in rows if row.error])


def _table(title: str, words: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(title=escape(title), title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name in words:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", overflow="fold")
    return table


def _counts(row: RunRow) -> str:
    return ", ".join(f"{number} {status}" for status, number in row.counts.items())


def _text(number: int | None) -> str:
    return "" if number is None else f"{number:,}"
