"""Reads attributes of files and directories by their descriptors: names, sizes, times, owners, modes, labels."""

from __future__ import annotations

import contextlib
import errno
import os
import stat as stat_bits
from dataclasses import dataclass
from typing import Any, NamedTuple

from keytail.acting_user import User, current

ACCESS_ACL = "system.posix_acl_access"
SECURITY_LABELS = ("security.selinux", "security.SMACK64")
KEPT_ATTRIBUTES = (ACCESS_ACL, *SECURITY_LABELS)

# Errors that file systems return if they have no extended attributes, or if these cannot be read.
_NO_ATTRIBUTES = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENODATA, errno.ENOSYS}


@dataclass(frozen=True, slots=True)
class DirEntry:
    """One name in a directory, as reported by lstat (a symlink is neither regular nor a directory)."""

    name: str
    is_dir: bool
    size_bytes: int
    mtime_ns: int
    inode: int
    is_regular: bool
    is_symlink: bool = False
    uid: int = -1
    gid: int = -1
    mode: int = 0


class DirName(NamedTuple):
    """One name in a directory and its file type, as reported by lstat."""

    name: str
    is_dir: bool
    is_symlink: bool


@dataclass(frozen=True, slots=True)
class FileStat:
    """The attributes of a file or directory, including the attributes that a replacement of it must get."""

    path: str
    size_bytes: int
    mtime_ns: int
    uid: int
    gid: int
    mode: int
    inode: int
    device: int
    is_dir: bool
    is_regular: bool
    attributes: tuple[tuple[str, bytes], ...] = ()
    links: int = 1  # the number of hard links


@dataclass(frozen=True, slots=True)
class Sizes:
    """The names in a directory, unsorted: `sized` are regular files with their size in bytes and modification time in
    ns; `regular` are regular files for which size and time were not requested; `others` are all other names."""

    sized: list[tuple[str, int, int]]
    regular: list[str]
    others: list[str]


def scan(fd: int) -> list[DirEntry]:
    found = []
    with os.scandir(fd) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                found.append(_dir_entry(entry.name, entry.stat(follow_symlinks=False)))
    return found


def scan_names(fd: int) -> list[DirName]:
    with os.scandir(fd) as entries:
        return [DirName(e.name, e.is_dir(follow_symlinks=False), e.is_symlink()) for e in entries]


def scan_sizes(fd: int, suffix: str) -> Sizes:
    sized: list[tuple[str, int, int]] = []
    regular: list[str] = []
    others: list[str] = []
    length = len(suffix)
    with os.scandir(fd) as entries:
        for entry in entries:
            name = entry.name
            if not entry.is_file(follow_symlinks=False):
                others.append(name)
            elif name[-length:] == suffix:
                try:
                    facts = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                sized.append((name, facts.st_size, facts.st_mtime_ns))
            else:
                regular.append(name)
    return Sizes(sized, regular, others)


def _dir_entry(name: str, facts: os.stat_result) -> DirEntry:
    return DirEntry(
        name=name,
        is_dir=stat_bits.S_ISDIR(facts.st_mode),
        size_bytes=facts.st_size,
        mtime_ns=facts.st_mtime_ns,
        inode=facts.st_ino,
        is_regular=stat_bits.S_ISREG(facts.st_mode),
        is_symlink=stat_bits.S_ISLNK(facts.st_mode),
        uid=facts.st_uid,
        gid=facts.st_gid,
        mode=stat_bits.S_IMODE(facts.st_mode),
    )


def file_stat(path: str, facts: os.stat_result, attributes: tuple[tuple[str, bytes], ...]) -> FileStat:
    return FileStat(
        path=path,
        size_bytes=facts.st_size,
        mtime_ns=facts.st_mtime_ns,
        uid=facts.st_uid,
        gid=facts.st_gid,
        mode=stat_bits.S_IMODE(facts.st_mode),
        inode=facts.st_ino,
        device=facts.st_dev,
        is_dir=stat_bits.S_ISDIR(facts.st_mode),
        is_regular=stat_bits.S_ISREG(facts.st_mode),
        attributes=attributes,
        links=facts.st_nlink,
    )


def attributes_of(target: str | int) -> tuple[tuple[str, bytes], ...]:
    """Return the existing ACL and security labels of a path or descriptor."""
    try:
        names = os.listxattr(target)
    except OSError as error:
        if error.errno in _NO_ATTRIBUTES:
            return ()
        raise
    return tuple((name, os.getxattr(target, name)) for name in KEPT_ATTRIBUTES if name in names)


def owner_and_user(path: Any) -> str:
    """Return the end of an access error message: the file's owner and mode, and the user as which this process works.

    If the file is absent or cannot be reached, the nearest directory above it is described. The result may be empty.
    """
    at = path if isinstance(path, str) else ""
    while at and at != os.path.dirname(at):
        try:
            found = os.lstat(at)
        except OSError:
            at = os.path.dirname(at)
            continue
        what = "it" if at == path else f"the directory {os.path.basename(at)}"
        owner = User(found.st_uid, found.st_gid, ())
        return f": {what} belongs to {owner}, mode {found.st_mode & 0o7777:04o}, and keytail works as {current()}"
    return ""
