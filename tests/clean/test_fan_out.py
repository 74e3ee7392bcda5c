"""A partition compacted by fan-out: the bytes of the one-task way with room for all keys, whatever is cut where."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from keytail.clean.cleaner import clean_partition, install, next_round
from keytail.clean.fan_out import Sizes, fan_out
from keytail.clean.task import CleaningResult, CleaningTask
from keytail.errors import KeytailError
from keytail.log.fs import LOCAL
from tests.clean.in_process import InProcess
from tests.clean.test_rounds import SEED, SOAK, files_of, random_task
from tests.interop.conftest import fast_dir  # noqa: F401
from tests.reference.indexing import index_files


def fan_out_rounds(task: CleaningTask, engine: InProcess, sizes: Sizes) -> list[CleaningResult]:
    """All rounds, each installed; between them what the driver removes is removed."""
    results = []
    while True:
        result = fan_out(LOCAL, task, engine, sizes)
        kept = {file.name for file in result.rest.files} if result.rest else set()
        kept |= {file.name for group in result.groups for out in group.segments for file in out.files}
        for scratch in Path(task.partition_path).glob("*.clean"):
            if scratch.name not in kept:
                scratch.unlink()
        install(LOCAL, task, result)
        results.append(result)
        if result.rest is None:
            return results
        task = next_round(task, result)


def write_indexes(task: CleaningTask) -> None:
    """The offset indexes that the log earns: random logs come with empty files."""
    for segment in task.segments:
        path = Path(task.path(segment.base_offset, ".log"))
        index, _ = index_files(path.read_bytes(), segment.base_offset, 64)
        path.with_suffix(".index").write_bytes(index)


def numbers_of(result: CleaningResult) -> CleaningResult:
    return replace(result, groups=(), phases_s={}, rest=None)


def sweep(path: Path) -> None:
    for scratch in path.glob("*.clean"):
        scratch.unlink()


@pytest.mark.parametrize("case", range(400 if SOAK else 50))
def test_any_cut_gives_the_bytes_of_one_task(case: int, fast_dir: Path) -> None:  # noqa: F811
    print("seed", SEED, "case", case)
    rng = random.Random(SEED * 1000 + case)
    task = replace(random_task(rng, str(fast_dir / "t-0"), rng.choice(["kafka", "measured"])), map_max_entries=None)
    task = replace(task, drop_keyless=rng.random() < 0.7)
    if rng.random() < 0.7:
        base = task.segments[0].base_offset
        task = replace(task, log_start_offset=rng.choice([base, base, task.first_dirty_offset]))
    if rng.random() < 0.8:
        write_indexes(task)
    shutil.copytree(fast_dir / "t-0", fast_dir / "other")
    engine = InProcess(fast_dir / "cells", rng=rng)
    sizes = Sizes(slice_bytes=rng.choice([1, 100, 1000, 10**6]), shards=rng.choice([1, 2, 5, 40]))
    bound = rng.choice([None, None, 1, 3000, 10**5])
    try:
        whole = clean_partition(LOCAL, replace(task, partition_path=str(fast_dir / "other"), map_memory_bytes=1 << 24))
    except KeytailError as refusal:
        with pytest.raises(type(refusal)):
            fan_out(LOCAL, task, engine, sizes)
        return
    install(LOCAL, replace(task, partition_path=str(fast_dir / "other")), whole)
    results = fan_out_rounds(replace(task, max_scratch_bytes=bound), engine, sizes)
    sweep(fast_dir / "t-0")
    assert files_of(fast_dir / "t-0") == files_of(fast_dir / "other")
    sources = [group.source_bases for result in results for group in result.groups]
    assert sources == [group.source_bases for group in whole.groups]
    assert numbers_of(results[-1]) == numbers_of(whole)
