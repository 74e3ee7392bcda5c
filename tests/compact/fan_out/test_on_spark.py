"""Partitions compacted by many tasks of a Spark session with two cores: the bytes equal those of one task, even after
failures.
"""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from keytail.compact.fan_out import stages
from keytail.compact.fan_out.on_spark import fan_out_on_spark
from keytail.compact.fan_out.stages import Sizes
from keytail.compact.running import installing
from keytail.compact.task import CleaningTask
from keytail.compact.write_phase.passes import least_scratch_bytes
from keytail.errors import CorruptLog
from keytail.log.fs import LOCAL, FileSystem
from keytail.run.spark.engine import SparkEngine
from keytail.run.storage import ScratchSpace
from tests.compact.test_driver import checkpoint, compaction, make

pytestmark = pytest.mark.spark

SMALL = Sizes(slice_bytes=3000, shards=3)


def files_of(partition: Path) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in partition.iterdir() if path.is_file()}


def with_one_task(engine: SparkEngine, log_dir: Path, home: Path, tasks: list[CleaningTask]) -> list[dict[str, Any]]:
    """Compact a copy of each partition with one task, and return the files of each copy."""
    copy = home / "one-task"
    shutil.copytree(log_dir, copy)
    own = [replace(task, partition_path=str(copy / Path(task.partition_path).name), fan_out="never") for task in tasks]
    rows = compaction(engine, copy, own).run()
    assert {row.status for row in rows} == {"compacted"}
    return [files_of(Path(task.partition_path)) for task in own]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the driver use small slices and few keys per shard for fan-out."""
    real = fan_out_on_spark
    monkeypatch.setattr(installing, "fan_out_on_spark", lambda *given, **more: real(*given, **more, sizes=SMALL))


@pytest.mark.parametrize("bound", [None, 1])
def test_many_tasks_write_the_bytes_of_one_task(
    engine: SparkEngine, small: None, bound: int | None, tmp_path: Path
) -> None:
    """The scan selects fan-out, because the map of one task is too small; with a `bound`, each group is a pass."""
    log_dir, tasks = make(tmp_path / "logs", count=2)
    expected = with_one_task(engine, log_dir, tmp_path, tasks)
    tasks = [replace(task, fan_out="auto", map_max_entries=entries) for task, entries in zip(tasks, (None, 5))]
    space = ScratchSpace(LOCAL, limit_bytes=least_scratch_bytes(tasks[1])) if bound else ScratchSpace(LOCAL)
    notes: list[str] = []
    rows = compaction(engine, log_dir, tasks, space=space, on_note=notes.append).run()
    assert [row.status for row in rows] == ["compacted"] * 2, rows
    assert [files_of(Path(task.partition_path)) for task in tasks] == expected
    [note] = [note for note in notes if "fan-out" in note]
    assert note.startswith("t-1: the partition's keys do not fit into the")
    assert checkpoint(log_dir) == {("t", n): task.first_uncleanable_offset for n, task in enumerate(tasks)}


def test_a_damaged_batch_changes_nothing(engine: SparkEngine, small: None, tmp_path: Path) -> None:
    log_dir, [task] = make(tmp_path / "logs", count=1)
    path = Path(task.path(task.segments[0].base_offset, ".log"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    facts = path.stat()
    first = task.segments[0]._replace(log_mtime_ns=facts.st_mtime_ns)
    before = {name: found[0] for name, found in files_of(path.parent).items()}
    task = replace(task, segments=(first, *task.segments[1:]), fan_out="always")
    [row] = compaction(engine, log_dir, [task]).run()
    assert row.status == "corrupt"
    assert isinstance(row.problem, CorruptLog)
    assert row.problem.path == str(path)
    assert {name: found[0] for name, found in files_of(path.parent).items()} == before


def kill_worker_once(mark: str, real: Any, fs: FileSystem, part: Any, attempt: str) -> Any:
    """Kill the worker of the first attempt of a stage, after it has written its scratch files."""
    answer = real(fs, part, attempt)
    if not Path(mark).exists():
        Path(mark).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return answer


def emit_and_kill_worker_once(mark: str, real: Any, fs: FileSystem, part: Any, attempt: str) -> Any:
    yield from real(fs, part, attempt)
    if not Path(mark).exists():
        Path(mark).touch()
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("stage", ["scan", "write"])
def test_a_killed_worker_does_not_change_the_result(
    engine: SparkEngine, small: None, stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_dir, tasks = make(tmp_path / "logs", count=1)
    expected = with_one_task(engine, log_dir, tmp_path, tasks)
    mark = tmp_path / "died"
    badly = {"scan": emit_and_kill_worker_once, "write": kill_worker_once}[stage]
    monkeypatch.setattr(stages, stage, partial(badly, str(mark), getattr(stages, stage)))
    [row] = compaction(engine, log_dir, [replace(tasks[0], fan_out="always")]).run()
    assert mark.exists()
    assert row.status == "compacted", row
    assert [files_of(Path(tasks[0].partition_path))] == expected
