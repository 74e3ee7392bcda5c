from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keytail.durations import duration_text, time_text

_MS = {"d": 86_400_000, "h": 3_600_000, "min": 60_000, "s": 1000, "ms": 1}


@pytest.mark.parametrize(
    "ms, text",
    [
        (0, "0 ms"),
        (999, "999 ms"),
        (1000, "1 s"),
        (1500, "1 s 500 ms"),
        (60_000, "1 min"),
        (11_520_000, "3 h 12 min"),
        (3_600_059_999, "41 d 16 h"),
        (86_400_000 * 1500, "1,500 d"),
        (-11_520_000, "-3 h 12 min"),
    ],
)
def test_durations_are_printed_in_two_units(ms: int, text: str) -> None:
    assert duration_text(ms) == text


@pytest.mark.parametrize(
    "ms, text",
    [
        (0, "1970-01-01 00:00:00 UTC"),
        (-1, "1969-12-31 23:59:59 UTC"),
        (253_402_300_799_999, "9999-12-31 23:59:59 UTC"),
        (253_402_300_800_000, "253402300800000 ms"),
        (10**40, f"{10**40} ms"),
    ],
)
def test_numbers_that_are_no_times_are_printed_too(ms: int, text: str) -> None:
    assert time_text(ms) == text


@given(st.integers(0, 2**63 - 1))
def test_a_printed_duration_differs_by_at_most_one_smaller_unit(ms: int) -> None:
    words = duration_text(ms).replace(",", "").split()
    shown_ms = sum(int(count) * _MS[unit] for count, unit in zip(words[::2], words[1::2], strict=True))
    assert 0 <= ms - shown_ms
    assert ms - shown_ms < max(1, ms // 2) or ms == shown_ms
