"""Compares a partition's leader epochs, and its entries in the log dir's checkpoints, with its log.

VERIFY.md beside this file lists what is a finding, and what may differ in a healthy log.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from keytail.errors import CorruptLog
from keytail.format import names
from keytail.kernels.verify import columns
from keytail.log.checkpoint import read_epochs
from keytail.verify.scope import Scope

_FIRST_LINE = 3  # line number of the first entry of a checkpoint, after version and count


class EpochCheck:
    """Collects the runs of batches with one leader epoch, in order; `close` compares them with the checkpoint."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._runs: list[np.ndarray] = []
        self._bases: list[int] = []

    def on_batches(self, base: int, runs: np.ndarray) -> None:
        """Add the runs (columns RUN_... of the kernel) of the segment at `base`."""
        for run in runs:
            if self._runs and self._runs[-1][columns.RUN_EPOCH] == run[columns.RUN_EPOCH]:
                self._runs[-1][columns.RUN_LAST_BASE] = run[columns.RUN_LAST_BASE]
            else:
                self._runs.append(run.copy())
                self._bases.append(base)

    def close(self, log_end_offset: int, *, whole: bool, without_epoch: int | None) -> None:
        """Add the findings. `whole`: the log was read to its end. `without_epoch`: number of batches without an epoch;
        None if not all batches were read."""
        entries = self._read()
        if entries is None:
            return
        epochs = np.array([epoch for epoch, _ in entries], dtype=np.int64)
        starts = np.array([start for _, start in entries], dtype=np.int64)
        falls = np.flatnonzero((np.diff(epochs) <= 0) | (np.diff(starts) <= 0))
        if len(falls):
            self._add_entry("epochs-order", int(falls[0]) + 1, entries)
            return
        if whole and not self._scope.live:
            for i in np.flatnonzero(starts > log_end_offset):
                self._add_entry("epochs-beyond", int(i), entries, end=log_end_offset)
        if not self._scope.live:  # the file may have changed since it was read
            self._compare(epochs, starts, without_epoch)

    def _read(self) -> list[tuple[int, int]] | None:
        path = os.path.join(self._scope.path, names.LEADER_EPOCHS)
        try:
            return read_epochs(self._scope.fs, path)
        except CorruptLog as problem:
            self._scope.findings.add("epochs-unreadable", names.LEADER_EPOCHS, reason=problem.what)
        except OSError as problem:
            self._scope.unreadable(names.LEADER_EPOCHS, problem)
        return None

    def _add_entry(self, kind: str, i: int, entries: list[tuple[int, int]], **facts: Any) -> None:
        epoch, start = entries[i]
        line = i + _FIRST_LINE
        self._scope.findings.add(kind, names.LEADER_EPOCHS, offset=start, line=line, epoch=epoch, start=start, **facts)

    def _add_epochs(self, kind: str, first: int, **facts: Any) -> None:
        self._scope.findings.add(kind, names.LEADER_EPOCHS, offset=first, first=first, **facts)

    def _compare(self, epochs: np.ndarray, starts: np.ndarray, without_epoch: int | None) -> None:
        """Add findings for batches, at or above the log start offset, whose epoch is not that of the checkpoint."""
        if not len(starts):
            self._check_missing(without_epoch)
            return
        for number, run in enumerate(self._runs):
            # Batches below the first entry prove nothing: appending a message of an old format empties the file, and
            # that message may have been removed since.
            epoch, last = int(run[columns.RUN_EPOCH]), int(run[columns.RUN_LAST_BASE])
            first = max(int(run[columns.RUN_BASE]), self._scope.log_start, int(starts[0]))
            if last < first:
                continue
            i = int(np.searchsorted(starts, first, side="right")) - 1
            behind = int(np.searchsorted(starts, last, side="right")) - 1
            if epochs[i] != epoch:
                self._add_wrong(number, epoch, int(epochs[i]), first)
            elif behind != i:
                self._add_epochs("epochs-wrong", int(starts[i + 1]), epoch=epoch, stated=int(epochs[i + 1]))

    def _check_missing(self, without_epoch: int | None) -> None:
        """Add a finding about a file without entries, if every batch has an epoch, the log has a batch at or above the
        log start offset, and the shutdown was clean.
        """
        runs = [run for run in self._runs if run[columns.RUN_LAST_BASE] >= self._scope.log_start]
        # After a crash the file may have been truncated at a log start offset that is not on disk yet.
        if runs and without_epoch == 0 and self._scope.claims.clean_shutdown:
            first = max(int(runs[0][columns.RUN_BASE]), self._scope.log_start)
            self._add_epochs("epochs-missing", first, epoch=int(runs[-1][columns.RUN_EPOCH]))

    def _add_wrong(self, number: int, epoch: int, stated: int, first: int) -> None:
        """Add a finding about the log if its own epochs do not ascend; if they ascend, add a finding about the
        checkpoint file."""
        before = int(self._runs[number - 1][columns.RUN_EPOCH]) if number else 0
        behind = int(self._runs[number + 1][columns.RUN_EPOCH]) if number + 1 < len(self._runs) else epoch
        if before <= epoch <= behind:
            self._add_epochs("epochs-wrong", first, epoch=epoch, stated=stated)
        else:
            run = self._runs[number]
            log = names.segment_file(self._bases[number], names.LOG)
            position, base = int(run[columns.RUN_POSITION]), int(run[columns.RUN_BASE])
            self._scope.findings.add("leader-epoch", log, position, base, epoch=epoch, stated=stated)


def check_claims(scope: Scope, log_end_offset: int) -> None:
    """Check that no checkpoint of the log dir has an offset above the log end offset for this partition."""
    claims = scope.claims
    for kind, file, value in (
        ("log-start", names.LOG_START_CHECKPOINT, claims.log_start),
        ("recovery-point", names.RECOVERY_POINT_CHECKPOINT, claims.recovery_point),
        ("high-watermark", names.HIGH_WATERMARK_CHECKPOINT, claims.high_watermark),
        ("cleaner-checkpoint", names.CLEANER_CHECKPOINT, claims.cleaner),
    ):
        if value is not None and value > log_end_offset:
            path = os.path.join(os.path.dirname(scope.path), file)
            scope.findings.add(kind, path, offset=value, checkpoint=file, value=value, end=log_end_offset)
