"""Decides in a plan, by the rules of a run with --execute (running/bundles.py), whether there is room to rewrite a due
partition.

Each partition is considered alone, with the space that is free now; a run retries a partition without room when other
partitions have freed space. This module imports the kernels, so a plan imports it only if a due partition may lack
space.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from keytail.compact.keeper import Keeper
from keytail.compact.planning import Planned
from keytail.compact.rules import Rules, TaskSettings
from keytail.compact.running.bundles import bytes_alone, refusal_alone
from keytail.compact.steps import cleaning_tasks
from keytail.compact.task import CleaningTask
from keytail.errors import KeytailError
from keytail.log.fs import FileSystem
from keytail.run.storage import ScratchSpace
from keytail.undo.backup import Backup


@dataclass(frozen=True)
class Room:
    """The space for scratch files and, with a `keeper`, for a backup. Nothing is reserved."""

    space: ScratchSpace
    keeper: Keeper | None = None

    @classmethod
    def of(cls, fs: FileSystem, limit_bytes: int | None, backup: Backup | None) -> Room:
        """Return the room of a run with this `--max-scratch-bytes` and backup, whose directory need not exist yet."""
        if backup is not None:
            backup = replace(backup, directory=existing_directory(fs, backup.directory))
        return cls(ScratchSpace(fs, limit_bytes), Keeper(fs, backup) if backup is not None else None)

    def lacking(self, task: CleaningTask) -> KeytailError | None:
        """Return the error if a task's partition cannot be rewritten even when no other partition is; None if it can be
        rewritten."""
        if bytes_alone(task, self.space, self.keeper) is not None:
            return None
        return refusal_alone(task, self.space, self.keeper)

    def lacking_for(self, planned: Planned, rules: Rules, settings: TaskSettings) -> KeytailError | None:
        """Return what `lacking` would return for the task of a planned partition."""
        return next(filter(None, map(self.lacking, cleaning_tasks([planned], rules, settings, "plan"))), None)


def existing_directory(fs: FileSystem, path: str) -> str:
    """Return `path`, or the nearest directory above it that exists."""
    while not fs.exists(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    return path
