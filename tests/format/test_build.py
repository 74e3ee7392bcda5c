"""A batch built from a few records equals that of the reference model, byte for byte."""

from __future__ import annotations

import pytest

from keytail.format.build import build_batch
from tests.reference.batches import Rec, decode_log, encode_batch

RECORDS = [(5, b"k", b"v"), (3, None, b""), (900_000, b"", None)]


def test_an_uncompressed_batch_has_the_bytes_of_the_model() -> None:
    records = [Rec(7 + n, ms, key, value) for n, (ms, key, value) in enumerate(RECORDS)]
    assert build_batch(RECORDS, base_offset=7, leader_epoch=4) == encode_batch(records, leader_epoch=4)


@pytest.mark.parametrize("codec", [1, 2, 3, 4])
def test_a_compressed_batch_is_read_back(codec: int) -> None:
    (batch,) = decode_log(build_batch(RECORDS, codec=codec))
    assert [(rec.timestamp, rec.key, rec.value) for rec in batch.records] == RECORDS
    assert batch.codec == codec


def test_a_batch_without_records_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one record"):
        build_batch([])
