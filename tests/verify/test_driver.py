from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from keytail.run import every_task
from keytail.run.every_task import run_every
from keytail.run.spark.engine import SparkEngine
from keytail.verify.driver import VerifyTask, verify_here, verify_on_worker
from tests.log_dirs import random_records, write_log_dir


@pytest.mark.spark
def test_spark_finds_what_one_process_finds(
    engine: SparkEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_dir = write_log_dir(tmp_path / "logs", {f"t-{n}": random_records(n, 200 + 20 * n) for n in range(5)})
    damaged = log_dir / "t-3" / f"{0:020d}.log"
    damaged.write_bytes(damaged.read_bytes()[:-3])
    tasks = [VerifyTask(str(path), 1000 + n) for n, path in enumerate(sorted(log_dir.glob("t-*")))]
    here: dict[str, Any] = {}
    there: dict[str, Any] = {}
    monkeypatch.setattr(every_task, "BUNDLE_PARTITIONS", 2)
    verify_here(tasks, lambda task, outcome: here.__setitem__(task.path, outcome.value))
    run_every(
        engine, tasks, verify_on_worker, lambda task, outcome: there.__setitem__(task.path, outcome.value),
        name="verify", size_of=lambda task: task.size_bytes,
    )  # fmt: skip
    assert there == here
    assert [len(here[task.path]) > 0 for task in tasks] == [False, False, False, True, False]
