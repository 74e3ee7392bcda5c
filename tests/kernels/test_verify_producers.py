"""The kernel that tracks producers, compared with the reference model of a broker's replay."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from keytail.kernels.verify import columns
from keytail.kernels.verify import producers as kernels
from tests.chance import draws
from tests.reference.batches import Batch, Rec, decode_log, encode_batch, encode_marker
from tests.reference.producers import Producers

NOW = 1_700_000_000_000
FIRST_ID = 40


@st.composite
def histories(draw: st.DrawFn) -> list[Batch]:
    """Draw transactional batches and markers of up to three producers, with gaps, emptied batches and new epochs."""
    data, offset = b"", draw(st.integers(0, 5))
    epochs = [0, 0, 0]
    for _ in range(draw(st.integers(1, 25))):
        user = draw(st.integers(0, 2))
        epochs[user] += draw(st.sampled_from([0, 0, 0, 1]))
        kind = draw(st.sampled_from(["data", "data", "emptied", "commit", "abort", "no marker"]))
        fields = {"producer_id": FIRST_ID + user, "producer_epoch": epochs[user]}
        last = offset + draw(st.integers(0, 3))
        if kind in ("commit", "abort"):
            last = offset
            data += encode_marker(offset, NOW, commit=kind == "commit", **fields)
        elif kind == "no marker":
            emptied = {"max_timestamp": NOW, "transactional": True, "control": True}
            data += encode_batch([], base_offset=offset, last_offset=last, **emptied, **fields)
        else:
            sequence = draw(st.sampled_from([0, 7, 2**31 - 2]))
            records = [Rec(offset, NOW, b"k", b"v")] if kind == "data" else []
            data += encode_batch(
                records, base_offset=offset, last_offset=last, base_sequence=sequence, transactional=True,
                max_timestamp=NOW, **fields,
            )  # fmt: skip
        offset = last + 1 + draw(st.sampled_from([0, 0, 3]))
    return decode_log(data)


def _rows(batches: list[Batch]) -> np.ndarray:
    rows = np.zeros((len(batches), columns.ROW_COLUMNS), dtype=np.int64)
    for row, batch in zip(rows, batches, strict=True):
        row[columns.ROW_BASE], row[columns.ROW_LAST] = batch.base_offset, batch.last_offset
        row[columns.ROW_PRODUCER], row[columns.ROW_EPOCH] = batch.producer_id, batch.producer_epoch
        row[columns.ROW_SEQUENCE], row[columns.ROW_COUNT] = batch.base_sequence, len(batch.records)
        row[columns.ROW_ATTRIBUTES] = 0x10 | (0x20 if batch.control else 0)
        row[columns.ROW_CONTROL] = batch.records[0].key[3] if batch.control and batch.records else -1
    return rows


@settings(deadline=None, max_examples=draws(200))
@given(histories())
def test_the_state_of_producers_is_that_of_a_broker(batches: list[Batch]) -> None:
    rows = _rows(batches)
    state = np.full((3, kernels.STATE_COLUMNS), -1, dtype=np.int64)
    markers = np.zeros((len(rows), kernels.MARKER_COLUMNS), dtype=np.int64)
    numbers = rows[:, columns.ROW_PRODUCER] - FIRST_ID
    written, end = kernels.follow(rows, numbers, 0, 0, state, markers)
    assert end == len(rows)
    expected = Producers()
    for batch in batches:
        expected.take(batch)
    for producer_id, known in expected.known.items():
        own = state[producer_id - FIRST_ID]
        newest = known.batches[-1] if known.batches else None
        assert own[kernels.LAST_OFFSET] == (newest[1] if newest else -1)
        if newest:
            assert (own[kernels.LAST_SEQUENCE], own[kernels.OFFSET_DELTA]) == (newest[0], newest[2])
        assert own[kernels.OPEN_FROM] == (-1 if known.txn_first_offset is None else known.txn_first_offset)
        assert own[kernels.EPOCH] == known.epoch
    ended = [
        (int(m[kernels.MARKER_DATA]), int(m[kernels.MARKER_OFFSET]), bool(m[kernels.MARKER_ABORTS]))
        for m in markers[:written]
        if m[kernels.MARKER_DATA] >= 0
    ]
    assert ended == [(done.first_offset, done.marker_offset, done.aborted) for done in expected.completed]


def test_data_below_the_log_start_is_ignored_and_data_outside_a_transaction_stops_the_kernel() -> None:
    batches = decode_log(
        encode_batch([Rec(0, NOW, b"k", b"v")], producer_id=FIRST_ID, producer_epoch=0, base_sequence=0,
                     transactional=True)
        + encode_batch([Rec(1, NOW, b"k", b"v")], producer_id=FIRST_ID, producer_epoch=0, base_sequence=1)
    )  # fmt: skip
    rows = _rows(batches)
    rows[1, columns.ROW_ATTRIBUTES] = 0
    numbers = np.zeros(2, dtype=np.int64)
    for log_start, stops in ((0, True), (1, False)):
        state = np.full((1, kernels.STATE_COLUMNS), -1, dtype=np.int64)
        markers = np.zeros((2, kernels.MARKER_COLUMNS), dtype=np.int64)
        assert kernels.follow(rows, numbers, 0, log_start, state, markers) == (0, 2)
        assert (state[0, kernels.OPEN_FROM] >= 0) == stops
