"""What a run says on standard error: lines for people or JSON objects for programs, all of it or what is wrong only.

Standard output is for rows alone. Whoever has something to say calls `say`, or `Manner.line` for lines of others. No
run ends because it cannot be heard.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, TextIO, cast

from keytail.errors import visible

Level = Literal["detail", "info", "warning", "error"]


@dataclass(frozen=True)
class Manner:
    """`quiet`: warnings and errors only. `verbose`: details too. `as_json`: an object a line, for log collectors."""

    quiet: bool = False
    verbose: bool = False
    as_json: bool = False

    def tells(self, level: Level) -> bool:
        if level == "detail":
            return self.verbose
        return level != "info" or not self.quiet

    def line(self, text: str, level: Level, now: datetime.datetime, **facts: Any) -> str:
        """One line, without its end. `facts` are for programs: `text` says them too."""
        if not self.as_json:
            return "\n".join(map(visible, text.split("\n")))
        time = now.astimezone(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        return json.dumps({"time": time, "level": level, "message": text.strip().removeprefix("keytail: "), **facts})


_manners = [Manner()]


def manner() -> Manner:
    """Of this process."""
    return _manners[-1]


def speak(how: Manner) -> None:
    """Once, by the command line, before anything is said."""
    _manners[:] = [how]


def say(text: str, level: Level = "info", **facts: Any) -> None:
    """A line on standard error, if the manner of this process lets it."""
    how = manner()
    if how.tells(level):
        print(how.line(text, level, datetime.datetime.now(datetime.UTC), **facts), file=standard_error(), flush=True)


def standard_error() -> TextIO:
    """Standard error, without its errors: once it takes no more, all that is said goes nowhere.

    Its reader may have gone, its terminal been closed, the disk of its file be full: a run is worth more than that.
    """
    return cast(TextIO, Unfailing.of(sys.stderr))


class Unfailing:
    """A stream without its errors, and the first of them; `problem` is one that it has already, if it is written to."""

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
        """The first error, once."""
        problem, self._problem, self._at_first_write = self._problem, None, None
        return problem

    def give_up(self, problem: OSError) -> None:
        """The descriptor too: what is buffered is flushed at the end of the process, which would fail by it."""
        self._problem = self._problem or problem
        with contextlib.suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            try:
                os.dup2(nowhere, self._stream.fileno())
            finally:
                os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
