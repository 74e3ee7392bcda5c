"""What a kind of finding is made of; the kinds are in `finding_kinds.py` and `finding_kinds_whole.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Recovery:
    """What becomes of it where a broker recovers the segment as it starts, as after an unclean shutdown."""

    severity: Severity
    broker: str


@dataclass(frozen=True)
class Kind:
    """`what` and `broker` may name facts in braces."""

    severity: Severity
    what: str
    broker: str
    remedy: str
    recovered: Recovery | None = None


REFETCH = (
    "Restore the segment from a replica or a backup; or, where other replicas are in sync, remove the partition's "
    "directory, so that the broker fetches it anew"
)
