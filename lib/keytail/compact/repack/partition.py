"""Repacks one partition: replaces each segment in which a batch changes by one or more new ones, and proves these.

`repack_partition` writes only scratch files, may run on any host that has access to the directory, and may be repeated.
The driver installs the new segments in the same way as those of a compaction.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from operator import attrgetter

import numpy as np

from keytail.compact.cleaner import check_sources
from keytail.compact.map_phase.reading import PhaseClock
from keytail.compact.plan import segments_between
from keytail.compact.repack.merger import Merger
from keytail.compact.repack.producers import HeaderPass, ProducersOfLog, live_ids
from keytail.compact.repack.proof import RepackSpec, prove_repack, read_txn_index
from keytail.compact.repack.task import RepackState, RepackTask, output_segment_bytes
from keytail.compact.task import CleaningResult, SourceCounts, Totals, result_of
from keytail.compact.write_phase.counts import Counts
from keytail.compact.write_phase.passes import source_bytes
from keytail.format import names
from keytail.format.index import TXN_ENTRY, parse_txn_index
from keytail.log.fs import FileSystem
from keytail.log.producers import load_producers
from keytail.log.records.chunk import Chunk, SegmentReader, check_ends_below
from keytail.log.replacement.replace import GroupOutput
from keytail.log.writer import Limits, OutputWriter, Source

_FOREVER_MS = 2**63 - 1
_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True)
class RepackResult(CleaningResult):
    """The result of a repack: also has the numbers of batches in the segments of all passes so far, before and
    after."""

    batches_before: int = 0
    batches_after: int = 0


def repack_partition(fs: FileSystem, task: RepackTask) -> RepackResult:
    """Write and prove the replacements of the segments in which a batch changes, in one pass; return its result.

    Only segments below `first_uncleanable_offset` are changed; of other segments, at most batch headers matter.
    Segments without a change have no group in the result. On any error, all scratch files of this attempt are removed.
    Raises CorruptLog, Refused or KeytailError. Memory: less than 512 MiB for segments of any size.
    """
    clock = PhaseClock()
    check_sources(fs, task)
    reader = SegmentReader(fs)
    _, end = segments_between(task.segments, 0, task.first_uncleanable_offset)
    state = task.saved_state if isinstance(task.saved_state, RepackState) else None
    with clock.phase("check"):
        live = np.empty(0, np.int64) if state else _live_producers(fs, task, reader)
        producers = state.producers if state and state.producers else producers_of_log(task, reader, live, end)
    writer = _writer(fs, task)
    try:
        with clock.phase("write"):
            written = _Written(task, writer, reader.another())
            merger = Merger(
                reader, task.repacking, task.config.max_message_bytes, producers.kept, producers.forgotten
            )
            stop = task.first_segment
            while stop < end and written.has_room_for(stop):
                written.begin(stop)
                with contextlib.closing(_chunks(task, reader, stop)) as chunks:
                    merger.repack(written.counted(chunks), written)
                written.end()
                stop += 1
            groups = writer.finish(task.end_of(written.numbers[-1]) if written.numbers else 0)
        with clock.phase("prove"):
            report = prove_repack(fs, _spec(task, groups, live, producers.forgotten.ids, state))
    except BaseException:  # scratch files are removed after every kind of error
        writer.discard()
        raise
    result = replace(_result(task, written, writer, groups, stop, end), phases_s=clock.seconds)
    if isinstance(result.rest, RepackState):
        result = replace(result, rest=replace(result.rest, producers=producers, proven=report.producers))
    return result


def _live_producers(fs: FileSystem, task: RepackTask, reader: SegmentReader) -> np.ndarray:
    """Return the ids (int64, sorted) of the producers whose last batches must not be changed: all producers that a
    broker may know or, if expired producers are forgotten, all that have not expired.

    If only batches without a producer are changed, the ids are not needed, and the result is empty.
    """
    if task.repacking.codec is None and task.expired_before_ms is None:
        return np.empty(0, np.int64)
    found = load_producers(fs, reader, task.partition_path, task, expiration_ms=_FOREVER_MS, now_ms=task.now_ms)
    return live_ids(found, task.expired_before_ms)


def producers_of_log(task: RepackTask, reader: SegmentReader, live: np.ndarray, end: int) -> ProducersOfLog:
    """Return what the batch headers of the whole log show about producers; empty if no producer matters. Segments
    before number `end` are repacked; `live` are the ids (int64, sorted) of the producers whose last batches must not be
    changed."""
    headers = HeaderPass(live, task.expired_before_ms)
    if len(live) or task.expired_before_ms is not None:
        for number in range(len(task.segments)):
            for chunk in _chunks(task, reader, number):
                headers.add(chunk.table, is_in_section=number < end)
    return headers.finish()


def _chunks(task: RepackTask, reader: SegmentReader, number: int) -> Generator[Chunk, None, None]:
    segment, is_last = task.segments[number], number + 1 == len(task.segments)
    next_base = None if is_last else task.segments[number + 1].base_offset
    torn_tail = is_last and not task.clean_shutdown
    for chunk in reader.chunks(task.path(segment.base_offset, names.LOG), segment.log_bytes, torn_tail=torn_tail):
        check_ends_below(chunk, next_base)
        yield chunk


def _writer(fs: FileSystem, task: RepackTask) -> OutputWriter:
    config = task.config
    limits = Limits(output_segment_bytes(task), config.segment_index_bytes, config.index_interval_bytes)
    return OutputWriter(
        fs, task.partition_path, task.run_id, task.attempt, limits, partial(_txn_index, fs, task),
        scratch_path=task.scratch_path, like_of=partial(task.like, fs),
    )  # fmt: skip


def _txn_index(fs: FileSystem, task: RepackTask, base: int, next_base: int) -> bytes:
    """Return the transaction index of the output with the offsets from `base` to before `next_base`: those entries of
    the source's index whose last offset is in this range."""
    number = bisect_right(task.segments, base, key=attrgetter("base_offset")) - 1
    segment = task.segments[number]
    if not segment.txn_index_bytes:
        return b""
    data = read_txn_index(fs, task.path(segment.base_offset, names.TXN_INDEX), segment)
    if base == segment.base_offset and next_base >= task.end_of(number):
        return data
    last_offsets = parse_txn_index(data)["last_offset"]
    entries = np.frombuffer(data, TXN_ENTRY, len(last_offsets))
    return entries[(base <= last_offsets) & (last_offsets < next_base)].tobytes()


@dataclass
class _Written:
    """Appends the repacked batches of segments to a writer. The output of a segment is created at the first changed
    batch, and begins with a copy of the unchanged batches before it.
    """

    task: RepackTask
    writer: OutputWriter
    copier: SegmentReader  # reads the batches before the first changed batch
    batches_before: int = 0
    batches_after: int = 0
    numbers: list[int] = field(default_factory=list)  # numbers of the changed segments
    sources: list[SourceCounts] = field(default_factory=list)
    _number: int = 0
    _has_output: bool = False
    _unchanged_bytes: int = 0  # bytes of the segment before its first changed batch
    _parts: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    _bytes: int = 0  # total bytes in `_parts`

    def has_room_for(self, number: int) -> bool:
        """Return whether this pass may also write segment `number`: always before the first changed segment, later only
        if the scratch space suffices."""
        limit = self.task.max_scratch_bytes
        if limit is None or not self.numbers:
            return True
        return self.writer.scratch_bytes + source_bytes(self.task.segments[number]) <= limit

    def begin(self, number: int) -> None:
        self._number, self._has_output, self._unchanged_bytes = number, False, 0
        self.sources.append(SourceCounts(number, 0, 0))

    def counted(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """Yield the chunks of the segment, and count their records and batches."""
        for chunk in chunks:
            records = int(chunk.table["record_count"].sum(dtype=np.int64))
            self.sources[-1] = self.sources[-1].and_more(SourceCounts(self._number, records, records))
            self.batches_before += len(chunk.table)
            yield chunk

    def unchanged(self, data: np.ndarray, table: np.ndarray) -> None:
        self.batches_after += len(table)
        if self._has_output:
            self._put(data, table)
        else:
            self._unchanged_bytes += len(data)

    def changed(self, data: np.ndarray, table: np.ndarray) -> None:
        self.batches_after += len(table)
        if not self._has_output:
            self._begin_output()
        self._put(data, table)

    def end(self) -> None:
        self._flush()

    def _begin_output(self) -> None:
        self._has_output = True
        self.numbers.append(self._number)
        segment = self.task.segments[self._number]
        self.writer.start_output(Source(segment.base_offset, segment.log_mtime_ns // 1_000_000))
        path = self.task.path(segment.base_offset, names.LOG)
        with contextlib.closing(self.copier.chunks_without_prefetch(path, self._unchanged_bytes)) as chunks:
            for chunk in chunks:
                self.writer.append(chunk.raw, chunk.table)

    def _put(self, data: np.ndarray, table: np.ndarray) -> None:
        """Add the batches to a buffer, which is written when it is full: many small writes would take longer than the
        repacking itself."""
        if self._bytes + len(data) > _BUFFER_BYTES:
            self._flush()
        if len(data) > _BUFFER_BYTES:
            self.writer.append(data, table)
        else:
            self._parts.append((data.copy(), table))
            self._bytes += len(data)

    def _flush(self) -> None:
        if self._parts:
            data, tables = zip(*self._parts, strict=True)
            self._parts, self._bytes = [], 0
            self.writer.append(np.concatenate(data), np.concatenate(tables))


def _result(
    task: RepackTask, written: _Written, writer: OutputWriter, groups: tuple[GroupOutput, ...], stop: int, end: int
) -> RepackResult:
    """Return the result of a pass that has read the segments before number `stop`. If `stop` is below `end`, the result
    has the state for the next pass."""
    state = task.saved_state
    before = state if isinstance(state, RepackState) else RepackState.at(task.first_segment, Totals())
    same = [task.segments[source.segment] for source in written.sources if source.segment not in written.numbers]
    records = sum(source.records for source in written.sources)
    counts = Counts(records_read=records)
    log_bytes = writer.size_bytes + sum(segment.log_bytes for segment in same)
    totals = before.totals.and_written(groups, counts, log_bytes, records, writer.splits)
    totals = replace(totals, segments=totals.segments + len(same))
    batches = {
        "batches_before": before.batches_before + written.batches_before,
        "batches_after": before.batches_after + written.batches_after,
    }
    found = result_of(task, task.first_uncleanable_offset, stop, groups, totals, 0)
    values = {item.name: getattr(found, item.name) for item in fields(found)} | batches
    values["rest"] = RepackState.at(stop, totals, **batches) if stop < end else None
    return RepackResult(**{**values, "sources": tuple(written.sources)})


def _spec(
    task: RepackTask,
    groups: Sequence[GroupOutput],
    live: np.ndarray,
    forgotten: np.ndarray,
    state: RepackState | None,
) -> RepackSpec:
    repacking, config = task.repacking, task.config
    return RepackSpec(
        task.partition_path,
        task.segments,
        groups,
        task.log_end_offset,
        max_block_bytes=repacking.block_bytes(config.max_message_bytes) if repacking.merges else -1,
        max_batch_bytes=config.max_message_bytes,
        codec=repacking.codec,
        producer_ids=live,
        forgotten_ids=forgotten,
        expired_before_ms=task.expired_before_ms,
        end_offset=task.first_uncleanable_offset,
        index_interval_bytes=config.index_interval_bytes,
        segment_index_bytes=config.segment_index_bytes,
        scratch_path=task.scratch_path,
        proven=state.proven if state else None,
    )
