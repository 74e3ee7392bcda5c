"""The reference model compared with bytes that Kafka's own classes printed, and with itself."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chance import draws
from tests.reference import codecs, hashing
from tests.reference.batches import Rec, all_records, decode_log, encode_batch, encode_marker
from tests.reference.varints import crc32c, decode_varint, decode_varlong, encode_varint, encode_varlong

T0 = 1700000000000
TWO_RECORDS = bytes.fromhex(
    "0000000000000064 0000004c 00000005 02 291ad797 0000 00000001 0000018bcfe56800 0000018bcfe56805"
    "0000000000000fa1 0003 00000007 00000002"
    "1c 00 00 00 04 6b31 04 7631 02 02 68 02 78"
    "16 00 0a 02 04 6b32 01 02 02 6e 01"
)
COMMIT = bytes.fromhex(
    "0000000000000066 00000042 00000005 02 a88dc5cc 0030 00000000 0000018bcfe5680a 0000018bcfe5680a"
    "0000000000000fa1 0003 ffffffff 00000001"
    "20 00 00 00 08 00000001 0c 000000000009 00"
)
EMPTIED = bytes.fromhex(
    "0000000000000064 00000031 00000005 02 853b853e 0000 00000001 ffffffffffffffff 0000018bcfe56805"
    "0000000000000fa1 0003 00000007 00000000"
)
TOMBSTONE_WITH_HORIZON = bytes.fromhex(
    "0000000000000064 00000040 00000005 02 f596d17d 0040 00000001 0000018bd50d4aa0 0000018bcfe56805"
    "0000000000000fa1 0003 00000007 00000001"
    "1c 00 b58abf52 02 04 6b32 01 02 02 6e 01"
)
K1 = Rec(100, T0, b"k1", b"v1", ((b"h", b"x"),))
K2 = Rec(101, T0 + 5, b"k2", None, ((b"n", None),))
PRODUCER = {"leader_epoch": 5, "producer_id": 4001, "producer_epoch": 3, "base_sequence": 7}


def test_two_records_are_encoded_as_by_kafka() -> None:
    assert encode_batch([K1, K2], **PRODUCER) == TWO_RECORDS
    (batch,) = decode_log(TWO_RECORDS)
    assert batch.records == (K1, K2)
    assert (batch.base_offset, batch.last_offset) == (100, 101)
    assert (batch.leader_epoch, batch.producer_id) == (5, 4001)


def test_a_commit_marker_is_encoded_as_by_kafka() -> None:
    marker = encode_marker(
        102, T0 + 10, commit=True, producer_id=4001, producer_epoch=3, coordinator_epoch=9, leader_epoch=5
    )
    assert marker == COMMIT
    (batch,) = decode_log(COMMIT)
    assert batch.control and batch.transactional


def test_an_emptied_batch_is_encoded_as_by_kafka() -> None:
    empty = encode_batch([], base_offset=100, last_offset=101, max_timestamp=T0 + 5, **PRODUCER)
    assert empty == EMPTIED
    assert decode_log(EMPTIED)[0].records == ()


def test_a_tombstone_with_a_horizon_is_encoded_as_by_kafka() -> None:
    horizon = T0 + 100000 + 86400000
    kept = encode_batch([K2], base_offset=100, last_offset=101, delete_horizon_ms=horizon, **PRODUCER)
    assert kept == TOMBSTONE_WITH_HORIZON
    (batch,) = decode_log(TOMBSTONE_WITH_HORIZON)
    assert batch.delete_horizon_ms == horizon
    assert batch.records == (K2,)


def test_crc32c_has_the_values_of_known_vectors() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720 B.4
    assert crc32c(b"\xff" * 32) == 0x62A8AB43


@given(st.binary(max_size=300))
@settings(deadline=None, max_examples=draws(300))
def test_crc32c_equals_its_definition(data: bytes) -> None:
    assert crc32c(data) == hashing.crc32c(data)


@given(st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1))
@settings(deadline=None)
def test_varints_round_trip(number: int, long_number: int) -> None:
    assert decode_varint(encode_varint(number), 0) == (number, len(encode_varint(number)))
    assert decode_varlong(encode_varlong(long_number), 0) == (long_number, len(encode_varlong(long_number)))


@given(st.binary(max_size=70000), st.integers(0, 4))
@settings(deadline=None, max_examples=draws(60))
def test_codecs_round_trip(data: bytes, codec: int) -> None:
    assert codecs.decompress(codec, codecs.compress(codec, data)) == data


@pytest.mark.parametrize("codec", range(5))
def test_unusual_batches_round_trip(codec: int) -> None:
    records = [
        Rec(7, -1, b"", None),
        Rec(2**31 - 1, T0, None, b"", ((b"", b""), (b"a", None))),
        Rec(2**31 + 4, 0, b"k" * 300, b"v" * 40000),
    ]
    log = encode_batch(records, base_offset=5, last_offset=2**31 + 4, codec=codec, base_timestamp=12345)
    log += encode_batch([records[0]], base_offset=2, max_timestamp=T0, timestamp_type=1, codec=codec)
    first, second = decode_log(log)
    assert list(first.records) == records
    assert second.records[0].timestamp == T0
    assert all_records([first, second])[:3] == records
    assert second.position == first.size


def test_numbers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="32 bits"):
        encode_batch([K1, Rec(2**40, T0, b"k", b"v")])
    with pytest.raises(ValueError, match="64 bits"):
        encode_varlong(2**63)


def test_a_requested_wrong_crc_is_written_and_detected() -> None:
    bad = encode_batch([K1], crc=1)
    with pytest.raises(ValueError, match="batch at byte 0: CRC differs"):
        decode_log(bad)
    assert decode_log(bad, check_crc=False)[0].records == (K1,)


@given(st.integers(0, 87))
@settings(deadline=None)
def test_a_truncated_batch_is_an_error(size: int) -> None:
    if size:
        with pytest.raises(ValueError, match="batch at byte 88"):
            decode_log(TWO_RECORDS + TWO_RECORDS[:size])
