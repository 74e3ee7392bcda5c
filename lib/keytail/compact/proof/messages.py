"""The proof of messages of magic 0 and 1, one at a time in Python: what remains of them is rewritten."""

from __future__ import annotations

import numpy as np

from keytail.compact.proof.legacy import INVALID_CRC, Message, kept_in_message, kept_offsets, read_message
from keytail.compact.proof.output import finish_output, start_output
from keytail.compact.proof.state import REMEDY, SOURCE, SOURCE_REMEDY, Proof
from keytail.errors import CorruptLog, KeytailError
from keytail.kernels import proof as kernels
from keytail.kernels.proof_table import DROPPED, EXPIRED, KEPT, PRESENT


def prove_message(proof: Proof) -> None:
    """Prove the source's next message of magic 0 or 1; the output's next batch, if any, is in its window."""
    state, window = proof.state, proof.output
    q = int(state[kernels.OUTPUT_FROM])
    message, source = _next_message(proof)
    ends = q == state[kernels.OUTPUT_TO]
    if ends and message.last_offset >= state[kernels.NEXT_OUTPUT_BASE]:
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
            if state[kernels.KEEP_MAGIC]:
                kept = kept_in_message(message, source, batch)
            else:
                kept = kept_offsets(message, batch, int(state[kernels.HORIZON_MS]))
        except ValueError as problem:
            raise KeytailError(
                f"the output for a message of magic 0 or 1 is wrong: {problem}",
                path=window.path,
                byte_position=window.position + q,
                offset=base,
                remedy=REMEDY,
                slug="invalid-output-batch",
            ) from problem
        state[kernels.OUTPUT_FROM] += q_size
        state[kernels.OUTPUT_CHECKED] = 0
        state[kernels.BATCHES_KEPT] += 1
    elif message.last_offset + 1 == state[kernels.FIRST_UNCLEANABLE] and not (
        state[kernels.KEEP_MAGIC] or state[kernels.BY_FILE_TIME]
    ):
        proof.lost(kernels.LOST_LAST_BATCH, message.last_offset)
    _note_message(proof, message, kept)
    state[kernels.SOURCE_FROM] += len(source)
    state[kernels.SOURCE_LAST_OFFSET] = message.last_offset
    state[kernels.BATCHES_READ] += 1
    state[kernels.RECORDS_READ] += len(message.records)
    state[kernels.RECORDS_KEPT] += len(kept)


def note_present_message(proof: Proof) -> None:
    """Note the source's next message of magic 0 or 1, which a later pass rewrites."""
    message, source = _next_message(proof)
    state = proof.state
    proof.put_keys(len(message.records), sum(len(record.key or b"") for record in message.records))
    notes = proof.keys.notes
    noted = key_at = 0
    for record in message.records:
        if record.offset >= state[kernels.END_OFFSET]:
            continue
        if record.key is None:
            if not state[kernels.DROP_KEYLESS]:
                proof.lost(kernels.WOULD_LOSE_KEYLESS, record.offset)
        elif record.offset >= state[kernels.FIRST_DIRTY]:
            notes.pending[:, noted] = (key_at, len(record.key), record.offset, PRESENT)
            notes.keys[key_at : key_at + len(record.key)] = np.frombuffer(record.key, dtype=np.uint8)
            key_at += len(record.key)
            noted += 1
    state[kernels.NOTED], state[kernels.NOTED_KEY_BYTES] = noted, key_at
    state[kernels.SOURCE_FROM] += len(source)
    state[kernels.SOURCE_LAST_OFFSET] = message.last_offset


def _next_message(proof: Proof) -> tuple[Message, bytes]:
    """Return the source's next message, checked, and its bytes."""
    state, source = proof.state, proof.source
    p = int(state[kernels.SOURCE_FROM])
    size = int.from_bytes(source.bytes[p + 8 : p + 12].tobytes(), "big") + 12
    data = source.bytes[p : p + size].tobytes()
    try:
        message = read_message(data)
        if message.first_offset <= state[kernels.SOURCE_LAST_OFFSET]:
            raise ValueError(SOURCE[kernels.SOURCE_ORDER])
    except ValueError as problem:
        position = source.position + p
        slug = "invalid-crc" if str(problem) == INVALID_CRC else "invalid-message"
        raise CorruptLog(
            str(problem), path=source.path, byte_position=position, remedy=SOURCE_REMEDY, slug=slug
        ) from problem
    return message, data


def _note_message(proof: Proof, message: Message, kept: set[int]) -> None:
    """Enter each record and its result into the table of keys. Raises for one that must not be missing."""
    state = proof.state
    proof.put_keys(len(message.records), sum(len(record.key or b"") for record in message.records))
    notes = proof.keys.notes
    old = bool(state[kernels.FILE_IS_OLD])
    noted = key_at = 0
    for record in message.records:
        is_kept = record.offset in kept
        expired = old and record.value is None and record.offset < state[kernels.REMOVAL_LIMIT]
        if record.offset >= state[kernels.END_OFFSET]:
            if not is_kept:
                proof.lost(kernels.LOST_BEYOND_END, record.offset)
        elif record.key is None:
            if not is_kept and not state[kernels.DROP_KEYLESS]:
                proof.lost(kernels.LOST_KEYLESS, record.offset)
        elif record.offset >= state[kernels.FIRST_DIRTY] or not (is_kept or expired):
            became = KEPT if is_kept else EXPIRED if expired else DROPPED
            notes.pending[:, noted] = (key_at, len(record.key), record.offset, became)
            notes.keys[key_at : key_at + len(record.key)] = np.frombuffer(record.key, dtype=np.uint8)
            key_at += len(record.key)
            noted += 1
    state[kernels.NOTED], state[kernels.NOTED_KEY_BYTES] = noted, key_at
