"""On a standalone cluster of two workers: duplicates of slow tasks, tasks that are run again, an executor that is
lost. Each leaves one clean result, as a run in which nothing happens leaves it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keytail.log.lock import is_held
from tests.app.log_dirs import newest_by_key, random_records, records_of, write_log_dir
from tests.spark.cluster import ROOT, Cluster, cluster

pytestmark = pytest.mark.spark

PARTITIONS = 4


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.mark.parametrize(("how", "speculation"), [("1:slow", "forced"), ("1:executor,2:worker", "asked for")])
def test_one_clean_result(how: str, speculation: str, two_workers: Cluster, tmp_path: Path) -> None:
    log_dir = write_log_dir(tmp_path / "logs", {f"orders-{n}": random_records(n, 400) for n in range(PARTITIONS)})
    before = {n: records_of(log_dir / f"orders-{n}") for n in range(PARTITIONS)}
    answer, notes = run(two_workers, log_dir, tmp_path / "notes", how, speculation)
    assert answer["speculation"] == ("true" if speculation == "forced" else "false"), "ours counts, not the cluster's"
    assert [row["status"] for row in answer["rows"]] == ["compacted"] * PARTITIONS, answer
    for one in how.split(","):
        number, _, kind = one.partition(":")
        attempts = [name for name in notes if name.startswith(f"{number}.s")]
        assert len(attempts) >= 2, "nothing went wrong"
        if kind != "worker":  # which its executor starts anew
            assert len({name.rpartition(".")[2] for name in attempts}) == len(attempts), "in one executor"
    for n, records in before.items():
        after, newest = records_of(log_dir / f"orders-{n}"), newest_by_key(records)
        assert len(after) < len(records)
        assert set(after) <= set(records)
        assert newest_by_key(after) == newest
    left = [path.name for path in log_dir.rglob("*") if path.suffix in (".clean", ".swap", ".cleaned", ".deleted")]
    assert not left
    assert not is_held(str(log_dir))
    assert (log_dir / "cleaner-offset-checkpoint").read_text().splitlines()[1] == str(PARTITIONS)


def run(made: Cluster, log_dir: Path, notes: Path, how: str, speculation: str) -> tuple[dict[str, Any], list[str]]:
    notes.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "tests.spark.on_cluster", made.url, str(log_dir), str(notes), how, speculation],
        env=made.environment({"spark.speculation": "true"}), cwd=ROOT,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), sorted(path.name for path in notes.iterdir())
