"""A job that spark-submit starts with a Python without keytail looks once for a Python with keytail in the environment
of Spark.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import beside_spark

from tests.command_line import Run

JOBS = sorted(set((Path(__file__).parents[1] / "jobs").glob("*.py")) - {Path(beside_spark.__file__)})


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create the Python of an environment in which pip installed Spark."""
    spark = tmp_path / "lib/python3/site-packages/pyspark"
    python = tmp_path / "bin/python"
    for folder in (spark, python.parent):
        folder.mkdir(parents=True)
    python.touch(0o755)
    monkeypatch.setenv("SPARK_HOME", str(spark))
    monkeypatch.delenv("PYSPARK_DRIVER_PYTHON", raising=False)
    monkeypatch.setattr(sys, "argv", ["jobs/compact.py", "--execute"])
    return python


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.stem)
def test_each_job_reports_that_keytail_is_missing(job: Path) -> None:
    """The job runs in a Python that has neither keytail nor the folder of the job on its path, as with PYTHONSAFEPATH.
    """
    environment = {name: value for name, value in os.environ.items() if name != "SPARK_HOME"}
    command = [sys.executable, "-I", "-S", str(job)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert "has no module keytail; set PYSPARK_PYTHON" in done.stderr


def test_a_job_is_restarted_with_the_python_of_spark(beside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    monkeypatch.setenv("PYSPARK_PYTHON", "python3")  # both variables are restored after the test
    monkeypatch.setenv("PYSPARK_DRIVER_PYTHON", "python3")
    monkeypatch.setattr(os, "execv", lambda *words: started.append(words))
    beside_spark.restart("keytail")
    assert started == [(beside, [str(beside), "jobs/compact.py", "--execute"])]
    assert os.environ["PYSPARK_PYTHON"] == str(beside)


def test_a_job_is_restarted_only_once(beside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this limit, the job would restart itself forever."""
    monkeypatch.setenv("PYSPARK_DRIVER_PYTHON", str(beside))
    monkeypatch.setattr(os, "execv", lambda *words: pytest.fail("the job was restarted"))
    with pytest.raises(SystemExit, match="has no module keytail; set PYSPARK_PYTHON"):
        beside_spark.restart("keytail")


def test_a_job_is_not_restarted_if_pip_did_not_install_spark(beside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_HOME", "/opt/spark")
    monkeypatch.setattr(os, "execv", lambda *words: pytest.fail("the job was restarted"))
    with pytest.raises(SystemExit, match="has no module keytail"):
        beside_spark.restart("keytail")


@pytest.mark.long
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.stem)
def test_a_job_needs_no_other_file_if_keytail_is_installed(job: Path, tmp_path: Path) -> None:
    """In cluster mode spark-submit sends only the file of the job."""
    alone = tmp_path / job.name
    alone.write_bytes(job.read_bytes())
    done = subprocess.run([sys.executable, str(alone), "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"Usage:spark-submit{alone}[OPTIONS]" in "".join(done.stdout.split())


def test_the_jobs_are_found_beside_the_package_or_in_the_source_tree(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tests/test_release.py installs the wheel and runs a job of it."""
    assert run("jobs-dir").stdout == f"{JOBS[0].parent}\n"
    installed = tmp_path / "site-packages/keytail"
    (installed / "jobs").mkdir(parents=True)
    monkeypatch.setattr("keytail.__file__", str(installed / "__init__.py"))
    missing = run("jobs-dir")
    assert (missing.exit_code, missing.stdout) == (1, "")
    assert "[jobs-not-installed]" in missing.stderr
    (installed / "jobs/compact.py").touch()
    assert run("jobs-dir").stdout == f"{installed / 'jobs'}\n"
