"""Notes, for a proof, the keys of segments that are rewritten in a later pass. The records of these segments are still
on disk, so they may justify the removal of older records in this pass. The segments are read one at a time and have no
outputs yet; each is proven in its own pass. Codes, state, notes and markers are those of `step.py`, whose checks of a
source are made here as well.
"""

from __future__ import annotations

from numba.extending import register_jitable

from keytail.kernels import batch_header as v2
from keytail.kernels.jit import kernel
from keytail.kernels.proof.checks import check_source, next_batch
from keytail.kernels.proof.codes import NEED_LEGACY, NEED_MARKERS, NEED_SOURCE_BLOCK, PASSED
from keytail.kernels.proof.meaning import COUNTS, SILENT, is_value
from keytail.kernels.proof.records import check_room, note_present
from keytail.kernels.proof.step import pass_source, source_records
from keytail.kernels.walk import be_16, be_64


@kernel
def note_rest(source, block, notes, markers, state):
    """Note the batches of the window; return SOURCE_DONE, a NEED_* code, or the code of a violation."""
    code = PASSED
    while code == PASSED:
        code = _note_batch(source, block, notes, markers, state)
    return code


@register_jitable(forceinline=True)
def _note_batch(source, block, notes, markers, state):
    code, size = next_batch(source, state)
    if code != PASSED:
        return code
    p = state.source.at
    if source[p + v2.MAGIC] < 2:
        return NEED_LEGACY
    is_open = state.source.block_bytes >= 0
    if not is_open:
        code = check_source(source, p, size, state)
        if code != PASSED:
            return code
    meaning = COUNTS
    if be_16(source, p + v2.ATTRIBUTES) & v2.TRANSACTIONAL_OR_CONTROL and state.rules.erases == 0:
        if state.knows_markers == 0:
            return NEED_MARKERS
        meaning = COUNTS if is_value(source, p, markers, state) else SILENT
    # The last offset passed is the offset before the batch: no record of the batch has been read.
    state.batch.meaning, state.batch.last_offset = meaning, be_64(source, p) - 1
    records = source_records(source, block, size, state)
    if records.end < 0:
        return NEED_SOURCE_BLOCK
    code = check_room(records, p, be_64(source, p), notes, state)
    if code != PASSED:
        return code
    code = note_present(source, records, notes, state)
    if code == PASSED:
        pass_source(source, state)
    return code


@kernel
def note_piece(source, records, notes, state):
    """Note some records of the batch for which `note_rest` needed a block or notes; return a code, as `note_rest`
    does."""
    return note_present(source, records, notes, state)


@kernel
def close_noted(source, state):
    """Move to the next batch after all records of a batch were noted."""
    pass_source(source, state)
