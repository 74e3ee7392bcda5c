"""Limits reading and writing to a number of bytes per second."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from keytail.log.fs import FileSystem

# After idle time, at most as many bytes as are allowed in this many seconds are processed without a delay.
_BURST_S = 0.1


class Pace:
    """A rate limit. Any thread calls `spend` after it has processed bytes; `spend` sleeps as long as the limit
    requires.
    """

    def __init__(
        self,
        bytes_per_s: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._due_s = clock()
        self._lock = threading.Lock()

    def spend(self, n_bytes: int) -> None:
        with self._lock:
            now_s = self._clock()
            due_s = max(self._due_s, now_s - _BURST_S) + n_bytes / self._bytes_per_s
            self._due_s = due_s
        if due_s > now_s:
            self._sleep(due_s - now_s)


class PacedFileSystem(FileSystem):
    """The real file system with a rate limit for `read_into`, `read_bytes` and `write`, also of cached pages."""

    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self._pace = pace

    def read_into(self, fd: int, buffer: Any, position: int) -> int:
        count = super().read_into(fd, buffer, position)
        self._pace.spend(count)
        return count

    def read_bytes(self, path: str, *, whole: bool = False) -> bytes:
        data = super().read_bytes(path, whole=whole)
        self._pace.spend(len(data))
        return data

    def write(self, fd: int, buffer: Any) -> int:
        count = super().write(fd, buffer)
        self._pace.spend(count)
        return count
