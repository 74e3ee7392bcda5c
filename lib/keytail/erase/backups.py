"""Finds backups of a partition that earlier runs made, from the command lines of these runs in the ledger.

Such backups may contain records that are to be erased.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from keytail.errors import ErrorText, UsageProblem, refusal
from keytail.log.fs import FileSystem
from keytail.undo.backup import entry_directories

_FLAG = "--keep-originals"
_COMMANDS = ("compact", "compact --repack")


@dataclass(frozen=True)
class Backups:
    """The directories in which earlier runs have kept backups, with the paths from the command lines of the runs."""

    directories: tuple[str, ...] = ()

    def reasons(self, fs: FileSystem, partition: str) -> list[ErrorText]:
        """Return the reasons to refuse a partition: one for each backup of it that exists now, with a remedy."""
        found = []
        for directory in self.directories:
            if not os.path.isabs(directory):
                text = f"an earlier run has kept a backup in {directory}, a path relative to an unknown directory"
                remedy = "Find and remove the backup, then run without --ledger"
                found.append(refusal(text, slug="backup-of-partition", remedy=remedy))
                continue
            if not fs.exists(directory):
                continue
            for path in entry_directories(fs, directory):
                run, name = os.path.split(path)
                if name == partition and run != directory:
                    undo = f"keytail undo --originals {directory} --run {os.path.basename(run)} --forget --execute"
                    text = f"a backup of the partition is in {path}"
                    found.append(refusal(text, slug="backup-of-partition", remedy=f"Remove it with `{undo}`"))
        return found


def backups_of_ledger(path: str, log_dirs: Sequence[str], session: object) -> Backups:
    """Return the backups of the runs that the ledger at `path` records for these log dirs; none if there is no ledger.
    """
    from keytail.ledger.read import read_rows  # noqa: PLC0415 (needs the extra of --ledger)

    try:
        rows = [row for command in _COMMANDS for row in read_rows(path, "runs", {"command": command}, session)]
    except UsageProblem:
        return Backups()
    found: dict[str, None] = {}
    for row in rows:
        if set(map(os.path.realpath, row["log_dirs"] or ())).isdisjoint(map(os.path.realpath, log_dirs)):
            continue
        arguments = row["arguments"] or ()
        for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
            name, has_value, value = argument.partition("=")
            if name == _FLAG:
                found[value if has_value else following] = None
    return Backups(tuple(found))
