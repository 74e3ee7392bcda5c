"""Merges neighbouring batches of one segment and compresses batches with another codec, chunk by chunk (REPACK.md).

Memory holds the reader's chunks, the open batch (to which source batches are added), and the bytes of its sources.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from keytail.compact.repack.producers import Forgotten
from keytail.compact.repack.task import Repacking
from keytail.format.batch import (
    BATCH_TABLE,
    CODEC_MASK,
    CONTROL,
    DELETE_HORIZON,
    HEADER_BYTES,
    LOG_APPEND_TIME,
    NO_PRODUCER_ID,
    TRANSACTIONAL,
)
from keytail.format.compression import compress
from keytail.kernels import batch_header as v2
from keytail.kernels import repack as kernels
from keytail.kernels.rewriting.blocks import MAX_GROWTH_BYTES
from keytail.log.records.chunk import Chunk, SegmentReader
from keytail.log.records.pieces import WHOLE_BLOCK_RECORDS
from keytail.log.records.scan import Portion, RecordScanner


class Repacked(Protocol):
    """Receives the batches of one repacked segment in order. `data` are their bytes, and are valid only during the
    call; `table` are their BATCH_TABLE rows, which the receiver may keep."""

    def unchanged(self, data: np.ndarray, table: np.ndarray) -> None:
        """Receive batches that are copied from the source byte for byte."""

    def changed(self, data: np.ndarray, table: np.ndarray) -> None:
        """Receive one batch that replaces source batches."""


class Merger:
    """Repacks the segments of a partition into `out`, one segment after the other.

    `kept` are the base offsets (int64, sorted) of batches that must not be changed. `forgotten` decides which batches
    may be merged without their producer.
    """

    def __init__(
        self,
        reader: SegmentReader,
        repacking: Repacking,
        max_message_bytes: int,
        kept: np.ndarray,
        forgotten: Forgotten,
    ) -> None:
        self._reader, self._repacking, self._kept, self._forgotten = reader, repacking, kept, forgotten
        self._max_message_bytes = max_message_bytes
        self._scanner = RecordScanner()
        self._block = np.empty(1 << 20, np.uint8)
        self._state = np.zeros(kernels.STATE, np.int64)
        self._state[kernels.LIMIT] = repacking.block_bytes(max_message_bytes)
        self._state[kernels.MAX_RECORDS] = WHOLE_BLOCK_RECORDS
        # The open batch: its sources in this chunk begin at row `_first`; `_earlier` has copies of those in earlier
        # chunks.
        self._first = 0
        self._earlier: list[tuple[np.ndarray, np.ndarray]] = []
        self._last_row = np.zeros(1, BATCH_TABLE)  # the last row of the previous chunk
        self._is_last_free = False

    def repack(self, chunks: Iterable[Chunk], out: Repacked) -> None:
        """Repack all chunks of one segment."""
        self._is_last_free = False
        for chunk in chunks:
            self._add(chunk, out)
        if self._is_open:
            self._close(None, 0, out)

    @property
    def _is_open(self) -> bool:
        return bool(self._state[kernels.SOURCES])

    def _add(self, chunk: Chunk, out: Repacked) -> None:
        wanted, joins = self._decide(chunk.table)
        self._first = 0
        for opened in self._reader.open_rows(chunk, wanted):
            if opened.is_piece:  # the batch is too large to be merged or rebuilt in memory
                if not opened.records_before and self._is_open:
                    self._close(chunk, opened.first, out)
                if opened.is_end:
                    self._copy(chunk, opened.first, opened.end, out)
                continue
            for portion in self._scanner.portions(chunk, opened):
                self._add_portion(portion, wanted, joins, out)
        if self._is_open:
            part = _rows_of(chunk, self._first, len(chunk.table))
            self._earlier.append((part[0].copy(), part[1]))

    def _decide(self, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return for each row, from the headers alone, whether its batch must be opened, and whether this batch may be
        merged with the batch before it (bool arrays)."""
        attributes, codecs = table["attributes"], table["attributes"] & CODEC_MASK
        rebuildable = (table["magic"] == 2) & (table["record_count"] > 0) & ((attributes & CONTROL) == 0)
        rebuildable &= ((attributes & ~v2.KNOWN_ATTRIBUTES) == 0) & (codecs <= v2.MAX_CODEC)
        if len(self._kept):
            at = np.minimum(np.searchsorted(self._kept, table["base_offset"]), len(self._kept) - 1)
            rebuildable &= self._kept[at] != table["base_offset"]
        has_producer = (table["producer_id"] != NO_PRODUCER_ID) | ((attributes & TRANSACTIONAL) != 0)
        loses = has_producer & self._forgotten.may_lose(table)
        free = rebuildable & (loses | ~has_producer)
        table = _without_producers(table, loses)
        before = np.concatenate([self._last_row, table[:-1]])
        was_free = np.concatenate([[self._is_last_free], free[:-1]])
        joins = free & was_free & self._share_fields(before, table)
        if not self._repacking.merges:
            joins[:] = False
        wanted = joins.copy()
        wanted[:-1] |= joins[1:]
        wanted[-1] |= free[-1] and self._repacking.merges  # the first batch of the next chunk is not yet known
        if self._repacking.codec is not None:
            wanted |= codecs != self._repacking.codec
        self._is_last_free, self._last_row = bool(free[-1]), table[-1:].copy()
        return wanted & rebuildable, joins

    def _share_fields(self, before: np.ndarray, table: np.ndarray) -> np.ndarray:
        """Return for each row of `table` whether the fields that a merged batch has only once equal those of the same
        row in `before`."""
        attributes = table["attributes"]
        kinds = DELETE_HORIZON | LOG_APPEND_TIME | (CODEC_MASK if self._repacking.codec is None else 0)
        same = ((before["attributes"] ^ attributes) & kinds) == 0
        # Even without a producer, the producer epoch and the sequence are compared: group coordinators write the
        # sequence 0.
        for name in ("leader_epoch", "producer_epoch", "base_sequence"):
            same &= before[name] == table[name]
        same &= ((attributes & DELETE_HORIZON) == 0) | (before["base_timestamp_ms"] == table["base_timestamp_ms"])
        same &= ((attributes & LOG_APPEND_TIME) == 0) | (before["max_timestamp_ms"] == table["max_timestamp_ms"])
        return np.asarray(same)

    def _add_portion(self, portion: Portion, wanted: np.ndarray, joins: np.ndarray, out: Repacked) -> None:
        chunk, opened, records, state = portion.chunk, portion.opened, portion.records, self._state
        needed = int(records["body_bytes"].sum(dtype=np.int64)) + MAX_GROWTH_BYTES * len(records)
        state[kernels.ROW], state[kernels.RECORD] = portion.first_row, 0
        while True:
            self._reserve(needed)
            if not self._is_open:
                self._first = int(state[kernels.ROW])
            code = kernels.encode_rows(
                chunk.raw, opened.arena, opened.where, records, len(records), chunk.table, wanted, joins,
                portion.end_row, self._block, state,
            )  # fmt: skip
            if code == kernels.DONE:
                return
            row = int(state[kernels.ROW])
            if code == kernels.CLOSE:
                self._close(chunk, row, out)
            else:
                others = np.flatnonzero(wanted[row : portion.end_row])
                end = row + int(others[0]) if len(others) else portion.end_row
                self._copy(chunk, row, end, out)
                state[kernels.ROW] = end

    def _reserve(self, needed: int) -> None:
        """Enlarge the block, if necessary, so that `needed` more bytes fit."""
        used = int(self._state[kernels.USED]) if self._is_open else 0
        if len(self._block) < used + needed:
            larger = np.empty(2 * (used + needed), np.uint8)
            larger[:used] = self._block[:used]
            self._block = larger

    def _copy(self, chunk: Chunk, first: int, end: int, out: Repacked) -> None:
        out.unchanged(*_rows_of(chunk, first, end))

    def _close(self, chunk: Chunk | None, end: int, out: Repacked) -> None:
        """End the open batch before row `end` of the chunk, or at the end of the segment if `chunk` is None."""
        sources = list(self._earlier)
        if chunk is not None and end > self._first:
            sources.append(_rows_of(chunk, self._first, end))
        made = self._merged(sources)
        if made is None:
            for data, table in sources:
                out.unchanged(data, table)
        else:
            out.changed(*made)
        self._state[kernels.SOURCES] = 0
        self._earlier = []

    def _merged(self, sources: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the open batch and its row, or None if its sources must be copied unchanged.

        The sources are copied if there is only one and it has the requested codec, or if the new batch would exceed
        `max.message.bytes`. The sources are also copied if the new batch would not be smaller, unless a source is
        compressed with a codec other than the requested one.
        """
        repacking, state = self._repacking, self._state
        codecs = {attributes & CODEC_MASK for _, table in sources for attributes in table["attributes"].tolist()}
        codec = max(codecs) if repacking.codec is None else repacking.codec  # if none is given, all are equal
        if state[kernels.SOURCES] == 1 and codecs == {codec}:
            return None
        block = memoryview(self._block)[: int(state[kernels.USED])]
        packed = block if codec == 0 else compress(codec, block, repacking.level)
        size = HEADER_BYTES + len(packed)
        if size > self._max_message_bytes:
            return None
        if codecs <= {codec, v2.NONE} and size >= sum(len(data) for data, _ in sources):
            return None
        made = np.empty(size, np.uint8)
        made[HEADER_BYTES:] = np.frombuffer(packed, np.uint8)
        row = sources[0][1][:1].copy()
        if state[kernels.SOURCES] > 1:
            row = _without_producers(row, row["producer_id"] != NO_PRODUCER_ID)
        attributes = (int(row["attributes"][0]) & ~CODEC_MASK) | codec
        kernels.complete(made, size, row, attributes, state)
        return made, row


def _without_producers(table: np.ndarray, which: np.ndarray) -> np.ndarray:
    """Return the rows of a table; those that `which` (bool) selects have no producer and are not transactional."""
    if not which.any():
        return table
    table = table.copy()
    for name, none in (("producer_id", NO_PRODUCER_ID), ("producer_epoch", -1), ("base_sequence", -1)):
        table[name][which] = none
    table["attributes"][which] &= ~TRANSACTIONAL
    return table


def _rows_of(chunk: Chunk, first: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of the batches in rows `first` to before `end` of a chunk's table, and a copy of these rows."""
    table = chunk.table[first:end].copy()
    start, last = int(table["position"][0]) - chunk.position, table[-1]
    return chunk.raw[start : int(last["position"]) - chunk.position + int(last["size_bytes"])], table
