"""Prints results: a JSON array for programs, a table with totals and next steps for people.

Rows are written to standard output, all other output (progress, notes, errors) to standard error. Messages for people
are printed by the consoles of this module or by `console.print_message`; both escape control characters.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TextIO

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from keytail import sizes
from keytail.cli.statuses import kind_of, styled
from keytail.console import Level, hanging_indent, line_ends, listed, output_style, print_message, standard_error
from keytail.errors import CORRUPT_REMEDY, slugs_of, visible, without_corrupt_remedy

# The width, in characters, of output to a file or a log, which has no terminal's width: enough for a row.
_PLAIN_WIDTH = 160
MAX_DRAWN = 1000  # maximum number of rows or messages that are printed with styles, or as indented JSON
_MAX_NAMED = 3  # maximum number of partitions that are named for one reason
_NUMBER = re.compile(r"\d[\d.,]*")
human_bytes = sizes.human_bytes
NOT_IN_JSON = ("problem", "places", "recorded", "detail", "shown", "found_keys")


def error_console() -> Console:
    return _console(sys.stderr, standard_error())


def output_console() -> Console:
    return _console(sys.stdout, sys.stdout)


class _Visible(Console):
    """A console that escapes the control characters of text. Styles, given as markup, still produce control
    characters."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(_visible_lines(text), **options)


def _visible_lines(text: str) -> str:
    return "\n".join(map(visible, text.split("\n")))


def print_note(markup: str, level: Level = "info") -> None:
    """Print a message beside the rows on standard error, with styles, as a separate paragraph."""
    if output_style().as_json:
        if markup:
            print_message(Text.from_markup(markup, emoji=False).plain, level)
    elif output_style().prints(level):
        print_sentence(error_console(), markup)


def print_sentence(console: Console, markup: str) -> None:
    """Print text that is not part of a table. On a terminal, the text is laid out as `console.wrapped` does; elsewhere
    the text is one line, for programs that search it.
    """
    text = console.render_str(markup)
    if not console.is_terminal:
        console.print(text, soft_wrap=True)
        return
    for line in text.split("\n", allow_blank=True):
        indent = hanging_indent(line.plain)
        for number, part in enumerate(line.divide(line_ends(line.plain, console.width, len(indent)))):
            part.rstrip()
            console.print(Text(indent if number else "") + part, soft_wrap=True)


def print_error(text: str) -> None:
    """Print an error beside the rows."""
    if output_style().as_json:
        print_message(text, "error")
    else:
        print_note(f"[bold red]keytail:[/] {escape(text)}", "error")


def _console(stream: Any, file: TextIO) -> Console:
    """Return a console that writes to `file`, which is `stream` or wraps it."""
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="backslashreplace")  # file names may be invalid UTF-8
    width = None if stream.isatty() or "COLUMNS" in os.environ else _PLAIN_WIDTH
    return _Visible(file=file, width=width, highlight=False, soft_wrap=False, emoji=False)


def print_json(rows: Iterable[Any]) -> None:
    write_json(rows, sys.stdout)


def write_json(rows: Iterable[Any], file: TextIO, head: Mapping[str, Any] | None = None) -> None:
    """Write a JSON array with the fields (`fields_of`) of each row; with `head`, an object of these values and `rows`.
    """
    rows = list(rows)
    if len(rows) > MAX_DRAWN:  # one row per line takes a tenth of the time, and less memory
        encode = json.JSONEncoder(default=asdict).encode
        if head is not None:
            file.write(f'{encode(head)[:-1]}, "rows": ')
        for number, row in enumerate(rows):
            file.write(f"{',' if number else '['}\n{encode(fields_of(row))}")
        file.write("\n]\n" if head is None else "\n]}\n")
    else:
        found = list(map(fields_of, rows))
        json.dump(found if head is None else {**head, "rows": found}, file, indent=2, default=asdict)
        file.write("\n")
    file.flush()


def fields_of(row: Any) -> dict[str, Any]:
    """Return the fields of a row by name as in `--output json`, with the slugs of its `error`."""
    found: dict[str, Any] = {}
    for name in row.__dataclass_fields__:
        if name not in NOT_IN_JSON:
            found[name] = getattr(row, name)
        if name == "error":
            found["slugs"] = slugs_of(row.error)
    return found


def human_seconds(start_ms: int | None, end_ms: int | None) -> str:
    if start_ms is None or end_ms is None:
        return ""
    return human_time(max(end_ms - start_ms, 0) / 1000)


def human_time(seconds: float) -> str:
    """Return a duration as `0.4 s` or `3 min 20 s`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, whole_s = divmod(round(seconds), 60)
    return f"{minutes} min {whole_s} s"


def change(before: str, after: str) -> str:
    if not after or before == after:
        return before
    return f"{before} -> {after}"


def count(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


def plain(number: int | None) -> str:
    """Return an offset as digits without separators, as other tools print it."""
    return "" if number is None else str(number)


def offsets(first: int | None, end: int | None) -> str:
    """Return a range of offsets, whose end is exclusive, as `7..12`."""
    return "" if first is None else f"{first}..{end}"


def print_reasons(reasons: Sequence[tuple[str, str, str]]) -> None:
    """Print `partition status: reason` in full, the most serious first. A reason that several partitions have is
    printed once.
    """
    console = output_console()
    groups = _grouped(reasons)
    corrupt = [reason for _, _, reason in groups if CORRUPT_REMEDY in reason]
    if len(corrupt) > 1:
        groups = [(which, status, without_corrupt_remedy(reason)) for which, status, reason in groups]
    if len(groups) > MAX_DRAWN:
        sys.stdout.writelines(f"{_visible_lines(f'{which} {status}: {reason}')}\n" for which, status, reason in groups)
        sys.stdout.flush()
    else:
        for which, status, reason in groups:
            print_sentence(console, f"{escape(which)} {styled(status)}: {escape(reason)}")
    if len(corrupt) > 1:
        print_sentence(console, f"For each of these {len(corrupt)} errors: {escape(CORRUPT_REMEDY)}")


def _grouped(reasons: Sequence[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """Return (partitions, status, reason) of each group of rows with equal statuses and reasons, most serious first.

    Reasons that differ only in numbers and in the partition's own name count as equal, and the reason with the largest
    numbers is returned. Reasons of failures must be identical, because their numbers are places in files.
    """
    order = {"failed": 0, "not done": 1}
    groups: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for name, status, reason in sorted(reasons, key=lambda item: order.get(kind_of(item[1]), 2)):
        text = reason if kind_of(status) == "failed" else alike(reason, name)
        groups.setdefault((status, text), []).append((name, reason))
    found = []
    for (status, _), those in groups.items():
        name, reason = max(those, key=lambda item: _numbers(item[1]))
        if any(other != reason for _, other in those):
            reason += f" (of {name}; similar for the others)"
        found.append((some_names([name for name, _ in those]), status, reason))
    return found


def some_names(names: Sequence[str]) -> str:
    """Return a name, or the number of partitions and some of their names."""
    if len(names) == 1:
        return names[0]
    return f"{len(names):,} partitions ({listed(names, _MAX_NAMED)})"


def alike(reason: str, name: str) -> str:
    """Return a form of `reason` that is equal for partitions whose reasons differ only in numbers and in their names.
    `name` is the name of the partition that the reason is about.
    """
    topic = name.rpartition("-")[0]
    if topic and topic in reason:
        reason = re.sub(rf"(?<![\w.-]){re.escape(topic)}(?!\w|[.-]\w)", "TOPIC", reason.replace(name, "PARTITION"))
    return _NUMBER.sub("#", reason)


def _numbers(text: str) -> list[float]:
    return [float(number.replace(",", "").rstrip(".")) for number in _NUMBER.findall(text) if number.count(".") < 2]
