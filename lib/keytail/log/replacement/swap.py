"""Completes a replacement whose `.swap` files are committed; used by replacement and recovery. log/SWAP.md gives the
order of the steps and the reasons."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from keytail.format import names
from keytail.format.names import FileName
from keytail.log.fs import NO_LINKS
from keytail.log.replacement.directory import Directory

NEEDED = (names.LOG, names.INDEX, names.TIME_INDEX)  # the files that every output has


def finish(
    directory: Directory,
    outputs: Sequence[int],
    end: int,
    replaced: Iterable[int],
    unlink: Callable[[str], None] | None = None,
) -> None:
    """Complete a replacement whose `.swap` files are committed; `outputs` and `replaced` are the base offsets of the
    outputs and the sources, `end` is the highest next offset of the outputs.

    A recovery by a broker or by keytail knows only the outputs, and retains sources at or above `end`. Therefore
    sources at or above `end` are set aside in ascending order, one by one: a tombstone in a later source must not be
    removed before the records that it deletes.
    """
    bases = sorted({*outputs, *replaced})
    _set_sources_aside(directory, bases, outputs, end)
    if _link_final_names(directory, outputs):
        _remove_swap_names(directory, outputs)
    else:
        _rename_to_final_names(directory, outputs)
    for base in bases:
        snapshot = names.segment_file(base, names.SNAPSHOT)
        if base not in outputs and snapshot in directory:
            directory.unlink(snapshot)
    directory.fsync()
    guard = names.guard_file(outputs[0])
    if guard in directory:
        directory.unlink(guard)
    for base in bases:
        for suffix in names.SEGMENT_SUFFIXES:
            deleted = names.segment_file(base, suffix + names.DELETED)
            if deleted in directory:
                directory.unlink(deleted, unlink)
    directory.fsync()


def _set_sources_aside(directory: Directory, bases: Sequence[int], outputs: Sequence[int], end: int) -> None:
    keeps_from = max(end, outputs[0] + 1)
    late = [base for base in bases if base >= keeps_from and base not in outputs]
    for base in bases:
        if base not in late:
            set_aside(directory, base, names.SEGMENT_SUFFIXES)
    directory.fsync()
    for base in late:  # the log is renamed first: while a log is live, its indexes must be live, too
        set_aside(directory, base, (names.LOG,))
        directory.fsync()
        set_aside(directory, base, names.INDEX_SUFFIXES)


def set_aside(directory: Directory, base: int, suffixes: Iterable[str]) -> None:
    """Rename files of a source to `.deleted`. If a `.deleted` file already exists, an interrupted run has given the
    live name to the output; in this case the live name is removed."""
    for suffix in suffixes:
        live = names.segment_file(base, suffix)
        if live + names.DELETED in directory and live in directory:
            directory.unlink(live)
        elif live in directory:
            directory.rename(live, live + names.DELETED)


def _link_final_names(directory: Directory, outputs: Sequence[int]) -> bool:
    """Give each output its final names beside its `.swap` names, by hard links or copies, durably. Return False, with
    nothing changed, if a hard link cannot be created (NO_LINKS).

    A broker that finds both names removes the final names within the offset range of the outputs and renames the
    `.swap` files. Files of an empty output, and snapshots, may be outside of that range. These files are copied,
    because renaming a link to a file over another link to it has no effect.
    """
    given: list[str] = []
    for file in _swap_files(directory, outputs):
        live = file.name.removesuffix(names.SWAP)
        assert file.base_offset is not None
        log = names.segment_file(file.base_offset, names.LOG + names.SWAP)
        if file.suffix == names.SNAPSHOT or directory.size(log) == 0:
            directory.copy(file.name, live)
        else:
            try:
                directory.link(file.name, live)
            except OSError as error:
                if error.errno not in NO_LINKS:
                    raise
                for name in given:
                    directory.unlink(name)
                # The removal must be durable: beside a final `.log`, recovery would treat index files as rebuilt by a
                # broker.
                directory.fsync()
                return False
        given.append(live)
    directory.fsync()
    return True


def _remove_swap_names(directory: Directory, outputs: Sequence[int]) -> None:
    """Create a guard, then remove the `.swap` names, the `.log.swap` names last: a broker before 3.0 removes other
    `.swap` files only together with their `.log.swap`."""
    swaps = _swap_files(directory, outputs)
    log = names.segment_file(outputs[0], names.LOG)
    directory.make_empty(names.guard_file(outputs[0]), directory.stat(log))
    directory.fsync()
    for is_log in (False, True):
        for file in swaps:
            if (file.suffix == names.LOG) == is_log:
                directory.unlink(file.name)
        if not is_log:
            directory.fsync()


def _rename_to_final_names(directory: Directory, outputs: Sequence[int]) -> None:
    """Rename the `.swap` files, on a file system without hard links. A broker before 3.0 that starts between the
    renames leaves `.index.swap` files (SWAP.md)."""
    # In ascending order: a broker deletes everything between the remaining `.log.swap` files, so files with final names
    # must always be below these `.log.swap` files.
    for base in outputs:
        _promote(directory, names.segment_file(base, names.LOG + names.SWAP))
        directory.fsync()
    # Indexes after logs: beside a `.log.swap`, an index with its final name would be treated as an index of the source.
    for file in _swap_files(directory, outputs):
        _promote(directory, file.name)


def _promote(directory: Directory, swap: str) -> None:
    if swap in directory:
        directory.rename(swap, swap.removesuffix(names.SWAP))


def _swap_files(directory: Directory, outputs: Sequence[int]) -> list[FileName]:
    """Return the `.swap` files of these outputs and of all snapshots."""
    return [
        file
        for file in directory.unfinished()
        if file.kind == "swap" and (file.base_offset in outputs or file.suffix == names.SNAPSHOT)
    ]
