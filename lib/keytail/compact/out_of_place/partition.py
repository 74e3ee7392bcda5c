"""Compacts one partition out of place: cleans it into another directory, and copies all files there that the cleaning
does not replace (OUT_OF_PLACE.md).

`place_partition` reads the sources and writes scratch files. `place_partition` may run on any host that has access to
the source and the target. The driver renames the files.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial

from keytail.compact.cleaner import check_hash, check_sources, clean_partition
from keytail.compact.out_of_place.output_record import OutputRecord, PlacedFile, SeenFile, seen_files
from keytail.compact.task import CleaningResult, CleaningTask, OutOfPlace
from keytail.errors import Refused, in_words
from keytail.format import names
from keytail.log.fs import FileSystem
from keytail.log.partition import PartitionFacts, SegmentFacts
from keytail.log.replacement.replace import GroupOutput
from keytail.undo.backup import copy_file


def place_partition(fs: FileSystem, task: CleaningTask) -> CleaningResult:
    """Write, under scratch names, all files that the partition must have in the target, durable and proven.

    If `clean_partition` refuses the partition, it is copied; the result's `refusal` is the reason. Other errors of
    `clean_partition` are raised after removing the outputs of this attempt, and Refused if the source is not as the
    driver listed it, before or after the files are read.
    """
    result = clean_or_not(fs, task)
    try:
        placed = (*outputs_of(result.groups), *copy_rest(fs, task, result.groups))
        refuse_other_files(fs, task)  # checked on the host that read the files; the driver checks, too
    except BaseException:
        remove(fs, task, (file.scratch_name for file in outputs_of(result.groups)))
        raise
    return replace(result, placed=placed)


def clean_or_not(fs: FileSystem, task: CleaningTask) -> CleaningResult:
    """Clean the partition if it is due; return the result, whose files still have scratch names. The result for a
    partition that is only copied, or whose cleaning is refused, has no groups.
    """
    place = _place(task)
    refuse_other_files(fs, task)
    if place.only_copies:
        return uncleaned(task)
    check_hash(task)
    check_sources(fs, task)
    try:
        return clean_partition(fs, task)
    except Refused as reason:
        return replace(uncleaned(task), refusal=in_words(reason))


def uncleaned(task: CleaningTask) -> CleaningResult:
    """Return the result for a partition that is copied unchanged; its records are not counted."""
    size_bytes = sum(segment.log_bytes for segment in task.segments)
    count = len(task.segments)
    return CleaningResult(task.first_dirty_offset, (), count, count, size_bytes, size_bytes, 0, 0, 0, 0, 0)


def copy_rest(fs: FileSystem, task: CleaningTask, groups: Sequence[GroupOutput]) -> tuple[PlacedFile, ...]:
    """Make durable copies of all files that no group replaces, with the same times; return the copies. On failure no
    copy is left.
    """
    place = _place(task)
    made: list[PlacedFile] = []
    scratch = partial(names.scratch_of, run_id=task.run_id, attempt=task.attempt)
    try:
        for seen in to_copy(place.source_files, groups):
            name = scratch(seen.name)
            source = os.path.join(task.partition_path, seen.name)
            size_bytes, digest = copy_file(fs, source, os.path.join(place.path, name), place.like(fs, source))
            made.append(PlacedFile(seen.name, name, size_bytes, digest))
            if size_bytes != seen.size_bytes:
                raise changed(task, f"{seen.name} has {size_bytes} bytes instead of {seen.size_bytes}")
    except BaseException:
        remove(fs, task, (file.scratch_name for file in made))
        raise
    return tuple(made)


def remove(fs: FileSystem, task: CleaningTask, scratch_names: Iterable[str]) -> None:
    for name in scratch_names:
        with contextlib.suppress(OSError):  # only the first error is reported
            fs.unlink(os.path.join(task.scratch_path, name))


def to_copy(source_files: Sequence[SeenFile], groups: Sequence[GroupOutput]) -> list[SeenFile]:
    """Return the files that are copied unchanged. Not copied are the files of segments that a group replaces and, as in
    `log/replacement/replace.py`, the producer snapshots at the base offsets of removed segments.
    """
    sources = {base for group in groups for base in group.source_bases}
    outputs = {out.base_offset for group in groups for out in group.segments}
    return [file for file in source_files if not _is_replaced(file.name, sources, outputs)]


def _is_replaced(name: str, sources: Collection[int], outputs: Collection[int]) -> bool:
    base = names.base_of_live(name)
    if base is None or base not in sources:
        return False
    return not (name.endswith(names.SNAPSHOT) and base in outputs)


def outputs_of(groups: Iterable[GroupOutput]) -> tuple[PlacedFile, ...]:
    return tuple(
        PlacedFile(names.segment_file(out.base_offset, file.suffix), file.name, file.size_bytes, file.digest_hex)
        for group in groups
        for out in group.segments
        for file in out.files
    )


def refuse_other_files(fs: FileSystem, task: CleaningTask) -> None:
    """Raise Refused unless the source has the files that the driver listed, with the same names, sizes and times."""
    here = seen_files(fs, task.partition_path)
    there = _place(task).source_files
    if here == there:
        return
    differ = sorted({file.name for file in {*here} ^ {*there}})
    raise changed(task, f"names, sizes or times differ: {', '.join(differ[:5])}{' ...' if len(differ) > 5 else ''}")


def changed(task: CleaningTask, how: str) -> Refused:
    return Refused(
        f"the source has changed since it was planned: {how} on host {os.uname().nodename}",
        path=task.partition_path,
        remedy="Make sure that nothing writes to the directory and that every host sees the same files, and run again",
        slug="source-changed",
    )


def _place(task: CleaningTask) -> OutOfPlace:
    assert task.out_of_place is not None
    return task.out_of_place


def as_written(facts: PartitionFacts, record: OutputRecord) -> PartitionFacts:
    """Return the facts of the target's copy of a partition, for planning, from the facts of the unchanged source.

    At and above the offset to which the copy was compacted, source and copy have the same files; the record lists the
    files of the copy below this offset.
    """
    if record.clean_to is None:
        return facts
    times = {segment.base_offset: segment for segment in facts.segments}
    below = [
        (base, file.size_bytes)
        for file in record.files
        if file.name.endswith(names.LOG)
        and (base := names.base_of_live(file.name)) is not None
        and base < record.clean_to
    ]
    above = [segment for segment in facts.segments if segment.base_offset >= record.clean_to]
    segments = tuple(
        times[base]._replace(log_bytes=size_bytes)
        if base in times
        else SegmentFacts(base, size_bytes, facts.segments[0].log_mtime_ns, None, None, None, -1, -1)
        for base, size_bytes in sorted(below)
    )
    return replace(facts, segments=(*segments, *above), cleaner_checkpoint=record.entries.cleaner)
