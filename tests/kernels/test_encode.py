"""Batches written from columns have the same bytes and boundaries as those of the reference model, within the given
memory.
"""

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from keytail.format.batch import BATCH_TABLE
from keytail.kernels import encode
from tests.chance import draws
from tests.kernels.guard import guarded, guarded_front
from tests.reference.batches import Rec, encode_batch
from tests.reference.encode import MANY, bytes_arrays, headers_arrays
from tests.reference.encode import encode as reference_encode

# Lengths on both sides of each change of a varint's length.
sized = st.tuples(st.sampled_from([0, 1, 2, 63, 64, 65, 8191, 8192]), st.integers(0, 255)).map(
    lambda drawn: bytes([drawn[1]]) * drawn[0]
)
field = st.none() | st.binary(max_size=5) | sized
times = st.integers(-1, 3) | st.integers(10**12, 10**12 + 200) | st.integers(-1, 2**62)
header = st.tuples(st.binary(max_size=4), st.none() | st.binary(max_size=70))
headers = st.just([]) | st.lists(header, max_size=4) | st.integers(60, 70).map(lambda n: [(b"h", None)] * n)
rows = st.lists(st.tuples(times, field, field, headers), min_size=1, max_size=25)


def records_of(drawn, base_offset=0):
    return [Rec(base_offset + i, t, k, v, tuple(h)) for i, (t, k, v, h) in enumerate(drawn)]


def guarded_array(array):
    """Copy an array to the end of the last accessible page, read-only like every column that the kernels receive."""
    copy = guarded(array.tobytes()).view(array.dtype)
    copy.flags.writeable = False
    return copy


def arrays(records, with_headers=True):
    def column(values):
        return tuple(map(guarded_array, bytes_arrays(values)))

    offsets, keys, values = headers_arrays(records)
    if not with_headers:
        offsets = offsets[:0]
    return (
        guarded_array(np.array([rec.timestamp for rec in records], np.int64)),
        column([rec.key for rec in records]),
        column([rec.value for rec in records]),
        (guarded_array(offsets), tuple(map(guarded_array, keys)), tuple(map(guarded_array, values))),
    )


def encoded(columns, base_offset, batch_bytes, batch_records, *, stop_bytes, table_rows=100, leader_epoch=9):
    """Return all batches, encoded in as many steps as necessary; the output of each step has the smallest permitted
    size.
    """
    code, row, largest = encode.check_records(*columns, 2**31 - 1)
    assert (code, row) == (encode.OK, -1)
    batches, n = [], 0
    while n < len(columns[0]):
        target = guarded(bytes(stop_bytes - 1 + max(batch_bytes, largest)))
        table = np.zeros(table_rows, BATCH_TABLE)
        n, size, filled = encode.write_blocks(
            *columns, n, base_offset, batch_bytes, batch_records, stop_bytes, target, table
        )
        assert filled > 0
        table = table[:filled]
        table["leader_epoch"], table["producer_id"] = leader_epoch, -1
        table["producer_epoch"] = table["base_sequence"] = -1
        encode.put_headers(target, table)
        ends = np.append(table["position"], size)
        assert (ends[1:] - ends[:-1]).tolist() == table["size_bytes"].tolist()
        batches += [target[a:b].tobytes() for a, b in itertools.pairwise(ends.tolist())]
    return batches


@settings(max_examples=draws(100))
@given(
    rows,
    st.integers(1, 300) | st.sampled_from([1000, 9000, 10**6]),
    st.just(MANY) | st.integers(1, 4),
    st.integers(1, 400),
    st.integers(1, 5),
    st.integers(0, 2**62),
)
@example([(5, None, None, [])] * 70, 10**6, MANY, 1, 1, 0)
@example([(2**62, b"", b"", []), (-1, b"", b"", []), (2**62, b"", b"", [])], 10**6, MANY, 1, 1, 7)
def test_the_bytes_are_those_of_the_model(drawn, batch_bytes, batch_records, stop_bytes, table_rows, base_offset):
    records = records_of(drawn, base_offset)
    expected = reference_encode(records, batch_bytes, batch_records, leader_epoch=9)
    found = encoded(
        arrays(records), base_offset, batch_bytes, batch_records, stop_bytes=stop_bytes, table_rows=table_rows
    )
    assert found == expected
    if not any(rec.headers for rec in records):
        bare = arrays(records, with_headers=False)
        assert encoded(bare, base_offset, batch_bytes, batch_records, stop_bytes=stop_bytes) == expected


@given(rows)
def test_a_record_must_fit_into_the_largest_batch(drawn):
    records = records_of(drawn)
    sizes = [len(encode_batch([Rec(0, rec.timestamp, rec.key, rec.value, rec.headers)])) for rec in records]
    columns = arrays(records)
    assert encode.check_records(*columns, max(sizes)) == (encode.OK, -1, max(sizes))
    first = next(i for i, size in enumerate(sizes) if size > max(sizes) - 1)
    assert encode.check_records(*columns, max(sizes) - 1)[:2] == (encode.RECORD_TOO_LARGE, first)


def test_a_batch_may_have_exactly_the_maximum_size():
    records = records_of([(7, b"key", b"value", [])] * 3)
    whole = len(encode_batch(records))
    assert [len(batch) for batch in encoded(arrays(records), 0, whole, MANY, stop_bytes=1)] == [whole]
    assert len(encoded(arrays(records), 0, whole - 1, MANY, stop_bytes=1)) == 2


def test_no_batch_begins_at_or_after_the_stop():
    columns = arrays(records_of([(7, b"key", b"value", [])] * 9))
    size = len(encode_batch(records_of([(7, b"key", b"value", [])])))
    target, table = np.zeros(10 * size, np.uint8), np.zeros(20, BATCH_TABLE)
    for stop, batches in ((1, 1), (size, 1), (size + 1, 2), (3 * size, 3), (100 * size, 9)):
        assert encode.write_blocks(*columns, 0, 0, 1, MANY, stop, target, table) == (batches, batches * size, batches)
    assert encode.write_blocks(*columns, 7, 0, 1, MANY, 100 * size, target, table)[0] == 9
    assert table["base_offset"][:2].tolist() == [7, 8]


def broken(what, row):
    """Return the columns of three records, of which record `row` is invalid."""
    columns = arrays(records_of([(5, b"key", b"value", [(b"h", b"x"), (b"i", None)])] * 3))
    timestamps, keys, values, headers = columns

    def changed(array, at, value):
        copy = np.frombuffer(array.tobytes(), array.dtype).copy()
        copy[at] = value
        return guarded_array(copy)

    def moved(column, at, value):
        return column[0], changed(column[1], at, value), column[2]

    match what:
        case "timestamp":
            return changed(timestamps, row, -2), keys, values, headers
        case "descending key offsets":
            return timestamps, moved(keys, row + 1, keys[1][row] - 1), values, headers
        case "key beyond":
            return timestamps, (keys[0][: 3 * row + 2], *keys[1:]), values, headers
        case "value beyond":
            return timestamps, keys, moved(values, row + 1, 2**62), headers
        case "value before":
            return timestamps, keys, moved(values, row, -1), headers
        case "headers beyond":
            return timestamps, keys, values, (changed(headers[0], row + 1, 7), *headers[1:])
        case "headers go back":
            return timestamps, keys, values, (changed(headers[0], row + 1, 2 * row - 1), *headers[1:])
        case "header key":
            return timestamps, keys, values, (headers[0], moved(headers[1], 2 * row + 1, -1), headers[2])
        case "header key null":
            null = (*headers[1][:2], changed(headers[1][2], 2 * row + 1, False))
            return timestamps, keys, values, (headers[0], null, headers[2])
        case "header value":
            return timestamps, keys, values, (*headers[:2], moved(headers[2], 2 * row + 2, 99))
    raise AssertionError(what)


@pytest.mark.parametrize(
    "what, row, code",
    [
        ("timestamp", 1, encode.NEGATIVE_TIMESTAMP),
        ("timestamp", 2, encode.NEGATIVE_TIMESTAMP),
        ("descending key offsets", 1, encode.KEY_OFFSETS),
        ("key beyond", 2, encode.KEY_OFFSETS),
        ("value beyond", 0, encode.VALUE_OFFSETS),
        ("value beyond", 2, encode.VALUE_OFFSETS),
        ("value before", 0, encode.VALUE_OFFSETS),
        ("headers beyond", 2, encode.HEADER_OFFSETS),
        ("headers go back", 1, encode.HEADER_OFFSETS),
        ("header key", 0, encode.HEADER_KEY_OFFSETS),
        ("header key null", 1, encode.HEADER_KEY_NULL),
        ("header value", 2, encode.HEADER_VALUE_OFFSETS),
    ],
)
def test_a_row_that_no_batch_can_contain_is_reported(what, row, code):
    assert encode.check_records(*broken(what, row), 2**31 - 1)[:2] == (code, row)


def test_records_without_a_timestamp_are_encoded():
    records = records_of([(-1, b"k", None, [])] * 2)
    assert encoded(arrays(records), 3, 10**6, MANY, stop_bytes=1) == reference_encode(
        records_of([(-1, b"k", None, [])] * 2, 3), 10**6, leader_epoch=9
    )


@pytest.mark.long
def test_sizes_beyond_32_bits_are_refused():
    """The length alone is the reason: no byte of the value is read."""
    data = np.zeros(0, np.uint8)
    huge = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (2**33,), (1,))
    huge.flags.writeable = False
    item = np.zeros(1, np.bool_)
    null = (data, np.zeros(2, np.int64), item)
    value = (huge, np.array([0, 2**32 + 5]), ~item)
    columns = (np.zeros(1, np.int64), null, value, (np.zeros(0, np.int64), null, null))
    code, row, _ = encode.check_records(*columns, 2**31 - 1)
    assert (code, row) == (encode.RECORD_TOO_LARGE, 0)


def test_no_byte_before_the_columns_is_read():
    records = records_of([(1, b"a", b"b", [(b"c", b"d")]), (2, None, b"", [])])
    expected = encoded(arrays(records), 0, 500, MANY, stop_bytes=1)

    def front(array):
        if isinstance(array, tuple):
            return tuple(map(front, array))
        copy = guarded_front(array.tobytes()).view(array.dtype)
        copy.flags.writeable = False
        return copy

    assert encoded(front(arrays(records)), 0, 500, MANY, stop_bytes=1) == expected
