"""The figures of the benchmark of cores."""

from __future__ import annotations

from tests.bench.cores import HEAD, row
from tests.bench.report import Figure


def test_ratios_are_those_of_medians() -> None:
    one = Figure("one", [2.0, 3.0, 9.0], [2.0, 2.0, 2.0], [{"map": 1.0, "prove": 2.0}] * 3)
    every = Figure("all", [1.5, 1.4, 8.0], [2.5, 2.0, 3.0], [{"map": 0.5, "prove": 1.0}] * 3)
    [name, *numbers] = row("none", 10**9, one, every, 4.5).split()[:9]
    assert name == "none"
    assert [float(number) for number in numbers] == [1000, 3.0, 2.0, 1.5, 2.5, 0.5, 1.25, 4.5]
    assert "map 1.00 to 0.50, prove 2.00 to 1.00" in row("none", 10**9, one, every, None)
    assert len(HEAD.split("elapsed seconds")[0]) == len(row("none", 10**9, one, every, 4.5).split("map")[0])
