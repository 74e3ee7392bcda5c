"""Repacks the chosen partitions (`keytail compact --repack`): plans them, and runs repack tasks with the code that runs
the tasks of a compaction."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from keytail.cli.configuration import Configuration
from keytail.cli.metadata import with_metadata
from keytail.cli.selection import SelectedPartitions, select_partitions
from keytail.compact.command import Request
from keytail.compact.execution import Kind, run_in_place
from keytail.compact.planned_rows import refused_row, row_of
from keytail.compact.planning import Planned, refused
from keytail.compact.prepared.committing import read_record
from keytail.compact.repack.options import RepackFlags, refuse_combinations
from keytail.compact.repack.partition import RepackResult, repack_partition
from keytail.compact.repack.plan import expected, plan_repack
from keytail.compact.repack.task import Repacking, RepackTask
from keytail.compact.room import Room
from keytail.compact.rules import Rules
from keytail.compact.running.destination import Installation
from keytail.compact.running.replacing import InPlace, Replacing
from keytail.compact.task import CleaningTask
from keytail.config.compaction import CompactionConfig
from keytail.console import print_message
from keytail.errors import EXPLAINED, NO_ERROR, Explained, Refused
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.partition import LogDirFacts, PartitionEntry
from keytail.log.replacement.recover import recover
from keytail.run.each_partition import of_each
from keytail.run.kernels import is_on_this_host, report_uncompiled
from keytail.run.rows import ResultRow
from keytail.run.spark.session import session_of_run
from keytail.undo.options import announce_backup, backup_of

# Estimate of how often each byte is read: the sources to write and to prove, and the output to prove.
_TIMES_READ = 2.7


def repack(request: Request, fs: FileSystem = LOCAL) -> list[ResultRow]:
    """Repack the chosen partitions, or only plan this without --execute; return a row for each partition."""
    refuse_combinations(request)
    return run_in_place(request, REPACK, fs) if request.execute else _plan_only(request, fs)


def _plan_only(request: Request, fs: FileSystem) -> list[ResultRow]:
    rules = request.rules(fs)
    chosen = select_partitions(fs, request.partition_filter)
    backup = backup_of(fs, request.keep_originals, request.copy_originals, request.partition_filter.log_dirs)
    if backup is not None:
        announce_backup(backup)
    room = Room.of(fs, request.max_scratch_bytes, backup)
    with contextlib.ExitStack() as run:
        if request.submitted:
            session_of_run(run, request.master, submitted=request.submitted)
        configuration = with_metadata(fs, request.partition_filter.log_dirs, request.configuration, rules.now_ms)

        def row(log_dir: LogDirFacts, entry: PartitionEntry) -> ResultRow:
            planned = _planned(fs, log_dir, entry, configuration, rules, request)
            row = _row(planned, None)
            [*tasks] = _tasks([planned], rules, request, "plan")
            problem = room.lacking(tasks[0]) if tasks else None
            return row if problem is None else refused_row(row, problem)

        rows = of_each(chosen.partitions, row, fs)
        if any(row.status == RepackTask.would for row in rows) and is_on_this_host(request.master):
            report_uncompiled("repack")
        return rows


def _flags(request: Request) -> RepackFlags:
    assert request.repack is not None
    return request.repack


def _planned(
    fs: FileSystem,
    log_dir: LogDirFacts,
    entry: PartitionEntry,
    configuration: Configuration,
    rules: Rules,
    request: Request,
) -> Planned:
    """Return the plan of a partition. A partition that has segments to repack, or leftovers, is also refused if it has
    a usable preparation, or if this process cannot give new files the owner and group of the partition's directory."""
    planned = plan_repack(fs, log_dir, entry, configuration, rules, _flags(request))
    facts = planned.facts
    if planned.decision.status == "refused" or not (planned.wanted or facts.leftovers):
        return planned
    try:
        fs.refuse_unless_like(fs.stat(facts.path))
        if facts.leftovers and read_record(fs, facts.path, facts.leftovers)[0] is not None:
            raise Refused(
                "`compact --prepare` has prepared files for the partition, which a repack would make useless",
                path=facts.path,
                remedy="Commit the prepared files with `compact --prepared-only --execute`, or remove them with "
                "`prepared --discard --execute`",
                slug="partition-is-prepared",
            )
    except EXPLAINED as problem:
        return refused(facts, problem)
    return planned


def _plan_resolved(
    fs: FileSystem, chosen: SelectedPartitions, configuration: Configuration, rules: Rules, request: Request
) -> list[Planned]:
    """Return the plans of all partitions. In partitions that are not refused, leftovers of interrupted runs are
    resolved first."""

    def plan(log_dir: LogDirFacts, entry: PartitionEntry) -> Planned:
        return _planned(fs, log_dir, entry, configuration, rules, request)

    found = of_each(chosen.partitions, plan, fs)
    planned = []
    for (log_dir, entry), item in zip(chosen.partitions, found, strict=True):
        now = item
        if item.facts.leftovers and item.decision.status != "refused":
            try:
                for sentence in recover(fs, entry.path, ()):
                    print_message(f"keytail: {row_of(item).name}: {sentence}")
                now = plan(log_dir, entry)
            except EXPLAINED as problem:
                now = refused(item.facts, problem)
        planned.append(now if now.wanted else now.without_segments())
    return planned


def _tasks(planned: Iterable[Planned], rules: Rules, request: Request, run_id: str) -> Sequence[CleaningTask]:
    flags = _flags(request)
    compression = flags.compression
    repacking = Repacking(
        flags.batch_bytes,
        None if compression is None else compression.codec,
        None if compression is None else compression.level,
    )
    tasks = []
    for plan in planned:
        selection = plan.decision.selection
        if not plan.wanted or selection is None or plan.config is None:
            continue
        task = RepackTask.of(
            plan.facts,
            # A repack maps no section. The section to repack begins at `begins_at`.
            first_dirty_offset=selection.first_uncleanable_offset,
            first_uncleanable_offset=selection.first_uncleanable_offset,
            now_ms=rules.now_ms,
            config=plan.config,
            run_id=run_id,
            hash_seed=secrets.randbits(63),
            map_memory_bytes=1,  # a repack has no offset map
            throttle_bytes_per_s=request.throttle_bytes_per_s or None,
            repacking=_with_expiration(repacking, plan.config, flags),
            cleaner_checkpoint=plan.facts.cleaner_checkpoint,
        )
        tasks.append(task)
    return tasks


def _with_expiration(repacking: Repacking, config: CompactionConfig, flags: RepackFlags) -> Repacking:
    return replace(repacking, forget_after_ms=config.producer_id_expiration_ms) if flags.forget_producers else repacking


def _row(planned: Planned, done: ResultRow | None) -> ResultRow:
    if done is not None:
        return done
    row = row_of(planned, expected=expected(planned))
    if planned.wanted:
        return replace(row, status=RepackTask.would, first_dirty_offset=planned.facts.segments[0].base_offset)
    return replace(row, first_dirty_offset=None, end_dirty_offset=None)


def _rows(planned: Iterable[Planned], done: Iterable[ResultRow], request: Request) -> list[ResultRow]:
    rest = iter(done)
    return [_row(item, next(rest) if item.wanted else None) for item in planned]


@dataclass
class _Repacked(Replacing):
    """The installation of a repacked partition."""

    def final_row(self) -> ResultRow:
        row, result = super().final_row(), self.result
        assert isinstance(result, RepackResult)
        row = replace(row, status="repacked") if self.made else row.unchanged("clean", NO_ERROR)
        return replace(row, batches_before=result.batches_before, batches_after=result.batches_after)


class _InPlace(InPlace):
    """The destination of a repack: it replaces segments in place, and does not change the cleaner's checkpoint."""

    def begin(self, task: CleaningTask, row: ResultRow) -> Replacing:
        return _Repacked(self.fs, self.keeper, task, row)

    def move_checkpoints(self, done: Sequence[Installation]) -> Iterator[tuple[Installation, Explained]]:
        return iter(())


REPACK = Kind(
    "compact --repack",
    _TIMES_READ,
    "repack",
    plan=_plan_resolved,
    tasks=_tasks,
    expected=lambda planned, request: expected(planned),
    in_place=_InPlace,
    clean=repack_partition,
    rows=_rows,
)
