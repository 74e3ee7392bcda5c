"""Holds the locks on Kafka's `.lock` files, so that no broker starts on the log dirs and no other run changes them.

The locks are open-file-description locks, which conflict with Java's locks and, unlike `lockf` locks, are not lost when
another descriptor of the file is closed. The locks protect against processes on the same host only; on storage that
other hosts mount, the caller must prevent concurrent use. Where the system lacks such locks, `lockf` is used.

A lock belongs to a file, not to its name: if the name is removed, the next process creates and locks another file. So
keytail never removes a lock file, and before each change that a run commits, `refuse_lost` checks that the name still
refers to the locked file. A broker does remove the name: when it stops, it unlocks the file and then unlinks it, and
between these steps this process may lock the file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
from collections.abc import Iterator, Sequence
from typing import Literal

from keytail.errors import Refused, SymbolicLink
from keytail.format import names
from keytail.log.fs import LOCAL, FileSystem

# struct flock of 64-bit Linux: type, whence, start, length (0: whole file), pid (must be 0 for OFD locks).
_FLOCK = struct.Struct("@hhqqi4x")
_OF_A_DESCRIPTION = -1  # the pid that the kernel returns for a lock that no process owns
_NOBODY = -2
_ATTEMPTS = 20

LockName = Literal[".lock", ".keytail-prepare.lock"]

# Descriptors and lock file paths of each log dir whose lock this process holds, by its real path and each given path.
_held: dict[str, list[tuple[int, str]]] = {}


class LockLost(Refused):
    """The name of a lock file no longer refers to the file that this process has locked."""

    default_slug = "lock-lost"


@contextlib.contextmanager
def hold(log_dirs: Sequence[str], fs: FileSystem = LOCAL, name: LockName = names.LOCK) -> Iterator[None]:
    """Hold the locks of all log dirs during the block. Raises Refused, and holds no lock, if a log dir is already
    locked or its lock file cannot be opened for writing.

    `name` is the name of the lock file: Kafka's, or keytail's own, which ensures that only one run at a time prepares
    compactions in a log dir beside its broker (compact/prepared/PREPARED.md).

    The lock file is never removed, even if this call created it: a starting broker that had opened it would lock a file
    without a name, while the next run would lock a new file. A new lock file gets the owner of the log dir. If the
    process dies, the lock is released.
    """
    by_directory: dict[str, list[str]] = {}
    for log_dir in log_dirs:
        by_directory.setdefault(os.path.realpath(log_dir), []).append(os.path.abspath(log_dir))
    with contextlib.ExitStack() as held:
        for path, given in sorted(by_directory.items()):
            held.enter_context(_hold_log_dir(path, given, fs, name))
        yield


def refuse_lost(fs: FileSystem, path: str) -> None:
    """Raise LockLost if this process holds a lock of the log dir that is `path` or contains it, and the name of the
    lock file no longer refers to the locked file. Call this function right before a change is committed."""
    for fd, lock_path in _holding(os.path.abspath(path)) or _holding(os.path.realpath(path)):
        if _is_at(fs, fd, lock_path):
            continue
        raise LockLost(
            "the lock file of the log dir was removed or replaced while this run held the lock, so a broker or another "
            "run may have started there; this run changes nothing more",
            path=lock_path,
            remedy="Make sure that no broker runs on the log dir and find out what removed the file (a broker that is "
            "still stopping does). Then run again: the run continues where this one ended",
        )


def _holding(path: str) -> list[tuple[int, str]]:
    """Return the entry of `_held` for the log dir that is `path` or contains it; empty if there is none."""
    while path not in _held:
        above = os.path.dirname(path)
        if above == path:
            return []
        path = above
    return _held[path]


def is_held(log_dir: str, fs: FileSystem = LOCAL) -> bool:
    """Return whether any process, usually a broker, holds Kafka's lock of the log dir now; neither take the lock nor
    create the file. Also return True if this cannot be determined, for lack of permission to open the file or of
    support by the system.
    """
    return _is_locked(os.path.join(log_dir, names.LOCK), fs) is not False


def refuse_other_run(log_dirs: Sequence[str], fs: FileSystem = LOCAL) -> None:
    """Raise Refused if another keytail run holds Kafka's lock of one of the log dirs; a broker may hold it."""
    for log_dir in log_dirs:
        path = os.path.join(log_dir, names.LOCK)
        if _holder_pid(path, fs) == _OF_A_DESCRIPTION:
            raise Refused(
                "the log dir is in use by another keytail run, which changes partitions",
                path=path,
                remedy="Wait until it ends; then run again",
                slug="log-dir-in-use",
            )


def can_detect_holder(log_dir: str, fs: FileSystem = LOCAL) -> bool:
    """Return whether the system can report whether files of this directory are locked; True if there is no file with
    which to test this. No file is created."""
    candidates = (os.path.join(log_dir, name) for name in (names.LOCK, names.META_PROPERTIES, names.CLEAN_SHUTDOWN))
    path = next((candidate for candidate in candidates if fs.exists(candidate)), None)
    return path is None or _is_locked(path, fs) is not None


def _is_locked(path: str, fs: FileSystem) -> bool | None:
    """Return whether the file is locked; False if it does not exist, None if this cannot be determined."""
    pid = _holder_pid(path, fs)
    return None if pid is None else pid != _NOBODY


def _holder_pid(path: str, fs: FileSystem) -> int | None:
    """Return the pid that the kernel reports for the lock, `_OF_A_DESCRIPTION` for a lock of keytail, `_NOBODY` if the
    file is not locked or does not exist, and None if this cannot be determined."""
    try:
        fd = fs.open_read(path)
    except FileNotFoundError:
        return _NOBODY
    except OSError:
        return None
    try:
        if not hasattr(fcntl, "F_OFD_GETLK"):
            return None
        wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, wanted))
        return _NOBODY if kind == fcntl.F_UNLCK else int(pid)
    except OSError:
        return None
    finally:
        fs.close(fd)


def hold_off_preparations(log_dirs: Sequence[str], fs: FileSystem) -> contextlib.AbstractContextManager[None]:
    """Hold keytail's own lock of the log dirs in which a run has ever prepared compactions: no run prepares there."""
    prepared = [path for path in log_dirs if fs.exists(os.path.join(path, names.PREPARE_LOCK))]
    return hold(prepared, fs, names.PREPARE_LOCK)


@contextlib.contextmanager
def _hold_log_dir(log_dir: str, given: Sequence[str], fs: FileSystem, name: LockName) -> Iterator[None]:
    """Hold the lock of one log dir; `given` are other paths of the same directory."""
    path = os.path.join(log_dir, name)
    fd = _acquire(path, log_dir, fs)
    held = (fd, path)
    try:
        for directory in {log_dir, *given}:
            _held.setdefault(directory, []).append(held)
        yield
    finally:
        for directory in {log_dir, *given}:
            _held[directory].remove(held)
            if not _held[directory]:
                del _held[directory]
        fs.close(fd)


def _acquire(path: str, log_dir: str, fs: FileSystem) -> int:
    """Lock the file `path`, and return its descriptor. The name is checked after locking, because a stopping broker
    unlinks its lock file."""
    for _ in range(_ATTEMPTS):
        like = fs.stat(log_dir)
        if not fs.exists(path):
            fs.refuse_unless_like(like)  # checked before a file is created
        try:
            fd, _ = fs.open_lock_file(path, like)
        except FileExistsError:  # the file was created since the check above
            continue
        except PermissionError as error:
            fs.refuse_unless_like(like)  # its error names the user to run as
            raise Refused(
                "the lock of the log dir cannot be opened for writing",
                path=path,
                remedy="Run as the user that the broker runs as, and check that the file belongs to that user",
                slug="lock-not-writable",
            ) from error
        try:
            holder = _try_lock(fd)
            if holder is not None:
                if os.path.basename(path) == names.PREPARE_LOCK:
                    raise Refused(
                        "another run is preparing compactions in the log dir",
                        path=path,
                        remedy="Wait until it ends, or stop it (prepared compactions are retained); then run again",
                        slug="prepare-in-progress",
                    )
                raise Refused(
                    f"the log dir is in use by {holder}",
                    path=path,
                    remedy="Stop the broker, or wait until the other keytail run ends; then run again",
                    slug="log-dir-in-use",
                )
            if _is_at(fs, fd, path):
                return fd
        except BaseException:
            fs.close(fd)
            raise
        fs.close(fd)
    raise Refused(
        "the lock file was replaced repeatedly: a broker or another run starts and stops",
        path=path,
        remedy="Find out what restarts the broker or the other run, and stop it; then run again",
        slug="lock-file-replaced",
    )


def _is_at(fs: FileSystem, fd: int, path: str) -> bool:
    try:
        named = fs.stat(path)
    except (FileNotFoundError, SymbolicLink):
        return False
    own = fs.fd_stat(fd)
    return (named.device, named.inode) == (own.device, own.inode)


def _try_lock(fd: int) -> str | None:
    """Try to take the lock of an open file; return None on success, or a description of the process that has the
    lock."""
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
    """Describe the holder of the lock. The kernel reports a process for a lock of Java, but no process for a lock of
    keytail."""
    if not hasattr(fcntl, "F_OFD_GETLK"):
        return "a running broker or another keytail run"
    kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, wanted))
    if kind == fcntl.F_UNLCK:
        return "a broker or keytail run that has just ended"
    if pid == _OF_A_DESCRIPTION:
        return "another keytail run"
    if pid <= 0:  # the process is in another PID namespace, or on another host
        return "a process in another container or on another host, with a lock like that of a running broker"
    return f"process {pid}, with a lock like that of a running broker"
