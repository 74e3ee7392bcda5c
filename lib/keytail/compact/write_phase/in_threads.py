"""The write phase in several threads: chunks are decided, rebuilt and compressed side by side, and appended in order.

Everything that a decision depends on is known before the write phase: the survivors, the transactions, the producers,
and, since the log was read for the map, where each chunk is and how many records precede it. Only the writer, which
divides the output into segments, needs the order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import numpy as np

from keytail.compact.map_phase.survivors import Span
from keytail.compact.task import CleaningTask, SourceCounts
from keytail.compact.write_phase.counts import Counts
from keytail.compact.write_phase.rewrite import Rewriter
from keytail.log.partition import SegmentFacts
from keytail.log.side_by_side import side_by_side
from keytail.log.writer import Appends


@dataclass
class _Rewritten:
    """The surviving batches of a span, in the order in which they are appended, and the counts of the span. An item
    without `source` ends a segment."""

    number: int
    parts: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    source: SourceCounts | None = None

    def append(self, data: np.ndarray, table: np.ndarray) -> None:
        """Keep a copy of the batches: the rewriter reuses the arrays."""
        self.parts.append((data.copy(), table.copy()))


class RewriterInThreads:
    """Rewrites segments as a Rewriter does, in one thread for each of `rewriters`, which have readers of their own.

    Segments must be rewritten in ascending order, each once. Segments below number `end` are read ahead, in the `spans`
    of the map phase. The caller must call `close` at the end.
    """

    def __init__(
        self, task: CleaningTask, rewriters: Sequence[Rewriter], spans: Sequence[Span], end: int
    ) -> None:
        self._task, self._spans, self._end = task, spans, end
        self._threads, self._idle = len(rewriters), list(rewriters)
        self._coming: Generator[_Rewritten, None, None] | None = None
        self.counts = Counts()
        self.sources: dict[int, SourceCounts] = {}

    def rewrite(self, partition_path: str, segment: SegmentFacts, number: int, writer: Appends) -> None:
        """Append to `writer` the survivors of segment `number` of the partition."""
        if self._coming is None:
            self._coming = side_by_side(self._items(number), self._rewrite, self._threads)
        self.sources[number] = SourceCounts(number, 0, 0)
        for done in self._coming:
            assert done.number == number, "segments are rewritten in order"
            if done.source is None:
                return
            for data, table in done.parts:
                writer.append(data, table)
            self.counts = self.counts.and_more(done.counts)
            self.sources[number] = self.sources[number].and_more(done.source)

    def close(self) -> None:
        """End all threads."""
        if self._coming is not None:
            self._coming.close()

    def _items(self, first: int) -> Generator[Span, None, None]:
        """Yield the spans of each segment from number `first` on, and an empty span at the end of each segment."""
        at = bisect_left(self._spans, first, key=lambda span: span[0])
        for number in range(first, self._end):
            while at < len(self._spans) and self._spans[at][0] == number:
                yield self._spans[at]
                at += 1
            yield number, 0, 0, 0, 0

    def _rewrite(self, span: Span) -> _Rewritten:
        """Rewrite a span in a thread; return its surviving batches and counts."""
        number, start, end, *_ = span
        done = _Rewritten(number)
        if start == end:
            return done
        rewriter = self._idle.pop()
        try:
            segment = self._task.segments[number]
            rewriter.rewrite_span(self._task.partition_path, segment, span, done)
            done.counts, done.source = rewriter.counts, rewriter.sources[number]
        finally:
            self._idle.append(rewriter)
        return done
