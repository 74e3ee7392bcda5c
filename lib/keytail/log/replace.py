"""Puts a group's finished output in the place of its source segments, and resolves what a crash left.

At every instant a broker that starts, and `recover`, find either all sources or the whole output; SWAP.md
beside this file tabulates the states on disk. Whether the output is right is left to the proof, which comes
before; the caller holds the locks.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from keytail.errors import CorruptLog, KeytailError, Refused
from keytail.format import names
from keytail.format.names import FileName
from keytail.log.fs import FileSystem
from keytail.log.partition import log_end

_NEEDED = (names.LOG, names.INDEX, names.TIME_INDEX)
_INDEXES = tuple(suffix for suffix in names.SEGMENT_SUFFIXES if suffix != names.LOG)


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
class GroupOutput:
    """The segments that replace the sources of one group; the first has the base of the first source."""

    source_bases: tuple[int, ...]
    segments: tuple[OutputSegment, ...]

    @property
    def base_offset(self) -> int:
        return self.segments[0].base_offset


def commit_group(fs: FileSystem, partition_path: str, group: GroupOutput) -> None:
    """Replaces the group's sources by its output. The unlink of the guard is the commit.

    The scratch files must be durable and proven. Raises before anything is changed when the directory or a
    scratch file is not as expected; an OSError later leaves a state that `recover` resolves.
    """
    end = _check_before(fs, partition_path, group)
    guard = os.path.join(partition_path, names.guard_file(group.base_offset))
    source_log = os.path.join(partition_path, names.segment_file(group.base_offset, names.LOG))
    fs.close(fs.create(guard, fs.stat(source_log)))
    fs.fsync_dir(partition_path)
    by_suffix = {file.suffix: file for file in group.files}
    for suffix in names.SEGMENT_SUFFIXES:
        if suffix in by_suffix:
            swap = names.segment_file(group.base_offset, suffix + names.SWAP)
            fs.rename(
                os.path.join(partition_path, by_suffix[suffix].name), os.path.join(partition_path, swap)
            )
    fs.fsync_dir(partition_path)
    fs.unlink(guard)
    fs.fsync_dir(partition_path)
    _finish(fs, partition_path, group.base_offset, end, group.source_bases)


def recover(fs: FileSystem, partition_path: str) -> list[str]:
    """Resolves what an interrupted replacement left, ours or Kafka's; a sentence for each thing done.

    Every `.swap` that a standing `.cleaned` makes void goes, every other one is finished, then scratch and
    `.deleted` files go. Killed at any moment, it can be run again. Raises Refused or CorruptLog, before
    anything is changed, where a broker would lose data or not start. The scratch of every run goes: call it
    before tasks write.
    """
    files = _named_files(fs, partition_path)
    _refuse_unresolvable(files, partition_path)
    swapped = _spans(fs, partition_path, files)
    done = _discard(fs, partition_path, files)
    for base, end in swapped:
        done += _finish_left(fs, partition_path, base, end)
    done += _finish_lone_indexes(fs, partition_path)
    done += _sweep(fs, partition_path)
    if done:
        fs.fsync_dir(partition_path)
    return done


def _check_before(fs: FileSystem, path: str, group: GroupOutput) -> int:
    """What must hold before the guard is made: after that, undoing is the recovery's work.

    The output's next offset, which is also where a broker stops deleting sources.
    """
    files = _named_files(fs, path)
    _refuse_fatal(files, path)
    pending = [file.name for file in files if file.kind in ("cleaned", "swap")]
    if pending:
        raise Refused(
            f"another replacement of segments is not finished: {', '.join(sorted(pending))}",
            path=path,
            remedy="Run again: leftovers are resolved first",
        )
    sources = tuple(sorted(group.source_bases))
    if not sources or sources != group.source_bases or sources[0] != group.base_offset:
        raise KeytailError(
            f"sources {group.source_bases} cannot give a segment at {group.base_offset}", path=path
        )
    bases = sorted(
        file.base_offset
        for file in files
        if file.kind == "live" and file.suffix == names.LOG and file.base_offset is not None
    )
    present = [base for base in bases if sources[0] <= base <= sources[-1]]
    if tuple(present) != sources:
        raise KeytailError(
            f"the segments to replace are {list(sources)}, but on disk are {present}",
            path=path,
            offset=group.base_offset,
            remedy="Something else changed the partition meanwhile; nothing was replaced",
        )
    by_suffix = _check_files(fs, path, group)
    log_path = os.path.join(path, by_suffix[names.LOG].name)
    end = log_end(fs, log_path, group.base_offset, os.path.join(path, by_suffix[names.INDEX].name))
    following = [base for base in bases if base > sources[-1]]
    if end.tail_bytes or (following and end.next_offset > following[0]):
        raise KeytailError(
            "the output does not end with a whole batch below the next segment; nothing was replaced",
            path=log_path,
            byte_position=end.end_position,
            offset=end.next_offset,
        )
    return end.next_offset


def _check_files(fs: FileSystem, path: str, group: GroupOutput) -> dict[str, CleanFile]:
    """The output's files by suffix: all there, and of the size that their task saw."""
    by_suffix = {file.suffix: file for file in group.files}
    missing = [suffix for suffix in _NEEDED if suffix not in by_suffix]
    if missing:
        raise KeytailError(f"the output has no {' and no '.join(missing)}", path=path)
    for file in group.files:
        where = os.path.join(path, file.name)
        size_bytes = fs.stat(where).size_bytes
        if size_bytes != file.size_bytes:
            raise KeytailError(
                f"the output has {size_bytes} bytes here, its task wrote {file.size_bytes}",
                path=where,
                remedy="Are the log dirs mounted alike on driver and executors? Nothing was replaced",
            )
    return by_suffix


def _finish(fs: FileSystem, path: str, base_offset: int, end: int, replaced: Iterable[int]) -> None:
    """From a committed `.log.swap` to the final state; `replaced` are the bases of the sources.

    A recovery that knows the output only, a broker's or ours, keeps sources at or above `end`. Those must go
    in order, one after the other: what a later one deletes stays deleted only while the earlier ones are gone.
    """
    there = {entry.name for entry in fs.scan(path)}
    bases = sorted({base_offset, *replaced})
    late = [base for base in bases if base >= max(end, base_offset + 1)]
    for base in bases[: len(bases) - len(late)]:
        _set_aside(fs, path, base, there, names.SEGMENT_SUFFIXES)
    fs.fsync_dir(path)
    for base in late:  # the log first, and alone: while it is live, its indexes must be
        _set_aside(fs, path, base, there, (names.LOG,))
        fs.fsync_dir(path)
        _set_aside(fs, path, base, there, _INDEXES)
    _promote(fs, path, base_offset, there, (names.LOG,))
    # Only now the indexes: beside a `.log.swap`, an index with its final name counts as the source's.
    _promote(fs, path, base_offset, there, _INDEXES, [base for base in bases if base != base_offset])
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


def _promote(
    fs: FileSystem,
    path: str,
    base_offset: int,
    there: set[str],
    suffixes: Iterable[str],
    merged_away: Iterable[int] = (),
) -> None:
    """`.swap` files to their final names; with them go the snapshots of segments that are no more."""
    for suffix in suffixes:
        live = names.segment_file(base_offset, suffix)
        if live + names.SWAP in there:
            fs.rename(os.path.join(path, live + names.SWAP), os.path.join(path, live))
    for base in merged_away:
        snapshot = names.segment_file(base, names.SNAPSHOT)
        if snapshot in there:
            fs.unlink(os.path.join(path, snapshot))
    fs.fsync_dir(path)


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
    present = {file.name for file in files}
    for file in files:
        if not _is_void(file, files) or file.suffix != names.LOG or file.base_offset is None:
            continue
        live = names.segment_file(file.base_offset, names.LOG)
        if live not in present and live + names.DELETED in present:
            raise Refused(
                "a `.cleaned` file makes this `.swap` void, but its source waits for deletion already: "
                "a broker that starts on this loses the segment",
                path=os.path.join(path, file.name),
                remedy="Copy the partition directory, then remove its `.cleaned` files and run again",
            )


def _lowest_cleaned(files: list[FileName]) -> int | None:
    return min(
        (f.base_offset for f in files if f.kind == "cleaned" and f.base_offset is not None), default=None
    )


def _is_void(file: FileName, files: list[FileName]) -> bool:
    """A `.swap` at or above the lowest `.cleaned` belongs to a replacement that was not committed."""
    lowest = _lowest_cleaned(files)
    return (
        file.kind == "swap"
        and file.base_offset is not None
        and lowest is not None
        and file.base_offset >= lowest
    )


def _spans(fs: FileSystem, path: str, files: list[FileName]) -> list[tuple[int, int]]:
    """Base and next offset of every `.log.swap` that is to be finished, ascending.

    Each is finished within its own span. A broker takes all of them as one span and deletes whatever lies
    between; for the outputs of one replacement that is the same.
    """
    spans = []
    for file in files:
        if file.kind != "swap" or file.suffix != names.LOG or file.base_offset is None:
            continue
        if _is_void(file, files):
            continue
        swap = os.path.join(path, file.name)
        index = os.path.join(path, names.segment_file(file.base_offset, names.INDEX + names.SWAP))
        end = log_end(fs, swap, file.base_offset, index)
        if end.tail_bytes:
            raise CorruptLog(
                "the output of an interrupted replacement does not end with a whole batch",
                path=swap,
                byte_position=end.end_position,
                offset=end.next_offset,
                remedy="Nothing was changed; copy the partition directory before a broker starts on it",
            )
        spans.append((file.base_offset, end.next_offset))
    return spans


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


def _finish_left(fs: FileSystem, path: str, base: int, end: int) -> list[str]:
    """Finishes the replacement of the sources in [base, end) by `base`'s `.log.swap`."""
    files = _named_files(fs, path)
    present = {file.name for file in files}
    done = [f"finished the replacement of offsets {base} to {end} by {names.segment_file(base, names.LOG)}"]
    if any(names.segment_file(base, suffix + names.SWAP) not in present for suffix in _NEEDED):
        # A broker would go on with an index of zeros; without any index file it rebuilds all of them.
        for suffix in _INDEXES:
            swap = names.segment_file(base, suffix + names.SWAP)
            if swap in present:
                fs.unlink(os.path.join(path, swap))
        done.append(f"left {names.segment_file(base, names.LOG)} without indexes: part of them was missing")
    replaced = {
        file.base_offset
        for file in files
        if file.base_offset is not None
        and file.kind in ("live", "deleted")
        and file.suffix in names.SEGMENT_SUFFIXES
        and base <= file.base_offset < end
    }
    _finish(fs, path, base, end, replaced)
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
        if names.segment_file(file.base_offset, names.LOG) in present:
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
    logs = {f.base_offset for f in files if f.kind == "live" and f.suffix == names.LOG}
    newest = max((base for base in logs if base is not None), default=-1)
    gone = {
        file.base_offset
        for file in files
        if file.kind == "deleted" and file.suffix == names.LOG and file.base_offset not in logs
    }
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
