"""Converts durations and times to text."""

from __future__ import annotations

from datetime import UTC, datetime

_UNITS = (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1000))


def duration_text(ms: int) -> str:
    """Return a duration in ms as text in its two largest units (truncated), such as `3 h 12 min`, `45 s` or `7 ms`."""
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
    """Return a time as text; a number that is not a time of the years 1 to 9999, with the unit."""
    try:
        return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return f"{time_ms} ms"
