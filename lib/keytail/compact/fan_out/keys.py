"""Stages 3 and 4 of a fan-out: key runs of slices, split into shards by hash, and their merge in each shard.

Records of the dirty section that the map would contain are *put*: of each key, the last record in a slice is sent, and
an earlier one each time the slice's own map is full. All other records whose survival depends on their key are
*probed*: records before the dirty section, and data that only the map treats as aborted (CLEANING.md 11.4). A shard
receives all puts and probes of its keys. One rule holds for puts and probes: a record survives unless a later record of
its key was put.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from keytail.compact.fan_out.bits import BitsWriter, ShardBits
from keytail.compact.fan_out.slices import Settled, SliceFacts
from keytail.compact.map_phase.offset_map import COUNT, LOAD_FACTOR, SLOT_BYTES, OffsetMap
from keytail.compact.plan import segments_between
from keytail.compact.saved_state import load_state
from keytail.compact.task import CleaningTask
from keytail.errors import KeytailError
from keytail.format import names
from keytail.format.batch import CONTROL
from keytail.kernels import fan_out as kernels
from keytail.kernels.rewriting.records import note_nulls
from keytail.log.fs import FileSystem
from keytail.log.records.chunk import Chunk, SegmentReader
from keytail.log.records.scan import Portion, RecordScanner
from keytail.log.replacement.replace import CleanFile
from keytail.run.shuffle import Cell
from keytail.values import from_bytes, to_bytes

MAX_SHARDS = 1 << 14
_PUTS, _FACTS, _PROBES = 0, 1, 2  # the upper bits of a cell's order
_KIND_SHIFT = 60
_SLICE_SHIFT = 32
_KEYS_AT_ONCE = 1 << 20  # maximum number of keys divided among the shards at a time: 24 MiB, and 24 MiB for the result
_MIN_KEYS_AT_ONCE = 1 << 10
# A table that fits into the processor's cache, so that keys that occur once in a slice cost little
_DEDUP_BYTES = 12 << 20


@dataclass(frozen=True)
class ScanPart:
    task: CleaningTask
    facts: SliceFacts
    number: int
    settled: CleanFile
    shards: int


def shards_for(task: CleaningTask, slices: Sequence[SliceFacts]) -> int:
    """Return a number of shards, at most MAX_SHARDS. Below that maximum, the keys of each shard fit into its map, and
    into its table of the proof, even if all records of the dirty section have distinct keys.
    """
    first, end = segments_between(task.segments, task.first_dirty_offset, task.first_uncleanable_offset)
    dirty = sum(facts.records for facts in slices if first <= facts.segment < end)
    # The proof's slots are at most 0.75 full; hashes are distributed unevenly by a few percent.
    keys = max(1, int(task.map_memory_bytes * 2 / (3 * SLOT_BYTES) * 0.75 * 0.85))
    return min(MAX_SHARDS, max(1, -(-dirty // keys)))


class _Run:
    """Buffers for keys to be sent to the shards: arrays that are split when they are full.

    `counting`: the keys come from counting maps, and are sent with the number of records that each stands for.
    """

    def __init__(self, kind: int, number: int, shards: int, memory_bytes: int, *, counting: bool = False) -> None:
        room = max(_MIN_KEYS_AT_ONCE, min(_KEYS_AT_ONCE, memory_bytes // (6 * _item_bytes(counting=counting))))
        self._order = kind << _KIND_SHIFT | number << _SLICE_SHIFT
        self._starts = np.zeros(shards + 1, np.int64)
        self._arrays = [np.empty(room, dtype) for dtype in (np.uint64, np.uint64, np.int64)]
        self._sorted = [np.empty(room, dtype) for dtype in (np.uint64, np.uint64, np.int64)]
        self._times, self._sorted_times = (np.empty(room if counting else 0, COUNT) for _ in range(2))
        self._filled = 0

    def take(self, low: np.ndarray, high: np.ndarray, ordinals: np.ndarray, n: int) -> Iterator[Cell]:
        """Add the first `n` items, except those with an ordinal below 0; yield the cells of each full buffer."""
        i = 0
        while True:
            i, self._filled = kernels.gather(low, high, ordinals, n, i, *self._arrays, self._filled)
            if i == n:
                return
            yield from self.give()

    def drain(self, offset_map: OffsetMap) -> Iterator[Cell]:
        """Move all entries out of `offset_map`, in which the two words of each hash are swapped; yield the cells of
        each full buffer."""
        i = 0
        low, high, ordinals = self._arrays
        while True:
            i, self._filled = kernels.drain(
                offset_map.slots, offset_map.counts, i, high, low, ordinals, self._times, self._filled
            )
            if i == len(offset_map.slots):
                offset_map.used = 0
                return
            yield from self.give()

    def give(self) -> Iterator[Cell]:
        """Yield a cell for each shard that owns any of the buffered keys, and empty the buffers."""
        sorted_arrays: list[np.ndarray] = [*self._sorted, self._sorted_times]
        shards = len(self._starts) - 1
        kernels.split(*self._arrays, self._times, self._filled, shards, self._starts, *sorted_arrays)
        self._filled = 0
        for shard in np.flatnonzero(np.diff(self._starts)):
            part = slice(self._starts[shard], self._starts[shard + 1])
            yield Cell(int(shard), self._order, b"".join(array[part].tobytes() for array in sorted_arrays))
        self._order += 1


class _Scan:
    """The scan of one slice."""

    def __init__(self, part: ScanPart, settled: Settled) -> None:
        task = part.task
        self._task, self._settled = task, settled
        self._number = part.facts.segment
        first, end = segments_between(task.segments, task.first_dirty_offset, task.first_uncleanable_offset)
        self._is_dirty = first <= self._number < end
        memory = task.map_memory_bytes // 2
        counting = task.hottest_keys > 0
        self._map = OffsetMap(min(memory, _DEDUP_BYTES), counting=counting)
        self._puts = _Run(_PUTS, part.number, part.shards, memory, counting=counting)
        self._probes = _Run(_PROBES, part.number, part.shards, memory)
        self.nulls = np.zeros((part.facts.batches + 7) // 8, np.uint8)
        self.keyless = np.array([0, -1, 0, -1], np.int64)

    def wanted(self, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return for each batch (bool) whether its records are put, and whether they are probed. Records below the
        first dirty offset are probed even in a batch that is put."""
        is_data = ((table["attributes"] & CONTROL) == 0) & (table["record_count"] > 0)
        puts = np.zeros(len(table), bool)
        if self._is_dirty:
            puts = is_data & (table["last_offset"] >= self._task.first_dirty_offset)
            puts &= ~self._settled.aborted_to_map.rows(table)
        return puts, is_data & ~puts & ~self._settled.transactions.aborted(table)

    def take(self, portion: Portion, is_put: np.ndarray, first_ordinal: np.ndarray) -> Iterator[Cell]:
        n, columns = len(portion.records), portion.columns
        kernels.number_records(
            portion.records, n, portion.opened.from_here(first_ordinal), is_put, self._task.first_dirty_offset,
            columns.ordinals, columns.found, self.keyless,
        )  # fmt: skip
        portion.hash_keys(self._task.hash_seed)
        done = 0
        while True:
            low, high, ordinals = (array[done:n] for array in (columns.low, columns.high, columns.ordinals))
            # The words are swapped, so that the order in which this map is drained is not the order of a shard's map.
            done += self._map.put_all(high, low, ordinals, n - done)
            if done == n:
                break
            yield from self._puts.drain(self._map)
        yield from self._probes.take(columns.low, columns.high, columns.found, n)

    def finish(self) -> Iterator[Cell]:
        yield from self._puts.drain(self._map)
        yield from self._puts.give()
        yield from self._probes.give()


def scan(fs: FileSystem, part: ScanPart, attempt: str) -> Iterator[Cell]:
    """Yield the key runs of a slice and, for one shard, which batches of the slice have null values and how many
    records have no key. Writes nothing.
    """
    task, facts = part.task, part.facts
    settled: Settled = load_state(fs, task, part.settled)
    reader, scanner = SegmentReader(fs), RecordScanner()
    item = _Scan(part, settled)
    path = task.path(task.segments[facts.segment].base_offset, names.LOG)
    batches = records = 0
    for chunk in reader.chunks(path, facts.end, start=facts.start):
        table = chunk.table
        counts = table["record_count"].astype(np.int64)
        before = (facts.segment << 32) + facts.records_before + records
        first_ordinal = before + np.cumsum(counts) - counts
        for portion, is_put in _portions(reader, scanner, chunk, item):
            note_nulls(portion.records, len(portion.records), item.nulls, batches)
            yield from item.take(portion, is_put, first_ordinal)
        records += int(counts.sum())
        batches += len(table)
    yield from item.finish()
    known = (facts.segment, facts.batches_before, facts.batches, item.nulls.tobytes(), tuple(map(int, item.keyless)))
    yield Cell(part.number % part.shards, _FACTS << _KIND_SHIFT | part.number << _SLICE_SHIFT, to_bytes(known))


def _portions(
    reader: SegmentReader, scanner: RecordScanner, chunk: Chunk, item: _Scan
) -> Iterator[tuple[Portion, np.ndarray]]:
    puts, probes = item.wanted(chunk.table)
    for opened in reader.open_rows(chunk, puts | probes):
        for portion in scanner.portions(chunk, opened):
            yield portion, puts


def merge(
    fs: FileSystem, task: CleaningTask, shard: int, cells: Iterable[tuple[int, bytes]], attempt: str
) -> ShardBits:
    """Write the survivors among the records of one shard to a scratch file of this attempt; return the file and the
    counts of the shard.

    In `cells`, puts are first, those of each key in the order of the log. A merge needs the memory of the map and a
    quarter more, for any number of probes.
    """
    counting = task.hottest_keys > 0
    offset_map = OffsetMap(task.map_memory_bytes, counting=counting)
    room = max(_MIN_KEYS_AT_ONCE, min(_KEYS_AT_ONCE, task.map_memory_bytes // (6 * 8)))
    found = np.empty(0, np.int64)
    writer = BitsWriter(fs, replace(task, attempt=attempt), room)
    keyless: list[tuple[int, int, int, int]] = []
    try:
        for order, data in cells:
            kind = order >> _KIND_SHIFT
            if kind == _FACTS:
                segment, first_batch, batches, nulls, counted = from_bytes(data)
                writer.add_nulls(segment, first_batch, batches, np.frombuffer(nulls, np.uint8))
                keyless.append(counted)
                continue
            n = len(data) // _item_bytes(counting=counting and kind == _PUTS)
            low, high, ordinals, times = _columns(bytearray(data), n)
            if kind == _PUTS:
                if offset_map.put_all(low, high, ordinals, n, times) < n:
                    raise _too_small(task, offset_map)
                continue
            if len(found) < n:
                found = np.empty(n, np.int64)
            offset_map.get_all(low, high, ordinals, n, found)
            writer.add(ordinals[found[:n] <= ordinals])
        keys = offset_map.used
        counted = offset_map.counted(task.hottest_keys) if counting else None
        for start in range(0, len(offset_map.slots), room):
            values = offset_map.slots[start : start + room]["value"]
            writer.add(values[values != 0] - 1)
        file, blocks = writer.close()
    except BaseException:
        writer.discard()
        raise
    return ShardBits(file, blocks, keys, tuple(keyless), counted)


def _item_bytes(*, counting: bool) -> int:
    return SLOT_BYTES + COUNT.itemsize if counting else SLOT_BYTES


def _columns(data: bytearray, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the columns of a cell of `n` items: both words of the hashes, the ordinals, and the numbers of records of
    the keys (empty if the cell does not contain them).
    """
    words = np.frombuffer(data, np.uint64, 3 * n)
    times = np.frombuffer(data, COUNT, -1, SLOT_BYTES * n) if len(data) > SLOT_BYTES * n else np.zeros(0, COUNT)
    return words[:n], words[n : 2 * n], words[2 * n :].view(np.int64), times


def _too_small(task: CleaningTask, offset_map: OffsetMap) -> KeytailError:
    return KeytailError(
        f"a shard has more than the {int(len(offset_map.slots) * LOAD_FACTOR)} keys that fit into "
        f"{task.map_memory_bytes} bytes of memory",
        path=task.partition_path,
        remedy="Nothing was replaced. Raise --map-memory",
        slug="too-many-keys",
    )
