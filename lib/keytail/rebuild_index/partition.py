"""Processes one partition: creates its tasks, combines their results, and installs the new files.

`segment_tasks` defines what is to be read, by any number of tasks. `settle` combines their results and checks the
transaction indexes. `truncate` truncates a torn tail, after which everything is read again. `install` renames new index
files. `repair_rest` repairs snapshots and leader epochs, which are also derived from the log. With `execute` the caller
holds the locks; without `execute` nothing is written here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from keytail.errors import CorruptLog, ErrorText, KeytailError, Refused, joined, refusal
from keytail.format import names
from keytail.format.index import TXN_ENTRY, encode_txn_index, parse_txn_index
from keytail.log.checkpoint import read_epochs
from keytail.log.fs import FileSystem
from keytail.log.lock import refuse_lost
from keytail.log.log_dirs import survey_log_dirs
from keytail.log.partition import PartitionFacts, survey_partition
from keytail.log.records.chunk import SegmentReader
from keytail.log.transactions import read_aborted
from keytail.rebuild_index.aborted import asked_offsets, right_entries
from keytail.rebuild_index.epochs import plan_epochs, write_plan
from keytail.rebuild_index.indexes import (
    FileVerdict,
    SegmentResult,
    SegmentTask,
    read_if_there,
    refuse_changed_segment,
    write_scratch,
)
from keytail.rebuild_index.snapshots import (
    SnapshotRow,
    make_snapshots,
    put_snapshot,
    survey_snapshots,
    wanted_snapshots,
)
from keytail.rebuild_index.tail import Truncation, plan_truncation, torn_tail, truncate_tail


@dataclass(frozen=True)
class RebuildSettings:
    """The topic's settings for indexes, and what the run is to do.

    `rebuild_all`: files that differ from what a recovery writes count as wrong. `execute`: install replacements for
    wrong files. `truncate`: truncate a torn tail first. `is_in_use`: a broker may be writing to the partition, so the
    end of its last segment is not checked.
    """

    index_interval_bytes: int
    segment_index_bytes: int
    rebuild_all: bool = False
    execute: bool = False
    truncate: bool = False
    is_in_use: bool = False
    run_id: str = ""


@dataclass(frozen=True)
class PartitionPlan:
    """A partition to be examined, and the entries of its transaction indexes (TXN_ENTRY, native, by first offset)."""

    facts: PartitionFacts
    settings: RebuildSettings
    known_entries: np.ndarray


@dataclass(frozen=True)
class PartitionResult:
    """The results of a partition's segments, ascending. `torn`: where the log has to be truncated."""

    segments: tuple[SegmentResult, ...]
    torn: Truncation | None = None

    @property
    def wrong(self) -> tuple[tuple[SegmentResult, FileVerdict], ...]:
        """Each file that is missing or wrong, with its segment."""
        return tuple((s, verdict) for s in self.segments for verdict in s.files if verdict.state != "sound")

    @property
    def log_end_offset(self) -> int:
        """The offset after the last valid batch, as far as the log is intact."""
        whole = next((n for n, segment in enumerate(self.segments) if segment.damage is not None), -1)
        return self.segments[whole].next_offset


@dataclass(frozen=True)
class Rest:
    """Sentences about snapshots and leader epochs: `wrong` is or can be repaired, `refused` cannot be repaired."""

    wrong: tuple[str, ...] = ()
    refused: tuple[ErrorText, ...] = ()
    files: int = 0  # number of missing or wrong files


def plan_partition(fs: FileSystem, facts: PartitionFacts, settings: RebuildSettings) -> PartitionPlan:
    """Plan the rebuild. Reads the transaction indexes, which are small, but no log."""
    return PartitionPlan(facts, settings, read_aborted(fs, facts.path, facts.segments, 0))


def segment_tasks(plan: PartitionPlan) -> list[SegmentTask]:
    """Return a task for each segment, ascending."""
    facts, settings, asked = plan.facts, plan.settings, asked_offsets(plan.known_entries)
    ends = [segment.base_offset for segment in facts.segments[1:]] + [names.MAX_OFFSET]
    return [
        SegmentTask(
            partition_path=facts.path,
            base_offset=segment.base_offset,
            log_bytes=segment.log_bytes,
            log_mtime_ns=segment.log_mtime_ns,
            end_offset=end,
            log_start_offset=facts.log_start_offset,
            index_interval_bytes=settings.index_interval_bytes,
            segment_index_bytes=settings.segment_index_bytes,
            asked_offsets=asked,
            # A broker that recovers the segment at startup also truncates the segment at the first invalid batch.
            torn_tail=not facts.clean_shutdown and end > facts.recovery_point,
            is_in_use=settings.is_in_use and end == names.MAX_OFFSET,
            rebuild_all=settings.rebuild_all,
            execute=settings.execute,
            run_id=settings.run_id,
        )
        for segment, end in zip(facts.segments, ends, strict=True)
    ]


def settle(fs: FileSystem, plan: PartitionPlan, results: Sequence[SegmentResult]) -> PartitionResult:
    """Combine the results of all segments, including transaction indexes, as far as the log is intact.

    Raises the damage of a segment that no broker would truncate.
    """
    tasks = segment_tasks(plan)
    torn = None
    damaged = next((n for n, result in enumerate(results) if result.damage is not None), None)
    if damaged is not None and not tasks[damaged].is_in_use:
        torn = _torn(fs, plan, damaged, results[damaged])
    whole = len(results) if damaged is None else damaged + 1
    results = [result if n < whole else replace(result, files=()) for n, result in enumerate(results)]
    entries = right_entries(
        [result.rows for result in results[:whole]],
        plan.known_entries,
        plan.facts.segments[0].base_offset,
        plan.facts.log_start_offset,
    )
    settled: list[SegmentResult] = []
    for task, result in zip(tasks, results, strict=True):
        a, b = np.searchsorted(entries["last_offset"], [task.base_offset, task.end_offset])
        verdict = None
        if len(settled) < whole and not task.is_in_use:
            verdict = _check_txn_index_entries(fs, task, entries[a:b])
        files = (*result.files, verdict) if verdict is not None else result.files
        settled.append(replace(result, files=files, rows=result.rows[:0]))
    return PartitionResult(tuple(settled), torn)


def _torn(fs: FileSystem, plan: PartitionPlan, number: int, result: SegmentResult) -> Truncation:
    """Return where a broker would truncate the log. If a broker would not truncate it, raise the damage; with
    --truncate, raise the reason instead, since a remedy of the damage is --truncate."""
    facts = plan.facts
    assert result.damage is not None
    tail = torn_tail(fs, facts.path, facts.segments[number], result.next_offset, result.damage)
    try:
        return plan_truncation(facts, tail, [entry.name for entry in fs.scan(facts.path)])
    except CorruptLog as why:
        if plan.settings.truncate:
            raise
        raise result.damage from why


def truncate(
    fs: FileSystem, plan: PartitionPlan, torn: Truncation, hosted: Collection[tuple[str, int]]
) -> PartitionPlan:
    """Truncate the log; return the plan of the truncated partition."""
    facts = plan.facts
    truncate_tail(fs, facts, torn, hosted=hosted)
    [log_dir] = survey_log_dirs(fs, [facts.log_dir])
    entry = next(entry for entry in log_dir.partitions if entry.path == facts.path)
    surveyed = survey_partition(fs, log_dir, entry)
    if surveyed.problems:
        raise Refused(joined(surveyed.problems), path=facts.path, slug="unexpected-partition-state")
    return plan_partition(fs, surveyed, plan.settings)


def truncation_text(torn: Truncation, remedy: str = "") -> str:
    """Return a sentence about the bytes and segments that a truncation removed or, with a `remedy`, would remove."""
    lost = "no known offset"
    if torn.lost_end > torn.next_offset:
        lost = f"offsets {torn.next_offset} to {torn.lost_end - 1}"
    text = (
        f"torn: {torn.tail.what} (segment {torn.tail.base_offset}, byte position {torn.tail.byte_position}, offset "
        f"{torn.next_offset}); {'a broker that starts truncates the log' if remedy else 'truncated'} there, which "
        f"removes {torn.truncated_bytes} bytes"
    )
    if torn.removed_segments:
        text += f" and the segments {', '.join(map(str, torn.removed_segments))}"
    text += f"; lost: {lost}"
    if torn.acknowledged_until is not None:
        text += f", of which the offsets below {torn.acknowledged_until} were acknowledged to producers"
    return f"{text}. {remedy}" if remedy else text


def _check_txn_index_entries(fs: FileSystem, task: SegmentTask, entries: np.ndarray) -> FileVerdict | None:
    """Return the verdict on the segment's `.txnindex`; None if the file neither exists nor is needed."""
    wanted = encode_txn_index(entries)
    data = read_if_there(fs, task, names.TXN_INDEX)
    served = entries[entries["last_offset"] >= task.log_start_offset]
    if data is None:
        if not len(served):
            return None
        verdict = FileVerdict(names.TXN_INDEX, "missing", f"the file is missing, but the log has {_count(served)}")
    else:
        why = _why_wrong(task, data, served)
        if not why and task.rebuild_all and data != wanted:
            why = "differs from what a recovery writes"
        verdict = FileVerdict(names.TXN_INDEX, "wrong" if why else "sound", why)
    if verdict.state != "sound" and task.execute and wanted:
        return replace(verdict, clean=write_scratch(fs, task, names.TXN_INDEX, wanted))
    return verdict


def _why_wrong(task: SegmentTask, data: bytes, served: np.ndarray) -> str:
    """Return why the index is wrong; "" if it is valid. Entries below the log start offset are not served: only their
    order and range are checked.
    """
    if len(data) % TXN_ENTRY.itemsize:
        return f"its size of {len(data)} bytes is not a multiple of {TXN_ENTRY.itemsize}"
    there = parse_txn_index(data)
    last = there["last_offset"]
    if len(there) and (last[0] < task.base_offset or last[-1] >= task.end_offset or (np.diff(last) <= 0).any()):
        return "its entries are not in ascending order within the offsets of the segment"
    there = there[last >= task.log_start_offset]
    if np.array_equal(there, served):
        return ""
    differs = {entry.tobytes() for entry in there} ^ {entry.tobytes() for entry in served}
    first = min(int(np.frombuffer(entry, served.dtype)["last_offset"][0]) for entry in differs)
    return f"the file has {_count(there)}, the log {_count(served)}; they first differ at the marker at offset {first}"


def _count(entries: np.ndarray) -> str:
    return f"{len(entries)} aborted transaction{'s' if len(entries) != 1 else ''}"


def install(fs: FileSystem, plan: PartitionPlan, result: PartitionResult) -> None:
    """Rename every new index file to its final name, and remove transaction indexes that should not exist.

    If a `.index` is missing, a broker rebuilds all three indexes; if the `.index` exists and the `.timeindex` does not,
    the broker uses an empty time index. So the `.index` is renamed last.
    """
    tasks = {task.base_offset: task for task in segment_tasks(plan)}
    for task in tasks.values():
        refuse_changed_segment(fs, task)
    wrong = result.wrong
    for _, verdict in wrong:
        _check_scratch(fs, plan.facts.path, verdict)
    refuse_lost(fs, plan.facts.path)
    for is_last in (False, True):
        for segment, verdict in wrong:
            if (verdict.suffix == names.INDEX) == is_last:
                path = tasks[segment.base_offset].path(verdict.suffix)
                if verdict.clean is not None:
                    fs.rename(os.path.join(plan.facts.path, verdict.clean.name), path)
                else:
                    fs.unlink(path)
        if wrong:
            fs.fsync_dir(plan.facts.path)


def repair_rest(fs: FileSystem, plan: PartitionPlan, result: PartitionResult) -> Rest:
    """Check snapshots and leader epochs, and with `execute` repair them, if the log is intact and not in use."""
    if plan.settings.is_in_use or result.torn is not None:
        return Rest()
    rest = _repair_snapshots(fs, plan, result.log_end_offset)
    epochs_path = os.path.join(plan.facts.path, names.LEADER_EPOCHS)
    seen = [epoch for segment in result.segments for epoch in segment.epochs]
    epochs = plan_epochs(read_epochs(fs, epochs_path), seen, result.log_end_offset)
    if epochs.problem:
        why = f"{names.LEADER_EPOCHS} contradicts the log and is not changed: {epochs.problem}"
        return replace(rest, refused=(*rest.refused, refusal(why, slug="epochs-contradict-log")))
    # A broker that stops cleanly may leave an entry for an epoch that begins at the log end and has no batch yet.
    retained = result.log_end_offset if plan.facts.clean_shutdown else -1
    behind = [epoch for epoch in epochs.dropped if epoch[1] != retained]
    if not epochs.added and not behind:
        return rest
    if plan.settings.execute:
        write_plan(fs, plan.facts.path, epochs)
    parts = [
        f"{what} {', '.join(f'{epoch} from offset {start}' for epoch, start in entries)}"
        for what, entries in (("lacked epoch", epochs.added), ("had, at or above the log end, epoch", behind))
        if entries
    ]
    return replace(rest, wrong=(*rest.wrong, f"{names.LEADER_EPOCHS} {' and '.join(parts)}"), files=rest.files + 1)


def _repair_snapshots(fs: FileSystem, plan: PartitionPlan, log_end_offset: int) -> Rest:
    facts = plan.facts
    wanted = wanted_snapshots(
        [segment.base_offset for segment in facts.segments],
        facts.log_start_offset,
        log_end_offset,
        clean_shutdown=facts.clean_shutdown,
    )
    survey = survey_snapshots(fs, facts.path, facts.snapshots, wanted)
    if not survey.to_make:
        return Rest()
    like = fs.stat(os.path.join(facts.path, names.segment_file(facts.segments[-1].base_offset, names.LOG)))
    made, not_made = [], []
    reader = SegmentReader(fs)
    for row, data in make_snapshots(fs, reader, facts.path, facts.segments, facts.log_start_offset, survey):
        if row.problem:
            not_made.append(row)
            continue
        made.append(row)
        if plan.settings.execute:
            refuse_lost(fs, facts.path)
            put_snapshot(fs, facts.path, row.offset, data, like=like, run_id=plan.settings.run_id, attempt="driver")
    wrong = [f"producer snapshots {was} at {at}" for was, at in _offsets_by(made, lambda row: row.was)]
    refused = [
        ErrorText(f"producer snapshots missing or damaged at {at} cannot be rebuilt: ") + why
        for why, at in _offsets_by(not_made, lambda row: row.problem)
    ]
    return Rest(tuple(wrong), tuple(refused), len(made))


def _offsets_by(rows: Sequence[SnapshotRow], key: Callable[[SnapshotRow], str]) -> list[tuple[str, str]]:
    """Return each value of `key`, with the offsets of its rows as text."""
    offsets: dict[str, list[str]] = {}
    for row in rows:
        offsets.setdefault(key(row), []).append(str(row.offset))
    return [(value, f"offset{'s' if len(some) > 1 else ''} {', '.join(some)}") for value, some in offsets.items()]


def _check_scratch(fs: FileSystem, partition_path: str, verdict: FileVerdict) -> None:
    if verdict.clean is None:
        return
    path = os.path.join(partition_path, verdict.clean.name)
    size_bytes = fs.stat(path).size_bytes
    if size_bytes != verdict.clean.size_bytes:
        raise KeytailError(
            f"the new index has {size_bytes} bytes on the driver, but its task wrote {verdict.clean.size_bytes}",
            path=path,
            remedy="Nothing was replaced. Mount the log dirs at the same paths on driver and executors, and run again",
            slug="task-output-size-differs",
        )
