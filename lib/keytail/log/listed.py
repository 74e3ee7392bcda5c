"""Reading segments as they were listed: a broker that runs cleans and removes them, and writes to the last."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from keytail.errors import CORRUPT_REMEDY, CorruptLog, Refused
from keytail.format import names
from keytail.log.fs import FileSystem
from keytail.log.partition import SegmentFacts, log_end


@contextmanager
def unchanged(
    fs: FileSystem, partition_path: str, segments: Sequence[SegmentFacts], *, is_last: bool = True
) -> Iterator[None]:
    """Refused where segments are not the files that were listed, before and after: a broker that runs may have cleaned
    or removed them. The active one, the last with `is_last`, may have grown."""
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
                f"a segment is not the file that was listed, on host {os.uname().nodename}",
                path=path,
                remedy="A broker that runs has cleaned or removed it, or this host has other files there. Run again, "
                "or take a copy",
            )


def whole_bytes(fs: FileSystem, path: str, base_offset: int, end_offset: int) -> int:
    """Where the whole batches of the active segment end: a broker that writes, or has crashed, leaves part of one.

    CorruptLog where they end before `end_offset`, which they are known to reach.
    """
    end = log_end(fs, path, base_offset)
    if end.next_offset < end_offset:
        raise CorruptLog(
            f"whole batches end before offset {end_offset}, which was there when the segment was listed",
            path=path,
            byte_position=end.end_position,
            offset=end.next_offset,
            remedy=CORRUPT_REMEDY,
        )
    return end.end_position
