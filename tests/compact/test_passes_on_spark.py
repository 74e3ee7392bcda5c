"""Partitions that do not fit into the scratch space: the passes of the driver, and passes that end early."""

from __future__ import annotations

import errno
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keytail.compact.cleaner import clean_partition, install
from keytail.compact.running.compaction import Compaction
from keytail.compact.task import CleaningResult, CleaningTask
from keytail.compact.write_phase import passes
from keytail.compact.write_phase.passes import least_scratch_bytes, scratch_bytes
from keytail.log.fs import LOCAL, FileSystem
from keytail.run.engine import Engine, ThisProcess
from keytail.run.spark.engine import SparkEngine
from keytail.run.storage import ScratchSpace
from keytail.run.tasks import Outcome, run_attempt
from tests.compact.test_driver import CONFIG, checkpoint, compaction, make, rows_of_answers
from tests.log_dirs import newest_by_key, records_of, snapshot


@pytest.fixture(autouse=True)
def no_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare only the sizes of logs with the scratch space."""
    monkeypatch.setattr(passes, "_MARGIN_BYTES", 0)


class RecordingTasks(ThisProcess):
    """Runs the tasks of passes without Spark, and records them."""

    def __init__(self) -> None:
        super().__init__()
        self.run: list[CleaningTask] = []

    def run_bundle(self, tasks: Sequence[Any], function: Any, **more: Any) -> list[Outcome[Any]]:
        self.run.extend(tasks)
        return super().run_bundle(tasks, function, **more)


def clean_here(task: CleaningTask, attempt: str) -> CleaningResult:
    return clean_partition(LOCAL, replace(task, attempt=attempt))


def in_passes(path: Path, count: int = 1) -> tuple[Path, list[CleaningTask]]:
    """Write logs of three groups, one for each closed segment; return the log dir and the tasks."""
    log_dir, tasks = make(path, count=count)
    config = replace(CONFIG, segment_bytes=1)
    return log_dir, [replace(task, config=config, grouping="kafka", map_memory_bytes=1 << 20) for task in tasks]


def finish(
    log_dir: Path, task: CleaningTask, fs: FileSystem = LOCAL, engine: Engine | None = None, **more: Any
) -> tuple[Compaction, Any]:
    """Compact one partition with a pass per group; return the compaction and the row."""
    task = replace(task, max_scratch_bytes=1)
    space = ScratchSpace(LOCAL, least_scratch_bytes(task))
    space.device(str(log_dir))
    driver = compaction(engine or ThisProcess(), log_dir, [task], fs=fs, clean=clean_here, space=space, **more)
    [row] = rows_of_answers(driver, [(task, run_attempt(clean_here, task, "a0"))])
    return driver, row


def whole(task: CleaningTask, tmp_path: Path) -> dict[str, bytes]:
    """Return the logs after a single pass, by file name."""
    shutil.copytree(task.partition_path, tmp_path / "whole")
    task = replace(task, partition_path=str(tmp_path / "whole"))
    install(LOCAL, task, clean_here(task, "w"))
    return logs(tmp_path / "whole")


def logs(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.glob("*.log")}


@pytest.mark.spark
def test_a_partition_that_does_not_fit_is_compacted_alone_in_passes(engine: SparkEngine, tmp_path: Path) -> None:
    log_dir, tasks = in_passes(tmp_path / "logs", count=3)
    expected = whole(tasks[2], tmp_path)
    limit = max(scratch_bytes(tasks[0]), least_scratch_bytes(tasks[2]))
    assert limit < scratch_bytes(tasks[1])
    rows = compaction(engine, log_dir, tasks, space=ScratchSpace(LOCAL, limit)).run()
    assert [row.status for row in rows] == ["compacted"] * 3, rows
    assert logs(log_dir / "t-2") == expected
    assert checkpoint(log_dir) == {("t", t.partition): t.first_uncleanable_offset for t in tasks}
    assert not list(log_dir.rglob("*.clean"))


def test_each_pass_is_a_task_and_the_checkpoint_is_written_last(tmp_path: Path) -> None:
    log_dir, [task] = in_passes(tmp_path / "logs")
    expected = whole(task, tmp_path)
    before = records_of(log_dir / "t-0")
    seen: list[dict[Any, int]] = []

    class Watched(FileSystem):
        def unlink(self, path: str) -> None:
            seen.append(checkpoint(log_dir))
            super().unlink(path)

    engine = RecordingTasks()
    _, row = finish(log_dir, task, Watched(), engine)
    assert (row.status, row.records_before) == ("compacted", len(before))
    assert row.records_after == len(records_of(log_dir / "t-0"))
    assert [t.first_segment for t in engine.run] == [1, 2]
    assert logs(log_dir / "t-0") == expected
    assert set(map(len, seen)) == {0}, "the checkpoint was written before all groups were replaced"
    assert checkpoint(log_dir) == {("t", 0): task.first_uncleanable_offset}
    assert not list(log_dir.rglob("*.clean"))


def test_after_the_deadline_no_pass_is_started(tmp_path: Path) -> None:
    log_dir, [task] = in_passes(tmp_path / "logs")
    before = records_of(log_dir / "t-0")
    _, row = finish(log_dir, task, deadline_s=time.monotonic())
    assert row.status == "skipped"
    assert "1 of at least 2 groups done, safe to start the broker" in row.error
    assert "--deadline" in row.error
    assert (row.segments_before, row.segments_after) == (4, 4)
    assert row.bytes_after == sum(file.stat().st_size for file in (log_dir / "t-0").glob("*.log")) < row.bytes_before
    assert checkpoint(log_dir) == {}
    assert not list(log_dir.rglob("*.clean"))
    assert newest_by_key(records_of(log_dir / "t-0")) == newest_by_key(before)


class FullDisk(FileSystem):
    """A disk that is full after `renames` renames to `.swap`."""

    def __init__(self, renames: int) -> None:
        super().__init__()
        self.renames = renames

    def rename(self, source: str, target: str) -> None:
        self.renames -= target.endswith(".swap")
        if self.renames < 0 and target.endswith(".swap"):
            raise OSError(errno.EDQUOT, "Disk quota exceeded", target)
        super().rename(source, target)


@pytest.mark.parametrize("renames", [0, 2, 3, 4, 6, 7])
def test_a_full_disk_during_a_replacement_ends_the_partition(renames: int, tmp_path: Path) -> None:
    log_dir, [task] = in_passes(tmp_path / "logs")
    before = records_of(log_dir / "t-0")
    untouched = snapshot(log_dir / "t-0")
    _, row = finish(log_dir, task, FullDisk(renames))
    done = renames // 3
    assert row.status == "failed"
    assert "Disk quota exceeded" in row.error
    total = "3" if done == 2 else f"at least {done + 2}"
    assert f"{done} of {total} groups done, safe to start the broker" in row.error
    assert checkpoint(log_dir) == {}
    assert not [file for file in (log_dir / "t-0").iterdir() if file.name.endswith((".clean", ".swap", ".cleaned"))]
    assert newest_by_key(records_of(log_dir / "t-0")) == newest_by_key(before)
    if done == 0:
        assert snapshot(log_dir / "t-0") == untouched


def test_a_group_that_recovery_finishes_counts_as_replaced(tmp_path: Path) -> None:
    """A rename fails after the commit of the group, and recovery finishes the replacement."""

    class Fails(FileSystem):
        failed = False

        def rename(self, source: str, target: str) -> None:
            if target.endswith(".deleted") and not self.failed:
                self.failed = True
                raise OSError(errno.EIO, "Input/output error", target)
            super().rename(source, target)

    log_dir, [task] = in_passes(tmp_path / "logs")
    before = records_of(log_dir / "t-0")
    _, row = finish(log_dir, task, Fails())
    assert row.status == "failed"
    assert "1 of at least 2 groups done, safe to start the broker" in row.error
    assert newest_by_key(records_of(log_dir / "t-0")) == newest_by_key(before)
    assert not list((log_dir / "t-0").glob("*.*.*"))


@pytest.mark.parametrize("part", [0.0, 0.5, 0.99])
def test_a_full_disk_in_a_task_ends_the_partition(part: float, tmp_path: Path) -> None:
    """The disk becomes full while outputs or the state for the next pass are written; all written files are removed."""
    log_dir, [task] = in_passes(tmp_path / "logs")
    untouched = snapshot(log_dir / "t-0")
    task = replace(task, max_scratch_bytes=1)

    class Disk(FileSystem):
        written, size = 0, 1 << 40

        def write(self, fd: int, buffer: Any) -> int:
            self.written += len(memoryview(buffer).cast("B"))
            if self.written > self.size:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(fd, buffer)

    large = Disk()
    result = clean_partition(large, replace(task, attempt="large"))
    small = Disk()
    small.size = int(large.written * part)
    outcome = run_attempt(lambda task, attempt: clean_partition(small, replace(task, attempt=attempt)), task, "a0")
    [row] = rows_of_answers(compaction(ThisProcess(), log_dir, [task]), [(task, outcome)])
    assert row.status == "failed"
    assert "No space left" in row.error
    assert "Nothing was replaced, safe to start the broker" in row.error
    assert result.rest is not None
    assert snapshot(log_dir / "t-0") == untouched


def test_a_run_stopped_between_groups_continues_there(tmp_path: Path) -> None:
    log_dir, [task] = in_passes(tmp_path / "logs")

    class Stopping(FileSystem):
        def unlink(self, path: str) -> None:
            super().unlink(path)
            if path.endswith(".log.cleaned"):
                driver.stop.asked = True  # request a stop after the group was committed

    driver = compaction(ThisProcess(), log_dir, [task], fs=Stopping())
    [row] = rows_of_answers(driver, [(task, run_attempt(clean_here, task, "a0"))])
    assert row.status == "skipped"
    assert "interrupted [run-interrupted]. 1 of 3 groups done, safe to start the broker" in row.error
    assert checkpoint(log_dir) == {}
    assert not [file for file in (log_dir / "t-0").iterdir() if file.name.endswith((".clean", ".swap", ".deleted"))]


def test_a_failed_pass_reports_the_groups_of_earlier_passes(tmp_path: Path) -> None:
    """The second segment changes between the first and the second pass."""
    log_dir, [task] = in_passes(tmp_path / "logs")

    class Changing(FileSystem):
        def unlink(self, path: str) -> None:
            super().unlink(path)
            if path.endswith(".proof.rtest.aa0.clean") or ".log.deleted" in path:
                log = Path(task.partition_path, f"{task.segments[1].base_offset:020d}.log")
                log.write_bytes(log.read_bytes())

    _, row = finish(log_dir, task, Changing())
    assert row.status == "refused"
    assert "segment changed since it was planned" in row.error
    assert "1 of at least 2 groups done" in row.error
    assert not list(log_dir.rglob("*.clean"))
