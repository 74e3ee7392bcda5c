"""Groups in rounds: the bytes of one round, whatever the bound; and what is proven before each is installed."""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from keytail.clean.cleaner import clean_partition, install, next_round
from keytail.clean.rounds import scratch_bytes
from keytail.clean.task import CleaningResult, CleaningTask
from keytail.log.fs import LOCAL, FileSystem
from tests.clean.logs import random_log, task_for, write_log
from tests.clean.test_cleaner import snapshot_entry, write_snapshot
from tests.interop.conftest import fast_dir  # noqa: F401

NOW = 1_750_000_000_000
SOAK = os.environ.get("KEYTAIL_SOAK") == "1"
SEED = int(os.environ.get("KEYTAIL_SEED", "0")) or random.SystemRandom().randrange(2**32)


def files_of(path: str | Path) -> dict[str, tuple[bytes, int]]:
    return {
        file.name: (file.read_bytes(), file.stat().st_mtime_ns)
        for file in Path(path).iterdir()
        if file.suffix != ".snapshot"
    }


def run_rounds(task: CleaningTask, fs: FileSystem = LOCAL) -> list[CleaningResult]:
    """All rounds, each installed; what the driver removes of the rounds before is removed."""
    results = []
    while True:
        result = clean_partition(fs, replace(task, attempt=str(len(results))))
        install(fs, task, result)
        results.append(result)
        if result.rest is None:
            return results
        task = next_round(task, result)


def random_task(rng: random.Random, path: str, grouping: str) -> CleaningTask:
    log = random_log(rng, NOW, codecs=rng.choice([(0,), (0, 1, 2, 3, 4)]), segments=rng.randint(3, 12))
    facts = write_log(path, log.segments)
    base, end = log.segments[0].base_offset, log.segments[-1].base_offset
    first_dirty = min(rng.choice([base, base, *log.batch_ends, rng.randint(base, end)]), end - 1)
    config = {
        "segment_bytes": rng.choice([1, 500, 3000, 10**6]),
        "index_interval_bytes": rng.choice([0, 1, 200, 4096]),
        "delete_retention_ms": rng.choice([0, 1000, 2**63 - 1]),
        "cleanup_policy": frozenset(rng.choice([("compact",), ("compact", "delete")])),
        "segment_ms": rng.choice([1000, 10**9]),
    }
    active = {pid: state for pid, state in log.producers.items() if rng.random() < 0.7}
    snapshots = write_snapshot(path, log, [snapshot_entry(p, *state) for p, state in active.items()])
    return task_for(
        path, log, facts, NOW, first_dirty=first_dirty, config=config, snapshots=snapshots, drop_keyless=True,
        map_max_entries=rng.choice([None, None, None, 3, 7]), hash_seed=rng.randrange(2**64), grouping=grouping,
    )  # fmt: skip


@pytest.mark.parametrize("case", range(200 if SOAK else 40))
def test_any_bound_gives_the_bytes_of_one_round(case: int, fast_dir: Path) -> None:  # noqa: F811
    print("seed", SEED, "case", case)
    rng = random.Random(SEED * 1000 + case)
    grouping = rng.choice(["kafka", "measured", "measured"])
    task = random_task(rng, str(fast_dir / "t-0"), grouping)
    bound = rng.choice([1, 1, 1000, 3000, 10**4, scratch_bytes(task)])
    shutil.copytree(fast_dir / "t-0", fast_dir / "other")
    [whole] = run_rounds(replace(task, partition_path=str(fast_dir / "other")))
    results = run_rounds(replace(task, max_scratch_bytes=bound))
    if bound == 1 and grouping == "kafka":
        assert len(results) == max(1, len(whole.groups)), "one group a round"
    for file in list((fast_dir / "t-0").glob("*.clean")):
        assert ".survivors." in file.name or ".proof." in file.name
        file.unlink()
    assert files_of(fast_dir / "t-0") == files_of(fast_dir / "other")
    sources = [group.source_bases for result in results for group in result.groups]
    assert sources == [group.source_bases for group in whole.groups]
    assert replace(results[-1], groups=(), phases_s={}) == replace(whole, groups=(), phases_s={})
