"""Makes tests read record blocks of a few bytes in pieces, like blocks that are too large for the memory when
decompressed.
"""

from __future__ import annotations

import pytest

from keytail.compact.proof import keys as proof_keys
from keytail.compact.proof import output as proof_output
from keytail.compact.proof import prove as proof
from keytail.compact.proof import state as proof_state
from keytail.log.records import block_check, opening, pieces

WHOLE_BYTES = 40


def read_in_pieces(monkeypatch: pytest.MonkeyPatch, records: int = 2, piece_bytes: int = 64) -> None:
    """Read every batch of more than one record in pieces of at most `records` records, in all modules."""
    for module in (opening, proof):
        monkeypatch.setattr(module, "WHOLE_BLOCK_RECORDS", 1)
    for module in (opening, proof_output, block_check):
        monkeypatch.setattr(module, "WHOLE_BLOCK_BYTES", WHOLE_BYTES)
    monkeypatch.setattr(pieces, "PIECE_RECORDS", records)
    monkeypatch.setattr(pieces, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(proof_state, "_BLOCK_BYTES", WHOLE_BYTES)
    monkeypatch.setattr(proof_keys, "_NOTES", 1)
