"""`keytail compact --execute` as an operator runs it, in a separate process that starts Spark."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli import forked
from tests.command_line import Run, rows_of
from tests.log_dirs import newest_by_key, random_records, records_of, snapshot, write_log_dir

KEYTAIL = Path(sys.executable).with_name("keytail")
CONFIG = ("--topics-have-no-overrides", "--topic-config", "orders:cleanup.policy=compact", "--topic-config",
          "users:cleanup.policy=delete")  # fmt: skip


def keytail(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYSPARK_", "SPARK_"))}
    return subprocess.run(
        [str(KEYTAIL), *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment | variables,
        check=False,
    )


def flags(log_dir: Path) -> tuple[str | Path, ...]:
    return "--log-dirs", log_dir, *CONFIG, "--execute", "--master", "local[2]", "--output", "json"


def execute(log_dir: Path, *more: str) -> tuple[int, dict[str, dict[str, Any]], str]:
    """Run with `--execute`; return the exit status, the rows by partition, and standard error."""
    done = keytail("compact", *flags(log_dir), *more)
    rows = json.loads(done.stdout) if done.stdout else []
    return done.returncode, {f"{row['topic']}-{row['partition']}": row for row in rows}, done.stderr


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    names = ("orders-0", "orders-1", "orders-2", "users-0")
    return write_log_dir(tmp_path / "logs", {name: random_records(n, 400) for n, name in enumerate(names)})


def assert_unchanged_records(before: list[Any], partition: Path) -> None:
    after, newest = records_of(partition), newest_by_key(before)
    assert set(after) <= set(before)
    assert {k for k, r in newest.items() if r.value is not None} <= set(newest_by_key(after))
    assert newest_by_key(after) == {key: newest[key] for key in newest_by_key(after)}


@pytest.mark.spark
def test_a_corrupt_partition_does_not_stop_the_others(log_dir: Path) -> None:
    """The log dir has a partition with a flipped byte, a file of a killed run, a checkpoint above the log end, and a
    topic that is not compacted.
    """
    before = {name: records_of(log_dir / name) for name in ("orders-0", "orders-2")}
    damaged = log_dir / "orders-1" / f"{100:020d}.log"
    data = bytearray(damaged.read_bytes())
    data[200] ^= 1
    damaged.write_bytes(data)
    (log_dir / "orders-2" / f"{0:020d}.log.rdead.as1.clean").write_bytes(b"garbage")
    (log_dir / "cleaner-offset-checkpoint").write_text("0\n2\norders 0 100000\nusers 0 100000\n")
    untouched = {name: snapshot(log_dir / name) for name in ("orders-1", "users-0")}

    status, rows, errors = execute(log_dir)

    assert status == 3, errors
    assert {name: row["status"] for name, row in rows.items()} == {
        "orders-0": "compacted",
        "orders-1": "corrupt",
        "orders-2": "compacted",
        "users-0": "skipped",
    }
    assert str(damaged) in rows["orders-1"]["error"]
    assert "byte position" in rows["orders-1"]["error"]
    assert {name: snapshot(log_dir / name) for name in untouched} == untouched
    for name, records in before.items():
        assert_unchanged_records(records, log_dir / name)
        assert rows[name]["records_after"] < rows[name]["records_before"] == 400
    checkpoint = (log_dir / "cleaner-offset-checkpoint").read_text()
    assert "orders 0 300\n" in checkpoint
    assert "orders 2 300\n" in checkpoint
    assert "orders 1" not in checkpoint
    assert "users 0 100000" in checkpoint, "the entry of a topic that is not compacted was removed"
    assert not list(log_dir.rglob("*.clean"))
    assert (log_dir / ".lock").read_bytes() == b"", "the lock file must remain: a broker that starts may have it open"
    assert "[3/3]" in errors, "without a terminal, progress must be printed as lines"
    noise = [line for line in errors.splitlines() if line and not line.startswith(("keytail", "Next:"))]
    assert noise == [], "Spark must print nothing"

    again = snapshot(log_dir)
    done = forked.keytail("compact", *flags(log_dir), "--topic", "orders", "--partitions", "orders-0,orders-2")
    assert done.returncode == 0, done.stderr
    assert {row["status"] for row in json.loads(done.stdout)} == {"clean"}
    assert "starting Spark" not in done.stderr
    assert snapshot(log_dir) == again


@pytest.mark.long
def test_a_run_is_refused_if_the_lock_is_held(log_dir: Path) -> None:
    (log_dir / ".lock").touch()
    before = snapshot(log_dir)
    with (log_dir / ".lock").open("r+") as lock:  # closing a descriptor of the file releases the lock
        fcntl.lockf(lock, fcntl.LOCK_EX)
        done = forked.keytail("compact", *flags(log_dir))
    assert (done.returncode, json.loads(done.stdout)) == (1, [])
    assert str(log_dir / ".lock") in done.stderr
    assert snapshot(log_dir) == before


def test_without_java_nothing_is_changed(log_dir: Path, tmp_path: Path) -> None:
    before = snapshot(log_dir)
    done = forked.keytail("compact", *flags(log_dir), PATH=str(tmp_path), JAVA_HOME=str(tmp_path / "no"))
    assert done.returncode == 2
    assert "JAVA_HOME is" in done.stderr
    assert snapshot(log_dir) == before


def test_the_table_has_a_row_for_each_partition(log_dir: Path) -> None:
    done = forked.keytail("compact", "--log-dirs", log_dir, *CONFIG, "--execute", "--map-memory", "64m")
    assert done.returncode == 0, done.stderr
    assert "orders-0" in done.stdout
    assert "->" in done.stdout
    assert "4 partitions: 3 compacted, 1 skipped." in done.stdout
    assert "records removed" in done.stdout
    assert "keytail verify" in done.stderr


@pytest.mark.spark
def test_keyless_records_are_refused_unless_they_may_be_dropped(run: Run, on_spark: None, tmp_path: Path) -> None:
    records = random_records(1, 200)
    records[30] = type(records[30])(30, records[30].timestamp, None, b"no key")
    log_dir = write_log_dir(tmp_path / "logs", {"orders-0": records})
    before = snapshot(log_dir / "orders-0")
    done = run("compact", *flags(log_dir))
    assert done.exit_code == 1
    [row] = rows_of(done).values()
    assert row["status"] == "refused"
    assert "--drop-keyless" in row["error"]
    assert "offset 30" in row["error"]
    assert snapshot(log_dir / "orders-0") == before
    done = run("compact", *flags(log_dir), "--drop-keyless")
    assert (done.exit_code, rows_of(done)["orders-0"]["status"]) == (0, "compacted")
    assert 30 not in {record.offset for record in records_of(log_dir / "orders-0")}
