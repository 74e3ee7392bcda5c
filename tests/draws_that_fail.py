"""Tests that always fail. They are not collected; test_failures.py runs them."""

from __future__ import annotations

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.chance import chance


@pytest.mark.parametrize("text", ["it's a [name] @ home"])
def test_drawn(text: str) -> None:
    raise AssertionError(f"drawn {chance().random()} for {text}")


@settings(phases=[Phase.generate])  # with shrinking, every seed would have the same example
@given(st.lists(st.integers(), min_size=50, max_size=50))
def test_drawn_by_hypothesis(numbers: list[int]) -> None:
    assert sum(numbers) % 3 == 0, f"drawn {sum(numbers)}"
