from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keytail.errors import KeytailError, UsageProblem
from keytail.run.spark import jvm_log, session
from keytail.run.spark.java import java_version, require_java
from keytail.run.spark.jvm_log import JvmLog
from keytail.run.spark.session import refuse_unreachable

ROOT = Path(__file__).parents[3]


def make_java(home: Path, version: str) -> Path:
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text("#!/bin/sh\nexit 1\n")
    java.chmod(0o755)
    (home / "release").write_text(f'IMPLEMENTOR="X"\nJAVA_VERSION="{version}"\n')
    return java


@pytest.mark.parametrize(
    ("text", "numbers"), [("17.0.15", (17, 0, 15)), ("1.8.0_402", (8, 0)), ("25", (25,)), ("26-ea", (26,))]
)
def test_version_is_read_without_starting_java(tmp_path: Path, text: str, numbers: tuple[int, ...]) -> None:
    assert java_version(str(make_java(tmp_path, text))) == numbers


def test_java_is_run_for_its_version_if_there_is_no_release_file(tmp_path: Path) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\" 2019-01-15' >&2\n")
    java.chmod(0o755)
    assert java_version(str(java)) == (11, 0, 2)


def test_a_java_that_is_too_old_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_java(tmp_path, "11.0.2")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(UsageProblem, match=r"is Java 11, but Spark needs 17 or newer.*JAVA_HOME"):
        require_java()


def test_a_java_home_without_java_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(UsageProblem, match=f"JAVA_HOME is {tmp_path}, but there is no executable file"):
        require_java()


def test_missing_java_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageProblem, match=r"Java was not found.*Install a JDK 17"):
        require_java()


def test_the_output_of_the_jvm_of_spark_submit_is_forwarded(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The JVM is a test double. Its output is no longer forwarded once a stop has begun."""
    monkeypatch.setattr(jvm_log, "HELD_BACK_S", 2.0)
    before = set(threading.enumerate())
    streams: list[Any] = []
    io = SimpleNamespace(FileOutputStream=lambda path: open(path, "wb", 0), PrintStream=lambda stream, flushes: stream)
    java = SimpleNamespace(io=io, lang=SimpleNamespace(System=SimpleNamespace(setErr=streams.append)))
    log = JvmLog()
    log.redirect(SimpleNamespace(sparkContext=SimpleNamespace(_jvm=SimpleNamespace(java=java))))
    [passing] = set(threading.enumerate()) - before
    [jvm] = streams
    jvm.write(b"ERROR of a task\n")
    on_result, last_s = "", time.monotonic() + 300
    while not on_result and time.monotonic() < last_s:
        time.sleep(0.02)
        on_result = capfd.readouterr().err
    assert on_result == "ERROR of a task\n"
    jvm.write(b"java.util.concurrent.RejectedExecutionException\n")
    log.silence()
    jvm.close()
    passing.join(300)
    assert not passing.is_alive()
    assert capfd.readouterr().err == ""


def test_the_output_of_a_jvm_that_has_ended_cannot_be_redirected() -> None:
    before = set(threading.enumerate())
    JvmLog().redirect(SimpleNamespace())
    for thread in set(threading.enumerate()) - before:
        thread.join(300)
        assert not thread.is_alive()


def test_submitted_jobs_log_as_quietly_as_the_command_line() -> None:
    link = ROOT / "conf" / "log4j2.properties"
    assert os.path.realpath(link) == str(ROOT / "lib" / "keytail" / "run" / "log4j2.properties")


def test_jobs_are_short_and_choose_no_master() -> None:
    for job in (ROOT / "jobs").glob("*.py"):
        lines = job.read_text().splitlines()
        assert len(lines) < 60, f"{job} must be an entry point, not a program"
        assert not any(".master(" in line for line in lines)


def test_a_master_that_does_not_listen_is_reported_without_starting_spark() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # the port is bound, but nothing listens on it
        closed = f"127.0.0.1:{bound.getsockname()[1]}"
        refuse_unreachable(f"spark://{closed},127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(KeytailError, match=f"no Spark master accepts .*{closed} .Connection refused.*--master"):
            refuse_unreachable(f"spark://{closed}")
        with pytest.raises(KeytailError, match="is not a port: ports are numbers from 1 to 65535"):
            refuse_unreachable(f"spark://127.0.0.1:{server.getsockname()[1] + (1 << 16)}")
    for url in ("spark://nowhere.invalid:7077", "spark://127.0.0.1", "spark://127.0.0.1:x", "spark://127.0.0.1:0"):
        with pytest.raises(KeytailError, match="no Spark master accepts"):
            refuse_unreachable(url)
    for url in ("local[2]", "yarn", "k8s://https://127.0.0.1:1"):
        refuse_unreachable(url)


@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        ("A secret key must be specified via the spark.authenticate.secret config.", "the secret of the cluster"),
        ("Java heap space", "check JAVA_HOME"),
    ],
)
def test_the_remedy_for_a_missing_secret_names_it(message: str, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError(message)

    monkeypatch.setattr(session, "_launched", fail)
    with pytest.raises(KeytailError, match=remedy):
        session._build("keytail", {}, "spark://nowhere:7077")
