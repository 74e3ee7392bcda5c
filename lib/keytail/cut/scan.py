"""Reads the log of one replica for a cut: its batches, its end offset, and the parts of transactions in it.

Every batch is checked. A torn end that a recovering broker would truncate is left out; other damage is an error.
No file is changed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from keytail.cut.transactions import Piece
from keytail.errors import CorruptLog, Refused, joined
from keytail.format import names
from keytail.format.batch import BATCH_TABLE, CONTROL, TRANSACTIONAL
from keytail.format.control import ControlType
from keytail.log.fs import FileSystem
from keytail.log.partition import PartitionFacts
from keytail.log.records.chunk import SegmentReader, check_ends_below, refuse_unsupported
from keytail.rebuild_index.tail import plan_truncation, torn_tail


@dataclass(frozen=True)
class Scan:
    """The log of one replica: its batches (BATCH_TABLE, ascending by offset, with positions in their segments), its log
    end offset, and a sentence about its torn end (empty if the end is not torn)."""

    facts: PartitionFacts
    table: np.ndarray
    end_offset: int
    torn: str = ""

    @property
    def has_gaps(self) -> bool:
        """Whether records may have been removed: the log begins above offset 0, or an offset in it has no record."""
        table = self.table
        if self.facts.log_start_offset or self.facts.segments[0].base_offset:
            return True
        following = np.concatenate(([0], table["last_offset"] + 1)) if len(table) else np.zeros(1, np.int64)
        counts = table["last_offset"] - table["base_offset"] + 1
        return bool((table["base_offset"] != following[:-1]).any() or (table["record_count"] != counts).any())


def scan(fs: FileSystem, reader: SegmentReader, facts: PartitionFacts) -> Scan:
    """Read the log and return its scan. Raises Refused for a state that keytail does not process, and CorruptLog for
    damage that a broker would not truncate when it recovers the log."""
    if facts.problems:
        why = joined(facts.problems)
        remedy = "Nothing was written. Finish the replacement in a copy, with `keytail rebuild-index --execute`"
        interrupted = "unfinished-replacement" in why.slugs
        raise Refused(
            why, path=facts.path, remedy=remedy if interrupted else None, slug="unexpected-partition-state"
        )
    tables, torn = [np.empty(0, BATCH_TABLE)], ""
    end = facts.segments[0].base_offset
    following = [segment.base_offset for segment in facts.segments[1:]]
    for segment, next_base in zip(facts.segments, [*following, None], strict=True):
        path = os.path.join(facts.path, names.segment_file(segment.base_offset, names.LOG))
        end = max(end, segment.base_offset)
        try:
            for chunk in reader.chunks(path, segment.log_bytes):
                refuse_unsupported(chunk)
                check_ends_below(chunk, next_base)
                tables.append(chunk.table.copy())
                end = int(chunk.table["last_offset"][-1]) + 1
        except CorruptLog as damage:
            if damage.byte_position is None or damage.slug == "file-became-shorter":
                raise
            tail = torn_tail(fs, facts.path, segment, end, damage)
            plan_truncation(facts, tail, [entry.name for entry in fs.scan(facts.path)])  # refuses other damage
            torn = f"the log is torn after offset {end - 1}: {damage.what} ({path}, byte {damage.byte_position})"
            break
    return Scan(facts, np.concatenate(tables), max(end, facts.log_start_offset), torn)


def pieces_of(table: np.ndarray) -> list[Piece]:
    """Return the parts of transactions in a log (`table` is a BATCH_TABLE), in the order of their markers; those of
    open transactions are last."""
    of_transactions = table["attributes"] & TRANSACTIONAL != 0
    is_control = table["attributes"] & CONTROL != 0
    is_marker = is_control & np.isin(table["control_type"], (ControlType.ABORT, ControlType.COMMIT))
    rows = table[(of_transactions & ~is_control) | (is_marker & (table["record_count"] > 0))]
    open_ones: dict[int, tuple[int, int]] = {}  # first offset and epoch, by producer id
    found: list[Piece] = []
    columns = ["producer_id", "base_offset", "producer_epoch", "control_type", "max_timestamp_ms", "attributes"]
    for producer_id, offset, epoch, control_type, marker_ms, attributes in rows[columns].tolist():
        if not attributes & CONTROL:
            open_ones.setdefault(producer_id, (offset, epoch))
            continue
        first, data_epoch = open_ones.pop(producer_id, (offset, None))
        is_commit = control_type == ControlType.COMMIT
        found.append(Piece(producer_id, first, data_epoch, epoch, offset, is_commit, marker_ms))
    return found + [Piece(producer_id, first, epoch) for producer_id, (first, epoch) in open_ones.items()]
