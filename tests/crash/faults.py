"""What can go wrong with one operation of a file system, and which of it is tried.

A fault fails one operation, or that one and from then on all that the same cause would fail: a disk stays full, a
file system that went read-only stays so.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# Writes the half, then fails; writes the half and is asked for the rest.
SHORT_WRITE, PARTIAL_WRITE = "half is written, then ENOSPC", "half is written at a time"
# Gives the half and is asked for the rest; gives the half, and the file ends there: someone cut it.
PARTIAL_READ, CUT = "half is read at a time", "the file was cut"
GOES_ON = {PARTIAL_WRITE, PARTIAL_READ}

FAULTS_OF: dict[str, tuple[str, ...]] = {
    "create": ("ENOSPC", "EIO", "EACCES", "EROFS", "EMFILE"),
    "mkdir": ("ENOSPC", "EIO", "EACCES", "EROFS"),
    "write": ("ENOSPC", "EIO", SHORT_WRITE, PARTIAL_WRITE),
    "write_at": ("ENOSPC", "EIO", SHORT_WRITE, PARTIAL_WRITE),
    "truncate": ("EIO",),
    "fsync": ("EIO", "ENOSPC"),
    "fsync_dir": ("EIO", "EACCES", "EMFILE"),
    "rename": ("ENOSPC", "EIO", "EACCES", "EROFS"),
    "link": ("ENOSPC", "EIO", "EACCES", "EROFS"),
    "unlink": ("EIO", "EACCES", "EROFS"),
    "rmdir": ("EIO", "EACCES", "EROFS"),
    "set_mtime_ns": ("EIO", "EACCES", "EROFS"),
    "scan": ("EIO", "EACCES", "EMFILE"),
    "stat": ("EIO", "EACCES"),
    "exists": ("EIO", "EACCES"),
    "open_read": ("EIO", "EACCES", "EMFILE"),
    "open_write": ("EIO", "EACCES", "EROFS", "EMFILE"),
    "map_read": ("EIO", "EACCES"),
    "read_into": ("EIO", PARTIAL_READ, CUT),
    "read_bytes": ("EIO", CUT),
    "fd_stat": ("EIO",),
    "close": ("EIO",),
    "free_bytes": ("EIO",),
}
LASTING = ("ENOSPC", "EIO", "EACCES", "EROFS", "EMFILE")
# Room that was given stays: what was written may be synced when a disk is full.
_NOT_FULL = {"fsync"}


@dataclass(frozen=True)
class Fault:
    """`kind` is the name of an errno, or one of the sentences above."""

    kind: str
    lasting: bool = False

    def __str__(self) -> str:
        return f"{self.kind}{' from then on' if self.lasting else ''}"

    def fails(self, operation: str) -> bool:
        """Of a lasting fault: whether it fails such an operation later, too."""
        kinds = FAULTS_OF.get(operation, ())
        return self.kind in kinds and not (self.kind == "ENOSPC" and operation in _NOT_FULL)

    @property
    def may_keep_scratch(self) -> bool:
        """Whether it may keep anyone from removing files."""
        return self.lasting and self.kind in ("EIO", "EACCES", "EROFS", "EMFILE")

    def error(self) -> OSError:
        number = getattr(errno, self.kind if self.kind != SHORT_WRITE else "ENOSPC")
        return OSError(number, os.strerror(number))


def faults_of(operation: str) -> list[Fault]:
    once = [Fault(kind) for kind in FAULTS_OF[operation]]
    lasting = [Fault(kind, True) for kind in LASTING]
    return once + [fault for fault in lasting if fault.fails(operation)]


def chosen(operations: Sequence[str], share: float, rng: random.Random) -> Iterator[tuple[int, Fault]]:
    """Of each operation by its number `share` of its faults (1.0: all; a part of one is one by that chance)."""
    for number, operation in enumerate(operations):
        faults = faults_of(operation)
        wanted = share * len(faults)
        count = int(wanted) + (rng.random() < wanted % 1)
        for fault in sorted(rng.sample(faults, count), key=faults.index):
            yield number, fault
