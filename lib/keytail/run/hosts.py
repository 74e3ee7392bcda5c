"""Checks that all hosts of a run see the same files at the same paths.

Another host may have other files at a path: none, if a mount is missing; an older copy; or a copy with the same names,
sizes and times, into which it would write. Cleaning and index tasks check each of their sources
(log/partition.refuse_changed); the remaining checks are here.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass

from keytail.errors import Refused
from keytail.format import names
from keytail.log.fs import FileSystem
from keytail.run.storage import refuse_shared_storage

_MOUNT = "Mount the log dirs on that host as on all others, or exclude it from the run"


@dataclass(frozen=True)
class SeenLogs:
    """A summary of the listing of a partition's `.log` files on one host."""

    segments: int
    size_bytes: int
    digest: bytes  # digest of names, sizes and modification times

    def __str__(self) -> str:
        return f"{self.segments} segments of {self.size_bytes} bytes"


def seen_logs(fs: FileSystem, partition_path: str) -> SeenLogs:
    """Return the summary of the `.log` files in a partition directory. Raises OSError if there is no such directory."""
    logs = sorted(
        (entry.name, entry.size_bytes, entry.mtime_ns)
        for entry in fs.scan(partition_path)
        if entry.is_regular and entry.name.endswith(names.LOG)
    )
    digest = hashlib.blake2b(repr(logs).encode(), digest_size=16).digest()
    return SeenLogs(len(logs), sum(size for _, size, _ in logs), digest)


def refuse_other_logs(fs: FileSystem, partition_path: str, by_driver: SeenLogs) -> None:
    """Raise Refused on a host that sees other segments than the driver did."""
    host = os.uname().nodename
    try:
        here = seen_logs(fs, partition_path)
    except FileNotFoundError as missing:
        raise Refused(
            f"the partition's directory does not exist on host {host}",
            path=partition_path,
            remedy=_MOUNT,
            slug="partition-missing-on-host",
        ) from missing
    if here != by_driver:
        alike = (here.segments, here.size_bytes) == (by_driver.segments, by_driver.size_bytes)
        more = ", with other names, sizes or modification times" if alike else ""
        raise Refused(
            f"the segments differ from those on the driver's host: {here} on host {host}, {by_driver} there{more}",
            path=partition_path,
            remedy="Make sure that nothing writes to the directory and that every host sees the same files",
            slug="segments-differ-on-host",
        )


def refuse_unseen(fs: FileSystem, directory: str, written: Iterable[str], host: str) -> None:
    """Raise Refused if a file that a task on `host` wrote does not exist here: that host has another directory at this
    path."""
    for name in written:
        if not fs.exists(os.path.join(directory, name)):
            raise Refused(
                f"host {host} wrote {name}, but this host does not have it: they have different files at this path",
                path=directory,
                remedy=f"On host {host}, remove the files there whose names end in {names.SCRATCH}. {_MOUNT}",
                slug="task-output-missing",
            )


def refuse_network_here(fs: FileSystem, log_dir: str) -> None:
    """Raise Refused on a host that accesses the log dir over the network, whatever type of file system the driver sees:
    on the storage server the file system appears local, but brokers on other hosts can still have the log dir open."""
    refuse_shared_storage(fs, [log_dir], os.uname().nodename)
