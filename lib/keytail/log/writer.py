"""Writes new segments under scratch names: log, offset index and time index, durable and with modification times.

`OutputWriter` takes the retained batches of consecutive sources and closes an output when a limit is reached, at the
boundary of a source if possible. Scratch files end in `.clean`, have the run and the attempt in their names and are
ignored by brokers; `log/replacement/replace.py` gives them their final names.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from keytail.format import names
from keytail.format.index import MAX_RELATIVE_OFFSET
from keytail.kernels.native import file_digest
from keytail.log.fs import FileStat, FileSystem
from keytail.log.index.indexer import SegmentIndexer
from keytail.log.records.chunk import SegmentReader
from keytail.log.replacement.replace import CleanFile, GroupOutput, OutputSegment, UnfinishedOutput

MAX_SEGMENT_BYTES = 2**31 - 1
WRITEBACK_BYTES = 8 << 20  # after this many bytes of a log, the system begins to write them to the disk


@dataclass(frozen=True)
class Limits:
    """The limits of an output: `segment_bytes` is the maximum size of its log, `index_bytes` the maximum size of each
    index. After more than `index_interval_bytes` of the log, a batch gets an index entry."""

    segment_bytes: int
    index_bytes: int
    index_interval_bytes: int


@dataclass(frozen=True)
class Source:
    """A source segment. An output gets the modification time of its last source."""

    base_offset: int
    mtime_ms: int


@dataclass(frozen=True)
class Mark:
    """A state of a SegmentWriter to which it can be reset."""

    size_bytes: int
    records: int
    digest: Any
    index: Any


class Appends(Protocol):
    """Takes the batches of an output."""

    def append(self, data: np.ndarray, table: np.ndarray) -> None:
        """Append batches (BATCH_TABLE rows over their bytes), in order."""


class SegmentWriter:
    """Writes one new segment: call `append` with batches in order, then `seal`."""

    def __init__(
        self, fs: FileSystem, path_of: Callable[[str], str], base_offset: int, like: FileStat, limits: Limits
    ) -> None:
        self._fs = fs
        self._path_of = path_of
        self._like = like
        self.base_offset = base_offset
        self._max_bytes = min(limits.segment_bytes, MAX_SEGMENT_BYTES)
        self._indexer = SegmentIndexer(base_offset, limits.index_interval_bytes, limits.index_bytes)
        self._digest = file_digest()
        self.size_bytes = self._writeback_to = 0  # `_writeback_to`: the system has begun to write up to this position
        self.records = 0
        self.made: list[str] = []
        self._open: set[int] = set()
        self._fd = self._create(names.LOG)

    @property
    def log_path(self) -> str:
        return self._path_of(names.LOG)

    @property
    def scratch_bytes(self) -> int:
        """The maximum size of the log and its two indexes if the segment were sealed now, without the `.txnindex`."""
        return self.size_bytes + self._indexer.size_bytes

    def so_far(self) -> UnfinishedOutput:
        """Return what has been appended so far."""
        paths = {suffix: self._path_of(suffix) for suffix in (names.LOG, names.INDEX, names.TIME_INDEX)}
        return UnfinishedOutput(self.base_offset, paths, self.size_bytes, *self._indexer.entries())

    def _create(self, suffix: str) -> int:
        path = self._path_of(suffix)
        fd = self._fs.create(path, self._like)
        self._open.add(fd)
        self.made.append(path)
        return fd

    def _close(self, fd: int) -> None:
        self._open.discard(fd)  # before the close, which releases the descriptor even if it raises an error
        self._fs.close(fd)

    def append(self, data: np.ndarray, table: np.ndarray) -> int:
        """Append whole batches (`table` rows over `data`) until a limit is reached; return how many batches were
        appended.

        Sets the rows' positions in this segment. An empty segment takes a batch of any size within the offset range.
        """
        ends = np.cumsum(table["size_bytes"], dtype=np.int64)
        fits = (self.size_bytes + ends <= self._max_bytes) & (
            table["last_offset"] - self.base_offset <= MAX_RELATIVE_OFFSET
        )
        taken = len(table) if fits.all() else int(np.argmin(fits))
        # A batch above the size limit gets its own segment; a batch beyond the offset range needs another base offset.
        span = int(table["last_offset"][0]) - self.base_offset
        if taken == 0 and self.size_bytes == 0 and span <= MAX_RELATIVE_OFFSET:
            taken = 1
        table["position"][:taken] = self.size_bytes + ends[:taken] - table["size_bytes"][:taken]
        taken = self._indexer.add(table[:taken])
        if taken:
            part = data[: ends[taken - 1]]
            self._fs.write(self._fd, part)
            self._digest.update(part)
            self.size_bytes += int(ends[taken - 1])
            self.records += int(table["record_count"][:taken].sum())
            if self.size_bytes - self._writeback_to >= WRITEBACK_BYTES:
                self._fs.start_writeback(self._fd)
                self._writeback_to = self.size_bytes
        return taken

    def mark(self) -> Mark:
        return Mark(self.size_bytes, self.records, self._digest.copy(), self._indexer.mark())

    def since(self, mark: Mark) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the bytes and the rows (BATCH_TABLE) of the batches appended since `mark`, read from the file."""
        reader = SegmentReader(self._fs, chunk_bytes=1 << 20)
        for chunk in reader.chunks(self.log_path, self.size_bytes, start=mark.size_bytes):
            yield chunk.raw, chunk.table

    def reset_to(self, mark: Mark) -> None:
        """Remove all batches appended since `mark`."""
        self._fs.truncate(self._fd, mark.size_bytes)
        self.size_bytes, self.records = mark.size_bytes, mark.records
        self._digest = mark.digest
        self._indexer.reset_to(mark.index)

    def seal(self, mtime_ms: int, txn_index: bytes) -> OutputSegment:
        """Write the indexes, set all modification times to `mtime_ms` and make the contents of all files durable.

        A `.txnindex` is written only if `txn_index` has entries.
        """
        files = [self._seal_file(self._fd, names.LOG, mtime_ms, self.size_bytes, self._digest.hexdigest())]
        offset_index, time_index = self._indexer.close()
        indexes = {names.INDEX: offset_index, names.TIME_INDEX: time_index}
        if txn_index:
            indexes[names.TXN_INDEX] = txn_index
        for suffix, data in indexes.items():
            fd = self._create(suffix)
            self._fs.write(fd, data)
            digest = file_digest()
            digest.update(data)
            files.append(self._seal_file(fd, suffix, mtime_ms, len(data), digest.hexdigest()))
        return OutputSegment(self.base_offset, tuple(files))

    def _seal_file(self, fd: int, suffix: str, mtime_ms: int, size_bytes: int, digest: str) -> CleanFile:
        path = self._path_of(suffix)
        # The time is set first, so that fsync makes it durable together with the contents.
        self._fs.set_mtime_ns(path, mtime_ms * 1_000_000)
        self._fs.fsync(fd)
        self._close(fd)
        return CleanFile(suffix, os.path.basename(path), size_bytes, digest)

    def abandon(self) -> None:
        """Close the files; the caller removes them."""
        while self._open:
            with contextlib.suppress(OSError):
                self._fs.close(self._open.pop())


class OutputWriter:
    """Writes all outputs of one partition and attempt, from sources in ascending order.

    Call `start_output` with the first source of an output, `start_source` with each further source, and `append` with
    the batches of the last started source; at the end, call `finish` or `discard`. `txn_index(from, to)` returns the
    transaction index of an output with the offsets [from, to). `splits` counts the outputs that had to end inside a
    source. The sources are in `partition_path`; the outputs too, unless `scratch_path` is given. New files get the
    attributes that `like_of` returns for the paths of sources.
    """

    writes_with: type[SegmentWriter] = SegmentWriter

    def __init__(
        self,
        fs: FileSystem,
        partition_path: str,
        run_id: str,
        attempt: str,
        limits: Limits,
        txn_index: Callable[[int, int], bytes],
        scratch_path: str | None = None,
        like_of: Callable[[str], FileStat] | None = None,
    ) -> None:
        self._fs = fs
        self._partition_path = partition_path
        self._scratch_path = scratch_path or partition_path
        self._like_of = like_of or fs.stat
        self._run_id, self._attempt = run_id, attempt
        self._limits = limits
        self._txn_index = txn_index
        self._current: SegmentWriter | None = None
        self._coming: SegmentWriter | None = None  # the output that is being split off the current one
        self._sources: list[Source] = []  # sources of the current output
        self._mark: Mark | None = None  # the start of the last source, unless it is the first
        self._shares_source = False  # the current output continues the source in which the previous one ended
        self._groups: list[tuple[list[int], list[OutputSegment]]] = []
        self._made: dict[str, None] = {}  # paths in the order of creation
        self._closed_bytes = 0  # bytes of all files of closed outputs
        # Values of the counters below and of `_closed_bytes` at the start of the current group
        self._before = (0, 0, 0, 0)
        self.splits = 0
        self.size_bytes = 0
        self.records = 0

    @property
    def scratch_bytes(self) -> int:
        """The maximum size of all files if all outputs were closed now, without the current output's `.txnindex`."""
        return self._closed_bytes + (self._current.scratch_bytes if self._current else 0)

    @property
    def current_bytes(self) -> int:
        """The size of the `.log` of the current output."""
        return self._current.size_bytes if self._current else 0

    @property
    def may_move_source(self) -> bool:
        """Whether the batches of the last started source are moved to another output if the current one becomes full.
        """
        return self._mark is not None

    @property
    def complete_groups(self) -> int:
        """The number of groups that are complete: nothing will be added to them."""
        return len(self._groups) - self._shares_source

    @property
    def current_sources(self) -> tuple[int, ...]:
        """The base offsets of the sources of the current output; empty as long as it has no bytes."""
        if self._current is None or not self._current.size_bytes:
            return ()
        return tuple(source.base_offset for source in self._sources)

    def outputs(self) -> list[OutputSegment | UnfinishedOutput]:
        """Return the outputs so far; the last one is unfinished until `finish` has been called.

        Once all batches of a source have been appended, only `drop_group` changes the bytes written so far: batches are
        moved to another output only if they are of the last started source.
        """
        closed: list[OutputSegment | UnfinishedOutput] = [out for _, segments in self._groups for out in segments]
        return closed if self._current is None else [*closed, self._current.so_far()]

    def _path_of(self, base_offset: int) -> Callable[[str], str]:
        def path(suffix: str) -> str:
            name = names.scratch_file(base_offset, self._run_id, self._attempt, suffix)
            return os.path.join(self._scratch_path, name)

        return path

    def _open(self, base_offset: int, like_base: int) -> SegmentWriter:
        like = self._like_of(os.path.join(self._partition_path, names.segment_file(like_base, names.LOG)))
        return self.writes_with(self._fs, self._path_of(base_offset), base_offset, like, self._limits)

    def start_output(self, source: Source) -> None:
        """Start `source` and a new output with its base offset; close the current output, if there is one."""
        self._close(source.base_offset)
        self._begin_group()
        self._current = self._open(source.base_offset, source.base_offset)
        self._sources = [source]
        self._mark = None

    def start_source(self, source: Source) -> None:
        """Start `source`, to which the batches appended from now on belong."""
        assert self._current is not None
        self._mark = self._current.mark()
        self._sources.append(source)

    def append(self, data: np.ndarray, table: np.ndarray) -> None:
        """Append batches of the last started source, in order: `data` are their bytes, `table` their rows."""
        assert self._current is not None
        while len(table):
            taken = self._current.append(data, table)
            data = data[int(table["size_bytes"][:taken].sum(dtype=np.int64)) :]
            table = table[taken:]
            if len(table):
                # If no bytes came from earlier sources, a split at the start of this source leaves an output of 0
                # bytes. Such a split is made only if nothing of this source fits: a split inside the source would in
                # that case leave sources between two outputs (SWAP.md, state 56).
                if self._mark is not None and (self._mark.size_bytes or not self._current.size_bytes):
                    self._split_at_source()
                else:
                    self._split_inside_source(int(table["base_offset"][0]))

    def _split_at_source(self) -> None:
        """Move the batches of the last source that were appended so far to a new output."""
        assert self._current is not None and self._mark is not None
        old, mark, source = self._current, self._mark, self._sources[-1]
        self._coming = new = self._open(source.base_offset, source.base_offset)
        self._made.update(dict.fromkeys(new.made))
        rest: list[tuple[np.ndarray, np.ndarray]] = []
        for data, table in old.since(mark):
            # In an output of their own, batches may need more time index entries: earlier batches may have had larger
            # timestamps.
            taken = 0 if rest else new.append(data, table)
            if taken < len(table):
                done = int(table["size_bytes"][:taken].sum(dtype=np.int64))
                rest.append((data[done:].copy(), table[taken:].copy()))
        old.reset_to(mark)
        self._sources.pop()
        self._close(source.base_offset)
        self._begin_group()
        self._current, self._sources, self._mark = new, [source], None
        self._coming = None
        for data, table in rest:
            self.append(data, table)

    def _split_inside_source(self, base_offset: int) -> None:
        self.splits += 1
        source = self._sources[-1]
        self._close(base_offset)
        self._current = self._open(base_offset, source.base_offset)
        self._sources, self._mark, self._shares_source = [source], None, True

    def _begin_group(self) -> None:
        self._shares_source = False
        self._before = (self.splits, self.size_bytes, self.records, self._closed_bytes)

    def drop_group(self) -> int:
        """Remove the files of the current group; return the base offset of its first source, from which the next pass
        starts again."""
        assert self._current is not None
        first = self._sources[0].base_offset
        self._current.abandon()
        self._made.update(dict.fromkeys(self._current.made))
        paths = list(self._current.made)
        if self._shares_source:
            bases, segments = self._groups.pop()
            first = bases[0]
            paths += [os.path.join(self._scratch_path, file.name) for out in segments for file in out.files]
        for path in paths:
            self._fs.unlink(path)
            self._made.pop(path, None)
        self.splits, self.size_bytes, self.records, self._closed_bytes = self._before
        self._current, self._sources, self._mark, self._shares_source = None, [], None, False
        return first

    def _close(self, next_base: int) -> None:
        if self._current is None:
            return
        current = self._current
        self._made.update(dict.fromkeys(current.made))
        segment = current.seal(
            self._sources[-1].mtime_ms, self._txn_index(current.base_offset, next_base)
        )
        self._made.update(dict.fromkeys(current.made))
        self._closed_bytes += sum(file.size_bytes for file in segment.files)
        self.size_bytes += current.size_bytes
        self.records += current.records
        bases = [source.base_offset for source in self._sources]
        if self._shares_source:
            known, segments = self._groups[-1]
            known += bases[1:]
            segments.append(segment)
        else:
            self._groups.append((bases, [segment]))
        self._current = None

    def finish(self, end_offset: int) -> tuple[GroupOutput, ...]:
        """Make all outputs durable. Return a `GroupOutput` for each group, in ascending order, for `commit_group`."""
        self._close(end_offset)
        return tuple(GroupOutput(tuple(bases), tuple(segments)) for bases, segments in self._groups)

    def discard(self) -> None:
        """Remove every created file as far as possible. Errors are suppressed, so that the error that led to this call
        is reported."""
        for writer in (self._current, self._coming):
            if writer is not None:
                writer.abandon()
                self._made.update(dict.fromkeys(writer.made))
        self._current = self._coming = None
        for path in self._made:
            with contextlib.suppress(OSError):  # the file may already have been removed
                self._fs.unlink(path)
        self._made.clear()
