"""Prints the rows of an import as a table: one line per partition, the reasons, totals, what to do next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from keytail.cli import rows as show
from keytail.import_.command import ImportRow


def print_table(rows: Sequence[ImportRow], title: str) -> None:
    console = show.output_console()
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("partition", overflow="fold")
    table.add_column("status")
    for name in ("records", "keys and values", "log size", "segments", "offsets", "took"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            escape(row.name),
            show.styled(row.status),
            f"{row.records:,}",
            show.human_bytes(row.source_bytes),
            show.human_bytes(row.log_bytes),
            "" if row.segments is None else str(row.segments),
            "" if row.first_offset is None else f"{row.first_offset}..{row.end_offset}",
            show.human_seconds(row.start_ms, row.end_ms) if row.log_bytes is not None else "",
        )
    console.print(table)
    show.print_reasons([(row.name, row.status, row.error) for row in rows if row.error])
    for row in rows:
        for note in row.notes:
            console.print(f"{escape(row.name)}: {escape(note)}", soft_wrap=True)
    counts = Counter(row.status for row in rows)
    found = ", ".join(f"{number} {show.styled(status)}" for status, number in counts.most_common())
    done = [row for row in rows if row.status == "imported"]
    text = f"{len(rows)} partition{'s' if len(rows) != 1 else ''}: {found or 'none'}."
    if done:
        size = sum((row.log_bytes or 0) * row.replicas for row in done)
        text += f" {sum(row.records for row in done):,} records, {show.human_bytes(size)} of log."
    console.print(f"\n{text}", soft_wrap=True)


def next_step(rows: Sequence[ImportRow], execute: bool) -> str:
    if not execute and any(row.status == "would-import" for row in rows):
        return "This was a dry run. To do it: stop the brokers, and run the same command with --execute."
    if any(row.status in ("refused", "corrupt", "failed") for row in rows):
        return "What was not done is unchanged; the reasons and remedies are given above."
    return "Next: start the brokers." if any(row.status == "imported" for row in rows) else ""
