"""Checks the file names in a partition directory, and the files' owners and modes; reads no file.

format/NAMES.md describes what a broker does with a name, log/SWAP.md what a broker does with leftovers of a
replacement.
"""

from __future__ import annotations

import grp
import pwd
from collections.abc import Iterable
from typing import Any

from keytail.format import names
from keytail.log.fs import DirEntry, FileStat
from keytail.log.partition import MAX_LOG_BYTES
from keytail.verify.scope import Scope

_LEFTOVERS = {"cleaned", "deleted", "scratch"}


def check_names(scope: Scope) -> None:
    """Add findings about leftovers, fatal names, orphaned indexes, files that are not regular or too large, and a
    directory without segments.

    The files of a prepared compaction are not leftovers: the record of the preparation has the id of their run.
    """
    parsed = [names.parse_file_name(name) for name in sorted(scope.files)]
    prepared = {name.run_id for name in parsed if name.suffix == names.PREPARED}
    for name in parsed:
        if name.kind in _LEFTOVERS and not (name.kind == "scratch" and name.run_id in prepared):
            scope.findings.add(f"leftover-{name.kind}", name.name, offset=name.base_offset)
        elif name.kind == "fatal":
            scope.findings.add("fatal-name", name.name)
        if name.kind not in ("other", "scratch"):
            entry = scope.files[name.name]
            if not entry.is_regular:
                scope.findings.add("not-regular", entry.name)
            elif name.suffix == names.LOG and entry.size_bytes > MAX_LOG_BYTES:
                scope.findings.add("too-large", entry.name, size=entry.size_bytes)
    _check_swaps(scope, parsed)
    if scope.live:  # a file may have vanished while the directory was listed
        return
    for name in parsed:
        is_index = name.kind == "live" and name.suffix not in (names.LOG, names.SNAPSHOT)
        if is_index and name.base_offset not in scope.bases:
            scope.findings.add("orphan", name.name, offset=name.base_offset)
    if not scope.bases:
        scope.findings.add("no-segment", "")


def _check_swaps(scope: Scope, parsed: Iterable[names.FileName]) -> None:
    """Add findings about `.swap` files, which are complete unless a `.cleaned` file has the same or a lower offset."""
    parsed = list(parsed)
    guard = min((n.base_offset for n in parsed if n.kind == "cleaned" and n.base_offset is not None), default=None)
    covered = {n.base_offset for n in parsed if n.kind == "live" and n.suffix == names.LOG}
    for name in parsed:
        if name.kind != "swap" or name.base_offset is None:
            continue
        if guard is None or guard > name.base_offset:
            scope.findings.add("leftover-swap", name.name, offset=name.base_offset)
        else:
            kind = "leftover-swap-void" if any(b is not None and b <= name.base_offset for b in covered) else (
                "leftover-swap-gone"
            )  # fmt: skip
            scope.findings.add(kind, name.name, offset=name.base_offset, guard=guard)


def check_owners(scope: Scope) -> None:
    """Add findings about files that the owner of the directory cannot read and write, or that have another owner. A
    broker is assumed to run as the owner of the directory.

    Other differences in the mode are ignored: the umask of the broker may have changed. There is one finding for all
    files with the same owner and mode.
    """
    try:
        directory = scope.fs.stat(scope.path)
    except FileNotFoundError:
        return
    seen = set()
    for entry in sorted(scope.files.values(), key=lambda entry: entry.name):
        if not entry.is_regular or (entry.uid, entry.gid, entry.mode) in seen:
            continue
        facts: dict[str, Any] = {"owner": _owner(entry.uid, entry.gid), "user": _owner(directory.uid, directory.gid)}
        if not _may_use(directory, entry):
            scope.findings.add("access", entry.name, mode=f"{entry.mode:04o}", **facts)
        elif entry.uid != directory.uid:
            scope.findings.add("owner", entry.name, **facts)
        seen.add((entry.uid, entry.gid, entry.mode))


def _may_use(directory: FileStat, entry: DirEntry) -> bool:
    """Return whether the file's mode lets the directory's owner read and write it."""
    if directory.uid == 0:
        return True
    if entry.uid == directory.uid:
        return entry.mode & 0o600 == 0o600
    if entry.gid == directory.gid:
        return entry.mode & 0o060 == 0o060
    return entry.mode & 0o006 == 0o006


def _owner(uid: int, gid: int) -> str:
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    try:
        return f"{user}:{grp.getgrgid(gid).gr_name}"
    except KeyError:
        return f"{user}:{gid}"
