"""Replaces a group's source segments by its finished outputs.

At any instant a broker that starts, and `recover`, find either all sources or all outputs of each part of the group;
log/SWAP.md lists the states on disk. The caller holds the locks, and has proven that the outputs are correct.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass

from keytail.errors import REPORT_IT, KeytailError, Refused
from keytail.format import names
from keytail.log.fs import FileSystem
from keytail.log.lock import refuse_lost
from keytail.log.log_end import log_end
from keytail.log.replacement.directory import Directory
from keytail.log.replacement.swap import NEEDED, finish


@dataclass(frozen=True, slots=True)
class CleanFile:
    """One finished scratch file: the suffix of the segment file that it becomes, its name, its size and its digest."""

    suffix: str
    name: str
    size_bytes: int
    digest_hex: str


@dataclass(frozen=True, slots=True)
class OutputSegment:
    """One finished output segment."""

    base_offset: int
    files: tuple[CleanFile, ...]


@dataclass(frozen=True, slots=True)
class UnfinishedOutput:
    """An output segment that is still being written: the size of its log so far, and the entries of its indexes so
    far. `paths` are the scratch files by suffix; those of the indexes do not exist yet."""

    base_offset: int
    paths: dict[str, str]
    log_bytes: int
    index: bytes
    time_index: bytes


@dataclass(frozen=True, slots=True)
class SnapshotFile:
    """One finished scratch file that becomes the producer snapshot at `offset`."""

    offset: int
    name: str


@dataclass(frozen=True, slots=True)
class GroupOutput:
    """The segments that replace the sources of one group, both in ascending order.

    The first segment has the base offset of the first source; the other segments begin above it and below the segment
    that follows the last source. `snapshots` are new producer snapshots, above the previous log end.
    """

    source_bases: tuple[int, ...]
    segments: tuple[OutputSegment, ...]
    snapshots: tuple[SnapshotFile, ...] = ()

    @property
    def base_offset(self) -> int:
        return self.segments[0].base_offset


def commit_group(
    fs: FileSystem,
    partition_path: str,
    group: GroupOutput,
    unlink: Callable[[str], None] | None = None,
    directory: Directory | None = None,
) -> None:
    """Replace the sources of `group` by its outputs. Unlinking the guard (SWAP.md) is the commit.

    An output after the first that has the base offset of a source begins a new part. The parts are committed one after
    the other, each with all its outputs at once. The scratch files must be durable and proven. Raises KeytailError,
    before anything is changed, if the directory or a scratch file is not as expected; and LockLost, before a part
    begins, if the lock of the log dir is lost. A later OSError leaves a state that `recover` resolves. `unlink` removes
    the `.deleted` files of sources; by default the `unlink` of `fs` does. For many groups of one partition, pass the
    same `directory`, which is listed again only if something else has changed it.
    """
    directory = directory or Directory(fs, partition_path)
    ends = _check_before(directory, group)
    for part in parts(group):
        refuse_lost(fs, partition_path)
        _commit_part(directory, part, max(ends[out.base_offset] for out in part.segments), unlink)
    directory.keep()


def parts(group: GroupOutput) -> list[GroupOutput]:
    """Divide the group at every output that begins where a source begins; return the parts.

    Offsets do not overlap, so the outputs below such an output come only from the sources below that output. In each
    part, no output after the first begins where a source does; by this, a recovery recognises which outputs belong
    together.
    """
    starts = [out.base_offset for out in group.segments if out.base_offset in group.source_bases]
    return [
        GroupOutput(
            tuple(base for base in group.source_bases if low <= base < high),
            tuple(out for out in group.segments if low <= out.base_offset < high),
            group.snapshots if high == names.MAX_OFFSET else (),
        )
        for low, high in itertools.pairwise([*starts, names.MAX_OFFSET])
    ]


def _commit_part(
    directory: Directory, group: GroupOutput, end: int, unlink: Callable[[str], None] | None
) -> None:
    """Commit one part of a group. `end` is the highest next offset of the outputs. The guard has the lowest base
    offset, so that it makes all outputs void."""
    guard = names.guard_file(group.base_offset)
    source_log = os.path.join(directory.path, names.segment_file(group.base_offset, names.LOG))
    directory.make_empty(guard, directory.fs.stat(source_log))
    directory.fsync()
    # Each `.log` is renamed first, durably: a broker before 3.0 removes void `.index.swap` files only with the log.
    for suffixes in ((names.LOG,), names.INDEX_SUFFIXES):
        for out in reversed(group.segments):
            by_suffix = {file.suffix: file.name for file in out.files}
            for suffix in suffixes:
                if suffix in by_suffix:
                    directory.rename(by_suffix[suffix], names.segment_file(out.base_offset, suffix + names.SWAP))
        if suffixes == (names.LOG,):
            directory.fsync()
    for snapshot in group.snapshots:
        directory.rename(snapshot.name, names.segment_file(snapshot.offset, names.SNAPSHOT + names.SWAP))
    directory.fsync()
    directory.unlink(guard)
    directory.fsync()
    finish(directory, [out.base_offset for out in group.segments], end, group.source_bases, unlink)


def _check_before(directory: Directory, group: GroupOutput) -> dict[int, int]:
    """Check all preconditions except the lock, and return the next offset of each output by its base offset.

    Called before the guard is created, after which only a recovery can undo the replacement.
    """
    fs, path = directory.fs, directory.path
    directory.refresh()
    sources, outputs = group.source_bases, tuple(out.base_offset for out in group.segments)
    # Beside a `.log.deleted` of its base, an output that continues another would look like the first of a set.
    pending = [
        file.name
        for file in directory.unfinished()
        if file.kind != "deleted" or (file.base_offset in outputs and file.base_offset not in sources)
    ]
    if pending:
        raise Refused(
            f"another replacement of segments is unfinished: {', '.join(sorted(pending))}",
            path=path,
            remedy="Run again: a run first resolves unfinished replacements",
            slug="unfinished-replacement",
        )
    ascending = all(low < high for bases in (sources, outputs) for low, high in itertools.pairwise(bases))
    if not sources or not outputs or not ascending or sources[0] != outputs[0]:
        raise KeytailError(
            f"source segments {sources} cannot be replaced by segments {outputs}",
            path=path,
            remedy=REPORT_IT,
            slug="invalid-replacement",
        )
    present = directory.bases_between(sources[0], sources[-1])
    if present != sources:
        raise KeytailError(
            f"the segments to replace are {list(sources)}, but the segments on disk are {list(present)}",
            path=path,
            offset=group.base_offset,
            remedy="Nothing was replaced. Another process changed the partition during the run: stop it, then run "
            "again",
            slug="unexpected-segments",
        )
    following = directory.base_above(sources[-1])
    limits = (*outputs[1:], names.MAX_OFFSET if following is None else following)
    ends = {
        out.base_offset: _check_output(fs, path, out, below) for out, below in zip(group.segments, limits, strict=True)
    }
    for part in parts(group):
        _refuse_gaps(fs, path, part, ends)
    return ends


def _refuse_gaps(fs: FileSystem, path: str, part: GroupOutput, ends: dict[int, int]) -> None:
    """Raise KeytailError for a source between two outputs: a broker before 3.0 would retain it, because it replaces
    only the segments that overlap an output."""
    for before, after in itertools.pairwise(out.base_offset for out in part.segments):
        end = max(ends[before], before + 1)
        for source in part.source_bases:
            if not end <= source < after:
                continue
            log = os.path.join(path, names.segment_file(source, names.LOG))
            if log_end(fs, log, source).next_offset <= after:
                raise KeytailError(
                    f"source segment {source} is between the end of output {before} and output {after}",
                    path=path,
                    offset=source,
                    remedy=REPORT_IT,
                    slug="source-between-outputs",
                )


def _check_output(fs: FileSystem, path: str, out: OutputSegment, below: int) -> int:
    """Return the next offset of the output. Raises KeytailError if the output does not end with a complete batch, or
    not below `below`, the base offset of the next segment."""
    by_suffix = _check_files(fs, path, out)
    log_path = os.path.join(path, by_suffix[names.LOG].name)
    end = log_end(fs, log_path, out.base_offset, os.path.join(path, by_suffix[names.INDEX].name))
    if end.tail_bytes or out.base_offset >= below or end.next_offset > below:
        raise KeytailError(
            "the output does not end with a complete batch below the next segment; nothing was replaced",
            path=log_path,
            byte_position=end.end_position,
            offset=end.next_offset,
            slug="invalid-output-end",
        )
    return end.next_offset


def _check_files(fs: FileSystem, path: str, out: OutputSegment) -> dict[str, CleanFile]:
    """Return the output's files by suffix. Raises KeytailError if a file that every output has is missing, or if a size
    is not the one that the task reported."""
    by_suffix = {file.suffix: file for file in out.files}
    missing = [suffix for suffix in NEEDED if suffix not in by_suffix]
    if missing:
        what = f"the output has no {' and no '.join(missing)}"
        raise KeytailError(what, path=path, offset=out.base_offset, remedy=REPORT_IT, slug="missing-output-file")
    for file in out.files:
        where = os.path.join(path, file.name)
        size_bytes = fs.stat(where).size_bytes
        if size_bytes != file.size_bytes:
            raise KeytailError(
                f"the output has {size_bytes} bytes on the driver, but its task wrote {file.size_bytes}",
                path=where,
                remedy="Nothing was replaced. Check that the driver and the executors mount the same log dirs",
                slug="output-size-differs",
            )
    return by_suffix
