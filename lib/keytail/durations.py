"""How a duration, or a time, is said to a person."""

from __future__ import annotations

from datetime import UTC, datetime

_UNITS = (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1000))


def duration_text(ms: int) -> str:
    """The two largest units of a duration in ms, as `3 h 12 min`, `45 s`, `7 ms`; cut off, never rounded up."""
    if ms < 0:
        return f"-{duration_text(-ms)}"
    for number, (unit, unit_ms) in enumerate(_UNITS):
        count, rest_ms = divmod(ms, unit_ms)
        if count:
            smaller, smaller_ms = _UNITS[number + 1] if number + 1 < len(_UNITS) else ("ms", 1)
            more = rest_ms // smaller_ms
            return f"{count:,} {unit} {more} {smaller}" if more else f"{count:,} {unit}"
    return f"{ms} ms"


def time_text(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
