"""Rebuilds the index files of one segment from its log, and compares them with the files on disk.

`index_segment` is one task. A large segment can be divided into slices that several tasks read (`slices_of`, `scan`,
`finish`): one pass would give the same entries. A `.txnindex` depends on the whole log; a pass over a segment returns
the batches that determine its entries (aborted.py). New files get scratch names; partition.py renames them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from keytail.errors import CorruptLog, Refused
from keytail.format import names
from keytail.format.batch import BATCH_TABLE
from keytail.format.index import MAX_RELATIVE_OFFSET, parse_offset_index
from keytail.kernels.native import file_digest
from keytail.log.fs import FileSystem
from keytail.log.index.indexer import SegmentIndexer
from keytail.log.partition import refuse_changed
from keytail.log.records.chunk import Chunk, SegmentReader, check_inside
from keytail.log.replacement.replace import CleanFile
from keytail.rebuild_index.aborted import Needed
from keytail.rebuild_index.entry_checks import why_wrong
from keytail.rebuild_index.epochs import Epoch, epochs_seen

# The size of a chunk is that of a core's own cache: smaller chunks are slower because of the work per chunk. Chunks are
# not prefetched: passing a chunk to another thread takes longer than processing its headers and checksums.
CHUNK_BYTES = 1 << 20
_NO_LIMIT_BYTES = 1 << 40

State = Literal["sound", "missing", "wrong"]


@dataclass(frozen=True)
class SegmentTask:
    """One segment, and everything that a task needs to know about its partition.

    No batch may reach `end_offset`. `asked_offsets` are the offsets in entries of the partition's transaction indexes.
    `torn_tail`: the log may end with bytes that are not a batch. `is_in_use`: a broker may be writing to the log.
    `rebuild_all`: files that differ from what a recovery writes count as wrong. `execute`: write replacements for wrong
    files.
    """

    partition_path: str
    base_offset: int
    log_bytes: int
    log_mtime_ns: int
    end_offset: int
    log_start_offset: int
    index_interval_bytes: int
    segment_index_bytes: int
    asked_offsets: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    torn_tail: bool = False
    is_in_use: bool = False
    rebuild_all: bool = False
    execute: bool = False
    run_id: str = ""
    attempt: str = "a"

    def path(self, suffix: str) -> str:
        return os.path.join(self.partition_path, names.segment_file(self.base_offset, suffix))


@dataclass(frozen=True)
class Slice:
    """Bytes `start` to `end` (exclusive) of a segment's log.

    `entry_offset` is the offset of the index entry at `start`, -1 for the first slice; the first batch of other slices
    must begin at or below that offset.
    """

    start: int
    end: int
    entry_offset: int = -1


@dataclass
class Scan:
    """The result of one pass over a slice. The valid batches of the slice end at byte `end`, before `damage` if there
    is any."""

    slice: Slice
    indexer: SegmentIndexer
    end: int
    batches: int
    first_offset: int
    last_offset: int
    rows: np.ndarray  # needed for the transaction indexes (BATCH_TABLE)
    epochs: list[Epoch] = field(default_factory=list)
    damage: CorruptLog | None = None


@dataclass(frozen=True)
class FileVerdict:
    """The verdict on one index file, its reason, and the file that replaces it (`clean`; None without `execute`)."""

    suffix: str
    state: State
    why: str = ""
    clean: CleanFile | None = None


@dataclass(frozen=True)
class SegmentResult:
    """The result for one segment. The valid batches of the segment end at byte `end_position` and before offset
    `next_offset`, and before `damage` if there is any.

    The whole log's transaction indexes and leader epochs are built from `rows` and `epochs`.
    """

    base_offset: int
    batches: int
    next_offset: int
    end_position: int
    files: tuple[FileVerdict, ...]
    rows: np.ndarray
    epochs: tuple[Epoch, ...] = ()
    damage: CorruptLog | None = None


def slices_of(fs: FileSystem, task: SegmentTask, slice_bytes: int) -> tuple[Slice, ...]:
    """Return slices of about `slice_bytes`, each beginning at an entry of the offset index; one slice if the segment is
    small or its index cannot be used.

    The index may be wrong: `finish` checks that the batches of each slice end where the next slice starts, and that the
    next slice begins with a complete batch at or below the entry's offset. If a check fails, `finish` reads the segment
    again.
    """
    whole = (Slice(0, task.log_bytes),)
    if task.log_bytes < 2 * slice_bytes or not fs.exists(task.path(names.INDEX)):
        return whole
    entries = parse_offset_index(fs.read_bytes(task.path(names.INDEX)))
    positions = entries["position"].astype(np.int64)
    rises = (np.diff(positions) > 0).all() and (np.diff(entries["relative_offset"]) > 0).all()
    if not len(entries) or not rises or positions[0] <= 0 or positions[-1] >= task.log_bytes:
        return whole
    parts = task.log_bytes // slice_bytes
    at = np.unique(np.searchsorted(positions, [task.log_bytes * n // parts for n in range(1, parts)]))
    at = at[at < len(positions)]
    starts = [0, *positions[at].tolist()]
    firsts = [-1, *(task.base_offset + entries["relative_offset"][at].astype(np.int64)).tolist()]
    ends = [*starts[1:], task.log_bytes]
    return tuple(Slice(*item) for item in zip(starts, ends, firsts, strict=True))


def index_segment(fs: FileSystem, task: SegmentTask) -> SegmentResult:
    """Read the whole segment, a second time if a file differs from what a recovery writes; return the verdicts on its
    `.index` and `.timeindex`. With `execute`, write replacements."""
    return _result(fs, task, scan(fs, task, Slice(0, task.log_bytes)))


def finish(fs: FileSystem, task: SegmentTask, scans: Sequence[Scan]) -> SegmentResult:
    """Return the same as `index_segment`, from the passes over all slices of the segment, in order.

    If a slice does not begin as the index indicated, the segment is read once more, by one task.
    """
    refuse_changed_segment(fs, task)
    whole = scans[0]
    for part in scans[1:]:
        begins_after = part.batches > 0 and whole.last_offset < part.first_offset
        if whole.damage is not None or whole.end != part.slice.start or not begins_after:
            return index_segment(fs, task)
        _join(fs, task, whole, part)
    rows = np.concatenate([part.rows for part in scans])
    epochs = [epoch for part in scans for epoch in part.epochs]
    if whole.indexer.is_over_full:
        raise _index_full(task)
    return _result(fs, task, replace(whole, rows=rows, epochs=epochs))


def _join(fs: FileSystem, task: SegmentTask, whole: Scan, part: Scan) -> None:
    """Append the result of the next slice (`part`) to `whole`. Each entry determines the next entry. The entries of the
    slice are valid from the first entry on that also follows from the entries before the slice. All entries of the
    slice are valid if the slice begins at an entry that a recovery would write.
    """
    if whole.indexer.next_gets_entry:
        whole.indexer.join(part.indexer)
    else:
        for chunk in _chunks(fs, task, part.slice.start, part.end):
            _add(task, whole.indexer, chunk)
            if whole.indexer.meets(part.indexer):
                whole.indexer.join(part.indexer)
                break
    whole.end, whole.last_offset, whole.damage = part.end, part.last_offset, part.damage
    whole.batches += part.batches


def scan(fs: FileSystem, task: SegmentTask, part: Slice) -> Scan:
    """Read the headers of a slice in one pass, checking every batch. Damage ends the pass, and is returned in the
    result."""
    refuse_changed_segment(fs, task)
    limit_bytes = _NO_LIMIT_BYTES if part.start else task.segment_index_bytes
    indexer = SegmentIndexer(task.base_offset, task.index_interval_bytes, limit_bytes, part=part.start > 0)
    needed = Needed(task.asked_offsets, task.log_start_offset)
    found = Scan(part, indexer, part.start, 0, -1, -1, np.empty(0, BATCH_TABLE))
    for chunk in _up_to_damage(fs, task, found):
        table = chunk.table
        if not found.batches:
            found.first_offset = int(table["base_offset"][0])
            if part.start and found.first_offset > part.entry_offset:
                return found  # the index is wrong: as `found` has no batches, `finish` reads the segment again
        check_inside(chunk, task.base_offset, min(task.end_offset - 1, task.base_offset + MAX_RELATIVE_OFFSET))
        _add(task, indexer, chunk)
        needed.add(table)
        latest = found.epochs[-1][0] if found.epochs else -1
        if (table["leader_epoch"] > latest).any():
            found.epochs += epochs_seen(table, latest)
        found.batches += len(table)
        found.last_offset = int(table["last_offset"][-1])
        found.end = chunk.position + len(chunk.raw)
    found.rows = needed.rows()
    return found


def _up_to_damage(fs: FileSystem, task: SegmentTask, found: Scan) -> Iterator[Chunk]:
    """Yield the chunks of the slice; damage that ends them early is recorded in `found`."""
    try:
        yield from _chunks(fs, task, found.slice.start, found.slice.end)
    except CorruptLog as damage:
        found.damage = damage


def _chunks(fs: FileSystem, task: SegmentTask, start: int, end: int) -> Iterator[Chunk]:
    reader = SegmentReader(fs, CHUNK_BYTES)
    return reader.chunks_without_prefetch(task.path(names.LOG), end, start=start)


def _add(task: SegmentTask, indexer: SegmentIndexer, chunk: Chunk) -> None:
    if indexer.add(chunk.table) < len(chunk.table):
        raise _index_full(task)


def _index_full(task: SegmentTask) -> Refused:
    return Refused(
        f"the index of the segment does not fit into segment.index.bytes {task.segment_index_bytes} with "
        f"index.interval.bytes {task.index_interval_bytes}; a broker that recovers the segment fails",
        path=task.path(names.LOG),
        remedy="Give the topic's settings: --topic-config TOPIC:segment.index.bytes=... (and index.interval.bytes)",
        slug="segment-index-bytes-too-small",
    )


def refuse_changed_segment(fs: FileSystem, task: SegmentTask) -> None:
    """Raise Refused if the file of the segment is not the file that was planned; a segment in use may have grown."""
    path = task.path(names.LOG)
    if task.is_in_use and fs.exists(path) and fs.stat(path).size_bytes >= task.log_bytes:
        return
    refuse_changed(fs, path, task.log_bytes, task.log_mtime_ns)


def _result(fs: FileSystem, task: SegmentTask, found: Scan) -> SegmentResult:
    files: tuple[FileVerdict, ...] = ()
    if found.damage is None or task.torn_tail:
        files = _judge(fs, task, found, *found.indexer.close())
    return SegmentResult(
        base_offset=task.base_offset,
        batches=found.batches,
        next_offset=found.last_offset + 1 if found.batches else task.base_offset,
        end_position=found.end,
        files=files,
        rows=found.rows,
        epochs=tuple(found.epochs),
        damage=found.damage,
    )


def _judge(
    fs: FileSystem, task: SegmentTask, found: Scan, offset_index: bytes, time_index: bytes
) -> tuple[FileVerdict, ...]:
    """Compare both index files with what a recovery writes. A file with other bytes is sound if its entries are valid,
    unless `rebuild_all` is set."""
    wanted = {names.INDEX: offset_index, names.TIME_INDEX: time_index}
    existing = {suffix: read_if_there(fs, task, suffix) for suffix in wanted}
    reasons = dict.fromkeys(wanted, "differs from what a recovery writes")
    differ = [suffix for suffix, data in wanted.items() if existing[suffix] not in (None, data)]
    if differ and not task.rebuild_all:
        reader = SegmentReader(fs, CHUNK_BYTES)
        found_wrong = why_wrong(
            existing[names.INDEX] or b"",
            existing[names.TIME_INDEX] or b"",
            reader.chunks_without_prefetch(task.path(names.LOG), found.end),
            reader,
            base_offset=task.base_offset,
            index_interval_bytes=task.index_interval_bytes,
            is_in_use=task.is_in_use,
        )
        reasons = dict(zip(wanted, found_wrong, strict=True))
    verdicts = []
    for suffix, data in wanted.items():
        if existing[suffix] is None:
            verdict = FileVerdict(suffix, "missing", "the file is missing")
        elif suffix in differ and reasons[suffix]:
            verdict = FileVerdict(suffix, "wrong", reasons[suffix])
        else:
            verdict = FileVerdict(suffix, "sound")
        if verdict.state != "sound" and task.execute:
            verdict = replace(verdict, clean=write_scratch(fs, task, suffix, data))
        verdicts.append(verdict)
    return tuple(verdicts)


def read_if_there(fs: FileSystem, task: SegmentTask, suffix: str) -> bytes | None:
    """Return the bytes of the file; None if there is no file. Without `execute`, a running broker may trim the file
    meanwhile."""
    try:
        return fs.read_bytes(task.path(suffix), whole=task.execute)
    except FileNotFoundError:
        return None


def write_scratch(fs: FileSystem, task: SegmentTask, suffix: str, data: bytes) -> CleanFile:
    """Write a durable file with owner and mode of the segment's file that it will replace, or of the log; return it."""
    like = task.path(suffix) if fs.exists(task.path(suffix)) else task.path(names.LOG)
    name = names.scratch_file(task.base_offset, task.run_id, task.attempt, suffix)
    path = os.path.join(task.partition_path, name)
    fs.write_file(path, data, fs.stat(like))
    digest = file_digest()
    digest.update(data)
    return CleanFile(suffix, name, len(data), digest.hexdigest())
