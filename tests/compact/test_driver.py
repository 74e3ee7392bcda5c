from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from keytail.compact.cleaner import CleaningResult, CleaningTask, clean_partition
from keytail.compact.running.compaction import Compaction
from keytail.compact.running.installing import Answer
from keytail.compact.running.replacing import InPlace
from keytail.compact.running.state import Events
from keytail.compact.worker import clean_on_worker
from keytail.compact.write_phase.passes import least_scratch_bytes, scratch_bytes
from keytail.config.compaction import CompactionConfig
from keytail.errors import CorruptLog
from keytail.log.checkpoint import read_offsets
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.log_dirs import hosted, survey_log_dirs
from keytail.log.partition import survey_partition
from keytail.run.engine import Engine, ThisProcess
from keytail.run.rows import ResultRow
from keytail.run.spark.engine import SparkEngine
from keytail.run.storage import ScratchSpace
from keytail.run.tasks import Outcome
from keytail.sizes import human_bytes
from tests.log_dirs import (
    BASE_MS,
    newest_by_key,
    random_records,
    records_of,
    snapshot,
    write_log_dir,
)

pytestmark = pytest.mark.spark

NOW_MS = BASE_MS + 1_000_000
CONFIG = CompactionConfig(cleanup_policy=frozenset({"compact"}), min_cleanable_dirty_ratio=0.0)


def make(path: Path, count: int = 5, records: int = 400) -> tuple[Path, list[CleaningTask]]:
    """Write a log dir with partitions `t-0`, `t-1`, ...; return it with tasks that compact each up to its active
    segment.
    """
    log_dir = write_log_dir(path, {f"t-{n}": random_records(n, records + 40 * n) for n in range(count)})
    [facts] = survey_log_dirs(LOCAL, [str(log_dir)])
    tasks = []
    for entry in facts.partitions:
        survey = survey_partition(LOCAL, facts, entry)
        assert survey.problems == ()
        tasks.append(
            CleaningTask.of(
                survey,
                first_dirty_offset=0,
                first_uncleanable_offset=survey.segments[-1].base_offset,
                now_ms=NOW_MS,
                config=CONFIG,
                run_id="test",
            )
        )
    return log_dir, tasks


def compaction(engine: Engine, log_dir: Path, tasks: list[CleaningTask], **more: Any) -> Compaction:
    of_dirs = {facts.path: hosted([facts]) for facts in survey_log_dirs(LOCAL, [str(log_dir)])}
    return compaction_of(engine, of_dirs, tasks, **more)


def compaction_of(
    engine: Engine,
    of_dirs: Mapping[str, Collection[tuple[str, int]]],
    tasks: list[CleaningTask],
    *,
    fs: FileSystem = LOCAL,
    space: ScratchSpace | None = None,
    clean: Callable[[CleaningTask, str], CleaningResult] | None = None,
    deadline_s: float | None = None,
    ledger: Any = None,
    **events: Any,
) -> Compaction:
    """Return the driver of these tasks; `of_dirs` has the partitions of each log dir."""
    destination = InPlace(fs, of_dirs, clean or partial(clean_on_worker, engine.concurrent_tasks))
    return Compaction(engine, tasks, space or ScratchSpace(LOCAL), destination, Events(**events), deadline_s, ledger)


def rows_of_answers(driver: Compaction, answers: Sequence[Answer]) -> list[ResultRow]:
    return [item.row for item in driver.installer.finish(answers)]


def checkpoint(log_dir: Path) -> dict[tuple[str, int], int]:
    return read_offsets(LOCAL, str(log_dir / "cleaner-offset-checkpoint"))


def assert_compacted(log_dir: Path, row: ResultRow, task: CleaningTask, seed: int) -> None:
    before = random_records(seed, row.records_before or 0)
    after = records_of(log_dir / f"t-{row.partition}")
    assert row.status == "compacted"
    assert (row.records_before, row.records_after) == (len(before), len(after))
    assert len(after) < len(before)
    assert set(after) <= set(before)
    newest = newest_by_key(before)
    removed = {key for key, record in newest.items() if record.value is not None} - set(newest_by_key(after))
    assert not removed
    assert newest_by_key(after) == {key: newest[key] for key in newest_by_key(after)}
    assert row.end_dirty_offset == task.first_uncleanable_offset


def test_partitions_are_replaced_and_checkpointed(engine: SparkEngine, tmp_path: Path) -> None:
    log_dir, tasks = make(tmp_path / "logs")
    on_result: list[ResultRow] = []
    rows = compaction(engine, log_dir, tasks, on_row=on_result.append).run()
    assert [row.partition for row in rows] == [0, 1, 2, 3, 4]
    assert sorted(on_result, key=lambda row: row.partition) == rows
    for row, task in zip(rows, tasks, strict=True):
        assert_compacted(log_dir, row, task, row.partition)
    assert checkpoint(log_dir) == {("t", t.partition): t.first_uncleanable_offset for t in tasks}
    assert not list(log_dir.rglob("*.clean"))
    assert all(row.start_ms and row.end_ms and row.start_ms <= row.end_ms for row in rows)


def kill_the_worker_of_partition_2(task: CleaningTask, attempt: str) -> CleaningResult:
    if task.partition == 2:
        Path(task.partition_path, f"{0:020d}.log.r{task.run_id}.a{attempt}.clean").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.1)
    return clean_partition(LOCAL, replace(task, attempt=attempt))


def test_a_killed_worker_fails_one_partition(engine: SparkEngine, tmp_path: Path) -> None:
    log_dir, tasks = make(tmp_path / "logs")
    untouched = snapshot(log_dir / "t-2")
    rows = compaction(engine, log_dir, tasks, clean=kill_the_worker_of_partition_2).run()
    assert [row.status for row in rows] == ["compacted", "compacted", "failed", "compacted", "compacted"], rows
    assert "killed twice" in rows[2].error
    assert rows[2].bytes_after == rows[2].bytes_before
    assert snapshot(log_dir / "t-2") == untouched, "scratch files must be removed, and segments unchanged"
    assert ("t", 2) not in checkpoint(log_dir)
    assert not list(log_dir.rglob("*.clean"))
    for row in rows:
        if row.partition != 2:
            assert_compacted(log_dir, row, tasks[row.partition], row.partition)


def corrupt_1(task: CleaningTask, attempt: str) -> CleaningResult:
    if task.partition == 1:
        raise CorruptLog("a byte is wrong", path=task.partition_path, byte_position=3)
    return clean_partition(LOCAL, replace(task, attempt=attempt))


def test_one_corrupt_partition_does_not_stop_the_others(engine: SparkEngine, tmp_path: Path) -> None:
    log_dir, tasks = make(tmp_path / "logs", count=3)
    untouched = snapshot(log_dir / "t-1")
    rows = compaction(engine, log_dir, tasks, clean=corrupt_1).run()
    assert [row.status for row in rows] == ["compacted", "corrupt", "compacted"]
    assert "byte position 3" in rows[1].error
    assert snapshot(log_dir / "t-1") == untouched


def test_a_partition_that_does_not_fit_is_refused_with_numbers_and_the_rest_continues(
    engine: SparkEngine, tmp_path: Path
) -> None:
    log_dir, tasks = make(tmp_path / "logs", count=3)
    limit = least_scratch_bytes(tasks[1])
    assert least_scratch_bytes(tasks[2]) > limit
    untouched = snapshot(log_dir / "t-2")
    rows = compaction(engine, log_dir, tasks, space=ScratchSpace(LOCAL, limit)).run()
    assert [row.status for row in rows] == ["compacted", "compacted", "refused"]
    assert str(least_scratch_bytes(tasks[2])) in rows[2].error
    assert f"--max-scratch-bytes is {human_bytes(limit)}" in rows[2].error
    assert snapshot(log_dir / "t-2") == untouched


def test_scratch_in_flight_stays_within_the_limit(engine: SparkEngine, tmp_path: Path) -> None:
    log_dir, tasks = make(tmp_path / "logs")
    limit = max(scratch_bytes(task) for task in tasks)

    class Watched(ScratchSpace):
        peak = 0

        def reserve(self, needs: Any) -> None:
            super().reserve(needs)
            Watched.peak = max(Watched.peak, *self.reserved_bytes.values())

    rows = compaction(engine, log_dir, tasks, space=Watched(LOCAL, limit)).run()
    assert {row.status for row in rows} == {"compacted"}
    assert 0 < Watched.peak <= limit


def test_after_the_deadline_nothing_is_started(engine: SparkEngine, tmp_path: Path) -> None:
    log_dir, tasks = make(tmp_path / "logs", count=2)
    untouched = snapshot(log_dir)
    rows = compaction(engine, log_dir, tasks, deadline_s=time.monotonic()).run()
    assert [(row.status, "--deadline" in row.error) for row in rows] == [("not-begun", True)] * 2
    assert snapshot(log_dir) == untouched


def test_sources_that_change_after_planning_are_refused_with_the_host(engine: SparkEngine, tmp_path: Path) -> None:
    log_dir, tasks = make(tmp_path / "logs", count=2)
    log = Path(tasks[0].partition_path, f"{0:020d}.log")
    os.utime(log, ns=(1, 1))
    untouched = snapshot(log_dir / "t-0")
    rows = compaction(engine, log_dir, tasks).run()
    assert [row.status for row in rows] == ["refused", "compacted"]
    assert os.uname().nodename in rows[0].error
    assert snapshot(log_dir / "t-0") == untouched


def answers(tasks: list[CleaningTask]) -> list[tuple[CleaningTask, Outcome[CleaningResult]]]:
    return [(task, Outcome(clean_partition(LOCAL, task), None)) for task in tasks]


class Checkpoints(FileSystem):
    """Records the files of unfinished replacements whenever a checkpoint is replaced. In the log dir named `failing`,
    this raises OSError.
    """

    def __init__(self, failing: str = "none") -> None:
        super().__init__()
        self.failing, self.replaced, self.unfinished = failing, list[str](), list[str]()

    def rename(self, source: str, target: str) -> None:
        if target.endswith("cleaner-offset-checkpoint"):
            log_dir = Path(target).parent
            self.replaced.append(log_dir.name)
            self.unfinished += [p.name for p in log_dir.rglob("*") if p.name.endswith((".clean", ".swap", ".deleted"))]
            if log_dir.name == self.failing:
                raise OSError(5, "Input/output error", target)
        super().rename(source, target)


def test_the_checkpoints_of_a_bundle_are_written_once_for_each_log_dir(tmp_path: Path) -> None:
    """The checkpoints are written after all segments of the bundle are in place."""
    one, first = make(tmp_path / "one", count=3)
    two, second = make(tmp_path / "two", count=2)
    fs = Checkpoints()
    hosts = {str(one): {("t", n) for n in range(3)}, str(two): {("t", n) for n in range(2)}}
    driver = compaction_of(ThisProcess(), hosts, [*first, *second], fs=fs)
    rows = rows_of_answers(driver, answers([first[0], second[0], *first[1:], second[1]]))
    assert [row.status for row in rows] == ["compacted"] * 5
    assert fs.replaced == ["one", "two"]
    assert fs.unfinished == []
    for log_dir, tasks in ((one, first), (two, second)):
        assert checkpoint(log_dir) == {("t", task.partition): task.first_uncleanable_offset for task in tasks}


def test_a_checkpoint_that_cannot_be_written_fails_the_partitions_of_its_log_dir(tmp_path: Path) -> None:
    one, first = make(tmp_path / "one", count=2)
    two, second = make(tmp_path / "two", count=1)
    hosts = {str(one): {("t", n) for n in range(2)}, str(two): {("t", 0)}}
    driver = compaction_of(ThisProcess(), hosts, [*first, *second], fs=Checkpoints(failing="one"))
    rows = rows_of_answers(driver, answers([*first, *second]))
    assert [row.status for row in rows] == ["failed", "failed", "compacted"]
    for row in rows[:2]:
        assert "Input/output error" in row.error
        assert "1 of 1 groups done, safe to start the broker; the next run continues from there" in row.error
    assert checkpoint(one) == {}
    assert checkpoint(two) == {("t", 0): second[0].first_uncleanable_offset}


def test_a_partition_that_fails_does_not_affect_checkpoints_of_its_bundle(tmp_path: Path) -> None:
    log_dir, tasks = make(tmp_path / "logs", count=3)
    given = answers(tasks)
    given[1] = (tasks[1], Outcome(None, CorruptLog("a byte is wrong", path="x")))
    rows = rows_of_answers(compaction(ThisProcess(), log_dir, tasks), given)
    assert [row.status for row in rows] == ["compacted", "corrupt", "compacted"]
    assert checkpoint(log_dir) == {("t", n): tasks[n].first_uncleanable_offset for n in (0, 2)}


def test_a_stopped_bundle_writes_the_checkpoints_of_finished_partitions(tmp_path: Path) -> None:
    log_dir, tasks = make(tmp_path / "logs", count=3)
    untouched = snapshot(log_dir / "t-2")

    class Stopping(FileSystem):
        def unlink(self, path: str) -> None:
            super().unlink(path)
            if "/t-1/" in path and path.endswith(".log.cleaned"):
                driver.stop.asked = True  # request a stop after the group was committed

    driver = compaction(ThisProcess(), log_dir, tasks, fs=Stopping())
    given = answers(tasks[:2])
    rows = rows_of_answers(driver, [*given, (tasks[2], Outcome(None, CorruptLog("not used")))])
    assert [row.status for row in rows] == ["compacted", "compacted"]
    assert checkpoint(log_dir) == {("t", n): tasks[n].first_uncleanable_offset for n in (0, 1)}
    assert snapshot(log_dir / "t-2") == untouched


class FullDisk(FileSystem):
    """A file system of the driver in which checkpoints can be written, but segments cannot be replaced."""

    def rename(self, source: str, target: str) -> None:
        if target.endswith(".swap"):
            raise OSError(28, "No space left on device", target)
        super().rename(source, target)


def test_outputs_that_end_at_a_limit_are_reported(tmp_path: Path) -> None:
    """Each index has room for two entries, one per batch."""
    log_dir, [task] = make(tmp_path / "logs", count=1)
    before = newest_by_key(records_of(log_dir / "t-0"))
    tight = replace(CONFIG, segment_index_bytes=2 * 12, index_interval_bytes=0)
    notes: list[str] = []
    task = replace(task, config=tight)
    result = clean_partition(LOCAL, task)
    driver = compaction(ThisProcess(), log_dir, [task], on_note=notes.append)
    [row] = rows_of_answers(driver, [(task, Outcome(result, None))])
    assert row.status == "compacted"
    assert result.limits_met > 1
    assert notes == [
        f"t-0: {result.limits_met} new segments ended before the end of their source segments, at a limit: "
        "segment.bytes, segment.index.bytes or 2^31 - 1 offsets"
    ]
    assert row.segments_after == len(list((log_dir / "t-0").glob("*.log")))
    assert newest_by_key(records_of(log_dir / "t-0")) == before


def test_rebuilt_batches_above_max_message_bytes_are_reported(tmp_path: Path) -> None:
    log_dir, [task] = make(tmp_path / "logs", count=1)
    notes: list[str] = []
    result = clean_partition(LOCAL, replace(task, config=replace(CONFIG, max_message_bytes=70)))
    assert result.large_batches > 0
    rows_of_answers(compaction(ThisProcess(), log_dir, [task], on_note=notes.append), [(task, Outcome(result, None))])
    assert [note.split(": ")[1] for note in notes] == [
        f"{result.large_batches} rebuilt batches are larger than max.message.bytes"
    ]


def test_the_checkpoint_is_unchanged_if_a_replacement_fails(engine: SparkEngine, tmp_path: Path) -> None:
    log_dir, tasks = make(tmp_path / "logs", count=1)
    before = records_of(log_dir / "t-0")
    [row] = compaction(engine, log_dir, tasks, fs=FullDisk()).run()
    assert row.status == "failed"
    assert "No space left" in row.error
    assert "--max-scratch-bytes" in row.error
    assert checkpoint(log_dir) == {}
    assert records_of(log_dir / "t-0") == before


def test_an_unexpected_exception_in_the_driver_ends_the_run(engine: SparkEngine, tmp_path: Path) -> None:
    log_dir, tasks = make(tmp_path / "logs", count=1)

    def wrong(row: ResultRow) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        compaction(engine, log_dir, tasks, on_row=wrong).run()
