"""The fields of a kind of finding; the kinds are in `finding_kinds.py` and `finding_kinds_whole.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning"]
# "at-end": only in the last segment, at whose end a starting broker searches for the log end.
StartLoses = Literal["no", "at-end", "yes"]


@dataclass(frozen=True)
class Recovery:
    """The severity and effect if a broker recovers the segment when it starts, as after an unclean shutdown."""

    severity: Severity
    broker: str
    start_loses: bool = False


@dataclass(frozen=True)
class Kind:
    """One kind of finding. `what` and `broker` may contain names of facts in braces.

    `start_loses`: whether a broker that starts on it loses, hides or makes unreadable records that were acknowledged
    or that it acknowledges afterwards; VERIFY.md gives the reason for each kind.
    """

    severity: Severity
    what: str
    broker: str
    remedy: str
    recovered: Recovery | None = None
    start_loses: StartLoses = "no"


REFETCH = (
    "Restore the segment from a replica or a backup; or, if other replicas are in sync, stop the broker and move the "
    "partition's directory out of the log dir, so that the broker fetches it again when it starts"
)
