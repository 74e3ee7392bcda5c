"""`compact --output-dir` in a Spark session with two cores: fan-out, a killed worker, a stopped run."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keytail.cli.configuration import Configuration
from keytail.cli.selection import PartitionFilter
from keytail.compact import steps
from keytail.compact.command import Request
from keytail.compact.fan_out.on_spark import fan_out_on_spark
from keytail.compact.fan_out.stages import Sizes
from keytail.compact.out_of_place import driver as out_of_place
from keytail.compact.out_of_place.plan import PlannedPartition
from keytail.compact.out_of_place.target import Target
from keytail.compact.running import installing
from keytail.config.resolve import from_command_line
from keytail.run.rows import ResultRow
from keytail.run.spark.engine import SparkEngine
from tests.compact.out_of_place.s3_server import s3_server
from tests.compact.out_of_place.test_command import RECORD, files_of
from tests.compact.test_command import CONFIG, KEYTAIL
from tests.log_dirs import random_records, snapshot, write_log_dir

pytestmark = pytest.mark.spark

NOW_MS = int(time.time() * 1000)
SMALL = Sizes(slice_bytes=3000, shards=3)
NAMES = ("orders-0", "users-0")


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    return write_log_dir(tmp_path / "logs", {name: random_records(n, 600) for n, name in enumerate(NAMES)})


def run(
    spark: Any, monkeypatch: pytest.MonkeyPatch, source: Path, out: Path | str, **more: Any
) -> dict[str, ResultRow]:
    """Run the command in this session, and return the rows by partition."""
    monkeypatch.setattr(steps, "workers_of_run", lambda *_, **__: SparkEngine(spark))
    request = Request(
        partition_filter=PartitionFilter(log_dirs=(str(source),)),
        configuration=Configuration(
            from_command_line(("orders:cleanup.policy=compact", "users:cleanup.policy=delete")), {}, True
        ),
        execute=True,
        now_ms=NOW_MS,
        unsafe_clock=True,
        map_memory_bytes=8 << 20,
        output_dirs=(str(out),),
        **more,
    )
    return {row.name: row for row in out_of_place.compact(request)}


def test_many_tasks_write_the_bytes_of_one_task(
    spark: Any, monkeypatch: pytest.MonkeyPatch, log_dir: Path, tmp_path: Path
) -> None:
    before = snapshot(log_dir)
    item, many = tmp_path / "one", tmp_path / "many"
    run(spark, monkeypatch, log_dir, item, fan_out="never")
    real = fan_out_on_spark
    monkeypatch.setattr(installing, "fan_out_on_spark", lambda *given, **how: real(*given, **how, sizes=SMALL))
    rows = run(spark, monkeypatch, log_dir, many, fan_out="always")
    assert {name: row.status for name, row in rows.items()} == {"orders-0": "compacted", "users-0": "skipped"}
    assert files_of(many) == files_of(item)
    assert {path.name for path in many.iterdir()} == {path.name for path in item.iterdir()}
    assert snapshot(log_dir) == before


def test_many_tasks_upload_the_bytes_of_one_task(
    spark: Any,
    monkeypatch: pytest.MonkeyPatch,
    log_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The target is an object store. One partition has too many keys for one task, and is compacted by many tasks."""
    monkeypatch.setattr(Target, "entries", Target._entries)  # no process may be forked in this test
    mounted = tmp_path / "mounted"
    run(spark, monkeypatch, log_dir, mounted, fan_out="never")
    (tmp_path / "scratch").mkdir()
    with s3_server() as server:
        server.client().create_bucket(Bucket="backups")
        real = PlannedPartition.task
        with_few = lambda *given, **more: replace(real(*given, **more), map_max_entries=5)  # noqa: E731
        monkeypatch.setattr(PlannedPartition, "task", with_few)
        uri = server.uri_with_keys("backups/7")
        rows = run(spark, monkeypatch, log_dir, uri, fan_out="auto", scratch_dir=str(tmp_path / "scratch"))
        assert {row.status for row in rows.values()} == {"compacted", "skipped"}, rows
        assert "orders-0: the partition's keys do not fit into the" in capsys.readouterr().err
        sent = {name: data for name, data in server.objects("backups/7").items() if "/" in name}
        assert {name: data for name, data in sent.items() if not name.endswith(RECORD)} == {
            name: data for name, (data, _, _) in files_of(mounted).items()
        }
        assert not list((tmp_path / "scratch").iterdir())


def test_many_tasks_copy_a_partition_with_keyless_records(
    spark: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    records = random_records(1, 200)
    records[30] = type(records[30])(30, records[30].timestamp, None, b"no key")
    source, out = write_log_dir(tmp_path / "logs", {"orders-0": records}), tmp_path / "out"
    [row] = run(spark, monkeypatch, source, out, fan_out="always").values()
    assert row.status == "refused"
    assert row.error.startswith("copied unchanged: ") and "--drop-keyless" in row.error
    assert files_of(out) == files_of(source)
    assert (out / "meta.properties").exists()


class Dying:
    """Runs the tasks of a worker, and kills its process the first time that files are written."""

    def __init__(self, worker: Any, mark: Path) -> None:
        self.worker, self.mark = worker, mark
        self.finish, self.shared_storage = worker.finish, worker.shared_storage

    def place(self, task: Any, attempt: str) -> Any:
        result = self.worker.place(task, attempt)
        if not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return result


def test_a_killed_worker_does_not_change_the_result(
    spark: Any, monkeypatch: pytest.MonkeyPatch, log_dir: Path, tmp_path: Path
) -> None:
    item, two = tmp_path / "one", tmp_path / "two"
    run(spark, monkeypatch, log_dir, item)
    real = out_of_place.Worker
    monkeypatch.setattr(out_of_place, "Worker", lambda *given: Dying(real(*given), tmp_path / "died"))
    rows = run(spark, monkeypatch, log_dir, two)
    assert (tmp_path / "died").exists()
    assert {row.status for row in rows.values()} == {"compacted", "skipped"}
    assert files_of(two) == files_of(item), "a file of the first attempt remains"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_run_leaves_the_source_unchanged_and_the_next_run_continues(
    tmp_path: Path, number: signal.Signals
) -> None:
    """The run is short and does not use Spark. The run is stopped when some partitions are done."""
    names = [f"orders-{n}" for n in range(24)]
    source = write_log_dir(tmp_path / "logs", {name: random_records(n, 400) for n, name in enumerate(names)})
    out, whole = tmp_path / "out", tmp_path / "whole"
    before = snapshot(source)
    clock = ("--now", str(int(time.time() * 1000)), "--unsafe-clock")
    flags = (*CONFIG, *clock, "--execute", "--output-dir")
    command = list(map(str, (KEYTAIL, "compact", "--log-dirs", source, *flags)))
    slowly = [*command, str(out), "--throttle", "100k"]
    run_of = subprocess.Popen(slowly, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    give_up = time.monotonic() + 300
    while not list(out.glob(f"*/{RECORD}")):
        assert time.monotonic() < give_up and run_of.poll() is None
        time.sleep(0.005)
    run_of.send_signal(number)
    _, errors = run_of.communicate(timeout=300)
    assert run_of.returncode == (143 if number == signal.SIGTERM else -signal.SIGKILL), errors
    assert snapshot(source) == before
    assert not (out / "meta.properties").exists()
    assert len(list(out.glob(f"*/{RECORD}"))) < len(names), "the run was not stopped in time"
    if number == signal.SIGTERM:
        assert not list(out.rglob("*.clean"))
        assert "interrupted by SIGTERM" in errors
    for target in (out, whole):
        done = subprocess.run([*command, str(target)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert files_of(out) == files_of(whole)
    assert snapshot(source) == before
    shutil.rmtree(source)
