"""If Spark ends during a run, one error is reported, whichever call fails. The JVM is a test double."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from pathlib import Path
from socketserver import StreamRequestHandler
from types import SimpleNamespace
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError, Py4JNetworkError
from pyspark.accumulators import AccumulatorTCPServer

from keytail.cli.stopping import Stopped, stoppable
from keytail.compact.task import CleaningTask
from keytail.compact.write_phase.passes import least_scratch_bytes
from keytail.errors import KeytailError
from keytail.log.fs import LOCAL
from keytail.run import ended
from keytail.run.ended import SparkEnded, await_signal, first_line, silence_py4j, text_of
from keytail.run.spark import jvm_log, session
from keytail.run.spark.engine import SparkEngine
from keytail.run.spark.jvm_log import JvmLog
from keytail.run.storage import ScratchSpace
from keytail.run.tasks import run_attempt
from tests.compact.test_driver import compaction
from tests.compact.test_passes_on_spark import clean_here, in_passes, no_margin  # noqa: F401
from tests.run.engines import LikeSpark


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ended, "HELD_BACK_S", 0.0)
    monkeypatch.delenv("PYSPARK_GATEWAY_PORT", raising=False)


class EndedJvm:
    """Raises the exception that py4j raises for any call to a JVM that has ended."""

    def __getattr__(self, name: str) -> Any:
        raise Py4JNetworkError("Error while sending or receiving")


class Java:
    """An exception of a JVM that has ended, so that its text is no longer available."""

    _target_id = "o1"
    _gateway_client = EndedJvm()


def java_error() -> Py4JJavaError:
    return Py4JJavaError("An error occurred while calling o7.collectToPython.\n", Java())


def session_that(is_stopped: bool | None) -> Any:
    """Return a session whose jobs all fail, and whose JVM reports whether it is stopped, or has ended (None)."""
    scala = SimpleNamespace(isStopped=lambda: is_stopped)
    context = SimpleNamespace(
        master="local[1]",
        _jsc=EndedJvm() if is_stopped is None else SimpleNamespace(sc=lambda: scala),
        setJobGroup=lambda *_, **__: None,
        broadcast=lambda values: SimpleNamespace(value=values, destroy=lambda: None),
    )

    def fails(*_: Any) -> Any:
        raise java_error()

    return SimpleNamespace(sparkContext=context, range=fails, stop=fails)


def nothing(payload: int, attempt: str) -> int:
    return payload


@pytest.mark.parametrize("is_stopped", [True, None])
def test_a_job_that_is_lost_with_its_session_is_not_run_again(is_stopped: bool | None) -> None:
    again: list[int] = []
    with pytest.raises(SparkEnded) as raised:
        SparkEngine(session_that(is_stopped)).run_bundle([1, 2], nothing, before_again=again.append)
    assert isinstance(raised.value.__cause__, Py4JJavaError)
    assert again == []


def test_a_job_that_is_lost_without_its_session_fails_only_its_partitions() -> None:
    again: list[int] = []
    outcomes = SparkEngine(session_that(False)).run_bundle([1, 2], nothing, before_again=again.append)
    assert again == [1, 2]
    message = "the Spark job of this partition failed twice: Py4JJavaError"
    assert [outcome.problem and outcome.problem.what for outcome in outcomes] == [message, message]


def test_no_lost_payload_is_run_again_after_a_stop() -> None:
    again: list[int] = []
    more: Any = {"before_again": again.append, "stopped": lambda: bool(again)}
    outcomes = SparkEngine(session_that(False)).run_bundle([1, 2, 3], nothing, **more)
    assert again == [1], "the run is stopped during the second attempt of the first payload"
    assert [outcome.problem and outcome.problem.slug for outcome in outcomes] == ["run-interrupted"] * 3
    assert SparkEngine(session_that(False)).run_bundle([1], nothing, **more)[0].problem is not None
    assert again == [1]


def test_an_error_of_an_ended_jvm_has_the_name_of_its_class() -> None:
    with pytest.raises(Py4JNetworkError):
        str(java_error())
    assert text_of(java_error()) == "Py4JJavaError"
    assert first_line(java_error()) == "Py4JJavaError"


@pytest.mark.parametrize(
    ("is_stopped", "problem", "found"),
    [
        (None, java_error(), SparkEnded),
        (True, Py4JNetworkError("Answer from Java side is empty"), SparkEnded),
        (False, java_error(), Py4JJavaError),
        (None, KeytailError("no room"), KeytailError),
        (None, ZeroDivisionError("an oversight"), ZeroDivisionError),
        (None, Stopped(signal.SIGTERM), Stopped),
    ],
)
def test_failures_outside_of_jobs_are_reported_when_the_session_ends(
    is_stopped: bool | None, problem: BaseException, found: type, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setattr(session, "submitted_session", lambda: session_that(is_stopped))
    with pytest.raises(BaseException) as raised, contextlib.ExitStack() as run:
        session.session_of_run(run, None, submitted=True)
        raise problem
    assert type(raised.value) is found
    assert capfd.readouterr().err == ""


def test_an_error_caused_by_a_spark_error_is_treated_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "submitted_session", lambda: session_that(None))
    with pytest.raises(SparkEnded), contextlib.ExitStack() as run:
        session.session_of_run(run, None, submitted=True)
        raise KeytailError("Spark lost the job that reads the source") from java_error()


def test_a_failure_caused_by_a_signal_is_reported_as_the_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal interrupts a call of py4j, and leaving that call sends another request to the JVM."""
    monkeypatch.setattr(session, "submitted_session", lambda: session_that(False))
    with pytest.raises(Stopped) as stopped, contextlib.ExitStack() as run:
        session.session_of_run(run, None, submitted=True)
        try:
            try:
                raise Stopped(signal.SIGINT)
            finally:
                raise Py4JNetworkError("Answer from Java side is empty")
        except Exception as lost:
            raise KeytailError("Spark lost the job that reads the source") from lost
    assert stopped.value.exit_status == 130


def test_under_spark_submit_the_driver_waits_for_the_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    monkeypatch.setattr(session, "submitted_session", lambda: session_that(None))
    terminating = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Stopped), stoppable(), contextlib.ExitStack() as run:
        session.session_of_run(run, None, submitted=True)
        terminating.start()
        raise java_error()
    monkeypatch.setattr(ended, "_LONGEST_END_S", 0.1)
    await_signal()  # this returns although there is no signal


def ends_in_pass(number: int, log_dir: Path, task: CleaningTask) -> Any:
    """Return the driver of a run whose Spark ends after `number` passes, when the next one has written its files."""
    rounds_run: list[CleaningTask] = []

    def bundle(tasks: list[CleaningTask], function: Any, **_: Any) -> Any:
        rounds_run.extend(tasks)
        outcomes = [run_attempt(clean_here, item, f"a{len(rounds_run)}") for item in tasks]
        if len(rounds_run) > number:
            raise SparkEnded
        return outcomes

    space = ScratchSpace(LOCAL, least_scratch_bytes(task))
    return compaction(LikeSpark(1, bundle), log_dir, [task], clean=clean_here, space=space)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_run_whose_spark_ends_reports_its_progress_and_leaves_no_scratch_files(number: int, tmp_path: Path) -> None:
    log_dir, [task] = in_passes(tmp_path / "logs")
    driver = ends_in_pass(number, log_dir, task)
    with pytest.raises(SparkEnded):
        driver.run()
    [row] = driver.rows.of_stopped_run(driver.tasks)
    assert row.status == ("skipped" if number else "not-begun")
    assert (f"{number} of at least" in row.error) == (number > 0), row.error
    assert "safe to start the broker" in row.error or number == 0
    driver.remove_scratch()
    assert not list(log_dir.rglob("*.clean"))
    assert not list(log_dir.rglob("*.swap"))


def test_files_of_a_dead_attempt_are_removed_but_not_the_saved_state(tmp_path: Path) -> None:
    """The files are removed before the task is run again, which could otherwise use more space than was reserved."""
    log_dir, [task] = in_passes(tmp_path / "logs")
    seen: list[tuple[set[str], set[str]]] = []

    def bundle(tasks: list[CleaningTask], function: Any, *, before_again: Any, **_: Any) -> Any:
        [item] = tasks
        saved = {item.saved_state.survivors.name, item.saved_state.proof.name} if item.saved_state else set()
        lost = run_attempt(clean_here, item, "dead")
        assert lost.value is not None
        before_again(item)
        seen.append(({path.name for path in log_dir.rglob("*.clean")}, saved))
        return [run_attempt(clean_here, item, f"a{len(seen)}")]

    driver = ends_in_pass(9, log_dir, task)
    driver.runner.engine = LikeSpark(1, bundle)
    [row] = driver.run()
    assert row.status == "compacted", row
    assert len(seen) == 3
    assert all(there == saved for there, saved in seen), seen


def test_output_of_a_jvm_about_its_stop_is_not_forwarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Output from just before the stop, when the driver has not yet got the signal, is not forwarded either."""
    monkeypatch.setattr(jvm_log, "HELD_BACK_S", 2.0)
    reader, jvm = os.pipe()
    out, real = os.pipe()
    started = threading.Event()
    log = JvmLog()
    passing = threading.Thread(target=log._pass_on, args=(reader, real, started))
    passing.start()
    os.write(jvm, b"WARNING: Using incubator modules: x\nError: no such ma")
    os.write(jvm, b"ster\n")
    assert os.read(out, 100) == b"Error: no such master\n"
    started.set()
    os.write(jvm, b"ERROR of a task\n")
    assert os.read(out, 100) == b"ERROR of a task\n"
    os.write(jvm, b"java.util.concurrent.RejectedExecutionException: Task\n")
    time.sleep(0.05)
    log.silence()
    os.write(jvm, b"\tat java.base/java.util.concurrent\n")
    os.close(jvm)
    passing.join(60)
    os.close(real)
    assert os.read(out, 100) == b""
    os.close(out)


def test_the_output_of_the_jvm_is_read_even_if_it_cannot_be_forwarded() -> None:
    """If nobody read it, the JVM would block forever on a full pipe."""
    reader, jvm = os.pipe()
    nobody, real = os.pipe()
    os.close(nobody)
    started = threading.Event()
    passing = threading.Thread(target=JvmLog()._pass_on, args=(reader, real, started), daemon=True)
    passing.start()
    os.set_blocking(jvm, False)
    message, last_s = 0, time.monotonic() + 60
    while message < 1 << 20 and time.monotonic() < last_s:
        with contextlib.suppress(BlockingIOError):
            message += os.write(jvm, b"ERROR of a task\n" * 64)
    os.close(jvm)
    passing.join(60)
    assert message >= 1 << 20
    assert not passing.is_alive()
    os.close(real)


def test_py4j_prints_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    silence_py4j()
    message = "import logging\ntry:\n    1 / 0\nexcept Exception:\n    logging.getLogger(name).exception('sending')\n"
    for file, name in (("/x/py4j/java_gateway.py", None), ("/x/py4j/clientserver.py", "py4j.clientserver")):
        exec(compile(message, file, "exec"), {"name": name})
    assert capfd.readouterr().err == ""
    root = logging.getLogger()
    assert root.filter(logging.LogRecord("root", logging.ERROR, "/x/keytail/a.py", 1, "said", None, None))

    with AccumulatorTCPServer(("127.0.0.1", 0), StreamRequestHandler, "") as server:
        try:
            raise EOFError
        except EOFError:
            server.handle_error(SimpleNamespace(), ("127.0.0.1", 1))  # type: ignore[arg-type]
    assert capfd.readouterr().err == ""
