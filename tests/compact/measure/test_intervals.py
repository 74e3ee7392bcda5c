"""Confidence intervals of a mean: they contain the true value for every distribution, and narrow with more draws."""

from __future__ import annotations

import random

import numpy as np
import pytest

from keytail.compact.measure.intervals import Interval, interval_of_mean, interval_of_total
from tests.chance import chance


def drawn(rng: random.Random, kind: str, n: int) -> tuple[np.ndarray, float]:
    """Return random draws, and the mean of their expected values."""
    numbers = np.random.default_rng(rng.randrange(2**32))
    if kind == "rare":
        share = rng.random() ** 4 / 10
        return (numbers.random(n) < share).astype(float), share
    if kind == "strata":
        means = np.linspace(0, 1, n)
        return (numbers.random(n) < means).astype(float), float(means.mean())
    if kind == "heavy":
        power = rng.choice([3, 20, 100])
        return numbers.random(n) ** power, 1 / (power + 1)
    value = rng.random()
    return np.full(n, value), value


@pytest.mark.parametrize("kind", ["rare", "strata", "heavy", "constant"])
def test_the_true_value_is_outside_less_often_than_allowed(kind: str) -> None:
    rng, outside = chance(), 0
    for _ in range(400):
        draws, truth = drawn(rng, kind, rng.choice([2, 5, 30, 300]))
        mean, low, high = interval_of_mean(draws)
        assert 0 <= low <= mean <= high <= 1
        outside += not low <= truth <= high
    # if 5 % were outside, this number would be exceeded in one of a billion runs
    assert outside <= 400 * 0.05 * 2.5, f"{outside} of 400"


def test_the_interval_narrows_with_more_draws_and_less_variance() -> None:
    rng = np.random.default_rng(1)
    widths = []
    for n in (100, 1000, 10_000):
        _, low, high = interval_of_mean((rng.random(n) < 0.3).astype(float))
        widths.append(high - low)
    assert widths[0] > 2 * widths[1] > 4 * widths[2]
    _, low, high = interval_of_mean(np.full(2000, 0.3))
    assert high - low < 0.02
    _, low, high = interval_of_mean(np.zeros(2000))
    assert low == 0 and 0 < high < 0.003, "draws that are all 0 do not prove that the mean is 0"


def test_a_total_remains_within_its_limits() -> None:
    draws = np.array([0.0, 2.0, 1.0, 3.0])
    found = interval_of_total(draws, 4.0, 10.0, (0, 20))
    assert (found.estimate, found.low, found.high) == (15, 0, 20)
    assert found.plus(5) == Interval(20, 5, 25)
    assert interval_of_total(np.zeros(4), 0.0, 10.0, (0, 0)) == Interval.exactly(0)
