"""What an inspection finds: one thing wrong a finding, with its place, what a broker does, and what helps.

The kinds are listed in `finding_kinds.py`; here they become findings, counted by file so that one bad file does
not drown the others.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field

from keytail.inspection.finding_kind import Severity
from keytail.inspection.finding_kinds import KINDS

MOST_A_FILE = 100


@dataclass(frozen=True)
class Finding:
    """One thing wrong, and where. `broker` says what a broker that starts on it, or serves it, does.

    `kind` is a name of KINDS; `severity` "error", or "warning" for what costs time and no data.
    """

    kind: str
    severity: Severity
    what: str
    path: str
    byte_position: int | None
    offset: int | None
    broker: str
    remedy: str


@dataclass
class Findings:
    """The findings about the files of one directory, in the order in which they were made."""

    directory: str
    found: list[Finding] = field(default_factory=list)
    _by_file: Counter[str] = field(default_factory=Counter)

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
        if self._by_file[file] <= MOST_A_FILE:
            self._put(kind, file, byte_position, offset, recovered, facts)

    def close(self) -> None:
        """Say how many findings of a file were only counted."""
        for file, count in sorted(self._by_file.items()):
            if count > MOST_A_FILE:
                self._put("more", file, None, None, False, {"count": count - MOST_A_FILE})
        self._by_file.clear()

    def _put(
        self,
        name: str,
        file: str,
        byte_position: int | None,
        offset: int | None,
        recovered: bool,
        facts: dict[str, int | str],
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
            )
        )
