"""Decides for every chosen partition whether it is to be compacted; a dry run does nothing else.

`keytail compact` and jobs/compact.py under spark-submit run the same code. Most plans need no kernels, so this module
imports none by itself.
"""

from __future__ import annotations

import contextlib
import pkgutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from keytail.cli.configuration import Configuration
from keytail.cli.metadata import with_metadata
from keytail.cli.selection import select_partitions
from keytail.compact.command import Request
from keytail.compact.expectation import fits_with_any_indexes
from keytail.compact.planned_rows import refused_row, row_of_plan
from keytail.compact.planning import (
    Planned,
    plan_partition_of,
    refused_unless_owner,
    report_assumptions,
    report_version_rules,
)
from keytail.compact.removal_limit import report_unhosted
from keytail.compact.rules import Rules
from keytail.console import print_message
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.lock import is_held
from keytail.log.partition import LogDirFacts, PartitionEntry
from keytail.run.each_partition import of_each
from keytail.run.kernels import is_on_this_host, report_uncompiled
from keytail.run.rows import ResultRow
from keytail.run.spark.session import session_of_run
from keytail.undo.options import announce_backup, backup_of

if TYPE_CHECKING:
    from keytail.undo.backup import Backup


def run(request: Request) -> list[ResultRow]:
    """Plan, compact, prepare or repack, in place or out of place, as requested; return a row for each partition."""
    if request.repack is not None:
        return pkgutil.resolve_name("keytail.compact.repack.driver:repack")(request)
    if request.prepare:
        return pkgutil.resolve_name("keytail.compact.prepared.driver:prepare")(request)
    where = "out_of_place.driver" if request.is_out_of_place else "execution" if request.execute else "driver"
    step = pkgutil.resolve_name(f"keytail.compact.{where}:{'compact' if request.execute else 'plan'}")
    return step(request)


def plan(request: Request, fs: FileSystem = LOCAL) -> list[ResultRow]:
    """Return a row for each chosen partition: what `compact --execute` would do. Changes and locks nothing."""
    rules = request.rules(fs)
    chosen = select_partitions(fs, request.partition_filter)
    backup = backup_of(fs, request.keep_originals, request.copy_originals, request.partition_filter.log_dirs)
    if backup is not None:
        announce_backup(backup)
    if request.roll_active:
        rules = replace(rules, running=_running(fs, chosen.log_dirs))
    with contextlib.ExitStack() as run:
        if request.submitted:
            session_of_run(run, request.master, submitted=request.submitted)
        configuration = with_metadata(fs, request.partition_filter.log_dirs, request.configuration, rules.now_ms)
        free_bytes = {log_dir.path: fs.free_bytes(log_dir.path) for log_dir in chosen.log_dirs}
        rows = of_each(chosen.partitions, _Rows(fs, configuration, rules, request, backup, free_bytes).row, fs)
        due = [row for row in rows if row.status == "would-compact"]
        report_assumptions(configuration, (row.topic for row in due))
        report_version_rules(configuration, [row.topic for row in due])
        if due and not request.submitted and is_on_this_host(request.master):
            report_uncompiled("compact")
        if rules.replicas:
            report_unhosted([row.name for row in due if row.removal_limit_replica is None])
        if request.measure == "not":
            return rows
        measured = pkgutil.resolve_name("keytail.compact.measure.driver:measured")  # imports the kernels
        return measured(request, fs, run, chosen, configuration, rules, rows)


def _running(fs: FileSystem, log_dirs: Iterable[LogDirFacts]) -> frozenset[str]:
    """Return the log dirs whose broker is running; print what --roll-active assumes about these log dirs."""
    running = frozenset(item.path for item in log_dirs if not item.clean_shutdown and is_held(item.path, fs))
    if running:
        print_message(
            "keytail: active segments are planned as if the broker were stopped cleanly now, with all records "
            f"replicated, in the log dirs that are in use: {', '.join(sorted(running))}"
        )
    return running


@dataclass(frozen=True)
class _Rows:
    """Creates the rows of a plan. `free_bytes` maps each log dir to the free space of its file system."""

    fs: FileSystem
    configuration: Configuration
    rules: Rules
    request: Request
    backup: Backup | None
    free_bytes: Mapping[str, int]

    def row(self, log_dir: LogDirFacts, entry: PartitionEntry) -> ResultRow:
        """Return the row of a partition, planned from a listing or, for a report or if scratch space may be lacking,
        from a survey."""
        request = self.request
        planned = refused_unless_owner(self.fs, self._planned(log_dir, entry, by_listing=not request.in_detail))
        problem = None
        if planned.wanted and not self._fits_with_any_indexes(planned):
            from keytail.compact.room import Room  # noqa: PLC0415 (brings in the kernels)

            planned = self._planned(log_dir, entry, by_listing=False)
            room = Room.of(self.fs, request.max_scratch_bytes, self.backup)
            problem = room.lacking_for(planned, self.rules, request.task_settings())
        row = row_of_plan(planned, request.map_memory(), in_detail=request.in_detail)
        return row if problem is None else refused_row(row, problem)

    def _planned(self, log_dir: LogDirFacts, entry: PartitionEntry, *, by_listing: bool) -> Planned:
        return plan_partition_of(self.fs, log_dir, entry, self.configuration, self.rules, by_listing=by_listing)

    def _fits_with_any_indexes(self, planned: Planned) -> bool:
        expected = planned.expected(self.request.map_memory())
        if expected is None or planned.config is None or (self.backup is not None and self.backup.copies):
            return False
        room_bytes = self.free_bytes[planned.facts.log_dir]
        if self.request.max_scratch_bytes is not None:
            room_bytes = min(room_bytes, self.request.max_scratch_bytes)
        segments, index_bytes = len(planned.facts.segments), planned.config.segment_index_bytes
        return fits_with_any_indexes(expected, segments, index_bytes, room_bytes)
