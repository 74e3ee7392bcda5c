"""The map phase in several threads, which read chunks, decompress their batches and hash the keys; the caller's thread
puts the keys into the map.

One thread at a time reads a chunk and follows its transactions, in order. Keys are also put into the map in order,
which takes less than half of the time of the phase. The result, and the record at which the map is full, are the same
as with one thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence

import numpy as np

from keytail.compact.map_phase.offset_map import OffsetMap
from keytail.compact.map_phase.survivors import DirtyChunk, SurvivorBuilder, Survivors, TransactionTrackers
from keytail.errors import KeytailError
from keytail.log.partition import SegmentFacts
from keytail.log.records.chunk import SegmentReader
from keytail.log.records.key_scan import ChunkKeys, KeyScanner
from keytail.log.side_by_side import items_in_flight, side_by_side

# Maximum number of records of a chunk whose keys are put as a whole; a few compressed bytes can contain more records,
# whose keys are put by portions.
_MAX_KEYS = 1 << 20

Scanned = tuple[DirtyChunk, ChunkKeys | KeytailError | None]


class BuilderInThreads(SurvivorBuilder):
    """Builds the same Survivors as SurvivorBuilder, with a thread for each of `scanners` except the first, which scans
    chunks whose keys are put by portions.
    """

    def __init__(self, reader: SegmentReader, scanners: Sequence[KeyScanner], offset_map: OffsetMap) -> None:
        super().__init__(reader, scanners[0], offset_map)
        self._threads = len(scanners) - 1
        self._idle = [(reader.new_opener(), scanner) for scanner in scanners[1:]]

    def _map_from(
        self,
        number: int,
        end: int,
        survivors: Survivors,
        partition_path: str,
        segments: Sequence[SegmentFacts],
        from_offset: int,
        trackers: TransactionTrackers,
    ) -> int:
        """Put the keys of segment `number` and of the next segments, up to the first in which the map may become full,
        into the map; return the number of the segment after these."""
        behind = number + 1
        room = self._map.max_entries - self._map.used
        while behind < end and segments[behind].base_offset - segments[number].base_offset <= room:
            behind += 1

        def chunks() -> Generator[DirtyChunk, None, None]:
            for following in range(number, behind):
                yield from self._chunks(survivors, partition_path, segments, following, from_offset, trackers)

        def scan(item: DirtyChunk) -> Scanned:
            return item, self._scan(item, from_offset)

        self._reader.keep_valid(items_in_flight(self._threads))
        with contextlib.closing(side_by_side(chunks(), scan, self._threads)) as scanned:
            for item, found in scanned:
                if not survivors.full:
                    of_segment = int(item.first_ordinal[0]) >> 32
                    if of_segment > survivors.first_segment:
                        survivors.latest_offset = max(survivors.latest_offset, segments[of_segment].base_offset - 1)
                    self._take(survivors, item, found, from_offset)
        if behind == end:
            self._reader.keep_valid(2)
        return behind

    def _scan(self, item: DirtyChunk, from_offset: int) -> ChunkKeys | KeytailError | None:
        """Return the keys of a chunk, in a thread; None if the chunk has too many, or the map is full. An error is
        returned, not raised, because it does not matter if the map is full before this chunk."""
        if item.wanted is None:
            return None
        keys = int(item.chunk.table["record_count"][item.wanted].sum())
        if keys > _MAX_KEYS:
            return None
        opener, scanner = kit = self._idle.pop()
        try:
            parts = opener.open_rows(item.chunk, item.wanted)
            return scanner.keys_of(item.chunk, parts, from_offset, item.first_ordinal, keys)
        except KeytailError as problem:
            return problem
        finally:
            self._idle.append(kit)

    def _take(
        self, survivors: Survivors, item: DirtyChunk, found: ChunkKeys | KeytailError | None, from_offset: int
    ) -> None:
        """Put the keys of the next chunk into the map, which is not full."""
        if isinstance(found, KeytailError):
            raise found
        if found is None:
            for portion in self._find_keys(survivors, (item,), from_offset):
                if portion is not None and not survivors.full:
                    self._put(survivors, portion, from_offset)
            return
        n, batches = len(found.ordinals), len(item.chunk.table)
        survivors.reserve_nulls(item.batches + batches)
        first, pad = divmod(item.batches, 8)
        nulls = np.unpackbits(found.nulls, count=batches, bitorder="little")
        shifted = np.packbits(np.concatenate([np.zeros(pad, np.uint8), nulls]), bitorder="little")
        survivors.null_bits[first : first + len(shifted)] |= shifted
        done = self._map.put_all(found.low, found.high, found.ordinals, n)
        if done < n:
            self._stop_after(done, survivors, item, from_offset)
            return
        self._note_keyless(survivors, found.keyless, found.first_keyless_offset)
        last = int(item.chunk.table["last_offset"][-1])
        if last >= from_offset:
            survivors.latest_offset = last

    def _stop_after(self, done: int, survivors: Survivors, item: DirtyChunk, from_offset: int) -> None:
        """Note the record of the chunk at which the map was full, after `done` keys of the chunk were put."""
        for portion in self._find_keys(survivors, (item,), from_offset):
            assert portion is not None
            if done < len(portion.ordinals):
                self._stop_in_front_of(int(portion.ordinals[done]), survivors, portion, from_offset)
                return
            done -= len(portion.ordinals)
            self._note_put(survivors, portion, from_offset)
