"""Compacts one partition in stages of many tasks; FAN_OUT.md describes the stages.

`fan_out` passes the stages, functions whose input and result can be pickled, to `Stages`, which runs them in this
process (`tests/compact/fan_out/in_process.py`) or on Spark (`compact/fan_out/on_spark.py`). The result is the same,
byte for byte, as that of `clean_partition` for the same task with room for all keys. Only scratch files are written,
and the driver installs them, as after `clean_partition`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

from keytail.compact.cleaner import check_hash, check_sources
from keytail.compact.fan_out.bits import ShardBits
from keytail.compact.fan_out.keys import ScanPart, merge, scan, shards_for
from keytail.compact.fan_out.proof import ProofContext, ProofPart, Verdict, markers_of, prove_part, settle_proof
from keytail.compact.fan_out.slices import (
    SLICE_BYTES,
    Cell,
    SliceFacts,
    Survey,
    SurveyPart,
    settle,
    slices_of,
    survey,
)
from keytail.compact.fan_out.write import Measured, Written, measure, parts_of, ranges_of, write
from keytail.compact.map_phase.hottest_keys import HotPart, by_place, key_counts_of, read_hottest
from keytail.compact.map_phase.key_counts import KeyCounts, merged
from keytail.compact.map_phase.reading import PhaseClock, contradiction_error, refuse_keyless
from keytail.compact.plan import segments_between
from keytail.compact.proof.keys import table_bytes
from keytail.compact.proof.prove import refuse_unjustified
from keytail.compact.task import CleaningResult, CleaningTask, FannedOut, Totals, result_of
from keytail.compact.write_phase.passes import source_bytes
from keytail.errors import CorruptLog
from keytail.log.fs import FileSystem
from keytail.log.replacement.replace import CleanFile
from keytail.log.transactions import read_aborted

P = TypeVar("P")
R = TypeVar("R")
Merging = Callable[[FileSystem, Any, int, Iterable[tuple[int, bytes]], str], R]


class Stages(Protocol):
    """Runs stages. An exception of a function is raised by the method that runs the function.

    A function may run twice with the same payload, even concurrently, each time with another `attempt`; only one of the
    results is used. `name` is the name of a stage for display.
    """

    def run(self, name: str, function: Callable[[FileSystem, P, str], R], payloads: Sequence[P]) -> list[R]:
        """Return `function(fs, payload, attempt)` of each payload, in the order of the payloads."""

    def shuffle(
        self,
        name: str,
        emit: Callable[[FileSystem, P, str], Iterator[Cell]],
        payloads: Sequence[P],
        shards: int,
        take: Merging[R],
        context: Any,
    ) -> list[R]:
        """Return `take(fs, context, shard, cells, attempt)` of each shard, in the order of the shards.

        `cells` has a pair (order, data), sorted by order, for each cell that `emit(fs, payload, attempt)` yields for
        the shard, over all payloads.
        """


@dataclass(frozen=True)
class Sizes:
    """The bytes of a slice, and the number of shards (None: it is derived from the memory of a map)."""

    slice_bytes: int = SLICE_BYTES
    shards: int | None = None


@dataclass(frozen=True)
class _Found:
    """The results of stages 1 to 6, which all passes use; `key_counts` is known only in the first pass."""

    ranges: tuple[tuple[int, int], ...]
    settled: CleanFile
    markers: CleanFile | None
    slices: tuple[SliceFacts, ...]
    bits: tuple[ShardBits, ...]
    key_counts: KeyCounts | None = None

    def records_of(self, first: int, end: int) -> int:
        return sum(facts.records for facts in self.slices if first <= facts.segment < end)


def fan_out(fs: FileSystem, task: CleaningTask, stages: Stages, sizes: Sizes | None = None) -> CleaningResult:
    """Write and prove the replacement of the segments below the first uncleanable offset, or one pass of it.

    `fs` is the driver's file system, which is only read. Raises what `clean_partition` raises; the caller then removes
    the run's scratch files. `task.map_memory_bytes` limits the tables of each task of a stage.
    """
    clock = PhaseClock()
    check_sources(fs, task)
    check_hash(task)
    end = segments_between(task.segments, task.segments[0].base_offset, task.first_uncleanable_offset)[1]
    found = _found(fs, task, stages, sizes or Sizes(), clock) if task.fanned_out is None else _known(task.fanned_out)
    ranges = _of_this_pass(task, found)
    with clock.phase("write"):
        written, left = _write(task, stages, found, ranges, end)
    stop = left[0][0] if left else end
    with clock.phase("prove"):
        tables = _prove(fs, task, stages, found, written, stop, end)
    return _result(task, found, written, left, tables, stop, end, clock)


def _found(fs: FileSystem, task: CleaningTask, stages: Stages, sizes: Sizes, clock: PhaseClock) -> _Found:
    with clock.phase("survey"):
        known = _survey(fs, task, stages, sizes.slice_bytes)
    assert known.settled is not None
    end = segments_between(task.segments, task.segments[0].base_offset, task.first_uncleanable_offset)[1]
    shards = sizes.shards or shards_for(task, known.slices)
    with clock.phase("map"):
        pieces = [
            ScanPart(task, facts, number, known.settled, shards)
            for number, facts in enumerate(facts for facts in known.slices if facts.segment < end and facts.batches)
        ]
        bits = tuple(stages.shuffle("keys", scan, pieces, shards, merge, task))
    _refuse_keyless(task, bits)
    key_counts = None
    if task.hottest_keys:
        with clock.phase("hottest keys"):
            key_counts = _count_keys(task, stages, known.slices, bits)
    measured: list[Measured] | None = None
    with clock.phase("measure"):
        if task.grouping == "measured":
            alone = [(number, number + 1) for number in range(end)]
            measured = stages.run("sizes", measure, parts_of(task, alone, known.slices, known.settled, bits))
    markers = None
    if known.has_transactions:
        with clock.phase("markers"):
            [markers] = stages.run("markers", markers_of, [task])
    ranges = tuple(ranges_of(task, 0, end, measured))
    return _Found(ranges, known.settled, markers, known.slices, bits, key_counts)


def _known(before: FannedOut) -> _Found:
    return _Found(before.ranges, before.settled, before.markers, before.slices, before.bits)


def _survey(fs: FileSystem, task: CleaningTask, stages: Stages, slice_bytes: int) -> Survey:
    """Return the survey of slices that begin at positions in the offset index. After CorruptLog, which a wrong index
    may cause, return the survey of whole segments; if no segment was divided, the error is raised."""
    aborted = read_aborted(fs, task.partition_path, task.segments, task.log_start_offset)
    try:
        return _survey_with(task, stages, slice_bytes, aborted)
    except CorruptLog:
        if len(slices_of(task, slice_bytes)) == len(task.segments):
            raise
    return _survey_with(task, stages, 2**62, aborted)


def _survey_with(task: CleaningTask, stages: Stages, slice_bytes: int, aborted: np.ndarray) -> Survey:
    """Return the survey of slices of at most `slice_bytes`. As in `reading.read_log`, transaction indexes are trusted
    until the log contradicts them."""
    for _ in range(2):
        pieces = [SurveyPart(task, piece, number, aborted) for number, piece in enumerate(slices_of(task, slice_bytes))]
        [known] = stages.shuffle("survey", survey, pieces, 1, settle, (task, aborted))
        if known.contradicting is None:
            return known
        aborted = known.contradicting
    raise contradiction_error(task, known.contradicting_offset)


def _count_keys(
    task: CleaningTask, stages: Stages, slices: Sequence[SliceFacts], bits: Sequence[ShardBits]
) -> KeyCounts:
    """Return the sum of the counts of the shards, which have no key in common, and the hottest keys. A separate task
    reads each slice that contains the last record of one of the hottest keys.
    """
    counted = merged((shard.counted for shard in bits if shard.counted is not None), task.hottest_keys)
    places = [((facts.segment << 32) + facts.records_before, facts.start) for facts in slices if facts.records]
    pieces = [HotPart(task, place, hottest) for place, hottest in by_place(places, counted.hottest)]
    read = stages.run("hottest keys", read_hottest, pieces)
    return key_counts_of(counted, [item for part in read for item in part])


def _refuse_keyless(task: CleaningTask, bits: Sequence[ShardBits]) -> None:
    """Raise Refused if there are keyless records; report the keyless records of the dirty section first, as a single
    task does."""
    counted = [item for shard in bits for item in shard.keyless]
    for at in (0, 2):
        some = [item for item in counted if item[at]]
        if some:
            refuse_keyless(task, sum(item[at] for item in some), min(item[at + 1] for item in some))


def _of_this_pass(task: CleaningTask, found: _Found) -> list[tuple[int, int]]:
    """Return the ranges that fit into the scratch space beside the fan-out's own files, at least the first range. All
    ranges are returned if the space is not limited, or if the output is written out of place."""
    if task.max_scratch_bytes is None or task.out_of_place is not None:
        return list(found.ranges)
    kept = sum(shard.file.size_bytes for shard in found.bits) + found.settled.size_bytes
    kept += 2 * table_bytes(sum(shard.keys for shard in found.bits))  # the proofs of the previous pass and of this one
    left = task.max_scratch_bytes - kept
    taken: list[tuple[int, int]] = []
    for item in found.ranges:
        left -= sum(map(source_bytes, task.segments[slice(*item)]))
        if taken and left < 0:
            break
        taken.append(item)
    return taken


def _write(
    task: CleaningTask, stages: Stages, found: _Found, ranges: list[tuple[int, int]], end: int
) -> tuple[list[tuple[tuple[int, int], Written]], list[tuple[int, int]]]:
    """Write the groups of `ranges`; return each range with what was written for it, and the ranges left for later
    passes.

    If an output reached a limit that the measured sizes did not show, one task writes that range and all later ranges,
    in order, also those that were left for later passes.
    """
    write_all = partial(parts_of, task, slices=found.slices, settled=found.settled, bits=found.bits)
    written = stages.run("groups", write, write_all(ranges))
    for number, (item, groups) in enumerate(zip(ranges, written, strict=True)):
        # With Kafka's grouping, several outputs of a range do not change the next range; nothing follows the last one.
        if task.grouping == "measured" and len(groups.groups) != 1 and item[1] < end:
            rest = (item[0], end)
            [of_rest] = stages.run("groups in order", write, write_all([rest]))
            return [*zip(ranges[:number], written[:number], strict=True), (rest, of_rest)], []
    return list(zip(ranges, written, strict=True)), list(found.ranges[len(ranges) :])


def _prove(
    fs: FileSystem,
    task: CleaningTask,
    stages: Stages,
    found: _Found,
    written: Sequence[tuple[tuple[int, int], Written]],
    stop: int,
    end: int,
) -> tuple[CleanFile, ...]:
    """Prove the groups; return the tables for the next pass, one per shard (none if no pass follows)."""
    shards = len(found.bits)
    part = partial(ProofPart, task, settled=found.settled, markers=found.markers, shards=shards)
    pieces = [part(numbers=item, groups=groups.groups, present=(end, end)) for item, groups in written]
    if task.fanned_out is None:
        pieces += [part(numbers=(n, n), groups=(), present=(n, n + 1)) for n in range(stop, end)]
    proofs = task.fanned_out.proofs if task.fanned_out else ()
    context = ProofContext(task, proofs, stop < end)
    verdicts: list[Verdict] = stages.shuffle("proof", prove_part, pieces, shards, settle_proof, context)
    bad = min(((item.offset, item.older_retained) for item in verdicts if item.offset >= 0), default=(-1, 0))
    refuse_unjustified(fs, task.partition_path, task.segments, *bad)
    return tuple(item.table for item in verdicts if item.table is not None)


def _result(
    task: CleaningTask,
    found: _Found,
    written: Sequence[tuple[tuple[int, int], Written]],
    left: list[tuple[int, int]],
    tables: tuple[CleanFile, ...],
    stop: int,
    end: int,
    clock: PhaseClock,
) -> CleaningResult:
    totals = task.fanned_out.totals if task.fanned_out else Totals(keys=sum(shard.keys for shard in found.bits))
    parts = [part for _, part in written]
    for part in parts:
        totals = totals.and_written(part.groups, part.counts, part.bytes, part.records, part.splits)
    groups = tuple(group for part in parts for group in part.groups)
    rest = None
    if left:
        rest = FannedOut(stop, tuple(left), found.settled, found.markers, found.slices, found.bits, tables, totals)
    untouched_records = found.records_of(end, len(task.segments))
    result = result_of(task, task.first_uncleanable_offset, stop, groups, totals, untouched_records)
    sources = tuple(source for part in parts for source in part.sources)
    return replace(result, rest=rest, phases_s=clock.seconds, sources=sources, key_counts=found.key_counts)
