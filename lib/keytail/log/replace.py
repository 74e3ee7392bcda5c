"""Puts a group's finished outputs in the place of its source segments, and resolves what a crash left.

At every instant a broker that starts, and `recover`, find either all sources or all outputs; SWAP.md
beside this file tabulates the states on disk. Whether the outputs are right is left to the proof, which comes
before; the caller holds the locks.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from keytail.errors import CorruptLog, KeytailError, Refused
from keytail.format import names
from keytail.format.names import FileName
from keytail.log.fs import FileSystem
from keytail.log.partition import log_end

_NEEDED = (names.LOG, names.INDEX, names.TIME_INDEX)


@dataclass(frozen=True, slots=True)
class CleanFile:
    """One finished scratch file: which file of the segment it becomes, its name, size and digest."""

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
class SnapshotFile:
    """One finished scratch file that becomes the producer snapshot at `offset`."""

    offset: int
    name: str


@dataclass(frozen=True, slots=True)
class GroupOutput:
    """The segments that replace the sources of one group, both ascending.

    The first has the base of the first source; the bases of the others lie above it, and below the segment
    that follows the last source. `snapshots` come with them: those above the log end that was before.
    """

    source_bases: tuple[int, ...]
    segments: tuple[OutputSegment, ...]
    snapshots: tuple[SnapshotFile, ...] = ()

    @property
    def base_offset(self) -> int:
        return self.segments[0].base_offset


@dataclass(frozen=True, slots=True)
class _Left:
    """What a recovery finishes as one replacement: its `.log.swap` files, and its span of offsets."""

    bases: tuple[int, ...]
    end: int


def commit_group(fs: FileSystem, partition_path: str, group: GroupOutput) -> None:
    """Replaces the group's sources by its outputs. The unlink of the guard is the commit.

    Outputs are replaced at once unless one begins where a source does: what comes before it is committed
    first, as a group of its own. The scratch files must be durable and proven. Raises before anything is
    changed when the directory or a scratch file is not as expected; an OSError later leaves a state that
    `recover` resolves.
    """
    ends = _check_before(fs, partition_path, group)
    for part in _parts(group):
        _commit_part(fs, partition_path, part, max(ends[out.base_offset] for out in part.segments))


def _parts(group: GroupOutput) -> list[GroupOutput]:
    """The group, divided at every output that begins where a source does.

    Offsets do not overlap, so outputs below that place come of the sources below it, and of no other. What is
    left together are outputs between which no source begins and no broker could; `_one_replacement` knows
    them by that.
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


def _commit_part(fs: FileSystem, path: str, group: GroupOutput, end: int) -> None:
    """`end` is the highest next offset of the outputs. The guard has the lowest base, so that all are void."""
    guard = os.path.join(path, names.guard_file(group.base_offset))
    source_log = os.path.join(path, names.segment_file(group.base_offset, names.LOG))
    fs.close(fs.create(guard, fs.stat(source_log)))
    fs.fsync_dir(path)
    for out in reversed(group.segments):
        by_suffix = {file.suffix: file.name for file in out.files}
        for suffix in names.SEGMENT_SUFFIXES:
            if suffix in by_suffix:
                swap = names.segment_file(out.base_offset, suffix + names.SWAP)
                fs.rename(os.path.join(path, by_suffix[suffix]), os.path.join(path, swap))
    for snapshot in group.snapshots:
        swap = names.segment_file(snapshot.offset, names.SNAPSHOT + names.SWAP)
        fs.rename(os.path.join(path, snapshot.name), os.path.join(path, swap))
    fs.fsync_dir(path)
    fs.unlink(guard)
    fs.fsync_dir(path)
    _finish(fs, path, [out.base_offset for out in group.segments], end, group.source_bases)


def recover(fs: FileSystem, partition_path: str) -> list[str]:
    """Resolves what an interrupted replacement left, ours or Kafka's; a sentence for each thing done.

    Every `.swap` that a standing `.cleaned` makes void goes, every other one is finished, then scratch and
    `.deleted` files go. Killed at any moment, it can be run again. Raises Refused or CorruptLog, before
    anything is changed, where a broker would lose data or not start. The scratch of every run goes: call it
    before tasks write.
    """
    files = _named_files(fs, partition_path)
    _refuse_unresolvable(files, partition_path)
    swapped = _committed(fs, partition_path, files)
    done = _discard(fs, partition_path, files)
    for left in swapped:
        done += _finish_left(fs, partition_path, left)
    done += _finish_lone_indexes(fs, partition_path)
    done += _sweep(fs, partition_path)
    if done:
        fs.fsync_dir(partition_path)
    return done


def _check_before(fs: FileSystem, path: str, group: GroupOutput) -> dict[int, int]:
    """What must hold before the guard is made: after that, undoing is the recovery's work.

    The next offset of each output, by its base.
    """
    files = _named_files(fs, path)
    _refuse_fatal(files, path)
    sources, outputs = group.source_bases, tuple(out.base_offset for out in group.segments)
    pending = [file.name for file in files if file.kind in ("cleaned", "swap")]
    # Beside its `.log.deleted`, an output that goes on where another was closed is taken for one by itself.
    pending += [
        file.name
        for file in files
        if file.kind == "deleted" and file.base_offset in outputs and file.base_offset not in sources
    ]
    if pending:
        raise Refused(
            f"another replacement of segments is not finished: {', '.join(sorted(pending))}",
            path=path,
            remedy="Run again: leftovers are resolved first",
        )
    ascending = all(low < high for bases in (sources, outputs) for low, high in itertools.pairwise(bases))
    if not sources or not outputs or not ascending or sources[0] != outputs[0]:
        raise KeytailError(f"sources {sources} cannot give segments at {outputs}", path=path)
    bases = sorted(_logs(files, "live"))
    present = [base for base in bases if sources[0] <= base <= sources[-1]]
    if tuple(present) != sources:
        raise KeytailError(
            f"the segments to replace are {list(sources)}, but on disk are {present}",
            path=path,
            offset=group.base_offset,
            remedy="Something else changed the partition meanwhile; nothing was replaced",
        )
    following = next((base for base in bases if base > sources[-1]), names.MAX_OFFSET)
    return {
        out.base_offset: _check_output(fs, path, out, below)
        for out, below in zip(group.segments, (*outputs[1:], following), strict=True)
    }


def _check_output(fs: FileSystem, path: str, out: OutputSegment, below: int) -> int:
    """Its next offset, which must not pass `below`, where the next segment begins."""
    by_suffix = _check_files(fs, path, out)
    log_path = os.path.join(path, by_suffix[names.LOG].name)
    end = log_end(fs, log_path, out.base_offset, os.path.join(path, by_suffix[names.INDEX].name))
    if end.tail_bytes or out.base_offset >= below or end.next_offset > below:
        raise KeytailError(
            "the output does not end with a whole batch below the next segment; nothing was replaced",
            path=log_path,
            byte_position=end.end_position,
            offset=end.next_offset,
        )
    return end.next_offset


def _check_files(fs: FileSystem, path: str, out: OutputSegment) -> dict[str, CleanFile]:
    """The output's files by suffix: all there, and of the size that their task saw."""
    by_suffix = {file.suffix: file for file in out.files}
    missing = [suffix for suffix in _NEEDED if suffix not in by_suffix]
    if missing:
        raise KeytailError(f"the output has no {' and no '.join(missing)}", path=path, offset=out.base_offset)
    for file in out.files:
        where = os.path.join(path, file.name)
        size_bytes = fs.stat(where).size_bytes
        if size_bytes != file.size_bytes:
            raise KeytailError(
                f"the output has {size_bytes} bytes here, its task wrote {file.size_bytes}",
                path=where,
                remedy="Are the log dirs mounted alike on driver and executors? Nothing was replaced",
            )
    return by_suffix


def _finish(fs: FileSystem, path: str, outputs: Sequence[int], end: int, replaced: Iterable[int]) -> None:
    """From committed `.log.swap` files to the final state; `replaced` are the bases of the sources.

    A recovery that knows the outputs only, a broker's or ours, keeps sources at or above `end`. Those must go
    in order, one after the other: what a later one deletes stays deleted only while the earlier ones are gone.
    """
    there = {entry.name for entry in fs.scan(path)}
    bases = sorted({*outputs, *replaced})
    late = [base for base in bases if base >= max(end, outputs[0] + 1) and base not in outputs]
    for base in bases:
        if base not in late:
            _set_aside(fs, path, base, there, names.SEGMENT_SUFFIXES)
    fs.fsync_dir(path)
    for base in late:  # the log first, and alone: while it is live, its indexes must be
        _set_aside(fs, path, base, there, (names.LOG,))
        fs.fsync_dir(path)
        _set_aside(fs, path, base, there, names.INDEX_SUFFIXES)
    # A broker deletes what lies between the `.log.swap` files that are left: ascending, and one after the
    # other, the final ones always lie below.
    for base in outputs:
        _promote(fs, path, base, there, (names.LOG,))
        fs.fsync_dir(path)
    # Only now the indexes: beside a `.log.swap`, an index with its final name counts as the source's.
    for base in outputs:
        _promote(fs, path, base, there, names.INDEX_SUFFIXES)
    for name in sorted(there):
        file = names.parse_file_name(name)
        if file.kind == "swap" and file.suffix == names.SNAPSHOT and file.base_offset is not None:
            _promote(fs, path, file.base_offset, there, (names.SNAPSHOT,))
    for base in bases:
        snapshot = names.segment_file(base, names.SNAPSHOT)
        if base not in outputs and snapshot in there:
            fs.unlink(os.path.join(path, snapshot))
    fs.fsync_dir(path)
    for base in bases:
        for suffix in names.SEGMENT_SUFFIXES:
            deleted = names.segment_file(base, suffix + names.DELETED)
            if deleted in there:
                fs.unlink(os.path.join(path, deleted))
    fs.fsync_dir(path)


def _set_aside(fs: FileSystem, path: str, base: int, there: set[str], suffixes: Iterable[str]) -> None:
    """Files of a source to `.deleted`."""
    for suffix in suffixes:
        live = names.segment_file(base, suffix)
        if live in there:
            fs.rename(os.path.join(path, live), os.path.join(path, live + names.DELETED))
            there.add(live + names.DELETED)


def _promote(fs: FileSystem, path: str, base: int, there: set[str], suffixes: Iterable[str]) -> None:
    """`.swap` files of an output to their final names."""
    for suffix in suffixes:
        live = names.segment_file(base, suffix)
        if live + names.SWAP in there:
            fs.rename(os.path.join(path, live + names.SWAP), os.path.join(path, live))


def _named_files(fs: FileSystem, path: str) -> list[FileName]:
    """The files of the directory whose names mean something, in order."""
    found = []
    for entry in sorted(fs.scan(path), key=lambda e: e.name):
        parsed = names.parse_file_name(entry.name)
        if parsed.kind != "other" and not entry.is_regular:
            raise Refused("not a regular file", path=os.path.join(path, entry.name))
        found.append(parsed)
    return found


def _refuse_fatal(files: list[FileName], path: str) -> None:
    for file in files:
        if file.kind == "fatal":
            raise Refused(
                "a name that no broker writes, and on which none starts well",
                path=os.path.join(path, file.name),
                remedy="Find out what it is, and move it out of the log dir",
            )


def _refuse_unresolvable(files: list[FileName], path: str) -> None:
    _refuse_fatal(files, path)
    live, deleted = _logs(files, "live"), _logs(files, "deleted")
    finishing = [file for file in files if _is_log_swap(file) and not _is_void(file, files)]
    for file in files:
        if not _is_log_swap(file) or not _is_void(file, files) or file.base_offset in live:
            continue
        if file.base_offset in deleted or finishing:
            raise Refused(
                "a `.cleaned` file makes this `.swap` void, but its source waits for deletion already, or is "
                "replaced by other `.swap` files: a broker that starts on this loses what it holds",
                path=os.path.join(path, file.name),
                remedy="Copy the partition directory, then remove its `.cleaned` files and run again",
            )


def _logs(files: list[FileName], kind: str) -> set[int]:
    """Bases of the `.log` files in this stage."""
    return {f.base_offset for f in files if f.kind == kind and f.suffix == names.LOG and f.base_offset is not None}


def _is_log_swap(file: FileName) -> bool:
    return file.kind == "swap" and file.suffix == names.LOG and file.base_offset is not None


def _lowest_cleaned(files: list[FileName]) -> int | None:
    return min((f.base_offset for f in files if f.kind == "cleaned" and f.base_offset is not None), default=None)


def _is_void(file: FileName, files: list[FileName]) -> bool:
    """A `.swap` at or above the lowest `.cleaned` belongs to a replacement that was not committed."""
    lowest = _lowest_cleaned(files)
    return file.kind == "swap" and file.base_offset is not None and lowest is not None and file.base_offset >= lowest


def _committed(fs: FileSystem, path: str, files: list[FileName]) -> list[_Left]:
    """The replacements that are to be finished, ascending.

    Each is finished within its own span. A broker takes all `.log.swap` files as one span and deletes whatever
    lies between; for the outputs of one replacement that is right.
    """
    found: list[_Left] = []
    for file in files:
        if not _is_log_swap(file) or _is_void(file, files):
            continue
        base = file.base_offset
        assert base is not None
        end = _swap_end(fs, path, base)
        if found and _one_replacement(files, base):
            _refuse_half_renamed(path, files, found[-1], base)
            found[-1] = _Left((*found[-1].bases, base), max(found[-1].end, end))
        else:
            found.append(_Left((base,), end))
    return found


def _one_replacement(files: list[FileName], base: int) -> bool:
    """Whether the `.log.swap` of `base` goes on where the one before it was closed.

    Any other begins where its first source does, which is there until the output has its final name.
    """
    return base not in _logs(files, "live") and base not in _logs(files, "deleted")


def _refuse_half_renamed(path: str, files: list[FileName], before: _Left, base: int) -> None:
    """A broker renames in any order. Killed at it, it leaves an output that looks like a source in a gap."""
    live, first = _logs(files, "live"), before.bases[0]
    between = [log for log in sorted(live) if before.end <= log < base]
    if between and first not in live | _logs(files, "deleted"):
        raise Refused(
            f"a broker was stopped while it put segments {first} to {base} in their places, and whether this "
            "one is new or was to be replaced cannot be told; a broker that starts deletes it",
            path=os.path.join(path, names.segment_file(between[0], names.LOG)),
            remedy="Copy the partition directory before a broker starts on it",
        )


def _swap_end(fs: FileSystem, path: str, base: int) -> int:
    swap = os.path.join(path, names.segment_file(base, names.LOG + names.SWAP))
    index = os.path.join(path, names.segment_file(base, names.INDEX + names.SWAP))
    end = log_end(fs, swap, base, index)
    if end.tail_bytes:
        raise CorruptLog(
            "the output of an interrupted replacement does not end with a whole batch",
            path=swap,
            byte_position=end.end_position,
            offset=end.next_offset,
            remedy="Nothing was changed; copy the partition directory before a broker starts on it",
        )
    return end.next_offset


def _discard(fs: FileSystem, path: str, files: list[FileName]) -> list[str]:
    """Void `.swap` files first, and for good: the `.cleaned` that voids them must outlive them."""
    done = []
    for file in files:
        if _is_void(file, files):
            fs.unlink(os.path.join(path, file.name))
            done.append(f"discarded {file.name}: its replacement was not committed")
    if done:
        fs.fsync_dir(path)
    for file in files:
        if file.kind == "cleaned":
            fs.unlink(os.path.join(path, file.name))
            done.append(f"discarded {file.name}: it was not finished")
    if done:
        fs.fsync_dir(path)
    return done


def _finish_left(fs: FileSystem, path: str, left: _Left) -> list[str]:
    """Finishes the replacement of everything in its span by its `.log.swap` files."""
    files = _named_files(fs, path)
    present = {file.name for file in files}
    logs = [names.segment_file(base, names.LOG) for base in left.bases]
    done = [f"finished the replacement of offsets {left.bases[0]} to {left.end} by {', '.join(logs)}"]
    for base, log in zip(left.bases, logs, strict=True):
        swaps = [names.segment_file(base, suffix + names.SWAP) for suffix in _NEEDED]
        if present.issuperset(swaps):
            continue
        # A broker would go on with an index of zeros; without any index file it rebuilds all of them.
        for suffix in names.INDEX_SUFFIXES:
            swap = names.segment_file(base, suffix + names.SWAP)
            if swap in present:
                fs.unlink(os.path.join(path, swap))
        done.append(f"left {log} without indexes: part of them was missing")
    replaced = {
        file.base_offset
        for file in files
        if file.base_offset is not None
        and file.kind in ("live", "deleted")
        and file.suffix in names.SEGMENT_SUFFIXES
        and left.bases[0] <= file.base_offset < left.end
    }
    _finish(fs, path, left.bases, left.end, replaced)
    return done


def _finish_lone_indexes(fs: FileSystem, path: str) -> list[str]:
    """Index files whose log has its final name already; without any log they index nothing."""
    done = []
    files = _named_files(fs, path)
    present = {file.name for file in files}
    for file in files:
        if file.kind != "swap" or file.base_offset is None:
            continue
        live = names.segment_file(file.base_offset, file.suffix)
        # A snapshot may stand at the log end, where no segment begins.
        if names.segment_file(file.base_offset, names.LOG) in present or file.suffix == names.SNAPSHOT:
            fs.rename(os.path.join(path, file.name), os.path.join(path, live))
            done.append(f"gave {live} its final name")
        else:
            fs.unlink(os.path.join(path, file.name))
            done.append(f"removed {file.name}: there is no log for it")
    return done


def _sweep(fs: FileSystem, path: str) -> list[str]:
    """Our scratch, `.deleted` files, and before those the snapshots that belong to deleted segments."""
    done = []
    files = _named_files(fs, path)
    logs = _logs(files, "live")
    newest = max(logs, default=-1)
    gone = _logs(files, "deleted") - logs
    for file in files:  # a snapshot at or above the newest segment may be the log end's: never that one
        base = file.base_offset if file.kind == "live" and file.suffix == names.SNAPSHOT else None
        if base is not None and base in gone and base < newest:
            fs.unlink(os.path.join(path, file.name))
            done.append(f"removed {file.name}: its segment was replaced")
    if done:
        fs.fsync_dir(path)  # what tells that they must go is removed next
    for file in files:  # a `.deleted` without a number is nothing of Kafka's or ours
        if file.kind == "scratch" or (file.kind == "deleted" and file.base_offset is not None):
            fs.unlink(os.path.join(path, file.name))
            done.append(f"removed {file.name}")
    return done
