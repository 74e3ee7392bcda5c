"""How results look: a JSON array for programs, a table with totals and next steps for people.

Rows go to standard output, all else (progress, notes, errors) to standard error. What a person is told goes through
these consoles or `say`, which show control characters and do not send them.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from keytail.errors import visible
from keytail.spark.rows import ResultRow

# Wide enough for a row when the output is a file or a log, where there is no terminal to ask.
_PLAIN_WIDTH = 160
NOT_TOLD = ("problem", "places")
_STYLES = {
    "compacted": "green",
    "would-compact": "green",
    "sound": "green",
    "rebuilt": "green",
    "expired": "green",
    "would-expire": "green",
    "would-rebuild": "bold yellow",
    "undone": "green",
    "would-undo": "green",
    "forgotten": "green",
    "would-forget": "bold yellow",
    "salvaged": "green",
    "would-salvage": "bold yellow",
    "skipped": "yellow",
    "refused": "bold yellow",
    "suspect": "bold yellow",
    "damaged": "bold red",
    "corrupt": "bold red",
    "failed": "bold red",
}


def error_console() -> Console:
    return _console(sys.stderr)


def output_console() -> Console:
    return _console(sys.stdout)


class _Visible(Console):
    """Shows the control characters of names; styles are markup, which makes its own."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(_visible_lines(text), **options)


def _visible_lines(text: str) -> str:
    return "\n".join(map(visible, text.split("\n")))


def say(text: str) -> None:
    """Plain lines on standard error."""
    print(_visible_lines(text), file=sys.stderr, flush=True)


def _console(stream: Any) -> Console:
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")  # the name of a file need not be text
    width = None if stream.isatty() or "COLUMNS" in os.environ else _PLAIN_WIDTH
    return _Visible(file=stream, width=width, highlight=False, soft_wrap=False, emoji=False)


def print_json(rows: Iterable[Any]) -> None:
    """But for fields that `error` has in words (spark/rows.py)."""
    told = [{name: value for name, value in asdict(row).items() if name not in NOT_TOLD} for row in rows]
    json.dump(told, sys.stdout, indent=2)
    sys.stdout.write("\n")
    sys.stdout.flush()


def human_bytes(size: int | None) -> str:
    """As `1.2 GiB`; an unknown size is empty."""
    if size is None:
        return ""
    if abs(size) < 1024:
        return f"{size} B"
    value = float(size)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if abs(value) < 1023.95 or unit == "TiB":
            break
    return f"{value:.1f} {unit}"


def human_seconds(start_ms: int | None, end_ms: int | None) -> str:
    if start_ms is None or end_ms is None:
        return ""
    seconds = max(end_ms - start_ms, 0) / 1000
    return f"{seconds:.1f} s" if seconds < 60 else f"{int(seconds // 60)} min {int(seconds % 60)} s"


def change(before: str, after: str) -> str:
    if not after or before == after:
        return before
    return f"{before} -> {after}"


def _count(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


def styled(status: str) -> str:
    style = _STYLES.get(status)
    return f"[{style}]{status}[/]" if style else status


def print_table(rows: Sequence[ResultRow], title: str) -> None:
    """One line a partition, the reasons below, then totals."""
    console = output_console()
    many_dirs = len({row.log_dir for row in rows}) > 1
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("partition", overflow="fold")
    if many_dirs:
        table.add_column("log dir", overflow="fold")
    table.add_column("status")
    for name in ("segments", "log size", "records", "offsets to clean", "took"):
        table.add_column(name, justify="right", overflow="fold")
    for row in rows:
        dirty = ""
        if row.status in ("would-compact", "compacted"):
            dirty = f"{row.first_dirty_offset}..{row.end_dirty_offset}"
        cells = [
            escape(row.name),
            styled(row.status),
            change(_count(row.segments_before), _count(row.segments_after)),
            change(human_bytes(row.bytes_before), human_bytes(row.bytes_after)),
            change(_count(row.records_before), _count(row.records_after)),
            dirty,
            human_seconds(row.start_ms, row.end_ms),
        ]
        if many_dirs:
            cells.insert(1, escape(row.log_dir))
        table.add_row(*cells)
    console.print(table)
    print_reasons([(row.name, row.status, row.error) for row in rows if row.error])
    print_totals(rows)


def print_reasons(reasons: Sequence[tuple[str, str, str]]) -> None:
    """`partition status: reason`, in full, most serious first."""
    order = {"corrupt": 0, "failed": 1, "damaged": 2, "refused": 3}
    if not reasons:
        return
    console = output_console()
    console.print()
    for name, status, reason in sorted(reasons, key=lambda item: order.get(item[1], 9)):
        console.print(f"{escape(name)} {styled(status)}: {escape(reason)}", soft_wrap=True)


def print_totals(rows: Sequence[ResultRow]) -> None:
    console = output_console()
    counts = Counter(row.status for row in rows)
    parts = [f"{number} {styled(status)}" for status, number in counts.most_common()]
    text = "No partitions."
    if rows:
        text = f"{len(rows)} partition{'s' if len(rows) != 1 else ''}: {', '.join(parts)}."
    done = [row for row in rows if row.status == "compacted"]
    if done:
        before = sum(row.bytes_before or 0 for row in done)
        after = sum(row.bytes_after or 0 for row in done)
        saved = f" ({100 * (before - after) / before:.0f} % less)" if before else ""
        text += f" Compacted: {human_bytes(before)} -> {human_bytes(after)}{saved}"
        records = sum((row.records_before or 0) - (row.records_after or 0) for row in done)
        text += f", {records:,} records removed."
    would = [row for row in rows if row.status == "would-compact"]
    if would:
        text += f" To rewrite: up to {human_bytes(sum(row.bytes_before or 0 for row in would))}."
    console.print()
    console.print(text, soft_wrap=True)
