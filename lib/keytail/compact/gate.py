"""Up to which offset tombstones and markers may go, where other replicas are asked first (CLEANING.md 14). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from keytail.log.partition import PartitionFacts


@dataclass(frozen=True)
class Gate:
    """From `offset` on they stay, since `replica` has not been cleaned further; both None where no replica is known."""

    offset: int | None
    replica: str | None


def cleaned_to(facts: PartitionFacts) -> int:
    """The offset below which a replica has been cleaned: nothing older is left there of a key that comes again.

    Its entry in `cleaner-offset-checkpoint`. Without one, or with one outside of its log, as after a truncation, only
    what it does not have any more counts as cleaned: what lies below its first segment.
    """
    first = facts.segments[0].base_offset
    checkpoint = facts.cleaner_checkpoint
    if checkpoint is None or not first <= checkpoint <= facts.log_end_offset:
        return first
    return checkpoint


def gate_of(cleaned: Mapping[str, int]) -> Gate:
    """Of how far each replica has been cleaned, by name."""
    if not cleaned:
        return Gate(None, None)
    replica = min(cleaned, key=lambda name: cleaned[name])
    return Gate(cleaned[replica], replica)
