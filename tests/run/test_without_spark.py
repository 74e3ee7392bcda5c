"""A short run without Spark has the same files, rows and exit statuses as with Spark, and reacts in the same way to
signals and killed workers.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.chance import SEED
from tests.cli import forked
from tests.cli.test_stopping import (
    LONGEST_S,
    ROUNDS,
    check_left,
    ended,
    group_members,
    inode_of,
    large_records,
    start,
    wait_for,
    wait_until_gone,
)
from tests.command_line import Run
from tests.compact.test_command import CONFIG, KEYTAIL, assert_unchanged_records, keytail
from tests.log_dirs import random_records, records_of, snapshot, write_log_dir

NAMES = ("orders-0", "orders-1", "orders-2", "users-0")


def make(path: Path) -> Path:
    """Write a sound partition, a damaged one, one with a file of a killed run, and one that is not compacted."""
    log_dir = write_log_dir(path, {name: random_records(SEED + n, 400) for n, name in enumerate(NAMES)})
    damaged = log_dir / "orders-1" / f"{100:020d}.log"
    data = bytearray(damaged.read_bytes())
    data[200] ^= 1
    damaged.write_bytes(data)
    (log_dir / "orders-2" / f"{0:020d}.log.rdead.as1.clean").write_bytes(b"garbage")
    return log_dir


def flags(log_dir: Path) -> tuple[str | Path, ...]:
    return "--log-dirs", log_dir, *CONFIG, "--execute", "--output", "json"


def compact(log_dir: Path, *more: str) -> tuple[int, list[dict[str, Any]], str]:
    done = forked.keytail("compact", *flags(log_dir), *more)
    return done.returncode, json.loads(done.stdout), done.stderr


def without_times(rows: list[dict[str, Any]], root: Path) -> str:
    for row in rows:
        row["start_ms"] = row["end_ms"] = None
    return json.dumps(rows).replace(str(root), "ROOT")


@pytest.mark.spark
def test_files_rows_and_status_are_those_of_spark(run: Run, on_spark: None, tmp_path: Path) -> None:
    print("seed", SEED)
    with_spark, without = make(tmp_path / "spark"), tmp_path / "none"
    shutil.copytree(with_spark, without, copy_function=shutil.copy2)
    now = ("--now", str(time.time_ns() // 1_000_000), "--unsafe-clock")
    done = keytail("compact", *flags(without), *now, PATH="/nowhere", JAVA_HOME="/nowhere")
    assert "without Spark" in done.stderr
    assert "[3/3]" in done.stderr
    assert done.returncode == 3
    rows = json.loads(done.stdout)
    there = run("compact", *flags(with_spark), *now, "--master", "local[2]")
    assert "starting Spark" in there.stderr
    assert there.exit_code == done.returncode
    assert without_times(json.loads(there.stdout), with_spark) == without_times(rows, without)
    assert {row["status"] for row in rows} == {"compacted", "corrupt", "skipped"}
    assert {name: data for name, (data, _) in snapshot(without).items()} == {
        name: data for name, (data, _) in snapshot(with_spark).items()
    }


@pytest.fixture
def large(tmp_path: Path) -> Path:
    print("seed", SEED)
    partitions = {"orders-0": large_records(), "orders-1": large_records(40)}
    return write_log_dir(tmp_path / "logs", partitions, segments=16)


@pytest.mark.long
@pytest.mark.parametrize(
    "signal_number",
    [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.soak("SIGINT, tests/cli/test_stopping.py"))],
)
def test_a_signal_to_the_process_group_stops_a_run_between_passes(
    signal_number: signal.Signals, large: Path, tmp_path: Path
) -> None:
    before = {name: records_of(large / name) for name in ("orders-0", "orders-1")}
    words = ["--log-dirs", str(large), *CONFIG, *ROUNDS, "--execute", "--output", "json"]
    words += ["--report", str(tmp_path / "page.html")]
    run = start([str(KEYTAIL), "compact", *words], tmp_path)
    first = large / "orders-0" / f"{0:020d}.log"
    inode = first.stat().st_ino
    began_s = time.monotonic()
    wait_for(lambda: inode_of(first) not in (None, inode), run)
    longest_s = max(30, 3 * (time.monotonic() - began_s))  # the first pass took a third; another one may take longer
    os.killpg(run.pid, signal_number)
    rows, seconds = ended(run)
    errors = (tmp_path / "stderr").read_text()
    assert run.returncode == 128 + signal_number, errors
    assert f"interrupted by {signal_number.name}" in errors
    assert "Traceback" not in errors
    assert seconds < longest_s
    check_left(large, before)
    [row] = [row for row in rows if row["partition"] == 0]
    assert "groups done, safe to start the broker" in row["error"], row
    page = (tmp_path / "page.html").read_text()
    assert f"The run did not complete: interrupted by {signal_number.name}. Reclaimed" in page
    assert f"interrupted [run-interrupted]. {row['error'].partition('. ')[2]}" in page
    status, again, errors = compact(large)
    assert status == 0, errors
    assert {row["status"] for row in again} <= {"compacted", "clean"}
    for name, records in before.items():
        assert_unchanged_records(records, large / name)


def test_a_deadline_stops_a_run_between_passes(large: Path) -> None:
    status, rows, errors = compact(large, *ROUNDS, "--deadline", "0.02")
    assert status == 0, errors
    [row] = [row for row in rows if row["partition"] == 0]
    assert row["status"] in ("skipped", "not-begun"), "partition 0 must not be completed"
    assert "--deadline" in row["error"]


def _workers(group: int, directory: Path) -> list[int]:
    found = []
    for pid in group_members(group):
        try:
            links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue
        if any(link.startswith(f"{directory}{os.sep}") for link in links):
            found.append(pid)
    return found


@pytest.mark.long
def test_a_partition_that_kills_its_worker_twice_fails_and_others_are_compacted(large: Path, tmp_path: Path) -> None:
    untouched = snapshot(large / "orders-0")
    words = ["--log-dirs", str(large), *CONFIG, "--throttle", "2m", "--execute", "--output", "json"]
    run = start([str(KEYTAIL), "compact", *words], tmp_path)
    killed = set[int]()
    while run.poll() is None:
        for pid in set(_workers(run.pid, large / "orders-0")) - killed - {run.pid}:
            killed.add(pid)
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    rows = {row["partition"]: row for row in ended(run)[0]}
    assert {number: row["status"] for number, row in rows.items()} == {0: "failed", 1: "compacted"}
    assert "killed twice" in rows[0]["error"]
    assert run.returncode == 3
    assert len(killed) == 2
    assert snapshot(large / "orders-0") == untouched
    status, again, errors = compact(large)
    assert (status, {row["status"] for row in again}) == (0, {"compacted", "clean"}), errors


@pytest.mark.long
def test_a_killed_driver_leaves_no_workers_or_locks(large: Path, tmp_path: Path) -> None:
    before = {name: records_of(large / name) for name in ("orders-0", "orders-1")}
    words = ["--log-dirs", str(large), *CONFIG, "--throttle", "4m", "--execute", "--output", "json"]
    run = start([str(KEYTAIL), "compact", *words], tmp_path)
    wait_for(lambda: list(large.rglob("*.clean")), run)
    os.kill(run.pid, signal.SIGKILL)
    run.communicate(timeout=LONGEST_S)
    wait_until_gone(run.pid)
    status, _, errors = compact(large)
    assert status == 0, errors
    assert not list(large.rglob("*.clean"))
    for name, records in before.items():
        assert_unchanged_records(records, large / name)
