"""Saves the state of one pass for the next pass: values with large arrays, in scratch files in the partition's
directory.

A saved state belongs to one run: only the run's later passes read the file, which need not survive a power failure, and
the next run removes it. A file contains only data (values.py), since the owner of the directory can replace the file.
Arrays are written without a copy.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from typing import Any

import numpy as np

from keytail.compact.table_memory import zeros
from keytail.compact.task import CleaningTask
from keytail.errors import KeytailError
from keytail.format import names
from keytail.log.fs import FileSystem
from keytail.log.replacement.replace import CleanFile
from keytail.values import NotAValue, from_parts, sizes_of, to_parts

_SIZE_BYTES = 8


def save_state(fs: FileSystem, task: CleaningTask, suffix: str, value: Any) -> CleanFile:
    """Write `value` to a scratch file of this attempt, and return the file; on failure, no file remains."""
    base = task.segments[task.first_segment].base_offset
    name = names.scratch_file(base, task.run_id, task.attempt, suffix)
    path = os.path.join(task.scratch_path, name)
    parts = to_parts(value)
    digest, size_bytes = hashlib.blake2b(), 0
    fd = fs.create(path, task.like(fs, task.path(base, names.LOG)))
    try:
        try:
            for part in (memoryview(sizes_of(parts)), *parts):
                if part.nbytes:
                    fs.write(fd, part)
                    digest.update(part)
                    size_bytes += part.nbytes
        finally:
            fs.close(fd)
    except BaseException:
        with contextlib.suppress(OSError):  # only the first error is reported
            fs.unlink(path)
        raise
    return CleanFile(suffix, name, size_bytes, digest.hexdigest())


def load_state(fs: FileSystem, task: CleaningTask, file: CleanFile) -> Any:
    """Return the value that `save_state` wrote. The value is decoded only if the digest of the file equals the one in
    `file`.
    """
    path = os.path.join(task.scratch_path, file.name)
    digest, parts = hashlib.blake2b(), []
    fd = fs.open_read(path)
    try:
        position = 0

        def read(size_bytes: int) -> np.ndarray:
            nonlocal position
            if size_bytes > file.size_bytes - position:
                raise _differs(path)
            part = zeros(size_bytes, np.dtype(np.uint8))
            if fs.read_into(fd, part, position) < size_bytes:
                raise _differs(path)
            position += size_bytes
            digest.update(part)
            return part

        [count] = read(_SIZE_BYTES).view("<u8")
        sizes = read(int(count) * _SIZE_BYTES).view("<u8")
        parts = [read(int(size)) for size in sizes]
    finally:
        fs.close(fd)
    if position != file.size_bytes or digest.hexdigest() != file.digest_hex:
        raise _differs(path)
    try:
        return from_parts(parts)
    except NotAValue as problem:
        raise _differs(path) from problem


def _differs(path: str) -> KeytailError:
    return KeytailError(
        "a scratch file with the state of the previous pass has changed since it was written",
        path=path,
        remedy="Run again: segments that were replaced so far remain replaced, and a new run plans the rest",
        slug="scratch-file-changed",
    )
