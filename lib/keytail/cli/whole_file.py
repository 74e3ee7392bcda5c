"""Writes the files that flags name, at the end of a run: outside of every log dir, and whole or not at all.

A file gets its name by a rename, which replaces any existing file of that name. The name must therefore be free or
belong to a regular file: root would replace `/dev/null` with a plain file, a replaced `/dev/stdout` or named pipe would
have no reader, and a link would be replaced instead of its target.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Callable, Mapping, Sequence
from typing import TextIO

from keytail.acting_user import as_caller
from keytail.cli.outside import refuse_below_log_dir
from keytail.errors import Refused, UsageProblem
from keytail.log.fs import LOCAL, FileSystem

_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a directory",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
}
_REMEDY = "Give a new name, or the name of a regular file; for rows on standard output use --output json"


def refuse_one_file_for_two(files: Mapping[str, str | None]) -> None:
    """Raise UsageProblem if two flags of `files` name the same file: only the file written last would remain."""
    flags: dict[str, str] = {}
    for flag, path in files.items():
        if path is not None and (other := flags.setdefault(os.path.realpath(path), flag)) != flag:
            raise UsageProblem(
                f"{other} and {flag} name the same file",
                path=path,
                remedy="Give each flag a separate file",
                slug="same-output-file",
            )


@as_caller()
def refuse_file(fs: FileSystem, path: str, log_dirs: Sequence[str], flag: str) -> None:
    """Raise UsageProblem if the path is in a log dir (one of `log_dirs` or another), if it exists and is not a regular
    file, or if no file can be created.
    """
    directory = os.path.realpath(os.path.dirname(os.path.abspath(path)))
    for log_dir in map(os.path.realpath, log_dirs):
        if os.path.commonpath([directory, log_dir]) == log_dir:
            raise UsageProblem(
                f"{flag} is inside a log dir",
                path=path,
                remedy="Give a file elsewhere: log dirs are for files of brokers only",
                slug="overlaps-log-dir",
            )
    refuse_below_log_dir(fs, directory, flag)
    if kind := _not_a_regular_file(path):
        raise UsageProblem(f"{flag} would replace {kind}", path=path, remedy=_REMEDY, slug="output-file-not-regular")
    if not os.path.basename(path) or not os.path.isdir(directory) or not os.access(directory, os.W_OK | os.X_OK):
        raise UsageProblem(
            f"{flag} cannot be written",
            path=path,
            remedy="Give a file in an existing directory in which you may create files",
            slug="output-file-not-writable",
        )


def _not_a_regular_file(path: str, directory: int | None = None) -> str:
    """Return a description of the file of this name; "" for a regular file, and if no such file exists."""
    try:
        mode = os.stat(path, dir_fd=directory, follow_symlinks=False).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return ""
    return "" if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "something other than a regular file")


@as_caller()
def write_whole(path: str, write: Callable[[TextIO], object]) -> None:
    """Pass a temporary file beside `path` to `write`, sync it, and rename it to `path`. On failure no temporary file is
    left.

    Raises Refused if something other than a regular file has the name by then, and UsageProblem if the file's directory
    is in a log dir by then.
    """
    above, name = os.path.split(os.path.abspath(path))
    directory = os.open(above, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        refuse_below_log_dir(LOCAL, os.path.realpath(f"/proc/self/fd/{directory}"), "the file")
        _write_in(directory, name, path, write)
    finally:
        os.close(directory)


def _write_in(directory: int, name: str, path: str, write: Callable[[TextIO], object]) -> None:
    temporary = f"{name}.{secrets.token_hex(4)}.tmp"
    try:
        with open(
            temporary, "x", encoding="utf-8", opener=lambda file, flags: os.open(file, flags, 0o666, dir_fd=directory)
        ) as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        if kind := _not_a_regular_file(name, directory):
            raise Refused(
                f"the file would replace {kind} of the same name",
                path=path,
                remedy=_REMEDY,
                slug="output-file-not-regular",
            )
        os.replace(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=directory)
        raise
