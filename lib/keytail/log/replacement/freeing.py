"""Unlinks large files at once and frees their blocks and cached pages later, in other threads.

An unlinked file keeps its blocks and pages as long as it is open. Freeing a gigabyte of cached pages takes a fifth of a
second, during which the next group can be replaced. Names on disk change in the same order as without a thread. Small
files, and files that cannot be opened, are freed at once: for a small file, a thread would not save time.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from keytail.log.fs import FileSystem

LARGE_BYTES = 8 << 20  # minimum size of a large file; freeing 8 MiB takes about 2 ms


class Freeing:
    """A context manager that defers the freeing of large files. All files are freed when the block ends."""

    def __init__(self, fs: FileSystem, threads: int = 1) -> None:
        self._fs = fs
        self._threads = ThreadPoolExecutor(threads, "freeing")
        self._closing: list[Future[None]] = []

    def __enter__(self) -> Freeing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(wait=True)
        if error is None:
            for item in self._closing:
                item.result()

    def unlink(self, path: str) -> None:
        """Remove the name of a file immediately; free a large file later."""
        fd = None
        try:
            if self._fs.stat(path).size_bytes >= LARGE_BYTES:
                fd = self._fs.open_read(path)
        except OSError:  # the file is still unlinked, and freed at once
            pass
        if fd is None:
            self._fs.unlink(path)
            return
        try:
            self._fs.unlink(path)
        finally:
            self._closing.append(self._threads.submit(self._fs.close, fd))
