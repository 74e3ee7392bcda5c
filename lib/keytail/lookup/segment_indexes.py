"""Decides which indexes of a partition's segments are usable, and notes what a broker does with unusable indexes.

The decision is based on listings, sizes and the indexes themselves; wrong entries are detected when the log is read.
The rules are in format/INDEX.md, "What a broker does with missing or bad index files".
"""

from __future__ import annotations

import os
from typing import TypeVar

from keytail.errors import CorruptLog
from keytail.format import names
from keytail.format.index import TIME_ENTRY
from keytail.log.fs import FileSystem
from keytail.log.index.files import OffsetIndex, TimeIndex
from keytail.log.index.presized import REBUILD
from keytail.log.partition import PartitionFacts, SegmentFacts

IndexT = TypeVar("IndexT", OffsetIndex, TimeIndex)


class SegmentIndexes:
    """The indexes of a partition's segments, which are numbered from 0. `notes`: problems of the indexes used so far.

    `trusts_indexes`: use indexes like a broker that starts on the files as they are. If False, invalid indexes are not
    used.
    """

    def __init__(self, fs: FileSystem, facts: PartitionFacts, *, trusts_indexes: bool = False) -> None:
        self.facts = facts
        self.notes: list[str] = []
        self.distrusted = False  # True after a time index was found to be invalid
        self.is_unknown = False  # True if a broker's answer is unknown because of a wrong entry
        self._fs = fs
        self._trusts_indexes = trusts_indexes

    def note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def file(self, number: int, suffix: str) -> str:
        return names.segment_file(self.facts.segments[number].base_offset, suffix)

    def is_written(self, number: int) -> bool:
        """Return whether a broker may be writing to the segment, or crashed while writing: zeros may then follow its
        index entries."""
        return number == len(self.facts.segments) - 1 and not self.facts.clean_shutdown

    def is_rebuilt(self, number: int) -> bool:
        """Return whether the segment has no offset index, so that a starting broker rebuilds all its indexes."""
        segment = self.facts.segments[number]
        if segment.index_bytes is None and segment.log_bytes > 0:
            self.note(
                f"{self.file(number, names.INDEX)} is missing: the segment was read instead. A broker that starts "
                f"rebuilds all indexes of the segment and returns the same record. {REBUILD}"
            )
        return segment.index_bytes is None

    def is_readable(self, number: int) -> bool:
        """Return whether the time index of a closed segment is usable, according to its size and last entry. If the
        index is not usable, the segment must be read."""
        if self.is_rebuilt(number):
            return False
        problem = _time_index_problem(self.facts.segments[number])
        if not problem:
            return True
        self._note_invalid(f"{self.file(number, names.TIME_INDEX)} {problem}: the segment was read instead")
        return self._trusts_indexes and not self.is_recovered(number)

    def is_recovered(self, number: int) -> bool:
        """Return whether a starting broker rebuilds the segment's indexes because of an unclean shutdown."""
        bases = [segment.base_offset for segment in self.facts.segments[number + 1 :]]
        end = bases[0] if bases else self.facts.log_end_offset
        return not self.facts.clean_shutdown and end > self.facts.recovery_point

    def valid_time_index(self, number: int) -> TimeIndex | None:
        """Return the time index, opened, or None if it cannot be used."""
        segment = self.facts.segments[number]
        if self.is_rebuilt(number) or segment.time_index_bytes is None:
            return None
        if not self.is_written(number) and not self.is_readable(number):
            return None
        index = self.open(TimeIndex, number, names.TIME_INDEX)
        try:
            index.sanity_check()
        except CorruptLog as problem:
            with index:
                if index.used == len(index) and not self.is_recovered(number):
                    self.is_unknown = True
            self._note_invalid(str(problem))
            return None
        return index

    def open(self, kind: type[IndexT], number: int, suffix: str) -> IndexT:
        path = os.path.join(self.facts.path, self.file(number, suffix))
        return kind.open(
            self._fs, path, self.facts.segments[number].base_offset, active=self.is_written(number)
        )

    def _note_invalid(self, what: str) -> None:
        self.distrusted = True
        self.note(f"{what}. {REBUILD}" if REBUILD not in what else what)


def _time_index_problem(segment: SegmentFacts) -> str:
    """Return what is wrong with the time index of a closed segment, according to its size and last entry; or ""."""
    if segment.time_index_bytes is None:
        return "is missing" if segment.log_bytes > 0 else ""
    entries = segment.time_index_bytes // TIME_ENTRY.itemsize
    if entries == 0:
        return "is empty" if segment.first_batch_timestamp_ms >= 0 else ""
    if segment.largest_timestamp_ms == 0 and (entries > 1 or segment.first_batch_timestamp_ms > 0):
        return "ends with zeros, which a broker reads as the largest timestamp 0"
    if segment.largest_timestamp_ms < segment.first_batch_timestamp_ms:
        return "ends with a timestamp below the timestamp of the first batch"
    return ""
