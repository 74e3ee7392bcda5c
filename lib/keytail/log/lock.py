"""Kafka's `.lock` of log dirs: while it is held, no broker starts on them and no other keytail changes them.

Open-file-description locks, which conflict with Java's and, unlike `lockf`'s, are not lost when another
descriptor of the file is closed. They hold on one host only; storage that others mount is the caller's worry.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
from collections.abc import Iterator, Sequence

from keytail.errors import Refused
from keytail.format import names
from keytail.log.fs import LOCAL, FileSystem

# struct flock of 64-bit Linux: type, whence, start, length (0: whole file), pid (0 asked for by OFD locks).
_FLOCK = struct.Struct("@hhqqi4x")
_OF_A_DESCRIPTION = -1  # what the kernel answers as pid for a lock that no process owns
_ATTEMPTS = 20


@contextlib.contextmanager
def hold(log_dirs: Sequence[str], fs: FileSystem = LOCAL) -> Iterator[None]:
    """Holds the lock of every log dir, all or none. Refused when one is taken.

    A lock file that this made is removed at the end, while still locked; one that was there stays. A process that dies
    loses the lock; the file that it made stays, and belongs to the owner of the log dir. Whoever puts another file in
    its place meanwhile locks that one: it is not ours, and is not removed.
    """
    with contextlib.ExitStack() as held:
        for path in sorted({os.path.realpath(log_dir) for log_dir in log_dirs}):
            held.enter_context(_hold_one(path, fs))
        yield


def is_held(log_dir: str, fs: FileSystem = LOCAL) -> bool:
    """Whether someone, mostly a broker, holds the lock now; asks without taking it, and makes nothing.

    Also True where it cannot be asked: no rights to the file, or a system that does not tell.
    """
    return _asked(os.path.join(log_dir, names.LOCK), fs) is not False


def can_be_asked(log_dir: str, fs: FileSystem = LOCAL) -> bool:
    """Whether the system tells who holds locks in this directory; makes nothing. True where it has no file to ask."""
    candidates = (os.path.join(log_dir, name) for name in (names.LOCK, names.META_PROPERTIES, names.CLEAN_SHUTDOWN))
    path = next((candidate for candidate in candidates if fs.exists(candidate)), None)
    return path is None or _asked(path, fs) is not None


def _asked(path: str, fs: FileSystem) -> bool | None:
    """Whether the file is locked, False of one that is not there. None: it cannot be asked."""
    try:
        fd = fs.open_read(path)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        if not hasattr(fcntl, "F_OFD_GETLK"):
            return None
        wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        return bool(_FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, wanted))[0] != fcntl.F_UNLCK)
    except OSError:
        return None
    finally:
        fs.close(fd)


@contextlib.contextmanager
def _hold_one(log_dir: str, fs: FileSystem) -> Iterator[None]:
    path = os.path.join(log_dir, names.LOCK)
    fd, created = _acquire(path, log_dir, fs)
    try:
        yield
    finally:
        try:
            if created and _is_at(fs, fd, path):
                fs.unlink(path)
        finally:
            fs.close(fd)


def _acquire(path: str, log_dir: str, fs: FileSystem) -> tuple[int, bool]:
    """A locked descriptor whose file still has the name: a broker that stops unlinks the one it locked."""
    for _ in range(_ATTEMPTS):
        like = fs.stat(log_dir)
        if not fs.exists(path):
            fs.refuse_unless_like(like)  # or a file would be made, and removed again
        try:
            fd, created = fs.open_lock_file(path, like)
        except FileExistsError:  # someone made it between our two looks
            continue
        except PermissionError as error:
            fs.refuse_unless_like(like)  # which says whom to run as
            raise Refused(
                "the lock of the log dir cannot be opened for writing",
                path=path,
                remedy="Run as the user that the broker runs as, or as root",
            ) from error
        try:
            holder = _try_lock(fd)
            if holder is not None:
                raise Refused(
                    f"the log dir is in use by {holder}",
                    path=path,
                    remedy="Stop the broker (or let the other keytail run end), then run again",
                )
            if _is_at(fs, fd, path):
                return fd, created
        except BaseException:
            fs.close(fd)
            raise
        fs.close(fd)
    raise Refused(
        "the lock file keeps being replaced; something is starting and stopping",
        path=path,
        remedy="Find out what restarts the broker, or another run, again and again; then run once more",
    )


def _is_at(fs: FileSystem, fd: int, path: str) -> bool:
    try:
        named = fs.stat(path)
    except FileNotFoundError:
        return False
    mine = fs.fd_stat(fd)
    return (named.device, named.inode) == (mine.device, mine.inode)


def _try_lock(fd: int) -> str | None:
    """None when the lock is ours now, else who has it."""
    wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        if hasattr(fcntl, "F_OFD_SETLK"):
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, wanted)
        else:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return _holder(fd, wanted)
    return None


def _holder(fd: int, wanted: bytes) -> str:
    """Java locks by process, keytail by open file: the kernel tells which."""
    if not hasattr(fcntl, "F_OFD_GETLK"):
        return "a running broker or another keytail run"
    kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, wanted))
    if kind == fcntl.F_UNLCK:
        return "a broker or keytail run that ended just now"
    if pid == _OF_A_DESCRIPTION:
        return "another keytail run"
    if pid <= 0:  # as seen from another process id namespace, or from another host
        return "a process of another container or host, by a lock as a running broker takes it"
    return f"process {pid}, by a lock as a running broker takes it"
