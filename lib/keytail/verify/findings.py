"""What an inspection finds: one thing wrong a finding, with its place, what a broker does, and what helps.

The kinds are listed in `finding_kinds.py`; here they become findings, counted by file so that one bad file does
not drown the others.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field

from keytail.verify.finding_kind import Kind, Severity
from keytail.verify.finding_kinds import KINDS

MOST_A_FILE = 100
_DIGITS = 20  # of the base offset that a segment's files begin with


@dataclass(frozen=True)
class Finding:
    """One thing wrong, and where. `broker` says what a broker that starts on it, or serves it, does.

    `kind` is a name of KINDS; `severity` "error", or "warning" for what costs time and no data. `start_loses`: a
    broker that starts on it loses acknowledged records, or hides them (VERIFY.md).
    """

    kind: str
    severity: Severity
    what: str
    path: str
    byte_position: int | None
    offset: int | None
    broker: str
    remedy: str
    start_loses: bool = False


@dataclass
class Findings:
    """The findings about the files of one directory, in the order in which they were made.

    Of segments, as the 20 digits that their files begin with: `last` is the last one, `unindexed` are those without an
    offset index, which a broker recovers, each by itself, even after a clean shutdown.
    """

    directory: str
    last: str = ""
    unindexed: frozenset[str] = frozenset()
    found: list[Finding] = field(default_factory=list)
    _by_file: Counter[str] = field(default_factory=Counter)
    _losing: set[str] = field(default_factory=set)  # files with such findings that were only counted

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
        """Note a finding; past a number a file, only count. `facts` fill in the kind's sentence.

        `file`: a name in the directory, "" for the directory itself, or an absolute path. `recovered`: its segment
        is one that a broker recovers when it starts.
        """
        self._by_file[file] += 1
        loses = self._start_loses(KINDS[kind], file, recovered)
        if self._by_file[file] <= MOST_A_FILE:
            self._put(kind, file, byte_position, offset, recovered, facts, loses)
        elif loses:
            self._losing.add(file)

    def close(self) -> None:
        """Say how many findings of a file were only counted."""
        for file, count in sorted(self._by_file.items()):
            if count > MOST_A_FILE:
                facts: dict[str, int | str] = {"count": count - MOST_A_FILE}
                self._put("more", file, None, None, False, facts, file in self._losing)
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
        byte_position: int | None,
        offset: int | None,
        recovered: bool,
        facts: dict[str, int | str],
        start_loses: bool,
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
