"""Refuses a partition in which files of a segment exist without its `.log`: a compacted log would not show the loss."""

from __future__ import annotations

import os
from bisect import bisect_right

from keytail.errors import Refused
from keytail.format import names
from keytail.log.fs import FileSystem
from keytail.log.log_end import log_end
from keytail.log.partition import PartitionFacts

# Maximum time between the snapshot and the closing of the segment in one roll of a broker; either may be first.
_ROLL_NS = 1_000_000_000


def refuse_missing_segments(fs: FileSystem, facts: PartitionFacts) -> None:
    """Raise Refused if files of a segment at or above the log start offset exist without its `.log`, unless a stop or
    an interrupted roll of a broker explains this."""
    for offset, name in facts.without_log:
        if not _is_missing(fs, facts, offset, name):
            continue
        lookalike = ""
        if name.endswith(names.SNAPSHOT):
            lookalike = (
                " If `keytail audit` finds that another replica has no records there either, nothing is missing: the "
                "broker was stopped at that offset as a follower, and the leader then removed the next offsets by "
                "compaction."
            )
        raise Refused(
            f"the segment with base offset {offset} is missing: {name} exists, but its .log does not",
            path=facts.path,
            remedy="Restore the .log from a backup. Or stop the broker, move the partition's directory out of the log "
            "dir, and start the broker, which fetches the partition from another replica. `keytail verify` describes "
            "the gap."
            f"{lookalike} To give up the missing records, remove all files that begin with {name.partition('.')[0]}",
            slug="segment-missing",
        )


def _is_missing(fs: FileSystem, facts: PartitionFacts, offset: int, name: str) -> bool:
    bases = [segment.base_offset for segment in facts.segments]
    is_snapshot = name.endswith(names.SNAPSHOT)
    if offset >= facts.log_end_offset and offset > bases[-1]:
        return not is_snapshot and not _is_interrupted_roll(fs, facts, offset)
    if not max(bases[0], facts.log_start_offset) <= offset < bases[-1]:
        return False
    following = bisect_right(bases, offset)
    before = bases[following - 1]
    gap_start = log_end(fs, os.path.join(facts.path, names.segment_file(before, names.LOG)), before).next_offset
    if is_snapshot and offset == gap_start and facts.cleaner_checkpoint is not None:
        return not _is_of_a_stop(fs, facts.path, offset, before, bases[following])
    return gap_start <= offset


def _is_interrupted_roll(fs: FileSystem, facts: PartitionFacts, offset: int) -> bool:
    """Return whether the index files at `offset` belong to a segment that was about to be created at the log end: they
    are empty, and no checkpoint has a higher offset. A starting broker removes such index files."""
    if offset != facts.log_end_offset or max(facts.recovery_point, facts.high_watermark or 0) > offset:
        return False
    paths = [os.path.join(facts.path, names.segment_file(offset, suffix)) for suffix in names.INDEX_SUFFIXES]
    return not any(fs.size(path) for path in paths if fs.exists(path))


def _is_of_a_stop(fs: FileSystem, path: str, offset: int, before: int, following: int) -> bool:
    """Return whether the files show that the snapshot at `offset`, where a gap of a compacted partition begins, was
    written when the broker stopped. `before` and `following` are the base offsets of the segments around the gap.

    A broker that stops writes a snapshot at the log end. If the leader removes the next offsets by compaction before
    the broker starts again, the log of the broker, as a follower, gets a gap from that offset on, and the broker may
    roll a segment there. In that case the segment before the gap was closed later than the snapshot was written, and no
    producer in the snapshot at `following` has appended from `offset` on.
    """
    from keytail.format.producers import parse_snapshot  # noqa: PLC0415 (brings in the kernels, which few plans need)

    try:
        written_ns = fs.stat(os.path.join(path, names.segment_file(offset, names.SNAPSHOT))).mtime_ns
        closed_ns = fs.stat(os.path.join(path, names.segment_file(before, names.TIME_INDEX))).mtime_ns
        entries = parse_snapshot(fs.read_bytes(os.path.join(path, names.segment_file(following, names.SNAPSHOT))))
    except (OSError, ValueError):
        return False
    return closed_ns - written_ns > _ROLL_NS and all(entry.last_offset < offset for entry in entries)
