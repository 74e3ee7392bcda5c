"""Replaces a small file, such as a checkpoint, durably and atomically."""

from __future__ import annotations

import os

from keytail.format import names
from keytail.log.fs import FileStat, FileSystem
from keytail.log.lock import refuse_lost


def replace_file(fs: FileSystem, path: str, data: bytes, like: FileStat) -> None:
    """Write a file under a temporary name, then rename the file to `path`, replacing an existing file; each step is
    durable before the next. Raises LockLost, with nothing changed, if this process no longer holds the lock of the log
    dir."""
    directory = os.path.dirname(path)
    refuse_lost(fs, directory)
    temporary = path + names.TEMPORARY
    if fs.exists(temporary):  # a run that was killed here has left the file
        fs.unlink(temporary)
    fs.put_file(path, data, like, temporary)
    fs.fsync_dir(directory)
