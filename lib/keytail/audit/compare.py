"""Decides which offsets of a partition's replicas are compared, and how far each replica was cleaned (AUDIT.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from keytail.format.batch import DELETE_HORIZON
from keytail.kernels.audit import differences, reasons

MAX_REPLICAS = 62  # maximum number of replicas of a partition: each has one bit of a mask

# Kinds of differences between two replicas at one offset: PLACES if they have different records there, DIFFERENCES if
# they have records of the same key; in the order of the kernels' numbers.
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
# The reasons why a record that other replicas have is missing; "lost": there is no reason.
REASONS = ("superseded", "deleted", "aborted", "marker", "keyless", "cleaning-unknown", "unknown", "lost")
assert len(REASONS) == reasons.REASONS


@dataclass(frozen=True)
class ReplicaLog:
    """One replica of a partition as it was listed. `segments`: base offset, bytes and mtime in ns of each segment.

    `cleaned_to` is the replica's entry in `cleaner-offset-checkpoint`; 0 if there is no entry, None if there is no such
    file. `epochs`: leader epochs with their start offsets.
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
    """Return the range of offsets to compare, as (start, end); the range is empty if start >= end. The range begins at
    the first offset that two replicas should have.

    The range ends at the smallest log end offset, since the replica with this end has yet to fetch later records, or at
    the largest high watermark if that is lower, since records above it may be truncated.
    """
    starts = sorted(replica.log_start_offset for replica in replicas)
    end = min(replica.log_end_offset for replica in replicas)
    known = [replica.high_watermark for replica in replicas if replica.high_watermark is not None]
    if known:
        end = min(end, max(known))
    return starts[1], end


def shown_cleaned_to(table: np.ndarray, end_offset: int | None) -> int:
    """Return the offset below which these batches of one segment (BATCH_TABLE) show that a cleaner removed records; 0
    if they show no removal.

    Only cleaning leaves batches with fewer records than offsets, batches with a delete horizon, and offsets without a
    batch inside a segment. `end_offset` is the end of the previous batch, or the segment's base offset; None if the
    previous batch could not be read. Offsets without a batch between two segments show nothing: a segment may be
    missing.
    """
    base, last = table["base_offset"], table["last_offset"]
    is_cleaned = table["record_count"] <= last - base
    is_cleaned |= (table["magic"] == 2) & (table["attributes"] & DELETE_HORIZON != 0)
    is_after_gap = np.zeros(len(table), bool)
    is_after_gap[1:] = base[1:] > last[:-1] + 1
    is_after_gap[0] = end_offset is not None and base[0] > end_offset
    ends = last[is_cleaned] + 1, base[is_after_gap]
    return max(int(offsets.max(initial=0)) for offsets in ends)


def cleaning_limits(
    replicas: Sequence[ReplicaLog], shown: Sequence[int], first_removable: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each replica, the offset below which cleaning may have removed records, and the last offset of a
    record that may have superseded them. Both arrays are int64[2, replicas]: row 0 is known, row 1 is possible.

    `shown`: the offset to which the log of each replica shows that it was cleaned (`shown_cleaned_to`).
    `first_removable`: the first offset at which the log shows that it was not cleaned: the offset of a record without a
    key, or of a record whose key has an older record. A replica that lost its disk may have fetched a log that another
    replica had cleaned. The replica's own log shows up to which offset this is known; it is possible up to the highest
    offset to which any replica may have been cleaned. A record at the offset to which a replica was cleaned superseded
    nothing: no cleaner has read it.
    """
    limits, last = np.zeros((2, len(replicas)), np.int64), np.zeros((2, len(replicas)), np.int64)
    highest = max(s if r.cleaned_to is None else r.cleaned_to for r, s in zip(replicas, shown, strict=True))
    ends = [
        max(shown[n], first_removable[n], highest) if replica.cleaned_to is None else replica.cleaned_to
        for n, replica in enumerate(replicas)
    ]
    for n, replica in enumerate(replicas):
        if replica.cleaned_to is None:
            limits[:, n] = shown[n], ends[n]
            last[:, n] = ends[n] - 1
        else:
            fetched = min(shown[n], highest)
            limits[:, n] = max(replica.cleaned_to, fetched), max(ends)
            last[:, n] = (replica.cleaned_to if fetched <= replica.cleaned_to else max(ends)) - 1, max(ends) - 1
    return limits, last


def epoch_spans(replicas: Sequence[ReplicaLog], first: int, end: int) -> list[tuple[int, int, int]]:
    """Return (epoch, smallest start, largest start) of each leader epoch that has different start offsets in the
    replicas, if they overlap [first, end).

    Different starts alone are not a difference: a follower's epoch begins with the first batch that it fetched. But a
    record that two replicas have between the starts belongs to this epoch in one of them, and to an earlier epoch in
    the other.
    """
    starts: dict[int, list[int]] = {}
    for replica in replicas:
        for epoch, start in replica.epochs:
            # A start at the log start offset may have been moved there.
            if start > replica.log_start_offset:
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
