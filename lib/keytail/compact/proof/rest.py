"""The proof's pass over segments that later rounds rewrite: checks them, and notes their keys as still present."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keytail.compact.proof.messages import note_present_message
from keytail.compact.proof.output import NEVER_READ, open_block, open_checked
from keytail.compact.proof.pieces import note_in_pieces
from keytail.compact.proof.state import SOURCE_REMEDY, Proof
from keytail.errors import CorruptLog
from keytail.format import names
from keytail.kernels import proof as kernels
from keytail.kernels.proof_rest import note_rest
from keytail.log.records.pieces import WHOLE_BLOCK_RECORDS

if TYPE_CHECKING:
    from keytail.log.partition import SegmentFacts


def note_segment(proof: Proof, segment: SegmentFacts) -> None:
    """Read one segment to its end, and note what in it justifies removals before it.

    Raises CorruptLog, and Refused for records without a key that a later round would drop.
    """
    path = f"{proof.path}/{names.segment_file(segment.base_offset, names.LOG)}"
    open_checked(proof, proof.source, path, segment.log_bytes)
    state, source = proof.state, proof.source
    state[kernels.SOURCE_FROM] = 0
    state[kernels.SOURCE_LAST_OFFSET] = max(int(state[kernels.SOURCE_LAST_OFFSET]), segment.base_offset - 1)
    state[kernels.SOURCE_BLOCK_BYTES] = -1
    proof.bytes_read += segment.log_bytes
    block = NEVER_READ
    while True:
        proof.show_windows()
        notes = proof.keys.notes
        code = note_rest(source.bytes, block, notes.pending, notes.keys, proof.markers, state)
        if code == kernels.SOURCE_DONE:
            return
        if code == kernels.NEED_SOURCE:
            source.advance(int(state[kernels.SOURCE_FROM]), int(state[kernels.WANTED_BYTES]))
            state[kernels.SOURCE_FROM] = 0
        elif code == kernels.NEED_SOURCE_BLOCK:
            found = open_block(source, int(state[kernels.SOURCE_FROM]), CorruptLog, SOURCE_REMEDY)
            if found is None:
                note_in_pieces(proof)
                continue
            block = found
            state[kernels.SOURCE_BLOCK_BYTES] = len(block)
        elif code == kernels.NEED_NOTES and state[kernels.WANTED_BYTES] > WHOLE_BLOCK_RECORDS:
            note_in_pieces(proof)
        elif code == kernels.NEED_NOTES:
            proof.put_keys(int(state[kernels.WANTED_BYTES]), int(state[kernels.WANTED_KEY_BYTES]))
        elif code == kernels.NEED_MARKERS:
            proof.know_markers()
        elif code == kernels.NEED_LEGACY:
            note_present_message(proof)
        else:
            proof.fail(code)
