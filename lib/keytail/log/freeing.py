"""Unlinks at once and frees later: the blocks and cached pages of a large file are given back in a thread.

A file whose name is gone keeps what it takes as long as somebody has it open. Giving back a gigabyte of cached pages
takes a fifth of a second, in which the next group can be replaced; what is on disk by name, and in which order, is
the same. Small files are not worth a thread.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from keytail.log.fs import FileSystem

LARGE_BYTES = 8 << 20  # takes about 2 ms to free


class Freeing:
    """For as long as a `with` block, at whose end all is free."""

    def __init__(self, fs: FileSystem) -> None:
        self._fs = fs
        self._thread = ThreadPoolExecutor(1, "freeing")
        self._closing: list[Future[None]] = []

    def __enter__(self) -> Freeing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(wait=True)
        if error is None:
            for one in self._closing:
                one.result()

    def unlink(self, path: str) -> None:
        """Remove the name of a file now."""
        fd = None
        try:
            if self._fs.stat(path).size_bytes >= LARGE_BYTES:
                fd = self._fs.open_read(path)
        except OSError:  # no reason to keep the name
            pass
        if fd is None:
            self._fs.unlink(path)
            return
        try:
            self._fs.unlink(path)
        finally:
            self._closing.append(self._thread.submit(self._fs.close, fd))
