"""Decides which offsets of a partition's replicas are compared, and names their differences (AUDIT.md). No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keytail.kernels.audit import differences, reasons

NO_LIMIT = 2**63 - 1
MOST_REPLICAS = 62  # of one partition: one bit each

# Differences of what is at one offset, and of two records of one key there, in the order of the kernels' numbers.
PLACES = ("control", "control-type", "key")
assert len(PLACES) == differences.PLACE_KINDS
DIFFERENCES = (
    "value",
    "headers",
    "timestamp",
    "leader-epoch",
    "producer-id",
    "producer-epoch",
    "sequence",
    "transactional",
)
assert len(DIFFERENCES) == differences.DIFFERENCES
# Why a record that other replicas have is missing; "lost": no reason.
REASONS = ("superseded", "deleted", "aborted", "marker", "keyless", "unknown", "lost")
assert len(REASONS) == reasons.REASONS


@dataclass(frozen=True)
class ReplicaLog:
    """One replica of a partition as it was listed. `segments`: base offset, bytes and mtime in ns, ascending.

    `cleaned_to` is its entry in `cleaner-offset-checkpoint`, 0 if that has none, None if there is no such file.
    `epochs`: leader epochs with their start offsets.
    """

    name: str
    path: str
    segments: tuple[tuple[int, int, int], ...]
    log_start_offset: int
    log_end_offset: int
    high_watermark: int | None
    cleaned_to: int | None
    epochs: tuple[tuple[int, int], ...] = ()

    @property
    def size_bytes(self) -> int:
        return sum(size for _, size, _ in self.segments)


def compared_range(replicas: Sequence[ReplicaLog]) -> tuple[int, int]:
    """Return the range of offsets to compare, from the first that two replicas should have: (from, to), empty if from
    >= to.

    It ends at the smallest log end offset, since later records are yet to be fetched, and not above the largest high
    watermark, since records above that may be truncated.
    """
    starts = sorted(replica.log_start_offset for replica in replicas)
    end = min(replica.log_end_offset for replica in replicas)
    known = [replica.high_watermark for replica in replicas if replica.high_watermark is not None]
    if known:
        end = min(end, max(known))
    return starts[1], end


def cleaning_limits(replicas: Sequence[ReplicaLog]) -> tuple[int, int]:
    """Return the offsets below which cleaning may have removed records, and records without a key.

    Both are the highest offset that any replica has been cleaned to: a replica that lost its disk has fetched what
    another one had cleaned. If a replica has no checkpoint file (a copy of some directories), the first is unknown and
    thus NO_LIMIT; keyless records above the second still count as lost, since only a compacted topic may lose them.
    """
    known = [replica.cleaned_to for replica in replicas if replica.cleaned_to is not None]
    keyless = max(known, default=0)
    return (keyless if len(known) == len(replicas) else NO_LIMIT), keyless


def epoch_spans(replicas: Sequence[ReplicaLog], first: int, end: int) -> list[tuple[int, int, int]]:
    """Return (epoch, from, to) of each leader epoch that has different start offsets in the replicas, within
    [first, end).

    This is no difference by itself: a follower's epoch begins with the first batch that it fetched. But a record that
    two replicas have within the span belongs to the epoch in one of them, and to the previous one in the other.
    """
    starts: dict[int, list[int]] = {}
    for replica in replicas:
        for epoch, start in replica.epochs:
            if start > replica.log_start_offset:  # otherwise the entry may have been moved up to the log start offset
                starts.setdefault(epoch, []).append(start)
    spans = []
    for epoch, found in sorted(starts.items()):
        if min(found) != max(found) and min(found) < end and max(found) > first:
            spans.append((epoch, min(found), max(found)))
    return spans


def status_of(divergences: Mapping[str, int], damaged: bool) -> str:
    if any(divergences.values()):
        return "differs"
    return "corrupt" if damaged else "alike"
