"""The command `audit`: compare the replicas of each partition, record by record. Reads only, takes no lock."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from keytail.cli.progress import Reporter
from keytail.cli.replicas import Replica, refuse_other_topic, replicas_of
from keytail.cli.selection import Choice, pick
from keytail.errors import KeytailError, Refused, UsageProblem, in_words
from keytail.format import names
from keytail.log.checkpoint import read_epochs
from keytail.log.cluster.metadata import read_topic_id
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.partition import LogDirFacts, PartitionEntry, survey_partition
from keytail.run.rows import status_of
from keytail.run.workers import workers_of_run
from keytail.telling import say

if TYPE_CHECKING:
    from keytail.audit.compare import ReplicaLog
    from keytail.audit.driver import AuditJob
    from keytail.audit.stages import Audit

AUDITED_BYTES_PER_S = 60e6  # of a core
GOOD = frozenset({"alike", "skipped"})

_Hosting = list[tuple[Replica, LogDirFacts, PartitionEntry]]


@dataclass(frozen=True)
class AuditRow:
    """One partition. `status`: `alike`, `differs`, `corrupt` (alike as far as it could be read), `skipped` (there is
    nothing to compare), `refused`, `failed`. Counts are of records, except those of transactions."""

    topic: str
    partition: int
    status: str
    error: str = ""
    replicas: tuple[dict[str, Any], ...] = ()
    first_offset: int | None = None
    end_offset: int | None = None
    records_compared: int | None = None
    divergences: dict[str, int] | None = None
    first_divergence: int | None = None
    examples: tuple[dict[str, Any], ...] = ()
    explained: dict[str, int] | None = None
    dropped_early: dict[str, int] | None = None
    not_compared: tuple[dict[str, Any], ...] = ()
    notes: tuple[str, ...] = ()
    start_ms: int | None = None
    end_ms: int | None = None
    problem: KeytailError | None = None  # the error of `error`

    @property
    def name(self) -> str:
        return f"{self.topic}-{self.partition}"


def audit(
    given: Sequence[str],
    choice: Choice,
    *,
    examples: int = 5,
    master: str | None = None,
    submitted: bool = False,
    on_row: Callable[[AuditRow], None] = lambda row: None,
    fs: FileSystem = LOCAL,
) -> list[AuditRow]:
    """Return a row for each chosen partition that any replica hosts, by topic and partition. `on_row` is called with
    the row of each compared partition when it is done."""
    if len(given) < 2:
        raise UsageProblem(
            "an audit needs at least two replicas",
            remedy="Pass --replica [NAME=]DIR[,DIR] once for each broker, with all of its log dirs",
            slug="fewer-than-two-replicas",
        )
    replicas = replicas_of(fs, given)
    hosting = _hosting(replicas, choice)
    rows: dict[str, AuditRow] = {}
    jobs: list[AuditJob] = []
    for (topic, partition), found in sorted(hosting.items()):
        row = AuditRow(topic, partition, "alike")
        try:
            made = _job(fs, row, found, examples)
        except (KeytailError, OSError) as problem:
            known = problem if isinstance(problem, KeytailError) else None
            status = status_of(known) if known else "failed"
            made = replace(row, status=status, error=in_words(problem), problem=known)
        if isinstance(made, AuditRow):
            rows[row.name] = made
        else:
            jobs.append(made)
    if jobs:
        _run(jobs, rows, master, submitted, on_row)
    return [rows[f"{topic}-{partition}"] for topic, partition in sorted(hosting)]


def _hosting(replicas: Sequence[Replica], choice: Choice) -> dict[tuple[str, int], _Hosting]:
    """Return the replicas that host each chosen partition."""
    surveyed = [facts for replica in replicas for facts in replica.log_dirs]
    chosen = {(entry.topic, entry.partition) for _, entry in pick(choice, surveyed)}
    hosting: dict[tuple[str, int], _Hosting] = {}
    for replica in replicas:
        for key, (log_dir, entry) in replica.by_partition.items():
            if key in chosen:
                hosting.setdefault(key, []).append((replica, log_dir, entry))
    return hosting


def _job(fs: FileSystem, row: AuditRow, hosting: _Hosting, examples: int) -> AuditJob | AuditRow:
    """Return the job for a partition, or its row if there is nothing to compare."""
    from keytail.audit.compare import MOST_REPLICAS, cleaning_limits, compared_range  # noqa: PLC0415 (the same)
    from keytail.audit.driver import AuditJob, shards_for  # noqa: PLC0415 (the same)
    from keytail.audit.scan import AuditTask  # noqa: PLC0415 (brings in the kernels)

    if len(hosting) == 1:
        return replace(row, status="skipped", error=f"only replica {hosting[0][0].name} has this partition")
    if len(hosting) > MOST_REPLICAS:
        what = f"{len(hosting)} replicas have this partition, but at most {MOST_REPLICAS} can be compared"
        raise Refused(what, remedy="Pass fewer --replica flags at a time", slug="too-many-replicas")
    topic_id = next((i for *_, entry in hosting if (i := read_topic_id(fs, entry.path)) is not None), None)
    for replica, _, entry in hosting:
        refuse_other_topic(fs, replica.name, entry.path, topic_id)
    logs = tuple(_log(fs, *one) for one in hosting)
    first, end = compared_range(logs)
    told = tuple(_told(log) for log in logs)
    if first >= end and any(log.segments[-1][1] or len(log.segments) > 1 for log in logs):
        what = f"no two replicas have offsets in common: the second one begins at {first}, the first one ends at {end}"
        return replace(row, status="skipped", error=what, replicas=told)
    size = sum(log.size_bytes for log in logs)
    task = AuditTask(
        row.topic, row.partition, logs, end, cleaning_limits(logs), shards_for(size), examples, secrets.randbits(63)
    )
    return AuditJob(task, first, size)


def _log(fs: FileSystem, replica: Replica, log_dir: LogDirFacts, entry: PartitionEntry) -> ReplicaLog:
    from keytail.audit.compare import ReplicaLog  # noqa: PLC0415 (brings in the kernels)

    facts = survey_partition(fs, log_dir, entry)
    if facts.problems:
        raise Refused(
            f"replica {replica.name}: {'; '.join(facts.problems)}",
            path=entry.path,
            remedy="If a broker is running there, it may be changing the partition: run the audit again. For details, "
            "run `keytail verify`",
            slug="unexpected-partition-state",
        )
    cleaned_to = facts.cleaner_checkpoint
    if cleaned_to is None and fs.exists(os.path.join(log_dir.path, names.CLEANER_CHECKPOINT)):
        cleaned_to = 0
    return ReplicaLog(
        name=replica.name,
        path=entry.path,
        segments=tuple((s.base_offset, s.log_bytes, s.log_mtime_ns) for s in facts.segments),
        log_start_offset=facts.log_start_offset,
        log_end_offset=facts.log_end_offset,
        high_watermark=facts.high_watermark,
        cleaned_to=cleaned_to,
        epochs=tuple(read_epochs(fs, os.path.join(entry.path, names.LEADER_EPOCHS))),
    )


def _told(log: ReplicaLog, records: int | None = None) -> dict[str, Any]:
    return {
        "name": log.name,
        "path": log.path,
        "segments": len(log.segments),
        "bytes": log.size_bytes,
        "records": records,
        "log_start_offset": log.log_start_offset,
        "log_end_offset": log.log_end_offset,
        "high_watermark": log.high_watermark,
        "cleaned_to": log.cleaned_to,
    }


def _run(
    jobs: list[AuditJob],
    rows: dict[str, AuditRow],
    master: str | None,
    submitted: bool,
    on_row: Callable[[AuditRow], None],
) -> None:
    from keytail.audit.driver import audit_all  # noqa: PLC0415 (brings in the kernels)

    sizes = [(f"{job.task.topic}-{job.task.partition}", job.size_bytes) for job in jobs]
    with contextlib.ExitStack() as run, Reporter("audit", sizes) as reporter:
        seconds = [job.size_bytes / AUDITED_BYTES_PER_S for job in jobs]
        large = any(not job.is_alone for job in jobs)
        spark = workers_of_run(run, reporter, master, seconds, submitted=submitted, needs_spark=large)

        def heard(job: AuditJob, outcome: Any) -> None:
            if outcome.trace:
                say(outcome.trace, "error")
            row = _row(job, outcome)
            rows[row.name] = row
            on_row(row)
            reporter.done(row.name, row.status, job.size_bytes, row.error)

        audit_all(spark, jobs, heard, lambda trace: say(trace, "error"))


def _row(job: AuditJob, outcome: Any) -> AuditRow:
    from keytail.audit.compare import status_of as status_of_audit  # noqa: PLC0415 (brings in the kernels)

    task = job.task
    row = AuditRow(
        task.topic, task.partition, "failed", start_ms=outcome.start_ms or None, end_ms=outcome.end_ms or None,
        replicas=tuple(_told(log) for log in task.replicas), first_offset=job.first_offset, end_offset=task.end_offset,
    )  # fmt: skip
    if outcome.problem is not None:
        # A closed segment that changes or vanishes while it is read is not damage: a broker cleans or deletes it.
        return replace(row, error=str(outcome.problem), problem=outcome.problem)
    found: Audit = outcome.value
    divergences = {kind: count for kind, count in sorted(found.divergences.items()) if count}
    gaps = tuple(
        {
            "replica": task.replicas[gap.replica].name,
            "first_offset": gap.first_offset,
            "end_offset": gap.end_offset,
            "path": gap.path,
            "byte_position": gap.byte_position,
            "what": gap.what,
        }
        for gap in found.gaps
    )
    offsets = [one["offset"] for one in found.examples]
    counted = zip(task.replicas, found.records or [0] * len(task.replicas), strict=True)
    return replace(
        row,
        status=status_of_audit(divergences, bool(gaps)),
        error=_summary(divergences, len(gaps)),
        replicas=tuple(_told(log, records) for log, records in counted),
        records_compared=found.common,
        divergences=divergences,
        first_divergence=min(offsets, default=None),
        examples=tuple(found.examples),
        explained=dict(sorted(found.explained.items())),
        dropped_early=dict(sorted(found.early.items())),
        not_compared=gaps,
        notes=tuple(_notes(job)),
    )


def _summary(divergences: dict[str, int], gaps: int) -> str:
    parts = [f"{count:,} {kind}" for kind, count in sorted(divergences.items(), key=lambda item: -item[1])]
    if gaps:
        parts.append(f"{gaps} damaged range{'s' if gaps != 1 else ''} could not be compared")
    return ", ".join(parts)


def _notes(job: AuditJob) -> list[str]:
    task, notes = job.task, []
    for log in task.replicas:
        if log.log_end_offset > task.end_offset:
            notes.append(f"{log.name} continues to offset {log.log_end_offset}; this part is not compared")
        if log.cleaned_to is None:
            notes.append(
                f"{log.name} has no cleaner-offset-checkpoint: cleaning may have removed records up to its log end"
            )
    return notes


def exit_status(rows: Sequence[AuditRow], named: frozenset[str] = frozenset()) -> int:
    """Return 0 if all partitions are alike or skipped, 3 if some are, 1 if none is. A skipped partition that the user
    has `named` does not count as alike."""
    good = [row.status in GOOD and not (row.status == "skipped" and row.name in named) for row in rows]
    if all(good):
        return 0
    return 3 if any(good) else 1
