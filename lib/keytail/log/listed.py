"""Reads segments as listed, while a running broker may clean or remove segments and append to the last one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from keytail.errors import CORRUPT_REMEDY, CorruptLog, KeytailError, Refused
from keytail.format import names
from keytail.log.fs import FileSystem
from keytail.log.log_end import log_end
from keytail.log.partition import SegmentFacts

T = TypeVar("T")

_ATTEMPTS = 3


def retry_beside_broker(look: Callable[[], T], *, clean_shutdown: bool) -> T:
    """Return the result of `look`, which lists segments and then reads them. If a broker may be running, retry on
    KeytailError or OSError, since the broker may roll, clean or delete segments before they are read. Raises the error
    of the last attempt."""
    for left in reversed(range(1 if clean_shutdown else _ATTEMPTS)):
        try:
            return look()
        except (KeytailError, OSError):
            if not left:
                raise
    raise AssertionError


@contextmanager
def unchanged(
    fs: FileSystem, partition_path: str, segments: Sequence[SegmentFacts], *, is_last: bool = True
) -> Iterator[None]:
    """Raise Refused before or after the block if a segment is not the file that was listed: a running broker may have
    cleaned or removed the segment. The active segment, which is the last segment if `is_last`, may have grown."""
    _refuse_changed(fs, partition_path, segments, is_last)
    try:
        yield
    except (CorruptLog, FileNotFoundError):
        _refuse_changed(fs, partition_path, segments, is_last)
        raise
    _refuse_changed(fs, partition_path, segments, is_last)


def _refuse_changed(fs: FileSystem, partition_path: str, segments: Sequence[SegmentFacts], is_last: bool) -> None:
    for number, segment in enumerate(segments):
        path = os.path.join(partition_path, names.segment_file(segment.base_offset, names.LOG))
        try:
            seen = fs.stat(path)
        except FileNotFoundError:
            seen = None
        if is_last and number + 1 == len(segments):
            same = seen is not None and seen.size_bytes >= segment.log_bytes
        else:
            same = seen is not None and (seen.size_bytes, seen.mtime_ns) == (segment.log_bytes, segment.log_mtime_ns)
        if not same:
            raise Refused(
                f"on host {os.uname().nodename}, the segment is not the file that was listed",
                path=path,
                remedy="A running broker may have cleaned or removed the segment, or this host may have other files in "
                "this directory. Run again, or use a copy of the log dir",
                slug="segment-changed",
            )


def whole_bytes(fs: FileSystem, path: str, base_offset: int, end_offset: int) -> int:
    """Return the byte position at which the complete batches of the active segment end: a broker that is writing, or
    that crashed, may leave an incomplete batch after them.

    Raises CorruptLog if the complete batches end before `end_offset`, which existed when the segment was listed.
    """
    end = log_end(fs, path, base_offset)
    if end.next_offset < end_offset:
        raise CorruptLog(
            f"complete batches end before offset {end_offset}, which existed when the segment was listed",
            path=path,
            byte_position=end.end_position,
            offset=end.next_offset,
            remedy=CORRUPT_REMEDY,
            slug="segment-ends-early",
        )
    return end.end_position
