"""Prints the rows of an export as a table: one line per partition, the reasons, totals, what to do next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from keytail.cli import rows as show
from keytail.export.command import ExportRow


def print_table(rows: Sequence[ExportRow], title: str) -> None:
    console = show.output_console()
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("partition", overflow="fold")
    table.add_column("status")
    table.add_column("way")
    for name in ("offsets", "log size", "records", "tombstones", "took"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            escape(row.name),
            show.styled(row.status),
            row.way,
            "" if row.from_offset is None else f"{row.from_offset}..{row.end_offset}",
            show.human_bytes(row.log_bytes),
            "" if row.records is None else f"{row.records:,}",
            "" if row.tombstones is None else f"{row.tombstones:,}",
            show.human_seconds(row.start_ms, row.end_ms),
        )
    console.print(table)
    show.print_reasons([(row.name, row.status, row.error) for row in rows if row.error])
    for row in rows:
        for note in (*((row.why,) if row.why and not row.error else ()), *row.notes):
            console.print(f"{escape(row.name)}: {escape(note)}", soft_wrap=True)
    counts = Counter(row.status for row in rows)
    found = ", ".join(f"{number} {show.styled(status)}" for status, number in counts.most_common())
    text = f"{len(rows)} partition{'s' if len(rows) != 1 else ''}: {found or 'none'}."
    done = [row for row in rows if row.status == "exported"]
    if done:
        size = show.human_bytes(sum(row.log_bytes or 0 for row in done))
        text += f" {sum(row.records or 0 for row in done):,} records, from {size} of log."
    console.print(f"\n{text}", soft_wrap=True)


def next_step(rows: Sequence[ExportRow], execute: bool) -> str:
    if not execute and any(row.status == "would-export" for row in rows):
        return "This was a dry run. To export, run the same command with --execute."
    if any(row.status in ("refused", "corrupt", "failed") for row in rows):
        return "Partitions that were not exported are unchanged in the table; the reasons are given above."
    return ""
