"""The entries of `leader-epoch-checkpoint` as a log grows and is loaded: pure functions of (epoch, start offset) lists.

The rules stand in APPEND.md beside this file, "Leader epochs"; reading and writing the file is in checkpoint.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

Epochs: TypeAlias = list[tuple[int, int]]


def assign(entries: Sequence[tuple[int, int]], table: np.ndarray) -> Epochs:
    """The entries after these batches (BATCH_TABLE rows in order): one more where the leader epoch changes.

    An entry that would not rise above those before takes their place, as a broker has it.
    """
    epochs = list(entries)
    leader = table["leader_epoch"]
    for row in np.flatnonzero(np.append(True, leader[1:] != leader[:-1])):
        epoch, start = int(leader[row]), int(table["base_offset"][row])
        if epochs and epochs[-1][0] == epoch and start >= epochs[-1][1]:
            continue
        while epochs and (epochs[-1][0] >= epoch or epochs[-1][1] >= start):
            epochs.pop()
        epochs.append((epoch, start))
    return epochs


def truncate_from_end(entries: Sequence[tuple[int, int]], end_offset: int) -> Epochs:
    """Without the epochs that begin at or above `end_offset`."""
    if not entries or entries[-1][1] < end_offset:
        return list(entries)
    return [(epoch, start) for epoch, start in entries if start < end_offset]


def truncate_from_start(entries: Sequence[tuple[int, int]], start_offset: int) -> Epochs:
    """The epoch that `start_offset` lies in begins there; those before it go."""
    gone = [epoch for epoch, start in entries if start <= start_offset]
    kept = [(epoch, start) for epoch, start in entries if start > start_offset]
    return [(gone[-1], start_offset), *kept] if gone else kept
