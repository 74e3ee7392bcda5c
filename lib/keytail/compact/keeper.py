"""Backs up the files that a compaction replaces, before the first segment of a partition is replaced."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from keytail.compact.task import CleaningResult, CleaningTask
from keytail.compact.write_phase.passes import source_bytes
from keytail.errors import KeytailError, Refused
from keytail.log.fs import FileSystem
from keytail.log.partition import SegmentFacts
from keytail.sizes import human_bytes
from keytail.undo.backup import Backup, add_groups, entry_path, forget, keep
from keytail.undo.manifest import read_manifest
from keytail.undo.partition import decide, read_state


@dataclass(frozen=True)
class Keeper:
    """The backup of the partitions of a run. Used only in the driver."""

    fs: FileSystem
    backup: Backup

    def copy_bytes(self, task: CleaningTask) -> int:
        """Return the maximum size of the backup of a partition in bytes; 0 for hard links."""
        if not self.backup.copies:
            return 0
        return sum(map(_all_bytes, _sources(task, task.first_uncleanable_offset)))

    def has_room(self, task: CleaningTask, reserved_bytes: int, scratch_bytes: int) -> bool:
        """Return whether the copies fit beside `reserved_bytes` and `scratch_bytes` on the backup's file system."""
        needed = self.copy_bytes(task)
        return not needed or self._free_bytes() - reserved_bytes >= needed + scratch_bytes

    def refusal(self, task: CleaningTask) -> Refused:
        need, free = self.copy_bytes(task), self._free_bytes()
        return Refused(
            f"the backup needs up to {human_bytes(need)} in addition to other output, but {human_bytes(free)} are free",
            path=self.backup.directory,
            remedy="Free space there, or give a --keep-originals directory on the log dir's file system and omit "
            "--copy-originals: hard links need no space",
            slug="not-enough-space",
        )

    def keep(self, task: CleaningTask, result: CleaningResult) -> None:
        """Back up the source files in the partition's first pass; in later passes, add the new groups to the manifest.
        Backup and manifest are durable on return.
        """
        if not result.groups:
            return
        if task.continues:
            add_groups(self.fs, self._entry(task), result.groups)
            return
        sources = _sources(task, result.end_offset)
        keep(
            self.fs,
            self.backup,
            task.partition_path,
            result.groups,
            run_id=task.committing_run_id,
            source_bases=[segment.base_offset for segment in sources],
            end_offset=task.end_of(len(sources) - 1),
            next_checkpoint=task.next_checkpoint(result.end_offset),
        )

    def remove_unused(self, task: CleaningTask) -> None:
        """Remove the backup of a failed partition of which nothing was replaced."""
        with contextlib.suppress(KeytailError, OSError):  # on failure it is retained until `undo --forget`
            entry = self._entry(task)
            if not self.fs.exists(entry):
                return
            manifest = read_manifest(self.fs, entry)
            decision = decide(manifest, read_state(self.fs, manifest))
            if not decision.parts and not decision.differences:
                forget(self.fs, entry)

    def _entry(self, task: CleaningTask) -> str:
        return entry_path(self.backup.directory, task.committing_run_id, task.topic, task.partition)

    def _free_bytes(self) -> int:
        return self.fs.free_bytes(self.backup.directory)


def _sources(task: CleaningTask, end_offset: int) -> list[SegmentFacts]:
    return [segment for segment in task.segments if segment.base_offset < end_offset]


def _all_bytes(segment: SegmentFacts) -> int:
    return source_bytes(segment) + (segment.txn_index_bytes or 0)
