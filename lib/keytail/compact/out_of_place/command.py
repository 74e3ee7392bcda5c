"""`compact --output-dir`: writes the result of a compaction elsewhere; the log dirs remain unchanged.

The rules for what is due are those of `compact`, but for a partition that is already in the target, its output is used
as the source. Everything else is copied. The states on disk are described in compact/out_of_place/OUT_OF_PLACE.md.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from keytail.cli.metadata import with_metadata
from keytail.cli.progress import READ_IN_A_COMPACTION, Reporter
from keytail.cli.selection import Chosen, choose
from keytail.cli.stopping import Stopped
from keytail.compact.command import Request
from keytail.compact.gate import tell_unhosted
from keytail.compact.out_of_place.plan import Judged, judge, metadata_partition, not_chosen
from keytail.compact.out_of_place.target import Target, target_of
from keytail.compact.planning import Rules, say_how_old_messages_become, say_what_goes_by_file_time
from keytail.errors import Refused
from keytail.ledger.of_run import is_named_by
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.lock import hold, is_held
from keytail.run.each_partition import of_each
from keytail.run.ended import SparkEnded
from keytail.run.rows import DONE, ResultRow
from keytail.run.session import concurrent_tasks, session_of_run
from keytail.run.storage import ScratchSpace, refuse_shared_storage
from keytail.run.watching import address_of_driver
from keytail.run.workers import workers_of_run
from keytail.telling import say

if TYPE_CHECKING:
    from keytail.compact.driver import Compaction
    from keytail.compact.out_of_place.output_record import OutputRecord
    from keytail.compact.out_of_place.output_root import Root
    from keytail.compact.out_of_place.output_tree import Found

_COPIED_BYTES_PER_S = 400e6


def plan(request: Request, fs: FileSystem = LOCAL) -> list[ResultRow]:
    """Return a row for each chosen partition: what `--execute` would do. Changes and locks nothing on either side."""
    with contextlib.ExitStack() as run:
        if request.submitted:
            session_of_run(run, request.master, submitted=request.submitted)
        target = target_of(fs, request)
        rules = replace(request.rules(fs), high_watermark="log-end")
        chosen = choose(fs, request.choice)
        known = target.found()
        configuration = with_metadata(fs, request.choice.log_dirs, request.configuration, rules.now_ms)
        judged = of_each(
            chosen.partitions, lambda log_dir, entry: judge(fs, log_dir, entry, configuration, rules, known), fs
        )
        for log_dir in request.choice.log_dirs:
            fates = Counter(one.fate for one in judged if one.log_dir == log_dir)
            say(
                f"keytail: from {log_dir} to {target.tree(log_dir)}: {fates['clean']} partitions would be compacted, "
                f"{fates['copy']} copied unchanged, {fates['keep']} are there unchanged, {fates['leave']} left out"
            )
        tell_unhosted([one.name for one in judged if one.is_unhosted])
        say_how_old_messages_become(configuration, (one.topic for one in judged if one.fate == "clean"))
        say_what_goes_by_file_time(configuration, sum(one.fate == "clean" for one in judged))
        return [one.planned_row(request.map_memory(), in_detail=request.in_detail) for one in judged]


def compact(request: Request, fs: FileSystem = LOCAL) -> list[ResultRow]:
    """Write the chosen partitions to the target; return a row for each."""
    started_s = time.monotonic()
    with contextlib.ExitStack() as run:
        target = target_of(fs, request)
        rules = replace(request.rules(fs), high_watermark="log-end")
        choose(fs, request.choice)  # report invalid flags before taking locks
        _refuse_in_use(fs, request.choice.log_dirs)
        spark = session_of_run(run, request.master, submitted=request.submitted) if request.submitted else None
        if spark is not None and is_named_by(spark):
            say(
                "keytail: a run with --output-dir replaces nothing, and is not recorded in the ledger that the Spark "
                "conf names"
            )
        target.make()
        if not target.is_store:
            if not request.shared_storage:
                refuse_shared_storage(fs, target.places)
            run.enter_context(hold(target.places, fs))
        at_end = run.enter_context(contextlib.ExitStack())  # with the locks held, own session stopped
        chosen = choose(fs, request.choice)
        configuration = with_metadata(fs, request.choice.log_dirs, request.configuration, rules.now_ms)
        known = target.found()
        judged = of_each(
            chosen.partitions,
            lambda log_dir, entry: judge(fs, log_dir, entry, configuration, rules, known, execute=True),
            fs,
        )
        tell_unhosted([one.name for one in judged if one.is_unhosted])
        say_how_old_messages_become(configuration, (one.topic for one in judged if one.fate == "clean"))
        say_what_goes_by_file_time(configuration, sum(one.fate == "clean" for one in judged))
        work = [one for one in judged if one.fate in ("clean", "copy")]
        work += [one for one in _metadata(fs, chosen, known) if one.fate == "copy"]
        run_id = secrets.token_hex(4)
        sizes = [(one.name, one.size_bytes) for one in work]
        with Reporter("compact", sizes, READ_IN_A_COMPACTION) as reporter:
            if spark is not None:
                reporter.watch(address_of_driver(spark))
            elif work:
                spark = _workers(run, reporter, work, request)
            driver = _Driver(request, rules, fs, target, chosen, known, judged, work, run_id, reporter)
            deadline_s = None
            if request.deadline_minutes is not None:
                deadline_s = started_s + request.deadline_minutes * 60
            compaction = driver.compaction(spark, at_end, deadline_s) if work else None
            roots = driver.roots()
            if driver.is_outdated(roots):
                driver.close_to_brokers(roots)
            try:
                placed = compaction.run() if compaction is not None else []
            except (Stopped, SparkEnded) as stop:
                assert compaction is not None
                stop.rows = driver.rows(compaction.rows_so_far())
                at_end.callback(compaction.remove_scratch)
                raise
            _refuse_in_use(fs, request.choice.log_dirs)
            driver.finish()
            return driver.rows(placed)


@dataclass
class _Driver:
    """One executing run, from the decisions to the contents of the target."""

    request: Request
    rules: Rules
    fs: FileSystem
    target: Target
    chosen: Chosen
    known: dict[str, dict[str, Found]]
    judged: list[Judged]
    work: list[Judged]
    run_id: str
    reporter: Reporter

    def __post_init__(self) -> None:
        self.placed: dict[str, OutputRecord] = {}

    def compaction(self, spark: Any, at_end: contextlib.ExitStack, deadline_s: float | None) -> Compaction:
        from keytail.compact.driver import Compaction  # noqa: PLC0415 (brings in the kernels)
        from keytail.compact.out_of_place.driver import Placing, Worker, finish_by  # noqa: PLC0415 (the same)
        from keytail.run.tasks import run_bundle  # noqa: PLC0415 (the same)

        scratch = self.target.scratch(at_end)
        settings = self.request.task_settings()
        tasks = []
        for one in self.work:
            place = self.target.place_of(one.log_dir, one.name)
            path = os.path.join(scratch, one.name) if scratch else place
            if scratch:
                os.mkdir(path)
            tasks.append(one.task(settings, self.rules, path, self.run_id, is_local=scratch is not None))
            self.target.tree(one.log_dir).make_partition(one.name, one.path)
        by_path = {task.partition_path: one for task, one in zip(tasks, self.work, strict=True)}
        worker = Worker(concurrent_tasks(spark), self.request.shared_storage, self.target.by_log_dir)
        finish = finish_by(run_bundle, worker, spark)

        def place_one(task: Any, row: ResultRow) -> Placing:
            intended = by_path[task.partition_path].intended(self.target)
            return Placing(self.fs, task, row, intended, finish, self._on_record)

        return Compaction(
            spark=spark,
            tasks=tasks,
            space=ScratchSpace(self.fs),
            hosted={},
            on_row=lambda row: self.reporter.done(row.name, row.status, row.bytes_before or 0, row.error),
            on_trace=lambda trace: say(trace, "error"),
            on_note=self.reporter.note,
            on_phase=self.reporter.phase,
            shared_storage=self.request.shared_storage,
            deadline_s=deadline_s,
            fs=self.fs,
            clean=worker.place,
            place=place_one,
        )

    def _on_record(self, task: Any, record: OutputRecord) -> None:
        self.placed[task.partition_path] = record

    def roots(self) -> list[Root]:
        """Return the log dirs of the target, according to what is placed so far."""
        from keytail.compact.out_of_place.output_root import Root  # noqa: PLC0415 (brings in the kernels)

        roots = []
        judged = {one.path: one for one in (*self.judged, *_metadata(self.fs, self.chosen, self.known))}
        for facts in self.chosen.log_dirs:
            root = Root(facts, self.target.tree(facts.path))
            known = self.known[facts.path]
            entries = [(entry.path, os.path.basename(entry.path)) for entry in facts.partitions]
            if root.has_metadata:
                entries += [(one.path, one.name) for one in metadata_partition(self.fs, facts, known)]
            for path, name in entries:
                one = judged.get(path)
                record = self.placed.get(path) or (one.record if one is not None and one.fate == "keep" else None)
                if one is None:
                    record, why = not_chosen(self.fs, facts, path, known.get(name))
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
        from keytail.compact.out_of_place.output_root import contents, is_outdated  # noqa: PLC0415 (brings in the kernels)

        complete = not any(root.lacking for root in roots)
        return bool(self.work) or any(
            is_outdated(root.tree, contents(self.fs, root, is_complete=complete)) for root in roots
        )

    def close_to_brokers(self, roots: Sequence[Root]) -> None:
        from keytail.compact.out_of_place.output_root import close_to_brokers  # noqa: PLC0415 (brings in the kernels)

        close_to_brokers(roots)

    def finish(self) -> None:
        """Write the files of the log dirs, and report what is missing or left over."""
        from keytail.compact.out_of_place.output_root import write  # noqa: PLC0415 (brings in the kernels)

        roots = self.roots()
        lacking = [f"{name} ({why})" for root in roots for name, why in sorted(root.lacking.items())]
        write(self.fs, roots, is_complete=not lacking)
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
        if self.request.in_detail:
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


def _workers(run: contextlib.ExitStack, reporter: Reporter, work: Sequence[Judged], request: Request) -> Any:
    expected = [one.planned.expected(request.map_memory()) for one in work if one.planned is not None]
    may_fan_out = any(one is not None and one.way == "maybe fan-out" for one in expected)
    needs_spark = (request.fan_out != "never" and may_fan_out) or request.fan_out == "always"
    seconds = [one.seconds for one in expected if one is not None]
    seconds += [one.size_bytes / _COPIED_BYTES_PER_S for one in work]
    return workers_of_run(run, reporter, request.master, seconds, needs_spark=needs_spark)
