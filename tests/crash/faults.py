"""The faults of each file operation, and the selection of those that are tried. A fault makes one operation fail, or
also all later ones with the same cause: a disk remains full, and a file system remains read-only.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# SHORT_WRITE writes half of the data and fails. PARTIAL_WRITE writes half, and the caller writes the rest.
SHORT_WRITE, PARTIAL_WRITE = "half is written, then ENOSPC", "half is written at a time"
# PARTIAL_READ returns half of the data, and the caller reads the rest. CUT returns half, and then the end of the file.
PARTIAL_READ, CUT = "half is read at a time", "the file was truncated"
PARTIAL = {PARTIAL_WRITE, PARTIAL_READ}

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
    "unreadable": ("EIO", "EACCES", "EMFILE"),
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
# The space of written data is already allocated, so that it can be synced on a full disk.
_NOT_FULL = {"fsync"}


@dataclass(frozen=True)
class Fault:
    """A fault. `kind` is the name of an errno, or SHORT_WRITE, PARTIAL_WRITE, PARTIAL_READ, or CUT."""

    kind: str
    lasting: bool = False

    def __str__(self) -> str:
        return f"{self.kind}{' from then on' if self.lasting else ''}"

    def fails(self, operation: str) -> bool:
        """Return whether a lasting fault also makes a later operation of this kind fail."""
        kinds = FAULTS_OF.get(operation, ())
        return self.kind in kinds and not (self.kind == "ENOSPC" and operation in _NOT_FULL)

    @property
    def may_keep_scratch(self) -> bool:
        """Return whether the fault may prevent the removal of files."""
        return self.lasting and self.kind in ("EIO", "EACCES", "EROFS", "EMFILE")

    def error(self) -> OSError:
        number = getattr(errno, self.kind if self.kind != SHORT_WRITE else "ENOSPC")
        return OSError(number, os.strerror(number))


def faults_of(operation: str) -> list[Fault]:
    once = [Fault(kind) for kind in FAULTS_OF[operation]]
    lasting = [Fault(kind, True) for kind in LASTING]
    return once + [fault for fault in lasting if fault.fails(operation)]


def chosen(operations: Sequence[str], share: float, rng: random.Random) -> Iterator[tuple[int, Fault]]:
    """Yield (number, fault) for a `share` of the faults of each operation, rounded randomly; 1.0 selects all."""
    for number, operation in enumerate(operations):
        faults = faults_of(operation)
        wanted = share * len(faults)
        count = int(wanted) + (rng.random() < wanted % 1)
        for fault in sorted(rng.sample(faults, count), key=faults.index):
            yield number, fault
