"""The proof's table of keys. The walk over the batches notes the hashes of keys; a second thread puts the hashes into
the table.

A table of millions of keys does not fit into the CPU cache, and putting keys into it depends only on their hashes:
while the walk fills one set of notes, a thread puts the previous set.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import NoReturn

import numpy as np

from keytail.compact.table_memory import TableMemory
from keytail.errors import KeytailError
from keytail.kernels.proof import table as kernels
from keytail.kernels.proof.key_hash import coefficients_of
from keytail.kernels.proof.state import Notes
from keytail.threads import Threads

SLOT_BYTES = 8 * kernels.SLOT_WORDS
_NOTES = 1 << 16
_FIRST_SLOTS = 1 << 16
_LOAD = 0.75
MIN_MEMORY_BYTES = 4 << 20
NOT_ERASED = np.empty((2, 0), np.uint64)


class Keys:
    """A table of at most `memory_bytes`, even while it grows; `put` takes the notes in the order of offsets.

    Keys are hashed under `secret`, which is the same for all tables whose entries are compared or merged. `slots` and
    `used` are from the previous pass, if there was one. `erased`: see Notes. If `spill` is given, a full table is
    passed to this function and then emptied, so the caller has to merge several entries per key.
    """

    def __init__(
        self,
        memory_bytes: int,
        secret: bytes,
        slots: np.ndarray | None = None,
        used: int = 0,
        spill: Callable[[np.ndarray], None] | None = None,
        erased: np.ndarray = NOT_ERASED,
    ) -> None:
        self._memory_bytes = memory_bytes
        self._memory: TableMemory | None = None  # taken when the table first grows
        self._spill = spill
        self._max_slots = _most_slots(memory_bytes)
        self._slots = np.zeros(0, dtype=np.uint64) if slots is None else slots
        self._used = used
        self._limit = _limit_of(len(self._slots) // kernels.SLOT_WORDS)
        self._expected = 0
        self._coefficients, self._erased = coefficients_of(secret), erased
        self._notes = [self._room_for(_NOTES), self._room_for(_NOTES)]
        self._thread = Threads(1, "keys")
        self._coming: Future[tuple[int, int]] | None = None
        self._lock = threading.Lock()

    @property
    def notes(self) -> Notes:
        """The notes that the walk may fill."""
        return self._notes[0]

    @property
    def slots(self) -> np.ndarray:
        """The slots of the table, after all keys that were put are in it."""
        self._wait()
        return self._slots

    @property
    def used(self) -> int:
        """The number of keys in the table, after all keys that were put are in it."""
        self._wait()
        return self._used

    def expect(self, keys: int) -> None:
        """Let the table grow in one step, when it first grows, to room for about `keys` keys. A wrong number is
        harmless."""
        self._expected = keys

    def take_memory(self, n_bytes: int) -> None:
        """Reserve `n_bytes` of the memory for other data; a table that is already larger is not reduced."""
        left = _most_slots(self._memory_bytes - n_bytes)
        self._max_slots = max(left, len(self._slots) // kernels.SLOT_WORDS)

    def put(self, n: int, records: int = 0) -> None:
        """Start to put the first `n` notes into the table, and provide new notes with room for `records` keys. Raises
        KeytailError, now or in a later call, if the table cannot grow enough.
        """
        self._wait()
        if n:
            self._make_room(n)
            notes = self._notes[0]
            if self._spill is not None and n > self._limit:  # one batch has more keys than fit into an empty table
                self._put_in_parts(notes, n)
                n = 0
        if n:
            self._coming = self._thread.submit(
                kernels.put_keys, notes.hashes, notes.records, n, self._slots, self._used
            )
            self._notes.reverse()
        notes = self._notes[0]
        if notes.records.shape[1] < records:
            self._notes[0] = self._room_for(records)

    def put_now(self, notes: Notes, n: int) -> None:
        """Put the first `n` of the `notes` into the table, in any order of offsets, and wait until this is done. Any
        thread may call this method. Raises KeytailError if the table cannot grow enough.
        """
        if not n:
            return
        with self._lock:
            self._make_room(n)
            self._used, full = kernels.put_keys(notes.hashes, notes.records, n, self._slots, self._used)
            if full:
                self.fail_for_memory()

    def _room_for(self, records: int) -> Notes:
        room = np.empty((2, records), np.uint64), np.empty((2, records), np.int64)
        return Notes(*room, self._coefficients, self._erased)

    def _put_in_parts(self, notes: Notes, n: int) -> None:
        for start in range(0, n, self._limit):
            self._make_room(self._limit)
            end = min(n, start + self._limit)
            hashes, records = (np.ascontiguousarray(part[:, start:end]) for part in (notes.hashes, notes.records))
            self._used, _ = kernels.put_keys(hashes, records, end - start, self._slots, self._used)

    def spill_all(self) -> None:
        """Pass the entries of the table to `spill`, if it was given, and empty the table."""
        self._wait()
        if self._spill is not None and self._used:
            self._spill(self._slots)
            self._slots[:] = 0
            self._used = 0

    def first_unjustified(self) -> tuple[int, int]:
        """Return the lowest offset of a key's latest record that must not be missing, or -1, and 1 if that record is an
        expired tombstone of whose key an older record was retained, else 0.
        """
        self._wait()
        return kernels.first_unjustified(self._slots)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _wait(self) -> None:
        if self._coming is None:
            return
        coming, self._coming = self._coming, None
        self._used, full = coming.result()
        if full:
            self.fail_for_memory()

    def _make_room(self, n: int) -> None:
        need = self._used + n
        if need > self._limit and len(self._slots) < self._max_slots * kernels.SLOT_WORDS:
            slots, wanted = self._max_slots, max(need, self._expected)
            while slots // 2 > _FIRST_SLOTS and wanted <= min(slots // 2 * _LOAD, slots // 2 - 2):
                slots //= 2
            self._memory = self._memory or TableMemory(self._memory_bytes)
            table = self._memory.zeros(slots * kernels.SLOT_WORDS, np.dtype(np.uint64))
            kernels.rehash(self._slots, table, False)
            self._slots = table
            self._limit = _limit_of(slots)
        if need > self._limit:
            self.spill_all()

    def fail_for_memory(self) -> NoReturn:
        raise KeytailError(
            f"the proof needs more than its {self._memory_bytes} bytes of memory, {SLOT_BYTES} for each key",
            remedy="Nothing was replaced. Raise --map-memory, or run fewer tasks at a time",
            slug="proof-memory-exceeded",
        )


class KeysOfPart(Keys):
    """The notes of one thread, which are put into a table that all threads share. Until all threads have
    ended, only `put_now` of the shared table is called.
    """

    def __init__(self, shared: Keys) -> None:
        self._shared = shared
        self._coefficients, self._erased = shared._coefficients, shared._erased
        self._notes = [self._room_for(_NOTES)]

    def expect(self, keys: int) -> None:
        """Do nothing: the shared table has been prepared for the number of keys."""

    def put(self, n: int, records: int = 0) -> None:
        """Put the first `n` notes into the shared table, and provide new notes with room for `records` keys."""
        self._shared.put_now(self._notes[0], n)
        if self._notes[0].records.shape[1] < records:
            self._notes[0] = self._room_for(records)

    def close(self) -> None:
        """Do nothing: the shared table is closed by its owner."""


def table_bytes(keys: int) -> int:
    """Return the approximate bytes of a table of `keys` keys. A table grows by doubling, so the actual size may be
    twice as large."""
    return int(keys / _LOAD) * SLOT_BYTES


def most_keys(memory_bytes: int) -> int:
    """Return the number of keys for which a proof's table of `memory_bytes` has room without being spilled."""
    return _limit_of(_most_slots(max(memory_bytes, MIN_MEMORY_BYTES)))


def _most_slots(memory_bytes: int) -> int:
    # As in the offset map: during the last doubling, the old table of half the size exists beside the new one.
    return memory_bytes * 2 // (3 * SLOT_BYTES)


def _limit_of(slots: int) -> int:
    """Return the number of keys at which a table of `slots` slots grows or is spilled: one slot stays free, so that
    searches end."""
    return max(0, min(int(slots * _LOAD), slots - 2))
