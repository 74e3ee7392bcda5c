"""Finds the offset up to which the logs of a partition's replicas agree, with pure functions over batch headers.

Compaction removes batches and records from replicas at different times, but never changes the offsets or the leader
epoch of a batch. So two logs agree at an offset unless both have a batch at this offset, with different leader epochs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keytail.format.batch import DELETE_HORIZON


@dataclass(frozen=True)
class Agreement:
    """The result of comparing two logs, which agree below `end_offset`. At `end_offset` the leader epochs of the logs
    differ if `epoch_differs` is set; otherwise the shorter log ends at this offset.

    `bytes_differ_at` is the base offset of the first batch below `end_offset` that both logs have completely, with the
    same offsets, epoch and attributes and without a delete horizon, but with different CRCs; None if there is none.
    """

    end_offset: int
    epoch_differs: bool = False
    bytes_differ_at: int | None = None


def agreement(a: np.ndarray, a_end: int, b: np.ndarray, b_end: int) -> Agreement:
    """Return the offset up to which two logs agree. `a` and `b` are their batches (BATCH_TABLE), ascending by offset;
    `a_end` and `b_end` are their log end offsets."""
    end, epoch_differs = min(a_end, b_end), False
    differing: list[int] = []
    for left, right in ((a, b), (b, a)):
        # If one log was repacked, its batch can cover several batches of the other: compare in both directions.
        epoch_at, bytes_at = _first_differences(left, right)
        if epoch_at is not None and epoch_at < end:
            end, epoch_differs = epoch_at, True
        if bytes_at is not None:
            differing.append(bytes_at)
    found = [offset for offset in differing if offset < end]
    return Agreement(end, epoch_differs, min(found, default=None))


def _first_differences(left: np.ndarray, right: np.ndarray) -> tuple[int | None, int | None]:
    """Return the first offset at which a batch of `left` and the first batch of `right` that overlaps it have different
    epochs, and the base offset of the first batch whose bytes differ; None for each that does not exist."""
    if not len(left) or not len(right):
        return None, None
    at = np.searchsorted(right["last_offset"], left["base_offset"])
    other = right[np.minimum(at, len(right) - 1)]
    overlaps = (at < len(right)) & (other["base_offset"] <= left["last_offset"])
    epochs = np.flatnonzero(overlaps & (left["leader_epoch"] != other["leader_epoch"]))
    comparable = overlaps & (left["attributes"] & DELETE_HORIZON == 0)
    for name in ("base_offset", "last_offset", "leader_epoch", "attributes", "magic"):
        comparable &= left[name] == other[name]
    for batches in (left, other):
        comparable &= batches["record_count"] == batches["last_offset"] - batches["base_offset"] + 1
    contents = np.flatnonzero(comparable & (left["crc"] != other["crc"]))
    epoch_at = int(max(left["base_offset"][epochs[0]], other["base_offset"][epochs[0]])) if len(epochs) else None
    return epoch_at, int(left["base_offset"][contents[0]]) if len(contents) else None
