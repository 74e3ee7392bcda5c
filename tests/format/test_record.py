"""Single records and varints, compared with the reference model at every boundary (BATCH.md 2)."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from keytail.format import record as fmt
from keytail.format.record import Record, decode_record, decode_records
from tests.chance import draws
from tests.format.records import encode_record
from tests.reference import varints as reference
from tests.reference.batches import Rec, decode_log, encode_batch
from tests.reference.batches import decode_records as reference_decode_records

ints = st.integers(-(2**31), 2**31 - 1)
longs = st.integers(-(2**63), 2**63 - 1)
fields = st.one_of(st.none(), st.binary(max_size=70))
headers = st.lists(st.tuples(st.binary(max_size=70), fields), max_size=4).map(tuple)
records = st.builds(Record, longs, ints, fields, fields, headers)

# Values on both sides of every change of length.
INT_EDGES = sorted({s * 2**b + d for b in (0, 6, 13, 20, 27, 31) for s in (1, -1) for d in (-1, 0, 1)})
LONG_EDGES = sorted({s * 2**b + d for b in range(6, 64, 7) for s in (1, -1) for d in (-1, 0, 1)} | {2**63 - 1})


@pytest.mark.parametrize("value", [v for v in INT_EDGES if -(2**31) <= v < 2**31])
def test_varints_of_every_length_are_decoded(value: int) -> None:
    data = reference.encode_varint(value)
    assert fmt.decode_varint(b"\xff" + data + b"\xff", 1) == (value, 1 + len(data))


@pytest.mark.parametrize("value", [v for v in LONG_EDGES if -(2**63) <= v < 2**63] + [-(2**63)])
def test_varlongs_of_every_length_are_decoded(value: int) -> None:
    data = reference.encode_varlong(value)
    assert fmt.decode_varlong(b"\xff" + data + b"\xff", 1) == (value, 1 + len(data))


@given(ints, longs)
@settings(deadline=None)
def test_varints_round_trip(value: int, long_value: int) -> None:
    assert fmt.decode_varint(reference.encode_varint(value), 0) == (value, len(reference.encode_varint(value)))
    assert fmt.decode_varlong(reference.encode_varlong(long_value), 0)[0] == long_value


@given(st.binary(max_size=12))
@example(b"\xff\xff\xff\xff\xff\x0f")  # a sixth byte
@example(b"\x80\x80\x80\x80\x10")  # bits beyond the 32nd in the fifth byte are lost
@example(b"\x80\x00")  # longer than needed
@example(b"\xff" * 9 + b"\x7f")
@example(b"\xff" * 10)
@settings(deadline=None, max_examples=draws(300))
def test_any_bytes_are_read_as_by_the_model(data: bytes) -> None:
    for ours, theirs in ((fmt.decode_varint, reference.decode_varint), (fmt.decode_varlong, reference.decode_varlong)):
        try:
            expected = theirs(data, 0)
        except ValueError:
            with pytest.raises(ValueError, match="varint"):
                ours(data, 0)
        else:
            assert ours(data, 0) == expected


@given(st.lists(records, max_size=5), st.binary(max_size=5))
@settings(deadline=None)
def test_records_round_trip(written: list[Record], behind: bytes) -> None:
    block = b"".join(map(encode_record, written))
    assert decode_records(block, len(written)) == written
    assert decode_records(memoryview(block), len(written)) == written
    at = 0
    for record in written:
        found, at = decode_record(block + behind, at)
        assert found == record
    assert at == len(block)


@given(records)
@settings(deadline=None)
def test_the_model_reads_the_same_records(record: Record) -> None:
    base_timestamp = 0 if record.timestamp_delta < 0 else -5
    rec = Rec(
        record.offset_delta, record.timestamp_delta + base_timestamp, record.key, record.value, record.headers
    )
    assert reference_decode_records(encode_record(record), 1, 0, base_timestamp) == [rec]


@given(st.lists(records, min_size=1, max_size=3), st.integers(0, 10**6))
@settings(deadline=None)
def test_truncated_records_are_an_error(written: list[Record], cut: int) -> None:
    block = b"".join(map(encode_record, written))
    with pytest.raises(ValueError, match=r"varint|left|fields"):
        decode_records(block[: cut % len(block)], len(written))


@given(st.binary(max_size=80), st.integers(0, 3))
@settings(deadline=None, max_examples=draws(300))
def test_any_bytes_give_records_or_an_error(data: bytes, count: int) -> None:
    try:
        found = decode_records(data, count)
    except ValueError as reason:
        assert str(reason)
    else:
        again = b"".join(map(encode_record, found))
        assert decode_records(again, count) == found
        assert len(again) <= len(data)  # varints are written minimally


@given(st.lists(records, min_size=1, max_size=3), st.integers(0, 10**6), st.integers(0, 7))
@settings(deadline=None, max_examples=draws(300))
def test_damaged_records_are_read_or_refused_as_by_the_model(written: list[Record], at: int, bit: int) -> None:
    block = bytearray(b"".join(map(encode_record, written)))
    block[at % len(block)] ^= 1 << bit
    try:
        expected = reference_decode_records(bytes(block), len(written), 0, 0)
    except ValueError:
        with pytest.raises(ValueError, match=r"."):
            decode_records(block, len(written))
    else:
        found = decode_records(block, len(written))
        assert [(r.offset_delta, r.timestamp_delta, r.key, r.value, r.headers) for r in found] == [
            (r.offset, r.timestamp, r.key, r.value, r.headers) for r in expected
        ]


@pytest.mark.parametrize(
    ("hex_record", "reason"),
    [
        ("", "beyond the end"),
        ("00", "its length is 0 bytes"),
        ("01", "its length is -1 bytes"),
        ("0e 00 00 00 01 01 00", "its length is 7 bytes, but 6 are left"),
        ("0e 00 00 00 01 01 00 00", "its fields end 1 bytes before"),
        ("0a 00 00 00 01 01", "beyond the end"),
        ("0c 00 00 00 01 01 01", "header count is -1"),
        ("0c 00 00 00 01 01 04", "header count is 2, but 0 bytes are left"),
        ("10 00 00 00 01 01 02 01 01", "a header has no key"),
        ("0c 00 00 00 06 61 62 63 00 00", "a field has 3 bytes, but 2 are left"),
        ("16 00 00 00 ffffffffff7f 01 00", "a varint has more than 5"),
        ("22 00 ffffffffffffffffffff7f 00 01 01 00 00", "a varint has more than 10"),
    ],
)
def test_malformed_records_are_refused_with_a_reason(hex_record: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        decode_record(bytes.fromhex(hex_record))


def test_any_negative_length_is_null() -> None:
    record, end = decode_record(bytes.fromhex("14 00 00 00 03 ffffffff0f 00"))  # -2 and -2147483648
    assert (record.key, record.value, end) == (None, None, 11)


def test_bytes_after_the_last_record_are_an_error() -> None:
    block = encode_record(Record(0, 0, b"k", b"v"))
    with pytest.raises(ValueError, match="1 bytes follow the last of 1"):
        decode_records(block + b"\0", 1)
    with pytest.raises(ValueError, match="record count -1"):
        decode_records(b"", -1)


def test_the_records_of_a_batch_are_read() -> None:
    data = encode_batch([Rec(5, 1000, b"k", None), Rec(9, 1001, None, b"v")])
    assert decode_records(data[61:], 2) == [Record(0, 0, b"k", None), Record(1, 4, None, b"v")]
    assert len(decode_log(data)[0].records) == 2
