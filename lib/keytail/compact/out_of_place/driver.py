"""`compact --output-dir`: writes the compacted log dirs elsewhere, and leaves the log dirs unchanged.

The same rules as for `compact` determine what is due; for a partition that is already in the target, they are applied
to the target's state. A partition that is not due is copied or, if the target already has it, kept there; one with
problems is left out. The states on disk are described in compact/out_of_place/OUT_OF_PLACE.md.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from keytail.cli.configuration import Configuration
from keytail.cli.metadata import with_metadata
from keytail.cli.progress import READ_IN_A_COMPACTION, Reporter
from keytail.cli.rows import human_bytes
from keytail.cli.selection import SelectedPartitions, select_partitions
from keytail.compact.command import Request
from keytail.compact.out_of_place.output_record import OutputRecord
from keytail.compact.out_of_place.output_root import Root, close_to_brokers, contents, is_outdated, write
from keytail.compact.out_of_place.output_tree import TargetEntry
from keytail.compact.out_of_place.placing import InTarget, Worker
from keytail.compact.out_of_place.plan import Known, PlannedPartition, judge, metadata_partition, not_chosen
from keytail.compact.out_of_place.target import Target, target_of
from keytail.compact.planned_rows import refused_row
from keytail.compact.planning import report_version_rules
from keytail.compact.removal_limit import report_unhosted
from keytail.compact.room import Room, existing_directory
from keytail.compact.rules import Rules
from keytail.compact.running.compaction import Compaction
from keytail.compact.running.state import Events
from keytail.compact.steps import Steps
from keytail.console import listed, print_message
from keytail.errors import Refused
from keytail.ledger.of_run import is_named_by
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.lock import is_held
from keytail.run.each_partition import of_each
from keytail.run.engine import Engine
from keytail.run.kernels import is_on_this_host, report_uncompiled
from keytail.run.rows import DONE, ResultRow
from keytail.run.storage import ScratchSpace

_COPIED_BYTES_PER_S = 400e6


def plan(request: Request, fs: FileSystem = LOCAL) -> list[ResultRow]:
    """Return a row for each chosen partition: what `--execute` would do. Planning changes or locks neither the source
    nor the target.
    """
    with contextlib.ExitStack() as run:
        Steps(request, fs, run).submitted_session()
        target = target_of(fs, request)
        rules = replace(request.rules(fs), high_watermark="log-end")
        chosen = select_partitions(fs, request.partition_filter)
        known = target.entries()
        configuration = with_metadata(fs, request.partition_filter.log_dirs, request.configuration, rules.now_ms)
        room = Room.of(fs, None, None)
        checked = [
            _with_room(room, item, target, rules, request) for item in _judged(fs, chosen, configuration, rules, known)
        ]
        for log_dir in request.partition_filter.log_dirs:
            of_log_dir = [item for item in checked if item.log_dir == log_dir]
            actions = Counter(item.action for item in of_log_dir)
            size_bytes = sum(item.size_bytes for item in of_log_dir if item.action in ("clean", "copy"))
            free = "" if target.is_store else f" ({human_bytes(fs.free_bytes(_place(target, log_dir, request)))} free)"
            print_message(
                f"keytail: from {log_dir} to {target.tree(log_dir)}: {actions['clean']} partitions would be compacted, "
                f"{actions['copy']} copied unchanged, {actions['keep']} are already in the target, "
                f"{actions['leave']} left out; up to {human_bytes(size_bytes)} would be written{free}"
            )
        _report_about(checked, configuration)
        is_due = any(item.action == "clean" for item in checked)
        if is_due and not request.submitted and is_on_this_host(request.master):
            report_uncompiled("compact")
        return [item.planned_row(request.map_memory(), in_detail=request.in_detail) for item in checked]


def _place(target: Target, log_dir: str, request: Request) -> str:
    """Return the directory to which a run writes first, or its nearest parent directory that exists."""
    if target.is_store:
        return request.scratch_dir or tempfile.gettempdir()
    return existing_directory(target.fs, target.places[target.log_dirs.index(log_dir)])


def _with_room(room: Room, item: PlannedPartition, target: Target, rules: Rules, request: Request) -> PlannedPartition:
    """Return the decision, or a refusal if there is no room where a run would first write the partition."""
    if item.action not in ("clean", "copy"):
        return item
    path = os.path.join(_place(target, item.log_dir, request), item.name)
    problem = room.lacking(item.task(request.task_settings(), rules, path, "plan", is_local=target.is_store))
    return item if problem is None else replace(item, action="leave", row=refused_row(item.row, problem))


def compact(request: Request, fs: FileSystem = LOCAL) -> list[ResultRow]:
    """Write the chosen partitions to the target; return a row for each, then rows of metadata logs that were not
    copied.
    """
    with contextlib.ExitStack() as run:
        steps = Steps(request, fs, run)
        target = target_of(fs, request)
        rules = replace(request.rules(fs), high_watermark="log-end")
        select_partitions(fs, request.partition_filter)  # report invalid flags before taking locks
        _refuse_in_use(fs, request.partition_filter.log_dirs)
        submitted = steps.submitted_session()
        if submitted is not None and is_named_by(submitted):
            print_message(
                "keytail: a run with --output-dir replaces nothing, and is not recorded in the ledger that the Spark "
                "conf names"
            )
        target.make()
        steps.lock(() if target.is_store else target.places)
        chosen, configuration = steps.select_partitions(rules.now_ms)
        known = target.entries()
        checked = _judged(fs, chosen, configuration, rules, known, execute=True)
        _report_about(checked, configuration)
        work = [item for item in checked if item.action in ("clean", "copy")]
        work += [item for item in _metadata(fs, chosen, known) if item.action == "copy"]
        sizes = [(item.name, item.size_bytes) for item in work]
        with Reporter("compact", sizes, READ_IN_A_COMPACTION) as reporter:
            engine = _start(steps, reporter, work) if work or submitted is not None else None
            driver = _Driver(steps, rules, target, chosen, known, checked, work, reporter)
            compaction = driver.compaction(engine) if engine is not None and work else None
            roots = driver.roots()
            if driver.is_outdated(roots):
                close_to_brokers(roots)
            placed = compaction.run_or_leave(steps.at_end, driver.rows) if compaction is not None else []
            _refuse_in_use(fs, request.partition_filter.log_dirs)
            driver.finish()
            return driver.rows(placed)


def _judged(
    fs: FileSystem,
    chosen: SelectedPartitions,
    configuration: Configuration,
    rules: Rules,
    known: Known,
    *,
    execute: bool = False,
) -> list[PlannedPartition]:
    return of_each(
        chosen.partitions,
        lambda log_dir, entry: judge(fs, log_dir, entry, configuration, rules, known, execute=execute),
        fs,
    )


def _report_about(checked: Sequence[PlannedPartition], configuration: Configuration) -> None:
    report_unhosted([item.name for item in checked if item.is_unhosted])
    report_version_rules(configuration, [item.topic for item in checked if item.action == "clean"])


def _start(steps: Steps, reporter: Reporter, work: Sequence[PlannedPartition]) -> Engine:
    expected = [item.planned.expected(steps.request.map_memory()) for item in work if item.planned is not None]
    return steps.start(reporter, expected, copy_seconds=[item.size_bytes / _COPIED_BYTES_PER_S for item in work])


@dataclass
class _Driver:
    """One run with --execute, from the decisions to the contents of the target."""

    steps: Steps
    rules: Rules
    target: Target
    chosen: SelectedPartitions
    known: dict[str, dict[str, TargetEntry]]
    planned_partitions: list[PlannedPartition]
    work: list[PlannedPartition]
    reporter: Reporter
    placed: dict[str, OutputRecord] = field(default_factory=dict)  # output records by path of the source

    def compaction(self, engine: Engine) -> Compaction:
        request, fs = self.steps.request, self.steps.fs
        scratch = self.target.scratch(self.steps.at_end)
        settings, run_id = request.task_settings(), secrets.token_hex(4)
        tasks = []
        for item in self.work:
            place = self.target.partition_path(item.log_dir, item.name)
            path = os.path.join(scratch, item.name) if scratch else place
            if scratch:
                os.mkdir(path)
            tasks.append(item.task(settings, self.rules, path, run_id, is_local=scratch is not None))
            self.target.tree(item.log_dir).make_partition(item.name, item.path)
        by_path = {task.partition_path: item for task, item in zip(tasks, self.work, strict=True)}
        destination = InTarget(
            fs,
            engine,
            Worker(engine.concurrent_tasks, request.shared_storage, self.target.by_log_dir),
            intended=lambda task: by_path[task.partition_path].intended(self.target),
            placed=self.placed,
        )
        events = Events.reported_by(self.reporter)
        return Compaction(engine, tasks, ScratchSpace(fs), destination, events, self.steps.deadline_s)

    def roots(self) -> list[Root]:
        """Return the log dirs of the target, with the partitions whose copies are up to date so far, and those that are
        lacking."""
        roots = []
        checked = {
            item.path: item for item in (*self.planned_partitions, *_metadata(self.steps.fs, self.chosen, self.known))
        }
        for facts in self.chosen.log_dirs:
            root = Root(facts, self.target.tree(facts.path))
            known = self.known[facts.path]
            entries = [(entry.path, os.path.basename(entry.path)) for entry in facts.partitions]
            if root.has_metadata:
                entries += [(item.path, item.name) for item in metadata_partition(self.steps.fs, facts, known)]
            for path, name in entries:
                item = checked.get(path)
                record = self.placed.get(path) or (item.record if item is not None and item.action == "keep" else None)
                if item is None:
                    record, why = not_chosen(self.steps.fs, facts, path, known.get(name))
                else:
                    why = "not placed by this run"
                if record is None:
                    root.lacking[name] = why
                else:
                    root.records[name] = record
            roots.append(root)
        self._add_moved_partitions(roots)
        return roots

    def _add_moved_partitions(self, roots: list[Root]) -> None:
        """Add to `lacking` the partitions in the target whose source moved to another log dir: no partition may be in
        two log dirs.
        """
        hosted = {name: root for root in roots for name in (*root.records, *root.lacking)}
        for root in roots:
            for name in self.known[root.facts.path]:
                if name in root.records or name in root.lacking:
                    continue
                if name in hosted:
                    place = root.tree.partition_path(name)
                    root.lacking[name] = f"moved to {hosted[name].facts.path}, but still in {place}: remove it there"

    def is_outdated(self, roots: Sequence[Root]) -> bool:
        complete = not any(root.lacking for root in roots)
        return bool(self.work) or any(
            is_outdated(root.tree, contents(self.steps.fs, root, is_complete=complete)) for root in roots
        )

    def finish(self) -> None:
        """Write the files of the target's log dirs themselves; report partitions that are missing or left over in the
        target."""
        roots = self.roots()
        lacking = [f"{name} ({why})" for root in roots for name, why in sorted(root.lacking.items())]
        write(self.steps.fs, roots, is_complete=not lacking)
        for root in roots:
            removed = sorted(self.known[root.facts.path].keys() - root.records.keys() - root.lacking.keys())
            for name in removed:
                path = root.tree.partition_path(name)
                self.reporter.note(f"{path} is still there, but the source no longer has {name}")
        if lacking:
            self.reporter.note(
                f"do not start a broker on the target (without meta.properties, none starts): it lacks partitions of "
                f"the source, which a broker would treat as empty: {listed(lacking, 20)}"
            )

    def rows(self, placed: Sequence[ResultRow]) -> list[ResultRow]:
        """Return the rows of the chosen partitions, in their order, then rows of metadata logs that were not copied."""
        done: Iterator[ResultRow] = iter(placed)
        rows = [
            item.with_limits(next(done)) if item.action in ("clean", "copy") else item.row
            for item in self.planned_partitions
        ]
        if self.steps.request.in_detail:
            rows = [item.detailed(row) for item, row in zip(self.planned_partitions, rows, strict=True)]
        return rows + [row for row in done if row.status not in DONE]


def _metadata(
    fs: FileSystem, chosen: SelectedPartitions, known: dict[str, dict[str, TargetEntry]]
) -> list[PlannedPartition]:
    return [item for facts in chosen.log_dirs for item in metadata_partition(fs, facts, known[facts.path])]


def _refuse_in_use(fs: FileSystem, log_dirs: Sequence[str]) -> None:
    for log_dir in log_dirs:
        if is_held(log_dir, fs):
            raise Refused(
                "the log dir is in use by a broker or another keytail run, or its lock cannot be checked",
                path=log_dir,
                remedy="Stop the broker, or take a snapshot of its log dirs and give its directories; then run again",
                slug="log-dir-in-use",
            )
