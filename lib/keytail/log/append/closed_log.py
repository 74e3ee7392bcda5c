"""Checks that a log was closed cleanly and can be appended to, as required by APPEND.md, "Before a log is opened"."""

from __future__ import annotations

import os
import struct
from typing import NoReturn

from keytail.errors import CorruptLog, Refused
from keytail.format import names
from keytail.format.index import OFFSET_ENTRY, TIME_ENTRY
from keytail.log.fs import FileSystem
from keytail.log.one_partition import survey
from keytail.log.partition import PartitionFacts, SegmentFacts, last_time_entry
from keytail.log.producers import newest_snapshot
from keytail.log.records.chunk import SegmentReader

_CHUNK_BYTES = 1 << 20


def survey_closed(fs: FileSystem, path: str, log_start_offset: int) -> PartitionFacts:
    """Return the facts of a closed log in the directory `path`, or of an empty directory. Raises Refused if the log was
    not closed cleanly, if the log dir has `.kafka_cleanshutdown`, or if there are files of a log but no segment."""
    _refuse_claimed(fs, path)
    facts = survey(path, log_start_offset=log_start_offset, fs=fs)
    if facts.segments:
        _refuse_unless_closed(fs, facts)
    elif facts.snapshots or facts.leftovers:
        _refuse(path, "the directory has no segments, but files of a former segment", "Use an empty directory")
    return facts


def _refuse_claimed(fs: FileSystem, path: str) -> None:
    if fs.exists(os.path.join(os.path.dirname(os.path.abspath(path)), names.CLEAN_SHUTDOWN)):
        raise Refused(
            f"cannot append to this log: {names.CLEAN_SHUTDOWN} marks a clean shutdown; after a crash of this process, "
            "a starting broker would trust incomplete writes",
            path=path,
            remedy="Remove that file first, as a broker does when it starts, and sync the log dir",
            slug="clean-shutdown-file-exists",
        )


def _refuse_unless_closed(fs: FileSystem, facts: PartitionFacts) -> None:
    """Raise Refused unless the log has all indexes, ends with a whole batch and has a snapshot at its end."""
    remedy = "Start a broker and stop it cleanly, or see what `keytail rebuild-index` reports"
    if facts.problems:
        _refuse(facts.path, facts.problems[0], remedy)
    if facts.leftovers:
        _refuse(facts.path, f"{facts.leftovers[0]} is left from an unfinished operation", remedy)
    if facts.tail_bytes:
        _refuse(facts.path, f"the {facts.tail_bytes} bytes after the last batch are not a batch", remedy)
    for segment in facts.segments:
        if segment.index_bytes is None or segment.time_index_bytes is None:
            _refuse(facts.path, f"an index of the segment with base offset {segment.base_offset} is missing", remedy)
    end = facts.log_end_offset
    found = newest_snapshot(fs, facts.path, facts.snapshots, end)
    # No snapshot is needed if all batches are below the log start offset.
    is_without = end <= facts.log_start_offset and end not in facts.snapshots
    if not is_without and (max(facts.snapshots, default=-1) != end or found is None or found[0] != end):
        what = f"there is no valid producer snapshot at the log end offset {end}, or there is a snapshot above it"
        _refuse(facts.path, what, remedy)
    if facts.log_start_offset > end:
        _refuse(facts.path, f"the log end offset {end} is below the log start offset {facts.log_start_offset}", remedy)


def unclosed_indexes(fs: FileSystem, partition_path: str, segment: SegmentFacts) -> str:
    """Return why the indexes of the last segment differ from what a broker leaves when it stops or rolls: trimmed
    indexes, with the entry that closes the time index. Return "" if they do not differ, or if the segment is empty.

    Only the log from the last entry of the offset index on is read, and its batches are checked.
    """
    if segment.log_bytes == 0:
        return ""
    index, time_index = (names.segment_file(segment.base_offset, suffix) for suffix in (names.INDEX, names.TIME_INDEX))
    index_path, time_index_path = (os.path.join(partition_path, name) for name in (index, time_index))
    if not (fs.exists(index_path) and fs.exists(time_index_path)):
        return "one index is missing"
    index_bytes, time_index_bytes = fs.size(index_path), fs.size(time_index_path)
    if index_bytes % OFFSET_ENTRY.itemsize or time_index_bytes % TIME_ENTRY.itemsize:
        return "one index ends within an entry"
    position = 0
    if index_bytes:
        entry = fs.read_at(index_path, index_bytes - OFFSET_ENTRY.itemsize, OFFSET_ENTRY.itemsize)
        if len(entry) < OFFSET_ENTRY.itemsize:
            return f"{index} became shorter while it was read"
        relative, position = struct.unpack(">ii", entry)
        if relative == 0 and index_bytes > OFFSET_ENTRY.itemsize:
            return f"{index} ends with zeros"
    if not 0 <= position < segment.log_bytes:
        return f"the last entry of {index} points beyond the end of the log"
    last = last_time_entry(fs, time_index_path, time_index_bytes)
    if last == (0, 0) and time_index_bytes > TIME_ENTRY.itemsize:
        return f"{time_index} ends with zeros"
    reader = SegmentReader(fs, _CHUNK_BYTES)
    log_path = os.path.join(partition_path, names.segment_file(segment.base_offset, names.LOG))
    chunks = reader.chunks_without_prefetch(log_path, segment.log_bytes, start=position)
    try:
        newest_ms = max((int(chunk.table["max_timestamp_ms"].max()) for chunk in chunks), default=-1)
    except CorruptLog as damage:
        return f"from the last entry of {index} on, {os.path.basename(log_path)} has invalid batches ({damage.what})"
    if newest_ms > (last[0] if last is not None else -1):
        return f"{time_index} has no entry for the largest timestamp"
    return ""


def _refuse(path: str, what: str, remedy: str) -> NoReturn:
    raise Refused("cannot append to this log: " + what, path=path, remedy=remedy, slug="log-not-closed")
