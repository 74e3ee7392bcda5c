"""Salvages one damaged partition: finds its intact batches, determines the losses, and writes a new log.

The source is not changed, and the new directory is renamed to its final name last (`write.py`). SALVAGE.md defines
intact batches and losses, and describes what an operator does with the result. The caller ensures that no process
writes to the source.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from keytail.errors import PERMISSION_DENIED, KeytailError, NotRegular, Refused, SymbolicLink, is_loss
from keytail.format import names
from keytail.format.batch import BATCH_TABLE
from keytail.log.checkpoint import read_epochs
from keytail.log.fs import FileSystem
from keytail.log.partition import LogDirFacts, PartitionEntry, refuse_unreadable
from keytail.log.producers import ProducerStates
from keytail.salvage.command import Loss, OpenTransaction
from keytail.salvage.scan import ZEROS, FileScan, Hole, scan_file
from keytail.salvage.sources import LogFile, Sources, find_sources
from keytail.salvage.write import NewPartition

_MAX_SPAN = 2**31
# A larger number in a checkpoint is treated as damaged and ignored: no log reaches this offset.
_LARGEST_PLAUSIBLE_OFFSET = 2**62


@dataclass
class Salvage:
    """What was found and, if `to` is set, what was written; SalvageRow has the same fields. The log starts at the first
    saved segment, or later if the log start checkpoint is higher."""

    losses: list[Loss] = field(default_factory=list)
    transactions: list[OpenTransaction] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    segments: int = 0
    segments_kept: int = 0
    bytes: int = 0
    bytes_kept: int = 0
    batches: int = 0
    records: int = 0
    gaps: int = 0  # gaps between adjacent batches
    gap_offsets: int = 0
    left_out: int = 0  # batches with a valid checksum that were not saved
    unread_files: int = 0  # files that were not read to their end and may have readable batches
    log_start_offset: int | None = None
    log_end_offset: int | None = None
    last_batch_end: int | None = None  # the offset after the last intact batch
    to: str = ""

    @property
    def certain(self) -> list[Loss]:
        return [loss for loss in self.losses if loss.certain]


def salvage_partition(
    fs: FileSystem, log_dir: LogDirFacts, entry: PartitionEntry, new: NewPartition | None
) -> Salvage:
    """Read every byte of the partition's logs, and with `new` write a partition from the intact batches.

    Raises KeytailError if there is neither an intact batch nor an empty log file; Refused if this process is not
    allowed to read a file; OSError if the directory cannot be listed, `new` cannot be written, or a log cannot be read
    for a reason that does not imply a loss.
    """
    refuse_unreadable(fs, entry.path)
    for problem in entry.problems:
        if PERMISSION_DENIED in problem.slugs:  # access to a checkpoint, which is needed for the end of the log
            raise Refused(problem, slug="permission-denied")
    sources = find_sources(fs, entry.path)
    result = Salvage(notes=list(sources.notes), segments=len(sources.logs), unread_files=len(sources.not_taken))
    scenario = _Salvaged(fs, entry.path, sources, result, new)
    for number in range(len(sources.logs)):
        scenario.take(number)
    if scenario.last_offset < 0 and not any(log.size_bytes == 0 for log in sources.logs):
        raise KeytailError(
            "no intact batch was found", path=entry.path, remedy="Use another replica", slug="no-good-batch"
        )
    key = (entry.topic, entry.partition)
    known_end = _known_end(fs, log_dir, entry, sources)
    scenario.end(log_dir.log_starts.get(key), known_end)
    if new is not None:
        result.notes += new.finish(sources.snapshots)
        result.to = new.final_path
    return result


def _known_end(fs: FileSystem, log_dir: LogDirFacts, entry: PartitionEntry, sources: Sources) -> int:
    """Return the offset up to which the log certainly existed, by the checkpoints, file names and leader epochs."""
    key = (entry.topic, entry.partition)
    checkpoints = (log_dir.high_watermarks, log_dir.recovery_points, log_dir.log_starts)
    known = [offsets.get(key, 0) for offsets in checkpoints]
    known += [log.base_offset for log in sources.logs[-1:]] + [*sources.lost_bases, *sources.snapshots]
    with contextlib.suppress(KeytailError, OSError):  # the epochs of the new partition are then derived from the log
        known += [start for _, start in read_epochs(fs, os.path.join(entry.path, names.LEADER_EPOCHS))]
    return max(offset for offset in [0, *known] if offset <= _LARGEST_PLAUSIBLE_OFFSET)


class _Salvaged:
    """Collects the result from the log files, in the order of their base offsets."""

    def __init__(
        self, fs: FileSystem, path: str, sources: Sources, result: Salvage, new: NewPartition | None
    ) -> None:
        self._fs, self._path, self._sources, self._result, self._new = fs, path, sources, result, new
        self._producers = ProducerStates()
        self._followed = 0  # producers are known up to this offset
        self._noted: set[tuple[int, int]] = set()
        self._last_base = -1
        self.last_offset = -1

    def take(self, number: int) -> None:
        """Scan file `number`, and write its intact batches."""
        source, following = self._sources.logs[number], self._sources.logs[number + 1 :]
        low = source.base_offset
        high = min(low + _MAX_SPAN, following[0].base_offset if following else names.MAX_OFFSET)
        result, path = self._result, os.path.join(self._path, source.name)
        result.bytes += source.size_bytes
        self._missing_before(low)
        try:
            scan = scan_file(self._fs, path, source.size_bytes, low, high)
        except OSError as problem:
            is_link = isinstance(problem, SymbolicLink | NotRegular)
            if not is_loss(problem) and not is_link:
                raise
            why = problem.strerror or str(problem)
            result.unread_files += is_link  # the target of the link may be readable
            hole = Hole(0, source.size_bytes, None, None, f"the file cannot be read: {why}")
            scan = FileScan(np.empty(0, np.uint8), np.empty(0, BATCH_TABLE), (hole,))
        result.left_out += scan.left_out
        result.unread_files += scan.gave_up
        if scan.left_out:
            result.notes.append(
                f"{source.name}: {scan.left_out} batches with a valid checksum are left out; the losses list the "
                "reasons"
            )
        if scan.gave_up:
            result.notes.append(
                f"{source.name}: the search ended before the end of the file, since too many bytes look like batches "
                "but are not"
            )
        self._count(scan.table, low)
        limit = following[0].base_offset if following else None
        losses = [self._loss(source, hole, limit) for hole in scan.holes]
        self._follow(scan.table, [loss.first_offset for loss in losses if loss.certain])
        result.losses += losses
        is_kept = len(scan.table) > 0 or source.size_bytes == 0
        if is_kept:
            result.segments_kept += 1
            if result.log_start_offset is None:
                result.log_start_offset = low
            self._last_base = low
            if self._new is not None:
                self._new.add_segment(low, scan.runs(), self._fs.stat(path))

    def _missing_before(self, base: int) -> None:
        """Add losses between the last segment and `base`: segments without a log, and offsets in no segment."""
        result = self._result
        behind = max(self.last_offset + 1, self._last_base) if self._last_base >= 0 else -1
        lost = [item for item in self._sources.lost_bases if behind <= item < base]
        for item, end in itertools.pairwise([*lost, base]):
            why = "only index files of this segment exist"
            if item in self._sources.not_taken:
                why = "the log of this segment is not a regular file, and is not used"
            result.losses.append(
                Loss("missing-segment", names.segment_file(item, names.LOG), 0, 0, item, end, True, why)
            )
            self._follow(np.empty(0, BATCH_TABLE), [item])
        tail_is_lost = bool(result.losses) and result.losses[-1].end_offset == base
        if 0 <= behind < base and not lost and not tail_is_lost:
            why = "no batch between two segments has these offsets: removed by compaction, or a segment is missing"
            result.losses.append(Loss("gap", "", 0, 0, behind, base, False, why))

    def _loss(self, source: LogFile, hole: Hole, limit: int | None) -> Loss:
        """Return the loss for a hole. `limit` is the base offset of the next segment, if there is one."""
        first = source.base_offset if hole.last_before is None else hole.last_before + 1
        end = limit if hole.first_after is None else hole.first_after
        kind = "damaged"
        if hole.is_empty and hole.first_after in (None, first):
            kind, end = "repeated", first
        elif hole.why == ZEROS and end is None:
            kind = "zeros"  # the file was preallocated
        nothing = end is not None and end <= first
        certain = kind == "damaged" and not nothing
        return Loss(kind, source.name, hole.start, hole.end, first, end, certain, hole.why)

    def _count(self, table: np.ndarray, base_offset: int) -> None:
        result = self._result
        result.bytes_kept += int(table["size_bytes"].sum(dtype=np.int64))
        result.batches += len(table)
        result.records += int(table["record_count"].sum(dtype=np.int64))
        if len(table):
            self.last_offset = int(table["last_offset"][-1])
            ends = np.concatenate(([base_offset - 1], table["last_offset"][:-1]))
            end_bytes = np.concatenate(([0], (table["position"] + table["size_bytes"])[:-1]))
            between = table["base_offset"] - ends - 1
            touch = table["position"] == end_bytes
            plain = between[touch & (between > 0)]
            result.gaps += len(plain)
            result.gap_offsets += int(plain.sum())

    def _follow(self, table: np.ndarray, losses: Sequence[int]) -> None:
        """Apply the batches of the table to the producers' states, and add the transactions open at each loss."""
        for offset in losses:
            self._producers.replay(table, self._followed, offset)
            self._followed = max(self._followed, offset)
            self._add_open(offset)
        end = int(table["last_offset"][-1]) + 1 if len(table) else self._followed
        self._producers.replay(table, self._followed, end)
        self._followed = max(self._followed, end)
        self._producers.completed.clear()

    def _add_open(self, at_offset: int | None) -> None:
        for producer_id, state in sorted(self._producers.states.items()):
            first = state.txn_first_offset
            is_new = (producer_id, first) not in self._noted or at_offset is None
            if first >= 0 and is_new:
                self._noted.add((producer_id, first))
                self._result.transactions.append(OpenTransaction(producer_id, state.epoch, first, at_offset))

    def end(self, log_start: int | None, known_end: int) -> None:
        """Determine start and end of the log, and the losses there."""
        result = self._result
        result.last_batch_end = end = max(self.last_offset + 1, self._last_base)
        first = result.log_start_offset
        if log_start is not None and first is not None and log_start < first and not _begins_with_loss(result):
            why = "the log start offset is below the first segment"
            result.losses.insert(0, Loss("head", "", 0, 0, log_start, first, True, why))
        began = max(self._sources.logs[0].base_offset, log_start or 0)
        if first is not None and first > began:
            result.notes.append(
                f"the log started at offset {began} and now starts at {first}: consumer groups with lower offsets "
                "begin according to auto.offset.reset"
            )
        for number, loss in enumerate(result.losses):
            if loss.end_offset is None:
                known = known_end if known_end > loss.first_offset else None
                kind = "damaged" if known is not None else loss.kind
                certain = kind == "damaged"
                result.losses[number] = Loss(
                    kind, loss.file, loss.start_byte, loss.end_byte, loss.first_offset, known, certain, loss.why
                )
        reached = max([end, *(log.base_offset for log in self._sources.logs[-1:])])
        if known_end > reached and not any(loss.end_offset == known_end and loss.certain for loss in result.losses):
            why = "a checkpoint, a leader epoch or a snapshot implies that the log had these offsets"
            result.losses.append(Loss("tail", "", 0, 0, reached, known_end, True, why))
        if self._last_base < 0 or known_end > end:
            result.segments_kept += 1
            if self._new is not None:
                self._new.add_empty_segment(max(known_end, end))
        result.log_end_offset = max(known_end, end)
        if log_start is not None and first is not None:
            result.log_start_offset = max(log_start, first)
        if any(loss.certain for loss in result.losses):
            self._add_open(None)


def _begins_with_loss(result: Salvage) -> bool:
    return bool(result.losses) and result.losses[0].end_offset == result.log_start_offset and result.losses[0].certain
