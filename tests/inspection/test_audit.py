"""Audits of replicas in this process: the dull twin, every planted difference, none where there is none, damage."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from keytail.inspection.audit import Alone, Audit, audit
from keytail.log.fs import LOCAL
from tests.inspection.audit_logs import (
    PLANTED,
    Replica,
    expected,
    plant,
    random_segments,
    task_of,
    variants,
)

SEED = int(os.environ.get("KEYTAIL_SEED", "0")) or random.SystemRandom().randrange(2**32)
SOAK = os.environ.get("KEYTAIL_SOAK") == "1"


def found(replicas: list[Replica], home: Path, shards: int = 1) -> tuple[Audit, int]:
    task, first = task_of(replicas, home, shards=shards)
    return audit(task, first, Alone(LOCAL)), task.end_offset


def counts(result: Audit) -> tuple:
    return dict(result.divergences), dict(result.explained), dict(result.early), result.common


@pytest.mark.parametrize("case", range(1000 if SOAK else 60))
def test_healthy_replicas_do_not_differ_and_all_that_is_missing_is_explained(case: int, tmp_path: Path) -> None:
    print("seed", SEED, "case", case)
    rng = random.Random(SEED * 1000 + case)
    segments = random_segments(rng)
    replicas = variants(rng, segments, rng.choice([2, 2, 3]))
    task, _ = task_of(replicas, tmp_path)
    twin = expected(replicas, task)
    assert not twin.divergences
    for shards in (1, 3):
        result, _ = found(replicas, tmp_path, shards)
        assert counts(result) == (dict(twin.divergences), dict(twin.explained), dict(twin.early), twin.common)
        assert result.gaps == []


@pytest.mark.parametrize("kind", PLANTED)
@pytest.mark.parametrize("case", range(200 if SOAK else 8))
def test_every_planted_difference_is_found(kind: str, case: int, tmp_path: Path) -> None:
    print("seed", SEED, "case", case)
    rng = random.Random(f"{SEED} {case} {kind}")
    for _ in range(20):
        replicas = variants(rng, random_segments(rng), rng.choice([2, 3]))
        task, _ = task_of(replicas, tmp_path)
        offset = plant(rng, replicas, kind, task.end_offset)
        if offset is not None:
            break
    else:
        pytest.fail("nowhere to plant it")
    task, _ = task_of(replicas, tmp_path)
    twin = expected(replicas, task)
    for shards in (1, 4):
        result, _ = found(replicas, tmp_path, shards)
        planted = [one for one in result.examples if one["kind"] == kind and one["offset"] == offset]
        assert planted, (kind, offset, result.divergences, result.examples)
        assert counts(result) == (dict(twin.divergences), dict(twin.explained), dict(twin.early), twin.common)


@pytest.mark.parametrize("case", range(300 if SOAK else 15))
def test_many_differences_at_once_are_counted_as_the_twin_counts_them(case: int, tmp_path: Path) -> None:
    print("seed", SEED, "case", case)
    rng = random.Random(SEED * 1000 + case)
    replicas = variants(rng, random_segments(rng, keyless=rng.random() < 0.3), rng.choice([2, 3, 4]))
    for _ in range(rng.randint(2, 8)):
        task, _ = task_of(replicas, tmp_path)
        plant(rng, replicas, rng.choice(PLANTED), task.end_offset)
    task, _ = task_of(replicas, tmp_path)
    twin = expected(replicas, task)
    for shards in (1, 5):
        result, _ = found(replicas, tmp_path, shards)
        assert counts(result) == (dict(twin.divergences), dict(twin.explained), dict(twin.early), twin.common)
