"""Confidence intervals of estimates from a sample. The intervals hold for every log: no distribution of the values is
assumed. Pure functions.

A total is estimated as the mean of independent draws, each between 0 and a known maximum. Two bounds on the error of
the mean hold for any number of draws: the bound by Chernoff and Hoeffding is narrow if the mean is close to 0 or to the
maximum, the bound by Maurer and Pontil (2009, theorem 11) if the draws differ little. Each bound is wrong in at most
half of `1 - CONFIDENCE` of all samples; the interval is the intersection of both bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
_STEPS = 60  # steps of a bisection: more than the bits of a float64's significand


@dataclass(frozen=True)
class Interval:
    """An estimate, and bounds that contain the true value in at least the share CONFIDENCE of all samples."""

    estimate: int
    low: int
    high: int

    @classmethod
    def exactly(cls, number: int) -> Interval:
        return cls(number, number, number)

    def plus(self, number: int) -> Interval:
        return Interval(self.estimate + number, self.low + number, self.high + number)


def interval_of_mean(draws: np.ndarray, confidence: float = CONFIDENCE) -> tuple[float, float, float]:
    """Return the mean of independent draws (float64, each from 0 to 1, at least two), and the lower and the upper bound
    on the mean of their expected values.
    """
    n, mean = len(draws), float(draws.mean())
    wrong = (1 - confidence) / 4  # two bounds, each on two sides
    low, high = _chernoff(mean, math.log(1 / wrong) / n)
    logarithm = math.log(2 / wrong)
    variance = float(draws.var(ddof=1))
    error = math.sqrt(2 * variance * logarithm / n) + 7 * logarithm / (3 * (n - 1))
    return mean, max(low, mean - error, 0.0), min(high, mean + error, 1.0)


def interval_of_total(draws: np.ndarray, most: float, scale: float, limits: tuple[int, int]) -> Interval:
    """Return the interval of a total, which is `scale` times the mean of `draws` (each from 0 to `most`), within
    `limits`."""
    if most <= 0:
        return Interval.exactly(limits[0])
    mean, low, high = interval_of_mean(draws / most)
    numbers = (scale * most * mean, math.floor(scale * most * low), math.ceil(scale * most * high))
    estimate, low_number, high_number = (min(max(round(number), limits[0]), limits[1]) for number in numbers)
    return Interval(estimate, low_number, high_number)


def _chernoff(mean: float, bound: float) -> tuple[float, float]:
    """Return the least and the largest expected value whose relative entropy to `mean` is at most `bound`."""

    def edge(inside: float, outside: float) -> float:
        for _ in range(_STEPS):
            middle = (inside + outside) / 2
            if _relative_entropy(mean, middle) <= bound:
                inside = middle
            else:
                outside = middle
        return outside

    return edge(mean, 0.0), edge(mean, 1.0)


def _relative_entropy(p: float, q: float) -> float:
    """Return the relative entropy of two Bernoulli distributions."""
    if not 0.0 < q < 1.0:
        return 0.0 if p == q else math.inf
    found = p * math.log(p / q) if p > 0 else 0.0
    return found + ((1 - p) * math.log((1 - p) / (1 - q)) if p < 1 else 0.0)
