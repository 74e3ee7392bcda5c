"""A partition compacted by fan-out has the bytes of one task with room for all keys, for any slices."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keytail.compact.cleaner import clean_partition, install, next_pass
from keytail.compact.fan_out import write as fan_out_write
from keytail.compact.fan_out.slices import bounds, slices_of
from keytail.compact.fan_out.stages import Sizes, fan_out
from keytail.compact.map_phase import reading
from keytail.compact.task import CleaningResult, CleaningTask, NeedsFanOut
from keytail.errors import CorruptLog, KeytailError
from keytail.format import names
from keytail.log.fs import LOCAL
from keytail.log.replacement.recover import recover
from tests.chance import SEED, draws
from tests.compact.fan_out.in_process import InProcess
from tests.compact.fan_out.test_memory import task_of, write_segments
from tests.compact.test_passes import files_of, random_task
from tests.in_pieces import read_in_pieces
from tests.interop.conftest import fast_dir  # noqa: F401
from tests.reference.indexing import index_files


def fan_out_passes(task: CleaningTask, engine: InProcess, sizes: Sizes) -> list[CleaningResult]:
    """Run and install all passes, remove files between passes as the driver does, and return the results."""
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
        task = next_pass(task, result)


def write_indexes(task: CleaningTask) -> None:
    """Write the offset indexes of the log, because those of random logs are empty."""
    for segment in task.segments:
        path = Path(task.path(segment.base_offset, ".log"))
        index, _ = index_files(path.read_bytes(), segment.base_offset, 64)
        path.with_suffix(".index").write_bytes(index)


def without_files(result: CleaningResult) -> CleaningResult:
    return replace(result, groups=(), phases_s={}, rest=None)


def remove_scratch(path: Path) -> None:
    for scratch in path.glob("*.clean"):
        scratch.unlink()


@pytest.mark.long
@pytest.mark.parametrize("case", range(draws(30)))
def test_any_slices_give_the_bytes_of_one_task(
    case: int, fast_dir: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    print("seed", SEED, "case", case)
    rng = random.Random(SEED * 1000 + case)
    if rng.random() < 0.3:
        read_in_pieces(monkeypatch, rng.choice([1, 2, 3]))
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
    results = fan_out_passes(replace(task, max_scratch_bytes=bound), engine, sizes)
    remove_scratch(fast_dir / "t-0")
    assert files_of(fast_dir / "t-0") == files_of(fast_dir / "other")
    sources = [group.source_bases for result in results for group in result.groups]
    assert sources == [group.source_bases for group in whole.groups]
    assert without_files(results[-1]) == without_files(whole)


SMALL = Sizes(slice_bytes=1500, shards=3)


def some_log(path: Path, keys: int = 300, **fields: Any) -> CleaningTask:
    """Write three segments of 40 batches of 100 records, and return the task that compacts them."""
    log, facts = write_segments(path, 3, 40, keys)
    return task_of(path, log, facts, grouping="kafka", config={"segment_bytes": 1}, **fields)


def one_task(task: CleaningTask, copy: Path) -> dict[str, tuple[bytes, int]]:
    shutil.copytree(task.partition_path, copy, copy_function=shutil.copy2)
    alone = replace(task, partition_path=str(copy))
    install(LOCAL, alone, clean_partition(LOCAL, alone))
    return files_of(copy)


def entries(*positions: int) -> bytes:
    rows = np.zeros((len(positions), 2), ">i4")
    rows[:, 0], rows[:, 1] = np.arange(len(positions)), positions
    return rows.tobytes()


@pytest.mark.parametrize(
    "index",
    [entries(), entries(5, 3001, 70000), entries(90000, 10, 2**31 - 1), b"\xff" * 80, b"\0" * 800, b"abc"],
    ids=["empty", "inside batches", "not ascending", "negative", "zeros", "no entry"],
)
def test_a_wrong_index_does_not_change_the_result(index: bytes, tmp_path: Path) -> None:
    task = some_log(tmp_path / "t-0")
    for segment in task.segments[:-1]:
        Path(task.path(segment.base_offset, ".index")).write_bytes(index)
    segments = tuple(segment._replace(index_bytes=len(index) or 8) for segment in task.segments)
    task = replace(task, segments=segments)
    expected = one_task(task, tmp_path / "other")
    fan_out_passes(task, InProcess(tmp_path / "cells"), SMALL)
    remove_scratch(tmp_path / "t-0")
    assert files_of(tmp_path / "t-0") == expected


def test_slices_are_adjacent_and_cover_each_segment(tmp_path: Path) -> None:
    task = some_log(tmp_path / "t-0")
    for segment in task.segments[:-1]:
        path = Path(task.path(segment.base_offset, ".log"))
        index, _ = index_files(path.read_bytes(), segment.base_offset, 200)
        path.with_suffix(".index").write_bytes(index)
    for slice_bytes in (90, 700, 5000, 10**9):
        reached: dict[int, int] = {}
        parts = []
        for piece in slices_of(task, slice_bytes):
            start, end = bounds(LOCAL, task, piece)
            assert reached.get(piece.segment, 0) == start <= end
            reached[piece.segment] = end
            parts.append(piece.parts)
        assert reached == {number: segment.log_bytes for number, segment in enumerate(task.segments)}
        assert (max(parts) > 1) == (slice_bytes < 10**9)


def test_damage_is_reported_as_by_one_task(tmp_path: Path) -> None:
    """A batch of a middle slice is damaged, or offsets decrease at the beginning of a slice."""
    task = some_log(tmp_path / "t-0")
    path = Path(task.path(task.segments[1].base_offset, ".log"))
    good = path.read_bytes()
    size = len(good) // 40
    swapped = good[: 20 * size] + good[21 * size : 22 * size] + good[20 * size : 21 * size] + good[22 * size :]
    index, _ = index_files(good, task.segments[1].base_offset, 1)
    path.with_suffix(".index").write_bytes(index)
    for bad in (good[: 25 * size + 70] + b"?" + good[25 * size + 71 :], swapped):
        path.write_bytes(bad)
        os.utime(path, ns=(task.segments[1].log_mtime_ns, task.segments[1].log_mtime_ns))
        reported = []
        for clean in (lambda: clean_partition(LOCAL, task), lambda: fan_out(LOCAL, task, engine, SMALL)):
            engine = InProcess(tmp_path / "cells")
            with pytest.raises(CorruptLog) as caught:
                clean()
            reported.append(str(caught.value))
        assert reported[0] == reported[1]


@pytest.mark.parametrize("stage", ["survey", "keys", "sizes", "groups", "proof"])
def test_a_run_that_ends_between_stages_leaves_only_scratch_files(stage: str, tmp_path: Path) -> None:
    """The run that follows has the result of an undisturbed run."""
    task = replace(some_log(tmp_path / "t-0"), grouping="measured")
    expected = one_task(task, tmp_path / "other")
    before = files_of(tmp_path / "t-0")

    class Stopped(InProcess):
        def run(self, name: str, function: Callable[..., Any], payloads: Any) -> list[Any]:
            return self.ended(name, super().run(name, function, payloads))

        def shuffle(self, name: str, *arguments: Any) -> list[Any]:
            return self.ended(name, super().shuffle(name, *arguments))

        def ended(self, name: str, answers: list[Any]) -> list[Any]:
            if name == stage:
                raise KeyboardInterrupt
            return answers

    with pytest.raises(KeyboardInterrupt):
        fan_out(LOCAL, task, Stopped(tmp_path / "cells"), SMALL)
    after = files_of(tmp_path / "t-0")
    assert {name: after[name] for name in before} == before
    left = set(after) - set(before)
    assert left
    assert {names.parse_file_name(name).kind for name in left} == {"scratch"}
    recover(LOCAL, str(tmp_path / "t-0"))
    assert files_of(tmp_path / "t-0") == before
    fan_out_passes(replace(task, run_id="next"), InProcess(tmp_path / "cells"), SMALL)
    remove_scratch(tmp_path / "t-0")
    assert files_of(tmp_path / "t-0") == expected


def test_a_task_reports_that_its_keys_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys do not fit into the map, or only into the map and not into the proof's table. No file remains."""
    task = some_log(tmp_path / "t-0", fan_out="auto")
    assert clean_partition(LOCAL, task).keys == 300
    remove_scratch(tmp_path / "t-0")
    with pytest.raises(NeedsFanOut, match="the partition's keys do not fit into the"):
        clean_partition(LOCAL, replace(task, map_max_entries=299))
    monkeypatch.setattr(reading, "most_keys", lambda memory_bytes: 299)
    with pytest.raises(NeedsFanOut):
        clean_partition(LOCAL, task)
    assert not list((tmp_path / "t-0").glob("*.clean"))
    partly = clean_partition(LOCAL, replace(task, map_max_entries=299, fan_out="never"))
    assert partly.keys == 299


def test_an_output_that_reaches_a_limit_is_split_by_one_task(tmp_path: Path) -> None:
    """The output's index becomes full before the size limit is reached, so sizes do not show where to split."""
    task = some_log(tmp_path / "t-0", keys=10**9)
    two = 2 * task.segments[0].log_bytes
    config = replace(task.config, segment_bytes=two, index_interval_bytes=0, segment_index_bytes=50 * 12)
    task = replace(task, grouping="measured", config=config)
    expected = one_task(task, tmp_path / "other")
    engine = InProcess(tmp_path / "cells")
    fan_out_passes(task, engine, SMALL)
    remove_scratch(tmp_path / "t-0")
    assert files_of(tmp_path / "t-0") == expected
    assert ("groups in order", 1) in engine.stages


def test_measured_ranges_are_those_of_the_reference_rule(tmp_path: Path) -> None:
    task = some_log(tmp_path / "t-0")
    segments = [task.segments[0]._replace(base_offset=n, log_bytes=1) for n in range(9)]
    config = replace(task.config, segment_bytes=100)
    task = replace(task, segments=tuple(segments), config=config)
    sizes = [(60, 60), (40, 40), (1, 1), (0, 0), (250, 50), (50, 50), (51, 51), (0, 0), (0, 0)]
    measured = [fan_out_write.Measured(*size) for size in sizes]
    assert fan_out_write.ranges_of(task, 0, 9, measured) == [(0, 2), (2, 4), (4, 6), (6, 9)]
