"""Finds backups of a partition that earlier runs made, by the command lines in the ledger.

They may have records that are to be erased.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from keytail.errors import ErrorText, UsageProblem, refusal
from keytail.ledger.read import read_rows
from keytail.log.fs import FileSystem
from keytail.undo.backup import entry_directories

_FLAG = "--keep-originals"


@dataclass(frozen=True)
class Backups:
    """The directories in which runs have kept backups, as they were given."""

    directories: tuple[str, ...] = ()

    def reasons(self, fs: FileSystem, partition: str) -> list[ErrorText]:
        """Return the reasons why a partition is refused: each backup of it that is there now, with a remedy."""
        found = []
        for directory in self.directories:
            if not os.path.isabs(directory) or not fs.exists(directory):
                continue
            for path in entry_directories(fs, directory):
                run, name = os.path.split(path)
                if name == partition and run != directory:
                    undo = f"keytail undo --originals {directory} --run {os.path.basename(run)} --forget --execute"
                    text = f"a backup of the partition is in {path}"
                    found.append(refusal(text, slug="backup-of-partition", remedy=f"Remove it with `{undo}`"))
        return found

    def notes(self) -> Iterator[str]:
        """Yield a sentence for each directory that cannot be found."""
        for directory in self.directories:
            if not os.path.isabs(directory):
                yield f"a run has kept a backup in {directory}, below an unknown directory: it may have erased records"


def backups_of_ledger(path: str, log_dirs: Sequence[str], session: object) -> Backups:
    """Return the backups of the runs of a ledger on these log dirs. A ledger that does not exist yet has no runs."""
    try:
        rows = read_rows(path, "runs", {"command": "compact"}, session)
    except UsageProblem:
        return Backups()
    found: dict[str, None] = {}
    for row in rows:
        if set(row["log_dirs"] or ()).isdisjoint(log_dirs):
            continue
        arguments = row["arguments"] or ()
        for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
            name, has_value, value = argument.partition("=")
            if name == _FLAG:
                found[value if has_value else following] = None
    return Backups(tuple(found))
