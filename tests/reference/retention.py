"""Retention in plain Python: the oldest segment is removed from a list as long as this is allowed.

Shares no code with keytail, and uses only the facts that a broker uses.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Seg:
    """A segment, whose age is determined by `time_ms`."""

    base: int
    size: int
    time_ms: int


def expired(
    log: list[Seg],
    log_end: int,
    *,
    policy: set[str],
    retention_ms: int,
    retention_bytes: int,
    log_start: int,
    high_watermark: int,
    now_ms: int,
) -> tuple[list[tuple[int, str]], int]:
    """Return the base offsets of the removed segments, each with the name of its pass, and the resulting log start
    offset.
    """
    log, removed = list(log), []

    def may_be_removed() -> bool:
        if not log or (len(log) == 1 and log[0].size == 0):
            return False
        end = log[1].base if len(log) > 1 else log_end
        return high_watermark >= end

    while may_be_removed() and len(log) > 1 and log[1].base <= log_start:
        removed.append((log.pop(0).base, "log-start"))
    if "delete" in policy:
        if retention_bytes >= 0:
            while may_be_removed() and sum(seg.size for seg in log[1:]) >= retention_bytes:
                removed.append((log.pop(0).base, "size"))
        if retention_ms >= 0:
            while may_be_removed() and now_ms - log[0].time_ms > retention_ms:
                removed.append((log.pop(0).base, "time"))
    return removed, max(log_start, log[0].base if log else log_end)
