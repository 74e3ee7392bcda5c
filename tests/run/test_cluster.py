"""A standalone cluster of two workers: duplicates of slow tasks, tasks that are run again, a lost executor, and a host
that sees other files.

Each disturbed run has one complete result, in which the latest record of each key is retained.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from keytail.log.lock import is_held
from tests.log_dirs import newest_by_key, random_records, records_of, snapshot, write_log_dir
from tests.run.cluster import ELSEWHERE, ROOT, Cluster

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("cluster")]  # all tests share one cluster

PARTITIONS = 4
SOAK = os.environ.get("KEYTAIL_SOAK") == "1"
# The statuses of a partition from a host that sees the right files.
GOOD = {"verify": {"suspect"}, "rebuild-index": {"rebuilt"}, "compact": {"compacted"}}


@pytest.mark.parametrize(
    ("how", "speculation"), [("1:slow", "forced"), *([("1:executor,2:worker", "asked for")] if SOAK else [])]
)
def test_a_disturbed_run_has_one_complete_result(
    how: str, speculation: str, two_workers: Cluster, tmp_path: Path
) -> None:
    log_dir = write_log_dir(tmp_path / "logs", {f"orders-{n}": random_records(n, 400) for n in range(PARTITIONS)})
    before = {n: records_of(log_dir / f"orders-{n}") for n in range(PARTITIONS)}
    answer, notes = run(two_workers, log_dir, tmp_path / "notes", how, speculation)
    assert answer["speculation"] == ("true" if speculation == "forced" else "false"), (
        "keytail's setting applies, not that of the cluster"
    )
    assert [row["status"] for row in answer["rows"]] == ["compacted"] * PARTITIONS, answer
    for item in how.split(","):
        number, _, kind = item.partition(":")
        attempts = [name for name in notes if name.startswith(f"{number}.s")]
        assert len(attempts) >= 2, "no task was disturbed"
        if kind != "worker":  # an executor restarts a killed worker
            assert len({name.rpartition(".")[2] for name in attempts}) == len(attempts), (
                "two attempts ran in one executor"
            )
    for n, records in before.items():
        after, newest = records_of(log_dir / f"orders-{n}"), newest_by_key(records)
        assert len(after) < len(records)
        assert set(after) <= set(records)
        assert newest_by_key(after) == newest
    left = [path.name for path in log_dir.rglob("*") if path.suffix in (".clean", ".swap", ".cleaned", ".deleted")]
    assert not left
    assert not is_held(str(log_dir))
    assert (log_dir / "cleaner-offset-checkpoint").read_text().splitlines()[1] == str(PARTITIONS)


@pytest.mark.parametrize(
    ("how", "speculation"), [("merge:executor", "asked for"), *([("scan:slow,merge:slow", "forced")] if SOAK else [])]
)
@pytest.mark.soak("test_a_disturbed_run_has_one_complete_result, compact/fan_out/test_on_spark.py")
def test_a_disturbed_fan_out_has_one_complete_result(
    how: str, speculation: str, two_workers: Cluster, tmp_path: Path
) -> None:
    """A lost executor loses the key runs that it wrote for other tasks, and copies of tasks write the same key runs."""
    log_dir = write_log_dir(tmp_path / "logs", {"orders-0": random_records(5, 900)})
    before = records_of(log_dir / "orders-0")
    driver = "tests.compact.fan_out.on_cluster"
    answer, notes = run(two_workers, log_dir, tmp_path / "notes", how, speculation, driver=driver)
    assert [row["status"] for row in answer["rows"]] == ["compacted"], answer
    for item in how.split(","):
        stage = item.partition(":")[0]
        attempts = [name for name in notes if name.startswith(f"{stage}-1.")]
        assert len({name.rpartition(".")[2] for name in attempts}) >= 2, f"no task was disturbed: {notes}"
    after = records_of(log_dir / "orders-0")
    assert len(after) < len(before)
    assert set(after) <= set(before)
    assert newest_by_key(after) == newest_by_key(before)
    left = [path.name for path in log_dir.rglob("*") if path.suffix in (".clean", ".swap", ".cleaned", ".deleted")]
    assert not left
    assert not is_held(str(log_dir))


def run(
    cluster: Cluster, log_dir: Path, notes: Path, how: str, speculation: str, *, driver: str = "tests.run.on_cluster"
) -> tuple[dict[str, Any], list[str]]:
    notes.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", driver, cluster.url, str(log_dir), str(notes), how, speculation],
        env=cluster.environment({"spark.speculation": "true"}), cwd=ROOT,
        capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), sorted(path.name for path in notes.iterdir())


@pytest.mark.one_of("two hosts")
def test_a_host_that_sees_other_files_refuses_and_is_named(two_workers: Cluster, tmp_path: Path) -> None:
    """The other host has no files (a missing mount), an older copy, or a copy with the same names, sizes and times."""
    if not two_workers.namespaces:
        assert os.environ.get("KEYTAIL_NO_SKIP") != "1", "KEYTAIL_NO_SKIP=1, but no namespaces can be created"
        pytest.skip("a mount namespace requires root or user namespaces")
    log_dirs = {}
    for name in ("nothing", "older", "alike"):
        partitions = {f"orders-{n}": random_records(n, 400) for n in range(PARTITIONS)}
        log_dirs[name] = log_dir = write_log_dir(tmp_path / name, partitions)
        for index in log_dir.glob("orders-*/00000000000000000100.index"):
            index.unlink()
        seen = tmp_path / "elsewhere" / name
        seen.mkdir(parents=True)
        if name != "nothing":
            shutil.copytree(log_dir, seen, dirs_exist_ok=True)
        if name == "older":
            for log in seen.glob("orders-*/*.log"):  # change all: Spark decides which segments are read there
                log.write_bytes(log.read_bytes()[:-100])
        two_workers.elsewhere(log_dir, seen)
    before = snapshot(tmp_path / "elsewhere")
    sources = {path: path.read_bytes() for path in tmp_path.glob("*/orders-*/*.log")}
    answer = run_driver(two_workers, "tests.run.on_hosts", str(tmp_path / "notes"), *map(str, log_dirs.values()))
    for name, log_dir in log_dirs.items():
        rows = answer[str(log_dir)]
        if name == "alike":  # verify only reads, and what it reads is equal in this copy
            assert {status for status, _ in rows.pop("verify").values()} == {"suspect"}, "one index must be missing"
        for command, by_partition in rows.items():
            # In a copy with equal logs, an index that a task needs may be missing.
            not_done = ("refused", "failed") if (name, command) == ("alike", "compact") else ("refused",)
            refused = {partition for partition, (status, _) in by_partition.items() if status in not_done}
            done = {partition for partition, (status, _) in by_partition.items() if status in GOOD[command]}
            assert len(refused) + len(done) == PARTITIONS, (name, command, by_partition)
            # Many hosts read the segments of a partition to build indexes: one refusal is enough. In copies with equal
            # logs only a missing index is detected, and the few tasks that need one may all run on the other host.
            assert refused or (name, command) == ("alike", "rebuild-index"), (name, command, by_partition)
            assert done or command == "rebuild-index", (name, command, by_partition)
            for partition in refused:
                error = by_partition[partition][1]
                assert f"host {ELSEWHERE}" in error, (name, command, error)
                assert str(log_dir / partition) in error
                if command == "compact":
                    for path, content in sources.items():
                        assert path.parent != log_dir / partition or path.read_bytes() == content
    assert not [path for path in tmp_path.glob("*/orders-*/*.clean") if path.parts[-3] != "elsewhere"]
    after = snapshot(tmp_path / "elsewhere")
    assert before == {path: after[path] for path in before}
    new = after.keys() - before.keys()
    assert all(path.endswith(".clean") for path in new)
    assert {path.split("/")[0] for path in new} <= {"alike", "older"}, (
        "new files may only be in copies that have the planned segments"
    )


def run_driver(cluster: Cluster, module: str, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", module, cluster.url, *arguments], env=cluster.environment(), cwd=ROOT,
        capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer
