"""Index entries: layouts and round trips, with bytes that Kafka's classes printed."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keytail.format import index

i2, i4, i8 = (st.integers(-(2**bits), 2**bits - 1) for bits in (15, 31, 63))


def test_the_offset_index_of_a_broker_is_parsed() -> None:
    entries = index.parse_offset_index(bytes.fromhex("0000000100000000 0000003200001068"))
    assert entries.tolist() == [(1, 0), (50, 4200)]  # offsets 101 and 150, at bytes 0 and 4200
    assert entries["position"].dtype == np.int32
    assert entries.dtype.isnative


def test_the_transaction_index_of_a_broker_is_parsed() -> None:
    data = bytes.fromhex("0000 0000000000000fa1 0000000000000064 0000000000000066 0000000000000067")
    entries = index.parse_txn_index(data)
    assert entries.tolist() == [(0, 4001, 100, 102, 103)]
    assert index.encode_txn_index(entries) == data


def _encoded(entry: np.dtype) -> Callable[[np.ndarray], bytes]:
    return lambda entries: entries.astype(entry).tobytes()


@pytest.mark.parametrize(
    ("parse", "encode", "layout", "values"),
    [
        (index.parse_offset_index, _encoded(index.OFFSET_ENTRY), ">ii", st.tuples(i4, i4)),
        (index.parse_time_index, _encoded(index.TIME_ENTRY), ">qi", st.tuples(i8, i4)),
        (index.parse_txn_index, index.encode_txn_index, ">hqqqq", st.tuples(i2, i8, i8, i8, i8)),
    ],
)
def test_entries_round_trip(parse, encode, layout: str, values: st.SearchStrategy) -> None:  # type: ignore[no-untyped-def]
    @given(st.lists(values, max_size=20), st.binary(max_size=struct.calcsize(layout) - 1))
    @settings(deadline=None)
    def check(rows: list[tuple], cut_entry: bytes) -> None:
        data = b"".join(struct.pack(layout, *row) for row in rows)
        entries = parse(data + cut_entry)
        assert entries.tolist() == rows
        assert encode(entries) == data
        assert encode(parse(np.frombuffer(data, np.uint8))) == data

    check()


@given(st.binary(max_size=100))
@settings(deadline=None)
def test_any_bytes_are_parsed_as_entries(data: bytes) -> None:
    assert len(index.parse_offset_index(data)) == len(data) // 8
    assert len(index.parse_time_index(memoryview(data))) == len(data) // 12
    assert len(index.parse_txn_index(bytearray(data))) == len(data) // 34
