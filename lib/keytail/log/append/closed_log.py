"""Checks that a log was closed cleanly and can be appended to, as required by APPEND.md, "Before a log is opened"."""

from __future__ import annotations

import os
from typing import NoReturn

from keytail.errors import Refused
from keytail.format import names
from keytail.log.fs import FileSystem
from keytail.log.one_partition import survey
from keytail.log.partition import PartitionFacts
from keytail.log.producers import newest_snapshot


def survey_closed(fs: FileSystem, path: str, log_start_offset: int) -> PartitionFacts:
    """Return the facts of a closed log in the directory `path`, or of an empty directory. Raises Refused otherwise."""
    _refuse_claimed(fs, path)
    facts = survey(path, log_start_offset=log_start_offset, fs=fs)
    if facts.segments:
        _refuse_unless_closed(fs, facts)
    elif facts.snapshots or facts.leftovers:
        _refuse(path, "it has no segments, but files of a former segment", "Use an empty directory")
    return facts


def _refuse_claimed(fs: FileSystem, path: str) -> None:
    if fs.exists(os.path.join(os.path.dirname(os.path.abspath(path)), names.CLEAN_SHUTDOWN)):
        raise Refused(
            f"cannot append to this log: {names.CLEAN_SHUTDOWN} marks a clean shutdown: after a crash of this process, "
            "a broker that starts would trust incomplete writes",
            path=path,
            remedy="Remove that file first, as a broker does when it starts, and sync the log dir",
            slug="clean-shutdown-file-exists",
        )


def _refuse_unless_closed(fs: FileSystem, facts: PartitionFacts) -> None:
    """Refuse a log that lacks an index file, does not end with a whole batch or has no snapshot at its end."""
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
    is_without = end <= facts.log_start_offset and end not in facts.snapshots  # no batch is left for it to describe
    if not is_without and (max(facts.snapshots, default=-1) != end or found is None or found[0] != end):
        what = f"there is no valid producer snapshot at the log end offset {end}, or there is one above it"
        _refuse(facts.path, what, remedy)
    if facts.log_start_offset > end:
        _refuse(facts.path, f"the log end offset {end} is below the log start offset {facts.log_start_offset}", remedy)


def _refuse(path: str, what: str, remedy: str) -> NoReturn:
    raise Refused("cannot append to this log: " + what, path=path, remedy=remedy, slug="log-not-closed")
