"""Runs on a cluster without room for their executors: runs that are refused, and messages of runs that wait."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from keytail.errors import KeytailError
from keytail.run.spark import executor_wait
from keytail.run.spark.executor_wait import Executor, MasterState, Worker, refuse_too_large, report_waits, why_none
from tests.run.cluster import ROOT, Cluster

MASTER = "spark://m:7077"
ONE_CORE = Worker("a", 1, 2048)
LARGE = Worker("b", 8, 8192)


@pytest.mark.parametrize(
    ("executor", "workers", "text"),
    [
        (Executor(1024, 4), [ONE_CORE], "needs 4 cores (spark.executor.cores) and 1024 MiB"),
        (Executor(4096, 1), [ONE_CORE], "the workers have: a 1 core, 2048 MiB"),
        (Executor(9000), [ONE_CORE, LARGE], "b 8 cores, 8192 MiB"),
        (Executor(1024, 4, cores_max=2), [LARGE], "spark.executor.cores is 4, but spark.cores.max is 2"),
    ],
)
def test_an_executor_that_no_worker_can_run_is_refused(executor: Executor, workers: list[Worker], text: str) -> None:
    with pytest.raises(KeytailError) as refused:
        refuse_too_large(executor, workers, MASTER)
    assert text in refused.value.what
    assert "spark.executor.cores" in (refused.value.remedy or "")
    assert refused.value.slug == "no-executor-possible"


def test_an_executor_that_a_worker_could_run_is_not_refused() -> None:
    refuse_too_large(Executor(2048, 1), [ONE_CORE], MASTER)
    refuse_too_large(Executor(8192, 8), [ONE_CORE, LARGE], MASTER)
    refuse_too_large(Executor(8192), [ONE_CORE, LARGE], MASTER)
    refuse_too_large(Executor(1 << 20, 999), [], MASTER)  # workers may still register


def test_the_reason_for_a_wait_is_reported() -> None:
    executor = Executor(1024, 1)
    assert "no worker" in why_none(executor, MasterState(()))
    of_others = why_none(executor, MasterState((LARGE,), ("other (app-1)",)))
    assert of_others.endswith("other applications use the workers: other (app-1)")
    assert "needs 1 core (spark.executor.cores) and 1024 MiB" in of_others
    assert "executors end when they start" in why_none(executor, MasterState((LARGE, ONE_CORE)))
    assert "cluster manager" in why_none(executor, None)
    many = tuple(f"app-{number}" for number in range(9))
    assert "and 4 more" in why_none(executor, MasterState((LARGE,), many))


def test_each_wait_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_wait, "LONGEST_WAIT_S", 0.03)
    monkeypatch.setattr(executor_wait, "_PACE_S", 0.01)
    # One state per check: a short wait, a long one, an error of Spark, and another long wait.
    states = [True, True, False, *[True] * 6, False, None, *[True] * 5]
    over, reports, checks = threading.Event(), [], iter(states)

    def is_waiting() -> bool:
        state = next(checks, "end")
        if state == "end":
            over.set()
            return False
        if state is None:
            raise OSError("Spark is ending")
        return bool(state)

    report_waits(is_waiting, lambda: reports.append(1), over)
    assert len(reports) == 2


_HOLD = """
import sys
from pyspark.sql import SparkSession
spark = SparkSession.builder.master(sys.argv[1]).config("spark.executor.cores", "1").getOrCreate()
spark.range(4).collect()
print("held", flush=True)
sys.stdin.read()
spark.stop()
"""
# On a busy machine, a master may need longer for its answer than a run waits for it.
_WITH_PATIENCE = """
from keytail.main.main import main
from keytail.run.spark import executor_wait
executor_wait._ANSWER_S = 300
main()
"""
_IMPATIENT = _WITH_PATIENCE.replace("main()", "executor_wait.LONGEST_WAIT_S = 2.0\nmain()")


@pytest.mark.spark
@pytest.mark.xdist_group("cluster")
def test_a_cluster_with_smaller_workers_is_refused(two_workers: Cluster) -> None:
    """Both workers of the cluster have one core."""
    done = subprocess.run(
        [sys.executable, "-c", _WITH_PATIENCE, "doctor", "--master", two_workers.url],
        env=two_workers.environment({"spark.executor.cores": "4"}), cwd=ROOT,
        capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    words = " ".join(done.stdout.split())
    assert f"executors of {two_workers.url} fail no worker of {two_workers.url} is large enough" in words
    assert "Set spark.executor.cores to at most 1 and spark.executor.memory to at most 1024m" in words


@pytest.mark.spark
@pytest.mark.xdist_group("cluster")
def test_a_wait_for_other_applications_is_reported(two_workers: Cluster, tmp_path: Path) -> None:
    environment = two_workers.environment()
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD, two_workers.url], env=environment, cwd=tmp_path, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    ) as holder, subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.readline(); exec(sys.argv.pop(1))", _IMPATIENT, "doctor",
         "--master", two_workers.url], env=environment, cwd=tmp_path, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as waiting:  # fmt: skip
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert waiting.stdin is not None
        assert waiting.stderr is not None
        try:
            assert any(line == "held\n" for line in holder.stdout)
            waiting.stdin.write("go\n")
            waiting.stdin.flush()
            report = next((line for line in waiting.stderr if "no executor has started" in line), "")
            assert "other applications use the workers" in report
            assert "pyspark-shell (app-" in report
            holder.stdin.close()
            output, _ = waiting.communicate(timeout=800)
            assert waiting.returncode == 0, output
        finally:
            for process in (holder, waiting):
                process.kill()
