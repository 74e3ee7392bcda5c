"""Determines the owner of the log dirs, and lets a process that was started as root become that user."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from keytail import acting_user
from keytail.acting_user import User, user_of
from keytail.console import print_message
from keytail.errors import Refused, UsageProblem
from keytail.format import names
from keytail.log.fs import FileSystem

_ONE_AT_A_TIME = (
    "Run keytail once for each owner, with only the directories of that owner. If a directory has the wrong owner, "
    "change it to the broker's user (chown)"
)


class Owner(NamedTuple):
    """The user id and the group id of the owner of `path`."""

    uid: int
    gid: int
    path: str


def work_as_owner(fs: FileSystem, log_dirs: Sequence[str], also_read: Sequence[str] = ()) -> None:
    """If the process was started as root, make the whole process work as the user that owns `log_dirs`, and print a
    message about this.

    Nothing changes for a process of another user, or if root owns the log dirs. `also_read` are directories that are
    only read; they may also belong to root. Raises UsageProblem if one of `log_dirs` does not exist, and Refused if
    there are several owners, if the owner changes during the call, if the owner cannot read a directory, or if the
    process cannot work as the owner.
    """
    if not acting_user.is_root():
        return
    before = {path: _uid(fs, path) for path in log_dirs}
    changed = [owner for path in log_dirs for owner in _owner_of_dir(fs, path)]
    read = [owner for path in also_read for owner in _owner_of_dir(fs, path)]
    _become(fs, one_owner(changed, read), (*log_dirs, *also_read))
    for path, uid in before.items():
        if uid is None:
            raise no_such_log_dir(path)
        if uid != _uid(fs, path):
            raise Refused(
                "the owner of the log dir changed while the run began",
                path=path,
                remedy="Find out what changed it, then run again",
                slug="owner-changed",
            )


def _uid(fs: FileSystem, path: str) -> int | None:
    """Return the user id of the owner, or None if the path does not exist."""
    try:
        return fs.stat(path).uid
    except (FileNotFoundError, NotADirectoryError):
        return None


def no_such_log_dir(path: str) -> UsageProblem:
    """Return the error for a log dir that does not exist."""
    return UsageProblem(
        "no such log dir",
        path=path,
        remedy="Check whether the directory is mounted, and compare its path with the broker's log.dirs",
        slug="no-such-log-dir",
    )


def work_as_owner_of_files(fs: FileSystem, paths: Sequence[str]) -> None:
    """If the process was started as root, make it work as the owner of files that are read. The process works as the
    owner of a file's directory, since that user could put a link there, or, in a directory of root, which other users
    may share, as the owner of the file."""
    if not acting_user.is_root():
        return
    found = [owner for path in paths for owner in _owner_of_file(fs, path)]
    _become(fs, one_owner((), found), ())


def owner_of(fs: FileSystem, log_dirs: Sequence[str]) -> User:
    """Return the user as which a process that only reads these log dirs should work: their owner if this process is
    root, and its own user if it is not. Raises Refused if there are several owners, or the owner has unknown groups."""
    if os.geteuid() != 0:
        return acting_user.current()
    owner = one_owner((), [owner for path in log_dirs for owner in _owner_of_dir(fs, path)])
    return acting_user.current() if owner is None else _user(owner)


def one_owner(changed: Iterable[Owner], read: Iterable[Owner]) -> Owner | None:
    """Return the user, other than root, that owns all items of `changed` and all items of `read` except those of root;
    None if root owns all items. Raises Refused if there are several such users."""
    changed = list(changed)
    others = [owner for owner in (*changed, *read) if owner.uid != 0]
    for owner in changed if others else ():
        if owner.uid != others[0].uid:
            raise _several(owner, others[0])
    for owner in others:
        if owner.uid != others[0].uid:
            raise _several(owner, others[0])
    return others[0] if others else None


def _several(item: Owner, other: Owner) -> Refused:
    return Refused(
        f"{item.path} belongs to {_name(item.uid)} and {other.path} to {_name(other.uid)}: if started as root, keytail "
        "works as the owner of the log dirs, which must be the same user for all",
        remedy=_ONE_AT_A_TIME,
        slug="several-owners",
    )


def _owner_of_dir(fs: FileSystem, path: str) -> Iterator[Owner]:
    """Yield the owner of a directory, if it exists. For a directory of root, yield the owners of the partitions and of
    `meta.properties` in it, or root if there are none."""
    try:
        facts = fs.stat(path)
        owner = Owner(facts.uid, facts.gid, path)
        if owner.uid != 0 or not facts.is_dir:
            yield owner
            return
        entries = fs.scan(path)
    except (FileNotFoundError, NotADirectoryError):
        return
    inside = {
        entry.uid: Owner(entry.uid, entry.gid, os.path.join(path, entry.name))
        for entry in entries
        if entry.name == names.META_PROPERTIES or (entry.is_dir and names.parse_partition_dir(entry.name) is not None)
    }
    yield from inside.values() or (owner,)


def _owner_of_file(fs: FileSystem, path: str) -> Iterator[Owner]:
    directory, name = os.path.split(os.path.abspath(path))
    try:
        facts = fs.stat(directory)
        if facts.uid != 0:
            yield Owner(facts.uid, facts.gid, directory)
            return
        yield from (Owner(item.uid, item.gid, path) for item in fs.scan(directory) if item.name == name)
    except (FileNotFoundError, NotADirectoryError):
        return


def _user(owner: Owner) -> User:
    user = user_of(owner.uid, owner.gid)
    if user.gid == 0 and user.groups == (0,):
        raise Refused(
            f"{_name(owner.uid)} owns the directory, its group is root's, and this system has no groups for that user",
            path=owner.path,
            remedy="Change the group of the directory to the broker's group (chgrp), or run as that user",
            slug="unknown-user-groups",
        )
    return user


def _become(fs: FileSystem, owner: Owner | None, directories: Sequence[str]) -> None:
    if acting_user.works_as_another_user():
        if owner is None or owner.uid != os.geteuid():
            own = Owner(os.geteuid(), os.getegid(), "the input that this run already reads")
            raise _several(owner or Owner(0, 0, next(iter(directories), "the file")), own)
        return
    if owner is None:
        return
    user = _user(owner)
    try:
        acting_user.become(user)
    except OSError as error:
        raise Refused(
            f"started as root, but this process cannot switch to {user}, the owner of the directory: {error.strerror}",
            path=owner.path,
            remedy=f"Run as {user}, or allow root to change its user (CAP_SETUID and CAP_SETGID)",
            slug="cannot-switch-user",
        ) from error
    print_message(f"keytail: started as root; working as {user}, the owner of {owner.path}")
    for path in directories:
        refuse_unreachable(fs, path, user)


def refuse_unreachable(fs: FileSystem, path: str, user: User) -> None:
    """Raise Refused if the user that this process works as cannot list the directory `path`."""
    try:
        fs.scan_names(path)
    except PermissionError as error:
        raise Refused(
            f"{user} cannot read this directory",
            path=path,
            remedy="Allow that user to search all directories above it (chmod o+x or setfacl) and to read it",
            slug="unreadable-directory",
        ) from error
    except OSError:  # the caller reports this error
        return


def _name(uid: int) -> str:
    return str(User(uid, 0, ()))
