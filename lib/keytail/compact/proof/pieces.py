"""The proof of batches that decompress to more than the memory limit: piece by piece, at the same offsets."""

from __future__ import annotations

import numpy as np

from keytail.compact.proof.output import NEVER_READ, block_at, not_opened
from keytail.compact.proof.state import REMEDY, SOURCE_REMEDY, Proof
from keytail.errors import CorruptLog, KeytailError, Refused
from keytail.kernels import batch_header as v2
from keytail.kernels import proof as kernels
from keytail.kernels.proof_rest import close_noted, note_piece
from keytail.log.records.pieces import RecordStream
from keytail.log.window import Window

_MOST_GROWTH_BYTES = 32  # of a rewritten record: its timestamp is relative to another base


def _arenas() -> list[np.ndarray]:
    return [np.empty(0, np.uint8), np.empty(0, np.uint8)]


class _Records:
    """The records of the batch at index `at` of a window; errors of its codec are raised as `kind`."""

    def __init__(self, window: Window, at: int, kind: type[KeytailError], remedy: str) -> None:
        self._window, self._at, self._kind, self._remedy = window, at, kind, remedy
        codec, data = block_at(window, at)
        self._stream = RecordStream(codec, data, _count_at(window, at), _arenas())

    def next(self) -> tuple[np.ndarray, int, int, bool]:
        """Return (block, its bytes, records, whether these are the last)."""
        try:
            return self._stream.take_last()
        except (ValueError, Refused) as problem:
            raise not_opened(self._window, self._at, self._kind, self._remedy, problem) from problem

    @property
    def last_delta(self) -> int:
        return self._stream.last_delta

    def up_to(self, delta: int, most: int, room_bytes: int, *, is_last: bool) -> tuple[np.ndarray, int, int]:
        """Return (block, its bytes, records) up to an offset delta, at most `most`; all the rest if `is_last`."""
        try:
            block, n_bytes, count = self._stream.take(most, room_bytes, delta)
        except (ValueError, Refused) as problem:
            raise not_opened(self._window, self._at, self._kind, self._remedy, problem) from problem
        if is_last:
            count += self._stream.left
            block, n_bytes = self._stream.rest()
        return block, n_bytes, count


def _count_at(window: Window, at: int) -> int:
    return int.from_bytes(window.bytes[at + v2.RECORD_COUNT : at + v2.HEADER_BYTES].tobytes(), "big", signed=True)


def prove_in_pieces(proof: Proof) -> None:
    """Prove the batch for which `step` requested a block or notes."""
    state, source, output = proof.state, proof.source, proof.output
    p, q = int(state[kernels.SOURCE_FROM]), int(state[kernels.AT_OUTPUT])
    before = _Records(source, p, CorruptLog, SOURCE_REMEDY)
    after = None
    if q >= 0 and not state[kernels.IS_WHOLE]:
        after = _Records(output, q, KeytailError, REMEDY)
    sums = np.array([int.from_bytes(source.bytes[p : p + 8].tobytes(), "big") - 1, 0, -1, -1, 0], np.int64)
    is_last = False
    while not is_last:
        block, n_bytes, count, is_last = before.next()
        o_block, o_bytes, o_count = NEVER_READ, 0, 0
        if after is not None:
            room_bytes = n_bytes + _MOST_GROWTH_BYTES * count
            o_block, o_bytes, o_count = after.up_to(before.last_delta, count, room_bytes, is_last=is_last)
        if count * kernels.SMALLEST_RECORD_BYTES > n_bytes:
            proof.lost(kernels.SOURCE_COUNT, int(sums[kernels.LAST_OFFSET]) + 1)
        proof.put_keys(count, n_bytes)
        notes = proof.keys.notes
        code = kernels.walk_piece(
            source.bytes, block, n_bytes, count, output.bytes, o_block, o_bytes, o_count, notes.pending, notes.keys,
            state, sums,
        )  # fmt: skip
        if code:
            proof.fail(code)
    code = kernels.close_pieces(source.bytes, output.bytes, state, sums)
    if code:
        proof.fail(code)


def note_in_pieces(proof: Proof) -> None:
    """Note the batch for which `note_rest` requested a block or notes."""
    state, source = proof.state, proof.source
    p = int(state[kernels.SOURCE_FROM])
    records = _Records(source, p, CorruptLog, SOURCE_REMEDY)
    before = np.array([int.from_bytes(source.bytes[p : p + 8].tobytes(), "big") - 1], np.int64)
    is_last = False
    while not is_last:
        block, n_bytes, count, is_last = records.next()
        if count * kernels.SMALLEST_RECORD_BYTES > n_bytes:
            proof.lost(kernels.SOURCE_COUNT, int(before[0]) + 1)
        proof.put_keys(count, n_bytes)
        notes = proof.keys.notes
        code = note_piece(
            source.bytes, block, n_bytes, count, notes.pending, notes.keys, proof.markers, state, before
        )
        if code:
            proof.fail(code)
    close_noted(source.bytes, state)
