"""Records partitioned into cells: each cell contains the records of its partition, in order and unchanged."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keytail.format.cells import Divider, empty_cell, opened
from keytail.format.columns import BytesColumn, HeadersColumn
from keytail.format.encode import RecordColumns
from tests.chance import chance
from tests.reference.batches import Rec
from tests.reference.encode import bytes_arrays, headers_arrays

field = st.none() | st.binary(max_size=20)
header = st.tuples(st.binary(max_size=4), field)
row = st.tuples(st.integers(-1, 2**62), field, field, st.lists(header, max_size=3))
part = st.tuples(st.booleans(), st.lists(st.tuples(st.integers(-2, 4), row), max_size=12))


def columns_of(rows, with_headers, before=0):
    """Return columns that begin inside their data, like those of a slice."""
    records = [Rec(n, t, k, v, tuple(h)) for n, (t, k, v, h) in enumerate(rows)]
    skipped = [Rec(0, 1, b"before", None, ((b"n", b"o"),))] * before + records
    times = np.array([rec.timestamp for rec in skipped], np.int64)
    headers = None
    if with_headers:
        offsets, keys, values = headers_arrays(skipped)
        headers = HeadersColumn(offsets, BytesColumn(*keys), BytesColumn(*values))
    keys, values = (BytesColumn(*bytes_arrays([getattr(rec, name) for rec in skipped])) for name in ("key", "value"))
    return RecordColumns(times, keys, values, headers).rows(before, len(skipped))


def rows_of(columns):
    n = len(columns)
    pairs = [[] for _ in range(n)]
    if columns.headers is not None:
        of = columns.headers
        names, contents = of.keys.to_list(), of.values.to_list()
        headers = list(zip(names, contents, strict=True))
        pairs = [headers[start:end] for start, end in pairwise(of.offsets)]
    keys, values = columns.keys.to_list(), columns.values.to_list()
    return list(zip(columns.timestamps_ms.tolist(), keys, values, pairs, strict=True))


@pytest.mark.long
@given(st.lists(st.lists(part, min_size=1, max_size=4), min_size=1, max_size=3), st.integers(0, 2))
def test_each_partition_gets_its_records_in_order(pieces, before):
    divider = Divider(5)
    for piece in pieces:  # all pieces use the same memory
        parts = [columns_of([given for _, given in rows], with_headers, before) for with_headers, rows in piece]
        partitions = [np.array([number for number, _ in rows], np.int32) for _, rows in piece]
        expected = {}
        for with_headers, rows in piece:
            for number, (time, key, value, headers) in rows:
                if number >= 0:
                    expected.setdefault(number, []).append((time, key, value, headers if with_headers else []))
        cells = divider.divide(parts, partitions)
        assert [partition for partition, _ in cells] == sorted(expected)
        assert {partition: rows_of(opened(cell)) for partition, cell in cells} == expected


def test_a_cell_can_be_kept_as_bytes_and_an_empty_one_has_no_records():
    rng = chance()
    rows = [(n, rng.randbytes(rng.randrange(9)), None, [(b"h", rng.randbytes(3))]) for n in range(1000)]
    [(partition, cell)] = Divider(3).divide([columns_of(rows, True)], [np.full(1000, 2, np.int32)])
    assert partition == 2
    assert len(cell) % 8 == 0
    kept = np.frombuffer(bytearray(cell.tobytes()), np.uint8)
    assert rows_of(opened(kept)) == rows
    assert len(opened(empty_cell())) == 0
    assert opened(empty_cell()).data_bytes == 0
    assert Divider(3).divide([columns_of(rows, True)], [np.full(1000, -1, np.int32)]) == []


@pytest.mark.parametrize("offsets", [[0, 5, 2], [-1, 0, 1], [0, 1, 4]])
def test_offsets_outside_the_data_are_refused(offsets):
    column = BytesColumn(np.zeros(3, np.uint8), np.array(offsets, np.int64), np.ones(2, np.bool_))
    records = RecordColumns(np.zeros(2, np.int64), column, column)
    with pytest.raises(ValueError, match="do not ascend inside their data"):
        Divider(1).divide([records], [np.zeros(2, np.int32)])
