"""Compares the `leader-epoch-checkpoint` of a partition with its log (format/NAMES.md, "Leader epochs").

A batch shows the latest offset at which its epoch can begin. An epoch without batches may have existed, because
cleaning removes batches. Therefore, entries below the log end are retained, newer epochs are added as by a recovering
broker, and entries at or above the log end are removed. The caller reads the log and the file.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from keytail.format import names
from keytail.log.checkpoint import write_epochs
from keytail.log.fs import FileSystem

Epoch: TypeAlias = tuple[int, int]  # leader epoch, start offset


@dataclass(frozen=True, slots=True)
class EpochsPlan:
    """The planned `entries` of the file; of these, `added` are not in it now. `dropped` are the entries to remove. With
    a `problem` the file is not changed."""

    entries: tuple[Epoch, ...]
    added: tuple[Epoch, ...] = ()
    dropped: tuple[Epoch, ...] = ()
    problem: str = ""

    @property
    def changes(self) -> bool:
        return bool(self.added or self.dropped) and not self.problem


def epochs_seen(table: np.ndarray, latest: int = -1) -> list[Epoch]:
    """Return the leader epochs above `latest` in a BATCH_TABLE, ascending, each with the base offset of its first
    batch.

    As in a broker's recovery, a batch with a lower epoch than an earlier batch adds nothing. Lists of consecutive
    tables may simply be concatenated: `plan_epochs` skips epochs that are not newer.
    """
    epochs = table["leader_epoch"].astype(np.int64)
    before = np.maximum.accumulate(np.concatenate(([latest], epochs)))[:-1]
    rows = np.flatnonzero((epochs > before) & (epochs >= 0))
    return [(int(epochs[row]), int(table["base_offset"][row])) for row in rows]


def plan_epochs(entries: Sequence[Epoch], seen: Iterable[Epoch], log_end_offset: int) -> EpochsPlan:
    """Plan the entries of the file. `entries` are the file's current entries, from `read_epochs`; `seen` are the epochs
    of the log in order, or of a part of the log that ends at the log end."""
    entries = tuple(entries)
    for (epoch, start), (later, later_start) in itertools.pairwise(entries):
        if later <= epoch or later_start <= start:
            problem = f"epoch {later} from offset {later_start} follows epoch {epoch} from offset {start}"
            return EpochsPlan(entries, problem=problem)
    kept = [entry for entry in entries if entry[1] < log_end_offset]
    latest, latest_start = kept[-1] if kept else (-1, -1)
    added: list[Epoch] = []
    for epoch, start in seen:
        if epoch <= latest or start >= log_end_offset:
            continue
        if start <= latest_start:
            problem = f"the log has epoch {epoch} at offset {start}, but in the file epoch {latest} has already begun"
            return EpochsPlan(entries, problem=problem)
        added.append((epoch, start))
        latest, latest_start = epoch, start
    return EpochsPlan((*kept, *added), tuple(added), entries[len(kept) :])


def write_plan(fs: FileSystem, partition_path: str, plan: EpochsPlan) -> None:
    """Replace the file durably, keeping owner and mode, if the plan changes entries and has no problem."""
    if plan.changes:
        write_epochs(fs, os.path.join(partition_path, names.LEADER_EPOCHS), plan.entries)
