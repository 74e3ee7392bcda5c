"""The partition of a key, compared with the hashes in Kafka's own test and with the reference model."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keytail.kernels.murmur2 import partition_of_keys
from tests.kernels.guard import guarded
from tests.reference import murmur2
from tests.reference.encode import bytes_arrays

# From Kafka's UtilsTest; the values are signed.
HASHES_OF_KAFKA = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}


def partitions(keys, n):
    data, offsets, valid = bytes_arrays(keys)
    return partition_of_keys(guarded(data.tobytes()), offsets, ~valid, n).tolist()


def test_the_hashes_are_those_of_kafka():
    expected = [(value & 0x7FFFFFFF) % (2**31 - 1) for value in HASHES_OF_KAFKA.values()]
    assert partitions(list(HASHES_OF_KAFKA), 2**31 - 1) == expected
    assert [murmur2.murmur2(key) for key in HASHES_OF_KAFKA] == [
        value & 0xFFFFFFFF for value in HASHES_OF_KAFKA.values()
    ]


@given(st.lists(st.none() | st.binary(max_size=40), max_size=20), st.integers(1, 2**31 - 1) | st.integers(1, 9))
def test_the_partitions_are_those_of_the_model(keys, n):
    assert partitions(keys, n) == [-1 if key is None else murmur2.partition(key, n) for key in keys]


def test_offsets_of_both_widths_and_read_only_data_are_accepted():
    data, offsets, valid = bytes_arrays([b"a", None, b"", b"bcdef"])
    expected = [murmur2.partition(b"a", 7), -1, murmur2.partition(b"", 7), murmur2.partition(b"bcdef", 7)]
    for width in (np.int32, np.int64):
        found = partition_of_keys(data, offsets.astype(width), ~valid, 7)
        assert found.dtype == np.int32
        assert found.tolist() == expected
    assert partition_of_keys(data[:0], offsets[:1], valid[:0], 7).tolist() == []


@pytest.mark.parametrize(
    "offsets, n", [([0, 2, 1], 3), ([-1, 0, 1], 3), ([0, 1, 4], 3), ([0, 1], 3), ([0, 1, 3], 0), ([], 3)]
)
def test_offsets_outside_the_data_are_refused(offsets, n):
    with pytest.raises(ValueError):
        partition_of_keys(np.zeros(3, np.uint8), np.array(offsets, np.int64), np.zeros(2, bool), n)
