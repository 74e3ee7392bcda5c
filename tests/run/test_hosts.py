"""Errors that a host detects itself: other files at a path, missing files of another host, shared storage."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from keytail.cli.configuration import read_configuration
from keytail.cli.selection import PartitionFilter
from keytail.compact import execution as compaction
from keytail.compact import steps, worker
from keytail.compact.cleaner import clean_partition
from keytail.compact.fan_out import on_spark as spark_fan_out
from keytail.compact.fan_out.stages import fan_out
from keytail.errors import Refused
from keytail.log.fs import LOCAL, FileSystem
from keytail.rebuild_index import driver as rebuild
from keytail.rebuild_index import tasks as spark_rebuild
from keytail.run.engine import ThisProcess
from keytail.run.hosts import refuse_network_here, refuse_other_logs, refuse_unseen, seen_logs
from keytail.run.tasks import Outcome
from keytail.verify.driver import VerifyTask, verify_on_worker
from tests.bench.stage import plans_of
from tests.bench.worker import task_of
from tests.compact.fan_out.in_process import InProcess
from tests.log_dirs import random_records, snapshot, write_log_dir

HOST = os.uname().nodename


class OnNfs(FileSystem):
    def file_system_type(self, path: str) -> str:
        return "nfs4"


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    return write_log_dir(tmp_path / "logs", {"orders-0": random_records(1, 400)})


def touch(partition: Path) -> None:
    os.utime(partition / f"{100:020d}.log", ns=(1, 1))


def shorten(partition: Path) -> None:
    log = partition / f"{100:020d}.log"
    os.truncate(log, log.stat().st_size - 1)


def remove(partition: Path) -> None:
    (partition / f"{100:020d}.log").unlink()


def add(partition: Path) -> None:
    (partition / f"{1000:020d}.log").touch()


@pytest.mark.parametrize("change", [touch, shorten, remove, add, shutil.rmtree])
def test_segments_that_differ_are_refused_with_path_and_host(log_dir: Path, change: Any) -> None:
    partition = log_dir / "orders-0"
    seen = seen_logs(LOCAL, str(partition))
    assert seen.segments == 4
    (partition / f"{100:020d}.index").unlink()  # only `.log` files are compared
    refuse_other_logs(LOCAL, str(partition), seen)
    change(partition)
    with pytest.raises(Refused, match=rf"on host {HOST}.*{partition}"):
        refuse_other_logs(LOCAL, str(partition), seen)


def test_a_task_of_verify_checks_the_files_first_unless_a_broker_may_run(log_dir: Path) -> None:
    path = str(log_dir / "orders-0")
    seen = seen_logs(LOCAL, path)
    assert verify_on_worker(VerifyTask(path, 1, seen=seen), "a").counts.segments == 4
    touch(log_dir / "orders-0")
    with pytest.raises(Refused, match=r"\[segments-differ-on-host\]"):
        verify_on_worker(VerifyTask(path, 1, seen=seen), "a")
    assert verify_on_worker(VerifyTask(path, 1, live=True, seen=seen), "a").counts.segments == 4
    assert verify_on_worker(VerifyTask(path, 1), "a").counts.segments == 4


def test_the_error_for_a_missing_file_names_the_host_that_wrote_it(tmp_path: Path) -> None:
    (tmp_path / "one").touch()
    refuse_unseen(LOCAL, str(tmp_path), ["one"], "far")
    with pytest.raises(Refused, match=rf"host far wrote two.*{tmp_path}.*\[task-output-missing\]"):
        refuse_unseen(LOCAL, str(tmp_path), ["one", "two"], "far")


def test_a_slice_of_a_changed_segment_is_refused(log_dir: Path) -> None:
    [task] = [task for task in _segment_tasks(log_dir) if task.base_offset == 100]
    part = spark_rebuild.Slice(0, task.log_bytes)
    assert spark_rebuild.do(LOCAL, spark_rebuild.Work(task, part), "a").batches == 10
    touch(log_dir / "orders-0")
    with pytest.raises(Refused, match=f"on host {HOST}"):
        spark_rebuild.do(LOCAL, spark_rebuild.Work(task, part), "a")


def test_a_host_that_mounts_the_log_dir_over_the_network_writes_nothing(log_dir: Path, monkeypatch: Any) -> None:
    """The file system may be local for the driver, which may run on the storage server."""
    refuse_network_here(LOCAL, str(log_dir))
    for module in (worker, spark_rebuild):
        monkeypatch.setattr(module, "LOCAL", OnNfs())
    before = snapshot(log_dir)
    task = task_of(str(log_dir), map_memory_bytes=1 << 20, segment_bytes=1 << 20)
    work = [spark_rebuild.Work(item) for item in _segment_tasks(log_dir)]
    clean = partial(worker.clean_on_worker, 1, task, "a")
    with pytest.raises(Refused, match=rf"\(nfs4\) on host {HOST}.*{log_dir}.*--shared-storage"):
        clean()
    for outcome in spark_rebuild.do_on_worker(work, "a"):
        assert isinstance(outcome.problem, Refused)
        assert "--shared-storage" in str(outcome.problem)
    assert snapshot(log_dir) == before
    assert clean(shared_storage=True).groups
    assert [outcome.problem for outcome in spark_rebuild.do_on_worker(work, "a", shared_storage=True)] == [None] * 4


def test_a_stage_of_a_fan_out_writes_nothing_over_the_network(log_dir: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(spark_fan_out, "LOCAL", OnNfs())
    path = str(log_dir / "orders-0")
    with pytest.raises(Refused, match=rf"\(nfs4\) on host {HOST}.*{log_dir}"):
        spark_fan_out.Workers(path, 1, None, False).file_system()
    assert spark_fan_out.Workers(path, 1, None, True).file_system()


class LosesFiles(InProcess):
    """Runs the stages here, but removes the files that the stage `lost` writes, as if another host had them."""

    def __init__(self, cells: Path, partition: Path, lost: str) -> None:
        super().__init__(cells)
        self.partition, self.lost = partition, lost
        workers = spark_fan_out.Workers(str(partition), 1, None, False)
        self.there = spark_fan_out.StagesOnSpark(ThisProcess(), workers, "")

    def run(self, name: str, *given: Any) -> Any:
        return self._lose_files(name, lambda: super(LosesFiles, self).run(name, *given))

    def shuffle(self, name: str, *given: Any) -> Any:
        return self._lose_files(name, lambda: super(LosesFiles, self).shuffle(name, *given))

    def _lose_files(self, name: str, work: Any) -> Any:
        before = set(self.partition.iterdir())
        values = work()
        if name == self.lost:
            for path in set(self.partition.iterdir()) - before:
                path.unlink()
        return self.there._values([Outcome(value, None, "far") for value in values])


@pytest.mark.parametrize("stage", ["survey", "keys", "groups", "none"])
def test_missing_files_of_a_fan_out_stage_are_reported(stage: str, log_dir: Path, tmp_path: Path) -> None:
    task = task_of(str(log_dir), map_memory_bytes=1 << 20, segment_bytes=1 << 20)
    engine = LosesFiles(tmp_path / "cells", log_dir / "orders-0", stage)
    if stage == "none":
        assert fan_out(LOCAL, task, engine).bytes_after == clean_partition(LOCAL, task).bytes_after
        return
    with pytest.raises(Refused, match=r"host far wrote .*, which does not exist on this host"):
        fan_out(LOCAL, task, engine)


@pytest.mark.parametrize(("command", "starts_spark"), [(compaction, steps), (rebuild, rebuild)])
def test_a_log_dir_on_nfs_is_refused_before_spark_starts(
    command: Any, starts_spark: Any, log_dir: Path, monkeypatch: Any
) -> None:
    def no_session(*args: Any, **more: Any) -> Any:
        raise AssertionError("Spark was started")

    monkeypatch.setattr(starts_spark, "workers_of_run", no_session)
    configuration = read_configuration(None, ["orders:cleanup.policy=compact"], topics_have_no_overrides=True)
    request = command.Request(PartitionFilter((str(log_dir),)), configuration, execute=True)
    before = snapshot(log_dir)
    with pytest.raises(Refused, match="--shared-storage"):
        (compaction.compact if command is compaction else rebuild.rebuild)(request, OnNfs())
    assert snapshot(log_dir) == before


def _segment_tasks(log_dir: Path) -> list[Any]:
    [plan] = plans_of(str(log_dir), execute=True)
    return spark_rebuild.segment_tasks(plan)
