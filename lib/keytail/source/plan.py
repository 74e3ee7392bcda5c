"""Plans a read of the `kafka-log` data sources: the range of offsets in each partition, and the slices of the log.

The planning runs in the process in which Spark plans a query. Listings, checkpoints and indexes are read, and the
batches near a time or a transaction that has to be found.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

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
from keytail.source.options import EARLIEST, LATEST, Bound, SourceOptions, TopicPartition

T = TypeVar("T")

# The cost of opening a file, as the number of bytes that can be read in the same time: small partitions share a task.
_OPENING_BYTES = 4 << 20
_IN_RANGE = "Give offsets in this range, or set failOnDataLoss to false to read the records that exist"


@dataclass(frozen=True)
class Piece:
    """A slice with its topic and partition."""

    topic: str
    partition: int
    slice: LogSlice


def plan_read(fs: FileSystem, options: SourceOptions) -> list[tuple[Piece, ...]]:
    """Return the slices of each task, sorted by topic, partition and offset. Raises UsageProblem for options that do
    not fit the log dirs, and Refused if a partition cannot be read."""

    def pieces(slice_bytes: int) -> list[Piece]:
        chosen, surveyed = chosen_partitions(fs, options)
        found = {(entry.topic, entry.partition) for _, entry in chosen}
        check_named(options, found, surveyed)
        check_bounds(options, found)
        divided = replace(options, slice_bytes=slice_bytes)
        return [
            Piece(entry.topic, entry.partition, piece)
            for log_dir, entry in chosen
            for piece in with_facts(fs, log_dir, entry, partial(_plan, fs, divided))
        ]

    return in_tasks(pieces, options)


def chosen_partitions(
    fs: FileSystem, options: SourceOptions
) -> tuple[list[tuple[LogDirFacts, PartitionEntry]], list[LogDirFacts]]:
    """Return the partitions that the options choose, sorted by topic and partition, each with its log dir, and all log
    dirs."""
    surveyed = survey_log_dirs(fs, options.log_dirs)
    chosen = sorted(
        ((log_dir, entry) for log_dir in surveyed for entry in log_dir.partitions
         if options.takes(entry.topic, entry.partition)),
        key=lambda item: (item[1].topic, item[1].partition),
    )  # fmt: skip
    return chosen, list(surveyed)


def in_tasks(pieces_of: Callable[[int], list[Piece]], options: SourceOptions) -> list[tuple[Piece, ...]]:
    """Return the slices of each task, for at least `min_partitions` tasks if the log can be divided so often.
    `pieces_of` returns all slices for a given number of bytes per slice."""
    tasks = _bundled(pieces_of(options.slice_bytes), options.slice_bytes)
    total_bytes = sum(piece.slice.size_bytes for pieces in tasks for piece in pieces)
    if len(tasks) >= options.min_partitions or not total_bytes:
        return tasks
    # Slices of half the size of a share can be joined to shares of about equal size.
    smaller = max(1, min(options.slice_bytes, total_bytes // (2 * options.min_partitions)))
    return in_shares(pieces_of(smaller), options.min_partitions)


def _bundled(pieces: Sequence[Piece], slice_bytes: int) -> list[tuple[Piece, ...]]:
    opening_bytes = min(_OPENING_BYTES, slice_bytes // 8)
    shares = in_bundles(pieces, lambda piece: piece.slice.size_bytes + opening_bytes, slice_bytes)
    return [tuple(share) for share in shares]


def in_shares(pieces: Sequence[Piece], count: int) -> list[tuple[Piece, ...]]:
    """Divide `pieces`, in order, into `count` tasks with about equal numbers of bytes, or into one task for each piece
    if there are fewer pieces."""
    shares: list[tuple[Piece, ...]] = []
    left_bytes, at = sum(piece.slice.size_bytes for piece in pieces), 0
    for others in reversed(range(min(count, len(pieces)))):
        share_bytes, begin = 0, at
        while at < len(pieces) - others and (at == begin or not others or share_bytes * (others + 1) < left_bytes):
            share_bytes += pieces[at].slice.size_bytes
            at += 1
        shares.append(tuple(pieces[begin:at]))
        left_bytes -= share_bytes
    return shares


def check_named(options: SourceOptions, found: AbstractSet[TopicPartition], surveyed: Sequence[LogDirFacts]) -> None:
    """Raise UsageProblem if requested topics or partitions are not among those that were found."""
    topics = {topic for topic, _ in found}
    lacking = [topic for topic in options.topics if topic not in topics]
    lacking += [f"{topic}-{number}" for topic, number in sorted(options.partitions - found)]
    if lacking or not found:
        there = sorted({entry.topic for facts in surveyed for entry in facts.partitions})
        what = f"{', '.join(lacking)} not found" if lacking else "no topic matches topicPattern"
        shown = ", ".join(there[:20]) + (" ..." if len(there) > 20 else "")
        raise UsageProblem(
            f"{what} in the log dirs {', '.join(options.log_dirs)}",
            remedy=f"Check the names; the log dirs contain these topics: {shown}",
            slug="unknown-topic-or-partition",
        )


def check_bounds(options: SourceOptions, found: AbstractSet[TopicPartition]) -> None:
    """Raise UsageProblem if offsets by partition are not given for exactly the partitions that were found."""
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


def with_facts(
    fs: FileSystem, log_dir: LogDirFacts, entry: PartitionEntry, plan: Callable[[PartitionFacts], T]
) -> T:
    """Return the result of `plan` for a partition; list the files again if a running broker changes them
    meanwhile. Raises Refused for a partition with problems."""

    def look() -> T:
        facts = survey_partition(fs, log_dir, entry)
        if facts.problems:
            raise Refused(
                joined(facts.problems),
                path=facts.path,
                remedy="If a broker is running, try again: it may be replacing segments or moving the partition. If "
                "the error remains, run `keytail verify`, which lists what is wrong with the partition",
                slug="unexpected-partition-state",
            )
        return plan(facts)

    try:
        return retry_beside_broker(look, clean_shutdown=log_dir.clean_shutdown)
    except OSError as error:
        raise of_system(error) from error


def limit_of(fs: FileSystem, options: SourceOptions, facts: PartitionFacts) -> Readable:
    """Return the end of the offsets that can be read with the isolation level of the options, and notes about it."""
    now_ms = time.time_ns() // 1_000_000
    return readable(fs, facts, committed=options.committed, log_end=options.log_end, now_ms=now_ms)


def slices_between(
    fs: FileSystem, options: SourceOptions, facts: PartitionFacts, start: int, end: int
) -> list[LogSlice]:
    """Return the slices with the offsets from `start` to below `end`."""
    aborted = None
    if options.committed:
        aborted = read_aborted(fs, facts.path, facts.segments, facts.log_start_offset)
    return slices_of(fs, facts, start, end, options.slice_bytes, aborted)


def _plan(fs: FileSystem, options: SourceOptions, facts: PartitionFacts) -> list[LogSlice]:
    limit = limit_of(fs, options, facts)
    start, end = start_of(fs, options, facts, limit), _end(fs, options, facts, limit)
    if start > end and options.refuses_start_above_end and options.fail_on_data_loss:
        raise UsageProblem(
            f"the range would begin at offset {start} and end at offset {end}: {_available(facts, limit)}",
            path=facts.path,
            remedy=_IN_RANGE,
            slug="start-above-end",
        )
    return slices_between(fs, options, facts, start, end)


def _asked(bound: Bound, facts: PartitionFacts) -> int:
    return bound.offset if bound.offset is not None else bound.of[facts.topic, facts.partition]


def start_of(fs: FileSystem, options: SourceOptions, facts: PartitionFacts, limit: Readable) -> int:
    """Return the first offset to read, by the options. Raises UsageProblem if that offset or time is not in the log,
    unless the options permit this."""
    asked = _asked(options.start, facts)
    if options.start.timestamps:
        found = _offset_of(fs, facts, asked, limit)
        if found is None and options.start_without_match == "error":
            raise UsageProblem(
                f"{facts.topic}-{facts.partition} has no record at or after the starting time {asked}",
                path=facts.path,
                remedy="In a batch query, set startingOffsetsByTimestampStrategy to latest to read no records of such "
                "a partition. For a stream, give an earlier time, or startingOffsets as JSON",
                slug="no-record-at-time",
            )
        return limit.end_offset if found is None else found
    if asked == EARLIEST:
        return facts.log_start_offset
    if asked < facts.log_start_offset and options.fail_on_data_loss:
        raise UsageProblem(
            f"the starting offset {asked} is out of range: {_available(facts, limit)}; earlier records were removed",
            path=facts.path,
            remedy=_IN_RANGE,
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
        raise UsageProblem(
            f"the ending offset {asked} is out of range: {_available(facts, limit)}",
            path=facts.path,
            remedy=_IN_RANGE,
            slug="offset-after-readable-end",
        )
    return min(asked, limit.end_offset)


def _available(facts: PartitionFacts, limit: Readable) -> str:
    notes = "".join(f" ({note})" for note in limit.notes)
    offsets = f"offsets {facts.log_start_offset} to {limit.end_offset} (exclusive)"
    return f"{facts.topic}-{facts.partition} has {offsets}{notes}"


def _offset_of(fs: FileSystem, facts: PartitionFacts, timestamp_ms: int, limit: Readable) -> int | None:
    """Return the offset of the first readable record at or after a time, or None if there is no such record."""
    found = lookup_time(fs, facts, timestamp_ms).record
    return None if found is None or found.offset >= limit.end_offset else found.offset
