"""Index rebuilds on a real Spark session: segments and slices as tasks, the same files as one process makes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keytail.errors import KeytailError
from keytail.log.fs import LOCAL
from keytail.log.log_dirs import hosted, survey_log_dirs
from keytail.log.partition import survey_partition
from keytail.rebuild_index import driver as rebuild
from keytail.rebuild_index.driver import Rebuild
from keytail.rebuild_index.partition import PartitionPlan, plan_partition
from keytail.run.tasks import Outcome, attempt_one, run_bundle
from tests.log_dirs import random_records, snapshot, write_log_dir
from tests.run.test_submit import submit

pytestmark = pytest.mark.spark
ROOT = Path(__file__).parents[2]


def plans_of(log_dir: Path, **more: Any) -> list[PartitionPlan]:
    [facts] = survey_log_dirs(LOCAL, [str(log_dir)])
    return [
        plan_partition(
            LOCAL,
            survey_partition(LOCAL, facts, entry),
            index_interval_bytes=200,
            segment_index_bytes=1 << 20,
            run_id="r",
            **more,
        )
        for entry in facts.partitions
    ]


def _run_and_note(jobs: list[str], *arguments: Any, name: str, **more: Any) -> Any:
    jobs.append(name)
    return run_bundle(*arguments, name=name, **more)


def test_spark_makes_what_one_process_makes(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bundles of few partitions, slices by indexes of another interval; beside them one that is corrupt."""
    names = {f"t-{n}": random_records(n, 300 + 40 * n) for n in range(4)}
    dirs = [write_log_dir(tmp_path / which, names, segments=2) for which in ("here", "spark")]
    monkeypatch.setattr(rebuild, "BUNDLE_PARTITIONS", 2)
    kept = []
    for log_dir, session in zip(dirs, (None, spark), strict=True):
        damaged = log_dir / "t-3" / f"{0:020d}.log"
        damaged.write_bytes(damaged.read_bytes()[:-1])
        (log_dir / "t-2" / f"{0:020d}.index").unlink()
        run = Rebuild(plans_of(log_dir, rebuild_all=True, execute=True), session, slice_bytes=2000)
        jobs: list[str] = []
        if session is not None:
            monkeypatch.setattr(rebuild, "run_bundle", partial(_run_and_note, jobs))
        outcomes = run.run()
        assert [str(outcome.problem) for outcome in outcomes[:3]] == ["None"] * 3
        assert "does not fit" in str(outcomes[3].problem)
        if session is not None:
            assert "rebuild-index: slices together" in jobs
        kept.append({name: data for name, (data, _) in snapshot(log_dir).items()})
    assert kept[0] == kept[1]
    assert [len(outcome.result.wrong) for outcome in Rebuild(plans_of(dirs[1], rebuild_all=True)).run()[:3]] == [0] * 3


def test_a_torn_tail_is_cut_and_the_rest_made_on_spark(spark: Any, tmp_path: Path) -> None:
    log_dir = write_log_dir(tmp_path / "logs", {"t-0": random_records(1, 400)})
    (log_dir / ".kafka_cleanshutdown").unlink()
    (log_dir / "recovery-point-offset-checkpoint").write_text("0\n1\nt 0 150\n")
    torn = log_dir / "t-0" / f"{200:020d}.log"
    torn.write_bytes(torn.read_bytes()[:-1])
    [facts] = survey_log_dirs(LOCAL, [str(log_dir)])
    [plan] = plans_of(log_dir, execute=True, truncate=True)
    [outcome] = Rebuild([plan], spark, {str(log_dir): hosted([facts])}).run()
    assert outcome.problem is None
    assert outcome.done_cut is not None and outcome.done_cut.removed_segments == (300,)
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


def test_work_beside_a_worker_that_died_is_done_again_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log_dir = write_log_dir(tmp_path / "logs", {f"t-{n}": random_records(n, 400) for n in range(8)})
    lost = KeytailError("the worker process of this partition was killed twice")

    def dying(
        spark: Any, payloads: Sequence[Any], function: Any, *, name: str, stopped: Any
    ) -> list[Outcome[Any]]:
        """Of t-3 the worker dies each time, and with it what it had beside."""
        return [
            Outcome(None, lost)
            if any(work.task.partition_path.endswith("t-3") for work in payload)
            else attempt_one(function, payload, name.replace(" ", "-").replace(",", ""))
            for payload in payloads
        ]

    monkeypatch.setattr(rebuild, "run_bundle", dying)
    monkeypatch.setattr(rebuild, "parallel_tasks", lambda spark: 1)
    session = SimpleNamespace(sparkContext=SimpleNamespace(defaultParallelism=1))
    before = snapshot(log_dir / "t-3")
    outcomes = Rebuild(plans_of(log_dir, rebuild_all=True, execute=True), session).run()
    assert [outcome.problem for outcome in outcomes] == [None, None, None, lost, None, None, None, None]
    assert all(outcome.installed and outcome.result.wrong for outcome in outcomes if outcome.problem is None)
    assert snapshot(log_dir / "t-3") == before
    assert not list(log_dir.rglob("*.clean"))
