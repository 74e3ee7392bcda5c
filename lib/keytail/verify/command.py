"""The command `verify`: read every byte of the chosen partitions and list the problems that a broker would have.

Takes no lock and changes nothing. Needs no topic configuration: the checks apply to every topic.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from keytail.cli import rows as show
from keytail.cli.progress import Reporter
from keytail.cli.selection import Choice, Chosen, choose
from keytail.errors import KeytailError
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.lock import is_held
from keytail.log.partition import LogDirFacts, PartitionEntry
from keytail.run.rates import HERE_BYTES, VERIFIED_BYTES_PER_S
from keytail.run.rows import status_of
from keytail.run.workers import workers_of_run
from keytail.telling import say

if TYPE_CHECKING:
    from keytail.verify.driver import VerifyTask
    from keytail.verify.findings import Finding


_NAMED = 5  # partitions in the last line


@dataclass(frozen=True)
class VerifyRow:
    """One partition; or, without topic and partition, a log dir with findings of its own.

    `status`: `sound`, `suspect` (warnings only), `damaged`, `failed` if it could not be read to the end, or
    `refused` if its files are not those that were listed: on another host, or changed meanwhile.
    `live`: a broker was running on it, so the tail of the active segment was not checked.
    """

    topic: str | None
    partition: int | None
    log_dir: str
    status: str
    error: str = ""
    live: bool = False
    segments: int = 0
    bytes: int = 0
    batches: int | None = None
    records: int | None = None
    findings: tuple[dict[str, Any], ...] = ()
    start_ms: int | None = None
    end_ms: int | None = None
    problem: KeytailError | None = field(default=None, compare=False, repr=False)  # the error of `error`

    @property
    def name(self) -> str:
        return self.log_dir if self.topic is None else f"{self.topic}-{self.partition}"


@dataclass
class _Run:
    entries: dict[str, PartitionEntry]
    twice: frozenset[tuple[str, int]]  # partitions with a directory in two log dirs
    reporter: Reporter
    on_row: Callable[[VerifyRow], None]
    rows: dict[str, VerifyRow] = field(default_factory=dict)

    def heard(self, task: VerifyTask, outcome: Any) -> None:
        entry = self.entries[task.path]
        row = _row(entry, task, outcome, twice=(entry.topic, entry.partition) in self.twice)
        if outcome.trace:
            say(outcome.trace, "error")
        self.rows[task.path] = row
        self.on_row(row)
        self.reporter.done(row.name, row.status, row.bytes, row.error)


def verify(
    choice: Choice,
    *,
    master: str | None = None,
    submitted: bool = False,
    on_row: Callable[[VerifyRow], None] = lambda row: None,
    fs: FileSystem = LOCAL,
) -> list[VerifyRow]:
    """Return a row for each log dir with findings of its own, then one for each chosen partition. `on_row` is called
    with the row of each partition when it is done.

    Starts Spark only if there is much to read, or `master` or `submitted` is given.
    """
    from keytail.verify.driver import verify_all, verify_here  # noqa: PLC0415 (--help and --version stay fast)

    chosen = choose(fs, choice)
    tasks = _tasks(fs, chosen)
    homes = Counter((entry.topic, entry.partition) for facts in chosen.log_dirs for entry in facts.partitions)
    twice = frozenset(key for key, count in homes.items() if count > 1)
    sizes = [(os.path.basename(task.path), task.size_bytes) for task in tasks]
    size = sum(task.size_bytes for task in tasks)
    with contextlib.ExitStack() as run, Reporter("verify", sizes) as reporter:
        state = _Run({entry.path: entry for _, entry in chosen.partitions}, twice, reporter, on_row)
        seconds = [task.size_bytes / VERIFIED_BYTES_PER_S for task in tasks]
        if not submitted and master is None and size <= HERE_BYTES:
            reporter.watch()
            verify_here(tasks, state.heard)
        else:
            engine = workers_of_run(run, reporter, master, seconds, submitted=submitted)
            verify_all(engine, tasks, state.heard)
    return [*_log_dir_rows(fs, chosen.log_dirs), *(state.rows[task.path] for task in tasks)]


def _tasks(fs: FileSystem, chosen: Chosen) -> list[VerifyTask]:
    from keytail.run.hosts import seen_logs  # noqa: PLC0415 (as the line below)
    from keytail.verify.driver import VerifyTask  # noqa: PLC0415 (brings in the kernels)
    from keytail.verify.scope import claims_of  # noqa: PLC0415 (brings in the kernels)

    # A broker removes .kafka_cleanshutdown as soon as it has the lock.
    live = {facts.path: not facts.clean_shutdown and is_held(facts.path, fs) for facts in chosen.log_dirs}
    tasks = []
    for facts, entry in chosen.partitions:
        claims = claims_of(facts, entry.topic, entry.partition)
        seen = None
        with contextlib.suppress(OSError):  # the task will report it
            seen = seen_logs(fs, entry.path)
        size_bytes = seen.size_bytes if seen is not None else 0
        tasks.append(VerifyTask(entry.path, size_bytes, claims, live=live[facts.path], seen=seen))
    return tasks


def _log_dir_rows(fs: FileSystem, log_dirs: Sequence[LogDirFacts]) -> list[VerifyRow]:
    from keytail.verify.log_dir import verify_log_dir  # noqa: PLC0415 (--help and --version stay fast)

    rows = []
    for facts in log_dirs:
        findings = verify_log_dir(fs, facts.path)
        if findings:
            rows.append(_with_findings(VerifyRow(None, None, facts.path, "sound"), findings))
    return rows


def _row(entry: PartitionEntry, task: VerifyTask, outcome: Any, *, twice: bool) -> VerifyRow:
    from keytail.verify.findings import Findings  # noqa: PLC0415 (--help and --version stay fast)

    row = VerifyRow(
        topic=entry.topic,
        partition=entry.partition,
        log_dir=entry.log_dir,
        status="sound",
        live=task.live,
        bytes=task.size_bytes,
        start_ms=outcome.start_ms or None,
        end_ms=outcome.end_ms or None,
    )
    if outcome.problem is not None:
        status = status_of(outcome.problem)
        return replace(row, status="damaged" if status == "corrupt" else status, error=str(outcome.problem),
                       problem=outcome.problem)  # fmt: skip
    about_itself = Findings(entry.path)
    if twice:
        about_itself.add("two-homes", "")
    report = outcome.value
    counts = report.counts
    row = replace(
        row, segments=counts.segments, bytes=counts.bytes, batches=counts.batches, records=counts.records
    )
    return _with_findings(row, [*about_itself.found, *report.findings])


def _with_findings(row: VerifyRow, findings: Sequence[Finding]) -> VerifyRow:
    if not findings:
        return row
    errors = sum(finding.severity == "error" for finding in findings)
    return replace(
        row,
        status="damaged" if errors else "suspect",
        error=f"{len(findings)} finding{'s' if len(findings) != 1 else ''}",
        findings=tuple(asdict(finding) for finding in findings),
    )


def exit_status(rows: Sequence[VerifyRow]) -> int:
    return 0 if all(row.status == "sound" for row in rows) else 1


def print_table(rows: Sequence[VerifyRow]) -> None:
    """Print a line for each partition, then every finding with its place and remedy."""
    console = show.output_console()
    table = Table(title="Verified", title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("partition", overflow="fold")
    table.add_column("status")
    for name in ("segments", "log size", "records", "findings", "took"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            escape(row.name),
            show.styled(row.status) + (" (in use)" if row.live else ""),
            f"{row.segments:,}",
            show.human_bytes(row.bytes),
            "" if row.records is None else f"{row.records:,}",
            str(len(row.findings)) if row.findings else "",
            show.human_seconds(row.start_ms, row.end_ms),
        )
    console.print(table)
    for row in rows:
        if row.error and not row.findings:
            console.print(f"\n{escape(row.name)} {show.styled(row.status)}: {escape(row.error)}", soft_wrap=True)
        for finding in row.findings:
            console.print(f"\n{escape(row.name)} {finding_text(finding)}", soft_wrap=True)
    if any(row.live for row in rows):
        console.print("\nIn use: a broker runs there. The end of an active segment was not checked.", soft_wrap=True)
    bad = sum(row.status != "sound" for row in rows)
    size = show.human_bytes(sum(row.bytes for row in rows))
    verdict = f"{bad} with findings" if bad else "no problems found"
    count = sum(row.topic is not None for row in rows)
    console.print(f"\n{count} partition{'s' if count != 1 else ''}, {size}: {verdict}.")
    if text := next_step(rows):
        console.print(escape(text), soft_wrap=True)


def next_step(rows: Sequence[VerifyRow]) -> str:
    losing = [row.name for row in rows if not row.live and any(finding["start_loses"] for finding in row.findings)]
    if not losing:
        return ""
    named = ", ".join(losing[:_NAMED]) + (f" and {len(losing) - _NAMED} more" if losing[_NAMED:] else "")
    return f"Do not start the broker: it would lose or hide acknowledged records of {named}."


def finding_text(finding: dict[str, Any]) -> str:
    """Return `error: what (path, byte position n, offset m). A broker: what it does. Remedy`, escaped for rich."""
    where = [str(finding["path"])] if finding.get("path") else []
    where += [f"{name} {finding[key]}" for name, key in (("byte position", "byte_position"), ("offset", "offset"))
              if finding.get(key) is not None]  # fmt: skip
    text = f"{finding['severity']}: {finding['what']}" + (f" ({', '.join(where)})" if where else "")
    if finding.get("broker"):
        text += f". A broker: {finding['broker']}"
    if finding.get("start_loses"):
        text += ". Starting the broker loses records"
    return escape(text + (f". {finding['remedy']}" if finding.get("remedy") else ""))
