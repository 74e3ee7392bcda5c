"""The lock under which one process compiles a kernel while others wait for its file in the cache (jit.py)."""

from __future__ import annotations

import fcntl
import os
import time

# Maximum time to wait for another process that is compiling the same kernel. Compiling takes seconds, or tens of
# seconds on a busy machine.
MAX_WAIT_SECONDS = 60.0
_RETRY_SECONDS = 0.05


class CompileLock:
    """The lock of one kernel among processes. The lock only saves time: if it cannot be taken, each process compiles.

    Numba's `global_compiler_lock` covers only the threads of one process. This lock belongs to the process, not to the
    open file: a forked process does not inherit the lock, and the lock ends with the process.
    """

    _can_wait = True  # shared by all locks, so that a process times out only once

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd: int | None = None

    def acquire(self) -> bool:
        """Take the lock; return whether this call took it. Returns False if this object already has the lock, or the
        process cannot get it or timed out."""
        if self._fd is not None:
            return False
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError:
            return False
        try:
            taken = self._take(fd)
        except BaseException:
            os.close(fd)
            raise
        if not taken:
            os.close(fd)
            return False
        self._fd = fd
        return True

    def _take(self, fd: int) -> bool:
        end = time.monotonic() + MAX_WAIT_SECONDS
        while True:
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except (BlockingIOError, PermissionError):  # POSIX allows both errors for a lock that another process has
                if not CompileLock._can_wait or time.monotonic() > end:
                    CompileLock._can_wait = False
                    return False
                time.sleep(_RETRY_SECONDS)
            except OSError:  # the file system has no locks
                return False

    def is_taken(self) -> bool:
        """Return whether another process has the lock now, or the file system has no locks."""
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
        except OSError:
            return True
        finally:
            os.close(fd)

    def release(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)
