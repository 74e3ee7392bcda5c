"""Keeps the entries of `leader-epoch-checkpoint` while a log is open: `LeaderEpochs`, and its pure functions.

Entries are (epoch, start offset). The rules are in APPEND.md, "Leader epochs"; the file's format is in
log/checkpoint.py.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from keytail.format import names
from keytail.log.checkpoint import read_epochs, write_epochs
from keytail.log.fs import FileStat, FileSystem

Epochs: TypeAlias = list[tuple[int, int]]


class LeaderEpochs:
    """The entries of an open log, and their file."""

    def __init__(self, fs: FileSystem, directory: str) -> None:
        self._fs = fs
        self._path = os.path.join(directory, names.LEADER_EPOCHS)
        self.entries: Epochs = []

    def create(self, like: FileStat) -> None:
        """Create an empty file, unless the file exists."""
        if not self._fs.exists(self._path):
            self._fs.write_file(self._path, b"", like)

    def load(self, log_start_offset: int, log_end_offset: int) -> None:
        """Load the entries that a broker retains for a log with this start and end; update the file if it differs."""
        found = read_epochs(self._fs, self._path)
        self._set(found, truncate_from_start(truncate_from_end(found, log_end_offset), log_start_offset))

    def add(self, table: np.ndarray) -> None:
        """Add the epochs of the next batches (BATCH_TABLE rows). New entries replace the file durably."""
        self._set(self.entries, assign(self.entries, table))

    def _set(self, before: Epochs, after: Epochs) -> None:
        self.entries = after
        if after != before:
            write_epochs(self._fs, self._path, after)


def assign(entries: Sequence[tuple[int, int]], table: np.ndarray) -> Epochs:
    """Return the entries after these batches (BATCH_TABLE rows in order), with a new entry where the leader epoch
    changes.

    A new entry replaces the entries that are not below it in both epoch and offset, as in a broker. None of `entries`
    begins above the first batch.
    """
    epochs = list(entries)
    leader = table["leader_epoch"]
    for row in np.flatnonzero(np.append(True, leader[1:] != leader[:-1])):
        epoch, start = int(leader[row]), int(table["base_offset"][row])
        if epochs and epochs[-1][0] == epoch:
            continue
        while epochs and (epochs[-1][0] >= epoch or epochs[-1][1] >= start):
            epochs.pop()
        epochs.append((epoch, start))
    return epochs


def truncate_from_end(entries: Sequence[tuple[int, int]], end_offset: int) -> Epochs:
    """Return the entries that begin below `end_offset`."""
    return [(epoch, start) for epoch, start in entries if start < end_offset]


def truncate_from_start(entries: Sequence[tuple[int, int]], start_offset: int) -> Epochs:
    """Return the entries that end above `start_offset`; the entry that contains this offset then begins at it."""
    removed = [epoch for epoch, start in entries if start <= start_offset]
    kept = [(epoch, start) for epoch, start in entries if start > start_offset]
    return [(removed[-1], start_offset), *kept] if removed else kept
