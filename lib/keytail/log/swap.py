"""What replacing segments and recovering have in common: the way from committed `.swap` files to the final state.
SWAP.md beside this file has its order, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from keytail.format import names
from keytail.log.directory import Directory

NEEDED = (names.LOG, names.INDEX, names.TIME_INDEX)  # of every output


def finish(
    directory: Directory,
    outputs: Sequence[int],
    end: int,
    replaced: Iterable[int],
    unlink: Callable[[str], None] | None = None,
) -> None:
    """From committed `.log.swap` files to the final state; `replaced` are the bases of the sources.

    A recovery that knows the outputs only, a broker's or ours, keeps sources at or above `end`. Those must go
    in order, one after the other: what a later one deletes stays deleted only while the earlier ones are gone.
    """
    of_outputs = frozenset(outputs)
    bases = sorted({*outputs, *replaced})
    keeps_from = max(end, outputs[0] + 1)
    late = [base for base in bases if base >= keeps_from and base not in of_outputs]
    for base in bases:
        if base < keeps_from or base in of_outputs:
            set_aside(directory, base, names.SEGMENT_SUFFIXES)
    directory.fsync()
    for base in late:  # the log first, and alone: while it is live, its indexes must be
        set_aside(directory, base, (names.LOG,))
        directory.fsync()
        set_aside(directory, base, names.INDEX_SUFFIXES)
    # A broker deletes what lies between the `.log.swap` files that are left: ascending, and one after the
    # other, the final ones always lie below.
    for base in outputs:
        promote(directory, base, (names.LOG,))
        directory.fsync()
    # Only now the indexes: beside a `.log.swap`, an index with its final name counts as the source's.
    for base in outputs:
        promote(directory, base, names.INDEX_SUFFIXES)
    for file in directory.unfinished():
        if file.kind == "swap" and file.suffix == names.SNAPSHOT and file.base_offset is not None:
            promote(directory, file.base_offset, (names.SNAPSHOT,))
    for base in bases:
        snapshot = names.segment_file(base, names.SNAPSHOT)
        if base not in of_outputs and snapshot in directory:
            directory.unlink(snapshot)
    directory.fsync()
    for base in bases:
        for suffix in names.SEGMENT_SUFFIXES:
            deleted = names.segment_file(base, suffix + names.DELETED)
            if deleted in directory:
                directory.unlink(deleted, unlink)
    directory.fsync()


def set_aside(directory: Directory, base: int, suffixes: Iterable[str]) -> None:
    """Files of a source to `.deleted`."""
    for suffix in suffixes:
        live = names.segment_file(base, suffix)
        if live in directory:
            directory.rename(live, live + names.DELETED)


def promote(directory: Directory, base: int, suffixes: Iterable[str]) -> None:
    """`.swap` files of an output to their final names."""
    for suffix in suffixes:
        live = names.segment_file(base, suffix)
        if live + names.SWAP in directory:
            directory.rename(live + names.SWAP, live)
