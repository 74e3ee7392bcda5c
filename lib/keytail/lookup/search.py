"""Implements the steps of a lookup in a partition: in its segments, their indexes, batches and records.

Each step reports what it did, with its numbers. steps.py beside this file decides which steps to take. The rules are in
format/INDEX.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

import numpy as np

from keytail.errors import CorruptLog
from keytail.format import names
from keytail.format.batch import CODEC_MASK, CONTROL, NO_TIMESTAMP
from keytail.format.codecs.table import CODECS
from keytail.format.control import ControlType
from keytail.format.index import TIME_ENTRY
from keytail.log.fs import FileSystem
from keytail.log.index.files import OffsetEntry, OffsetIndex, TimeEntry
from keytail.log.index.presized import REBUILD
from keytail.log.partition import PartitionFacts
from keytail.log.records.chunk import Chunk, SegmentReader
from keytail.log.records.scan import RecordScanner
from keytail.lookup.segment_indexes import SegmentIndexes

_CHUNK_BYTES = 256 << 10
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class _WrongEntry(Exception):
    """Raised if the position of an offset index entry has no batch that begins at or below the entry's offset."""


@dataclass(frozen=True)
class FoundRecord:
    """A record and its batch. A key or value of None is null."""

    offset: int
    timestamp_ms: int
    leader_epoch: int
    key: bytes | None
    value: bytes | None
    control: str  # the type of a control record, such as COMMIT or ABORT; empty for a record of a producer
    segment: int  # base offset of the segment
    byte_position: int  # position of the batch in its file
    batch_bytes: int
    batch_base_offset: int
    batch_last_offset: int
    batch_records: int
    codec: str


class Search:
    """One search in a partition. `steps` are sentences about what the search has done so far.

    `trusts_indexes`: search like a broker that starts on the files as they are. If it is False, search as if invalid
    indexes had been rebuilt.
    """

    def __init__(self, fs: FileSystem, facts: PartitionFacts, *, trusts_indexes: bool = False) -> None:
        self.facts = facts
        self.indexes = SegmentIndexes(fs, facts, trusts_indexes=trusts_indexes)
        self.steps: list[str] = []
        self._reader = SegmentReader(fs, _CHUNK_BYTES)
        self._scanner = RecordScanner()
        count = len(facts.segments)
        self.add_step(
            f"The log has offsets {facts.log_start_offset} to {facts.log_end_offset - 1} in {count} "
            f"segment{'s' if count != 1 else ''}."
            if facts.log_end_offset > facts.log_start_offset
            else f"The log is empty: it starts and ends at offset {facts.log_end_offset}."
        )

    def add_step(self, step: str) -> None:
        self.steps.append(step)

    def largest_timestamp(self, number: int) -> tuple[int, str]:
        """Return the largest timestamp of a segment, in ms, and where it was read (INDEX.md, section 4)."""
        segment = self.facts.segments[number]
        file_time_ms = segment.log_mtime_ns // 1_000_000
        if self.indexes.is_written(number):
            largest_ms, source = self._largest_of_tail(number), "from its last index entries and later batches"
        else:
            if self.indexes.is_readable(number):
                if (segment.time_index_bytes or 0) < TIME_ENTRY.itemsize:
                    return file_time_ms, "the modification time of its file, since it has no time index entry"
                return segment.largest_timestamp_ms, "last entry of its time index"
            largest_ms, source = self._largest_from(number, self._begin(number)), "found by reading its batches"
        if largest_ms < 0:
            return file_time_ms, "the modification time of its file, since no batch has a timestamp"
        return largest_ms, source

    def time_floor(self, number: int, timestamp_ms: int) -> TimeEntry:
        """Return the last time index entry at or before a time; an entry for the segment's start if there is none."""
        base = self.facts.segments[number].base_offset
        name = self.indexes.file(number, names.TIME_INDEX)
        index = self.indexes.valid_time_index(number)
        if index is None:
            self.add_step(f"{name} is not used: the search begins at base offset {base}.")
            return TimeEntry(-1, NO_TIMESTAMP, base)
        with index:
            at = index.lookup(timestamp_ms)
            text = f"{name} has {_count(len(index), 'entry', 'entries')}. "
        if at.slot < 0:
            text += f"No entry is at or before {spell_time(timestamp_ms)}: the search begins at base offset {base}."
        else:
            text += (
                f"The last entry not after {spell_time(timestamp_ms)} is in slot {at.slot}: up to offset {at.offset} "
                f"no timestamp is above {spell_time(at.timestamp_ms)}, so the search can begin there."
            )
        self.add_step(text)
        return at

    def offset_floor(self, number: int, offset: int) -> OffsetEntry:
        """Return the last offset index entry not above an offset; an entry for byte 0 if there is none."""
        name = self.indexes.file(number, names.INDEX)
        if self.indexes.is_rebuilt(number):
            self.add_step(f"{name} is missing: the segment is read from byte 0.")
            return self._begin(number)
        with self.indexes.open(OffsetIndex, number, names.INDEX) as index:
            if index.used < len(index):
                self.indexes.note(
                    f"{name} has zeros after its {_count(index.used, 'entry', 'entries')}: it was not trimmed. A "
                    f"broker uses this index and reads the segment from its start, which is slower, with the same "
                    f"result"
                )
                self.add_step(f"{name} is not used, since it was not trimmed: the segment is read from byte 0.")
                return self._begin(number)
            at = index.lookup(offset)
            text = f"{name} has {_count(len(index), 'entry', 'entries')}, each with the last offset of a batch, or of "
            text += "a set of batches, and the byte position where the batch or set begins. "
        if at.slot < 0:
            text += f"No entry is at or below {offset}: reading begins at byte 0."
        else:
            text += f"The last entry not above {offset} is in slot {at.slot}: offset {at.offset}, byte {at.position}."
        self.add_step(text)
        return at

    def scan(
        self, number: int, floor: OffsetEntry, min_offset: int, min_timestamp_ms: int | None
    ) -> FoundRecord | None:
        """Return the first record from `floor` on with at least this offset and, if given, this timestamp."""
        try:
            return self._scan(number, floor, min_offset, min_timestamp_ms)
        except _WrongEntry:
            name = self.indexes.file(number, names.INDEX)
            broker = "uses the entry and reads from there; its answer is unknown"
            if self.indexes.is_recovered(number):
                broker = "that starts after this unclean shutdown rebuilds the index; a running broker uses the entry"
            else:
                self.indexes.is_unknown = True
            self.indexes.note(
                f"{name}, slot {floor.slot}: no batch at or below offset {floor.offset} begins at byte "
                f"{floor.position}. A broker {broker}. {REBUILD}"
            )
            self.add_step(f"No batch at or below offset {floor.offset} begins there: the segment is read from byte 0.")
            return self._scan(number, self._begin(number), min_offset, min_timestamp_ms)

    def _scan(
        self, number: int, floor: OffsetEntry, min_offset: int, min_timestamp_ms: int | None
    ) -> FoundRecord | None:
        column, least, what = "last_offset", min_offset, f"last offset below {min_offset}"
        if min_timestamp_ms is not None:
            column, least = "max_timestamp_ms", min_timestamp_ms
            what = f"largest timestamp before {spell_time(least)}"
        passed = reported = 0  # numbers of batches: in earlier chunks, and mentioned in steps
        for chunk in self._chunks(number, floor):
            for row in np.flatnonzero(chunk.table[column] >= least):
                batch = chunk.table[row]
                walked = passed + int(row) - reported
                text = f"{_count(walked, 'batch is', 'batches are')} skipped ({what}). " if walked else ""
                text += (
                    f"The batch at byte {batch['position']} has offsets {batch['base_offset']} to "
                    f"{batch['last_offset']}, {_count(int(batch['record_count']), 'record', 'records')}, timestamps up "
                    f"to {spell_time(int(batch['max_timestamp_ms']))}, {batch['size_bytes']} bytes"
                )
                reported += walked + 1
                record = self._record_of(number, chunk, int(row), min_offset, min_timestamp_ms)
                if record is None:
                    self.add_step(f"{text}. None of its records matches; reading continues after it.")
                    continue
                self.add_step(f"{text}, {'uncompressed' if record.codec == 'none' else record.codec}.")
                control = f", a control record of the broker: {record.control}" if record.control else ""
                self.add_step(
                    f"The first matching record: offset {record.offset}, timestamp "
                    f"{spell_time(record.timestamp_ms)}{control}."
                )
                return record
            passed += len(chunk.table)
        return None

    def _record_of(
        self, number: int, chunk: Chunk, row: int, min_offset: int, min_timestamp_ms: int | None
    ) -> FoundRecord | None:
        """Return the first matching record of a batch, or None."""
        batch = chunk.table[row]
        wanted = np.zeros(len(chunk.table), np.bool_)
        wanted[row] = True
        for opened in self._reader.open_rows(chunk, wanted):
            for portion in self._scanner.portions(chunk, opened):
                records = portion.records
                fits = records["offset"] >= min_offset
                if min_timestamp_ms is not None:
                    fits &= records["timestamp_ms"] >= min_timestamp_ms
                if not fits.any():
                    continue
                first = int(np.argmax(fits))
                item = replace(portion.record_table, records=records[first : first + 1])
                return FoundRecord(
                    offset=int(records["offset"][first]),
                    timestamp_ms=int(records["timestamp_ms"][first]),
                    leader_epoch=int(batch["leader_epoch"]),
                    key=item.keys().to_list()[0],
                    value=item.values().to_list()[0],
                    control=_control_name(int(batch["control_type"])) if batch["attributes"] & CONTROL else "",
                    segment=self.facts.segments[number].base_offset,
                    byte_position=int(batch["position"]),
                    batch_bytes=int(batch["size_bytes"]),
                    batch_base_offset=int(batch["base_offset"]),
                    batch_last_offset=int(batch["last_offset"]),
                    batch_records=int(batch["record_count"]),
                    codec=CODECS[int(batch["attributes"]) & CODEC_MASK],
                )
        return None

    def _chunks(self, number: int, floor: OffsetEntry) -> Iterator[Chunk]:
        """Yield the chunks of a segment from the index entry `floor` on. Raises _WrongEntry unless the entry's position
        has a batch that begins at or below the entry's offset.

        The entry's offset may be the last offset of a later batch (format/INDEX.md, 8).
        """
        segment = self.facts.segments[number]
        path = os.path.join(self.facts.path, self.indexes.file(number, names.LOG))
        is_last = number == len(self.facts.segments) - 1
        promised = floor.slot >= 0
        try:
            for chunk in self._reader.chunks_without_prefetch(
                path, segment.log_bytes, start=floor.position, torn_tail=is_last
            ):
                if promised and int(chunk.table["base_offset"][0]) > floor.offset:
                    raise _WrongEntry
                promised = False
                yield chunk
        except CorruptLog as problem:
            if promised and problem.byte_position == floor.position:
                raise _WrongEntry from problem
            raise
        if promised:
            raise _WrongEntry

    def _begin(self, number: int) -> OffsetEntry:
        return OffsetEntry(-1, self.facts.segments[number].base_offset, 0)

    def _largest_of_tail(self, number: int) -> int:
        """Return the largest timestamp of a segment that is being written, from its last index entries and the batches
        after them."""
        if self.indexes.is_rebuilt(number):
            return self._largest_from(number, self._begin(number))
        with self.indexes.open(OffsetIndex, number, names.INDEX) as offsets:
            last = offsets.last
        try:
            largest_ms = self._largest_from(number, last)
        except _WrongEntry:
            return self._largest_from(number, self._begin(number))
        index = self.indexes.valid_time_index(number)
        if index is None:
            return self._largest_from(number, self._begin(number))
        with index:
            return max(largest_ms, index.last.timestamp_ms)

    def _largest_from(self, number: int, floor: OffsetEntry) -> int:
        """Return the largest timestamp of all batches from `floor` on; -1 if none has a timestamp."""
        chunks = self._chunks(number, floor)
        return max((int(chunk.table["max_timestamp_ms"].max()) for chunk in chunks), default=NO_TIMESTAMP)


def spell_time(timestamp_ms: int) -> str:
    """Return a time as text, such as `1700000000000 (2023-11-14T22:13:20.000Z)`. A negative or too large time has no
    date."""
    try:
        moment = _EPOCH + timedelta(milliseconds=timestamp_ms)
    except OverflowError:
        return str(timestamp_ms)
    if timestamp_ms < 0:
        return f"{timestamp_ms} (none)"
    return f"{timestamp_ms} ({moment.isoformat(timespec='milliseconds').replace('+00:00', 'Z')})"


def _control_name(control_type: int) -> str:
    try:
        return ControlType(control_type).name
    except ValueError:
        return f"type {control_type}"


def _count(number: int, item: str, many: str) -> str:
    return f"{number:,} {item if number == 1 else many}"
