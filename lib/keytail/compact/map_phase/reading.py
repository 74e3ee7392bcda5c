"""Reads every batch of the log in order: builds the map of the dirty section and follows the transactions."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np

from keytail.compact.map_phase.in_threads import BuilderInThreads
from keytail.compact.map_phase.offset_map import OffsetMap
from keytail.compact.map_phase.survivors import Span, SurvivorBuilder, Survivors, TransactionTrackers, span_of
from keytail.compact.plan import segments_between
from keytail.compact.producers import ActiveProducers
from keytail.compact.proof.keys import most_keys
from keytail.compact.task import CleaningTask, NeedsFanOut
from keytail.errors import CorruptLog, Refused
from keytail.format import names
from keytail.format.index import parse_offset_index
from keytail.log import meter
from keytail.log.fs import FileSystem
from keytail.log.partition import SegmentFacts
from keytail.log.producers import load_producers
from keytail.log.records.chunk import CORRUPT_REMEDY, Chunk, SegmentReader, check_ends_below, refuse_unsupported
from keytail.log.records.key_scan import KeyScanner
from keytail.log.transactions import Contradiction, Transactions, TransactionTracker, read_aborted

T = TypeVar("T")


class PhaseClock:
    """Seconds spent in each phase of a task, not counting the phases within it. The meter of the task reports the
    outermost phase, so that the progress that is shown does not alternate between phases."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._depth = 0
        self._within_s = 0.0  # seconds of the phases that have ended within the current one

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start, before = time.perf_counter(), self._within_s
        self.seconds.setdefault(name, 0.0)  # phases are shown in the order in which they began
        self._within_s = 0.0
        self._depth += 1
        try:
            with meter.during(name) if self._depth == 1 else contextlib.nullcontext():
                yield
        finally:
            self._depth -= 1
            took = time.perf_counter() - start
            self.seconds[name] += took - self._within_s
            self._within_s = before + took


def read_log(
    fs: FileSystem,
    task: CleaningTask,
    reader: SegmentReader,
    clock: PhaseClock,
) -> tuple[Survivors, Transactions, int]:
    """Read every batch of the log once, in order; return the survivors of the dirty section, the outcome of
    transactions, and the number of records in the segments above those that were read for the map. Raises NeedsFanOut
    with `fan_out` "auto" if the keys do not fit into the memory of the map or of the proof.

    The transaction indexes are trusted until the log contradicts them; then the log is read again, with the correct
    entries.
    """
    return with_aborted(fs, task, lambda aborted: _follow_log(fs, task, reader, aborted, clock))


def with_aborted(fs: FileSystem, task: CleaningTask, follow: Callable[[np.ndarray], T]) -> T:
    """Call `follow` with the entries of the transaction indexes or, if the log contradicts these, again with the
    correct entries; return its result. Raises CorruptLog if the log contradicts these, too.
    """
    aborted = read_aborted(fs, task.partition_path, task.segments, task.log_start_offset)
    try:
        return follow(aborted)
    except Contradiction as contradiction:
        aborted = contradiction.entries
    try:
        return follow(aborted)
    except Contradiction as contradiction:
        raise contradiction_error(task, contradiction.offset) from None


def contradiction_error(task: CleaningTask, offset: int) -> CorruptLog:
    """Return the error for a log whose markers do not match its data, whatever its transaction indexes contain."""
    return CorruptLog(
        "the markers and the data of transactions contradict each other",
        path=task.partition_path,
        offset=offset,
        remedy=CORRUPT_REMEDY,
        slug="inconsistent-transactions",
    )


def active_producers(fs: FileSystem, task: CleaningTask, reader: SegmentReader) -> ActiveProducers:
    expiration_ms = task.config.producer_id_expiration_ms
    producers = load_producers(
        fs, reader, task.partition_path, task, expiration_ms=expiration_ms, now_ms=task.now_ms
    )
    return ActiveProducers.of(producers)


def _follow_log(
    fs: FileSystem,
    task: CleaningTask,
    reader: SegmentReader,
    aborted: np.ndarray,
    clock: PhaseClock,
) -> tuple[Survivors, Transactions, int]:
    tracker = TransactionTracker(aborted, task.log_start_offset)
    first, end = segments_between(task.segments, task.first_dirty_offset, task.first_uncleanable_offset)
    spans: list[Span] = []
    with clock.phase("check"):
        for number in range(first):
            records = batches = 0
            for chunk in checked_chunks(task, reader, (number, number + 1)):
                tracker.follow(chunk.table)
                spans.append(span_of(number, chunk, records, batches))
                records += int(chunk.table["record_count"].sum())
                batches += len(chunk.table)
    with clock.phase("map"):
        trackers = trackers_of(fs, task, tracker, aborted, first)
        offset_map = OffsetMap(task.map_memory_bytes, task.map_max_entries, counting=task.hottest_keys > 0)
        builder = SurvivorBuilder(reader, KeyScanner(task.hash_seed), offset_map)
        if task.threads > 1:
            scanners = [KeyScanner(task.hash_seed) for _ in range(1 + task.threads)]
            builder = BuilderInThreads(reader, scanners, offset_map)
        survivors = builder.build(
            task.partition_path,
            task.segments,
            (first, end),
            task.first_dirty_offset,
            task.first_uncleanable_offset,
            trackers,
        )
        survivors.spans[:0] = spans
    if task.fan_out == "auto" and (survivors.full or survivors.offset_map.used > most_keys(task.map_memory_bytes)):
        raise NeedsFanOut(
            f"the partition's keys do not fit into the {task.map_memory_bytes} bytes of map memory",
            path=task.partition_path,
            remedy="Raise --map-memory",
        )
    unread_records = 0
    with clock.phase("check"):
        for chunk in checked_chunks(task, reader, (first + len(survivors.segment_records), len(task.segments))):
            tracker.follow(chunk.table)
            unread_records += int(chunk.table["record_count"].sum())
    transactions = tracker.finish()
    # Records of aborted transactions are not counted.
    refuse_keyless(task, survivors.keyless, survivors.first_keyless_offset)
    return survivors, transactions, unread_records


def trackers_of(
    fs: FileSystem, task: CleaningTask, tracker: TransactionTracker, aborted: np.ndarray, first: int
) -> TransactionTrackers:
    """Return the trackers of the transactions of the dirty section, which begins in segment number `first`."""
    # The map uses only entries whose marker is in the first dirty segment or above, and whose data begins below the
    # first uncleanable offset.
    mapped = aborted["last_offset"] >= task.segments[first].base_offset
    mapped &= aborted["first_offset"] < task.first_uncleanable_offset
    mapping = TransactionTracker(aborted[mapped], task.log_start_offset)
    return TransactionTrackers(tracker, mapping, map_position(fs, task, task.segments[first]))


def map_position(fs: FileSystem, task: CleaningTask, segment: SegmentFacts) -> int:
    """Return the byte position from which the map reads the first dirty segment: the position of the last index entry
    at or below the first dirty offset, or 0 without such an entry."""
    if task.first_dirty_offset <= segment.base_offset or not segment.index_bytes:
        return 0
    entries = parse_offset_index(fs.read_bytes(task.path(segment.base_offset, names.INDEX)))
    at = np.searchsorted(entries["relative_offset"], task.first_dirty_offset - segment.base_offset, side="right")
    return int(entries["position"][at - 1]) if at else 0


def checked_chunks(task: CleaningTask, reader: SegmentReader, numbers: tuple[int, int]) -> Iterator[Chunk]:
    """Yield the chunks of the segments `numbers` (first, end), whose batch headers have been checked. Raises Refused
    for a control batch whose type is unreadable."""
    for number in range(*numbers):
        segment = task.segments[number]
        is_last = number + 1 == len(task.segments)
        path = task.path(segment.base_offset, names.LOG)
        torn_tail = is_last and not task.clean_shutdown
        for chunk in reader.chunks(path, segment.log_bytes, torn_tail=torn_tail):
            refuse_unsupported(chunk)
            check_ends_below(chunk, None if is_last else task.segments[number + 1].base_offset)
            yield chunk


def refuse_keyless(task: CleaningTask, count: int, first_offset: int) -> None:
    if count and not task.drop_keyless:
        raise Refused(
            f"the range to be cleaned has {count} records without a key",
            path=task.partition_path,
            offset=first_offset,
            remedy="Check cleanup.policy: compaction would remove these records, which usually means that the policy "
            "is wrong. To remove them, give --drop-keyless",
            slug="records-without-key",
        )
