"""Collects the findings of an inspection: problems, each with its place, the reaction of a broker, and the remedy.

The kinds are listed in `finding_kinds.py`. The number of findings per file is limited, so that one bad file does not
hide the others.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from keytail.verify.finding_kinds import KINDS
from keytail.verify.finding_kinds_whole import Kind, Severity

MAX_PER_FILE = 100
_DIGITS = 20  # digits of the base offset with which the names of a segment's files begin


@dataclass(frozen=True)
class Finding:
    """One problem and its place. `broker` describes what a broker does if it starts with this problem, or serves
    the affected data.

    `kind` is a key of KINDS; `severity` is "error", or "warning" for lesser or only possible problems, which
    may also have `start_loses`.
    `start_loses`: a broker that starts with this problem loses or hides acknowledged records (VERIFY.md).
    """

    kind: Annotated[str, "name of the finding, as in ERRORS"]
    severity: Annotated[Severity, "`error`, or `warning` for a lesser or only possible problem; whether "
    "data is lost is in `start_loses`"]
    what: str
    path: str
    byte_position: int | None
    offset: Annotated[int | None, "first offset that is affected"]
    broker: Annotated[str, "how a broker reacts"]
    remedy: str
    start_loses: Annotated[bool, "whether a broker that starts with this problem loses or hides acknowledged "
    "records"] = False

    @property
    def place(self) -> str:
        where = (("byte position", self.byte_position), ("offset", self.offset))
        return ", ".join([self.path, *(f"{name} {number}" for name, number in where if number is not None)])


@dataclass
class Findings:
    """The findings about the files of one directory, in the order in which they were added.

    `last` is the last segment, and `unindexed` are the segments without an offset index, which a broker recovers
    individually even after a clean shutdown. `last` and `unindexed` have segments as the 20 digits with which the file
    names begin.
    """

    directory: str
    last: str = ""
    unindexed: frozenset[str] = frozenset()
    found: list[Finding] = field(default_factory=list)
    _by_file: Counter[str] = field(default_factory=Counter)
    # Files for which a finding that was only counted has `start_loses`.
    _losing: set[str] = field(default_factory=set)

    def add(
        self,
        kind: str,
        file: str,
        byte_position: int | None = None,
        offset: int | None = None,
        *,
        recovered: bool = False,
        **facts: int | str,
    ) -> None:
        """Add a finding, or only count it if the file already has MAX_PER_FILE findings. `facts` fill the placeholders
        of messages.

        `file`: a name in the directory, "" for the directory itself, or an absolute path. `recovered`: a broker
        recovers the file's segment when it starts.
        """
        self._by_file[file] += 1
        loses = self._start_loses(KINDS[kind], file, recovered)
        if self._by_file[file] <= MAX_PER_FILE:
            self._put(kind, file, facts, loses, byte_position, offset, recovered)
        elif loses:
            self._losing.add(file)

    def close(self) -> None:
        """For each file with findings that were only counted, add a finding with their number."""
        for file, count in sorted(self._by_file.items()):
            if count > MAX_PER_FILE:
                self._put("more", file, {"count": count - MAX_PER_FILE}, file in self._losing)
        self._by_file.clear()
        self._losing.clear()

    def _start_loses(self, kind: Kind, file: str, recovered: bool) -> bool:
        segment = file[:_DIGITS]
        if kind.recovered and (recovered or segment in self.unindexed):
            return kind.recovered.start_loses
        return kind.start_loses == "yes" or (kind.start_loses == "at-end" and segment == self.last)

    def _put(
        self,
        name: str,
        file: str,
        facts: Mapping[str, int | str],
        start_loses: bool,
        byte_position: int | None = None,
        offset: int | None = None,
        recovered: bool = False,
    ) -> None:
        kind = KINDS[name]
        instead = kind.recovered if recovered else None
        self.found.append(
            Finding(
                kind=name,
                severity=instead.severity if instead else kind.severity,
                what=kind.what.format(**facts),
                path=os.path.join(self.directory, file) if file else self.directory,
                byte_position=byte_position,
                offset=offset,
                broker=(instead.broker if instead else kind.broker).format(**facts),
                remedy=kind.remedy,
                start_loses=start_loses,
            )
        )
