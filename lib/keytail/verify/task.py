"""Verifies a partition directory: every batch, every index entry, every name, and the consistency between the files
(VERIFY.md).

With `only_ends`, only index files and the end of each segment are read (VERIFY.md, "Only the ends").

Nothing is changed, and no lock is needed. While a broker is running, files may vanish or grow, and the active segment's
tail is not checked. Invalid bytes give findings, not exceptions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from keytail.log.fs import FileSystem
from keytail.log.partition import refuse_unreadable
from keytail.verify.batches import BatchWalk
from keytail.verify.claims import EpochCheck, check_claims
from keytail.verify.findings import Finding, Findings
from keytail.verify.indexes import read_entries
from keytail.verify.missing import MissingSegments
from keytail.verify.names import check_names, check_owners
from keytail.verify.producers import ProducerChecks
from keytail.verify.scope import NO_CLAIMS, Claims, Scope


@dataclass(frozen=True)
class VerifyCounts:
    """The amount of data that was verified."""

    segments: int = 0
    batches: int = 0
    records: int = 0
    bytes: int = 0
    index_entries: int = 0


@dataclass(frozen=True)
class VerifyReport:
    """The findings about one partition: about names and owners, then about each segment, then about the whole log."""

    findings: tuple[Finding, ...]
    counts: VerifyCounts

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __len__(self) -> int:
        return len(self.findings)


def verify_partition(
    fs: FileSystem, path: str, claims: Claims = NO_CLAIMS, *, live: bool = False, only_ends: bool = False
) -> VerifyReport:
    """Return the findings about the partition directory `path`. Raises OSError if the directory cannot be listed, and
    Refused if this process is not allowed to read a file in it.

    `live`: a broker may be writing to the directory meanwhile, so only findings that two inspections have in common are
    returned, since files that are replaced between two reads seem to contradict each other.
    """
    refuse_unreadable(fs, path)
    report = _inspect(fs, path, claims, live, only_ends)
    if live and report.findings:
        again = _inspect(fs, path, claims, live, only_ends)
        return VerifyReport(tuple(finding for finding in again if finding in report.findings), again.counts)
    return report


def _inspect(fs: FileSystem, path: str, claims: Claims, live: bool, only_ends: bool) -> VerifyReport:
    scope = Scope(fs, path, live, claims, fs.scan(path), Findings(path))
    check_names(scope)
    check_owners(scope)
    producers, epochs = ProducerChecks(scope), EpochCheck(scope)

    def on_batches(base: int, rows: np.ndarray, runs: np.ndarray) -> None:
        if not only_ends:  # these checks also need the earlier batches
            producers.on_batches(base, rows)
        epochs.on_batches(base, runs)

    walk = BatchWalk(scope, on_batches, only_ends=only_ends)
    missing = MissingSegments(scope)
    index_entries = 0
    try:
        for base, next_base in zip(scope.bases, [*scope.bases[1:], None], strict=False):
            entries = read_entries(scope, base)
            index_entries += len(entries)
            records_before = walk.records
            walk.segment(base, next_base, entries)
            producers.close_segment(base, is_valid=not (walk.has_invalid_batch or only_ends))
            records = None if only_ends else walk.records - records_before
            missing.after_segment(base, records, walk.last_offset)
    finally:
        walk.close()
    _check_whole(scope, walk, producers, epochs, only_ends)
    if not walk.has_invalid_batch and not live:
        missing.close()
    scope.findings.close()
    counts = VerifyCounts(
        segments=len(scope.bases),
        batches=walk.batches,
        records=walk.records,
        bytes=walk.bytes_read,
        index_entries=index_entries + producers.index_entries,
    )
    return VerifyReport(tuple(scope.findings.found), counts)


def _check_whole(
    scope: Scope, walk: BatchWalk, producers: ProducerChecks, epochs: EpochCheck, only_ends: bool
) -> None:
    """Add the findings that need the whole log: about snapshots, leader epochs and checkpoints. Findings that need the
    log end offset are left out while a broker is running.
    """
    if not scope.bases:
        return
    log_end_offset = max(walk.last_offset + 1, scope.bases[-1])
    producers.close(log_end_offset, is_valid=not walk.has_invalid_batch, is_whole=not only_ends)
    without_epoch = None if only_ends else walk.without_epoch
    epochs.close(log_end_offset, whole=not walk.has_invalid_batch, without_epoch=without_epoch)
    if not walk.has_invalid_batch and not scope.live:
        check_claims(scope, log_end_offset)
