"""The offset map: from the 128-bit hash of a key to the ordinal of the key's last record in the dirty section.

An ordinal is `segment_number << 32 | record_number`; ordinals ascend as offsets do. Like Kafka's SkimpyOffsetMap, the
map has no key bytes. The table of the map starts small and doubles; the old and the new table together stay within the
map's memory. A map that has reached its maximum number of keys is full, and the round ends before the next record, as
in Kafka (format/CLEANING.md, "Full map"). A counting map also counts the records of each key, which takes 4 bytes more
per slot.
"""

from __future__ import annotations

import numpy as np

from keytail.compact.map_phase.key_counts import Counted
from keytail.compact.table_memory import TableMemory, zeros
from keytail.kernels import offset_map as kernels

SLOT_BYTES = kernels.SLOT.itemsize
COUNT = np.dtype(np.uint32)
LOAD_FACTOR = 0.9
# A table that stays in the CPU cache grows earlier, since a search in a table that is half full visits fewer slots.
_SMALL_LOAD_FACTOR = 0.5
_SMALL_BYTES = 8 << 20
_FIRST_SLOTS = 1 << 14
_ONCE = np.zeros(0, COUNT)
_MAX_PRESENT_BYTES = 4 << 20  # maximum size of the bit table that rules out most absent hashes


class OffsetMap:
    """A map with slots and counts of at most `memory_bytes`, even while it grows. `max_entries` may limit the number of
    keys further, as the number of slots does in Kafka."""

    stored_fields = ("_max_slots", "_max_entries", "_slots", "_counts", "used")
    _present: np.ndarray | None = None  # created at its first use
    _memory = TableMemory(0)  # of a map that was stored and loaded

    def __init__(self, memory_bytes: int, max_entries: int | None = None, *, counting: bool = False) -> None:
        # During the last doubling, the old table of half the size exists beside the new one.
        slot_bytes = SLOT_BYTES + COUNT.itemsize if counting else SLOT_BYTES
        self._max_slots = max(2, memory_bytes * 2 // (3 * slot_bytes))
        self._max_entries = max(1, int(self._max_slots * LOAD_FACTOR))
        if max_entries is not None:
            self._max_entries = max(1, min(max_entries, self._max_entries))
        slots = self._max_slots
        while slots > _FIRST_SLOTS:
            slots = (slots + 1) // 2
        self._memory = TableMemory(memory_bytes)
        self._slots = self._memory.zeros(max(2, slots), kernels.SLOT)
        self._counts = zeros(len(self._slots) if counting else 0, COUNT)
        self.used = 0

    @property
    def slots(self) -> np.ndarray:
        return self._slots

    @property
    def counts(self) -> np.ndarray:
        """The number of records of the key in each slot (uint32), 0 for a free slot; empty if the map does not count.
        """
        return self._counts

    @property
    def is_counting(self) -> bool:
        return len(self._counts) > 0

    @property
    def max_entries(self) -> int:
        return self._max_entries

    def _limit(self) -> int:
        """Return the number of entries at which the table grows or, at its maximum size, is full."""
        if len(self._slots) >= self._max_slots:
            return self._max_entries
        is_small = len(self._slots) * SLOT_BYTES <= _SMALL_BYTES
        return min(self._max_entries, int(len(self._slots) * (_SMALL_LOAD_FACTOR if is_small else LOAD_FACTOR)))

    def _grow(self) -> None:
        larger = self._memory.zeros(min(self._max_slots, len(self._slots) * 2), kernels.SLOT)
        counts = zeros(len(larger) if self.is_counting else 0, COUNT)
        kernels.rehash(self._slots, self._counts, larger, counts)
        self._slots, self._counts = larger, counts

    def put_all(
        self, low: np.ndarray, high: np.ndarray, ordinals: np.ndarray, n: int, times: np.ndarray = _ONCE
    ) -> int:
        """Put the first `n` items in order: words of the hash (uint64), ordinal (int64; an item below 0 is skipped).

        An item counts as one record, or as the number of records in `times` (uint32). Returns the number of items that
        were processed; if it is less than `n`, the map was full before the next item.
        """
        done = 0
        self._present = None
        while True:
            done, self.used = kernels.put_all(
                self._slots, self._counts, self.used, self._limit(), low, high, ordinals, times, n, done
            )
            if done == n or self.used >= self._max_entries:
                return done
            self._grow()

    def get_all(
        self, low: np.ndarray, high: np.ndarray, wanted: np.ndarray, n: int, found: np.ndarray
    ) -> None:
        """Write the ordinals of the first `n` hashes to `found` (int64), -1 for a hash that is absent or whose `wanted`
        (int64) is below 0. Several threads may call this method at the same time.
        """
        present = self._present
        if present is None:
            n_bytes = min(_MAX_PRESENT_BYTES, 1 << len(self._slots).bit_length())  # at least 8 bits per slot
            present = np.zeros(n_bytes, np.uint8)
            kernels.note_present(self._slots, present)
            self._present = present
        kernels.get_all(self._slots, present, low, high, wanted, n, found)

    def watch(self, low: np.ndarray, high: np.ndarray, wanted: np.ndarray, n: int) -> int:
        """Put each of the first `n` hashes that is absent into the map, with ordinal 0, except where `wanted` (int64)
        is below 0. Returns the number of hashes that were processed, as `put_all` does.
        """
        found = np.empty(n, np.int64)
        self.get_all(low, high, wanted, n, found)
        return self.put_all(low, high, np.where((found < 0) & (wanted[:n] >= 0), 0, -1), n)

    def update_all(self, low: np.ndarray, high: np.ndarray, ordinals: np.ndarray, n: int) -> None:
        """Put items as `put_all` does, but only items whose keys are already in the map."""
        found = np.empty(n, np.int64)
        self.get_all(low, high, ordinals, n, found)
        present = np.where(found >= 0, ordinals[:n], -1)
        no_limit = len(self._slots) + 1
        kernels.put_all(self._slots, self._counts, self.used, no_limit, low, high, present, _ONCE, n, 0)

    def counted(self, most: int) -> Counted:
        """Return the counts by size, and at most `most` hottest keys, each with two or more records."""
        keys, records = np.zeros(kernels.SIZES, np.int64), np.zeros(kernels.SIZES, np.int64)
        kernels.sum_by_size(self._counts, keys, records)
        top = np.zeros((most, 2), np.int64)
        filled = kernels.most_counted(self._slots, self._counts, top) if self.is_counting else 0
        hottest = tuple((int(count), int(ordinal)) for count, ordinal in top[:filled])
        return Counted(tuple(keys.tolist()), tuple(records.tolist()), hottest)

    def forget_counts(self) -> None:
        """Free the memory of the counts, and stop counting."""
        self._counts = zeros(0, COUNT)

    def clear(self) -> None:
        self._slots[:] = 0
        self._counts[:] = 0
        self._present = None
        self.used = 0

    def check(self) -> None:
        """Assert every invariant of the table."""
        counts = np.zeros(3, np.int64)
        kernels.check_slots(self._slots, counts)
        assert counts[0] == self.used, f"{counts[0]} slots in use, {self.used} counted"
        assert counts[1] == 0, f"{counts[1]} keys cannot be reached from their home slot"
        assert counts[2] == 0, f"{counts[2]} keys occur twice"
        assert self.used <= self._max_entries
        assert len(self._slots) <= self._max_slots
        if self.is_counting:
            assert len(self._counts) == len(self._slots)
            assert np.array_equal(self._counts != 0, self._slots["value"] != 0)
