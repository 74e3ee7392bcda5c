"""A window that moves over a file, in one reused buffer: for readers that walk batches of any size.

Bounded by the file, never by what a batch says of its own size. What the bytes mean is the caller's.
"""

from __future__ import annotations

import numpy as np

from keytail.errors import KeytailError
from keytail.log.fs import FileSystem

WINDOW_BYTES = 2 << 20


class Window:
    """A part of a file in a reused buffer: `bytes[:filled]` begins at byte `position` of the file."""

    def __init__(self, fs: FileSystem, window_bytes: int = WINDOW_BYTES) -> None:
        self._fs = fs
        self._buffer = np.empty(window_bytes, dtype=np.uint8)
        self._fd = -1
        self.path = ""
        self.size_bytes = 0
        self.position = 0
        self.filled = 0

    def open(self, path: str, size_bytes: int) -> None:
        """Look at the first `size_bytes` bytes of `path`, empty-handed so far."""
        self.close()
        self._fd = self._fs.open_read(path)
        self.path, self.size_bytes, self.position, self.filled = path, size_bytes, 0, 0

    def close(self) -> None:
        if self._fd >= 0:
            self._fs.close(self._fd)
            self._fd = -1

    @property
    def is_all(self) -> bool:
        """Whether the window ends where the file does."""
        return self.position + self.filled == self.size_bytes

    @property
    def bytes(self) -> np.ndarray:
        view = self._buffer[:]
        view.flags.writeable = False  # so that windows and decompressed blocks are of one kind
        return view

    def advance(self, used: int, wanted_bytes: int) -> None:
        """Drop the first `used` bytes and read on: `wanted_bytes` at least, or up to the end."""
        kept = self._buffer[used : self.filled]
        wanted_bytes = min(wanted_bytes, self.size_bytes - self.position - used)
        if wanted_bytes > len(self._buffer):
            self._buffer = np.empty(max(wanted_bytes, 2 * len(self._buffer)), dtype=np.uint8)
        self._buffer[: len(kept)] = kept
        self.position += used
        end = min(len(self._buffer), self.size_bytes - self.position)
        room = self._buffer[len(kept) : end]
        count = self._fs.read_into(self._fd, room, self.position + len(kept))
        self.filled = len(kept) + count
        if count < len(room):
            raise KeytailError(
                "the file became shorter while it was read",
                path=self.path,
                byte_position=self.position + self.filled,
                remedy="Stop whatever else writes to this directory",
            )
