"""What replacing segments and recovering have in common: the files of a partition directory by what their names say,
and the way from committed `.swap` files to the final state. SWAP.md beside this file has its order, and why."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence

from keytail.errors import Refused
from keytail.format import names
from keytail.format.names import FileName
from keytail.log.fs import FileSystem

NEEDED = (names.LOG, names.INDEX, names.TIME_INDEX)  # of every output


def finish(
    fs: FileSystem,
    path: str,
    outputs: Sequence[int],
    end: int,
    replaced: Iterable[int],
    unlink: Callable[[str], None] | None = None,
) -> None:
    """From committed `.log.swap` files to the final state; `replaced` are the bases of the sources.

    A recovery that knows the outputs only, a broker's or ours, keeps sources at or above `end`. Those must go
    in order, one after the other: what a later one deletes stays deleted only while the earlier ones are gone.
    """
    there = {entry.name for entry in fs.scan(path)}
    bases = sorted({*outputs, *replaced})
    late = [base for base in bases if base >= max(end, outputs[0] + 1) and base not in outputs]
    for base in bases:
        if base not in late:
            set_aside(fs, path, base, there, names.SEGMENT_SUFFIXES)
    fs.fsync_dir(path)
    for base in late:  # the log first, and alone: while it is live, its indexes must be
        set_aside(fs, path, base, there, (names.LOG,))
        fs.fsync_dir(path)
        set_aside(fs, path, base, there, names.INDEX_SUFFIXES)
    # A broker deletes what lies between the `.log.swap` files that are left: ascending, and one after the
    # other, the final ones always lie below.
    for base in outputs:
        promote(fs, path, base, there, (names.LOG,))
        fs.fsync_dir(path)
    # Only now the indexes: beside a `.log.swap`, an index with its final name counts as the source's.
    for base in outputs:
        promote(fs, path, base, there, names.INDEX_SUFFIXES)
    for name in sorted(there):
        file = names.parse_file_name(name)
        if file.kind == "swap" and file.suffix == names.SNAPSHOT and file.base_offset is not None:
            promote(fs, path, file.base_offset, there, (names.SNAPSHOT,))
    for base in bases:
        snapshot = names.segment_file(base, names.SNAPSHOT)
        if base not in outputs and snapshot in there:
            fs.unlink(os.path.join(path, snapshot))
    fs.fsync_dir(path)
    for base in bases:
        for suffix in names.SEGMENT_SUFFIXES:
            deleted = names.segment_file(base, suffix + names.DELETED)
            if deleted in there:
                (unlink or fs.unlink)(os.path.join(path, deleted))
    fs.fsync_dir(path)


def set_aside(fs: FileSystem, path: str, base: int, there: set[str], suffixes: Iterable[str]) -> None:
    """Files of a source to `.deleted`."""
    for suffix in suffixes:
        live = names.segment_file(base, suffix)
        if live in there:
            fs.rename(os.path.join(path, live), os.path.join(path, live + names.DELETED))
            there.add(live + names.DELETED)


def promote(fs: FileSystem, path: str, base: int, there: set[str], suffixes: Iterable[str]) -> None:
    """`.swap` files of an output to their final names."""
    for suffix in suffixes:
        live = names.segment_file(base, suffix)
        if live + names.SWAP in there:
            fs.rename(os.path.join(path, live + names.SWAP), os.path.join(path, live))


def named_files(fs: FileSystem, path: str) -> list[FileName]:
    """The files of the directory whose names mean something, in order."""
    found = []
    for entry in sorted(fs.scan(path), key=lambda e: e.name):
        parsed = names.parse_file_name(entry.name)
        if parsed.kind != "other" and not entry.is_regular:
            raise Refused(
                "not a regular file", path=os.path.join(path, entry.name), remedy="Move it away, then run again"
            )
        found.append(parsed)
    return found


def refuse_fatal(files: list[FileName], path: str) -> None:
    for file in files:
        if file.kind == "fatal":
            raise Refused(
                "a name that no broker writes, and on which none starts well",
                path=os.path.join(path, file.name),
                remedy="Find out what it is, and move it out of the log dir",
            )


def logs(files: list[FileName], kind: str) -> set[int]:
    """Bases of the `.log` files in this stage."""
    return {f.base_offset for f in files if f.kind == kind and f.suffix == names.LOG and f.base_offset is not None}
