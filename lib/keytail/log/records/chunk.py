"""Reads a segment in chunks: up to 8 MiB of whole batches, or one larger batch, as a table over an array of bytes.

Chunks are passed from each processing step to the next. Headers and checksums are checked when a chunk is read;
record blocks are opened on request (`records/opening.py`), because a batch without retained records need not be
decompressed. Log files are read by `preadv` through `log/fs.py` into reused buffers, never mapped: truncating a mapped
file would kill the process.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any, NoReturn

import numpy as np

from keytail.errors import CORRUPT_REMEDY, CorruptLog, Refused
from keytail.format.batch import BATCH_TABLE, CONTROL, HEADER_BYTES
from keytail.format.codecs.errors import TooLarge
from keytail.format.legacy import LegacyProblem, summarize_rows
from keytail.kernels import batches as kernels
from keytail.limits import max_record_bytes
from keytail.log.fs import FileSystem
from keytail.log.records.opening import ARENA_BYTES, BlockOpener, Chunk, OpenedRows
from keytail.log.records.prefetch import prefetched

# Small enough to stay in the CPU cache from checksum to copy: on one machine, 5 million records took 0.81 s with chunks
# of 8 MiB, and 0.97 s with 32 MiB.
CHUNK_BYTES = 8 << 20
_FIRST_ROWS = 1 << 12

HEADER_ERRORS = {
    kernels.SIZE_TOO_SMALL: "batch length is below the minimum (14)",
    kernels.INVALID_MAGIC: "invalid magic byte",
    kernels.TOO_SHORT_FOR_V2: "batch is shorter than its 61-byte header",
    kernels.CRC_MISMATCH: "batch has an invalid CRC",
    kernels.NEGATIVE_COUNT: "negative record count",
    kernels.NEGATIVE_SPAN: "batch has a negative offset, ends before it begins, or ends beyond the largest offset",
    kernels.OFFSETS_GO_BACK: "batch begins at or below the last offset of the previous batch",
}


class _Buffers:
    """The buffers of one chunk: bytes, and the rows of its table."""

    def __init__(self, chunk_bytes: int) -> None:
        self.raw = np.empty(chunk_bytes, np.uint8)
        self.rows = np.empty(_FIRST_ROWS, BATCH_TABLE)


class SegmentReader:
    """Reads segments into its own buffers, by default two sets in turn (`keep_valid`); read one segment at a time."""

    def __init__(
        self, fs: FileSystem, chunk_bytes: int = CHUNK_BYTES, arena_bytes: int = ARENA_BYTES
    ) -> None:
        self._fs = fs
        self._chunk_bytes = chunk_bytes
        self._arena_bytes = arena_bytes
        self._buffers = [_Buffers(chunk_bytes), _Buffers(chunk_bytes)]
        self._opener = BlockOpener(arena_bytes)

    def keep_valid(self, chunks: int) -> None:
        """From now on, keep the latest `chunks` chunks valid. No chunk may be in use when this is called."""
        del self._buffers[chunks:]
        self._buffers += [_Buffers(self._chunk_bytes) for _ in range(chunks - len(self._buffers))]

    def another(self) -> SegmentReader:
        """Return a reader of the same files, for one thread."""
        return SegmentReader(self._fs, self._chunk_bytes, self._arena_bytes)

    def new_opener(self) -> BlockOpener:
        """Return an opener for the chunks of this reader, for one thread."""
        return BlockOpener(self._arena_bytes)

    def chunks(self, path: str, log_bytes: int, *, start: int = 0, torn_tail: bool = False) -> Iterator[Chunk]:
        """Yield the chunks that `chunks_without_prefetch` yields; if the bytes are more than a chunk, read and check
        the next chunk in a thread."""
        chunks = self.chunks_without_prefetch(path, log_bytes, start=start, torn_tail=torn_tail)
        return prefetched(chunks) if self.is_longer_than_a_chunk(log_bytes - start) else chunks

    def is_longer_than_a_chunk(self, n_bytes: int) -> bool:
        """Return whether `n_bytes` is more than a chunk, so that prefetching saves time: starting a thread takes as
        long as processing a tenth of a chunk."""
        return n_bytes > self._chunk_bytes

    def chunks_without_prefetch(
        self, path: str, log_bytes: int, *, start: int = 0, torn_tail: bool = False
    ) -> Generator[Chunk, None, None]:
        """Yield chunks of the first `log_bytes` of the segment file at `path`, from the batch at byte `start` on.

        Raises CorruptLog at the first byte where no valid batch begins, and at an incomplete last batch. With
        `torn_tail` the chunks end at that byte without an error: a broker that starts after a crash would truncate the
        log there. Also raises CorruptLog if the file has become shorter, and TooLarge for a message of magic 0 or 1.
        """
        if start >= log_bytes:
            return
        fd = self._fs.open_read(path)
        position, last_offset = start, -1
        try:
            while position < log_bytes:
                self._buffers.append(self._buffers.pop(0))
                chunk = self._read(fd, path, log_bytes, torn_tail, self._buffers[0], position, last_offset)
                if chunk is None:
                    return
                position, last_offset = position + len(chunk.raw), int(chunk.table["last_offset"][-1])
                yield chunk
        finally:
            self._fs.close(fd)

    def _read(
        self,
        fd: int,
        path: str,
        log_bytes: int,
        torn_tail: bool,
        buffers: _Buffers,
        position: int,
        last_offset: int,
    ) -> Chunk | None:
        wanted = min(self._chunk_bytes, log_bytes - position)
        out = np.zeros(4, np.int64)
        while True:
            if len(buffers.raw) < wanted:
                buffers.raw = np.empty(wanted, np.uint8)
            got = self._fs.read_into(fd, buffers.raw[:wanted], position)
            if got < wanted:
                raise CorruptLog(
                    f"the file is shorter than when it was listed: {position + got} of {log_bytes} bytes",
                    path=path,
                    byte_position=position + got,
                    remedy="Another process writes to this directory: stop it, then run again",
                    slug="file-became-shorter",
                )
            self._index(buffers, wanted, position, last_offset, out)
            code, needed = int(out[kernels.CODE]), int(out[kernels.NEEDED])
            if out[kernels.ROWS] or code not in (kernels.OK, kernels.TABLE_FULL):
                break
            if needed == 0 or position + needed > log_bytes:
                break
            wanted = needed  # read more, because the batch is larger than a chunk
        rows, consumed = int(out[kernels.ROWS]), int(out[kernels.CONSUMED])
        old_problem: LegacyProblem | None = None
        if (buffers.rows["magic"][:rows] < 2).any():
            rows, consumed, old_problem = _complete_old(path, buffers, rows, consumed, position, last_offset)
        if rows == 0:
            if torn_tail:
                return None
            where: dict[str, Any] = {"path": path, "byte_position": position}
            where["offset"] = last_offset + 1 if last_offset >= 0 else None
            if old_problem is not None:
                slug = "invalid-crc" if old_problem.is_crc else "invalid-message"
                raise CorruptLog(str(old_problem), **where, remedy=CORRUPT_REMEDY, slug=slug)
            if code in HEADER_ERRORS:
                slug = "invalid-crc" if code == kernels.CRC_MISMATCH else "invalid-batch"
                raise CorruptLog(HEADER_ERRORS[code], **where, remedy=CORRUPT_REMEDY, slug=slug)
            left = log_bytes - position
            what = (
                f"a batch of {needed} bytes does not fit into the last {left} bytes of the file"
                if needed
                else f"the last {left} bytes of the file are too few for a batch"
            )
            raise CorruptLog(what, **where, remedy=CORRUPT_REMEDY, slug="incomplete-batch")
        # Valid rows before a bad batch are returned first: the next read begins at that batch and raises.
        return Chunk(path, position, buffers.raw[:consumed], buffers.rows[:rows])

    def _index(self, buffers: _Buffers, n: int, position: int, last_offset: int, out: np.ndarray) -> None:
        while True:
            kernels.index_batches(buffers.raw, n, position, last_offset, buffers.rows, out)
            at_most = self._chunk_bytes // HEADER_BYTES
            if out[kernels.CODE] != kernels.TABLE_FULL or len(buffers.rows) >= at_most:
                return
            buffers.rows = np.empty(len(buffers.rows) * 8, BATCH_TABLE)

    def open_rows(self, chunk: Chunk, wanted: np.ndarray) -> Iterator[OpenedRows]:
        """Yield what `BlockOpener.open_rows` yields, with the opener of this reader."""
        return self._opener.open_rows(chunk, wanted)

    def reopen(self, chunk: Chunk, opened: OpenedRows) -> Iterator[OpenedRows]:
        """Yield what `BlockOpener.reopen` yields, with the opener of this reader."""
        return self._opener.reopen(chunk, opened)


def _complete_old(
    path: str, buffers: _Buffers, rows: int, consumed: int, position: int, last_offset: int
) -> tuple[int, int, LegacyProblem | None]:
    """Check and complete the rows of magic 0 and 1; return how many rows and bytes are valid, and the problem after the
    valid rows, or None."""
    try:
        summarize_rows(buffers.raw[:consumed], position, buffers.rows[:rows], last_offset, max_record_bytes())
    except LegacyProblem as problem:
        return problem.row, int(buffers.rows["position"][problem.row]) - position, problem
    except TooLarge as problem:
        problem.path = path
        raise
    return rows, consumed, None


def check_ends_below(chunk: Chunk, next_base: int | None) -> None:
    """Raise CorruptLog if a batch has offsets at or above `next_base`, where the next segment begins."""
    if next_base is None or int(chunk.table["last_offset"][-1]) < next_base:
        return
    row = chunk.table[int(np.searchsorted(chunk.table["last_offset"], next_base))]
    raise CorruptLog(
        f"the batch ends at offset {row['last_offset']}, but the next segment begins at {next_base}",
        path=chunk.path,
        byte_position=int(row["position"]),
        offset=int(row["base_offset"]),
        remedy=CORRUPT_REMEDY,
        slug="batch-overlaps-next-segment",
    )


def check_inside(chunk: Chunk, base_offset: int, last_offset: int) -> None:
    """Raise CorruptLog at a batch that is outside of its segment, which has offsets up to `last_offset`."""
    table = chunk.table
    if table["base_offset"][0] >= base_offset and table["last_offset"][-1] <= last_offset:
        return
    row = table[int(np.argmax((table["base_offset"] < base_offset) | (table["last_offset"] > last_offset)))]
    raise CorruptLog(
        f"a batch is outside of its segment, which has offsets {base_offset} to {last_offset}",
        path=chunk.path,
        byte_position=int(row["position"]),
        offset=int(row["base_offset"]),
        remedy=CORRUPT_REMEDY,
        slug="batch-outside-segment",
    )


def refuse_unsupported(chunk: Chunk) -> None:
    """Raise Refused for a control batch whose type cannot be read."""
    control = (chunk.table["attributes"] & CONTROL) != 0
    if not control.any():
        return
    unreadable = np.flatnonzero(control & (chunk.table["record_count"] > 0) & (chunk.table["control_type"] < 0))
    if len(unreadable):
        _refuse(chunk, chunk.table[unreadable[0]], "a control batch has an unreadable type")


def _refuse(chunk: Chunk, row: np.void, what: str) -> NoReturn:
    raise Refused(
        what,
        path=chunk.path,
        byte_position=int(row["position"]),
        offset=int(row["base_offset"]),
        remedy="The partition was not changed; leave it to the broker's log cleaner",
        slug="unreadable-control-type",
    )
