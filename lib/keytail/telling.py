"""What a run says on standard error: lines for people or JSON objects for programs, all of it or what is wrong only.

Standard output is for rows alone. Whoever has something to say calls `say`, or `Manner.line` for lines of others.
"""

from __future__ import annotations

import datetime
import json
import sys
from dataclasses import dataclass
from typing import Any, Literal

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
        print(how.line(text, level, datetime.datetime.now(datetime.UTC), **facts), file=sys.stderr, flush=True)
