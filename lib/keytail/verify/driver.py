"""Verifies the chosen partitions, and lists the problems that a broker would have. Every byte of the files is read or,
with --only-ends, only index files and the ends of segments. The command takes no lock and changes nothing. The tasks
run on an engine (run/engine.py), or, for little data, in this process; verify/task.py inspects a partition. Topic
settings are not needed: the checks apply to every topic.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from keytail.cli.progress import Reporter
from keytail.cli.selection import SelectedPartitions, select_partitions
from keytail.console import print_message
from keytail.errors import PERMISSION_DENIED, CorruptLog, ErrorText, in_words, is_denied, joined
from keytail.log.checkpoint import read_offsets
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.lock import is_held
from keytail.log.log_dirs import CHECKPOINTS, foreign_dirs
from keytail.log.partition import LogDirFacts, PartitionEntry
from keytail.run.every_task import run_every
from keytail.run.hosts import SeenLogs, refuse_other_logs, seen_logs
from keytail.run.kernels import compile_kernels
from keytail.run.rates import HERE_BYTES, SEGMENT_S, VERIFIED_BYTES_PER_S
from keytail.run.rows import status_of
from keytail.run.tasks import Outcome, run_attempt
from keytail.run.watching import sending_progress
from keytail.run.workers import workers_of_run
from keytail.verify.command import Request, VerifyRow
from keytail.verify.findings import Finding, Findings
from keytail.verify.scope import NO_CLAIMS, Claims, claims_of
from keytail.verify.task import VerifyReport, verify_partition

_END_BYTES = int(SEGMENT_S * VERIFIED_BYTES_PER_S)


@dataclass(frozen=True)
class VerifyTask:
    """One partition directory, and the offsets that the log dir's checkpoints have for the partition.

    `live`: a broker may be writing to the directory, so the log's tail is not checked. If `live` is False, `seen`
    describes the files that the driver saw in the directory: a task that sees other files raises Refused (None: files
    are not compared).
    """

    path: str
    size_bytes: int
    claims: Claims = NO_CLAIMS
    live: bool = False
    seen: SeenLogs | None = None
    only_ends: bool = False

    @property
    def read_bytes(self) -> int:
        """The approximate number of bytes that are read; with `only_ends`, the end of a segment counts as the number of
        bytes that are verified in the same time.
        """
        ends = self.seen.segments * _END_BYTES if self.only_ends and self.seen is not None else self.size_bytes
        return min(ends, self.size_bytes)


OnResult = Callable[[VerifyTask, Outcome[VerifyReport]], None]


def verify_on_worker(task: VerifyTask, attempt: str) -> VerifyReport:
    if task.seen is not None and not task.live:
        refuse_other_logs(LOCAL, task.path, task.seen)
    with sending_progress(task.path, attempt, "verify"):
        return verify_partition(LOCAL, task.path, task.claims, live=task.live, only_ends=task.only_ends)


def verify_here(tasks: Sequence[VerifyTask], on_result: OnResult) -> None:
    for task in tasks:
        on_result(task, run_attempt(verify_on_worker, task, "here"))


@dataclass
class _Run:
    entries: dict[str, PartitionEntry]
    twice: frozenset[tuple[str, int]]  # partitions with a directory in two log dirs
    reporter: Reporter
    on_row: Callable[[VerifyRow], None]
    rows: dict[str, VerifyRow] = field(default_factory=dict)

    def on_result(self, task: VerifyTask, outcome: Any) -> None:
        entry = self.entries[task.path]
        row = _row(entry, task, outcome, twice=(entry.topic, entry.partition) in self.twice)
        if outcome.trace:
            print_message(outcome.trace, "error")
        self.rows[task.path] = row
        self.on_row(row)
        self.reporter.done(row.name, row.status, row.bytes, row.error)


def verify(
    request: Request, fs: FileSystem = LOCAL, on_row: Callable[[VerifyRow], None] = lambda row: None
) -> list[VerifyRow]:
    """Return a row for each log dir with findings of its own, then a row for each chosen partition. `on_row` is called
    with the row of each partition when it is done.

    Spark is started only if there is much to read, the request names a master, or spark-submit runs this process.
    """
    chosen = select_partitions(fs, request.partition_filter)
    tasks = _tasks(fs, chosen, request.only_ends)
    homes = Counter((entry.topic, entry.partition) for facts in chosen.log_dirs for entry in facts.partitions)
    twice = frozenset(key for key, count in homes.items() if count > 1)
    sizes = [(os.path.basename(task.path), task.read_bytes) for task in tasks]
    size = sum(task.read_bytes for task in tasks)
    with contextlib.ExitStack() as run, Reporter("verify", sizes) as reporter:
        state = _Run({entry.path: entry for _, entry in chosen.partitions}, twice, reporter, on_row)
        seconds = [task.read_bytes / VERIFIED_BYTES_PER_S for task in tasks]
        if not request.submitted and request.master is None and size <= HERE_BYTES:
            compile_kernels(["verify"], reporter.note)
            reporter.watch()
            verify_here(tasks, state.on_result)
        else:
            engine = workers_of_run(
                run, reporter, request.master, seconds, kernels="verify", submitted=request.submitted
            )
            run_every(
                engine, tasks, verify_on_worker, state.on_result, name="verify", size_of=lambda task: task.read_bytes
            )
    return [*_log_dir_rows(fs, chosen.log_dirs), *(state.rows[task.path] for task in tasks)]


def _tasks(fs: FileSystem, chosen: SelectedPartitions, only_ends: bool) -> list[VerifyTask]:
    # A broker removes .kafka_cleanshutdown as soon as it has the lock.
    live = {facts.path: not facts.clean_shutdown and is_held(facts.path, fs) for facts in chosen.log_dirs}
    tasks = []
    for facts, entry in chosen.partitions:
        claims = claims_of(facts, entry.topic, entry.partition)
        seen = None
        with contextlib.suppress(OSError):  # the task reports the error
            seen = seen_logs(fs, entry.path)
        size_bytes = seen.size_bytes if seen is not None else 0
        tasks.append(
            VerifyTask(entry.path, size_bytes, claims, live=live[facts.path], seen=seen, only_ends=only_ends)
        )
    return tasks


def _log_dir_rows(fs: FileSystem, log_dirs: Sequence[LogDirFacts]) -> list[VerifyRow]:
    rows = []
    for facts in log_dirs:
        row = _with_findings(VerifyRow(None, None, facts.path, "sound"), verify_log_dir(fs, facts.path))
        if denied := [problem for problem in facts.problems if PERMISSION_DENIED in problem.slugs]:
            row = replace(row, status="refused", error=joined(denied))
        if row.error:
            rows.append(row)
    return rows


def _row(entry: PartitionEntry, task: VerifyTask, outcome: Any, *, twice: bool) -> VerifyRow:
    row = VerifyRow(
        topic=entry.topic,
        partition=entry.partition,
        log_dir=entry.log_dir,
        status="sound",
        live=task.live,
        only_ends=task.only_ends,
        bytes=task.size_bytes,
        start_ms=outcome.start_ms or None,
        end_ms=outcome.end_ms or None,
    )
    if outcome.problem is not None:
        status = status_of(outcome.problem)
        return replace(row, status="damaged" if status == "corrupt" else status, error=in_words(outcome.problem),
                       problem=outcome.problem)  # fmt: skip
    about_itself = Findings(entry.path)
    if twice:
        about_itself.add("two-homes", "")
    report = outcome.value
    counts = report.counts
    row = replace(row, segments=counts.segments, bytes=counts.bytes)
    if not task.only_ends:
        row = replace(row, batches=counts.batches, records=counts.records)
    return _with_findings(row, [*about_itself.found, *report.findings])


def _with_findings(row: VerifyRow, findings: Sequence[Finding]) -> VerifyRow:
    if not findings:
        return row
    errors = sum(finding.severity == "error" for finding in findings)
    return replace(
        row,
        status="damaged" if errors else "suspect",
        error=ErrorText(f"{len(findings)} finding{'s' if len(findings) != 1 else ''}"),
        findings=tuple(findings),
    )


def verify_log_dir(fs: FileSystem, path: str) -> tuple[Finding, ...]:
    """Return the findings about checkpoints and directory names of the log dir. Raises OSError if the log dir cannot be
    listed."""
    findings = Findings(path)
    for name in foreign_dirs(fs.scan(path)):
        findings.add("foreign-directory", name)
    for name in CHECKPOINTS:
        try:
            read_offsets(fs, os.path.join(path, name))
        except CorruptLog as problem:
            findings.add("checkpoint-unreadable", name, reason=problem.what)
        except OSError as problem:
            if is_denied(problem):  # the survey of the log dir reports this error
                continue
            findings.add("unreadable", name, reason=problem.strerror or str(problem))
    return tuple(findings.found)
