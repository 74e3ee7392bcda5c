"""Recognises producer snapshots that were taken when a broker stopped, not when it rolled a segment."""

from __future__ import annotations

import os

from keytail.format import names
from keytail.format.producers import parse_snapshot
from keytail.log.fs import FileSystem

# A broker that rolls writes the snapshot and closes the segment at once, in either order.
_ROLL_NS = 1_000_000_000


def is_of_a_stop(fs: FileSystem, path: str, offset: int, before: int, following: int) -> bool:
    """Return whether the snapshot at `offset`, which is the base offset of no segment, was taken at a stop.

    `before` and `following` are the base offsets of the segments around it. A broker that stops takes a snapshot at the
    log end. If its leader is compacted until it starts, the follower copies a gap from there on, and may roll. The
    segment before was then closed later than the snapshot was written, and no producer in the snapshot at `following`
    has appended from `offset` on.
    """
    try:
        written_ns = fs.stat(os.path.join(path, names.segment_file(offset, names.SNAPSHOT))).mtime_ns
        closed_ns = fs.stat(os.path.join(path, names.segment_file(before, names.TIME_INDEX))).mtime_ns
        entries = parse_snapshot(fs.read_bytes(os.path.join(path, names.segment_file(following, names.SNAPSHOT))))
    except (OSError, ValueError):
        return False
    return closed_ns - written_ns > _ROLL_NS and all(entry.last_offset < offset for entry in entries)
