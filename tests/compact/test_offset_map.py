"""The offset map compared with its reference model, a dictionary; invariants are checked after each step
(CONFORMANCE.md 1 to 6).
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keytail.compact.map_phase.offset_map import SLOT_BYTES, OffsetMap
from tests.chance import draws
from tests.reference.offset_map import DictMap

MASK = 2**64 - 1


def columns(items):
    low = np.array([i[0] for i in items], np.uint64)
    high = np.array([i[1] for i in items], np.uint64)
    return low, high, np.array([i[2] for i in items], np.int64)


def get(offset_map, keys):
    low, high, wanted = columns([(*key, 0) for key in keys])
    found = np.empty(len(keys), np.int64)
    offset_map.get_all(low, high, wanted, len(keys), found)
    return found.tolist()


# Halves of hashes, some of which collide: the upper 32 bits of the high half determine the slot.
words = st.one_of(st.integers(0, 3), st.sampled_from([0, 1 << 63, MASK, MASK - 1]), st.integers(0, MASK))
items_strategy = st.lists(
    st.tuples(words, words, st.one_of(st.just(-1), st.integers(0, 2**62))), min_size=0, max_size=60
)


@settings(deadline=None, max_examples=draws(150))
@given(st.lists(items_strategy, max_size=6), st.integers(1, 80), st.integers(2, 120))
def test_a_map_behaves_like_a_dictionary_until_it_is_full(rounds, max_entries, slots):
    offset_map = OffsetMap(slots * SLOT_BYTES * 3 // 2, max_entries)
    expected = DictMap(offset_map.max_entries)
    seen = {(0, 0)}
    for items in rounds:
        low, high, ordinals = columns(items)
        assert offset_map.put_all(low, high, ordinals, len(items)) == expected.put_all(items)
        offset_map.check()
        assert offset_map.used == len(expected.entries)
        seen.update(item[:2] for item in items)
        keys = sorted(seen)
        assert get(offset_map, keys) == [expected.get(*key) for key in keys]


@pytest.mark.parametrize("n", [10, 100, 1000, 5000])
def test_keys_are_read_back(n):
    rng = np.random.default_rng(n)
    low, high = rng.integers(0, MASK, n, np.uint64), rng.integers(0, MASK, n, np.uint64)
    offset_map = OffsetMap(1 << 20)
    assert offset_map.put_all(low, high, np.arange(n), n) == n
    assert get(offset_map, list(zip(low.tolist(), high.tolist(), strict=True))) == list(range(n))
    found = np.empty(n, np.int64)
    offset_map.get_all(low, high, np.full(n, -1), n, found)
    assert set(found.tolist()) == {-1}, "none of the keys was wanted"


def test_a_map_grows_within_its_memory_and_retains_every_key():
    memory = 6 << 20
    offset_map = OffsetMap(memory)
    n = offset_map.max_entries
    rng = np.random.default_rng(7)
    low, high = rng.integers(0, MASK, n + 1, np.uint64), rng.integers(0, MASK, n + 1, np.uint64)
    first_size = len(offset_map.slots)
    assert offset_map.put_all(low, high, np.arange(n + 1), n + 1) == n
    offset_map.check()
    assert len(offset_map.slots) > 4 * first_size
    assert len(offset_map.slots) * SLOT_BYTES * 3 // 2 <= memory + 3 * SLOT_BYTES
    assert get(offset_map, list(zip(low[:-1].tolist(), high[:-1].tolist(), strict=True))) == list(range(n))
    assert get(offset_map, [(int(low[-1]), int(high[-1]))]) == [-1]


def test_clear_removes_every_key():
    offset_map = OffsetMap(1 << 16)
    low, high, ordinals = columns([(1, 2, 3), (4, 5, 6)])
    offset_map.put_all(low, high, ordinals, 2)
    offset_map.clear()
    offset_map.check()
    assert get(offset_map, [(1, 2), (4, 5)]) == [-1, -1]
    assert offset_map.used == 0


def test_a_full_map_rejects_even_a_known_key_and_still_finds_its_keys():
    offset_map = OffsetMap(1 << 16, max_entries=2)
    low, high, ordinals = columns([(1, 1, 0), (2, 2, 1), (1, 1, 2)])
    assert offset_map.put_all(low, high, ordinals, 3) == 2
    assert get(offset_map, [(1, 1), (2, 2), (9, 9)]) == [0, 1, -1]


def test_a_lookup_ends_in_a_table_without_a_free_slot():
    from keytail.kernels import offset_map as kernels

    slots = np.zeros(4, kernels.SLOT)
    low, high, ordinals = columns([(i, i << 40, i) for i in range(4)])
    none = np.zeros(0, np.uint32)
    assert kernels.put_all(slots, none, 0, 4, low, high, ordinals, none, 4, 0) == (4, 4)
    found = np.empty(6, np.int64)
    wanted_low, wanted_high, wanted = columns([*((i, i << 40, 0) for i in range(4)), (77, 77, 0), (78, 2**63, 0)])
    all_set, noted = np.full(1, 255, np.uint8), np.zeros(16, np.uint8)
    kernels.note_present(slots, noted)
    for present in (all_set, noted):
        found[:] = 7
        kernels.get_all(slots, present, wanted_low, wanted_high, wanted, 6, found)
        assert found.tolist() == [0, 1, 2, 3, -1, -1]
