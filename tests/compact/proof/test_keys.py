"""The proof's table of keys contains the same keys, whatever number of keys was expected when it was created."""

import hashlib

import numpy as np
import pytest

from keytail.compact.proof import keys as proof_keys
from keytail.compact.proof.keys import Keys
from keytail.kernels.proof import table
from keytail.kernels.proof.table import KEPT, SLOT_WORDS

KEYS = 150_000


def put_all(keys: Keys) -> None:
    data = b"".join(b"%08d" % i for i in range(KEYS))
    for start in range(0, KEYS, 50_000):
        notes = keys.notes
        notes.keys[:400_000] = np.frombuffer(data, np.uint8)[8 * start : 8 * start + 400_000]
        notes.pending[:, :50_000] = 0
        notes.pending[0, :50_000] = np.arange(50_000) * 8
        notes.pending[1, :50_000] = 8
        notes.pending[2, :50_000] = np.arange(start, start + 50_000)
        notes.pending[3, :50_000] = KEPT
        keys.put(50_000)


@pytest.mark.parametrize("expected, tables", [(0, 2), (10, 2), (KEYS, 1), (10**12, 1)])
def test_the_expected_number_of_keys_only_avoids_growth(expected, tables, monkeypatch):
    made = []
    zeros = proof_keys.zeros
    monkeypatch.setattr(proof_keys, "zeros", lambda n, dtype: made.append(n) or zeros(n, dtype))
    keys = Keys(64 << 20)
    keys.expect(expected)
    try:
        put_all(keys)
        assert keys.used == KEYS
        assert keys.first_unjustified() == (-1, 0)
        assert len(made) == tables
        assert made[-1] <= keys._max_slots * SLOT_WORDS
    finally:
        keys.close()


def test_keys_are_compared_by_both_words_of_their_digest():
    """If one word were compared, a table of 10**9 keys would confuse two of them in 1 of 40 runs."""
    keys = Keys(1 << 20)
    try:
        put = [b"%d" % i for i in range(100)]
        keys.notes.keys[:190] = np.frombuffer(b"".join(put), np.uint8)
        lengths = np.array([len(key) for key in put])
        keys.notes.pending[:, :100] = [np.cumsum(lengths) - lengths, lengths, np.arange(100), np.full(100, KEPT)]
        keys.put(100)
        slots = keys.slots.reshape(-1, SLOT_WORDS)
        held = {(int(low), int(high) & ~7): int(end) - 1 for low, high, end in slots if end}
        digests = [hashlib.blake2b(key, digest_size=16).digest() for key in put]
        words = [(int.from_bytes(d[:8], "little"), int.from_bytes(d[8:], "little") & ~7) for d in digests]
        assert held == dict(zip(words, range(100), strict=True))
        assert keys.first_unjustified() == (-1, 0)
    finally:
        keys.close()


def test_keys_that_share_a_word_of_their_digest_are_different():
    slots = np.zeros(8 * SLOT_WORDS, np.uint64)
    for offset, (low, high) in enumerate([(1, 8), (1, 16), (2, 8)]):
        assert table._put(slots, 8, np.uint64(low), np.uint64(high), offset, KEPT) == 1
    assert table._put(slots, 8, np.uint64(1), np.uint64(16), 3, KEPT) == 0
