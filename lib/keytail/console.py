"""Prints messages on standard error: lines for people or JSON objects for programs, all or only warnings and errors.

Results are written to standard output. Messages are printed by `print_message`, or by the consoles of `cli/`. A run
continues if standard error cannot be written.
"""

from __future__ import annotations

import contextlib
import contextvars
import datetime
import itertools
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TextIO, cast

from keytail.errors import slugs_of, visible

# Matches a word. A number with its unit, and a command in backticks, are one word, with the punctuation around it.
_WORD = re.compile(r"(?:`[^`\n]*`|\d[\d.,]* (?=(?:ms|min|[dhsB%]|[KMGT]iB)(?!\w))|\S)+")
_UNKNOWN_COLUMNS = 80
_HANG = 2  # indentation of continuation lines, in characters, relative to the first line
Level = Literal["detail", "info", "warning", "error"]


@dataclass(frozen=True)
class OutputStyle:
    """`quiet`: print only warnings and errors. `verbose`: print details, too. `as_json`: print JSON lines."""

    quiet: bool = False
    verbose: bool = False
    as_json: bool = False

    def prints(self, level: Level) -> bool:
        if level == "detail":
            return self.verbose
        return level != "info" or not self.quiet

    def line(self, text: str, level: Level, now: datetime.datetime, **facts: Any) -> str:
        """Return the message without its last line end; as JSON, it is one line. `facts` are fields of the JSON object,
        whose values `text` contains, too."""
        if not self.as_json:
            return "\n".join(map(visible, text.split("\n")))
        if slugs := slugs_of(text):
            facts = {"slugs": slugs, **facts}
        time = now.astimezone(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        return json.dumps({"time": time, "level": level, "message": text.strip().removeprefix("keytail: "), **facts})


# A context variable (threads.py): code of every layer prints, and would otherwise need a parameter for the style.
_style: contextvars.ContextVar[OutputStyle] = contextvars.ContextVar("style")


def output_style() -> OutputStyle:
    """Return the output style of this run."""
    return _style.get(OutputStyle())


def set_output_style(how: OutputStyle) -> None:
    """Set the output style of this run. The command line calls this function before any output."""
    _style.set(how)


def print_message(text: str, level: Level = "info", **facts: Any) -> None:
    """Print a message on standard error, if the output style of this run allows it."""
    how = output_style()
    if how.prints(level):
        line, stream = how.line(text, level, datetime.datetime.now(datetime.UTC), **facts), standard_error()
        if stream.isatty() and not how.as_json:
            line = wrapped(line, _columns_of(stream))
        print(line, file=stream, flush=True)


def _columns_of(terminal: TextIO) -> int:
    """Return the width of `terminal` in columns (COLUMNS, if set); shutil.get_terminal_size asks standard output."""
    try:
        found = int(os.environ.get("COLUMNS") or os.get_terminal_size(terminal.fileno()).columns)
    except (OSError, ValueError):
        found = 0
    return found if found > 0 else _UNKNOWN_COLUMNS


def wrapped(text: str, width: int) -> str:
    """Return `text` with line breaks for a terminal: lines end between words, and not within a name, a quantity or a
    command in backticks. Only a single word may be wider than `width`. Continuation lines are indented, so that it is
    visible where the next message begins."""
    return "\n".join(
        f"\n{indent}".join(divided(line, width, len(indent)))
        for line in text.split("\n")
        for indent in (hanging_indent(line),)
    )


def divided(line: str, width: int, indent: int) -> list[str]:
    """Divide a line of text into lines for a terminal of `width` characters. Each line but the first is shorter by
    `indent`, but does not contain the indentation."""
    ends = line_ends(line, width, indent)
    return [line[start:end].rstrip() for start, end in itertools.pairwise((0, *ends, len(line)))]


def line_ends(line: str, width: int, indent: int) -> Iterator[int]:
    """Yield the indexes of the characters before which `divided` divides a line."""
    from rich.cells import cell_len  # noqa: PLC0415 (most messages are not for a terminal)

    first = 0
    for word in _WORD.finditer(line):
        if line[first : word.start()].strip() and cell_len(line[first : word.end()]) > width - indent * bool(first):
            first = word.start()
            yield first


def hanging_indent(line: str) -> str:
    """Return the blanks with which the continuations of `line` begin."""
    return " " * (len(line) - len(line.lstrip(" ")) + _HANG)


def listed(names: Sequence[str], most: int = 10) -> str:
    """Return the names, at most `most` of them, and the number of the others, for a message."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def standard_error() -> TextIO:
    """Return standard error as a stream that raises no OSError: after a first failure all output is discarded.

    The reader of standard error may have ended, its terminal may be closed, or the disk of its file may be full: none
    of this may end a run.
    """
    return cast(TextIO, Unfailing.of(sys.stderr))


class Unfailing:
    """A stream that suppresses each OSError and keeps the first one. `problem`, if given, becomes the error of the
    first write."""

    def __init__(self, stream: TextIO, problem: OSError | None = None) -> None:
        self._stream = stream
        self._at_first_write = problem
        self._problem: OSError | None = None

    @classmethod
    def of(cls, stream: Any) -> Unfailing:
        return stream if isinstance(stream, cls) else cls(stream)

    def write(self, text: str) -> int:
        self._problem = self._problem or self._at_first_write
        try:
            return self._stream.write(text)
        except OSError as problem:
            self.give_up(problem)
            return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as problem:
            self.give_up(problem)

    def take_problem(self) -> OSError | None:
        """Return the first error, and clear it."""
        problem, self._problem, self._at_first_write = self._problem, None, None
        return problem

    def give_up(self, problem: OSError) -> None:
        """Discard all further output, by redirecting the descriptor, so that the flush at process exit does not
        fail."""
        self._problem = self._problem or problem
        with contextlib.suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            try:
                os.dup2(nowhere, self._stream.fileno())
            finally:
                os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
