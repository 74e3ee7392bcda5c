"""Imports on a standalone cluster of two workers, whose tasks are killed, lost with their executor, or run twice: the
partitions equal those of an undisturbed run, byte for byte.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from keytail.import_ import driver as import_
from keytail.import_.command import Request
from keytail.import_.driver import import_records
from keytail.import_.source import Source
from keytail.log.lock import is_held
from keytail.run.spark.engine import SparkEngine
from tests.import_.test_driver import TOPIC_ID, log_dir, unknown_topics
from tests.run.cluster import ROOT, Cluster
from tests.run.disturbed import wait_for

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("cluster")]  # all tests share one cluster

SOAK = os.environ.get("KEYTAIL_SOAK") == "1"
PARTITIONS = 3
RECORDS = 14_000
SEGMENT_BYTES = 1_500_000
IMPORT_ID = "the-one"
SORTED = ("--sort-by", "timestamp")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """Write 14 MB, which are several slices, with fixed timestamps, so that two runs write the same bytes."""
    path = tmp_path_factory.mktemp("source") / "s.parquet"
    keys = [b"key-%d" % (n * 7919 % 997) for n in range(RECORDS)]
    values = [b"%d:" % n + b"v" * 1000 for n in range(RECORDS)]
    pq.write_table(pa.table({"key": keys, "value": values, "timestamp": range(RECORDS)}), path, row_group_size=1000,
                   use_dictionary=False)  # fmt: skip
    return Source(str(path), "parquet")


@pytest.fixture(scope="module")
def undisturbed(source: Source, spark: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    logs = log_dir(tmp_path_factory.mktemp("undisturbed") / "logs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_, "session_of_run", lambda *_, **__: SparkEngine(spark))
        rows = import_records(
            Request(source, "orders", (str(logs),), configuration=unknown_topics(), segment_bytes=SEGMENT_BYTES,
                    single_replica=True, topic_id=TOPIC_ID, partition_count=PARTITIONS, import_id=IMPORT_ID,
                    execute=True, master="local[2]")
        )  # fmt: skip
    assert [(row.status, row.segments >= 3) for row in rows] == [("imported", True)] * PARTITIONS  # type: ignore
    assert sum(row.records for row in rows) == RECORDS
    return files(logs)


def files(logs: Path) -> dict[str, bytes]:
    return {str(path.relative_to(logs)): path.read_bytes() for path in logs.rglob("*") if path.is_file()}


# In each case, at most one task that reads and one that writes wait for a copy, because only two tasks run at a time.
IN_SOAK = [
    ("read-1:worker,write-1:executor", ()),
    ("read-0:slow,write-2:slow", ()),
    ("read-0:late,write-2:worker", ()),
    ("write-0:executor", SORTED),
    ("write-1:slow", SORTED),
]


@pytest.mark.parametrize(("how", "flags"), [("read-1:executor,write-1:late", ()), *(IN_SOAK if SOAK else [])])
@pytest.mark.soak("tests/run/test_cluster.py, import_/test_driver.py")
def test_a_disturbed_import_equals_an_undisturbed_one(
    how: str, flags: tuple[str, ...], source: Source, undisturbed: dict[str, bytes], two_workers: Cluster,
    tmp_path: Path,
) -> None:  # fmt: skip
    """The import id is given, because it would depend on `--sort-by`. Sorting by the timestamps of the source does not
    change its order.
    """
    logs = log_dir(tmp_path / "logs")
    rows, notes = run(two_workers, source, logs, tmp_path / "notes", how, *flags)
    for item in how.split(","):
        step, _, kind = item.partition(":")
        workers = [name.rpartition(".")[2] for name in notes if name.startswith(f"{step}.s")]
        assert len(workers) >= 2, f"no task was disturbed: {notes}"
        if kind != "worker":  # a killed worker is restarted by the same executor
            assert len(set(workers)) >= 2, f"two attempts ran in one executor: {notes}"
    assert [row["status"] for row in rows] == ["imported"] * PARTITIONS, rows
    assert not is_held(str(logs))
    wait_for(lambda: not two_workers.executors())
    assert files(logs).keys() == undisturbed.keys(), "no file may be left when the last worker has ended"
    assert files(logs) == undisturbed


def run(
    cluster: Cluster, source: Source, logs: Path, notes: Path, how: str, *flags: str
) -> tuple[list[dict[str, Any]], list[str]]:
    notes.mkdir()
    settings = {
        "spark.speculation": "true",
        "spark.python.task.killTimeout": "60s",  # an attempt that was superseded continues until the run ends
        "spark.python.daemon.module": "tests.run.disturbed",
        "spark.executorEnv.KEYTAIL_NOTES": str(notes),
        "spark.executorEnv.KEYTAIL_DISTURBED": how,
    }
    speculating = any(kind in how for kind in ("slow", "late"))
    done = subprocess.run(
        [
            sys.executable, "-m", "tests.import_.speculating" if speculating else "keytail", "import",
            source.path, "--topic", "orders", "--log-dirs", str(logs), "--segment-bytes", str(SEGMENT_BYTES),
            "--import-id", IMPORT_ID, "--single-replica", "--topic-id", TOPIC_ID, "--partition-count", str(PARTITIONS),
            "--topics-have-no-overrides", "--topic-config", "orders:cleanup.policy=delete", "--execute", "--output",
            "json", "--master", cluster.url, *flags,
        ],
        env=cluster.environment(settings), cwd=ROOT, capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), sorted(path.name for path in notes.iterdir())
