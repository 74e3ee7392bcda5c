"""What replicas of a partition are held against each other, and what their differences are called (AUDIT.md). Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keytail.kernels import audit as kernels

NO_LIMIT = 2**63 - 1
MOST_REPLICAS = 62  # of one partition: a bit each

# Of what lies at one offset, and of two records of one key there, in the order of the kernels' numbers.
PLACES = ("control", "control-type", "key")
assert len(PLACES) == kernels.PLACE_KINDS
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
assert len(DIFFERENCES) == kernels.DIFFERENCES
# Why a record that others hold may be missing, and why not.
REASONS = ("superseded", "deleted", "aborted", "marker", "keyless", "unknown", "lost")
assert len(REASONS) == kernels.REASONS


@dataclass(frozen=True)
class ReplicaLog:
    """One replica of a partition as it was listed. `segments`: base offset, bytes and mtime in ns, ascending.

    `cleaned_to` is its entry in `cleaner-offset-checkpoint`, 0 where that has none, None where there is no such file.
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
    """First offset that two replicas should have, and where comparison ends: (from, to), empty where from >= to.

    Ends at the smallest log end, since what lies behind it is yet to be fetched, and not above the largest high
    watermark: records above that may be cut off again.
    """
    starts = sorted(replica.log_start_offset for replica in replicas)
    end = min(replica.log_end_offset for replica in replicas)
    known = [replica.high_watermark for replica in replicas if replica.high_watermark is not None]
    if known:
        end = min(end, max(known))
    return starts[1], end


def cleaning_limits(replicas: Sequence[ReplicaLog]) -> tuple[int, int]:
    """Below which offset cleaning may have removed records, and records without a key.

    The furthest that any replica has been cleaned to: one that lost its disk has fetched what another had cleaned.
    Where a replica has no checkpoint file (a copy of some directories) nobody knows; keyless records then count as
    lost all the same, since only a compacted topic may lose them.
    """
    known = [replica.cleaned_to for replica in replicas if replica.cleaned_to is not None]
    keyless = max(known, default=0)
    return (keyless if len(known) == len(replicas) else NO_LIMIT), keyless


def epoch_spans(replicas: Sequence[ReplicaLog], first: int, end: int) -> list[tuple[int, int, int]]:
    """(epoch, from, to) of each leader epoch that begins elsewhere in another replica, within [first, end).

    No difference by itself: a follower's epoch begins with the first batch that it fetched. But a record that two
    replicas hold within the span is of the epoch for one of them, and of the one before for the other.
    """
    starts: dict[int, list[int]] = {}
    for replica in replicas:
        for epoch, start in replica.epochs:
            if start > replica.log_start_offset:  # below it, the first entry is moved up
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
