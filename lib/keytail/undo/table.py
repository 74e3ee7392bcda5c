"""Prints the rows and runs of `undo` as tables, and what to do next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from keytail.cli import rows as show
from keytail.durations import time_text
from keytail.undo.command import BAD, KeptRun, Request, UndoRow

_MOST_LINES = 40


def print_table(rows: Sequence[UndoRow], title: str) -> None:
    """Print a line for each partition, then the reasons, with a line for each difference, then totals."""
    console = show.output_console()
    lines = [
        (
            row.name,
            row.status,
            show.change(_text(row.segments_before), _text(row.segments_after)),
            show.change(show.human_bytes(row.bytes_before), show.human_bytes(row.bytes_after)),
            show.change(_text(row.cleaner_checkpoint_before), _cleaned(row)),
            show.human_bytes(row.held_bytes),
            show.human_seconds(row.start_ms, row.end_ms),
        )
        for row in rows
    ]
    names = ("partition", "status", "segments", "log size", "cleaned up to", "held", "took")
    show.print_lines(title, names, lines, start=2)
    reasons = [(row.name, row.status, row.error) for row in rows if row.error and not row.differences]
    for row in rows:
        if row.differences:
            reasons.append((row.name, row.status, f"the partition has changed since run {row.run_id}:"))
    show.print_reasons(reasons)
    for row in rows:
        for difference in row.differences[:_MOST_LINES]:
            console.print(f"  {escape(row.name)}: {escape(difference)}", soft_wrap=True)
        if len(row.differences) > _MOST_LINES:
            console.print(f"  {escape(row.name)}: and {len(row.differences) - _MOST_LINES} more", soft_wrap=True)
        for note in row.notes:
            console.print(f"{escape(row.name)}: {escape(note)}", soft_wrap=True)
    counts = Counter(row.status for row in rows)
    text = ", ".join(f"{number} {show.styled(status)}" for status, number in counts.most_common())
    console.print(f"\n{len(rows)} partition{'s' if len(rows) != 1 else ''}: {text or 'none'}.", soft_wrap=True)


def print_runs(runs: Sequence[KeptRun], directory: str) -> None:
    console = show.output_console()
    table = Table(title=f"Backups in {directory}", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name in ("run", "created", "state", "held", "partitions"):
        table.add_column(name, overflow="fold")
    for run in runs:
        kept = "" if run.kept_ms is None else time_text(run.kept_ms)
        some = ", ".join(run.partitions[:5]) + (f" and {len(run.partitions) - 5} more" if run.partitions[5:] else "")
        table.add_row(run.run_id, kept, run.state, show.human_bytes(run.held_bytes), escape(some))
    console.print(table)


def _cleaned(row: UndoRow) -> str:
    """Return the new cleaner checkpoint as text, `-` for no entry; empty if it is not changed."""
    changes = row.status in ("undone", "would-undo")
    return (_text(row.cleaner_checkpoint_after) or "-") if changes else ""


def _text(number: int | None) -> str:
    return "" if number is None else str(number)


def next_step(rows: Sequence[UndoRow], request: Request) -> str:
    statuses = {row.status for row in rows}
    if statuses & {"would-undo", "would-forget"}:
        stop = "" if request.forget else "stop the broker, and "
        return f"This was a dry run. To do it: {stop}run the same command with --execute."
    if statuses & set(BAD):
        return "What was not done is unchanged; the reasons are given above."
    if "undone" in statuses:
        return "Next, run `keytail verify`, then start the broker. `--forget` removes the backup of the run."
    return ""

