"""The write phase in several threads: chunks are decided, rebuilt and compressed side by side, and appended in order.

What a decision depends on is known before: the survivors, the transactions, the producers, and the number of records
before a chunk in its segment. Only the writer, which divides the output into segments, needs the order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

import numpy as np

from keytail.compact.task import CleaningTask, SourceCounts
from keytail.compact.write_phase.counts import Counts
from keytail.compact.write_phase.rewrite import Rewriter
from keytail.format import names
from keytail.log.chunk import Chunk, SegmentReader
from keytail.log.partition import SegmentFacts
from keytail.log.side_by_side import items_in_flight, side_by_side
from keytail.log.writer import Appends


@dataclass(frozen=True)
class _Item:
    """A chunk of segment `number`, in which `records` and `batches` precede it. Without a chunk, the segment ends."""

    number: int
    records: int
    batches: int = 0
    chunk: Chunk | None = None


@dataclass
class _Rewritten:
    """What remains of an item, in the order to be appended, and its counts."""

    item: _Item
    parts: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    source: SourceCounts | None = None

    def append(self, data: np.ndarray, table: np.ndarray) -> None:
        """Keep a copy of the batches: the rewriter reuses the arrays."""
        self.parts.append((data.copy(), table.copy()))


class RewriterInThreads:
    """Rewrites segments as a Rewriter does, with one Rewriter for each of the task's threads.

    Segments must be rewritten in ascending order, each once. They are read ahead of the one that is rewritten, up to
    before segment `end`. Close it at the end.
    """

    def __init__(
        self, task: CleaningTask, reader: SegmentReader, new_rewriter: Callable[[], Rewriter], end: int
    ) -> None:
        self._task, self._reader, self._end = task, reader, end
        reader.use_in_threads(items_in_flight(task.threads))
        self._idle = [new_rewriter() for _ in range(task.threads)]
        self._coming: Generator[_Rewritten, None, None] | None = None
        self.counts = Counts()
        self.sources: dict[int, SourceCounts] = {}

    def rewrite(self, partition_path: str, segment: SegmentFacts, number: int, writer: Appends) -> None:
        """Append to `writer` the survivors of segment `number` of the partition."""
        if self._coming is None:
            self._coming = side_by_side(self._items(number), self._rewrite, self._task.threads)
        self.sources[number] = SourceCounts(number, 0, 0)
        for done in self._coming:
            assert done.item.number == number, "segments are rewritten in order"
            if done.source is None:
                self.sources[number] = self.sources[number]._replace(records=done.item.records)
                self.counts.records_read += done.item.records
                return
            for data, table in done.parts:
                writer.append(data, table)
            self.counts = self.counts.and_more(done.counts)
            self.sources[number] = self.sources[number].and_more(done.source)

    def close(self) -> None:
        """End all threads."""
        if self._coming is not None:
            self._coming.close()

    def _items(self, first: int) -> Generator[_Item, None, None]:
        for number in range(first, self._end):
            segment = self._task.segments[number]
            path = os.path.join(self._task.partition_path, names.segment_file(segment.base_offset, names.LOG))
            records = batches = 0
            for chunk in self._reader.chunks_without_prefetch(path, segment.log_bytes):
                yield _Item(number, records, batches, chunk)
                records += int(chunk.table["record_count"].sum())
                batches += len(chunk.table)
            yield _Item(number, records)

    def _rewrite(self, item: _Item) -> _Rewritten:
        """Rewrite a chunk, in a thread."""
        done = _Rewritten(item)
        if item.chunk is None:
            return done
        rewriter = self._idle.pop()
        try:
            rewriter.refuse(item.chunk)
            rewriter.start_counts(item.number)
            segment = self._task.segments[item.number]
            rewriter.rewrite_chunk(
                item.chunk, item.number, item.records, item.batches, rewriter.is_old(segment), done
            )
            rewriter.take_counts()
            done.counts, done.source = rewriter.counts, rewriter.sources[item.number]
        finally:
            self._idle.append(rewriter)
        return done
