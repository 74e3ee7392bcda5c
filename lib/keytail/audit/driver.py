"""Audits the chosen partitions: compares their replicas record by record. The command only reads, and takes no lock.

Each small partition is audited by one task, on Spark or in a child process; a large partition is audited by tasks on
all hosts. This module schedules the tasks; audit/stages.py compares the replicas.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from keytail.audit.command import AuditRow, Request
from keytail.audit.compare import MAX_REPLICAS, ReplicaLog, compared_range
from keytail.audit.compare import status_of as status_of_audit
from keytail.audit.erased import find_left
from keytail.audit.scan import AuditTask
from keytail.audit.stages import Alone, Audit
from keytail.audit.stages import audit as compared
from keytail.cli.progress import Reporter
from keytail.cli.replicas import Replica, refuse_other_topic, replicas_of
from keytail.cli.rows import human_bytes
from keytail.cli.selection import PartitionFilter, matching_partitions
from keytail.compact.fan_out.on_spark import StagesOnSpark, Workers
from keytail.console import print_message
from keytail.errors import EXPLAINED, ErrorText, KeytailError, Refused, UsageProblem, in_words, joined
from keytail.extras import SPARK, require
from keytail.format import names
from keytail.log.checkpoint import read_epochs
from keytail.log.cluster.metadata import read_topic_id
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.partition import LogDirFacts, PartitionEntry, survey_partition
from keytail.run.engine import Engine
from keytail.run.rows import status_of
from keytail.run.tasks import Outcome, run_attempt
from keytail.run.watching import sending_progress
from keytail.run.workers import workers_of_run

AUDITED_BYTES_PER_S = 60e6  # bytes per second and core
# Maximum bytes, in all replicas, of a partition that one task audits, in a few hundred MiB of memory.
ALONE_BYTES = 64 << 20
# Bytes of logs per shard. A shard usually needs 50 MiB of memory, and ten times as much with tiny records.
SHARD_BYTES = 64 << 20
MAX_SHARDS = 4096
BUNDLE_PARTITIONS = 64


@dataclass(frozen=True)
class AuditJob:
    """The audit of one partition, from the lowest offset that two of its replicas should have."""

    task: AuditTask
    first_offset: int
    size_bytes: int

    @property
    def is_alone(self) -> bool:
        return self.size_bytes <= ALONE_BYTES


OnResult = Callable[[AuditJob, Outcome[Audit]], None]


def shards_for(size_bytes: int) -> int:
    if size_bytes <= ALONE_BYTES:
        return 1
    return min(MAX_SHARDS, -(-size_bytes // SHARD_BYTES))


def audit_on_worker(job: AuditJob, attempt: str) -> Audit:
    with sending_progress(job.task.replicas[0].path, attempt, "compare"):
        return compared(job.task, job.first_offset, Alone(LOCAL))


def _audit_with(stages: StagesOnSpark, job: AuditJob, attempt: str) -> Audit:
    return compared(job.task, job.first_offset, stages)


def audit_all(engine: Engine, jobs: Sequence[AuditJob], on_result: OnResult, on_trace: Callable[[str], None]) -> None:
    """Audit all partitions; large partitions require Spark. `on_result` is called for each large partition when it is
    done, and for small partitions when their bundle is done."""
    small = sorted((job for job in jobs if job.is_alone), key=lambda job: -job.size_bytes)
    for start in range(0, len(small), BUNDLE_PARTITIONS):
        bundle = small[start : start + BUNDLE_PARTITIONS]
        for job, outcome in zip(bundle, engine.run_bundle(bundle, audit_on_worker, name="audit"), strict=True):
            on_result(job, outcome)
    for job in jobs:
        if job.is_alone:
            continue
        task = job.task
        # Nothing is written, so a delay until other hosts see writes on a network file system does not matter.
        workers = Workers(task.replicas[0].path, engine.concurrent_tasks, None, shared_storage=True)
        stages = StagesOnSpark(engine, workers, f"audit {task.topic}-{task.partition}", on_trace)
        on_result(job, run_attempt(partial(_audit_with, stages), job, "driver"))


_Hosting = list[tuple[Replica, LogDirFacts, PartitionEntry]]


def audit(
    request: Request, fs: FileSystem = LOCAL, on_row: Callable[[AuditRow], None] = lambda row: None
) -> list[AuditRow]:
    """Return a row for each chosen partition that any replica hosts, sorted by topic and partition. `on_row` is called
    with the row of each compared partition when it is done."""
    if len(request.replicas) < 2 and request.erased is None:
        raise UsageProblem(
            "an audit needs at least two replicas",
            remedy="Pass --replica [NAME=]DIR[,DIR] once for each broker, with all of its log dirs",
            slug="fewer-than-two-replicas",
        )
    replicas = replicas_of(fs, request.replicas)
    hosting = _hosting(replicas, request.partition_filter)
    if request.erased is not None:
        return find_left(fs, request, replicas, hosting, on_row)
    rows: dict[str, AuditRow] = {}
    jobs: list[AuditJob] = []
    for (topic, partition), found in sorted(hosting.items()):
        row = AuditRow(topic, partition, "alike")
        try:
            made = _job(fs, row, found, request.examples)
        except EXPLAINED as problem:
            known = problem if isinstance(problem, KeytailError) else None
            made = replace(row, status=status_of(problem), error=in_words(problem), problem=known)
        if isinstance(made, AuditRow):
            rows[row.name] = made
        else:
            jobs.append(made)
    if jobs:
        _run(jobs, rows, request, on_row)
    return [rows[f"{topic}-{partition}"] for topic, partition in sorted(hosting)]


def _hosting(replicas: Sequence[Replica], partition_filter: PartitionFilter) -> dict[tuple[str, int], _Hosting]:
    """Return, for each chosen partition, the replicas that host it."""
    surveyed = [facts for replica in replicas for facts in replica.log_dirs]
    chosen = {(entry.topic, entry.partition) for _, entry in matching_partitions(partition_filter, surveyed)}
    hosting: dict[tuple[str, int], _Hosting] = {}
    for replica in replicas:
        for key, (log_dir, entry) in replica.by_partition.items():
            if key in chosen:
                hosting.setdefault(key, []).append((replica, log_dir, entry))
    return hosting


def _job(fs: FileSystem, row: AuditRow, hosting: _Hosting, examples: int) -> AuditJob | AuditRow:
    """Return the job for a partition, or its row if there is nothing to compare."""
    if len(hosting) == 1:
        return replace(row, status="skipped", error=ErrorText(f"only replica {hosting[0][0].name} has this partition"))
    if len(hosting) > MAX_REPLICAS:
        what = f"{len(hosting)} replicas have this partition, but at most {MAX_REPLICAS} can be compared"
        raise Refused(what, remedy="Pass fewer --replica flags at a time", slug="too-many-replicas")
    topic_id = next((i for *_, entry in hosting if (i := read_topic_id(fs, entry.path)) is not None), None)
    for replica, _, entry in hosting:
        refuse_other_topic(fs, replica.name, entry.path, topic_id)
    logs = tuple(_log(fs, *item) for item in hosting)
    first, end = compared_range(logs)
    reported = tuple(_reported(log) for log in logs)
    if first >= end and any(log.segments[-1][1] or len(log.segments) > 1 for log in logs):
        what = f"no two replicas have offsets in common: the range to compare would be {first} to {end}"
        return replace(row, status="skipped", error=ErrorText(what), replicas=reported)
    size = sum(log.size_bytes for log in logs)
    task = AuditTask(
        row.topic, row.partition, logs, end, shards_for(size), examples, secrets.randbits(63)
    )
    return AuditJob(task, first, size)


def _log(fs: FileSystem, replica: Replica, log_dir: LogDirFacts, entry: PartitionEntry) -> ReplicaLog:
    facts = survey_partition(fs, log_dir, entry)
    if facts.problems:
        raise Refused(
            f"replica {replica.name}: " + joined(facts.problems),
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


def _reported(log: ReplicaLog, records: int | None = None) -> dict[str, Any]:
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
    request: Request,
    on_row: Callable[[AuditRow], None],
) -> None:
    sizes = [(f"{job.task.topic}-{job.task.partition}", job.size_bytes) for job in jobs]
    with contextlib.ExitStack() as run, Reporter("audit", sizes) as reporter:
        seconds = [job.size_bytes / AUDITED_BYTES_PER_S for job in jobs]
        large = any(not job.is_alone for job in jobs)
        if large:
            require(f"audit of partitions with more than {human_bytes(ALONE_BYTES)} in all replicas", SPARK)
        engine = workers_of_run(
            run, reporter, request.master, seconds, kernels="audit", submitted=request.submitted, needs_spark=large
        )

        def on_result(job: AuditJob, outcome: Any) -> None:
            if outcome.trace:
                print_message(outcome.trace, "error")
            row = _row(job, outcome)
            rows[row.name] = row
            on_row(row)
            reporter.done(row.name, row.status, job.size_bytes, row.error)

        audit_all(engine, jobs, on_result, lambda trace: print_message(trace, "error"))


def _row(job: AuditJob, outcome: Any) -> AuditRow:
    task = job.task
    row = AuditRow(
        task.topic, task.partition, "failed", start_ms=outcome.start_ms or None, end_ms=outcome.end_ms or None,
        replicas=tuple(_reported(log) for log in task.replicas), first_offset=job.first_offset,
        end_offset=task.end_offset,
    )  # fmt: skip
    if outcome.problem is not None:
        # A closed segment that changes or vanishes while it is read is not damage: a broker cleans or deletes it.
        return replace(row, error=in_words(outcome.problem), problem=outcome.problem)
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
    offsets = [item["offset"] for item in found.examples]
    counted = zip(task.replicas, found.records or [0] * len(task.replicas), strict=True)
    return replace(
        row,
        status=status_of_audit(divergences, bool(gaps)),
        error=ErrorText(_summary(divergences, len(gaps))),
        replicas=tuple(_reported(log, records) for log, records in counted),
        records_compared=found.common,
        divergences=divergences,
        first_divergence=min(offsets, default=None),
        examples=tuple(found.examples),
        explained=dict(sorted(found.explained.items())),
        dropped_early=dict(sorted(found.early.items())),
        not_compared=gaps,
        notes=tuple(_notes(job, found)),
    )


def _summary(divergences: dict[str, int], gaps: int) -> str:
    parts = [f"{count:,} {kind}" for kind, count in sorted(divergences.items(), key=lambda item: -item[1])]
    if gaps:
        parts.append(f"{gaps} damaged range{'s' if gaps != 1 else ''} could not be compared")
    return ", ".join(parts)


def _notes(job: AuditJob, found: Audit) -> list[str]:
    task, notes = job.task, []
    for log, shown in zip(task.replicas, found.shown, strict=True):
        if log.log_end_offset > task.end_offset:
            notes.append(f"{log.name} continues to offset {log.log_end_offset}; its end was not compared")
        if log.cleaned_to is None:
            how_far = f"its log shows that it was cleaned up to offset {shown}, or further"
            never = "nothing in its log shows that it was ever cleaned"
            notes.append(f"{log.name} has no cleaner-offset-checkpoint; {how_far if shown else never}")
    unknown = found.explained.get("cleaning-unknown", 0)
    if unknown:
        notes.append(
            f"whether {unknown:,} missing records are lost is unknown: cleaning may have removed them, but neither a "
            "checkpoint nor the log of the replica that lacks them shows it. If a replica is a copy of some "
            "directories, audit the whole log dir, with its cleaner-offset-checkpoint"
        )
    return notes
