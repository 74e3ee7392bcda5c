"""Creates files and directories for `log/fs.py`, with the owner, mode and labels of an existing file or directory."""

from __future__ import annotations

import ctypes
import grp
import os
import pwd
import stat as stat_bits
import struct
from dataclasses import replace

from keytail.acting_user import current, works_as_another_user
from keytail.errors import WRITTEN_TO, Refused
from keytail.log.files.attributes import ACCESS_ACL, FileStat, attributes_of
from keytail.log.files.paths import READABLE_DIRECTORY, split

_ACL_HEADER = struct.Struct("<I")
_ACL_ENTRY = struct.Struct("<HHI")
_ACL_EXECUTE = 1
_SYNC_FILE_RANGE_WRITE = 2  # sync_file_range(2): begin to write dirty pages, and do not wait for them
_sync_file_range = ctypes.CDLL(None, use_errno=True).sync_file_range
_sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


def refuse_unless_like(like: FileStat) -> None:
    """Raise Refused if this process cannot create a file with the owner and group of `like`; call before writing."""
    user, groups = os.geteuid(), {os.getegid(), *os.getgroups()}
    if user == 0 or (user == like.uid and like.gid in groups):
        return
    directory = like.path if like.is_dir else split(like.path)[0]
    if works_as_another_user() and like.uid == 0 and os.access(directory, os.W_OK | os.X_OK, effective_ids=True):
        return
    if user == like.uid:
        name = _user_name(user).removeprefix("user ").removeprefix("id ")
        raise Refused(
            f"keytail works as {_user_name(user)}, which is not in "
            f"the {_group_name(like.gid)} of the files",
            path=like.path,
            remedy=f"If the broker runs with a group of that user (`id {name}` lists its groups), give the files that "
            "group (chgrp). If it runs with the group of the files, add the user to it (usermod -aG) and log in again",
            slug="files-of-another-group",
        )
    if works_as_another_user():
        raise Refused(
            f"keytail was started as root and works as {current()}, but the files belong to {_owner(like)}",
            path=like.path,
            remedy="Change the owner of the files to the owner of the log dir and a group of that user (chown)",
            slug="files-of-another-user",
        )
    raise Refused(
        f"this process runs as {_user_name(user)}, but the files belong to {_owner(like)}",
        path=like.path,
        remedy=f"Run as {_user_name(like.uid)} or root",
        slug="files-of-another-user",
    )


def create(path: str, at: int, name: str, like: FileStat | None) -> int:
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    fd = os.open(name, flags, 0o600 if like else 0o666, dir_fd=at)
    try:
        if like is not None:
            _make_like(fd, path, _for_directory(like, os.fstat(at)))
    except BaseException:
        os.close(fd)
        os.unlink(name, dir_fd=at)
        raise
    return fd


def _for_directory(like: FileStat, directory: os.stat_result) -> FileStat:
    """Return `like` with the owner that a new file in `directory` gets. In a user's directory, root gives the file to
    that user, never to a third user, and never with the labels of a third user's file.

    In a directory of root, only root can have created the file of `like`. A process that root started and that works
    as another user creates files for that user, even next to files of root.
    """
    if works_as_another_user() and like.uid == 0:
        return replace(like, uid=os.geteuid(), gid=os.getegid(), attributes=())
    if os.geteuid() != 0 or directory.st_uid in (0, like.uid):
        return like
    return replace(like, uid=directory.st_uid, gid=directory.st_gid, attributes=())


def mkdir(path: str, at: int, name: str, like: FileStat) -> None:
    """Create a directory with the attributes of `like`. The owner of the parent can replace the new directory, so
    Refused is raised unless it is still empty and belongs to this process's user."""
    os.mkdir(name, 0o700, dir_fd=at)
    try:
        fd = os.open(name, READABLE_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _exchanged(path) from error
    try:
        if os.fstat(fd).st_uid != os.geteuid() or os.listdir(fd):
            raise _exchanged(path)
        try:
            _make_like(fd, path, _for_directory(like, os.fstat(at)))
        except BaseException:
            os.rmdir(name, dir_fd=at)
            raise
    finally:
        os.close(fd)


def _exchanged(path: str) -> Refused:
    return Refused(
        "a new directory was replaced by something else", path=path, remedy=WRITTEN_TO, slug="directory-replaced"
    )


def _make_like(fd: int, path: str, like: FileStat) -> None:
    """Apply owner, attributes and mode of `like`. The owner comes first, because changing it clears mode bits; the ACL
    comes before the mode, because both set the group bits. Raises Refused if the system does not permit a change."""
    try:
        now = os.fstat(fd)
        if (now.st_uid, now.st_gid) != (like.uid, like.gid):
            os.fchown(fd, like.uid, like.gid)
        wanted = dict(like.attributes)
        of_dir = stat_bits.S_ISDIR(now.st_mode)
        if not of_dir and ACCESS_ACL in wanted:
            wanted[ACCESS_ACL] = _without_execute(wanted[ACCESS_ACL])
        present = dict(attributes_of(fd))
        for name in present.keys() - wanted.keys():
            # The new file inherited the ACL from the directory's default ACL. Labels are replaced, never removed.
            if name == ACCESS_ACL:
                os.removexattr(fd, name)
        for name, value in wanted.items():
            if present.get(name) != value:
                os.setxattr(fd, name, value)
        os.fchmod(fd, like.mode & (0o777 if of_dir else 0o666))
    except OSError as error:
        raise Refused(
            f"cannot give a new file the owner, mode and labels of {like.path}: {error.strerror}",
            path=path,
            remedy=f"Run as {_user_name(like.uid)} or root; the files belong to {_owner(like)}. If it is started as "
            "root, keytail works as the owner of the log dir: the files must belong to that user and one of its groups",
            slug="cannot-set-file-attributes",
        ) from error


def _without_execute(acl: bytes) -> bytes:
    """Return an ACL in the kernel's form (a version, then entries of tag, permissions and id) without execute bits."""
    entries = _ACL_ENTRY.iter_unpack(acl[_ACL_HEADER.size :])
    kept = [_ACL_ENTRY.pack(tag, bits & ~_ACL_EXECUTE, user) for tag, bits, user in entries]
    return acl[: _ACL_HEADER.size] + b"".join(kept)


def _user_name(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user id {uid}"


def _group_name(gid: int) -> str:
    try:
        return f"group {grp.getgrgid(gid).gr_name}"
    except KeyError:
        return f"group id {gid}"


def _owner(like: FileStat) -> str:
    return f"{_user_name(like.uid)}, {_group_name(like.gid)}"


def start_writeback(fd: int) -> None:
    _sync_file_range(fd, 0, 0, _SYNC_FILE_RANGE_WRITE)  # a size of 0 means up to the end; errors remain for fsync
