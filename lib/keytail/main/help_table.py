"""Lays out the flags of `--help`, whose names Typer truncates on a narrow terminal."""

from __future__ import annotations

from typing import Any

import typer.rich_utils
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

_MIN_TEXT = 24  # minimum width, in characters, into which the text beside a name is wrapped


class HelpTable(Table):
    """A table whose columns of names are not narrowed. The text is beside the names or, if there is no room, below
    them."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = list(zip(*(column.cells for column in self.columns), strict=True))
        padding = self.padding[1] + self.padding[3]
        widths = [max(cell_len(str(row[n])) for row in rows) + padding for n in range(len(self.columns) - 1)]
        if options.max_width - sum(widths) >= _MIN_TEXT:
            for column in self.columns[:-1]:
                column.no_wrap = True
            yield from super().__rich_console__(console, options)
            return
        for *names, text in rows:
            yield Text(" ").join(name if isinstance(name, Text) else Text(str(name)) for name in names if str(name))
            yield Padding(text, (0, 0, 0, 4))


def use_help_table() -> None:
    """Make Typer print the help of commands with HelpTable."""
    module: Any = typer.rich_utils
    module.Table = HelpTable
