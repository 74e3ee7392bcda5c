"""Rows as a table for people: the columns that a command declares, and the sentences below them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rich.markup import escape
from rich.table import Table

from keytail.cli import rows as show
from keytail.cli.statuses import styled

R = TypeVar("R")
_STATUS = "status"


@dataclass(frozen=True)
class Column(Generic[R]):
    """One column: its heading, and the text of the cell of a row. Numbers are aligned to the right.

    The first word of a cell of the column "status" is a status, which is shown in its colour.
    """

    heading: str
    text: Callable[[R], str]
    is_number: bool = True


# For rows of partitions.
PARTITION: Column[Any] = Column("partition", lambda row: row.name, is_number=False)
STATUS: Column[Any] = Column(_STATUS, lambda row: row.status, is_number=False)
TOOK: Column[Any] = Column("took", lambda row: show.human_seconds(row.start_ms, row.end_ms))


def print_rows(title: str, columns: Sequence[Column[R]], rows: Sequence[R]) -> None:
    """Print a line for each row. Very many are printed without drawing, which takes half a millisecond per line."""
    lines = [[column.text(row) for column in columns] for row in rows]
    if len(lines) > show.MOST_DRAWN:
        _print_plainly(title, [column.heading for column in columns], lines)
        return
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in columns:
        overflow: Any = "ellipsis" if column.heading == _STATUS else "fold"
        table.add_column(column.heading, justify="right" if column.is_number else "left", overflow=overflow)
    for line in lines:
        cells = zip(columns, line, strict=True)
        table.add_row(*(_styled(cell) if column.heading == _STATUS else escape(cell) for column, cell in cells))
    show.output_console().print(table)


def _styled(cell: str) -> str:
    status, space, rest = cell.partition(" ")
    return styled(status) + space + escape(rest)


def _print_plainly(title: str, headings: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    shown = [[show.visible(cell) for cell in line] for line in (headings, *lines)]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    show.output_console()  # sets how names that are not text are written
    sys.stdout.write(f"{title}\n")
    for line in shown:
        padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        sys.stdout.write("  ".join(padded).rstrip() + "\n")
    sys.stdout.flush()


def print_errors(rows: Sequence[Any]) -> None:
    """Print the reason of each row that has one."""
    show.print_reasons([(row.name, row.status, row.error) for row in rows if row.error])


def print_about(name: str, text: str, severity: str = "") -> None:
    """Print a sentence about a partition. `severity` is markup."""
    show.output_console().print(f"{escape(name)}{severity and ' '}{severity}: {escape(text)}", soft_wrap=True)


def print_notes(rows: Sequence[Any]) -> None:
    for row in rows:
        for note in row.notes:
            print_about(row.name, note)


def print_line(markup: str) -> None:
    show.output_console().print(markup, soft_wrap=True)


def total(rows: Sequence[Any]) -> str:
    """Return `3 partitions: 2 kept, 1 refused.`, as markup."""
    counts = Counter(row.status for row in rows)
    found = ", ".join(f"{number} {styled(status)}" for status, number in counts.most_common())
    return f"{len(rows)} partition{'s' if len(rows) != 1 else ''}: {found or 'none'}."
