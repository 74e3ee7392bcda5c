"""The scratch file with the surviving records of a shard; each task that rewrites segments reads a part of the file.

A file consists of blocks and an index with one row per block. A block has the numbers, within their segment, of
surviving records (4 bytes each, ascending), or one bit per batch of a slice, set if a record of the batch has a null
value. Like the files of compact/saved_state.py, a file belongs to one run, and is used only if its checksums match.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from keytail.compact.fan_out.slices import SliceFacts
from keytail.compact.map_phase.key_counts import Counted
from keytail.compact.map_phase.offset_map import OffsetMap
from keytail.compact.map_phase.survivors import Survivors
from keytail.compact.task import CleaningTask
from keytail.errors import KeytailError
from keytail.format import names
from keytail.kernels import fan_out as kernels
from keytail.log.fs import FileSystem
from keytail.log.replacement.replace import CleanFile

RECORDS, NULLS = 0, 1  # the kinds of blocks
# `count`: the number of records or, for NULLS, of batches; `first`: for NULLS, the first batch's number in the segment.
_ROW = np.dtype(
    [("segment", "i8"), ("kind", "i8"), ("position", "i8"), ("count", "i8"), ("first", "i8"), ("digest", "S16")]
)


@dataclass(frozen=True)
class ShardBits:
    """The file of one shard (its digest is that of the index), the number of blocks in the file, and the shard's number
    of keys in the dirty section. `keyless` has four numbers for each slice whose null values are in the file: the
    number of keyless records in the mapped range and the first offset of these, then the number and the first offset of
    the other keyless records. `counted` has the counts of records by key, or is None.
    """

    file: CleanFile
    blocks: int
    keys: int
    keyless: tuple[tuple[int, int, int, int], ...] = ()
    counted: Counted | None = None


class BitsWriter:
    """Writes the file of one shard: callers `add` survivors, `add_nulls`, and then `close` or `discard` the file. A
    block has at most `most_numbers` survivors.
    """

    def __init__(self, fs: FileSystem, task: CleaningTask, most_numbers: int) -> None:
        self._fs = fs
        base = task.segments[task.first_segment].base_offset
        self.name = names.scratch_file(base, task.run_id, task.attempt, names.SURVIVORS)
        self._path = os.path.join(task.scratch_path, self.name)
        self._fd = fs.create(self._path, task.like(fs, task.path(base, names.LOG)))
        self._waiting = np.empty(most_numbers, np.int64)
        self._filled = 0
        self._rows: list[tuple[int, int, int, int, int, bytes]] = []
        self._size_bytes = 0

    def add(self, ordinals: np.ndarray) -> None:
        """Add ordinals of surviving records, in any order, each once."""
        while len(ordinals):
            part = ordinals[: len(self._waiting) - self._filled]
            self._waiting[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            ordinals = ordinals[len(part) :]
            if self._filled == len(self._waiting):
                self._flush()

    def add_nulls(self, segment: int, first_batch: int, batches: int, bits: np.ndarray) -> None:
        self._write(segment, NULLS, batches, first_batch, bits[: (batches + 7) // 8])

    def _flush(self) -> None:
        if not self._filled:
            return
        found = self._waiting[: self._filled]
        found.sort()
        numbers = (found & 0xFFFFFFFF).astype("<u4")
        segments, starts = np.unique(found >> 32, return_index=True)
        for segment, start, end in zip(segments, starts, [*starts[1:], len(found)], strict=True):
            self._write(int(segment), RECORDS, int(end - start), 0, numbers[start:end])
        self._filled = 0

    def _write(self, segment: int, kind: int, count: int, first: int, data: np.ndarray) -> None:
        part = np.ascontiguousarray(data).view(np.uint8)
        digest = hashlib.blake2b(part, digest_size=16).digest()
        self._rows.append((segment, kind, self._size_bytes, count, first, digest))
        if len(part):
            self._fs.write(self._fd, part)
        self._size_bytes += len(part)

    def close(self) -> tuple[CleanFile, int]:
        """Finish the file; return its name and size with the digest of its index, and the number of its blocks."""
        self._flush()
        rows = np.array(self._rows, _ROW)
        data = rows.tobytes()
        if data:
            self._fs.write(self._fd, data)
        fd, self._fd = self._fd, -1
        self._fs.close(fd)
        digest = hashlib.blake2b(data).hexdigest()
        return CleanFile(names.SURVIVORS, self.name, self._size_bytes + len(data), digest), len(rows)

    def discard(self) -> None:
        with contextlib.suppress(OSError):  # only the first error is reported
            if self._fd >= 0:
                self._fs.close(self._fd)
        with contextlib.suppress(OSError):
            self._fs.unlink(self._path)


def load_survivors(
    fs: FileSystem, task: CleaningTask, shards: Sequence[ShardBits], slices: Sequence[SliceFacts], part: tuple[int, int]
) -> Survivors:
    """Return the survivors of the segments with the numbers `part` (first, end). The bits of these survivors decide
    about all records of the segments, and the map of the survivors is empty.
    """
    first, end = part
    survivors = Survivors(OffsetMap(0), first, latest_offset=task.first_uncleanable_offset - 1)
    for number in range(first, end):
        own = [facts for facts in slices if facts.segment == number]
        survivors.record_start.append(survivors.records)
        survivors.batch_start.append(survivors.batches)
        survivors.segment_records.append(sum(facts.records for facts in own))
        survivors.batches += sum(facts.batches for facts in own)
    survivors.bits = np.zeros((survivors.records + 7) // 8, np.uint8)
    survivors.null_bits = np.zeros((survivors.batches + 7) // 8, np.uint8)
    for shard in shards:
        path = os.path.join(task.scratch_path, shard.file.name)
        fd = fs.open_read(path)
        try:
            for row in _index(fs, fd, path, shard):
                if first <= row["segment"] < end:
                    _take(survivors, row, _block(fs, fd, path, row))
        finally:
            fs.close(fd)
    return survivors


def _take(survivors: Survivors, row: np.void, block: np.ndarray) -> None:
    k = int(row["segment"]) - survivors.first_segment
    if row["kind"] == NULLS:
        start = survivors.batch_start[k] + int(row["first"])
        if start + row["count"] > survivors.batches:
            raise IndexError("bits for more batches than the segments have")
        kernels.copy_bits(block, int(row["count"]), start, survivors.null_bits)
        return
    numbers = block.view("<u4")
    if len(numbers) and int(numbers[-1]) >= survivors.segment_records[k]:
        raise IndexError("bits for more records than the segment has")
    kernels.set_bits(numbers, survivors.record_start[k], survivors.bits)


def _index(fs: FileSystem, fd: int, path: str, shard: ShardBits) -> np.ndarray:
    data = np.empty(shard.blocks * _ROW.itemsize, np.uint8)
    got = fs.read_into(fd, data, shard.file.size_bytes - len(data)) if len(data) else 0
    if got < len(data) or hashlib.blake2b(data).hexdigest() != shard.file.digest_hex:
        raise _differs(path)
    return data.view(_ROW)


def _block(fs: FileSystem, fd: int, path: str, row: np.void) -> np.ndarray:
    size = 4 * int(row["count"]) if row["kind"] == RECORDS else (int(row["count"]) + 7) // 8
    data = np.empty(size, np.uint8)
    got = fs.read_into(fd, data, int(row["position"])) if size else 0
    digest: bytes = hashlib.blake2b(data, digest_size=16).digest()
    if got < size or digest.rstrip(b"\0") != row["digest"]:  # NumPy strips trailing zeros
        raise _differs(path)
    return data


def _differs(path: str) -> KeytailError:
    return KeytailError(
        "a scratch file of an earlier stage of the fan-out has changed since it was written",
        path=path,
        remedy="Nothing more was replaced. Check the disk and the memory of the hosts, and run again",
        slug="scratch-file-changed",
    )
