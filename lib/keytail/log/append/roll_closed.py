"""Rolls the active segment of a log that was closed cleanly, without opening the log for appends.

After `roll`, the files are those of a broker that has rolled, by `segment.ms` for instance, and then stopped: an empty
segment at the log end offset with empty indexes. The closed segment, the producer snapshot at the log end, which the
broker wrote when it stopped, and the leader epochs are unchanged. compact/ROLL_ACTIVE.md describes each state on disk.
"""

from __future__ import annotations

import contextlib
import os

from keytail.format import names
from keytail.log.append.closed_log import unclosed_indexes
from keytail.log.empty_segment import make_empty_segment
from keytail.log.fs import FileSystem
from keytail.log.lock import refuse_lost
from keytail.log.partition import PartitionFacts, SegmentFacts, refuse_changed
from keytail.log.producers import newest_snapshot


def why_not_closed(fs: FileSystem, facts: PartitionFacts) -> str:
    """Return how the files at the end of the log differ from those that a stopping broker leaves, and the remedy; "" if
    they do not differ."""
    end = facts.log_end_offset
    found = newest_snapshot(fs, facts.path, facts.snapshots, end)
    if found is None or found[0] != end or max(facts.snapshots) != end:
        name = names.segment_file(end, names.SNAPSHOT)
        what = f"the producer snapshot at the log end offset, {name}, is missing or damaged, or a newer snapshot exists"
        return f"{what}: run `keytail rebuild-index --execute`, or start the broker and stop it cleanly"
    why = unclosed_indexes(fs, facts.path, facts.segments[-1])
    return why and (
        f"the indexes of the segment are not as a broker leaves them: {why}; run `keytail rebuild-index --execute`"
    )


def roll(fs: FileSystem, partition_path: str, active: SegmentFacts, base_offset: int) -> SegmentFacts:
    """Make the active segment durable, and create an empty segment at `base_offset`, the log end offset; return the
    facts of the new segment.

    Call this only if `why_not_closed` returned "". Raises Refused if the `.log` has changed since it was surveyed, or
    if the lock of the log dir is lost. After an OSError, the new files are removed as far as possible.
    """
    log_path = _path(partition_path, active.base_offset, names.LOG)
    refuse_lost(fs, partition_path)
    refuse_changed(fs, log_path, active.log_bytes, active.log_mtime_ns)
    # The active segment must be durable before a new one exists: a broker that truncates a segment deletes later
    # segments.
    for suffix in names.SEGMENT_SUFFIXES:
        path = _path(partition_path, active.base_offset, suffix)
        if fs.exists(path):
            _fsync(fs, path)
    _fsync(fs, _path(partition_path, base_offset, names.SNAPSHOT))
    try:
        make_empty_segment(fs, partition_path, base_offset, fs.stat(log_path))
        created = fs.stat(_path(partition_path, base_offset, names.LOG))
    except OSError:
        _remove_empty_segment(fs, partition_path, base_offset)
        raise
    return SegmentFacts(base_offset, 0, created.mtime_ns, 0, 0, None, created.mtime_ns // 1_000_000, -1)


def _fsync(fs: FileSystem, path: str) -> None:
    fd = fs.open_write(path)
    try:
        fs.fsync(fd)
    finally:
        fs.close(fd)


def _remove_empty_segment(fs: FileSystem, partition_path: str, base_offset: int) -> None:
    """Remove the files of an empty segment, the `.log` first: a broker that starts removes index files without a
    log."""
    for suffix in (names.LOG, names.INDEX, names.TIME_INDEX):
        path = _path(partition_path, base_offset, suffix)
        with contextlib.suppress(OSError):
            if fs.exists(path):
                fs.unlink(path)


def _path(partition_path: str, base_offset: int, suffix: str) -> str:
    return os.path.join(partition_path, names.segment_file(base_offset, suffix))
