"""Producer snapshots are read back as written, and every damage is detected (SNAPSHOT.md)."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keytail.format.producers import ProducerEntry, encode_snapshot, parse_snapshot
from tests.reference.varints import crc32c

i2, i4, i8 = (st.integers(-(2**bits), 2**bits - 1) for bits in (15, 31, 63))
entries = st.builds(ProducerEntry, i8, i2, i4, i8, i4, i8, i4, i8)


@given(st.lists(entries, max_size=6))
@settings(deadline=None)
def test_snapshots_round_trip(written: list[ProducerEntry]) -> None:
    data = encode_snapshot(written)
    assert len(data) == 10 + 46 * len(written)
    assert parse_snapshot(data) == written
    assert struct.unpack_from(">hI", data) == (1, crc32c(data[6:]))


@given(st.lists(entries, max_size=3), st.integers(0, 10**6), st.integers(0, 7))
@settings(deadline=None)
def test_any_flipped_bit_is_detected(written: list[ProducerEntry], at: int, bit: int) -> None:
    data = bytearray(encode_snapshot(written))
    data[at % len(data)] ^= 1 << bit
    with pytest.raises(ValueError, match=r"version|invalid CRC"):
        parse_snapshot(bytes(data))


@given(st.lists(entries, max_size=3), st.integers(0, 10**6))
@settings(deadline=None)
def test_a_truncated_snapshot_is_detected(written: list[ProducerEntry], cut: int) -> None:
    data = encode_snapshot(written)
    with pytest.raises(ValueError, match=r"bytes|invalid CRC"):
        parse_snapshot(data[: cut % len(data)])


def _signed(covered: bytes) -> bytes:
    return struct.pack(">hI", 1, crc32c(covered)) + covered


@pytest.mark.parametrize("count", [-1, 1, 2**31 - 1])
def test_a_wrong_number_of_entries_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"declares {count} entries"):
        parse_snapshot(_signed(struct.pack(">i", count)))


def test_bytes_after_the_last_entry_are_refused() -> None:
    with pytest.raises(ValueError, match="declares 0 entries"):
        parse_snapshot(_signed(bytes(4) + b"tail"))


def test_a_snapshot_that_overwrote_part_of_a_longer_one_is_refused() -> None:
    long = encode_snapshot([ProducerEntry(1, 0, 5, 9, 0, 1000, -1, -1)])
    short = encode_snapshot([])
    with pytest.raises(ValueError, match="invalid CRC"):
        parse_snapshot(short + long[len(short) :])
