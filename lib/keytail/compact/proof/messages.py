"""The proof of messages of magic 0 and 1, one at a time, in Python."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from keytail.compact.proof.legacy import INVALID_CRC, Message, kept_in_message, kept_offsets, read_message
from keytail.compact.proof.markers import SOURCE_REMEDY
from keytail.compact.proof.output import finish_output, start_output
from keytail.compact.proof.state import REMEDY, SOURCE, Proof
from keytail.errors import CorruptLog, KeytailError
from keytail.kernels.proof import codes
from keytail.kernels.proof.key_hash import hash_one, is_in
from keytail.kernels.proof.table import DROPPED, EXPIRED, KEPT, PRESENT


def prove_message(proof: Proof) -> None:
    """Prove the source's next message of magic 0 or 1 or, if it belongs to the next output, open that output. The
    output's next batch, if any, is in the window of the output."""
    state, window = proof.state, proof.output
    q = int(state.output.at)
    message, source = _next_message(proof)
    ends = q == state.output.to
    if ends and message.last_offset >= state.output.next_base:
        if not proof.waiting:  # the message ends above all outputs
            proof.fail_at_source(codes.SOURCE_ORDER, message.last_offset)
        finish_output(proof)
        start_output(proof)
        return
    kept: set[int] = set()
    base = -1 if ends else int.from_bytes(window.bytes[q : q + 8].tobytes(), "big", signed=True)
    if not ends and base <= message.last_offset:
        q_size = int.from_bytes(window.bytes[q + 8 : q + 12].tobytes(), "big") + 12
        try:
            if base < message.first_offset:
                raise ValueError("the source has no message with this base offset at this place")
            batch = window.bytes[q : q + q_size].tobytes()
            if state.rules.keep_magic:
                kept = kept_in_message(message, source, batch)
            else:
                kept = kept_offsets(message, batch, int(state.rules.horizon_ms))
        except ValueError as problem:
            raise KeytailError(
                f"the output for a message of magic 0 or 1 is wrong: {problem}",
                path=window.path,
                byte_position=window.position + q,
                offset=base,
                remedy=REMEDY,
                slug="invalid-output-batch",
            ) from problem
        state.output.at += q_size
        state.output.is_checked = 0
        state.totals.batches_kept += 1
    elif message.last_offset + 1 == state.rules.first_uncleanable and not (
        state.rules.keep_magic or state.rules.by_file_time
    ):
        proof.fail_at_source(codes.LOST_LAST_BATCH, message.last_offset)
    _note_message(proof, message, kept)
    state.source.at += len(source)
    state.source.last_offset = message.last_offset
    state.totals.batches_read += 1
    state.totals.records_read += len(message.records)
    state.totals.records_kept += len(kept)


def note_present_message(proof: Proof) -> None:
    """Note the records of the source's next message of magic 0 or 1, which a later pass rewrites; after an erasure,
    check their keys."""
    message, source = _next_message(proof)
    rules = proof.state.rules
    noted = []
    for record in message.records:
        if rules.erases:
            if _is_erased(proof, record.key):
                proof.fail_at_source(codes.SOURCE_ERASED_KEY, record.offset)
        elif record.offset >= rules.end_offset:
            continue
        elif record.key is None:
            if not rules.drop_keyless:
                proof.fail_at_source(codes.WOULD_LOSE_KEYLESS, record.offset)
        elif record.offset >= rules.first_dirty:
            noted.append((record.key, record.offset, PRESENT))
    _note(proof, noted)
    proof.state.source.at += len(source)
    proof.state.source.last_offset = message.last_offset


def _next_message(proof: Proof) -> tuple[Message, bytes]:
    """Check and return the source's next message, and its bytes."""
    state, source = proof.state, proof.source
    p = int(state.source.at)
    size = int.from_bytes(source.bytes[p + 8 : p + 12].tobytes(), "big") + 12
    data = source.bytes[p : p + size].tobytes()
    try:
        message = read_message(data)
        if message.first_offset <= state.source.last_offset:
            raise ValueError(SOURCE[codes.SOURCE_ORDER])
    except ValueError as problem:
        position = source.position + p
        slug = "invalid-crc" if str(problem) == INVALID_CRC else "invalid-message"
        raise CorruptLog(
            str(problem), path=source.path, byte_position=position, remedy=SOURCE_REMEDY, slug=slug
        ) from problem
    return message, data


def _note_message(proof: Proof, message: Message, kept: set[int]) -> None:
    """Note the records that the table of keys needs, with their outcomes. Raises KeytailError for a record that must
    not be missing.
    """
    rules, old = proof.state.rules, bool(proof.state.source.is_old)
    noted = []
    for record in message.records:
        is_kept = record.offset in kept
        if rules.erases:
            if is_kept == _is_erased(proof, record.key):
                code = codes.SOURCE_ERASED_KEY if is_kept else codes.LOST_OTHER_KEY
                proof.fail_at_source(code, record.offset)
            continue
        expired = old and record.value is None and record.offset < rules.removal_limit
        if record.offset >= rules.end_offset:
            if not is_kept:
                proof.fail_at_source(codes.LOST_BEYOND_END, record.offset)
        elif record.key is None:
            if not is_kept and not rules.drop_keyless:
                proof.fail_at_source(codes.LOST_KEYLESS, record.offset)
        elif record.offset >= rules.first_dirty or not (is_kept or expired):
            noted.append((record.key, record.offset, KEPT if is_kept else EXPIRED if expired else DROPPED))
    _note(proof, noted)


def _is_erased(proof: Proof, key: bytes | None) -> bool:
    """Return whether records with this key are erased."""
    if key is None:
        return False
    notes = proof.keys.notes
    return bool(is_in(np.frombuffer(bytearray(key), np.uint8), len(key), notes.coefficients, notes.erased))


def _note(proof: Proof, noted: Sequence[tuple[bytes, int, int]]) -> None:
    """Note keys for the table: `noted` has the key, the offset and the outcome of each record."""
    proof.put_keys(len(noted))
    notes = proof.keys.notes
    for i, (key, offset, action) in enumerate(noted):
        notes.hashes[:, i] = hash_one(np.frombuffer(bytearray(key), np.uint8), len(key), notes.coefficients)
        notes.records[:, i] = offset, action
    proof.state.noted.count = len(noted)
