"""Index rebuilds on a real Spark session: tasks for segments and slices write the same files as one process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from keytail.errors import KeytailError
from keytail.log.fs import LOCAL
from keytail.log.log_dirs import hosted, survey_log_dirs
from keytail.log.partition import survey_partition
from keytail.rebuild_index import tasks as rebuild
from keytail.rebuild_index.partition import PartitionPlan, RebuildSettings, plan_partition
from keytail.rebuild_index.tasks import Rebuild
from keytail.run.engine import ThisProcess
from keytail.run.spark.engine import SparkEngine
from keytail.run.tasks import Outcome, run_attempt
from tests.log_dirs import random_records, snapshot, write_log_dir
from tests.run.engines import LikeSpark
from tests.run.test_submit import submit

pytestmark = pytest.mark.spark
ROOT = Path(__file__).parents[2]


def plans_of(log_dir: Path, **more: Any) -> list[PartitionPlan]:
    [facts] = survey_log_dirs(LOCAL, [str(log_dir)])
    return [
        plan_partition(
            LOCAL,
            survey_partition(LOCAL, facts, entry),
            RebuildSettings(
                index_interval_bytes=200,
                segment_index_bytes=1 << 20,
                run_id="r",
                **more,
            ),
        )
        for entry in facts.partitions
    ]


class RecordingEngine(SparkEngine):
    def __init__(self, session: Any) -> None:
        super().__init__(session)
        self.jobs: list[str] = []

    def run_bundle(self, *arguments: Any, name: str = "", **more: Any) -> Any:
        self.jobs.append(name)
        return super().run_bundle(*arguments, name=name, **more)


def test_spark_writes_what_one_process_writes(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bundle has at most two partitions, slices begin at index entries of another interval, and t-3 is corrupt."""
    names = {f"t-{n}": random_records(n, 300 + 40 * n) for n in range(4)}
    dirs = [write_log_dir(tmp_path / which, names, segments=2) for which in ("here", "spark")]
    monkeypatch.setattr(rebuild, "BUNDLE_PARTITIONS", 2)
    kept = []
    on_spark = RecordingEngine(spark)
    for log_dir, engine in zip(dirs, (ThisProcess(), on_spark), strict=True):
        damaged = log_dir / "t-3" / f"{0:020d}.log"
        damaged.write_bytes(damaged.read_bytes()[:-1])
        (log_dir / "t-2" / f"{0:020d}.index").unlink()
        run = Rebuild(plans_of(log_dir, rebuild_all=True, execute=True), engine, slice_bytes=2000)
        outcomes = run.run()
        assert [str(outcome.problem) for outcome in outcomes[:3]] == ["None"] * 3
        assert "does not fit" in str(outcomes[3].problem)
        kept.append({name: data for name, (data, _) in snapshot(log_dir).items()})
    assert "rebuild-index: slices together" in on_spark.jobs
    assert kept[0] == kept[1]
    assert [len(outcome.result.wrong) for outcome in Rebuild(plans_of(dirs[1], rebuild_all=True)).run()[:3]] == [0] * 3


def test_a_torn_tail_is_truncated_and_the_rest_rebuilt_on_spark(engine: SparkEngine, tmp_path: Path) -> None:
    log_dir = write_log_dir(tmp_path / "logs", {"t-0": random_records(1, 400)})
    (log_dir / ".kafka_cleanshutdown").unlink()
    (log_dir / "recovery-point-offset-checkpoint").write_text("0\n1\nt 0 150\n")
    torn = log_dir / "t-0" / f"{200:020d}.log"
    torn.write_bytes(torn.read_bytes()[:-1])
    [facts] = survey_log_dirs(LOCAL, [str(log_dir)])
    [plan] = plans_of(log_dir, execute=True, truncate=True)
    [outcome] = Rebuild([plan], engine, {str(log_dir): hosted([facts])}).run()
    assert outcome.problem is None
    assert outcome.done_truncation is not None and outcome.done_truncation.removed_segments == (300,)
    assert outcome.result is not None and outcome.result.log_end_offset == 290
    assert sorted(path.name for path in (log_dir / "t-0").glob("*.log"))[-1] == torn.name
    assert torn.with_suffix(".index").exists()


@pytest.mark.soak("tests/run/test_submit.py: the compact job; tests/test_jobs.py: its interpreter")
def test_the_job_under_spark_submit_finds_its_interpreter_beside_spark(tmp_path: Path) -> None:
    other_python = shutil.which("python3", path="/usr/bin:/bin") is not None
    log_dir = write_log_dir(tmp_path / "logs", {f"t-{n}": random_records(n, 200) for n in range(2)})
    for index in log_dir.glob("t-*/*.index"):
        index.unlink()
    flags = ("--log-dirs", str(log_dir), "--execute", "--output", "json")
    done = submit("--master", "local[1]", str(ROOT / "jobs/rebuild_indexes.py"), *flags, activated=not other_python)
    assert done.returncode == 0, done.stderr
    assert [row["status"] for row in json.loads(done.stdout)] == ["rebuilt", "rebuilt"]
    assert len(list(log_dir.glob("t-*/*.index"))) == 8


def test_work_in_the_bundle_of_a_killed_worker_is_repeated_separately(tmp_path: Path) -> None:
    log_dir = write_log_dir(tmp_path / "logs", {f"t-{n}": random_records(n, 400) for n in range(8)})
    lost = KeytailError("the worker process of this partition was killed twice")

    def dying(
        payloads: Sequence[Any], function: Any, *, name: str, stopped: Any
    ) -> list[Outcome[Any]]:
        """Kill the worker of t-3 in each attempt, so that the other work of its bundle is lost."""
        return [
            Outcome(None, lost)
            if any(work.task.partition_path.endswith("t-3") for work in payload)
            else run_attempt(function, payload, name.replace(" ", "-").replace(",", ""))
            for payload in payloads
        ]

    before = snapshot(log_dir / "t-3")
    outcomes = Rebuild(plans_of(log_dir, rebuild_all=True, execute=True), LikeSpark(1, dying)).run()
    assert [outcome.problem for outcome in outcomes] == [None, None, None, lost, None, None, None, None]
    assert all(outcome.installed and outcome.result.wrong for outcome in outcomes if outcome.problem is None)
    assert snapshot(log_dir / "t-3") == before
    assert not list(log_dir.rglob("*.clean"))
