"""Opens directories for `log/fs.py` without following symbolic links that another user may have created.

Usually one system call opens a path without following any link (openat2, Linux 5.6). If the path contains a link, or
the kernel has no openat2, the path is walked name by name, and `_may_follow` decides about each link: log dirs and
other directories that the caller names may be reached through links, but no link below a log dir is followed. An
opened directory remains the same directory, whatever happens to its name.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat as stat_bits

from keytail.errors import SymbolicLink
from keytail.format import names

DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC  # the directory cannot be read, but names in it can be opened
READABLE_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

_OF_A_LOG_DIR = (
    names.META_PROPERTIES,
    names.CLEANER_CHECKPOINT,
    names.RECOVERY_POINT_CHECKPOINT,
    names.LOG_START_CHECKPOINT,
    names.HIGH_WATERMARK_CHECKPOINT,
)
_MAX_LINKS = 40  # maximum number of links in a path, as in Linux

_OPENAT2 = 437  # the system call has the same number on all architectures
_AT_FDCWD = -100
_RESOLVE_NO_SYMLINKS = 4


class _OpenHow(ctypes.Structure):
    """The kernel's struct open_how."""

    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


_system_call = ctypes.CDLL(None, use_errno=True).syscall
_system_call.restype = ctypes.c_long
_system_call.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t]
_HOW = {flags: ctypes.byref(_OpenHow(flags, 0, _RESOLVE_NO_SYMLINKS)) for flags in (DIRECTORY, READABLE_DIRECTORY)}
_HOW_BYTES = ctypes.sizeof(_OpenHow)


def split(path: str) -> tuple[str, str]:
    """Return the directory and the last name of a path; the directory is "." if the path is only a name."""
    directory, slash, name = path.rpartition("/")
    return directory or slash or ".", name or (path and ".")


def open_directory(path: str, flags: int = DIRECTORY) -> int:
    """Return a descriptor of a directory; `flags` is DIRECTORY or READABLE_DIRECTORY.

    Raises SymbolicLink for a link that is not followed, NotADirectoryError for any other file.
    """
    encoded = os.fsencode(path)
    if b"\0" in encoded:  # in C, the path would end at the null byte
        raise ValueError("embedded null byte")
    while True:
        fd: int = _system_call(_OPENAT2, _AT_FDCWD, encoded, _HOW[flags], _HOW_BYTES)
        if fd >= 0:
            return fd
        number = ctypes.get_errno()
        # The path contains a link, or the kernel has no openat2, or a container forbids openat2.
        if number in (errno.ELOOP, errno.ENOSYS, errno.EPERM):
            return _walk(path, flags)
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number), path)


def _walk(path: str, flags: int) -> int:
    """Return what `open_directory` returns, but walk the path name by name: for paths with links, and for kernels
    without openat2."""
    at = os.open("/" if path.startswith("/") else ".", DIRECTORY)
    try:
        waiting, links = path.split("/")[::-1], 0
        while waiting:
            name = waiting.pop()
            if name in ("", "."):
                continue
            found = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            try:
                facts = os.fstat(found)
                if stat_bits.S_ISLNK(facts.st_mode):
                    links += 1
                    if links > _MAX_LINKS:
                        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
                    if not _may_follow(facts, at):
                        raise symbolic_link(os.path.join(os.readlink(f"/proc/self/fd/{at}"), name))
                    target = os.readlink("", dir_fd=found)
                    waiting += target.split("/")[::-1]
                    link, found = found, os.open("/" if target.startswith("/") else ".", DIRECTORY, dir_fd=at)
                    os.close(link)
            except BaseException:
                os.close(found)
                raise
            os.close(at)
            at = found
        return os.open(".", flags, dir_fd=at)
    finally:
        os.close(at)


def _may_follow(link: os.stat_result, directory_fd: int) -> bool:
    """Return whether a link in the directory `directory_fd` can be trusted to lead where the caller intended.

    A link in a log dir is never trusted. For root, link and directory must both belong to root: the owner of a
    directory can replace a link at any moment. For other users the system checks permissions; the link must not belong
    to a third user, as Linux requires in /tmp.
    """
    user, directory = os.geteuid(), os.fstat(directory_fd)
    if user == 0 and not link.st_uid == directory.st_uid == 0:
        return False
    if link.st_uid not in (0, user, directory.st_uid):
        return False
    return not any(_contains(directory_fd, name) for name in _OF_A_LOG_DIR)


def _contains(directory_fd: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=directory_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def symbolic_link(path: str) -> SymbolicLink:
    return SymbolicLink(errno.ELOOP, "Symbolic link not followed", path)
