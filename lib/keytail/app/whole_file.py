"""Files that a flag names and a run writes at its end: beside no broker's files, and whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Sequence
from typing import TextIO

from keytail.app.outside import refuse_below_log_dir
from keytail.errors import UsageProblem
from keytail.log.fs import FileSystem


def refuse_file(fs: FileSystem, path: str, log_dirs: Sequence[str], flag: str) -> None:
    """UsageProblem for a path in a log dir, one of `log_dirs` or another, or where no file can be made."""
    directory = os.path.realpath(os.path.dirname(os.path.abspath(path)))
    for log_dir in map(os.path.realpath, log_dirs):
        if os.path.commonpath([directory, log_dir]) == log_dir:
            raise UsageProblem(
                f"{flag} lies in a log dir, where a broker would stumble over it",
                path=path,
                remedy="Give a file somewhere else",
            )
    refuse_below_log_dir(fs, directory, flag)
    if os.path.isdir(path) or not os.path.isdir(directory) or not os.access(directory, os.W_OK | os.X_OK):
        raise UsageProblem(f"{flag} cannot be written", path=path, remedy="Give a file in a directory that exists")


def write_whole(path: str, write: Callable[[TextIO], object]) -> None:
    """What `write` gives a file: a temporary one beside it, durable, then its name. Where that fails none is left."""
    temporary = f"{path}.{secrets.token_hex(4)}.tmp"
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
