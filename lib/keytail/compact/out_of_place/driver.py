"""`compact --output-dir`: writes what the log dirs would become elsewhere; they remain unchanged.

The rules for what is due are those of `compact`, but for a partition that is already in the target, its output is used
as the source. Everything else is copied. The states on disk are described in compact/out_of_place/OUT_OF_PLACE.md.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from keytail.cli.configuration import Configuration
from keytail.cli.metadata import with_metadata
from keytail.cli.progress import READ_IN_A_COMPACTION, Reporter
from keytail.cli.selection import Chosen, choose
from keytail.compact.command import Request
from keytail.compact.compaction import Compaction
from keytail.compact.gate import tell_unhosted
from keytail.compact.out_of_place.output_record import OutputRecord
from keytail.compact.out_of_place.output_root import Root, close_to_brokers, contents, is_outdated, write
from keytail.compact.out_of_place.output_tree import Found
from keytail.compact.out_of_place.placing import InTarget, Worker
from keytail.compact.out_of_place.plan import Judged, Known, judge, metadata_partition, not_chosen
from keytail.compact.out_of_place.target import Target, target_of
from keytail.compact.plan import Rules
from keytail.compact.planning import say_what_differs
from keytail.compact.run_state import Events
from keytail.compact.steps import Steps
from keytail.errors import Refused
from keytail.ledger.of_run import is_named_by
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.lock import is_held
from keytail.run.each_partition import of_each
from keytail.run.engine import Engine
from keytail.run.rows import DONE, ResultRow
from keytail.run.storage import ScratchSpace
from keytail.telling import say

_COPIED_BYTES_PER_S = 400e6


def plan(request: Request, fs: FileSystem = LOCAL) -> list[ResultRow]:
    """Return a row for each chosen partition: what `--execute` would do. Changes and locks nothing on either side."""
    with contextlib.ExitStack() as run:
        Steps(request, fs, run).submitted_session()
        target = target_of(fs, request)
        rules = replace(request.rules(fs), high_watermark="log-end")
        chosen = choose(fs, request.choice)
        known = target.found()
        configuration = with_metadata(fs, request.choice.log_dirs, request.configuration, rules.now_ms)
        judged = _judged(fs, chosen, configuration, rules, known)
        for log_dir in request.choice.log_dirs:
            fates = Counter(one.fate for one in judged if one.log_dir == log_dir)
            say(
                f"keytail: from {log_dir} to {target.tree(log_dir)}: {fates['clean']} partitions would be compacted, "
                f"{fates['copy']} copied unchanged, {fates['keep']} are there unchanged, {fates['leave']} left out"
            )
        _say_about(judged, configuration)
        return [one.planned_row(request.map_memory(), in_detail=request.in_detail) for one in judged]


def compact(request: Request, fs: FileSystem = LOCAL) -> list[ResultRow]:
    """Write the chosen partitions to the target; return a row for each."""
    with contextlib.ExitStack() as run:
        steps = Steps(request, fs, run)
        target = target_of(fs, request)
        rules = replace(request.rules(fs), high_watermark="log-end")
        choose(fs, request.choice)  # report invalid flags before taking locks
        _refuse_in_use(fs, request.choice.log_dirs)
        submitted = steps.submitted_session()
        if submitted is not None and is_named_by(submitted):
            say(
                "keytail: a run with --output-dir replaces nothing, and is not recorded in the ledger that the Spark "
                "conf names"
            )
        target.make()
        steps.lock(() if target.is_store else target.places)
        chosen, configuration = steps.choose(rules.now_ms)
        known = target.found()
        judged = _judged(fs, chosen, configuration, rules, known, execute=True)
        _say_about(judged, configuration)
        work = [one for one in judged if one.fate in ("clean", "copy")]
        work += [one for one in _metadata(fs, chosen, known) if one.fate == "copy"]
        sizes = [(one.name, one.size_bytes) for one in work]
        with Reporter("compact", sizes, READ_IN_A_COMPACTION) as reporter:
            engine = _start(steps, reporter, work) if work or submitted is not None else None
            driver = _Driver(steps, rules, target, chosen, known, judged, work, reporter)
            compaction = driver.compaction(engine) if engine is not None and work else None
            roots = driver.roots()
            if driver.is_outdated(roots):
                close_to_brokers(roots)
            placed = compaction.run_or_leave(steps.at_end, driver.rows) if compaction is not None else []
            _refuse_in_use(fs, request.choice.log_dirs)
            driver.finish()
            return driver.rows(placed)


def _judged(
    fs: FileSystem, chosen: Chosen, configuration: Configuration, rules: Rules, known: Known, *, execute: bool = False
) -> list[Judged]:
    return of_each(
        chosen.partitions,
        lambda log_dir, entry: judge(fs, log_dir, entry, configuration, rules, known, execute=execute),
        fs,
    )


def _say_about(judged: Sequence[Judged], configuration: Configuration) -> None:
    tell_unhosted([one.name for one in judged if one.is_unhosted])
    say_what_differs(configuration, [one.topic for one in judged if one.fate == "clean"])


def _start(steps: Steps, reporter: Reporter, work: Sequence[Judged]) -> Engine:
    expected = [one.planned.expected(steps.request.map_memory()) for one in work if one.planned is not None]
    return steps.start(reporter, expected, copies_s=[one.size_bytes / _COPIED_BYTES_PER_S for one in work])


@dataclass
class _Driver:
    """One executing run, from the decisions to the contents of the target."""

    steps: Steps
    rules: Rules
    target: Target
    chosen: Chosen
    known: dict[str, dict[str, Found]]
    judged: list[Judged]
    work: list[Judged]
    reporter: Reporter
    placed: dict[str, OutputRecord] = field(default_factory=dict)  # by path of the source

    def compaction(self, engine: Engine) -> Compaction:
        request, fs = self.steps.request, self.steps.fs
        scratch = self.target.scratch(self.steps.at_end)
        settings, run_id = request.task_settings(), secrets.token_hex(4)
        tasks = []
        for one in self.work:
            place = self.target.place_of(one.log_dir, one.name)
            path = os.path.join(scratch, one.name) if scratch else place
            if scratch:
                os.mkdir(path)
            tasks.append(one.task(settings, self.rules, path, run_id, is_local=scratch is not None))
            self.target.tree(one.log_dir).make_partition(one.name, one.path)
        by_path = {task.partition_path: one for task, one in zip(tasks, self.work, strict=True)}
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
        """Return the log dirs of the target, according to what is placed so far."""
        roots = []
        judged = {one.path: one for one in (*self.judged, *_metadata(self.steps.fs, self.chosen, self.known))}
        for facts in self.chosen.log_dirs:
            root = Root(facts, self.target.tree(facts.path))
            known = self.known[facts.path]
            entries = [(entry.path, os.path.basename(entry.path)) for entry in facts.partitions]
            if root.has_metadata:
                entries += [(one.path, one.name) for one in metadata_partition(self.steps.fs, facts, known)]
            for path, name in entries:
                one = judged.get(path)
                record = self.placed.get(path) or (one.record if one is not None and one.fate == "keep" else None)
                if one is None:
                    record, why = not_chosen(self.steps.fs, facts, path, known.get(name))
                else:
                    why = "not placed by this run"
                if record is None:
                    root.lacking[name] = why
                else:
                    root.records[name] = record
            roots.append(root)
        self._find_vanished(roots)
        return roots

    def _find_vanished(self, roots: list[Root]) -> None:
        """Find partitions in the target that left their log dir of the source. A broker refuses one in two log dirs."""
        hosted = {name: root for root in roots for name in (*root.records, *root.lacking)}
        for root in roots:
            for name in self.known[root.facts.path]:
                if name in root.records or name in root.lacking:
                    continue
                if name in hosted:
                    place = root.tree.place_of(name)
                    root.lacking[name] = f"moved to {hosted[name].facts.path}, but still in {place}: remove it there"

    def is_outdated(self, roots: Sequence[Root]) -> bool:
        complete = not any(root.lacking for root in roots)
        return bool(self.work) or any(
            is_outdated(root.tree, contents(self.steps.fs, root, is_complete=complete)) for root in roots
        )

    def finish(self) -> None:
        """Write the files of the log dirs, and report what is missing or left over."""
        roots = self.roots()
        lacking = [f"{name} ({why})" for root in roots for name, why in sorted(root.lacking.items())]
        write(self.steps.fs, roots, is_complete=not lacking)
        for root in roots:
            gone = sorted(self.known[root.facts.path].keys() - root.records.keys() - root.lacking.keys())
            for name in gone:
                self.reporter.note(f"{root.tree.place_of(name)} is still there, but the source no longer has {name}")
        if lacking:
            listed = ", ".join(lacking[:20]) + (f" and {len(lacking) - 20} more" if len(lacking) > 20 else "")
            self.reporter.note(
                f"do not start a broker on the target (without meta.properties, none starts): it lacks partitions of "
                f"the source, which a broker would treat as empty: {listed}"
            )

    def rows(self, placed: Sequence[ResultRow]) -> list[ResultRow]:
        """Return the rows of the chosen partitions, in their order, and that of a metadata log that was not copied."""
        done: Iterator[ResultRow] = iter(placed)
        rows = [one.gated(next(done)) if one.fate in ("clean", "copy") else one.row for one in self.judged]
        if self.steps.request.in_detail:
            rows = [one.detailed(row) for one, row in zip(self.judged, rows, strict=True)]
        return rows + [row for row in done if row.status not in DONE]


def _metadata(fs: FileSystem, chosen: Chosen, known: dict[str, dict[str, Found]]) -> list[Judged]:
    return [one for facts in chosen.log_dirs for one in metadata_partition(fs, facts, known[facts.path])]


def _refuse_in_use(fs: FileSystem, log_dirs: Sequence[str]) -> None:
    for log_dir in log_dirs:
        if is_held(log_dir, fs):
            raise Refused(
                "the log dir is in use by a broker or another keytail run, or its lock cannot be checked",
                path=log_dir,
                remedy="Stop the broker, or take a snapshot of its log dirs and give its directories; then run again",
                slug="log-dir-in-use",
            )
