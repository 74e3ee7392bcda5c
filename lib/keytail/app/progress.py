"""Tells a waiting person how far a run is: a bar on a terminal, a plain line for each partition elsewhere.

Everything goes to standard error, so standard output stays rows only.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from keytail.app.rows import error_console, human_bytes, say


class Reporter:
    """Counts partitions and bytes as they end. A context manager; `done` may be called from any thread."""

    def __init__(self, verb: str, partitions: int, size_bytes: int) -> None:
        self.verb = verb
        self.partitions = partitions
        self.size_bytes = size_bytes
        self.ended = 0
        self.ended_bytes = 0
        self._start_s = time.monotonic()
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(binary_units=True),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=error_console(),
                transient=True,
            )
            self._task = self._bar.add_task(self._description(), total=max(size_bytes, 1))

    def __enter__(self) -> Reporter:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def note(self, text: str) -> None:
        """A line of its own, such as `starting Spark`."""
        if self._bar is not None:
            self._bar.console.print(escape(text))
        else:
            say(f"keytail: {text}")

    def done(self, name: str, status: str, size_bytes: int, detail: str = "") -> None:
        self.ended += 1
        self.ended_bytes += size_bytes
        if self._bar is not None:
            self._bar.update(self._task, advance=size_bytes, description=self._description())
            if status in ("refused", "corrupt", "failed", "damaged"):
                self._bar.console.print(f"{escape(name)} {status}: {escape(detail)}", soft_wrap=True)
            return
        seconds = time.monotonic() - self._start_s
        tail = f": {detail}" if detail else ""
        counted = f"[{self.ended}/{self.partitions}]"
        say(f"keytail: {counted} {name} {status} ({human_bytes(size_bytes)}, at {seconds:.1f} s){tail}")

    def _description(self) -> str:
        return f"{self.verb} {self.ended}/{self.partitions} partitions"
