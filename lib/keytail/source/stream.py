"""Plans the micro-batches of a stream, called batches here: the offsets up to which each partition is read, and the
slices of one batch.

A stream reads only data that a running broker neither appends to nor truncates: closed segments, below the high
watermark and, with read_committed, below the last stable offset; and the active segment only after a clean shutdown.
Offsets are those of Spark's Kafka source: the offset of the next record to be read, by topic and partition. Lost
records are detected by the rules of Spark's source, and are errors unless failOnDataLoss is false.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import partial
from typing import Any

from keytail.errors import Refused
from keytail.log.fs import FileSystem
from keytail.log.partition import PartitionFacts
from keytail.log.records.slices import LogSlice
from keytail.source.options import EARLIEST, Bound, SourceOptions, TopicPartition
from keytail.source.plan import (
    Piece,
    check_bounds,
    check_named,
    chosen_partitions,
    in_tasks,
    limit_of,
    slices_between,
    start_of,
    with_facts,
)

_log = logging.getLogger(__name__)

Offsets = dict[TopicPartition, int]


def to_json(offsets: Mapping[TopicPartition, int]) -> dict[str, dict[str, int]]:
    """Return offsets as Spark's Kafka source writes them: `{"topic": {"0": 23}}`, sorted by topic and partition."""
    by_topic: dict[str, dict[str, int]] = {}
    for (topic, partition), offset in sorted(offsets.items()):
        by_topic.setdefault(topic, {})[str(partition)] = offset
    return by_topic


def from_json(value: Mapping[str, Any]) -> Offsets:
    """Return the offsets of a checkpoint. Raises Refused if `value` is not from a checkpoint of this source or of
    Spark's Kafka source."""
    try:
        return {(topic, int(number)): int(offset) for topic, of in value.items() for number, offset in of.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise Refused(
            f"the checkpoint of the stream has no offsets by topic and partition: {str(value)[:200]}",
            remedy="Give the stream the checkpoint location that it had, or a new one",
            slug="unknown-stream-offsets",
        ) from error


def initial_offsets(fs: FileSystem, options: SourceOptions) -> Offsets:
    """Return the offsets at which a new stream begins. Raises UsageProblem if these offsets are not in the log, or if
    topics or partitions are missing. A pattern need not match a topic, since topics may be created later."""
    chosen, surveyed = chosen_partitions(fs, options)
    found = {(entry.topic, entry.partition) for _, entry in chosen}
    if options.topic_pattern is None:
        check_named(options, found, surveyed)
    check_bounds(options, found)

    def start(facts: PartitionFacts) -> int:
        if options.start == Bound(False, EARLIEST):
            return facts.log_start_offset  # needs no high watermark, which a new partition may not have yet
        return start_of(fs, options, facts, limit_of(fs, options, facts))

    return {(entry.topic, entry.partition): with_facts(fs, log_dir, entry, start) for log_dir, entry in chosen}


def latest_offsets(
    fs: FileSystem, options: SourceOptions, start: Mapping[TopicPartition, int]
) -> tuple[Offsets, Offsets]:
    """Return the offsets at which a batch after `start` begins, and the offsets up to which it can be read. New
    partitions begin at their log start offset; partitions that no longer exist are in neither result. Unless
    failOnDataLoss is false, raises UsageProblem for missing topics or partitions that are not in `start` either, and
    Refused for partitions of `start` that are missing or end before their offset in `start`. Spark must not store the
    end of such a batch: the end would be used again when the partition is restored."""
    chosen, surveyed = chosen_partitions(fs, options)
    if options.topic_pattern is None and options.fail_on_data_loss:
        check_named(options, {(entry.topic, entry.partition) for _, entry in chosen} | start.keys(), surveyed)
    begins, ends = Offsets(), Offsets()
    for log_dir, entry in chosen:
        key = (entry.topic, entry.partition)
        begins[key], ends[key] = with_facts(fs, log_dir, entry, partial(_extent, fs, options, start.get(key)))
    if options.fail_on_data_loss:
        _report_gone(options, start.keys() - begins.keys())
    return begins, ends


def _extent(fs: FileSystem, options: SourceOptions, known: int | None, facts: PartitionFacts) -> tuple[int, int]:
    begin = facts.log_start_offset if known is None else known
    if begin > facts.log_end_offset:  # the log was truncated or created again
        if options.fail_on_data_loss:
            _report_early_end(options, facts, facts.log_end_offset, begin)
        return begin, facts.log_end_offset  # `plan_batch` logs a warning
    end = facts.log_end_offset if facts.clean_shutdown else facts.segments[-1].base_offset
    if end <= begin:
        return begin, begin
    return begin, max(begin, min(end, limit_of(fs, options, facts).end_offset))


def limited(begins: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int], most: int) -> Offsets:
    """Return the end offsets of a batch of about `most` offsets. As in Spark's Kafka source, each partition with new
    offsets has a share in proportion to their number, and at least one offset."""
    sizes = {key: end - begins[key] for key, end in ends.items()}
    total = sum(size for size in sizes.values() if size > 0)
    return {
        key: end if sizes[key] <= 0 else min(end, begins[key] + max(1, most * sizes[key] // total))
        for key, end in ends.items()
    }


def plan_batch(
    fs: FileSystem, options: SourceOptions, start: Mapping[TopicPartition, int], end: Mapping[TopicPartition, int]
) -> list[tuple[Piece, ...]]:
    """Return the slices of each task of the batch from `start` to `end`. Raises Refused for lost data, unless
    failOnDataLoss is false, and the errors of `plan_read`."""
    left_out = start.keys() - end.keys()
    if left_out:
        # If the first batch is planned again, its start has partitions that were created later. The next batch reads
        # these partitions from their beginning.
        chosen, _ = chosen_partitions(fs, options)
        _report_gone(options, left_out - {(entry.topic, entry.partition) for _, entry in chosen
                                          if start.get((entry.topic, entry.partition)) == 0})  # fmt: skip
    if start == end:
        return []

    def pieces(slice_bytes: int) -> list[Piece]:
        chosen, _ = chosen_partitions(fs, options)
        there = {(entry.topic, entry.partition): (log_dir, entry) for log_dir, entry in chosen}
        _report_gone(options, end.keys() - there.keys())
        divided = replace(options, slice_bytes=slice_bytes)
        return [
            Piece(*key, piece)
            for key, (log_dir, entry) in there.items()
            if key in end and start.get(key) != end[key]
            for piece in with_facts(fs, log_dir, entry, partial(_slices, fs, divided, start.get(key), end[key]))
        ]

    return in_tasks(pieces, options)


def _slices(
    fs: FileSystem, options: SourceOptions, start: int | None, end: int, facts: PartitionFacts
) -> list[LogSlice]:
    name, first = f"{facts.topic}-{facts.partition}", facts.log_start_offset
    if start is None:
        if first > 0:
            _report_loss(options, f"the new partition {name} starts at offset {first} instead of 0", facts.path)
        start = first
    if end < start:
        _report_early_end(options, facts, end, start)
    elif start < first:
        _report_loss(options, f"{name} starts at offset {first}, after the next offset {start}", facts.path)
    begin = max(start, first)
    if end <= begin:
        return []
    stop = limit_of(fs, options, facts).end_offset
    if stop < end:
        _report_loss(options, f"{name} can be read up to offset {stop}, before the end of the batch {end}", facts.path)
    return slices_between(fs, options, facts, begin, min(stop, end))


def _report_gone(options: SourceOptions, keys: AbstractSet[TopicPartition]) -> None:
    if keys:
        shown = ", ".join(f"{topic}-{partition}" for topic, partition in sorted(keys)[:20])
        are = f"{' ...' if len(keys) > 20 else ''} {'is' if len(keys) == 1 else 'are'}"
        _report_loss(options, f"{shown}{are} no longer in the log dirs, or no longer chosen")


def _report_early_end(options: SourceOptions, facts: PartitionFacts, end: int, start: int) -> None:
    what = f"{facts.topic}-{facts.partition} ends at offset {end}, before the next offset {start}"
    _report_loss(options, what, facts.path)


def _report_loss(options: SourceOptions, what: str, path: str | None = None) -> None:
    if not options.fail_on_data_loss:
        _log.warning("%s: records may be missing from the stream%s", what, "" if path is None else f" ({path})")
        return
    raise Refused(
        f"records may be missing from the stream: {what}",
        path=options.log_dirs[0] if path is None else path,
        remedy="If these records were read or are not needed, set failOnDataLoss to false to continue with the other "
        "records. If not, read the records from a backup or another replica",
        slug="stream-data-lost",
    )
