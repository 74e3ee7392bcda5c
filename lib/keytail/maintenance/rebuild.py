"""The story of one partition whose index files are rebuilt: what forbids it, its tasks, what they found, the end.

`segment_tasks` says what is to be read, by any number of tasks; `settle` takes what they found and judges the
transaction indexes; `install` gives new files their names. Only `settle`, for transaction indexes, and `install`
write here, and only for an executing run, whose caller holds the locks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from keytail.errors import CorruptLog, KeytailError
from keytail.format import names
from keytail.format.index import TXN_ENTRY, encode_txn_index, parse_txn_index
from keytail.log.fs import FileSystem
from keytail.log.partition import PartitionFacts
from keytail.log.transactions import read_aborted
from keytail.maintenance.aborted import asked_offsets, right_entries
from keytail.maintenance.indexes import (
    FileVerdict,
    SegmentResult,
    SegmentTask,
    read_if_there,
    refuse_changed,
    write_scratch,
)


@dataclass(frozen=True)
class PartitionPlan:
    """A partition that is to be looked at, and the settings that hold for it.

    `known_entries` are those of its transaction indexes (TXN_ENTRY, native, by first offset).
    """

    facts: PartitionFacts
    index_interval_bytes: int
    segment_index_bytes: int
    known_entries: np.ndarray
    rebuild_all: bool = False
    execute: bool = False
    run_id: str = ""

    @property
    def log_bytes(self) -> int:
        return sum(segment.log_bytes for segment in self.facts.segments)

    @property
    def is_in_use(self) -> bool:
        """Whether a broker may be writing to it: then the end of its last segment is not judged."""
        return not self.execute and not self.facts.clean_shutdown


@dataclass(frozen=True)
class PartitionResult:
    """What was found in a partition, segment by segment, ascending."""

    segments: tuple[SegmentResult, ...]

    @property
    def wrong(self) -> tuple[tuple[SegmentResult, FileVerdict], ...]:
        """Each file that is missing or wrong, with its segment."""
        return tuple((s, verdict) for s in self.segments for verdict in s.files if verdict.state != "sound")

    @property
    def damage(self) -> CorruptLog | None:
        return next((segment.damage for segment in self.segments if segment.damage is not None), None)


def refusals(facts: PartitionFacts, remote_storage_enable: bool) -> list[str]:
    """Why the partition must be left alone, each with what to do; empty if nothing forbids it."""
    reasons = list(facts.problems)
    if remote_storage_enable:
        reasons.append("tiered topic: remote.storage.enable is true, and segments in remote storage are not seen")
    if facts.log_end_offset < facts.log_start_offset:
        reasons.append(
            f"log end offset {facts.log_end_offset} is below the log start offset {facts.log_start_offset}: "
            "a broker that starts here deletes the whole log"
        )
    return reasons


def plan_partition(
    fs: FileSystem,
    facts: PartitionFacts,
    *,
    index_interval_bytes: int,
    segment_index_bytes: int,
    rebuild_all: bool = False,
    execute: bool = False,
    run_id: str = "",
) -> PartitionPlan:
    """Reads the transaction indexes, which are small, and nothing of the logs."""
    return PartitionPlan(
        facts=facts,
        index_interval_bytes=index_interval_bytes,
        segment_index_bytes=segment_index_bytes,
        known_entries=read_aborted(fs, facts.path, facts.segments, 0),
        rebuild_all=rebuild_all,
        execute=execute,
        run_id=run_id,
    )


def segment_tasks(plan: PartitionPlan) -> list[SegmentTask]:
    """A task for each segment, ascending."""
    facts, asked = plan.facts, asked_offsets(plan.known_entries)
    ends = [segment.base_offset for segment in facts.segments[1:]] + [names.MAX_OFFSET]
    return [
        SegmentTask(
            partition_path=facts.path,
            base_offset=segment.base_offset,
            log_bytes=segment.log_bytes,
            log_mtime_ns=segment.log_mtime_ns,
            end_offset=end,
            log_start_offset=facts.log_start_offset,
            index_interval_bytes=plan.index_interval_bytes,
            segment_index_bytes=plan.segment_index_bytes,
            asked_offsets=asked,
            # What a broker recovers at its start it also cuts where it stops being valid.
            torn_tail=not facts.clean_shutdown and end > facts.recovery_point,
            is_in_use=plan.is_in_use and end == names.MAX_OFFSET,
            rebuild_all=plan.rebuild_all,
            execute=plan.execute,
            run_id=plan.run_id,
        )
        for segment, end in zip(facts.segments, ends, strict=True)
    ]


def settle(fs: FileSystem, plan: PartitionPlan, results: Sequence[SegmentResult]) -> PartitionResult:
    """The results of all segments together, transaction indexes included, as far as the log is whole.

    Raises the damage of a segment that no broker would cut.
    """
    tasks = segment_tasks(plan)
    for task, result in zip(tasks, results, strict=True):
        if result.damage is not None and not task.torn_tail:
            raise result.damage
    whole = next((n + 1 for n, result in enumerate(results) if result.damage is not None), len(results))
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
            verdict = _judge_txn_index(fs, task, entries[a:b])
        files = (*result.files, verdict) if verdict is not None else result.files
        settled.append(replace(result, files=files, rows=result.rows[:0]))
    return PartitionResult(tuple(settled))


def _judge_txn_index(fs: FileSystem, task: SegmentTask, entries: np.ndarray) -> FileVerdict | None:
    """None where no such file is, and none has to be."""
    wanted = encode_txn_index(entries)
    data = read_if_there(fs, task.path(names.TXN_INDEX))
    served = entries[entries["last_offset"] >= task.log_start_offset]
    if data is None:
        if not len(served):
            return None
        verdict = FileVerdict(names.TXN_INDEX, "missing", f"there is no such file, and the log says {_count(served)}")
    else:
        why = _why_wrong(task, data, served)
        if not why and task.rebuild_all and data != wanted:
            why = "is not what a recovery writes"
        verdict = FileVerdict(names.TXN_INDEX, "wrong" if why else "sound", why)
    if verdict.state != "sound" and task.execute and wanted:
        return replace(verdict, clean=write_scratch(fs, task, names.TXN_INDEX, wanted))
    return verdict


def _why_wrong(task: SegmentTask, data: bytes, served: np.ndarray) -> str:
    """What lies below the log start offset is not served, and need not be right."""
    if len(data) % TXN_ENTRY.itemsize:
        return f"its size of {len(data)} bytes is not a multiple of {TXN_ENTRY.itemsize}"
    there = parse_txn_index(data)
    last = there["last_offset"]
    if len(there) and (last[0] < task.base_offset or last[-1] >= task.end_offset or (np.diff(last) <= 0).any()):
        return "its entries do not rise within the offsets of the segment"
    there = there[last >= task.log_start_offset]
    if np.array_equal(there, served):
        return ""
    differs = {entry.tobytes() for entry in there} ^ {entry.tobytes() for entry in served}
    first = min(int(np.frombuffer(entry, served.dtype)["last_offset"][0]) for entry in differs)
    return f"it has {_count(there)}, the log says {_count(served)}; they differ first at the marker at offset {first}"


def _count(entries: np.ndarray) -> str:
    return f"{len(entries)} aborted transaction{'s' if len(entries) != 1 else ''}"


def install(fs: FileSystem, plan: PartitionPlan, result: PartitionResult) -> None:
    """Give every new file its name, and remove transaction indexes that should not be.

    Where a `.index` is missing a broker makes all three anew; where it is there and the `.timeindex` is not, it
    takes an empty one for it. So the `.index` comes last.
    """
    tasks = {task.base_offset: task for task in segment_tasks(plan)}
    for task in tasks.values():
        refuse_changed(fs, task)
    wrong = result.wrong
    for _, verdict in wrong:
        _check_scratch(fs, plan.facts.path, verdict)
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


def _check_scratch(fs: FileSystem, partition_path: str, verdict: FileVerdict) -> None:
    if verdict.clean is None:
        return
    path = os.path.join(partition_path, verdict.clean.name)
    size_bytes = fs.stat(path).size_bytes
    if size_bytes != verdict.clean.size_bytes:
        raise KeytailError(
            f"the new index has {size_bytes} bytes here, its task wrote {verdict.clean.size_bytes}",
            path=path,
            remedy="Are the log dirs mounted alike on driver and executors? Nothing was replaced",
        )


def remove_scratch(fs: FileSystem, partition_path: str, run_id: str) -> None:
    """What this run has written in the partition's directory and not used."""
    for entry in fs.scan(partition_path):
        name = names.parse_file_name(entry.name)
        if name.kind == "scratch" and name.run_id == run_id:
            fs.unlink(os.path.join(partition_path, name.name))
