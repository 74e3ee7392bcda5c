"""Creates an empty segment as a broker does when it rolls."""

from __future__ import annotations

import os

from keytail.errors import WRITTEN_TO, KeytailError
from keytail.format import names
from keytail.log.fs import FileStat, FileSystem


def make_empty_segment(fs: FileSystem, partition_path: str, base_offset: int, like: FileStat) -> None:
    """Create an empty segment, durably, as a broker does when it rolls; replace existing files of that base offset. The
    `.log` is created last, because a broker that starts removes index files without a log. Raises KeytailError if the
    segment exists and is not empty."""
    log_path = os.path.join(partition_path, names.segment_file(base_offset, names.LOG))
    if fs.exists(log_path) and fs.stat(log_path).size_bytes:
        raise KeytailError(
            "a segment that is not empty exists where an empty one is to be created",
            path=log_path,
            remedy=WRITTEN_TO,
            slug="segment-exists",
        )
    for suffixes in ((names.INDEX, names.TIME_INDEX), (names.LOG,)):
        for suffix in suffixes:
            path = os.path.join(partition_path, names.segment_file(base_offset, suffix))
            if fs.exists(path):  # left by a run that was stopped here
                fs.unlink(path)
            fs.write_file(path, b"", like)
        fs.fsync_dir(partition_path)
