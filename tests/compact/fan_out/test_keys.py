"""Keys in random runs and shards, in random order, compared with dictionaries."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keytail.compact.fan_out import proof
from keytail.compact.fan_out.keys import _PROBES, _PUTS, _Run
from keytail.compact.fan_out.proof import _Table
from keytail.compact.map_phase.offset_map import OffsetMap
from keytail.errors import KeytailError
from keytail.kernels import fan_out as kernels
from keytail.kernels.proof import table as proof_table
from tests.chance import draws
from tests.reference import fan_out as model

FATES = {model.DROPPED: 0, model.KEPT: 1, model.EXPIRED: 2, model.PRESENT: 3}


def hashes(keys: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the two words of the hash of each key; some keys share one word, and thus their slot in a table."""
    low = np.array([(key * 0x9E3779B97F4A7C15) % 2**64 for key in keys], np.uint64)
    high = np.array([((key // 3) * 0xC2B2AE3D27D4EB4F) % 2**64 for key in keys], np.uint64)
    return low, high


@settings(deadline=None, max_examples=draws(150))
@given(
    keys=st.lists(st.integers(0, 60), max_size=400),
    shards=st.integers(1, 9),
    cuts=st.integers(1, 50),
    memory=st.sampled_from([1, 1 << 20]),
)
def test_a_shard_receives_all_of_its_keys_in_their_order(keys: list[int], shards: int, cuts: int, memory: int) -> None:
    """No key is lost, each key is in one shard, and the deduplicating table emits each key once."""
    low, high = hashes(keys)
    ordinals = np.arange(len(keys), dtype=np.int64)
    ordinals[::7] = -1
    run = _Run(_PROBES, 3, shards, memory)
    found: list[tuple[int, int, int]] = []  # shard, low word, ordinal
    orders = []
    for start in range(0, len(keys), cuts):
        part = slice(start, start + cuts)
        some = [np.ascontiguousarray(array[part]) for array in (low, high, ordinals)]
        cells = [*run.take(*some, len(some[0])), *(run.give() if start % 3 == 0 else ())]
        for cell in cells:
            orders.append(cell.order)
            words = np.frombuffer(cell.data, np.uint64).reshape(3, -1)
            found += [(cell.shard, int(a), int(b)) for a, b in zip(words[0], words[2], strict=True)]
    for cell in run.give():
        words = np.frombuffer(cell.data, np.uint64).reshape(3, -1)
        found += [(cell.shard, int(a), int(b)) for a, b in zip(words[0], words[2], strict=True)]
    assert sorted(o for _, _, o in found) == [int(o) for o in ordinals if o >= 0]
    assert orders == sorted(orders)
    shard_of: dict[int, int] = {}
    for shard, word, ordinal in found:
        assert shard_of.setdefault(word, shard) == shard
        assert int(low[ordinal]) == word
    for shard in set(shard_of.values()):
        own = [ordinal for item, _, ordinal in found if item == shard]
        assert own == sorted(own)


@settings(deadline=None, max_examples=draws(100))
@given(st.lists(st.integers(0, 300), max_size=600), st.integers(1, 5), st.randoms(use_true_random=False))
def test_survivors_equal_those_of_dictionaries(keys: list[int], shards: int, rng: random.Random) -> None:
    """Slices flush their keys at random times, and look up keys in between."""
    low, high = hashes(keys)
    is_put = np.array([rng.random() < 0.7 for _ in keys], bool)
    ordinals = np.arange(len(keys), dtype=np.int64)
    cells = []
    dedup = OffsetMap(0, 5)
    puts = _Run(_PUTS, 0, shards, 0)
    probes = _Run(_PROBES, 0, shards, 0)
    done = 0
    for_puts = np.where(is_put, ordinals, -1)
    while (done := done + dedup.put_all(high[done:], low[done:], for_puts[done:], len(keys) - done)) < len(keys):
        cells += puts.drain(dedup)
    cells += [*puts.drain(dedup), *puts.give()]
    cells += [*probes.take(low, high, np.where(is_put, -1, ordinals), len(keys)), *probes.give()]
    assert dedup.used == 0
    dedup.check()
    alive: set[int] = set()
    for shard in range(shards):
        offset_map = OffsetMap(1 << 20)
        for cell in sorted((cell for cell in cells if cell.shard == shard), key=lambda cell: cell.order):
            words = np.frombuffer(bytearray(cell.data), np.uint64)
            n = len(words) // 3
            a, b, c = words[:n], words[n : 2 * n], words[2 * n :].view(np.int64)
            if cell.order >> 60 == _PUTS:
                assert offset_map.put_all(a, b, c, n) == n
            else:
                known = np.empty(n, np.int64)
                offset_map.get_all(a, b, c, n, known)
                alive |= {int(ordinal) for ordinal in c[known <= c]}
        alive |= {int(value) - 1 for value in offset_map.slots["value"] if value}
    names = [key.to_bytes(2, "big") for key in keys]
    both = list(zip(names, range(len(keys)), strict=True))
    expected = model.survivors(
        [item for item, put in zip(both, is_put, strict=True) if put],
        [item for item, put in zip(both, is_put, strict=True) if not put],
    )
    assert alive == expected


def slots_of(records: list[tuple[int, int, str]]) -> np.ndarray:
    """Return the proof's table of the records of one part, which are inserted in the order of offsets."""
    slots = np.zeros(3 * 4096, np.uint64)
    for key, offset, action in sorted(records, key=lambda item: item[1]):
        [low], [high] = hashes([key])
        entry = np.array([low, high & ~np.uint64(7) | np.uint64(FATES[action]), offset + 1], np.uint64)
        insert_entry(slots, entry)
    return slots


def insert_entry(slots: np.ndarray, entry: np.ndarray) -> None:
    """Insert an entry as `_put` of the proof does: it replaces an earlier entry of the same key, and notes whether the
    earlier record was retained.
    """
    table = slots.reshape(-1, 3)
    for row in table:
        if row[2] == 0:
            row[:] = entry
            return
        if row[0] == entry[0] and row[1] & ~np.uint64(7) == entry[1] & ~np.uint64(7):
            older = row[1] & np.uint64(4) | np.uint64(4 if int(row[1]) & 3 == FATES[model.KEPT] else 0)
            row[1] = entry[1] | older
            row[2] = entry[2]
            return


@settings(deadline=None, max_examples=draws(150))
@given(st.randoms(use_true_random=False), st.integers(1, 6), st.integers(1, 40))
def test_merged_proofs_of_parts_equal_one_proof(rng: random.Random, parts: int, n_keys: int) -> None:
    """Parts are merged in any order, through several shards. Keys that are only PRESENT in one part are decided by
    later parts.
    """
    records = []
    for offset in range(rng.randint(0, 120)):
        action = rng.choice([model.DROPPED, model.KEPT, model.EXPIRED])
        records.append((rng.randrange(n_keys), offset, action))
    cuts = sorted(rng.randint(0, len(records)) for _ in range(parts - 1))
    pieces = [records[a:b] for a, b in zip([0, *cuts], [*cuts, len(records)], strict=True)]
    present = [(key, offset, model.PRESENT) for key, offset, _ in records if rng.random() < 0.3]
    tables = [slots_of(piece) for piece in pieces] + [slots_of(present)]
    rng.shuffle(tables)
    shards = rng.randint(1, 4)
    starts = np.zeros(shards + 1, np.int64)
    merged = [_Table(1 << 20, "p") for _ in range(shards)]
    for slots in tables:
        entries = np.empty(len(slots), np.uint64)
        kernels.split_entries(slots, shards, starts, entries)
        for shard in range(shards):
            merged[shard].merge(entries[3 * starts[shard] : 3 * starts[shard + 1]])
    found = {}
    for table in merged:
        for row in table.slots.reshape(-1, 3):
            if row[2]:
                found[int(row[0])] = (int(row[2]) - 1, int(row[1]) & 3, bool(int(row[1]) & 4))
    expected = model.states_of_keys(
        [(key.to_bytes(2, "big"), offset, action) for key, offset, action in records]
        + [(key.to_bytes(2, "big"), offset, action) for key, offset, action in present]
    )
    names = {int(hashes([key])[0][0]): key.to_bytes(2, "big") for key in range(n_keys)}
    assert {names[low]: value for low, value in found.items()} == {
        key: (value.offset, FATES[value.fate], value.older_kept) for key, value in expected.items()
    }
    bad = [
        (value.offset, int(value.fate == model.EXPIRED))
        for value in expected.values()
        if value.fate == model.DROPPED or (value.fate == model.EXPIRED and value.older_kept)
    ]
    unjustified = [proof_table.first_unjustified(table.slots) for table in merged]
    worst = min(((int(a), int(b)) for a, b in unjustified if a >= 0), default=(-1, 0))
    assert worst == min(bad, default=(-1, 0))


def test_a_shard_that_does_not_fit_is_reported() -> None:
    table = _Table(1, "p")
    entries = np.zeros((40, 3), np.uint64)
    entries[:, 0], entries[:, 1] = hashes(list(range(40)))
    entries[:, 1] &= ~np.uint64(7)
    entries[:, 2] = 1
    with pytest.raises(KeytailError, match="shard of the proof needs more"):
        table.merge(entries.reshape(-1))


@pytest.mark.parametrize("slots", [17, 32, (1 << 15) + 2, 99_999])
def test_the_table_of_a_shard_keeps_to_its_memory_while_it_grows(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def zeros(n: int, dtype: np.dtype) -> np.ndarray:
        sizes.append(n * dtype.itemsize)
        return np.zeros(n, dtype)

    monkeypatch.setattr(proof, "zeros", zeros)
    memory_bytes = slots * 36
    entries = np.random.default_rng(1).integers(1, 1 << 62, (min(slots * 3 // 4, slots - 2), 3), np.uint64)
    entries[:, 1] &= ~np.uint64(7)
    table = _Table(memory_bytes, "p")
    table.merge(entries.reshape(-1))
    assert table.used == len(entries)
    assert sizes[-1] == slots * 24
    assert all(before + after <= memory_bytes for before, after in pairwise(sizes))


def test_keys_are_not_emitted_in_the_order_of_the_next_tables_slots() -> None:
    """In that order, each insertion into a small table would probe the slots of all earlier keys."""
    rng = np.random.default_rng(5)
    low, high = (rng.integers(0, 2**64, 20_000, np.uint64) for _ in range(2))
    dedup = OffsetMap(1 << 20)
    assert dedup.put_all(high, low, np.arange(20_000), 20_000) < 20_000 or dedup.used == 20_000
    run = _Run(_PUTS, 0, 2, 1 << 22)
    for cell in [*run.drain(dedup), *run.give()]:
        words = np.frombuffer(cell.data, np.uint64).reshape(3, -1)[1]
        ascending = np.count_nonzero(words[1:] > words[:-1]) / len(words)
        assert ascending < 0.6
