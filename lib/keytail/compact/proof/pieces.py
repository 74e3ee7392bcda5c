"""The proof of batches with more decompressed bytes or records than are held in memory: piece by piece, at the same
offsets."""

from __future__ import annotations

import numpy as np

from keytail.compact.proof.markers import SOURCE_REMEDY
from keytail.compact.proof.output import NEVER_READ, block_at, not_opened
from keytail.compact.proof.state import REMEDY, Proof
from keytail.errors import CorruptLog, KeytailError, Refused
from keytail.kernels import batch_header as v2
from keytail.kernels.proof.codes import PASSED, SOURCE_COUNT
from keytail.kernels.proof.records import SMALLEST_RECORD_BYTES, Records
from keytail.kernels.proof.rest import close_noted, note_piece
from keytail.kernels.proof.step import close_batch, walk_piece
from keytail.log.records.pieces import RecordStream
from keytail.log.window import Window

_MAX_GROWTH_BYTES = 32  # maximum growth of a rewritten record, whose timestamp is relative to another base


def _arenas() -> list[np.ndarray]:
    return [np.empty(0, np.uint8), np.empty(0, np.uint8)]


class _Records:
    """The records of the batch at index `at` of a window; errors of its codec are raised as `kind`."""

    def __init__(self, window: Window, at: int, kind: type[KeytailError], remedy: str) -> None:
        self._window, self._at, self._kind, self._remedy = window, at, kind, remedy
        codec, data = block_at(window, at)
        self._stream = RecordStream(codec, data, _count_at(window, at), _arenas())

    def next(self) -> tuple[np.ndarray, int, int, bool]:
        """Return the next records: (block, number of its bytes, number of records, whether these are the last
        records)."""
        try:
            return self._stream.take_last()
        except (ValueError, Refused) as problem:
            raise not_opened(self._window, self._at, self._kind, self._remedy, problem) from problem

    @property
    def last_delta(self) -> int:
        return self._stream.last_delta

    def up_to(self, delta: int, most: int, room_bytes: int, *, is_last: bool) -> tuple[np.ndarray, int, int]:
        """Return (block, number of its bytes, number of records) up to offset delta `delta`, with at most `most`
        records; with all remaining records if `is_last`.
        """
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


def prove_in_pieces(proof: Proof, *, is_present: bool) -> None:
    """Prove the batch for which `step` requested a block or notes; if `is_present`, note its records as `note_rest`
    does.
    """
    state, source, output = proof.state, proof.source, proof.output
    before = _Records(source, int(state.source.at), CorruptLog, SOURCE_REMEDY)
    after = None
    if not is_present and state.batch.at_output >= 0 and not state.batch.is_whole:
        after = _Records(output, int(state.batch.at_output), KeytailError, REMEDY)
    code, is_last = PASSED, False
    while code == PASSED and not is_last:
        block, n_bytes, count, is_last = before.next()
        if count * SMALLEST_RECORD_BYTES > n_bytes:
            proof.fail_at_source(SOURCE_COUNT, int(state.batch.last_offset) + 1)
        records, others = Records(block, 0, n_bytes, count), Records(NEVER_READ, 0, 0, 0)
        if after is not None:
            room_bytes = n_bytes + _MAX_GROWTH_BYTES * count
            o_block, o_bytes, o_count = after.up_to(before.last_delta, count, room_bytes, is_last=is_last)
            others = Records(o_block, 0, o_bytes, o_count)
        proof.put_keys(count)
        if is_present:
            code = note_piece(source.bytes, records, proof.keys.notes, state)
        else:
            code = walk_piece(source.bytes, records, output.bytes, others, proof.keys.notes, state)
    if code == PASSED and is_present:
        close_noted(source.bytes, state)
    elif code == PASSED:
        code = close_batch(source.bytes, output.bytes, state)
    if code != PASSED:
        proof.fail(code)
