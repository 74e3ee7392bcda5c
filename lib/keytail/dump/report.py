"""Writes the output of a dump: lines or JSON objects, and findings. Some findings are printed at the end.

As text, lines are written to standard output and findings to standard error. If Kafka's tool also reports a finding,
the wording of that tool is used. As JSON, lines and findings are objects on standard output.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from keytail.dump.templates import Sink

MAX_GAPS = 1000  # maximum number of gaps that are listed per file: a compacted log may have very many


class Report:
    """Writes lines and findings. `wrong`: a finding was reported for which the exit status is 1."""

    def __init__(self, out: Sink, print_message: Callable[[str], object], *, as_json: bool = False) -> None:
        self.out, self.print_message, self.as_json = out, print_message, as_json
        self.wrong = False
        self._mismatches: dict[str, dict[int, int]] = {}
        self._times: dict[str, dict[str, list[tuple[int, int]]]] = {"timestamp": {}, "order": {}, "offset": {}}
        self._gaps: dict[str, tuple[list[tuple[int, int]], int]] = {}

    def line(self, text: str, **fields: Any) -> None:
        """Write one line; as JSON, write an object with these `fields` instead, or nothing if there are no fields."""
        if not self.as_json:
            self.out(memoryview(f"{text}\n".encode(errors="surrogateescape")))  # a file name need not be valid UTF-8
        elif fields:
            self.out(memoryview((json.dumps(fields, separators=(",", ":")) + "\n").encode()))

    def note(self, text: str) -> None:
        """Print a message that is not about a problem."""
        self.print_message(text)

    def problem(self, what: str, path: str, position: int | None = None, offset: int | None = None) -> None:
        self.wrong = True
        if self.as_json:
            self.line("", type="problem", file=path, what=what, position=position, offset=offset)
            return
        where = [path]
        where += [f"byte position {position}"] if position is not None else []
        where += [f"offset {offset}"] if offset is not None else []
        self.print_message(f"{what} ({', '.join(where)})")

    def index_mismatch(self, path: str, index_offset: int, log_offset: int) -> None:
        self._found(path, f"the batch at this entry's position ends with offset {log_offset}", index_offset)
        self._mismatches.setdefault(path, {})[index_offset] = log_offset

    def time_mismatch(self, path: str, index_time: int, log_time: int) -> None:
        what = f"the largest timestamp of this entry's batch is {log_time}, but the entry has timestamp {index_time}"
        self._found(path, what, None)
        self._times["timestamp"].setdefault(path, []).append((index_time, log_time))

    def time_order(self, path: str, index_time: int, previous: int) -> None:
        self._found(path, f"timestamp {index_time} is not above the previous timestamp {previous}", None)
        self._times["order"].setdefault(path, []).append((index_time, previous))

    def time_offset(self, path: str, index_offset: int, log_offset: int) -> None:
        self._found(path, f"no batch ends with this entry's offset; the next batch ends with "
        f"{log_offset}", index_offset)
        self._times["offset"].setdefault(path, []).append((index_offset, log_offset))

    def gaps(self, path: str, before: np.ndarray, after: np.ndarray) -> None:
        """Add pairs of offsets that are not consecutive. Gaps are not damage, since compaction leaves them."""
        kept, count = self._gaps.get(path, ([], 0))
        room = MAX_GAPS - len(kept)
        kept += zip(before[:room].tolist(), after[:room].tolist(), strict=True)
        self._gaps[path] = kept, count + len(before)

    def end(self) -> None:
        """Print the findings that Kafka's tool prints at the end of its output; with `as_json` only the gaps, since the
        other findings were written when they were found."""
        if self.as_json:
            for path, (pairs, count) in self._gaps.items():
                listed = [{"before": before, "after": after} for before, after in sorted(dict(pairs).items())]
                self.line("", type="gaps", file=path, count=count, gaps=listed)
            return
        for path, mismatches in self._mismatches.items():
            self.print_message(f"Mismatches in :{path}")
            for index_offset, log_offset in sorted(mismatches.items(), reverse=True):
                self.print_message(f"  Index offset: {index_offset}, log offset: {log_offset}")
        for path, pairs in self._times["timestamp"].items():
            self.print_message(f"Found timestamp mismatch in :{path}")
            for pair in pairs:
                self.print_message(f"  Index timestamp: {pair[0]}, log timestamp: {pair[1]}")
        for path, pairs in self._times["order"].items():
            self.print_message(f"Found out of order timestamp in :{path}")
            for pair in pairs:
                self.print_message(f"  Index timestamp: {pair[0]}, Previously indexed timestamp: {pair[1]}")
        for path, pairs in self._times["offset"].items():
            self.print_message(f"The following indexed offsets are not found in :{path}")
            for pair in pairs:
                self.print_message(f"Indexed offset: {pair[0]}, found log offset: {pair[1]}")
        for path, (pairs, count) in self._gaps.items():
            self.print_message(f"Non-consecutive offsets in {path}")
            for before, after in sorted(dict(pairs).items()):
                self.print_message(f"  {before} is followed by {after}")
            if count > len(pairs):
                self.print_message(f"  and {count - len(pairs)} more")

    def _found(self, path: str, what: str, offset: int | None) -> None:
        """Record a finding: as JSON it is written immediately, as text at the end."""
        self.wrong = True
        if self.as_json:
            self.problem(what, path, None, offset)
