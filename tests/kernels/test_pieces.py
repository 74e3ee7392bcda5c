import numpy as np
import pytest

from keytail.kernels import pieces
from tests.kernels.guard import guarded
from tests.reference.batches import Rec, encode_batch

BLOCK = encode_batch([Rec(offset, 0, b"k", b"v" * 100) for offset in (7, 9, 12)], base_offset=0)[61:]
RECORD_BYTES = len(BLOCK) // 3  # the length of each record takes two bytes


def whole_records(data, most=10, up_to_delta=100):
    out = np.zeros(5, np.int64)
    pieces.whole_records(guarded(data), len(data), most, up_to_delta, out)
    return out.tolist()


@pytest.mark.parametrize(
    "end_bytes, wanted",
    [(0, 1), (1, 2), (2, RECORD_BYTES), (RECORD_BYTES - 1, RECORD_BYTES)],
)
def test_the_bytes_that_an_incomplete_record_needs_are_returned(end_bytes, wanted):
    assert whole_records(BLOCK[:end_bytes]) == [0, 0, -1, -1, wanted]
    assert whole_records(BLOCK + BLOCK[:end_bytes]) == [len(BLOCK), 3, 7, 12, wanted]


@pytest.mark.parametrize("limits, records", [({"most": 2}, 2), ({"up_to_delta": 11}, 2), ({"up_to_delta": 6}, 0)])
def test_records_are_counted_up_to_a_number_or_a_delta(limits, records):
    first, largest = (7, 9) if records else (-1, -1)
    assert whole_records(BLOCK, **limits) == [records * RECORD_BYTES, records, first, largest, 0]


@pytest.mark.parametrize("length", [b"\x00", b"\x01", b"\xff" * 5])
def test_an_invalid_length_ends_the_count(length):
    assert whole_records(BLOCK + length) == [len(BLOCK), 3, 7, 12, 0]
