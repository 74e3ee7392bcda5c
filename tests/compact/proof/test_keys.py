"""The proof's table has the same keys for any number of keys that was expected at its creation."""

import numpy as np
import pytest

from keytail.compact.proof import keys as proof_keys
from keytail.compact.proof.keys import Keys, most_keys
from keytail.compact.table_memory import TableMemory
from keytail.errors import KeytailError
from keytail.kernels.proof import table
from keytail.kernels.proof.key_hash import SECRET_BYTES, coefficients_of, hash_one
from keytail.kernels.proof.table import DROPPED, FLAGS, KEPT, SLOT_WORDS
from tests.chance import SEED, chance
from tests.reference.hashing import proof_128

KEYS = 150_000
SECRET = chance().randbytes(SECRET_BYTES)


def random_hashes(n: int) -> np.ndarray:
    hashes = np.random.default_rng(SEED).integers(0, 2**64, (2, n), np.uint64)
    hashes[1] &= ~np.uint64(FLAGS)
    return hashes


def put_all(keys: Keys) -> None:
    hashes = random_hashes(KEYS)
    for start in range(0, KEYS, 50_000):
        notes = keys.notes
        notes.hashes[:, :50_000] = hashes[:, start : start + 50_000]
        notes.records[0, :50_000] = np.arange(start, start + 50_000)
        notes.records[1, :50_000] = KEPT
        keys.put(50_000)


@pytest.mark.parametrize("expected, tables", [(0, 2), (10, 2), (KEYS, 1), (10**12, 1)])
def test_the_expected_number_of_keys_changes_only_the_growth(expected, tables, monkeypatch):
    made = []
    zeros = TableMemory.zeros
    monkeypatch.setattr(TableMemory, "zeros", lambda self, n, dtype: made.append(n) or zeros(self, n, dtype))
    keys = Keys(64 << 20, SECRET)
    keys.expect(expected)
    try:
        put_all(keys)
        assert keys.used == KEYS
        assert keys.first_unjustified() == (-1, 0)
        assert len(made) == tables
        assert made[-1] <= keys._max_slots * SLOT_WORDS
    finally:
        keys.close()


def test_keys_are_compared_by_both_words_of_their_hash():
    """With only one word, two of 10**9 keys would be taken for the same key in 1 of 5 runs."""
    keys = Keys(1 << 20, SECRET)
    try:
        put = [b"%d" % i for i in range(100)]
        notes = keys.notes
        for i, key in enumerate(put):
            notes.hashes[:, i] = hash_one(np.frombuffer(bytearray(key), np.uint8), len(key), notes.coefficients)
            notes.records[:, i] = i, KEPT
        keys.put(100)
        slots = keys.slots.reshape(-1, SLOT_WORDS)
        held = {(int(low), int(high) & ~FLAGS): int(end) - 1 for low, high, end in slots if end}
        assert held == {proof_128(key, coefficients_of(SECRET).tolist()): i for i, key in enumerate(put)}
        assert keys.first_unjustified() == (-1, 0)
    finally:
        keys.close()


def test_keys_that_share_a_word_of_their_hash_are_different():
    slots = np.zeros(8 * SLOT_WORDS, np.uint64)
    for offset, (low, high) in enumerate([(1, 8), (1, 16), (2, 8)]):
        assert table._put(slots, 8, np.uint64(low), np.uint64(high), offset, KEPT) == 1
    assert table._put(slots, 8, np.uint64(1), np.uint64(16), 3, KEPT) == 0


def test_a_table_that_grows_retains_its_keys(monkeypatch):
    """The removal of the first key is without reason. All keys are put twice; the second time, the table has them."""
    n = 200
    monkeypatch.setattr(proof_keys, "_FIRST_SLOTS", 2)
    hashes = random_hashes(n)
    keys = Keys(1 << 20, SECRET)
    try:
        sizes = set()
        for i in (*range(n), *range(n)):
            notes = keys.notes
            notes.hashes[:, 0], notes.records[:, 0] = hashes[:, i], (i, KEPT if i else DROPPED)
            keys.put(1)
            sizes.add(keys.slots.size)
        assert len(sizes) > 3
        assert keys.used == n
        assert keys.first_unjustified() == (0, 0)
    finally:
        keys.close()


def test_a_batch_with_more_keys_than_an_empty_table_is_put_in_parts():
    n, spilled = 5000, {}

    def spill(slots):
        spilled.update({(int(low), int(high) & ~FLAGS): int(end) - 1 for low, high, end in slots.reshape(-1, 3) if end})

    keys = Keys(1 << 16, SECRET, spill=spill)
    try:
        keys.put(0, records=n)
        notes = keys.notes
        hashes = random_hashes(n)
        notes.hashes[:, :n], notes.records[0, :n], notes.records[1, :n] = hashes, np.arange(n), KEPT
        keys.put(n)
        assert keys.used < n
        keys.spill_all()
        assert spilled == {(int(low), int(high)): i for i, (low, high) in enumerate(hashes.T)}
    finally:
        keys.close()


def test_keys_that_exceed_the_memory_are_an_error_for_the_thread_that_puts_them():
    n = 5000
    keys = Keys(1 << 16, SECRET)
    try:
        keys.put(0, records=n)
        notes = keys.notes
        notes.hashes[:, :n] = np.arange(2 * n, dtype=np.uint64).reshape(2, n) << np.uint64(8)
        notes.records[0, :n], notes.records[1, :n] = range(n), KEPT
        with pytest.raises(KeytailError, match="the proof needs more than its 65536 bytes of memory"):
            keys.put_now(notes, n)
    finally:
        keys.close()


def test_a_proof_has_at_least_4_mib_of_memory():
    assert most_keys(1) == most_keys(4 << 20) < most_keys(5 << 20)
