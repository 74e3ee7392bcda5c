"""Audits many partitions: each small one in one task; a large one in tasks on all hosts.

Reads only. This module schedules the tasks and transports the cells; audit/stages.py compares the replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from keytail.audit.scan import AuditTask
from keytail.audit.stages import Alone, Audit, audit
from keytail.compact.fan_out.on_spark import StagesOnSpark, Workers
from keytail.log.fs import LOCAL
from keytail.run.engine import Engine
from keytail.run.tasks import Outcome, attempt_one
from keytail.run.watching import telling

ALONE_BYTES = 64 << 20  # of all replicas: audited by one task, in a few hundred MiB of memory
SHARD_BYTES = 64 << 20  # of logs per shard: mostly 50 MiB of memory, ten times that with tiny records
MOST_SHARDS = 4096
BUNDLE_PARTITIONS = 64


@dataclass(frozen=True)
class AuditJob:
    """One partition, and the lowest offset that two of its replicas should have."""

    task: AuditTask
    first_offset: int
    size_bytes: int

    @property
    def is_alone(self) -> bool:
        return self.size_bytes <= ALONE_BYTES


Heard = Callable[[AuditJob, Outcome[Audit]], None]


def shards_for(size_bytes: int) -> int:
    if size_bytes <= ALONE_BYTES:
        return 1
    return min(MOST_SHARDS, -(-size_bytes // SHARD_BYTES))


def audit_on_worker(job: AuditJob, attempt: str) -> Audit:
    with telling(job.task.replicas[0].path, attempt, "compare"):
        return audit(job.task, job.first_offset, Alone(LOCAL))


def _audit_with(stages: StagesOnSpark, job: AuditJob, attempt: str) -> Audit:
    return audit(job.task, job.first_offset, stages)


def audit_all(engine: Engine, jobs: Sequence[AuditJob], heard: Heard, on_trace: Callable[[str], None]) -> None:
    """Audit all partitions. `heard` is called for each partition when it, or its bundle of small ones, is done. Large
    partitions require Spark."""
    small = sorted((job for job in jobs if job.is_alone), key=lambda job: -job.size_bytes)
    for start in range(0, len(small), BUNDLE_PARTITIONS):
        bundle = small[start : start + BUNDLE_PARTITIONS]
        for job, outcome in zip(bundle, engine.run_bundle(bundle, audit_on_worker, name="audit"), strict=True):
            heard(job, outcome)
    for job in jobs:
        if job.is_alone:
            continue
        task = job.task
        # Nothing is written, so the delayed visibility of writes on a network file system does not matter.
        workers = Workers(task.replicas[0].path, engine.concurrent_tasks, None, shared_storage=True)
        stages = StagesOnSpark(engine, workers, f"audit {task.topic}-{task.partition}", on_trace)
        heard(job, attempt_one(partial(_audit_with, stages), job, "driver"))
