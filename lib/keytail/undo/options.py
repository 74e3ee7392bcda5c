"""Checks the directory of the flag `--keep-originals DIR`, and prints messages about it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.markup import escape

from keytail.acting_user import as_caller
from keytail.cli import rows as show
from keytail.cli.outside import refuse_unsuitable
from keytail.errors import UsageProblem
from keytail.log.fs import FileSystem

if TYPE_CHECKING:
    from keytail.undo.backup import Backup


def backup_of(
    fs: FileSystem, directory: str | None, copies: bool, log_dirs: Sequence[str]
) -> Backup | None:
    """Return the backup that the flags request, or None. Raises UsageProblem for an unsuitable directory, and Refused
    for a directory on another file system than a log dir, unless `copies` is set."""
    if directory is None:
        if copies:
            raise UsageProblem(
                "--copy-originals requires --keep-originals",
                remedy="Add --keep-originals DIR, the directory for the backup, or omit --copy-originals",
                slug="missing-flag",
            )
        return None
    from keytail.undo.backup import Backup, other_file_system  # noqa: PLC0415 (imports the kernels)

    with as_caller():
        path = os.path.realpath(directory)
    refuse_unsuitable(fs, path, log_dirs, "--keep-originals")
    device = fs.stat(path if fs.exists(path) else os.path.dirname(path)).device
    if not copies and any(fs.stat(log_dir).device != device for log_dir in log_dirs):
        raise other_file_system(path)
    return Backup(path, copies)


def make_directory(fs: FileSystem, backup: Backup, log_dir: str) -> None:
    """Create the backup's directory, with the owner of the log dir, if it does not exist."""
    path = backup.directory
    if not fs.exists(path):
        fs.mkdir(path, fs.stat(log_dir))
        fs.fsync_dir(os.path.dirname(path))


def announce_backup(backup: Backup) -> None:
    """Print to standard error where a run would keep its backup."""
    _print_backup(backup, "A backup would be", "ID")
    if not backup.copies:
        text = "Therefore, a partition that is replaced in several passes (because of --max-scratch-bytes, or for lack "
        text += "of space) frees nothing between the passes: it needs space for all its new files, regardless of "
        text += "--max-scratch-bytes."
        show.print_note(escape(text))


def report_backup(fs: FileSystem, backup: Backup, run_id: str) -> None:
    """Print to standard error where the run has kept its backup, if it has one."""
    if fs.exists(os.path.join(backup.directory, run_id)):
        _print_backup(backup, f"The backup of run {run_id} is", run_id)


def _print_backup(backup: Backup, which: str, run_id: str) -> None:
    how = "kept as copies in" if backup.copies else "kept as hard links in"
    frees = "the copies take space until" if backup.copies else "replaced files free no space until"
    undo = f"keytail undo --originals {backup.directory} --run {run_id}"
    text = f"{which} {how} {backup.directory}: {frees} the backup is removed by `{undo} --forget --execute`. Without "
    text += "--forget, this command restores it."
    show.print_note(escape(text))
