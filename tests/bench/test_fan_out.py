"""The figures that the benchmark of fan-out computes."""

from __future__ import annotations

from typing import Any

from tests.bench.fan_out import report


def figures(seconds: float) -> dict[str, Any]:
    return {
        "start_s": 5.0, "fan_out_s": seconds, "one_task_s": 8.0, "phases_s": {"map": seconds / 2}, "keys": 10,
        "bytes": 10**6,
    }  # fmt: skip


def test_at_the_break_even_both_strategies_take_the_same_time() -> None:
    """With 20 s on one core and 12 s on two, 16 s are parallel, so that four cores take 4 s + 16 s / 4 = 8 s."""
    text = report(figures(20.0), figures(12.0), 1 << 20)
    assert "break-even: 4.0 cores" in text
    assert "all             20.00s    12.00s    0.60" in text
    assert "break-even: none" in report(figures(20.0), figures(20.0), 1 << 20)
