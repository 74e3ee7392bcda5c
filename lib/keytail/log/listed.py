"""Whether the segments that are read are the files that were listed: a broker that runs cleans and removes them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from keytail.errors import CorruptLog, Refused
from keytail.format import names
from keytail.log.fs import FileSystem
from keytail.log.partition import SegmentFacts


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
