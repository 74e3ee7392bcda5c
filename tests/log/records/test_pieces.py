from __future__ import annotations

import numpy as np
import pytest

from keytail.log.records.pieces import RecordStream
from tests.reference.batches import Rec, encode_record


def test_a_piece_that_begins_below_the_end_of_the_previous_one_is_an_error() -> None:
    """The last records of the two pieces are in order."""
    block = b"".join(encode_record(Rec(delta, 0, b"k", b"v"), 0, 0) for delta in (0, 5, 3, 6))
    stream = RecordStream(0, block, 4, [np.empty(100, np.uint8), np.empty(100, np.uint8)])
    assert stream.take(2, 100)[2] == 2
    with pytest.raises(ValueError, match="do not increase"):
        stream.take(2, 100)
