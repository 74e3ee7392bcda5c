"""The proof's table of keys, told how many will come: made once, and the same keys in it whatever was told."""

import numpy as np
import pytest

from keytail.compact.proof import keys as proof_keys
from keytail.compact.proof.keys import Keys
from keytail.kernels.proof_table import KEPT, SLOT_WORDS

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
def test_what_is_expected_spares_growing_and_changes_nothing_else(expected, tables, monkeypatch):
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
