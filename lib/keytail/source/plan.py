"""Plans a read of the `kafka-log` data sources: the range of offsets in each partition, and the slices of the log.

Runs in the process in which Spark plans a query. Reads listings, checkpoints and indexes, and, to find a time or a
transaction, the batches around it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from keytail.errors import Refused, UsageProblem, joined, of_system
from keytail.log.fs import FileSystem
from keytail.log.listed import retry_beside_broker
from keytail.log.log_dirs import survey_log_dirs
from keytail.log.partition import LogDirFacts, PartitionEntry, PartitionFacts, survey_partition
from keytail.log.readable import Readable, readable
from keytail.log.records.slices import LogSlice, slices_of
from keytail.log.transactions import read_aborted
from keytail.lookup.steps import lookup_time
from keytail.run.batching import in_bundles
from keytail.source.options import EARLIEST, LATEST, Bound, SourceOptions

# The cost of opening a file, in bytes read, as in Spark: many small partitions share a task.
_OPENING_BYTES = 4 << 20


@dataclass(frozen=True)
class Piece:
    """A slice with its topic and partition."""

    topic: str
    partition: int
    slice: LogSlice


def plan_read(fs: FileSystem, options: SourceOptions) -> list[tuple[Piece, ...]]:
    """Return the slices of each task, sorted by topic, partition and offset. Raises UsageProblem for options that do
    not fit the log dirs, and Refused if a partition cannot be read."""
    surveyed = survey_log_dirs(fs, options.log_dirs)
    chosen = sorted(
        ((log_dir, entry) for log_dir in surveyed for entry in log_dir.partitions
         if options.takes(entry.topic, entry.partition)),
        key=lambda item: (item[1].topic, item[1].partition),
    )  # fmt: skip
    _check_named(options, [entry for _, entry in chosen], surveyed)
    pieces = [
        Piece(entry.topic, entry.partition, piece)
        for log_dir, entry in chosen
        for piece in _plan_live(fs, options, log_dir, entry)
    ]
    opening_bytes = min(_OPENING_BYTES, options.slice_bytes // 8)
    shares = in_bundles(pieces, lambda piece: piece.slice.size_bytes + opening_bytes, options.slice_bytes)
    return [tuple(share) for share in shares]


def _check_named(options: SourceOptions, chosen: Sequence[PartitionEntry], surveyed: Sequence[LogDirFacts]) -> None:
    """Raise UsageProblem if requested topics or partitions are missing, or if offsets by partition are not given for
    exactly the partitions that are read."""
    found = {(entry.topic, entry.partition) for entry in chosen}
    topics = {topic for topic, _ in found}
    lacking = [topic for topic in options.topics if topic not in topics]
    lacking += [f"{topic}-{number}" for topic, number in sorted(options.partitions - found)]
    if lacking or not found:
        there = sorted({entry.topic for facts in surveyed for entry in facts.partitions})
        what = f"{', '.join(lacking)} not found" if lacking else "no topic matches topicPattern"
        shown = ", ".join(there[:20]) + (" ..." if len(there) > 20 else "")
        raise UsageProblem(
            f"{what} in the log dirs {', '.join(options.log_dirs)}",
            remedy=f"Check the names; the topics there are: {shown}",
            slug="unknown-topic-or-partition",
        )
    for which, bound in (("starting", options.start), ("ending", options.end)):
        if bound.of and bound.of.keys() != found:
            different = sorted(bound.of.keys() ^ found)
            topic, number = different[0]
            how = "contains" if different[0] in bound.of else "does not contain"
            raise UsageProblem(
                f"the option of {which} offsets {how} {topic}-{number}, but must contain exactly the partitions that "
                "are read",
                remedy=f"Give an offset for each of these partitions and no others: {EARLIEST} for the earliest, "
                f"{LATEST} for the latest",
                slug="offsets-partition-mismatch",
            )


def _plan_live(
    fs: FileSystem, options: SourceOptions, log_dir: LogDirFacts, entry: PartitionEntry
) -> list[LogSlice]:
    def look() -> list[LogSlice]:
        return _plan(fs, options, survey_partition(fs, log_dir, entry))

    try:
        return retry_beside_broker(look, clean_shutdown=log_dir.clean_shutdown)
    except OSError as error:
        raise of_system(error) from error


def _plan(fs: FileSystem, options: SourceOptions, facts: PartitionFacts) -> list[LogSlice]:
    if facts.problems:
        raise Refused(
            joined(facts.problems),
            path=facts.path,
            remedy="Run `keytail verify`, which lists what is wrong with the partition",
            slug="unexpected-partition-state",
        )
    now_ms = time.time_ns() // 1_000_000
    limit = readable(fs, facts, committed=options.committed, log_end=options.log_end, now_ms=now_ms)
    start = _start(fs, options, facts, limit)
    end = _end(fs, options, facts, limit)
    aborted = None
    if options.committed:
        aborted = read_aborted(fs, facts.path, facts.segments, facts.log_start_offset)
    return slices_of(fs, facts, start, end, options.slice_bytes, aborted)


def _asked(bound: Bound, facts: PartitionFacts) -> int:
    return bound.offset if bound.offset is not None else bound.of[facts.topic, facts.partition]


def _start(fs: FileSystem, options: SourceOptions, facts: PartitionFacts, limit: Readable) -> int:
    asked = _asked(options.start, facts)
    if options.start.timestamps:
        found = _offset_of(fs, facts, asked, limit)
        if found is None and options.start_without_match == "error":
            raise UsageProblem(
                f"{facts.topic}-{facts.partition} has no record at or after the starting time {asked}",
                path=facts.path,
                remedy="To read no records of such a partition, set startingOffsetsByTimestampStrategy to latest",
                slug="no-record-at-time",
            )
        return limit.end_offset if found is None else found
    if asked == EARLIEST:
        return facts.log_start_offset
    if asked < facts.log_start_offset and options.fail_on_data_loss:
        raise UsageProblem(
            f"{facts.topic}-{facts.partition} starts at offset {facts.log_start_offset}, after the starting offset "
            f"{asked}: the records between them have been removed",
            path=facts.path,
            remedy="Start at that offset, or set failOnDataLoss to false to read the remaining records",
            slug="offset-before-log-start",
        )
    return max(asked, facts.log_start_offset)


def _end(fs: FileSystem, options: SourceOptions, facts: PartitionFacts, limit: Readable) -> int:
    asked = _asked(options.end, facts)
    if options.end.timestamps:
        found = _offset_of(fs, facts, asked, limit)
        return limit.end_offset if found is None else found
    if asked == LATEST:
        return limit.end_offset
    if asked > limit.end_offset and options.fail_on_data_loss:
        why = "".join(f"; {note}" for note in limit.notes)
        raise UsageProblem(
            f"{facts.topic}-{facts.partition} can be read only up to offset {limit.end_offset}, before the ending "
            f"offset {asked}{why}",
            path=facts.path,
            remedy="End at that offset, or set failOnDataLoss to false to read the records that exist",
            slug="offset-after-readable-end",
        )
    return min(asked, limit.end_offset)


def _offset_of(fs: FileSystem, facts: PartitionFacts, timestamp_ms: int, limit: Readable) -> int | None:
    """Return the offset of the first readable record at or after a time, or None."""
    found = lookup_time(fs, facts, timestamp_ms).record
    return None if found is None or found.offset >= limit.end_offset else found.offset
