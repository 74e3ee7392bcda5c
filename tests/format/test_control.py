"""Control records: types, versions, and records that are too short (BATCH.md 3)."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keytail.format.control import ControlRecord, ControlType, parse_control_record


@given(st.sampled_from([ControlType.ABORT, ControlType.COMMIT]), st.integers(-(2**31), 2**31 - 1))
@settings(deadline=None)
def test_markers_round_trip(control_type: ControlType, coordinator_epoch: int) -> None:
    key, value = struct.pack(">hh", 0, control_type), struct.pack(">hi", 0, coordinator_epoch)
    found = parse_control_record(key, value)
    assert found == ControlRecord(control_type, coordinator_epoch)
    assert parse_control_record(key + b"more", value + b"more") == found


@pytest.mark.parametrize("number", [2, 3, 4, 5, 6, 7, 99, -1])
def test_control_records_of_other_types_need_no_value(number: int) -> None:
    found = parse_control_record(b"\x00\x00" + number.to_bytes(2, "big", signed=True), None)
    assert found == ControlRecord(number, -1)


def test_a_higher_version_is_read_like_the_first() -> None:
    assert parse_control_record(b"\x00\x07\x00\x01", b"\x00\x09\x00\x00\x00\x02") == ControlRecord(1, 2)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        (None, None, "key has no bytes"),
        (b"\0\0\0", b"\0" * 6, "key has 3 bytes"),
        (b"\xff\xff\0\0", b"\0" * 6, "key has invalid version -1"),
        (b"\0\0\0\1", None, "marker has no bytes"),
        (b"\0\0\0\1", b"\0" * 5, "marker has 5 bytes"),
        (b"\0\0\0\0", b"\xff\xff\0\0\0\0", "marker has invalid version -1"),
    ],
)
def test_malformed_control_records_are_refused_with_a_reason(
    key: bytes | None, value: bytes | None, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_control_record(key, value)
