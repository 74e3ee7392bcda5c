"""Columns of records equal the records that the reference model decodes, for every codec."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from keytail.log.fs import LOCAL
from keytail.log.records.chunk import SegmentReader
from keytail.log.records.scan import RecordScanner
from keytail.log.records.table import BytesColumn
from tests.chance import draws
from tests.reference.batches import Rec, decode_log, encode_batch

maybe = st.none() | st.binary(max_size=40)
header = st.tuples(st.binary(max_size=5), maybe)
record = st.tuples(maybe, maybe, st.lists(header, max_size=3))
log = st.lists(st.tuples(st.integers(0, 4), st.lists(record, min_size=1, max_size=6)), min_size=1, max_size=4)


@settings(deadline=None, max_examples=draws(60))
@given(log)
def test_columns_equal_the_records_of_the_model(tmp_path_factory, batches):
    parts, offset = [], 0
    for codec, records in batches:
        recs = [Rec(offset + i, 5, key, value, tuple(headers)) for i, (key, value, headers) in enumerate(records)]
        parts.append(encode_batch(recs, codec=codec))
        offset += len(recs)
    data = b"".join(parts)
    path = tmp_path_factory.mktemp("log") / f"{0:020d}.log"
    path.write_bytes(data)
    expected = [rec for batch in decode_log(data) for rec in batch.records]
    offsets, keys, values, headers = [], [], [], []
    reader = SegmentReader(LOCAL)
    for chunk in reader.chunks(str(path), len(data)):
        for opened in reader.open_rows(chunk, np.ones(len(chunk.table), bool)):
            for portion in RecordScanner(3).portions(chunk, opened):
                table = portion.record_table
                offsets += table.records["offset"].tolist()
                keys += table.keys().to_list()
                values += table.values().to_list()
                column = table.headers()
                pairs = list(zip(column.keys.to_list(), column.values.to_list(), strict=True))
                bounds = column.offsets.tolist()
                headers += [tuple(pairs[a:b]) for a, b in itertools.pairwise(bounds)]
    assert offsets == [rec.offset for rec in expected]
    assert keys == [rec.key for rec in expected]
    assert values == [rec.value for rec in expected]
    assert headers == [rec.headers for rec in expected]


def test_a_column_has_the_layout_of_arrow():
    import pyarrow as pa

    column = BytesColumn(np.frombuffer(b"abcd", np.uint8), np.array([0, 1, 1, 4]), np.array([True, False, True]))
    bits = pa.py_buffer(np.packbits(column.valid, bitorder="little"))
    array = pa.Array.from_buffers(
        pa.large_binary(), len(column), [bits, pa.py_buffer(column.offsets), pa.py_buffer(column.data)]
    )
    assert array.to_pylist() == column.to_list() == [b"a", None, b"bcd"]
