"""Reads a file through a window that moves over it, in reused buffers, for readers of batches of any size.

The size of a window is limited by the size of the file, whatever size a batch declares. While a window is processed, a
thread reads the bytes after the window. The caller interprets the bytes.
"""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np

from keytail.errors import KeytailError
from keytail.log.fs import FileSystem
from keytail.threads import Threads

WINDOW_BYTES = 2 << 20
_HEADROOM_BYTES = 256 << 10  # room before the prefetched bytes for the rest of the previous window


class Window:
    """A part of a file: `bytes[:filled]` begins at byte `position` of the file.

    If `reads_ahead` is False, the thread that uses the window reads the next bytes itself.
    """

    def __init__(self, fs: FileSystem, window_bytes: int = WINDOW_BYTES) -> None:
        self._fs = fs
        self.reads_ahead = True
        self._window_bytes = window_bytes
        self._buffer = np.empty(0, dtype=np.uint8)
        self._begin = 0
        self._prefetched = np.empty(0, dtype=np.uint8)
        self._reader: Threads | None = None
        self._coming: Future[int] | None = None
        self._coming_at = 0  # byte position of the prefetched bytes in the file
        self._coming_bytes = 0
        self._fd = -1
        self.path = ""
        self.size_bytes = 0
        self.position = 0
        self.filled = 0

    def open(self, path: str, size_bytes: int, position: int = 0) -> None:
        """Open the first `size_bytes` bytes of `path`, from `position` on; the window is empty at first."""
        self.close()
        self._fd = self._fs.open_read(path)
        self.path, self.size_bytes, self.position, self.filled, self._begin = path, size_bytes, position, 0, 0

    def close(self) -> None:
        if self._coming is not None:
            self._coming.exception()  # only waits for the thread: the bytes are not used
            self._coming = None
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            self._fs.close(fd)

    @property
    def is_all(self) -> bool:
        """Whether the window ends where the file does."""
        return self.position + self.filled == self.size_bytes

    @property
    def bytes(self) -> np.ndarray:
        view = self._buffer[self._begin :]
        view.flags.writeable = False  # read-only, so that windows and decompressed blocks have the same type
        return view

    def advance(self, used: int, wanted_bytes: int) -> None:
        """Move the window by `used` bytes, and fill it with at least `wanted_bytes`, or up to the end of the file."""
        rest = self._buffer[self._begin + used : self._begin + self.filled]
        if not self.reads_ahead and self.filled:
            self._prefetch_next()
        self.position += used
        wanted_bytes = min(wanted_bytes, self.size_bytes - self.position)
        ready = self._take_coming()
        if ready and len(rest) <= _HEADROOM_BYTES and len(rest) + ready >= wanted_bytes:
            self._begin = _HEADROOM_BYTES - len(rest)
            self._prefetched[self._begin : _HEADROOM_BYTES] = rest
            self._buffer, self._prefetched = self._prefetched, self._buffer
            self.filled = len(rest) + ready
        else:
            self._refill(rest, ready, wanted_bytes)
        if self.reads_ahead:
            self._prefetch_next()

    def _take_coming(self) -> int:
        """Return how many bytes are ready after the headroom of `_prefetched`."""
        if self._coming is None:
            return 0
        count = self._coming.result()
        self._coming = None
        if count < self._coming_bytes:
            self._raise_shorter(self._coming_at + count)
        return count

    def _refill(self, rest: np.ndarray, ready: int, wanted_bytes: int) -> None:
        """Fill the window synchronously: at the start of a file, or if the prefetched bytes are too few or the rest is
        longer than the headroom."""
        filled = min(max(wanted_bytes, self._window_bytes), self.size_bytes - self.position)
        buffer = self._buffer
        if len(rest) or len(buffer) < _HEADROOM_BYTES + filled:
            buffer = np.empty(_HEADROOM_BYTES + max(filled, self._window_bytes), dtype=np.uint8)
        room = buffer[_HEADROOM_BYTES : _HEADROOM_BYTES + filled]
        room[: len(rest)] = rest
        known = min(len(rest) + ready, filled)
        room[len(rest) : known] = self._prefetched[_HEADROOM_BYTES : _HEADROOM_BYTES + known - len(rest)]
        count = self._fs.read_into(self._fd, room[known:], self.position + known)
        if known + count < filled:
            self._raise_shorter(self.position + known + count)
        self._buffer, self._begin, self.filled = buffer, _HEADROOM_BYTES, filled

    def _prefetch_next(self) -> None:
        next_position = self.position + self.filled
        if next_position >= self.size_bytes:
            return
        if len(self._prefetched) < _HEADROOM_BYTES + self._window_bytes:
            self._prefetched = np.empty(_HEADROOM_BYTES + self._window_bytes, dtype=np.uint8)
        self._coming_at, self._coming_bytes = next_position, min(self._window_bytes, self.size_bytes - next_position)
        room = self._prefetched[_HEADROOM_BYTES : _HEADROOM_BYTES + self._coming_bytes]
        if not self.reads_ahead:
            self._coming = Future()
            self._coming.set_result(self._fs.read_into(self._fd, room, next_position))
            return
        if self._reader is None:
            self._reader = Threads(1, "prefetch")
        self._coming = self._reader.submit(self._fs.read_into, self._fd, room, next_position)

    def _raise_shorter(self, position: int) -> None:
        """Raise KeytailError for a file that became shorter; `position` is its current end."""
        raise KeytailError(
            "the file became shorter while it was read",
            path=self.path,
            byte_position=position,
            remedy="Another process writes to this directory: stop it, then run again",
            slug="file-became-shorter",
        )
