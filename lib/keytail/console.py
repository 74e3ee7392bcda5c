"""Output on standard error: lines for people or JSON objects for programs, in full or only warnings and errors.

Only rows are written to standard output. Modules call `print_message`, or `OutputStyle.line` for lines that they print
themselves. A run continues if standard error cannot be written.
"""

from __future__ import annotations

import contextlib
import contextvars
import datetime
import itertools
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TextIO, cast

from keytail.errors import slugs_of, visible

# Also a command in backticks, with the punctuation around it.
_WORD = re.compile(r"(?:`[^`\n]*`|\S)+")
Level = Literal["detail", "info", "warning", "error"]


@dataclass(frozen=True)
class OutputStyle:
    """`quiet`: only warnings and errors. `verbose`: also details. `as_json`: JSON lines, for log collectors."""

    quiet: bool = False
    verbose: bool = False
    as_json: bool = False

    def prints(self, level: Level) -> bool:
        if level == "detail":
            return self.verbose
        return level != "info" or not self.quiet

    def line(self, text: str, level: Level, now: datetime.datetime, **facts: Any) -> str:
        """Return one line, without its line end. `facts` are fields of the JSON object; `text` contains them too."""
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
    """Set the output style of this run; called by the command line, before any output."""
    _style.set(how)


def print_message(text: str, level: Level = "info", **facts: Any) -> None:
    """Print a line on standard error, if the output style of this run allows it."""
    how = output_style()
    if how.prints(level):
        line, stream = how.line(text, level, datetime.datetime.now(datetime.UTC), **facts), standard_error()
        if stream.isatty() and not how.as_json:
            line = wrapped(line, shutil.get_terminal_size().columns)
        print(line, file=stream, flush=True)


def wrapped(text: str, width: int) -> str:
    """Return text for a terminal: lines end between words, and not within a name or a command in backticks. Only a
    single word may be wider than `width`."""
    return "\n".join(
        line[start:end].rstrip()
        for line in text.split("\n")
        for start, end in itertools.pairwise((0, *line_ends(line, width), len(line)))
    )


def line_ends(line: str, width: int) -> Iterator[int]:
    """Yield where a line of text is divided into lines of a terminal that has `width` characters."""
    from rich.cells import cell_len  # noqa: PLC0415 (most messages are not for a terminal)

    first = 0
    for word in _WORD.finditer(line):
        if word.start() > first and cell_len(line[first : word.end()]) > width:
            first = word.start()
            yield first


def standard_error() -> TextIO:
    """Return standard error as a stream that raises no errors: after a first failure all output is discarded.

    Its reader may have ended, its terminal may be closed, or the disk of its file may be full: this must not end a run.
    """
    return cast(TextIO, Unfailing.of(sys.stderr))


class Unfailing:
    """A stream that suppresses errors and keeps the first one. `problem`, if given, becomes the error of the first
    write."""

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
        """Discard all further output. The descriptor is redirected too: the flush at process exit would fail."""
        self._problem = self._problem or problem
        with contextlib.suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            try:
                os.dup2(nowhere, self._stream.fileno())
            finally:
                os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
