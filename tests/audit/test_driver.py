"""Audits on Spark: the results equal those of one process, and writes of a running broker are not damage."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from keytail.audit.driver import AuditJob, audit_all
from keytail.audit.stages import Alone, Audit, audit
from keytail.log.fs import LOCAL
from keytail.run.spark.engine import SparkEngine
from keytail.run.tasks import Outcome
from tests.audit.logs import DIFFERENCES, insert_difference, random_segments, task_of, variants
from tests.chance import SEED

pytestmark = pytest.mark.spark


def of(result: Audit) -> Any:
    counts = result.divergences, result.explained, result.early, result.common, result.records
    return counts, result.examples, result.gaps


def test_spark_finds_the_differences_that_one_process_finds(engine: SparkEngine, tmp_path: Path) -> None:
    print("seed", SEED)
    rng = random.Random(SEED)
    jobs = []
    for number in range(3):
        replicas = variants(rng, random_segments(rng), 3)
        task, first = task_of(replicas, tmp_path / str(number))
        for _ in range(5):
            insert_difference(rng, replicas, rng.choice(DIFFERENCES), task.end_offset)
        large = number < 2
        task, first = task_of(replicas, tmp_path / str(number), shards=4 if large else 1)
        jobs.append(AuditJob(task, first, 2**40 if large else 1))
    found: dict[int, Outcome[Audit]] = {}
    audit_all(engine, jobs, lambda job, outcome: found.__setitem__(jobs.index(job), outcome), print)
    for number, job in enumerate(jobs):
        value = found[number].value
        assert value is not None, found[number]
        assert of(value) == of(audit(job.task, job.first_offset, Alone(LOCAL)))


def test_a_segment_that_a_broker_replaces_or_removes_during_the_run_fails_the_row(
    engine: SparkEngine, tmp_path: Path
) -> None:
    replicas = variants(random.Random(SEED), random_segments(random.Random(SEED)), 2)
    task, first = task_of(replicas, tmp_path, shards=2)
    base = task.replicas[0].segments[0][0]
    path = Path(task.replicas[0].path) / f"{base:020d}.log"
    for change in (lambda: os.utime(path, (1, 1)), path.unlink):
        change()
        for size in (1, 2**40):
            outcomes: list[Outcome[Audit]] = []
            audit_all(engine, [AuditJob(task, first, size)], lambda job, item, seen=outcomes: seen.append(item), print)
            assert outcomes[0].problem is not None
            assert "changed since it was planned" in str(outcomes[0].problem)


def test_batches_appended_during_the_run_are_not_damage(tmp_path: Path) -> None:
    replicas = variants(random.Random(SEED), random_segments(random.Random(SEED)), 2)
    task, first = task_of(replicas, tmp_path)
    active = Path(task.replicas[1].path) / f"{task.replicas[1].segments[-1][0]:020d}.log"
    with active.open("ab") as file:
        file.write(b"\0" * 7)
    result = audit(task, first, Alone(LOCAL))
    assert not result.gaps
    assert not result.divergences
