"""Resolves a replacement of segments, by keytail or by a broker, that was interrupted.

log/SWAP.md lists the states on disk and the result of each. The caller holds the locks.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from dataclasses import dataclass

from keytail.errors import CorruptLog, Refused
from keytail.format import names
from keytail.format.names import FileName
from keytail.log.fs import FileSystem
from keytail.log.lock import LockLost, refuse_lost
from keytail.log.log_end import log_end
from keytail.log.replacement.directory import Directory, logs, named_files, refuse_fatal
from keytail.log.replacement.swap import NEEDED, finish


@dataclass(frozen=True, slots=True)
class _Left:
    """A committed replacement that recovery finishes: the base offsets of its `.log.swap` files, and the highest next
    offset of these files."""

    bases: tuple[int, ...]
    end: int


def recover(fs: FileSystem, partition_path: str, keep: Collection[str] = ()) -> list[str]:
    """Resolve the leftovers of an interrupted replacement by keytail or Kafka; return one sentence for each action
    taken.

    Scratch files of all runs are removed, except `keep`, so recovery must precede the tasks that write such files.
    Every `.cleaned` file is removed, after every `.swap` that it makes void. Every other `.swap` gets its final name,
    except index files without a log, of an incomplete set, or of a log whose indexes a broker has rebuilt, which are
    removed; then `.deleted` files are removed. If this process is killed at any moment, recovery can be run again.
    Raises Refused or CorruptLog, before anything is changed, if a broker would lose data or not start correctly, or if
    something with a Kafka or keytail name is not a regular file; and LockLost, with nothing changed, if the lock of the
    log dir is lost.
    """
    refuse_lost(fs, partition_path)
    files = named_files(fs, partition_path)
    _refuse_unresolvable(files, partition_path)
    swapped = _committed(fs, partition_path, files)
    scratch = [file for file in files if file.kind == "scratch" and file.name not in keep]
    done = _remove(fs, partition_path, scratch)  # this frees space for the rest
    done += _discard(fs, partition_path, files)
    for left in reversed(swapped):  # the guard of one replacement makes all replacements above it void
        done += _finish_left(fs, partition_path, left)
    done += _finish_lone_indexes(fs, partition_path)
    done += _sweep(fs, partition_path)
    if done:
        fs.fsync_dir(partition_path)
    return done


def remove_scratch(fs: FileSystem, path: str, run_id: str, keep: Collection[str] = ()) -> int:
    """Remove the scratch files of a run in the directory `path`, except `keep`; return their number. Raises LockLost if
    the log dir's lock is lost: the next run removes the files."""
    refuse_lost(fs, path)
    removed = 0
    for entry in fs.scan(path):
        name = names.parse_file_name(entry.name)
        if name.kind == "scratch" and name.run_id == run_id and name.name not in keep:
            fs.unlink(os.path.join(path, name.name))
            removed += 1
    return removed


def remove_lost_scratch(fs: FileSystem, path: str, run_id: str, keep: Collection[str] = ()) -> int:
    """Remove the scratch files of a run as `remove_scratch` does, after tasks were lost or stopped. Return the number
    of removed files, or 0 after OSError or LockLost, which are suppressed: the next run removes the files."""
    with contextlib.suppress(OSError, LockLost):
        return remove_scratch(fs, path, run_id, keep)
    return 0


def _refuse_unresolvable(files: list[FileName], path: str) -> None:
    refuse_fatal(files, path)
    live, deleted, void = logs(files, "live"), logs(files, "deleted"), _void(files)
    is_finishing = any(_is_log_swap(file) and file.name not in void for file in files)
    for file in files:
        if not _is_log_swap(file) or file.name not in void or file.base_offset in live:
            continue
        if file.base_offset in deleted or is_finishing:
            raise Refused(
                "a `.cleaned` file makes this `.swap` file invalid, but its source is already marked for deletion or "
                "is replaced by other `.swap` files: a broker that starts now loses the records",
                path=os.path.join(path, file.name),
                remedy="Copy the partition directory, then remove its `.cleaned` files and run again",
                slug="invalid-swap-without-source",
            )


def _is_log_swap(file: FileName) -> bool:
    return file.kind == "swap" and file.suffix == names.LOG and file.base_offset is not None


def _void(files: list[FileName]) -> set[str]:
    """Return the names of the `.swap` files at or above the lowest `.cleaned` file, which belong to a replacement that
    was not committed."""
    cleaned = [file.base_offset for file in files if file.kind == "cleaned" and file.base_offset is not None]
    if not cleaned:
        return set()
    lowest = min(cleaned)
    return {f.name for f in files if f.kind == "swap" and f.base_offset is not None and f.base_offset >= lowest}


def _committed(fs: FileSystem, path: str, files: list[FileName]) -> list[_Left]:
    """Return the replacements to finish, in ascending order.

    Each replacement is finished within its own offset range. A broker from 3.0 on treats all `.log.swap` files as one
    range and deletes all other segments in that range, which is correct only for the outputs of one replacement.
    """
    found: list[_Left] = []
    live, deleted, void = logs(files, "live"), logs(files, "deleted"), _void(files)
    for file in files:
        if not _is_log_swap(file) or file.name in void:
            continue
        base = file.base_offset
        assert base is not None
        end = _swap_end(fs, path, base)
        # An output whose base offset is neither live nor deleted continues the previous output. Any other output begins
        # where its first source begins, or already has its final name and can be finished by itself.
        if found and base not in live and base not in deleted:
            _refuse_half_renamed(path, live, deleted, found[-1], base)
            found[-1] = _Left((*found[-1].bases, base), max(found[-1].end, end))
        else:
            found.append(_Left((base,), end))
    return found


def _refuse_half_renamed(path: str, live: set[int], deleted: set[int], before: _Left, base: int) -> None:
    """Raise Refused if a broker may have been killed while it renamed outputs. A broker renames outputs in any order,
    so an output with its final name may look like a source between two outputs."""
    first = before.bases[0]
    between = [log for log in live if before.end <= log < base]
    if between and first not in live and first not in deleted:
        raise Refused(
            f"a broker was stopped while it renamed the new segments {first} to {base}, and it is unknown whether "
            "this segment is new or was to be replaced; a broker that starts deletes it",
            path=os.path.join(path, names.segment_file(min(between), names.LOG)),
            remedy="Copy the partition directory before a broker starts on it",
            slug="half-renamed-segments",
        )


def _swap_end(fs: FileSystem, path: str, base: int) -> int:
    swap = os.path.join(path, names.segment_file(base, names.LOG + names.SWAP))
    index = os.path.join(path, names.segment_file(base, names.INDEX + names.SWAP))
    end = log_end(fs, swap, base, index)
    if end.tail_bytes:
        raise CorruptLog(
            "the output of an interrupted replacement does not end with a complete batch",
            path=swap,
            byte_position=end.end_position,
            offset=end.next_offset,
            remedy="Nothing was changed; copy the partition directory before a broker starts on it",
            slug="incomplete-replacement-output",
        )
    return end.next_offset


def _discard(fs: FileSystem, path: str, files: list[FileName]) -> list[str]:
    """Remove the void `.swap` files, durably, then all `.cleaned` files, which make them void. Of the `.swap` files,
    the `.log.swap` are removed last, because a broker before 3.0 removes the others only together with the `.log.swap`.
    Return a sentence for each action."""
    done = []
    void = [file for file in files if file.name in _void(files)]
    for part in ([f for f in void if f.suffix != names.LOG], [f for f in void if f.suffix == names.LOG]):
        for file in part:
            fs.unlink(os.path.join(path, file.name))
            done.append(f"discarded {file.name}: a .cleaned file makes it invalid")
        if part:
            fs.fsync_dir(path)
    for file in files:
        if file.kind == "cleaned":
            fs.unlink(os.path.join(path, file.name))
            done.append(f"discarded {file.name}: it is incomplete")
    if done:
        fs.fsync_dir(path)
    return done


def _finish_left(fs: FileSystem, path: str, left: _Left) -> list[str]:
    """Replace the segments in the offset range of `left` by its outputs; return a sentence for each action."""
    files = named_files(fs, path)
    present = {file.name for file in files}
    final = [names.segment_file(base, names.LOG) for base in left.bases]
    done = [f"finished the replacement of offsets {left.bases[0]} to {left.end} with {', '.join(final)}"]
    for base, log in zip(left.bases, final, strict=True):
        swaps = [names.segment_file(base, suffix + names.SWAP) for suffix in NEEDED]
        if present.issuperset(swaps):
            continue
        # A broker would use an index of zeros; without any index file it rebuilds all of them.
        for suffix in names.INDEX_SUFFIXES:
            swap = names.segment_file(base, suffix + names.SWAP)
            if swap in present:
                fs.unlink(os.path.join(path, swap))
        done.append(f"left {log} without indexes, because some index files were missing")
    replaced = {
        file.base_offset
        for file in files
        if file.base_offset is not None
        and file.kind in ("live", "deleted")
        and file.suffix in names.SEGMENT_SUFFIXES
        and left.bases[0] <= file.base_offset < left.end
    }
    directory = Directory(fs, path)
    directory.refresh()
    finish(directory, left.bases, left.end, replaced)
    return done


def _finish_lone_indexes(fs: FileSystem, path: str) -> list[str]:
    """Rename `.swap` files of indexes whose log already has its final name, and of snapshots. The `.swap` files of
    indexes without a log are removed, and also those of a log whose indexes a broker before 3.0 has rebuilt: they may
    not match the current log. Return a sentence for each action."""
    done = []
    files = named_files(fs, path)
    present = {file.name for file in files}
    lone = [file for file in files if file.kind == "swap" and file.base_offset is not None]
    rebuilt = {
        file.base_offset
        for file in lone
        if file.suffix in names.INDEX_SUFFIXES
        and file.name.removesuffix(names.SWAP) in present
        # An empty segment that a broker from 3.0 on put in place keeps the old indexes until they are replaced too.
        and (log := names.segment_file(file.base_offset or 0, names.LOG)) in present
        and fs.size(os.path.join(path, log))
    }
    for file in reversed(lone):
        assert file.base_offset is not None
        live = file.name.removesuffix(names.SWAP)
        if file.suffix in names.INDEX_SUFFIXES and file.base_offset in rebuilt:
            fs.unlink(os.path.join(path, file.name))
            done.append(f"removed {file.name}: a broker has rebuilt the indexes of its log")
        # A snapshot may be at the log end, where no segment begins.
        elif names.segment_file(file.base_offset, names.LOG) in present or file.suffix == names.SNAPSHOT:
            fs.rename(os.path.join(path, file.name), os.path.join(path, live))
            done.append(f"renamed {file.name} to {live}")
        else:
            fs.unlink(os.path.join(path, file.name))
            done.append(f"removed {file.name}: it has no log")
    return done


def _sweep(fs: FileSystem, path: str) -> list[str]:
    """Remove `.deleted` files, after the live index files and snapshots of removed segments; return a sentence for
    each."""
    done = []
    files = named_files(fs, path)
    live = logs(files, "live")
    newest = max(live, default=-1)
    removed = logs(files, "deleted") - live
    for file in files:
        base = file.base_offset
        if file.kind != "live" or base is None or base not in removed:
            continue
        # A snapshot at or above the last segment may be the snapshot at the log end: never remove it.
        if file.suffix in names.INDEX_SUFFIXES or (file.suffix == names.SNAPSHOT and base < newest):
            fs.unlink(os.path.join(path, file.name))
            done.append(f"removed {file.name}: its segment was replaced")
    if done:
        fs.fsync_dir(path)  # durable before the `.deleted` files, which identify these files, are removed
    # A `.deleted` without a number belongs neither to Kafka nor to keytail.
    return done + _remove(fs, path, [f for f in files if f.kind == "deleted" and f.base_offset is not None])


def _remove(fs: FileSystem, path: str, files: list[FileName]) -> list[str]:
    for file in files:
        fs.unlink(os.path.join(path, file.name))
    return [f"removed {file.name}" for file in files]
