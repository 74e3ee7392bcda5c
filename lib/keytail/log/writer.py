"""Writes one new segment under scratch names: log, offset index, time index, durable and with their times.

Scratch files end in `.clean`, carry the run and the attempt in their names and are seen by no broker. Giving
them their final names is the business of `log/replace.py`.
"""

from __future__ import annotations

import os

import numpy as np

from keytail.errors import Refused
from keytail.format import names
from keytail.kernels.native import file_digest
from keytail.log.fs import FileStat, FileSystem
from keytail.log.indexer import SegmentIndexer
from keytail.log.replace import CleanFile, GroupOutput

MAX_SEGMENT_BYTES = 2**31 - 1


class SegmentWriter:
    """A new segment in the making; `append` batches in order, then `finish`, or `discard` what there is."""

    def __init__(
        self,
        fs: FileSystem,
        partition_path: str,
        base_offset: int,
        run_id: str,
        attempt: str,
        like: FileStat,
        index_interval_bytes: int,
        max_index_bytes: int,
    ) -> None:
        self._fs = fs
        self._partition_path = partition_path
        self._base = base_offset
        self._run_id, self._attempt = run_id, attempt
        self._like = like
        self._indexer = SegmentIndexer(base_offset, index_interval_bytes, max_index_bytes)
        self._digest = file_digest()
        self.size_bytes = 0
        self.records = 0
        self._made: list[str] = []
        self._fd: int | None = self._create(names.LOG)

    def _path(self, suffix: str) -> str:
        name = names.scratch_file(self._base, self._run_id, self._attempt, suffix)
        return os.path.join(self._partition_path, name)

    def _create(self, suffix: str) -> int:
        path = self._path(suffix)
        fd = self._fs.create(path, self._like)
        self._made.append(path)
        return fd

    def append(self, data: np.ndarray, table: np.ndarray) -> None:
        """Append the bytes of whole batches and note their rows; `table["position"]` starts at `size_bytes`."""
        if self.size_bytes + len(data) > MAX_SEGMENT_BYTES:
            raise Refused(
                f"output segment {self._base} would pass {MAX_SEGMENT_BYTES} bytes",
                remedy="Nothing was changed; a smaller segment.bytes makes smaller groups",
            )
        assert self._fd is not None
        self._indexer.add(table)
        self._fs.write(self._fd, data)
        self._digest.update(data)
        self.size_bytes += len(data)
        self.records += int(table["record_count"].sum())

    def finish(self, source_bases: tuple[int, ...], mtime_ms: int, txn_index: bytes = b"") -> GroupOutput:
        """Write the indexes, set all times to `mtime_ms`, make everything durable; what `commit_group` takes.

        A `.txnindex` is made only of a `txn_index` with entries.
        """
        assert self._fd is not None
        files = [self._seal(self._fd, names.LOG, mtime_ms, self.size_bytes, self._digest.hexdigest())]
        self._fd = None
        offset_index, time_index = self._indexer.close()
        indexes = {names.INDEX: offset_index, names.TIME_INDEX: time_index}
        if txn_index:
            indexes[names.TXN_INDEX] = txn_index
        for suffix, data in indexes.items():
            fd = self._create(suffix)
            self._fs.write(fd, data)
            digest = file_digest()
            digest.update(data)
            files.append(self._seal(fd, suffix, mtime_ms, len(data), digest.hexdigest()))
        return GroupOutput(self._base, source_bases, tuple(files))

    def _seal(self, fd: int, suffix: str, mtime_ms: int, size_bytes: int, digest: str) -> CleanFile:
        path = self._path(suffix)
        # The time first: fsync makes it durable together with the contents.
        self._fs.set_mtime_ns(path, mtime_ms * 1_000_000)
        self._fs.fsync(fd)
        self._fs.close(fd)
        return CleanFile(suffix, os.path.basename(path), size_bytes, digest)

    def discard(self) -> None:
        """Remove what was written so far."""
        if self._fd is not None:
            self._fs.close(self._fd)
            self._fd = None
        for path in self._made:
            if self._fs.exists(path):
                self._fs.unlink(path)
        self._made.clear()
