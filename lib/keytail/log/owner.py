"""Whose the log dirs are, and how a process that was started as root becomes that user before it touches them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, NoReturn

from keytail import acting_user
from keytail.acting_user import User, user_of
from keytail.errors import Refused, UsageProblem
from keytail.format import names
from keytail.log.fs import FileSystem
from keytail.telling import say

_ONE_AT_A_TIME = (
    "Run keytail once for each owner, with the directories of that owner alone. If a directory has another owner than "
    "the broker by mistake, give it to the broker's user (chown)"
)


class Owner(NamedTuple):
    """Numbers of the user and group that own `path`."""

    uid: int
    gid: int
    path: str


def work_as_owner(fs: FileSystem, log_dirs: Sequence[str], also_read: Sequence[str] = ()) -> None:
    """Started as root, work as the user that owns `log_dirs`, in all of this process, and say so.

    Nothing changes for any other caller, and where root owns them. Of `also_read`, directories that are only read, some
    may be root's. UsageProblem for one of `log_dirs` that does not exist; others are left to the caller. Refused
    where there are several owners, or where the owner cannot read a directory.
    """
    if not acting_user.is_root():
        return
    before = {path: _uid(fs, path) for path in log_dirs}
    changed = [owner for path in log_dirs for owner in _owner_of_dir(fs, path)]
    read = [owner for path in also_read for owner in _owner_of_dir(fs, path)]
    _become(one_owner(changed, read), (*log_dirs, *also_read))
    for path, uid in before.items():
        if uid is None or uid != _uid(fs, path):
            _refuse_absent(path)


def _uid(fs: FileSystem, path: str) -> int | None:
    """The owner's; None where there is nothing."""
    try:
        return fs.stat(path).uid
    except (FileNotFoundError, NotADirectoryError):
        return None


def _refuse_absent(path: str) -> NoReturn:
    """Whose it is was not known when it was asked for: it may be there the next moment, and another user's."""
    raise UsageProblem("no such log dir", path=path, remedy="Is it mounted? The broker's log.dirs names them")


def work_as_owner_of_files(fs: FileSystem, paths: Sequence[str]) -> None:
    """As `work_as_owner`, of files that are read, by the directories that they are in: whoever owns one of these may
    have put a link there. In a directory of root's, which others may share, the name's own owner counts."""
    if not acting_user.is_root():
        return
    found = [owner for path in paths for owner in _owner_of_file(fs, path)]
    _become(one_owner((), found), ())


def owner_of(fs: FileSystem, log_dirs: Sequence[str]) -> User:
    """The user that a process should work as that only reads these log dirs: their owner where this process is root,
    else its own. Refused where there are several."""
    if os.geteuid() != 0:
        return acting_user.current()
    owner = one_owner((), [owner for path in log_dirs for owner in _owner_of_dir(fs, path)])
    return acting_user.current() if owner is None else _user(owner)


def one_owner(changed: Iterable[Owner], read: Iterable[Owner]) -> Owner | None:
    """The one user other than root that owns all of `changed` and, beside root, of `read`; None: root owns all.
    Refused where there are several."""
    changed = list(changed)
    others = [owner for owner in (*changed, *read) if owner.uid != 0]
    for owner in changed if others else ():
        if owner.uid != others[0].uid:
            raise _several(owner, others[0])
    for owner in others:
        if owner.uid != others[0].uid:
            raise _several(owner, others[0])
    return others[0] if others else None


def _several(one: Owner, other: Owner) -> Refused:
    return Refused(
        f"{one.path} belongs to {_name(one.uid)} and {other.path} to {_name(other.uid)}: started as root, keytail "
        "works as the owner of the log dirs, which must be one user",
        remedy=_ONE_AT_A_TIME,
    )


def _owner_of_dir(fs: FileSystem, path: str) -> Iterator[Owner]:
    """None where it does not exist. Of a directory of root's the owner of the partitions in it."""
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
        yield from (Owner(one.uid, one.gid, path) for one in fs.scan(directory) if one.name == name)
    except (FileNotFoundError, NotADirectoryError):
        return


def _user(owner: Owner) -> User:
    user = user_of(owner.uid, owner.gid)
    if user.gid == 0 and user.groups == (0,):
        raise Refused(
            f"{_name(owner.uid)} owns the directory, which belongs to root's group, and this system does not know that "
            "user's own groups",
            path=owner.path,
            remedy="Give the directory to the group that the broker runs with (chgrp), or run as that user",
        )
    return user


def _become(owner: Owner | None, directories: Sequence[str]) -> None:
    if acting_user.is_another():
        if owner is None or owner.uid != os.geteuid():
            mine = Owner(os.geteuid(), os.getegid(), "what this run reads already")
            raise _several(owner or Owner(0, 0, next(iter(directories), "the file")), mine)
        return
    if owner is None:
        return
    user = _user(owner)
    try:
        acting_user.become(user)
    except OSError as error:
        raise Refused(
            f"started as root, but this process may not become {user}, who owns the directory: {error.strerror}",
            path=owner.path,
            remedy=f"Run as {user}, or let root change its user (CAP_SETUID and CAP_SETGID)",
        ) from error
    say(f"keytail: started as root; working as {user}, the owner of {owner.path}")
    for path in directories:
        refuse_unreachable(path, user)


def refuse_unreachable(path: str, user: User) -> None:
    """Refused where the user that this process works as cannot list the directory `path`."""
    try:
        os.scandir(path).close()
    except PermissionError as error:
        raise Refused(
            f"{user} cannot read this directory",
            path=path,
            remedy="Let that user search all directories above it (chmod o+x or setfacl) and read it",
        ) from error
    except OSError:  # the caller explains it
        return


def _name(uid: int) -> str:
    return str(User(uid, 0, ()))
