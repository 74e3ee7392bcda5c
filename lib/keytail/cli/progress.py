"""Prints progress to standard error: a live view on a terminal, lines at a limited rate elsewhere.

Standard output has only rows.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from keytail.cli.rows import alike, error_console, human_bytes, human_time
from keytail.cli.run_progress import DRIVER, RunProgress, Slowest
from keytail.cli.statuses import is_failure, kind_of
from keytail.console import output_style, print_message, wrapped
from keytail.errors import visible, without_remedy
from keytail.run.watching import HERE, DriverAddress, TaskProgress, Watch
from keytail.threads import inheriting

# In a run without a live view and with at most this number of partitions, each partition gets a line when it ends. In
# a larger run, only partitions that failed, or are the slowest and took longer than LONG_S, get a line.
MAX_PARTITIONS_WITH_LINES = 100
LONG_S = 30.0
# Reasons with fewer characters are printed for each partition.
_LONG_CHARACTERS = 60
# Seconds between two lines that only report progress.
PACE_S = 30.0
# Columns of a terminal below which the live view has no bar, no rate and no elapsed time.
_WIDTH_OF_BAR = 80
# How many times the bytes of a partition are read. A compaction reads the sources for map, write and proof, and the
# output, about half as many bytes, for the proof. An export finds the latest records, then reads them again.
READ_IN_A_COMPACTION = 3.5
READ_IN_AN_EXPORT = 2.0


class Reporter:
    """Counts partitions that have ended, and reports progress. The reporter is a context manager; all threads may call
    `done`.

    `sizes` has the name and the bytes of each partition; `reads` is how often each byte is read on average.
    """

    def __init__(
        self,
        command: str,
        sizes: Sequence[tuple[str, int]],
        reads: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.command = command
        self._progress = RunProgress(sizes, reads)
        self._clock = clock
        self._start_s = self._last_line_s = clock()
        self._lock = threading.RLock()
        self._reported: dict[tuple[str, str], str] = {}  # the first partition with each status and reason
        self._over = threading.Event()
        self._held = contextlib.ExitStack()
        self._bar: _Live | None = None
        self._is_live = sys.stderr.isatty() and not (output_style().quiet or output_style().as_json)

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._held.close()
        with self._lock:
            if self._bar is not None:
                self._bar.stop()
                self._bar = None

    def watch(self, driver: DriverAddress = HERE) -> None:
        """Receive reports of tasks at `driver` and show them until the reporter is closed.

        The call starts threads: a caller that forks workers must do so first.
        """
        if output_style().quiet:
            return
        with contextlib.suppress(OSError):  # no port is available: only partitions that have ended are reported
            self._held.enter_context(Watch(driver, self.on_progress))
        if self._is_live:
            self._bar = _Live(self._description(), self._progress.size_bytes)
            self._bar.start()
        threading.Thread(target=inheriting(self._refresh), name="progress", daemon=True).start()

    def note(self, text: str) -> None:
        """Print a separate line, such as `starting Spark`."""
        self._print("keytail: " + text)

    def on_progress(self, report: TaskProgress) -> None:
        """Process a report of a task."""
        with self._lock:
            now_s = self._clock()
            is_new = self._progress.on_progress(report, now_s)
        if is_new:
            took = human_time(now_s - self._start_s)
            text = f"keytail: {report.name}: {report.phase} (at {took})"
            self._print(text, "detail", event="phase", partition=report.name, phase=report.phase)

    def phase(self, name: str, phase: str) -> None:
        """Record the driver's own phase for a partition, after its tasks."""
        self.on_progress(TaskProgress(name, DRIVER, phase, 0))

    def done(self, name: str, status: str, size_bytes: int, detail: str = "") -> None:
        """Record that a partition has ended, with `status`."""
        with self._lock:
            now_s = self._clock()
            progress = self._progress
            long = (item := progress.slowest(now_s)) is not None and item.name == name and item.seconds > LONG_S
            progress.done(name, size_bytes)
            self._show()
            counted, seconds = f"[{progress.ended}/{progress.partitions}]", now_s - self._start_s
        is_bad = is_failure(status)
        has_line = is_bad or output_style().verbose or (
            not self._is_live and (long or progress.partitions <= MAX_PARTITIONS_WITH_LINES)
        )  # fmt: skip
        if has_line:
            tail = f": {self._reason(name, status, detail)}" if detail else ""
            self._print(
                f"keytail: {counted} {name} {status} ({human_bytes(size_bytes)}, at {human_time(seconds)})" + tail,
                "warning" if is_bad else "info",
                event="partition", partition=name, status=status, bytes=size_bytes, seconds=round(seconds, 1),
            )  # fmt: skip
        else:
            self.report_progress_if_due()

    def _reason(self, name: str, status: str, detail: str) -> str:
        """Return a reason without its remedy, which the row has. In text output, a long reason for a refusal is
        returned only for the first partition that has it; for other partitions, the name of that partition.
        """
        reason = without_remedy(detail)
        if output_style().as_json or kind_of(status) != "not done" or len(reason) < _LONG_CHARACTERS:
            return reason
        with self._lock:
            first = self._reported.setdefault((status, alike(reason, name)), name)
        return reason if first == name else f"as {first}"

    def report_progress_if_due(self) -> None:
        """Report the progress of the run, if nothing was printed for PACE_S."""
        with self._lock:
            now_s = self._clock()
            if self._is_live or now_s - self._last_line_s < PACE_S:
                return
            self._last_line_s = now_s  # set first, so that only one thread prints
            progress, slowest = self._progress, self._progress.slowest(now_s)
            done_bytes, seconds = progress.done_bytes, now_s - self._start_s
        rate = done_bytes / seconds if seconds else 0.0
        left_s = (progress.size_bytes - done_bytes) / rate if rate and progress.size_bytes else None
        text = f"{self.command}: {progress.ended:,} of {progress.partitions:,} partitions"
        if progress.size_bytes:
            text += f", {human_bytes(done_bytes)} of {human_bytes(progress.size_bytes)}, {human_bytes(int(rate))}/s"
        text += f", {human_time(left_s)} left" if left_s is not None else ""
        self._print(
            f"keytail: {text}{f'; {_of(slowest)}' if slowest else ''} (at {human_time(seconds)})",
            event="progress", command=self.command, partitions_done=progress.ended,
            partitions=progress.partitions,
            bytes_done=done_bytes, bytes=progress.size_bytes, bytes_per_s=int(rate),
            seconds_left=None if left_s is None else round(left_s),
            slowest=None if slowest is None else slowest.name, phase=None if slowest is None else slowest.phase,
        )  # fmt: skip

    def _print(self, text: str, level: Any = "info", **facts: Any) -> None:
        with self._lock:
            if self._bar is not None:
                if output_style().prints(level):
                    style = "yellow" if level == "warning" else ""
                    line = wrapped(visible(text), self._bar.console.width)
                    self._bar.console.print(Text(line, style=style), soft_wrap=True)
                return
            self._last_line_s = self._clock()
            print_message(text, level, **facts)

    def _refresh(self) -> None:
        while not self._over.wait(0.5):
            with self._lock:
                self._show()
            self.report_progress_if_due()

    def _show(self) -> None:
        if self._bar is not None:
            slowest = self._progress.slowest(self._clock())
            self._bar.show(self._description(), self._progress.done_bytes, _of(slowest) if slowest else "")

    def _description(self) -> str:
        return f"{self.command} {self._progress.ended:,}/{self._progress.partitions:,}"


def _of(slowest: Slowest) -> str:
    phase = f"{slowest.phase}, " if slowest.phase else ""
    return f"slowest: {slowest.name} ({phase}{int(100 * slowest.share)} %, for {human_time(slowest.seconds)})"


class _Live(Progress):
    """Two lines that are removed at the end: figures, and the slowest partition."""

    def __init__(self, description: str, size_bytes: int) -> None:
        self._line = ""
        console = error_console()
        columns: list[ProgressColumn] = [TextColumn("{task.description}"), DownloadColumn(binary_units=True)]
        if console.width >= _WIDTH_OF_BAR:
            columns[1:1] = [BarColumn(bar_width=None)]
            columns += [TextColumn("{task.fields[rate]}"), TimeElapsedColumn()]
        super().__init__(
            *columns,
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            expand=True,
            speed_estimate_period=60.0,
        )
        self._task = self.add_task(escape(description), total=max(size_bytes, 1), rate="")

    def show(self, description: str, done_bytes: int, line: str) -> None:
        speed = self.tasks[0].speed
        rate = f"{human_bytes(int(speed))}/s" if speed else ""
        self._line = line
        self.update(self._task, completed=done_bytes, description=escape(description), rate=rate)

    def get_renderables(self) -> Any:
        yield from super().get_renderables()
        if self._line:
            yield Text(visible(f"  {self._line}"), style="dim", no_wrap=True, overflow="ellipsis")
