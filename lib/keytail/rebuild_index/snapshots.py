"""Rebuilds missing or damaged producer snapshots of a partition from older snapshots and the log.

A snapshot with a valid checksum is never changed. A snapshot is rebuilt only from sources that cannot lack a
producer: the latest older snapshot and the batches after it, or the log alone if every offset from 0 on is still in it
(format/SNAPSHOT.md, "Which snapshots can be rebuilt"). Any other snapshot is refused, with the reason.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from keytail.errors import NO_ERROR, CorruptLog, ErrorText, KeytailError
from keytail.format import names
from keytail.format.producers import check_snapshot, encode_snapshot, parse_snapshot
from keytail.log.fs import FileStat, FileSystem
from keytail.log.partition import SegmentFacts
from keytail.log.producers import ProducerStates
from keytail.log.records.chunk import SegmentReader, refuse_unsupported


@dataclass(frozen=True, slots=True)
class SnapshotSurvey:
    """The offsets of a partition's snapshots, ascending, by their state."""

    good: tuple[int, ...]
    missing: tuple[int, ...]  # offsets at which a broker would have a snapshot
    damaged: tuple[int, ...]  # only at offsets at which a broker would have a snapshot

    @property
    def to_make(self) -> tuple[int, ...]:
        return tuple(sorted((*self.missing, *self.damaged)))


@dataclass(frozen=True, slots=True)
class SnapshotRow:
    """A snapshot that was or would be rebuilt. With a `problem`, the snapshot cannot be rebuilt, and the file is
    unchanged."""

    offset: int
    was: Literal["missing", "damaged"]
    source: int | None  # offset of the older snapshot that is used; None if only the log is used
    producers: int = 0
    problem: str = ""


def wanted_snapshots(
    bases: Sequence[int], log_start_offset: int, log_end_offset: int, *, clean_shutdown: bool
) -> tuple[int, ...]:
    """Return the offsets of a broker's snapshots: each base offset of a later segment above the log start, and the log
    end if the broker stopped cleanly."""
    ends = [log_end_offset] if clean_shutdown else []
    return tuple(sorted({offset for offset in [*bases[1:], *ends] if offset > log_start_offset}))


def survey_snapshots(
    fs: FileSystem, partition_path: str, present: Sequence[int], wanted: Sequence[int]
) -> SnapshotSurvey:
    """Read the existing snapshots (at the offsets `present`), and compare them with the `wanted` offsets."""
    good = {offset for offset in present if _is_right(fs, partition_path, offset)}
    return SnapshotSurvey(
        good=tuple(sorted(good)),
        missing=tuple(sorted(set(wanted) - set(present))),
        damaged=tuple(sorted((set(present) - good) & set(wanted))),
    )


def make_snapshots(
    fs: FileSystem,
    reader: SegmentReader,
    partition_path: str,
    segments: Sequence[SegmentFacts],
    log_start_offset: int,
    survey: SnapshotSurvey,
) -> Iterator[tuple[SnapshotRow, bytes]]:
    """Yield a row for each offset of `survey.to_make`, ascending, with the new contents (empty if there is a problem).

    Reads the log from the latest good snapshot before each offset. A replay continues to the next offset, so no segment
    is read twice. Changes no file: `put_snapshot` writes the contents.
    """
    replay = _Replay(fs, reader, partition_path, segments, log_start_offset)
    for offset in survey.to_make:
        was: Literal["missing", "damaged"] = "damaged" if offset in survey.damaged else "missing"
        older = max((good for good in survey.good if good < offset), default=None)
        try:
            replay.start_from(older)
            replay.go_to(offset)
        except KeytailError as problem:
            replay.broken = ErrorText(problem)
        why = replay.broken or replay.why_not_all(offset)
        if why:
            yield SnapshotRow(offset, was, replay.source, problem=why), b""
        else:
            entries = replay.producers.entries()
            yield SnapshotRow(offset, was, replay.source, len(entries)), encode_snapshot(entries)


def put_snapshot(
    fs: FileSystem, partition_path: str, offset: int, data: bytes, *, like: FileStat, run_id: str, attempt: str
) -> None:
    """Write the new contents durably, then rename the file to the snapshot's name, replacing a damaged file if there is
    one.

    Owner and mode are taken from `like`, a file of the partition.
    """
    scratch = os.path.join(partition_path, names.scratch_file(offset, run_id, attempt, names.SNAPSHOT))
    fs.put_file(os.path.join(partition_path, names.segment_file(offset, names.SNAPSHOT)), data, like, scratch)
    fs.fsync_dir(partition_path)


class _Replay:
    """The producer states at an offset that only increases."""

    def __init__(
        self,
        fs: FileSystem,
        reader: SegmentReader,
        path: str,
        segments: Sequence[SegmentFacts],
        log_start_offset: int,
    ) -> None:
        self._fs, self._reader, self._path = fs, reader, path
        self._segments, self._log_start_offset = segments, log_start_offset
        self._at = self._first = segments[0].base_offset
        self._gap: int | None = None  # the first offset from 0 on without a record
        self._next = 0
        self.producers = ProducerStates()
        self.source: int | None = None
        self.broken = NO_ERROR

    def start_from(self, snapshot: int | None) -> None:
        """Continue from the snapshot at this offset, unless the log begins later, or a replay from a snapshot has
        reached this offset."""
        if snapshot is None or snapshot < self._first or (snapshot <= self._at and self.source is not None):
            return
        path = os.path.join(self._path, names.segment_file(snapshot, names.SNAPSHOT))
        try:
            entries = parse_snapshot(self._fs.read_bytes(path, whole=True))
        except ValueError as problem:
            raise CorruptLog(
                f"the snapshot changed during the run and is invalid: {problem}",
                path=path,
                remedy="Another process writes to this directory; stop it and run again",
                slug="snapshot-changed",
            ) from problem
        self.producers, self.source, self._at, self.broken = ProducerStates.of(entries), snapshot, snapshot, NO_ERROR

    def go_to(self, offset: int) -> None:
        """Replay the batches below `offset`. Raises CorruptLog or Refused if they cannot be read."""
        if self.broken:
            return
        for number, segment in enumerate(self._segments):
            is_last = number + 1 == len(self._segments)
            is_behind = is_last or self._segments[number + 1].base_offset > self._at
            if is_behind and segment.base_offset < offset and self._at < offset:
                path = os.path.join(self._path, names.segment_file(segment.base_offset, names.LOG))
                for chunk in self._reader.chunks(path, segment.log_bytes):
                    refuse_unsupported(chunk)
                    self._count(chunk.table[chunk.table["last_offset"] < offset])
                    self.producers.replay(chunk.table, self._at, offset)
                    if chunk.table["last_offset"][-1] >= offset:
                        break
        self._at = max(self._at, offset)

    def why_not_all(self, offset: int) -> str:
        """Return why producers below `offset` may be missing; "" if none can be missing."""
        if self.source is not None:
            return ""
        what = "no older snapshot is valid, and the log alone does not contain all producers: "
        if self._log_start_offset or self._first:
            return f"{what}the log begins at offset {max(self._log_start_offset, self._first)}"
        gap = self._gap if self._gap is not None else self._next
        return f"{what}offset {gap} is missing" if gap < offset else ""

    def _count(self, table: np.ndarray) -> None:
        """Check, from offset 0 on, whether each offset has its record."""
        table = table[table["base_offset"] >= self._next]
        if self._gap is not None or self.source is not None or not len(table):
            return
        following = table["last_offset"] + 1
        expected = np.concatenate(([self._next], following[:-1]))
        whole = (table["base_offset"] == expected) & (table["record_count"] == following - table["base_offset"])
        if whole.all():
            self._next = int(following[-1])
        else:
            self._gap = int(expected[np.argmin(whole)])


def _is_right(fs: FileSystem, path: str, offset: int) -> bool:
    data = fs.read_bytes(os.path.join(path, names.segment_file(offset, names.SNAPSHOT)), whole=True)
    try:
        check_snapshot(data)
    except ValueError:
        return False
    return True
