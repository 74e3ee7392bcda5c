"""Prints rows as a table, with the columns that a command declares, and the sentences below the table."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from rich.cells import cell_len
from rich.markup import escape
from rich.text import Text

from keytail.cli import rows as show
from keytail.cli.statuses import style_of, styled
from keytail.console import divided, output_style

R = TypeVar("R")
_Line = list[tuple[str, str]]  # parts of a line, each with its style
_STATUS = "status"
_BETWEEN = "  "  # between two columns
_INDENT = "    "  # for the lines below a row
_MAX_PLAIN = 5  # if more rows than this have nothing notable, they are only counted
_MIN_TEXT = 24  # minimum width, in characters, into which the text of the last column is wrapped


@dataclass(frozen=True)
class Column(Generic[R]):
    """One column: its heading, and the text of the cell of a row. Numbers are aligned to the right.

    The first word of a cell of the column "status" is a status, which is shown in its colour.
    """

    heading: str
    text: Callable[[R], str]
    is_number: bool = True


# Columns for rows of partitions.
PARTITION: Column[Any] = Column("partition", lambda row: row.name, is_number=False)
STATUS: Column[Any] = Column(_STATUS, lambda row: row.status, is_number=False)
TOOK: Column[Any] = Column("took", lambda row: show.human_seconds(row.start_ms, row.end_ms))


def print_rows(title: str, columns: Sequence[Column[R]], rows: Sequence[R]) -> None:
    """Print a line for each row, in the width of the terminal; `_laid_out` decides where cells that do not fit are
    printed. Very many rows are printed without styles, which take most of the time."""
    console = show.output_console()
    cells = [[show.visible(column.text(row)) for column in columns] for row in rows]
    lines = _laid_out(columns, cells, console.width)
    if len(rows) > show.MAX_DRAWN:
        sys.stdout.write(f"{show.visible(title)}\n")
        sys.stdout.writelines("".join(text for text, _ in line) + "\n" for line in lines)
        sys.stdout.flush()
        return
    show.print_sentence(console, f"[bold]{escape(title)}[/]")
    for line in lines:
        console.print(Text.assemble(*line), soft_wrap=True)


def print_remarkable(
    title: str, columns: Sequence[Column[R]], rows: Sequence[R], is_plain: Callable[[R], bool]
) -> list[R]:
    """Print rows as `print_rows` does; if more than a few rows are plain, and --verbose is not given, only count the
    plain rows. Return the rows that are printed."""
    plain = [row for row in rows if is_plain(row)]
    if len(plain) <= _MAX_PLAIN or output_style().verbose:
        print_rows(title, columns, rows)
        return list(rows)
    others = [row for row in rows if not is_plain(row)]
    if others:
        print_rows(title, columns, others)
        print_line("")
    else:
        print_line(f"[bold]{escape(title)}[/]")
    counts = Counter(row.status for row in cast(list[Any], plain))
    found = ", ".join(f"{number:,} {styled(status)}" for status, number in counts.items())
    print_line(f"{len(plain):,} {'more ' if others else ''}partitions: {found}; --verbose lists them.")
    return others


def _laid_out(columns: Sequence[Column[Any]], rows: Sequence[Sequence[str]], width: int) -> Iterator[_Line]:
    """Return the lines of a table that is `width` characters wide, headings first.

    The first column is the name. Names and statuses are neither truncated nor wrapped: a name that leaves no room for
    the other columns is printed on a line of its own. Cells of columns for which there is no room follow below their
    row, each after its heading. Only a single word may be wider than `width`: a path, for instance, is never broken.
    """
    widths = _widths(columns, rows, width)
    numbers = sorted(widths)
    last = numbers[-1]
    indent = sum(widths[number] + len(_BETWEEN) for number in numbers[:-1])

    def line_of(cells: Sequence[str], heading: bool = False) -> _Line:
        line: _Line = []
        for number in numbers:
            padding = " " * (widths[number] - _width(cells[number])), ""
            cell = [(cells[number], "")] if heading else _styled(columns[number], cells[number])
            line += [padding, *cell] if columns[number].is_number else [*cell, padding]
            line.append((_BETWEEN, ""))
        return _without_blanks_at_end(line)

    yield line_of([column.heading for column in columns], heading=True)
    for row in rows:
        cells, more, below = list(row), [], [number for number in range(len(columns)) if number not in widths]
        if _width(cells[0]) > widths[0]:
            yield [(cells[0], "")]
            cells[0] = ""
        if _width(cells[last]) > widths[last]:
            text = divided(cells[last], widths[last], 0)
            if max(map(_width, text)) > widths[last]:
                below.append(last)
                text = [""]
            cells[last], *more = text
        if line := line_of(cells):
            yield line
        yield from ([(" " * indent + text, "")] for text in more)
        yield from ([(text, "")] for text in _below(columns, row, below, width))


def _styled(column: Column[Any], cell: str) -> _Line:
    if column.heading != _STATUS:
        return [(cell, "")]
    status, space, rest = cell.partition(" ")
    return [(status, style_of(status)), (space + rest, "")]


def _without_blanks_at_end(line: _Line) -> _Line:
    while line and not line[-1][0].strip():
        line.pop()
    return line and [*line[:-1], (line[-1][0].rstrip(), line[-1][1])]


def _widths(columns: Sequence[Column[Any]], rows: Sequence[Sequence[str]], width: int) -> dict[int, int]:
    """Return the widths of the columns that fit and have a cell that is not empty, by their numbers."""
    natural = [max(map(_width, column)) for column in zip([item.heading for item in columns], *rows, strict=True)]
    filled = [number for number in range(len(columns)) if not number or not rows or any(row[number] for row in rows)]
    if sum(natural[number] + len(_BETWEEN) for number in filled) - len(_BETWEEN) <= width:
        return {number: natural[number] for number in filled}
    names = (_width(row[0]) for row in rows)
    widths = {0: max(_width(columns[0].heading), *(name for name in names if name <= width // 2), 0)}
    room = width - widths[0] - len(_BETWEEN)
    for number in sorted(filled[1:], key=lambda number: columns[number].heading != _STATUS):
        wanted = natural[number]
        if number == len(columns) - 1 and not columns[number].is_number:
            wanted = min(wanted, max(room, _MIN_TEXT))
        if wanted <= room:
            widths[number] = wanted
            room -= wanted + len(_BETWEEN)
    return widths


def _below(columns: Sequence[Column[Any]], row: Sequence[str], numbers: Sequence[int], width: int) -> Iterator[str]:
    """Return lines with the cells of these numbers that are not empty, as many in a line as fit."""
    line = ""
    for item in (f"{columns[number].heading} {row[number]}" for number in numbers if row[number]):
        if line and _width(line) + _width(item) + len("; ") <= width:
            line = f"{line}; {item}"
            continue
        if line:
            yield line
        first, *more = divided(item, width - len(_INDENT) - 2, 0)
        *full, line = [_INDENT + first, *(f"{_INDENT}  {text}" for text in more)]
        yield from full
    if line:
        yield line


def _width(text: str) -> int:
    """Return the width of the text on a terminal, in characters."""
    return len(text) if text.isascii() else cell_len(text)


def print_below(rows: Sequence[Any], more: Sequence[str] = ()) -> None:
    """Print one paragraph below a table: the error of each row that has one, then the sentences `more` (markup)."""
    print_paragraph([(row.name, row.status, row.error) for row in rows if row.error], more)


def print_paragraph(reasons: Sequence[tuple[str, str, str]], more: Sequence[str] = ()) -> None:
    """Print a blank line, then reasons (`show.print_reasons`), then sentences (markup)."""
    if reasons or more:
        print_line("")
        show.print_reasons(reasons)
    for sentence in more:
        print_line(sentence)


def about(name: str, text: str, severity: str = "") -> str:
    """Return a sentence about a partition, as markup. `severity` is markup."""
    return f"{escape(name)}{severity and ' '}{severity}: {escape(text)}"


def about_each(texts: Iterable[tuple[str, str]]) -> list[str]:
    """Return a sentence for each (partition, message), as markup; a message about several partitions is one
    sentence.
    """
    names: dict[str, list[str]] = {}
    for name, text in texts:
        names.setdefault(text, []).append(name)
    return [about(show.some_names(of_text), text) for text, of_text in names.items()]


def notes_of(rows: Sequence[Any]) -> list[str]:
    return about_each((row.name, note) for row in rows for note in row.notes)


def print_line(markup: str) -> None:
    show.print_sentence(show.output_console(), markup)


def total(rows: Sequence[Any]) -> str:
    """Return a sentence such as `3 partitions: 2 kept, 1 refused.`, as markup."""
    counts = Counter(row.status for row in rows)
    found = ", ".join(f"{number} {styled(status)}" for status, number in counts.most_common())
    return f"{len(rows)} partition{'s' if len(rows) != 1 else ''}: {found or 'none'}."
