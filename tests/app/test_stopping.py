"""SIGINT and SIGTERM to real runs, to the process alone and to its group as a terminal sends them."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from keytail.app.stopping import Stopped, stoppable
from keytail.log.fs import LOCAL
from keytail.log.recover import recover
from tests.app.log_dirs import BASE_MS, newest_by_key, records_of, snapshot, write_log_dir
from tests.app.test_compact import CONFIG, KEYTAIL, assert_kept, execute
from tests.reference.batches import Rec
from tests.spark.test_submit import JOB, ROOT, SUBMIT

SEED = int(os.environ.get("KEYTAIL_SEED", "0")) or random.SystemRandom().randrange(2**32)
SEGMENT = "orders:segment.bytes=1048576"
ROUNDS = ("--topic-config", SEGMENT, "--grouping", "kafka", "--max-scratch-bytes", "2200k", "--throttle", "20m")


def large_records(count: int = 400) -> list[Rec]:
    """Eight MiB: more than scratch space takes at once."""
    chance = random.Random(SEED)
    return [Rec(n, BASE_MS + n, b"%d" % chance.randrange(150), chance.randbytes(20000)) for n in range(count)]


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    print("seed", SEED)
    return write_log_dir(tmp_path / "logs", {"orders-0": large_records(), "orders-1": large_records(40)}, segments=16)


def start(command: list[str], tmp_path: Path) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYSPARK_", "SPARK_"))}
    environment |= {"SPARK_CONF_DIR": str(ROOT / "conf"), "SPARK_LOCAL_IP": "127.0.0.1"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with (tmp_path / "stderr").open("w") as errors:
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, start_new_session=True
        )


def wait_for(there: Callable[[], object], run: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not there():
        assert run.poll() is None, "the run ended before it could be stopped"
        assert time.monotonic() < deadline
        time.sleep(0.02)


def group_members(group: int) -> list[int]:
    """Processes of a process group."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def ended(run: subprocess.Popen[str]) -> tuple[list[dict[str, Any]], float]:
    """Its rows, and the seconds until nothing of it was left."""
    start_s = time.monotonic()
    output, _ = run.communicate(timeout=60)
    while group_members(run.pid):
        assert time.monotonic() < start_s + 60
        time.sleep(0.02)
    return json.loads(output), time.monotonic() - start_s


def check_left(log_dir: Path, before: dict[str, list[Rec]]) -> None:
    assert not (log_dir / ".lock").exists()
    assert not [path for path in log_dir.rglob("*") if path.suffix in (".clean", ".swap", ".deleted", ".cleaned")]
    for name, records in before.items():
        assert recover(LOCAL, str(log_dir / name)) == []
        assert_kept(records, log_dir / name)


@pytest.mark.spark
def test_ctrl_c_between_rounds_says_how_far_it_came_and_the_next_run_goes_on(log_dir: Path, tmp_path: Path) -> None:
    before = {name: records_of(log_dir / name) for name in ("orders-0", "orders-1")}
    bytes_before = sum(log.stat().st_size for log in (log_dir / "orders-0").glob("*.log"))
    flags = ["--log-dirs", str(log_dir), *CONFIG, *ROUNDS, "--execute", "--master", "local[2]", "--output", "json"]
    run = start([str(KEYTAIL), "compact", *flags], tmp_path)
    first = log_dir / "orders-0" / f"{0:020d}.log"
    inode = first.stat().st_ino
    wait_for(lambda: first.exists() and first.stat().st_ino != inode, run)  # the first round is done
    time.sleep(random.Random(SEED).uniform(0, 1))
    os.killpg(run.pid, signal.SIGINT)
    rows, seconds = ended(run)
    errors = (tmp_path / "stderr").read_text()
    assert run.returncode == 130, errors
    assert "interrupted by SIGINT" in errors
    assert "Traceback" not in errors
    assert "Exception" not in errors
    assert seconds < 20
    check_left(log_dir, before)
    [row] = [row for row in rows if row["partition"] == 0]
    assert row["status"] == "skipped", row
    assert "groups done, safe to start the broker" in row["error"]
    assert 0 < row["bytes_after"] < bytes_before
    assert "orders 0" not in ((log_dir / "cleaner-offset-checkpoint").read_text() if
                              (log_dir / "cleaner-offset-checkpoint").exists() else "")  # fmt: skip
    status, again, errors = execute(log_dir)
    assert status == 0, errors
    assert again["orders-0"]["status"] == "compacted"
    for name, records in before.items():
        assert_kept(records, log_dir / name)


@pytest.mark.spark
@pytest.mark.parametrize("to_group", [True, False])
def test_spark_submit_is_told_to_stop(to_group: bool, log_dir: Path, tmp_path: Path) -> None:
    """The group gets SIGINT, JVM and driver alike; SIGTERM only the JVM, whose end tells the driver."""
    before = {name: records_of(log_dir / name) for name in ("orders-0", "orders-1")}
    untouched = snapshot(log_dir)
    flags = ["--log-dirs", str(log_dir), *CONFIG, "--throttle", "4m", "--execute", "--output", "json"]
    run = start([str(SUBMIT), "--master", "local[2]", str(JOB), *flags], tmp_path)
    wait_for(lambda: list(log_dir.rglob("*.clean")), run)
    if to_group:
        os.killpg(run.pid, signal.SIGINT)
    else:
        os.kill(run.pid, signal.SIGTERM)
    run.communicate(timeout=60)
    deadline = time.monotonic() + 30
    while group_members(run.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not group_members(run.pid)
    errors = (tmp_path / "stderr").read_text()
    assert run.returncode in (130, 143), errors
    if to_group:
        assert "interrupted by SIGINT" in errors
    else:  # its session is stopped under the driver, which may end by that before it hears of the JVM's end
        assert "interrupted by SIGTERM" in errors or "safe to start the broker" in errors
    assert "Traceback" not in errors
    check_left(log_dir, before)
    assert snapshot(log_dir) == untouched
    assert newest_by_key(records_of(log_dir / "orders-0")) == newest_by_key(before["orders-0"])


def test_a_signal_is_raised_once_and_again_only_after_a_while(capfd: pytest.CaptureFixture[str]) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped) as stopped, stoppable():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGINT)  # while it is being tidied up
    assert stopped.value.exit_status == 143
    assert "stopping already" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == handler


def test_a_signal_that_is_turned_off_stays_off() -> None:
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stoppable():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, handler)
