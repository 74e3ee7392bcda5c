"""Checks that a directory named by a flag is outside of every log dir. In a log dir, the directory would keep brokers
from starting."""

from __future__ import annotations

import os
from collections.abc import Sequence

from keytail.acting_user import as_caller, current, works_as_another_user
from keytail.errors import Refused, UsageProblem
from keytail.format import names
from keytail.log.fs import FileSystem


def refuse_unsuitable(
    fs: FileSystem, path: str, log_dirs: Sequence[str], flag: str, *, may_be_log_dir: bool = False
) -> None:
    """Do the same as `refuse_in_log_dirs` and `refuse_unwritable`, and raise UsageProblem unless `path` is a directory
    or can be created."""
    refuse_in_log_dirs(fs, path, log_dirs, flag, may_be_log_dir=may_be_log_dir)
    refuse_unwritable(path, flag)
    parent = os.path.dirname(path)
    if not fs.exists(parent):
        raise UsageProblem(
            f"the parent directory of {flag} does not exist",
            path=parent,
            remedy=f"Create that directory, or give another {flag}",
            slug="no-parent-directory",
        )
    if fs.exists(path) and not fs.stat(path).is_dir:
        raise UsageProblem(
            f"{flag} is not a directory", path=path, remedy=f"Give another {flag}", slug="not-a-directory"
        )


def refuse_unless_empty(fs: FileSystem, path: str, log_dirs: Sequence[str], flag: str) -> None:
    """Do the same as `refuse_unsuitable`, and raise UsageProblem if the directory `path` exists and has files."""
    refuse_unsuitable(fs, path, log_dirs, flag)
    if fs.exists(path) and fs.scan(path):
        raise UsageProblem(
            f"{flag} is not empty",
            path=path,
            remedy="Give an empty directory, or a new name",
            slug="directory-not-empty",
        )


@as_caller()
def refuse_in_log_dirs(
    fs: FileSystem, path: str, log_dirs: Sequence[str], flag: str, *, may_be_log_dir: bool = False
) -> None:
    """Raise UsageProblem if `path` (absolute, links resolved) is, contains or is in one of `log_dirs`, or if it is or
    is in any other log dir.

    `may_be_log_dir`: the path itself may be another log dir.
    """
    remedy = "Give a directory elsewhere: a broker does not start on a log dir that contains other directories"
    for log_dir in map(os.path.realpath, log_dirs):
        if os.path.commonpath([path, log_dir]) in (path, log_dir):
            raise UsageProblem(
                f"{flag} is inside a log dir or contains one", path=path, remedy=remedy, slug="overlaps-log-dir"
            )
    refuse_below_log_dir(fs, os.path.dirname(path) if may_be_log_dir else path, flag)


@as_caller()
def refuse_below_log_dir(fs: FileSystem, path: str, flag: str) -> None:
    """Raise UsageProblem if `path` is a log dir of any broker, or is in such a log dir."""
    remedy = "Give a directory elsewhere: a broker does not start on a log dir that contains other directories"
    above = path
    while above != os.path.dirname(above):
        if fs.exists(os.path.join(above, names.META_PROPERTIES)):
            raise UsageProblem(
                f"{flag} is inside {above}, which is a log dir", path=path, remedy=remedy, slug="overlaps-log-dir"
            )
        above = os.path.dirname(above)


def refuse_unwritable(path: str, flag: str) -> None:
    """Raise Refused if the process was started as root, and the owner of the log dirs cannot write or create `path`."""
    if not works_as_another_user():
        return
    with as_caller():
        directory = path if os.path.lexists(path) else os.path.dirname(path)
        if not os.path.isdir(directory):  # the caller reports this error
            return
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
        raise Refused(
            f"{current()} cannot write to the directory of {flag}; keytail was started as root, and therefore works as "
            "the owner of the log dirs",
            path=directory,
            remedy="Give a directory that this user can reach and write: create it, and make this user its owner "
            "(chown)",
            slug="unwritable-for-owner",
        )
