"""Checks that all hosts of a run see the same files at the same paths.

Another host may have different files at the same path: no files, if a mount is missing; an older copy; or a copy with
the same names, sizes and times, into which a task would write. Tasks that clean or index check each of their sources
(log/partition.refuse_changed); this module has the other checks.
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

_MOUNT = "Mount the log dirs on that host as on all other hosts, or exclude that host from the run"


@dataclass(frozen=True)
class SeenLogs:
    """A summary of a partition's `.log` files as one host lists them."""

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
    """Raise Refused if this host does not list the same segments as the driver (`by_driver`)."""
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
        more = "; names, sizes or modification times differ" if alike else ""
        raise Refused(
            f"two hosts have different segments: {here} on host {host}, {by_driver} on the driver's host{more}",
            path=partition_path,
            remedy="Make sure that no process writes to the directory, and that every host sees the same files",
            slug="segments-differ-on-host",
        )


def refuse_unseen(fs: FileSystem, directory: str, written: Iterable[str], host: str) -> None:
    """Raise Refused if a file that a task on `host` wrote to `directory` does not exist on this host: then the two
    hosts have different directories at this path."""
    for name in written:
        if not fs.exists(os.path.join(directory, name)):
            raise Refused(
                f"host {host} wrote {name}, which does not exist on this host: the hosts have different files at this "
                "path",
                path=directory,
                remedy=f"On host {host}, remove the files there whose names end in {names.SCRATCH}. {_MOUNT}",
                slug="task-output-missing",
            )


def refuse_network_here(fs: FileSystem, log_dir: str) -> None:
    """Raise Refused if the log dir's file system is not known to be local on this host, even if it is on the driver's:
    a driver on the storage server sees a local file system, but brokers on other hosts can have the log dir open."""
    refuse_shared_storage(fs, [log_dir], os.uname().nodename)
