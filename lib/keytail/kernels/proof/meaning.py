"""Determines what a batch means for its records' keys: transaction outcome, expired retention, producer."""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from keytail.kernels import batch_header as v2
from keytail.kernels.proof.codes import (
    LOST_MARKER,
    LOST_MARKER_EARLY,
    LOST_MARKER_HELD,
    LOST_OPEN,
    OUTPUT_ABORTED,
    PASSED,
    SOURCE_ORDER,
)
from keytail.kernels.proof.markers import ABORT, COMMIT, FIRST_DATA, KIND, OFFSET, OUTPUT, next_marker
from keytail.kernels.proof.state import fail
from keytail.kernels.walk import be_16, be_32, be_64, control_type

# What the records of a batch mean: values of their keys; nothing (aborted data, data below the log start offset, and
# markers); an unneeded marker, without data.
COUNTS, SILENT, UNNEEDED = range(3)


@register_jitable
def is_over(source, p, state):
    """Return whether the retention of the tombstones or of the marker in the batch at `p` has expired."""
    if state.rules.by_file_time != 0:
        return state.source.is_old != 0
    has_horizon = be_16(source, p + v2.ATTRIBUTES) & v2.DELETE_HORIZON != 0
    return has_horizon and be_64(source, p + v2.BASE_TIMESTAMP) <= state.rules.now_ms


@register_jitable
def settle(source, p, size, output, q, markers, state):
    """Return (code, meaning) of a transactional or control batch, whose output is at `q` (-1: dropped).

    Checks the output against the outcome of the transaction, and updates `markers`.
    """
    base, last = be_64(source, p), be_64(source, p) + be_32(source, p + v2.LAST_OFFSET_DELTA)
    attributes, producer = be_16(source, p + v2.ATTRIBUTES), be_64(source, p + v2.PRODUCER_ID)
    count = be_32(source, p + v2.RECORD_COUNT)
    kept = np.int64(0) if q < 0 else be_32(output, q + v2.RECORD_COUNT)
    if attributes & v2.CONTROL == 0:
        if last < state.rules.log_start:  # consumers do not get such data; Kafka treats aborted data there as committed
            return PASSED, SILENT
        row = next_marker(markers, producer, last + 1)
        if row < 0:
            is_removed = kept < count if state.rules.erases != 0 else count > 0 and kept == 0
            if q < 0 or is_removed:
                return fail(state, LOST_OPEN, p, base), COUNTS
            return PASSED, COUNTS
        if markers[row, FIRST_DATA] < 0:
            markers[row, FIRST_DATA] = base
        if markers[row, KIND] != ABORT:
            return PASSED, COUNTS
        if kept > 0 and state.rules.erases == 0:
            return fail(state, OUTPUT_ABORTED, q, base), SILENT
        return PASSED, SILENT
    if count == 0:
        return PASSED, SILENT
    kind = control_type(source, p, size)
    if kind not in (ABORT, COMMIT):
        if kept == 0:
            return fail(state, LOST_MARKER, p, base), SILENT
        return PASSED, SILENT
    row = next_marker(markers, producer, base)
    if row < 0 or markers[row, OFFSET] != base:
        return fail(state, SOURCE_ORDER, p, base), SILENT
    has_data = markers[row, FIRST_DATA] >= 0 and base >= state.rules.log_start
    if kept > 0:
        markers[row, OUTPUT] = state.output.number
    elif has_data:
        return fail(state, LOST_MARKER, p, base), SILENT
    elif not is_over(source, p, state):
        return fail(state, LOST_MARKER_EARLY, p, base), SILENT
    elif base >= state.rules.removal_limit:
        return fail(state, LOST_MARKER_HELD, p, base), SILENT
    return PASSED, SILENT if has_data else UNNEEDED


@register_jitable
def is_value(source, p, markers, state):
    """Return whether the records of a transactional or control batch, which is not settled yet, are values of keys."""
    if be_16(source, p + v2.ATTRIBUTES) & v2.CONTROL:
        return False
    last = be_64(source, p) + be_32(source, p + v2.LAST_OFFSET_DELTA)
    if last < state.rules.log_start:
        return False
    row = next_marker(markers, be_64(source, p + v2.PRODUCER_ID), last + 1)
    return row < 0 or markers[row, KIND] != ABORT


@register_jitable
def ends_a_producer(source, p, producers):
    """Return whether the state of an active producer depends on this batch (`producers`: id, last offset, epoch)."""
    producer = be_64(source, p + v2.PRODUCER_ID)
    if producer < 0:
        return False
    at = np.searchsorted(producers[0], producer)
    if at == producers.shape[1] or producers[0, at] != producer:
        return False
    if producers[1, at] >= 0:
        return producers[1, at] == be_64(source, p) + be_32(source, p + v2.LAST_OFFSET_DELTA)
    is_control = be_16(source, p + v2.ATTRIBUTES) & v2.CONTROL != 0
    return is_control and be_16(source, p + v2.PRODUCER_EPOCH) == producers[2, at]
