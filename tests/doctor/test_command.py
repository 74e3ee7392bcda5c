"""`keytail doctor`, and a run after `doctor --warm`, which calls no kernel with types that were not compiled.

With KEYTAIL_EMPTY_CACHE=1 the test of that run begins with an empty cache, which takes a minute, and checks that the
run compiles nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from keytail.cli.configuration import Configuration
from keytail.doctor import driver as doctor_driver
from keytail.doctor import executors as spark_doctor
from keytail.doctor import log_dirs as doctor_log_dirs
from keytail.doctor import machine
from keytail.doctor.command import CheckRow
from keytail.errors import KeytailError
from keytail.log.fs import FileSystem, Sizes
from keytail.log.lock import hold
from keytail.run.kernels import kernels_of
from keytail.run.tasks import Outcome
from tests.command_line import Run
from tests.log_dirs import random_records, write_log_dir
from tests.run.spark.test_session import make_java

# Prints how many kernels were called, those whose types are not listed, and how many had to be compiled.
_WORK = """
import json, sys, time
from dataclasses import replace
from keytail.compact.one_partition import COMPACTED, compact
from keytail.verify.task import verify_partition
from keytail.kernels import jit
from keytail.log.fs import LOCAL
from keytail.log.one_partition import survey
from keytail.rebuild_index.partition import RebuildSettings, plan_partition
from keytail.rebuild_index.tasks import Rebuild
from keytail.run.kernels import kernels_of, type_of
path = sys.argv[1]
verify_partition(LOCAL, path)
facts = survey(path)
facts = replace(facts, high_watermark=facts.log_end_offset, recovery_point=facts.log_end_offset)
plan = plan_partition(LOCAL, facts, RebuildSettings(4096, 10485760, rebuild_all=True))
Rebuild([plan]).run()
assert compact(facts, COMPACTED, now_ms=time.time_ns() // 1_000_000) is not None
listed = {(item.kernel, *map(type_of, item.types)) for item in kernels_of(None)}
called = {(f"{k.py_func.__module__.removeprefix('keytail.kernels.')}:{k.__name__}", *signature)
          for k in jit.KERNELS for signature in k.signatures}
misses = sum(sum(k.stats.cache_misses.values()) for k in jit.KERNELS)
print(json.dumps([len(called), sorted(map(str, called - listed)), misses]))
"""


MACHINE = [
    "Python", "Java", "Spark", "Delta's jars", "keytail[history]", "keytail[arrow]",
    "keytail[object-store]", "keytail[avro]",
    "keytail[report]", "checksum and hash", "compiled kernels", "file descriptors", "memory",
]  # fmt: skip


def rows_of(result: Result) -> dict[str, dict[str, str]]:
    rows = {row["check"]: row for row in json.loads(result.stdout)}
    assert {row["status"] for row in rows.values()} <= {"ok", "warn", "fail"}
    assert all(bool(row["remedy"]) == (row["status"] != "ok") for row in rows.values())
    assert (result.exit_code == 0) == all(row["status"] != "fail" for row in rows.values())
    return rows


def test_rows_list_installed_packages(run: Run) -> None:
    rows = rows_of(run("doctor", "--output", "json"))
    assert list(rows) == [*MACHINE, "clock"]
    assert "cores" in rows["memory"]["found"]
    assert rows["Spark"]["status"] == rows["Python"]["status"] == rows["clock"]["status"] == "ok"


def test_missing_requirements_are_listed_with_a_remedy(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("keytail.kernels.jit.CACHE_FOLDER", None)
    monkeypatch.setattr("keytail.kernels.native.NATIVE", False)
    monkeypatch.setattr("resource.getrlimit", lambda _: (1024, 1 << 20))
    result = run("doctor")
    assert result.exit_code == 1
    assert "Java fail: Set JAVA_HOME" in result.stdout
    assert "compiled kernels warn: Set KEYTAIL_CACHE_DIR" in result.stdout
    assert "checksum and hash warn: Install the wheels of crc32c and xxhash" in result.stdout
    assert "file descriptors warn: Run ulimit -n 4096" in result.stdout
    assert "Delta's jars warn: Start an export once" in result.stdout
    monkeypatch.setattr("keytail.kernels.jit.UNTRUSTED", ["/cache/foreign"])
    rows = rows_of(run("doctor", "--output", "json", "--delta-jars", str(tmp_path)))
    assert "other users own /cache/foreign or may write to it" in rows["compiled kernels"]["found"]
    assert rows["Delta's jars"]["status"] == "fail"
    assert "delta-storage" in rows["Delta's jars"]["remedy"]


def test_warm_ends_if_compiled_kernels_cannot_be_stored(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keytail.kernels.jit.IS_WRITABLE", False)
    monkeypatch.setattr("keytail.kernels.jit.WHY_NOT_WRITABLE", "/read-only: Read-only file system")
    result = run("doctor", "--warm")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "/read-only: Read-only file system. Set KEYTAIL_CACHE_DIR" in result.stderr
    assert "[no-kernel-cache]" in result.stderr
    assert "later runs load" not in result.stderr


def test_conflicting_packages_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"pyspark": "4.2.0", "pyspark-client": "4.2.0"}
    monkeypatch.setattr("importlib.metadata.version", versions.__getitem__)
    assert (row := machine.spark()).status == "fail"
    assert "pyspark-client" in row.found
    versions |= {"pyspark": "4.1.0", "pyspark-client": ""}
    assert (row := machine.spark()).status == "warn"
    assert row.remedy == "pip install pyspark==4.2.0"


@pytest.mark.parametrize("architecture", ["x86_64", "aarch64"])
def test_an_untested_architecture_is_reported(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: architecture)
    assert ("not been tested on ARM64" in machine.native().found) == (architecture == "aarch64")


@pytest.mark.parametrize(
    ("here", "status"), [((3, 10, 13), "fail"), ((3, 11, 0), "ok"), ((3, 13, 9), "ok"), ((3, 14, 0), "warn")]
)
def test_unsupported_pythons_are_reported(
    here: tuple[int, int, int], status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.version_info", here)
    assert machine.python().status == status
    assert (machine.python().remedy == "") == (status == "ok")


@pytest.mark.parametrize(
    ("text", "status", "remedy"),
    [
        ("16.0.2", "fail", "JDK 17 or newer"),
        ("17.0.15", "ok", ""),
        ("21.0.4", "ok", ""),
        ("22.0.1", "warn", "17, 21 or 25"),
        ("25", "warn", "25.0.3 or newer"),
        ("25.0.2", "warn", "25.0.3 or newer"),
        ("25.0.3", "ok", ""),
        ("26-ea", "warn", "17, 21 or 25"),
        ("unheard of", "warn", "17, 21 or 25"),
    ],
)
def test_unsupported_javas_are_reported(
    text: str, status: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_java(tmp_path, text)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    row = machine.java()
    assert row.status == status
    assert remedy in row.remedy
    assert (row.remedy == "") == (status == "ok")


def test_log_dirs_are_checked(run: Run, tmp_path: Path) -> None:
    log_dir = write_log_dir(tmp_path / "logs", {"orders-0": random_records(1, 400)})
    before = {path: path.stat().st_mtime_ns for path in log_dir.rglob("*")}
    rows = rows_of(run("doctor", "--output", "json", "--log-dirs", str(log_dir)))
    of = {name.removeprefix(str(log_dir)): row for name, row in rows.items() if name.startswith(str(log_dir))}
    assert list(of) == ["", ": owner", ": access", ": storage", ": lock"]
    assert {row["status"] for row in of.values()} == {"ok"}
    assert "1 partition, stopped cleanly" in of[""]["found"]
    assert {path: path.stat().st_mtime_ns for path in log_dir.rglob("*")} == before, "doctor must not change any file"
    with hold([str(log_dir)]):
        held = rows_of(run("doctor", "--output", "json", "--log-dirs", str(log_dir)))
    assert held[f"{log_dir}: lock"]["status"] == "warn"
    state = [(row["clean_shutdown"], row["held"]) for row in of.values()]
    assert state == [(True, None), *[(None, None)] * 3, (None, False)]
    assert {row["log_dir"] for row in of.values()} == {str(log_dir)}
    assert (held[f"{log_dir}: lock"]["held"], held["clock"]["held"], held["clock"]["log_dir"]) == (True, None, None)
    (log_dir / ".kafka_cleanshutdown").unlink()
    (log_dir / "lost+found").mkdir()
    rows = rows_of(run("doctor", "--output", "json", "--log-dirs", str(log_dir)))
    assert rows[str(log_dir)]["status"] == "fail"
    assert "lost+found" in rows[str(log_dir)]["found"]
    (log_dir / "lost+found").rmdir()
    rows = rows_of(run("doctor", "--output", "json", "--log-dirs", str(log_dir)))
    assert rows[str(log_dir)]["status"] == "warn"
    assert rows[str(log_dir)]["clean_shutdown"] is False
    [log] = list(log_dir.glob("orders-0/00000000000000000000.log"))
    os.utime(log, (time.time() + 7200, time.time() + 7200))
    rows = rows_of(run("doctor", "--output", "json", "--log-dirs", str(log_dir)))
    assert rows["clock"]["status"] == "fail"
    assert "newer than this time" in rows["clock"]["found"]


def test_full_shared_or_read_only_storage_is_reported(tmp_path: Path) -> None:
    log_dir = str(write_log_dir(tmp_path / "logs", {"orders-0": random_records(1, 400)}))

    def storage(**answers: object) -> CheckRow:
        fs = FileSystem()
        for name, answer in answers.items():
            setattr(fs, name, lambda path, answer=answer: answer)
        rows = doctor_log_dirs.log_dirs(fs, [log_dir], 2**60, Configuration())
        [row] = [row for row in rows if row.check.endswith(": storage")]
        return row

    assert storage().status == "ok"
    assert "--shared-storage" in storage(file_system_type="nfs4").remedy
    assert "in passes" in storage(free_bytes=10_000).remedy
    full = storage(free_bytes=0)
    assert (full.status, "refused (not-enough-space)" in full.remedy) == ("fail", True)
    assert "--output-dir" in storage(is_read_only=True).remedy


def test_a_partition_that_a_running_broker_removes_is_not_a_problem(tmp_path: Path) -> None:
    log_dir = str(write_log_dir(tmp_path / "logs", {name: random_records(1, 400) for name in ("gone-0", "orders-0")}))

    class Removing(FileSystem):
        def scan_sizes(self, path: str, suffix: str) -> Sizes:
            if path.endswith("gone-0"):
                raise FileNotFoundError(path)
            return super().scan_sizes(path, suffix)

        def unreadable(self, path: str) -> list[str]:
            if path.endswith("gone-0"):
                raise FileNotFoundError(path)
            return super().unreadable(path)

    rows = doctor_log_dirs.log_dirs(Removing(), [log_dir], 2**60, Configuration())
    about = [row for row in rows if row.check != "metadata log" and not row.check.startswith("Kafka")]
    assert [row.status for row in about] == ["ok"] * 6, rows


def test_a_directory_that_is_not_a_log_dir_is_reported(run: Run, tmp_path: Path) -> None:
    rows = rows_of(run("doctor", "--output", "json", "--log-dirs", str(tmp_path / "nowhere")))
    assert rows["log dirs"]["status"] == "fail"
    assert str(tmp_path / "nowhere") in rows["log dirs"]["found"]


def test_hosts_that_differ_are_reported() -> None:
    here = spark_doctor.look([])
    there = replace(here, host="b", log_dirs={"/x": ("", "No such file or directory")})
    here = replace(here, log_dirs={"/x": ("abc", "7 directories")})
    assert spark_doctor.differences(here, here) == []
    nothing = "the names in /x differ: on that host it has no listing (No such file or directory), on this host 7"
    assert spark_doctor.differences(here, there) == [f"{nothing} directories"]
    versions = ("keytail 9", *here.versions[1:])
    other = replace(here, python="3.9.1", versions=versions, log_dirs={"/x": ("ab", "7 directories")})
    assert [text.split(",")[0] for text in spark_doctor.differences(here, other)] == [
        "that host has Python 3.9.1",
        "that host has keytail 9",
        "the names in /x differ: on that host it has 7 directories",
    ]
    [text] = spark_doctor.differences(here, replace(here, hash_name="blake2b"))
    assert text == f"that host computes hashes by blake2b, this host by {here.hash_name}"


class FailingEngine:
    """An engine whose tasks all fail with `problem`."""

    parallel_tasks = 2

    def __init__(self, problem: KeytailError) -> None:
        self.problem = problem

    def run_bundle(self, payloads: Any, function: Any, **_: Any) -> Any:
        return [Outcome(None, self.problem) for _ in payloads]


def test_a_task_that_fails_has_the_remedy_of_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = KeytailError("too little memory", path="/logs", remedy="Give the executor more memory", slug="x")
    monkeypatch.setattr(doctor_driver, "session_of_run", lambda *_, **__: FailingEngine(problem))
    [row] = doctor_driver._executors("local[2]", [])
    assert (row.check, row.status) == ("executors of local[2]", "fail")
    assert (row.found, row.remedy) == ("too little memory (/logs)", "Give the executor more memory")


@pytest.mark.spark
def test_executors_are_checked(run: Run, on_spark: None, tmp_path: Path) -> None:
    log_dir = write_log_dir(tmp_path / "logs", {"orders-0": random_records(1, 400)})
    done = run("doctor", "--output", "json", "--log-dirs", log_dir, "--master", "local[2]")
    rows = {row["check"]: row for row in json.loads(done.stdout)}
    assert rows[f"executor on {os.uname().nodename}"]["status"] == "ok", done.stderr
    assert "the same log dirs" in rows[f"executor on {os.uname().nodename}"]["found"]


@pytest.mark.long
def test_after_warming_a_run_compiles_nothing(tmp_path: Path) -> None:
    is_empty = os.environ.get("KEYTAIL_EMPTY_CACHE") == "1"
    env = {**os.environ, "KEYTAIL_CACHE_DIR": str(tmp_path / "cache")} if is_empty else dict(os.environ)

    def ended(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *command], env=env, capture_output=True, text=True, timeout=600, check=True
        )

    listed = {item.kernel for item in kernels_of(None)}
    assert f"{len(listed)} kernels are compiled" in ended("-m", "keytail", "doctor", "--warm").stderr
    log_dir = write_log_dir(tmp_path / "logs", {"orders-0": random_records(1, 400)})
    called, not_listed, compiled = json.loads(ended("-c", _WORK, str(log_dir / "orders-0")).stdout)
    assert called > 10
    assert not_listed == []
    assert not (is_empty and compiled)
