"""Cleans one partition: maps the dirty section, decides, writes new segments, proves them, replaces the old ones.

`clean_partition` writes only scratch files, may run on any host that has access to the directory, and may be repeated.
`install` renames the scratch files to the names that a broker reads; only the driver calls `install`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import TypeVar

from keytail.compact.map_phase.hottest_keys import count_keys
from keytail.compact.map_phase.reading import PhaseClock, active_producers, read_log, refuse_keyless
from keytail.compact.map_phase.survivors import Survivors
from keytail.compact.plan import segments_between
from keytail.compact.producers import ActiveProducers
from keytail.compact.proof.as_written import ProofAsWritten
from keytail.compact.proof.keys import table_bytes
from keytail.compact.proof.prove import prove
from keytail.compact.proof.state import ProofSoFar, ProofSpec
from keytail.compact.saved_state import load_state, save_state
from keytail.compact.task import CleaningResult, CleaningTask, FannedOut, SavedState, Totals, result_of
from keytail.compact.write_phase.in_threads import RewriterInThreads
from keytail.compact.write_phase.passes import Rewrites, rewrite_groups, scratch_bytes
from keytail.compact.write_phase.rewrite import Rewriter
from keytail.errors import Refused
from keytail.format import names
from keytail.kernels.native import HASH_NAME
from keytail.log.fs import FileSystem
from keytail.log.partition import refuse_changed
from keytail.log.quiet import cached_share
from keytail.log.records.chunk import SegmentReader
from keytail.log.replacement.directory import Directory
from keytail.log.replacement.freeing import LARGE_BYTES, Freeing
from keytail.log.replacement.replace import CleanFile, GroupOutput, commit_group
from keytail.log.transactions import Transactions
from keytail.log.writer import MAX_SEGMENT_BYTES, Limits, OutputWriter

R = TypeVar("R", bound=Rewriter)

# A smaller log is proven when all outputs are finished. A larger log is proven in parts of this size, and the first one
# shows whether the log is in the page cache.
_EARLY_PROOF_BYTES = 64 << 20


def clean_partition(fs: FileSystem, task: CleaningTask) -> CleaningResult:
    """Write and prove the replacement of the segments below the end offset, or one pass of the replacement.

    Raises a KeytailError, such as CorruptLog, Refused or NeedsFanOut, after removing every scratch file of this
    attempt. Memory: the map and less than 512 MiB per thread, whatever the size of the segments.
    """
    clock = PhaseClock()
    check_sources(fs, task)
    check_hash(task)
    reader = SegmentReader(fs)

    findings = findings_of(fs, task, reader, clock)
    survivors, producers = findings.survivors, findings.producers
    key_counts = None
    if survivors.offset_map.is_counting:
        with clock.phase("hottest keys"):
            key_counts = count_keys(fs, task, reader, survivors)
    _, end = segments_between(task.segments, task.segments[0].base_offset, survivors.end_offset)
    writer = output_writer(fs, task, findings.transactions)
    keys = survivors.offset_map.used
    made: list[CleanFile] = []
    early: _EarlyProof | None = None
    try:
        with clock.phase("write"):
            limit = _pass_limit(task, survivors)
            if _proves_early(fs, task, survivors, limit):
                early, limit = _EarlyProof(fs, task, findings, writer, end, clock), None
            rewriter: Rewrites = _rewriter_of(task, reader, findings, end, early)
            numbers = (task.first_segment, end)
            with contextlib.closing(rewriter):
                stop, counts = rewrite_groups(task, numbers, survivors.end_offset, rewriter, writer, limit)
            refuse_keyless(task, rewriter.counts.keyless, rewriter.counts.first_keyless_offset)
            groups = writer.finish(task.end_of(stop - 1))
        untouched_records = findings.unread_records + survivors.records_from(end)
        before = task.saved_state.totals if task.saved_state else Totals(keys=keys)
        totals = before.and_written(groups, counts, writer.size_bytes, writer.records, writer.splits)
        result = result_of(task, survivors.end_offset, stop, groups, totals, untouched_records)
        result = replace(result, sources=tuple(source for source in rewriter.sources.values() if source.segment < stop))
        known = task.saved_state.survivors if task.saved_state else None
        if stop < end and known is None:
            if task.segments[stop].base_offset >= task.first_dirty_offset:
                survivors.forget_map()
            known = save_state(fs, task, names.SURVIVORS, findings)
            made.append(known)
        # The proof needs a table as large as the map: only one of them is in memory at a time.
        del survivors, rewriter, findings
        so_far = None
        with clock.phase("prove"):
            is_proven = early is not None and early.passes(groups)
            if early is not None:
                early.close()
                early = None
            if not is_proven:
                so_far = _prove(fs, task, result, producers, (task.first_segment, stop))
        if known is not None and stop < end:
            proof = save_state(fs, task, names.PROOF, so_far)
            made.append(proof)
            result = replace(result, rest=SavedState(stop, known, proof, totals))
    except BaseException:
        writer.discard()
        for file in made:
            with contextlib.suppress(OSError):  # only the first error is reported
                fs.unlink(os.path.join(task.scratch_path, file.name))
        if early is not None:
            early.close()
        raise
    return replace(result, phases_s=clock.seconds, key_counts=key_counts)


def _proves_early(fs: FileSystem, task: CleaningTask, survivors: Survivors, limit_bytes: int | None) -> bool:
    """Return whether sources are proven as soon as they are rewritten: if the map phase, which has read the log, has
    left less than half of its beginning in the page cache. The map must not be needed in the dirty section, because its
    memory is then that of the proof's table, and all outputs must fit into one pass of `limit_bytes` (a source that is
    moved to another output is there twice for a moment). A preparation removes what it reads from the page cache, and
    several threads prove faster when all outputs are finished.
    """
    if task.threads > 1 or task.is_preparation or task.continues or not survivors.can_forget_map:
        return False
    largest_bytes = max(segment.log_bytes for segment in task.segments)
    if limit_bytes is not None and scratch_bytes(task) + largest_bytes > limit_bytes:
        return False
    if sum(segment.log_bytes for segment in task.segments) < _EARLY_PROOF_BYTES:
        return False
    first = next(segment for segment in task.segments if segment.log_bytes)
    return cached_share(fs, task.path(first.base_offset, names.LOG), _EARLY_PROOF_BYTES) < 0.5


class _EarlyProof:
    """Proves sources as soon as they are rewritten. The sources of the clean section, for which the map is needed, are
    proven when the first of the dirty section has been rewritten.
    """

    def __init__(
        self,
        fs: FileSystem,
        task: CleaningTask,
        findings: Findings,
        writer: OutputWriter,
        end: int,
        clock: PhaseClock,
    ) -> None:
        self._task, self._clock, self._writer, self._survivors = task, clock, writer, findings.survivors
        end_offset, keys = findings.survivors.end_offset, findings.survivors.offset_map.used
        spec = proof_spec(task, (), findings.producers, end_offset, (0, end), expected_keys=keys)
        self._proof = ProofAsWritten(fs, spec, writer.outputs)
        self._next, self._end = 0, end  # the first segment that is not proven to its end, and the one after the last
        self._starts = [0, *accumulate(segment.log_bytes for segment in task.segments)]  # byte of the log, by segment
        self._proven_bytes = 0

    def take(self, number: int, end_bytes: int) -> None:
        """Prove what is not proven yet of the segments up to byte `end_bytes` of segment `number`, which has just been
        rewritten: nothing, as long as it is little or in the clean section, or may be moved to another output."""
        segment = self._task.segments[number]
        waiting_bytes = self._starts[number] + end_bytes - self._proven_bytes
        if self._task.end_of(number) <= self._task.first_dirty_offset or waiting_bytes < _EARLY_PROOF_BYTES:
            return
        fits = self._writer.current_bytes + segment.log_bytes - end_bytes <= self._task.config.segment_bytes
        if fits or end_bytes == segment.log_bytes or not self._writer.may_move_source:
            with self._clock.phase("prove"):
                self._prove(number, end_bytes)

    def passes(self, groups: Sequence[GroupOutput]) -> bool:
        """Return whether the proof has passed; if not, another proof must find out why."""
        if self._next < self._end:
            self._prove(self._end - 1, self._task.segments[self._end - 1].log_bytes)
        return self._proof.passes(groups)

    def close(self) -> None:
        self._proof.close()

    def _prove(self, number: int, end_bytes: int) -> None:
        self._survivors.forget_map()  # the table of the proof is as large
        self._proof.take(self._task.segments[self._next : number + 1], end_bytes)
        self._next = number + (end_bytes == self._task.segments[number].log_bytes)
        self._proven_bytes = self._starts[number] + end_bytes


def next_pass(task: CleaningTask, result: CleaningResult) -> CleaningTask:
    """Return the task of the next pass, after all groups of `result` have been installed."""
    if isinstance(result.rest, FannedOut):
        return replace(task, fanned_out=result.rest)
    return replace(task, saved_state=result.rest)


def install(
    fs: FileSystem,
    task: CleaningTask,
    result: CleaningResult,
    on_group: Callable[[], object] = lambda: None,
    stopped: Callable[[], bool] = lambda: False,
) -> None:
    """Replace the sources with the output of `clean_partition`, group by group, in ascending order.

    The first group that fails stops the later ones, so that a tombstone is never removed before the records that it
    deletes. `on_group` is called after each group. Once `stopped()` is true, no further group begins. The space of the
    sources is free when `install` returns.
    """
    check_sources(fs, task)
    directory = Directory(fs, task.partition_path)
    with contextlib.ExitStack() as end:
        unlink = None
        if any(segment.log_bytes >= LARGE_BYTES for segment in task.segments):
            unlink = end.enter_context(Freeing(fs, task.threads)).unlink
        for group in result.groups:
            if stopped():
                return
            commit_group(fs, task.partition_path, group, unlink, directory)
            on_group()


def check_sources(fs: FileSystem, task: CleaningTask) -> None:
    """Check that the segments that are not replaced yet are still the files of the plan; raise an error if not.
    Segments that a preparation does not replace may have changed.
    """
    _, end = segments_between(task.segments, 0, task.first_uncleanable_offset)
    found: dict[str, tuple[int, int]] = {}
    # A missing directory is reported for the first segment.
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        listed = fs.scan_sizes(task.partition_path, names.LOG).sized
        found = {name: (log_bytes, mtime_ns) for name, log_bytes, mtime_ns in listed}
    for segment in task.segments[task.first_segment : end if task.is_preparation else None]:
        name = names.segment_file(segment.base_offset, names.LOG)
        if found.get(name) != (segment.log_bytes, segment.log_mtime_ns):
            path = os.path.join(task.partition_path, name)
            refuse_changed(fs, path, segment.log_bytes, segment.log_mtime_ns)


def check_hash(task: CleaningTask) -> None:
    if task.hash_name != HASH_NAME:
        raise Refused(
            f"the run was planned with hash {task.hash_name}, but host {os.uname().nodename} has {HASH_NAME}",
            remedy="Install the same versions of keytail and xxhash on every host",
            slug="hash-differs-on-host",
        )


@dataclass(frozen=True)
class Findings:
    """The findings that all passes of a cleaning share. `unread_records` is the number of records in the segments above
    those that were read for the map; these belong to the untouched records of a pass.
    """

    survivors: Survivors
    transactions: Transactions
    producers: ActiveProducers
    unread_records: int


def findings_of(fs: FileSystem, task: CleaningTask, reader: SegmentReader, clock: PhaseClock) -> Findings:
    """Return the findings of reading the log or, in later passes, the saved findings of the first pass: after a group
    is replaced, the log would give different findings.
    """
    if task.saved_state is not None:
        with clock.phase("load state"):
            findings: Findings = load_state(fs, task, task.saved_state.survivors)
        return findings
    survivors, transactions, unread_records = read_log(fs, task, reader, clock)
    return Findings(survivors, transactions, active_producers(fs, task, reader), unread_records)


def make_rewriter(
    task: CleaningTask,
    reader: SegmentReader,
    findings: Findings,
    *,
    bits_from_offset: int | None = None,
    kind: type[R] = Rewriter,  # type: ignore[assignment]  # the default of R
) -> R:
    """Return the rewriter of the task. `bits_from_offset`: the offset from which bits decide whether a record is
    retained; default: the first dirty offset."""
    return kind(
        task,
        reader,
        findings.survivors,
        findings.transactions,
        findings.producers,
        first_dirty_offset=task.first_dirty_offset if bits_from_offset is None else bits_from_offset,
        file_horizon_ms=_file_horizon_ms(task),
    )


def _rewriter_of(
    task: CleaningTask, reader: SegmentReader, findings: Findings, end: int, early: _EarlyProof | None
) -> Rewrites:
    """Return the rewriter of the segments with numbers below `end`, with as many threads as the task has."""
    if task.threads == 1:
        rewriter: Rewriter = make_rewriter(task, reader, findings)
        if early is not None:
            rewriter.on_rewritten = early.take
        return rewriter
    rewriters: list[Rewriter] = [make_rewriter(task, reader.another(), findings) for _ in range(task.threads)]
    return RewriterInThreads(task, rewriters, findings.survivors.spans, end)


def _pass_limit(task: CleaningTask, survivors: Survivors) -> int | None:
    """Return the number of bytes that a pass may write, the scratch limit minus the state for the next pass; None
    without a limit."""
    if task.max_scratch_bytes is None or task.out_of_place is not None:
        return None
    if task.saved_state:  # the proofs of the previous pass and of this one
        kept = task.saved_state.survivors.size_bytes + 2 * task.saved_state.proof.size_bytes
    else:
        kept = survivors.size_bytes + 2 * table_bytes(survivors.offset_map.used)  # an upper bound
    return max(0, task.max_scratch_bytes - kept)


def _file_horizon_ms(task: CleaningTask) -> int:
    """Return the latest modification time of the files whose tombstones are due for removal because of that time:
    tombstones of magic 0 and 1, which have no delete horizon, and with `by_file_time` all tombstones.
    """
    a, b = segments_between(task.segments, 0, task.first_dirty_offset)
    if a == b:
        return 0
    return task.segments[b - 1].log_mtime_ns // 1_000_000 - task.config.delete_retention_ms


def output_writer(
    fs: FileSystem, task: CleaningTask, transactions: Transactions, kind: type[OutputWriter] = OutputWriter
) -> OutputWriter:
    config = task.config
    # Kafka sizes groups before cleaning and accepts any output size; measured outputs keep the limit.
    segment_bytes = config.segment_bytes if task.grouping == "measured" else MAX_SEGMENT_BYTES
    limits = Limits(segment_bytes, config.segment_index_bytes, config.index_interval_bytes)
    return kind(
        fs, task.partition_path, task.run_id, task.attempt, limits, transactions.index_bytes,
        scratch_path=task.scratch_path, like_of=partial(task.like, fs),
    )  # fmt: skip


def _prove(
    fs: FileSystem,
    task: CleaningTask,
    result: CleaningResult,
    producers: ActiveProducers,
    pass_segments: tuple[int, int],
) -> ProofSoFar | None:
    """Prove this pass; return the state for the proof of the next pass, or None if no pass follows."""
    so_far = load_state(fs, task, task.saved_state.proof) if task.saved_state else None
    spec = proof_spec(task, result.groups, producers, result.end_offset, pass_segments, expected_keys=result.keys)
    return prove(fs, spec, so_far).so_far


def proof_spec(
    task: CleaningTask,
    groups: Sequence[GroupOutput],
    producers: ActiveProducers,
    end_offset: int,
    pass_segments: tuple[int, int],
    expected_keys: int = 0,
) -> ProofSpec:
    """Return the specification of the proof of groups that a task, or a part of a task, wrote."""
    return ProofSpec(
        task.partition_path,
        task.segments,
        groups,
        first_dirty_offset=task.first_dirty_offset,
        end_offset=end_offset,
        first_uncleanable_offset=task.first_uncleanable_offset,
        now_ms=task.now_ms,
        delete_retention_ms=task.config.delete_retention_ms,
        index_interval_bytes=task.config.index_interval_bytes,
        drop_keyless=task.drop_keyless,
        memory_bytes=task.map_memory_bytes,
        secret=task.proof_secret,
        log_start_offset=task.log_start_offset,
        segment_index_bytes=task.config.segment_index_bytes,
        active_producers=(producers.ids, producers.last_data_offsets, producers.epochs),
        pass_segments=pass_segments,
        expected_keys=expected_keys,
        removal_limit_offset=task.removal_limit_offset,
        scratch_path=task.scratch_path,
        threads=task.threads,
        keep_magic=task.message_format == "keep",
        by_file_time=task.by_file_time,
    )
