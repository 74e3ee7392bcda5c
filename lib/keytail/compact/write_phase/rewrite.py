"""The write phase: reads the segments again, deciding and writing chunk by chunk.

A batch is copied whole, rebuilt, emptied or dropped, by the rules of format/CLEANING.md. In the dirty section, survivor
bits decide, except about transactional batches if that section begins inside a segment; batches without survivors are
not opened (decompressed and parsed). Before the dirty section, keys are looked up in the map. After the mapped range,
all records are retained.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from keytail.compact.map_phase.survivors import Span, Survivors
from keytail.compact.producers import ActiveProducers
from keytail.compact.task import CleaningTask, SourceCounts
from keytail.compact.write_phase.counts import Counts
from keytail.compact.write_phase.pieces import BlockInPieces, FoundInPieces
from keytail.errors import CorruptLog, Refused
from keytail.format import names
from keytail.format.batch import BATCH_TABLE, CODEC_MASK, DELETE_HORIZON, HEADER_BYTES, NOT_COPIED
from keytail.format.codecs.lz4 import with_old_lz4_checksum
from keytail.format.codecs.table import LZ4
from keytail.format.compression import compress
from keytail.kernels.rewriting import assembly as assembly_kernels
from keytail.kernels.rewriting import blocks as block_kernels
from keytail.kernels.rewriting import records as record_kernels
from keytail.kernels.rewriting import rows as row_kernels
from keytail.log.partition import SegmentFacts
from keytail.log.records.chunk import CORRUPT_REMEDY, Chunk, OpenedRows, SegmentReader, refuse_unsupported
from keytail.log.records.scan import Portion, RecordScanner
from keytail.log.transactions import Transactions
from keytail.log.writer import Appends

_REBUILD_ERRORS = {
    block_kernels.NEGATIVE_TIMESTAMP: "a retained record has a timestamp below -1",
    block_kernels.PRODUCER_FIELDS_INVALID: "a batch to rebuild has a producer id without an epoch or a sequence",
}


@dataclass
class RowDecisions:
    """The decisions about the batches of one chunk; every array has one item per row of the chunk's table."""

    decided_by: np.ndarray
    first_bit: np.ndarray
    first_ordinal: np.ndarray
    retain_empty: np.ndarray
    marker_horizon: np.ndarray  # the batch is a marker without data, and gets a horizon
    tombstones_expired: np.ndarray  # the retention of the batch's tombstones has expired
    action: np.ndarray
    kept: np.ndarray
    kept_nulls: np.ndarray


class Rewriter:
    """Rewrites segments of a task by the results of the map phase, with the same `now_ms` for the whole round.

    From `first_dirty_offset` on, bits decide. In files that are not newer than `file_horizon_ms`, tombstones that are
    removed by the time of their file are due.
    """

    def __init__(
        self,
        task: CleaningTask,
        reader: SegmentReader,
        survivors: Survivors,
        transactions: Transactions,
        producers: ActiveProducers,
        *,
        first_dirty_offset: int,
        file_horizon_ms: int,
    ) -> None:
        self._reader, self._scanner = reader, RecordScanner()
        self._survivors = survivors
        self._transactions, self._producers = transactions, producers
        self._facts = np.zeros(row_kernels.FACTS, np.int64)
        self._facts[row_kernels.LATEST_OFFSET] = survivors.latest_offset
        self._facts[row_kernels.FIRST_DIRTY] = first_dirty_offset
        self._facts[row_kernels.FIRST_UNCLEANABLE] = task.first_uncleanable_offset
        self._facts[row_kernels.NOW_MS] = task.now_ms
        self._facts[row_kernels.REMOVAL_LIMIT] = task.removal_limit_offset
        self._facts[row_kernels.BY_FILE_TIME] = task.by_file_time
        # The map may treat committed data as aborted, and then does not contain its keys. An unset bit is then
        # inconclusive, and the key is looked up in the map (CLEANING.md, "Aborted data and the map").
        self._facts[row_kernels.ASK_MAP] = survivors.starts_inside_segment
        self._seed = task.hash_seed
        self._file_horizon_ms = file_horizon_ms
        self._max_message_bytes = task.config.max_message_bytes
        self._message_format = task.message_format
        self._keep_magic = task.message_format == "keep"
        self._by_file_time = task.by_file_time
        # If the time overflows, no horizon is set, and the batch is rebuilt in every round, as in Kafka.
        horizon = task.now_ms + task.config.delete_retention_ms
        self._horizon_ms = horizon if horizon < 2**63 and not task.by_file_time else -1
        self._blocks = np.empty(1 << 20, np.uint8)
        self._target = np.empty(1 << 20, np.uint8)
        self._new_table = np.empty(1 << 10, BATCH_TABLE)
        self._rebuilt = np.empty(1 << 10, block_kernels.REBUILT)
        self._counters = np.zeros(4, np.int64)
        self.counts = Counts()
        # The counts of source segments, by number; those of a segment that is rewritten again replace the old ones.
        self.sources: dict[int, SourceCounts] = {}
        # Called with the number of the segment and the byte position after each chunk.
        self.on_rewritten: Callable[[int, int], object] = lambda *_: None

    def rewrite(self, partition_path: str, segment: SegmentFacts, number: int, writer: Appends) -> None:
        """Append to `writer` the survivors of segment `number` of the partition."""
        self.sources[number] = SourceCounts(number, 0, 0)
        path = os.path.join(partition_path, names.segment_file(segment.base_offset, names.LOG))
        self._rewrite_chunks(self._reader.chunks(path, segment.log_bytes), segment, (number, 0, 0), writer)

    def rewrite_span(self, partition_path: str, segment: SegmentFacts, span: Span, writer: Appends) -> None:
        """Append to `writer` the survivors of `span`, a part of a segment; the counts of the rewriter are then those of
        the part."""
        number, start, end, records, batches = span
        self._counters[:] = 0
        self.counts, self.sources = Counts(), {number: SourceCounts(number, 0, 0)}
        path = os.path.join(partition_path, names.segment_file(segment.base_offset, names.LOG))
        chunks = self._reader.chunks_without_prefetch(path, end, start=start)
        self._rewrite_chunks(chunks, segment, (number, records, batches), writer)

    def _rewrite_chunks(
        self, chunks: Iterable[Chunk], segment: SegmentFacts, before: tuple[int, int, int], writer: Appends
    ) -> None:
        """Rewrite consecutive chunks of a segment. `before` has the number of the segment, and the numbers of records
        and of batches before the chunks."""
        number, first_record, batches = before
        records = first_record
        for chunk in chunks:
            refuse_unsupported(chunk)
            if self._message_format == "unknown":
                refuse_old(chunk)
            self.rewrite_chunk(chunk, number, records, batches, self.is_old(segment), writer)
            records += int(chunk.table["record_count"].sum())
            batches += len(chunk.table)
            self.on_rewritten(number, chunk.position + len(chunk.raw))
        self.sources[number] = self.sources[number]._replace(records=records - first_record)
        self.counts.records_read += records - first_record
        self.take_counts()

    def close(self) -> None:
        """Do nothing: a Rewriter has no threads."""

    def take_counts(self) -> None:
        """Set the counts of opened records in `counts`."""
        self.counts.tombstones_removed = int(self._counters[record_kernels.TOMBSTONES_EXPIRED])
        self.counts.keyless = int(self._counters[record_kernels.KEYLESS])
        self.counts.first_keyless_offset = int(self._counters[record_kernels.FIRST_KEYLESS])

    def is_old(self, segment: SegmentFacts) -> bool:
        """Return whether tombstones that are removed by the time of their file are due for removal."""
        return segment.log_mtime_ns // 1_000_000 <= self._file_horizon_ms

    def rewrite_chunk(
        self, chunk: Chunk, number: int, records: int, batches: int, file_is_old: bool, writer: Appends
    ) -> None:
        """Append the survivors of a chunk of segment `number`; `records` and `batches` are the numbers of records and
        batches that precede the chunk in the segment."""
        rows = self._decide_rows(chunk, number, records, batches, file_is_old)
        found = FoundInPieces()
        for opened in self._reader.open_rows(chunk, rows.action == record_kernels.OPEN):
            for portion in self._scanner.portions(chunk, opened, self._survivors.bits, rows.first_bit):
                if opened.is_piece:
                    found = self._found_in_pieces(found, portion, rows)
                    if not opened.is_end:
                        continue
                    self._decide_batches(chunk, slice(opened.first, opened.end), rows)
                    rebuilt, packed = self._rebuilt_of_pieces(chunk, opened, found, rows)
                else:
                    self._decide_portion(portion, rows)
                    rebuilt, packed = self._rebuild(portion, rows)
                self._append(chunk, (portion.first_row, portion.end_row), rows, rebuilt, packed, number, writer)

    def _decide_rows(self, chunk: Chunk, number: int, records: int, batches: int, file_is_old: bool) -> RowDecisions:
        """Return the decisions about the rows, as far as they are possible without opening batches. `records` and
        `batches` are the numbers of records and batches that precede the chunk in the segment.
        """
        table, known, facts = chunk.table, self._survivors, self._facts
        n, k = len(table), number - known.first_segment
        facts[row_kernels.SEGMENT], facts[row_kernels.RECORDS] = number, records
        facts[row_kernels.RECORD_BIT] = -1
        if 0 <= k < len(known.record_start):
            facts[row_kernels.RECORD_BIT] = known.record_start[k]
            facts[row_kernels.BATCH_BIT] = known.batch_start[k] + batches
        facts[row_kernels.FILE_IS_OLD] = file_is_old
        unneeded = self._transactions.unneeded_markers(table)
        rows = RowDecisions(
            decided_by=np.empty(n, np.int8),
            first_bit=np.empty(n, np.int64),
            first_ordinal=np.empty(n, np.int64),
            retain_empty=np.empty(n, bool),
            marker_horizon=unneeded,
            tombstones_expired=np.empty(n, bool),
            action=np.empty(n, np.int8),
            kept=np.zeros(n, np.int64),
            kept_nulls=np.zeros(n, np.int64),
        )
        self.counts.markers_removed += row_kernels.decide_rows(
            table, facts, known.bits, known.null_bits, self._producers.ends_a_producer(table), unneeded,
            self._transactions.aborted(table), rows.decided_by, rows.first_bit, rows.first_ordinal,
            rows.retain_empty, rows.tombstones_expired, rows.action,
        )  # fmt: skip
        return rows

    def _decide_portion(self, portion: Portion, rows: RowDecisions) -> None:
        """Decide about each record of the portion's opened rows, and then about the rows."""
        if len(portion.records):
            self._decide_records(portion, rows, self._counters)
            self._decide_batches(portion.chunk, slice(portion.first_row, portion.end_row), rows)

    def _decide_records(self, portion: Portion, rows: RowDecisions, counters: np.ndarray) -> None:
        n = len(portion.records)
        if (rows.decided_by[portion.first_row : portion.end_row] == record_kernels.BY_MAP).any():
            portion.hash_keys(self._seed)
            self._survivors.offset_map.get_all(
                portion.columns.low, portion.columns.high, portion.records["key_bytes"], n, portion.columns.found
            )
        record_kernels.decide_records(
            portion.records, n, rows.decided_by, portion.opened.from_here(rows.first_ordinal), portion.columns.found,
            self._survivors.latest_offset, rows.tombstones_expired, portion.columns.keep, rows.kept, rows.kept_nulls,
            counters,
        )  # fmt: skip

    def _decide_batches(self, chunk: Chunk, part: slice, rows: RowDecisions) -> None:
        """Decide about the opened rows of `part`, now that the number of retained records is known."""
        table = chunk.table[part]
        opened = rows.action[part] == record_kernels.OPEN
        kept = rows.kept[part]
        has_horizon = (table["attributes"] & DELETE_HORIZON) != 0
        # A marker without data is one more reason for a horizon when the batch is built.
        rows.kept_nulls[part] += rows.marker_horizon[part]
        needs_horizon = (rows.kept_nulls[part] > 0) & ~has_horizon & (not self._by_file_time)
        whole = (kept == table["record_count"]) & ~needs_horizon
        old = table["magic"] < 2
        if self._keep_magic:
            whole |= old & (kept == table["record_count"])
            whole &= ~old | ((table["attributes"] & NOT_COPIED) == 0)
        else:
            whole &= ~old
        decided = np.where(whole, record_kernels.COPY, record_kernels.REBUILD)
        empty = np.where(rows.retain_empty[part], record_kernels.EMPTY, record_kernels.DROP)
        decided = np.where(kept == 0, empty, decided)
        rows.action[part] = np.where(opened, decided, rows.action[part])

    def _found_in_pieces(self, found: FoundInPieces, portion: Portion, rows: RowDecisions) -> FoundInPieces:
        """Return what is retained of a batch up to and including this piece, and set the counts in `rows`."""
        row = portion.first_row
        if not portion.opened.records_before:
            found = FoundInPieces()
        rows.kept[row] = rows.kept_nulls[row] = 0
        self._decide_records(portion, rows, self._counters)
        found = found.and_more(portion.records, portion.columns.keep, int(rows.kept[row]), int(rows.kept_nulls[row]))
        rows.kept[row], rows.kept_nulls[row] = found.kept, found.kept_nulls
        return found

    def _rebuilt_of_pieces(
        self, chunk: Chunk, opened: OpenedRows, found: FoundInPieces, rows: RowDecisions
    ) -> tuple[np.ndarray, np.ndarray]:
        """Do the same as `_rebuild` for one batch in pieces: open it again, now that its retained records are known."""
        row = opened.first
        if rows.action[row] != record_kernels.REBUILD:
            return self._rebuilt[:0], np.empty(0, np.uint8)
        kept, kept_nulls = int(rows.kept[row]), int(rows.kept_nulls[row])
        block = BlockInPieces(chunk, row)
        for piece in self._reader.reopen(chunk, opened):
            for portion in self._scanner.portions(chunk, piece, self._survivors.bits, rows.first_bit):
                self._decide_records(portion, rows, np.zeros_like(self._counters))  # the records are counted already
                rows.kept[row], rows.kept_nulls[row] = kept, kept_nulls
                if portion.columns.keep[: len(portion.records)].any():
                    block.add(*self._build_blocks(portion, rows, 1, found.first_timestamp_ms))
        rebuilt, packed = block.finish()
        self.counts.large_batches += int(rebuilt["block_bytes"][0] > self._max_message_bytes - HEADER_BYTES)
        return rebuilt, packed

    def _append(
        self,
        chunk: Chunk,
        part: tuple[int, int],
        rows: RowDecisions,
        rebuilt: np.ndarray,
        packed: np.ndarray,
        number: int,
        writer: Appends,
    ) -> None:
        """Assemble and append the surviving batches of rows `part` of the chunk."""
        first, end = part
        self._settle_emptied_old(chunk, first, end, rows)
        n_bytes = assembly_kernels.assembled_bytes(chunk.table, rows.action, first, end, rebuilt, len(rebuilt))
        if n_bytes == 0:
            return
        if len(self._target) < n_bytes:
            self._target = np.empty(n_bytes + n_bytes // 4, np.uint8)
        if len(self._new_table) < end - first:
            self._new_table = np.empty(end - first, BATCH_TABLE)
        done, n_rows = assembly_kernels.assemble(
            chunk.raw, chunk.position, chunk.table, rows.action, first, end, self._blocks, packed, rebuilt,
            self._target, 0, 0, self._new_table,
        )  # fmt: skip
        writer.append(self._target[:done], self._new_table[:n_rows])
        self.sources[number] = self.sources[number].and_written(self._new_table[:n_rows])

    def _settle_emptied_old(self, chunk: Chunk, first: int, end: int, rows: RowDecisions) -> None:
        """Drop emptied batches of magic 0 and 1 if their magic is kept (LEGACY.md 5).

        If the magic is not kept, raise Refused for such a batch, because it cannot be written without a record.
        """
        emptied = (rows.action[first:end] == record_kernels.EMPTY) & (chunk.table["magic"][first:end] < 2)
        if self._keep_magic:
            rows.action[first:end][emptied] = record_kernels.DROP
        elif emptied.any():
            row = chunk.table[first + int(np.argmax(emptied))]
            raise Refused(
                "the last batch of the cleaned range has magic 0 or 1 and would lose all its records: only newer "
                "batches can be empty",
                path=chunk.path,
                byte_position=int(row["position"]),
                offset=int(row["base_offset"]),
                remedy="Compact the partition after more has been written to it; Kafka's cleaner fails here too",
                slug="emptied-last-old-batch",
            )

    def _rebuild(self, portion: Portion, rows: RowDecisions) -> tuple[np.ndarray, np.ndarray]:
        """Return the rebuilt record blocks of the portion (REBUILT rows), and the arena of the compressed ones."""
        packed = np.empty(0, np.uint8)
        n_rebuilt = int(np.count_nonzero(rows.action[portion.first_row : portion.end_row] == record_kernels.REBUILD))
        if n_rebuilt == 0:
            return self._rebuilt[:0], packed
        rebuilt, _ = self._build_blocks(portion, rows, n_rebuilt)
        compressed = np.flatnonzero(rebuilt["attributes"] & CODEC_MASK)
        if len(compressed):
            packed = self._compress(rebuilt, compressed)
        large = rebuilt["block_bytes"] > self._max_message_bytes - HEADER_BYTES
        self.counts.large_batches += int(np.count_nonzero(large))
        return rebuilt, packed

    def _build_blocks(
        self, portion: Portion, rows: RowDecisions, n_rebuilt: int, first_ms: int = block_kernels.NOT_EARLIER
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the REBUILT rows of the portion, and the bytes of their uncompressed blocks."""
        n, table = len(portion.records), portion.chunk.table
        needed = int(portion.records["body_bytes"].sum(dtype=np.int64)) + block_kernels.MAX_GROWTH_BYTES * n
        if len(self._blocks) < needed:
            self._blocks = np.empty(needed + needed // 4, np.uint8)
        if len(self._rebuilt) < n_rebuilt:
            self._rebuilt = np.empty(n_rebuilt, block_kernels.REBUILT)
        out = np.zeros(4, np.int64)
        block_kernels.rebuild_blocks(
            portion.chunk.raw, portion.opened.arena, portion.opened.where, portion.records, n, portion.columns.keep,
            table,
            rows.action, rows.kept, rows.kept_nulls, self._horizon_ms, first_ms, self._keep_magic, self._by_file_time,
            self._blocks, 0, self._rebuilt, out,
        )  # fmt: skip
        if out[2] != block_kernels.OK:
            row = table[out[3]]
            raise CorruptLog(
                _REBUILD_ERRORS[int(out[2])],
                path=portion.chunk.path,
                byte_position=int(row["position"]),
                offset=int(row["base_offset"]),
                remedy=CORRUPT_REMEDY,
                slug="invalid-batch-fields",
            )
        return self._rebuilt[:n_rebuilt], self._blocks[: out[1]]

    def _compress(self, rebuilt: np.ndarray, which: np.ndarray) -> np.ndarray:
        """Compress the blocks `which` with their batch's codec, at its default level; return their arena."""
        view = memoryview(self._blocks)
        starts, codecs = rebuilt["block_start"][which], rebuilt["attributes"][which] & CODEC_MASK
        ends = starts + rebuilt["block_bytes"][which]
        parts = [
            compress(codec, view[start:end])
            for codec, start, end in zip(codecs.tolist(), starts.tolist(), ends.tolist(), strict=True)
        ]
        for i in np.flatnonzero((rebuilt["magic"][which] == 0) & (codecs == LZ4)):
            parts[i] = with_old_lz4_checksum(parts[i])
        sizes = np.array([len(part) for part in parts], np.int64)
        rebuilt["block_start"][which], rebuilt["block_bytes"][which] = np.cumsum(sizes) - sizes, sizes
        rebuilt["where"][which] = 1
        return np.frombuffer(bytearray().join(parts), np.uint8)


def refuse_old(chunk: Chunk) -> None:
    """Raise Refused for a message of magic 0 or 1: old clients might not be able to read it as version 2."""
    old = np.flatnonzero(chunk.table["magic"] < 2)
    if len(old):
        row = chunk.table[old[0]]
        raise Refused(
            f"a message of magic {row['magic']} is to be compacted, but the message format of the topic is unknown: "
            "clients before 0.11 cannot read version 2 from a topic with an older format",
            path=chunk.path,
            byte_position=int(row["position"]),
            offset=int(row["base_offset"]),
            remedy="Give the broker's file with --config, or --topic-config TOPIC:message.format.version=VERSION; or "
            "choose: --message-format keep is safe with every broker, --message-format v2 if all are 3.0 or later",
            slug="unknown-message-format",
        )
