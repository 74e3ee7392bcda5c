"""Two runs in one process, as in a notebook, an Airflow worker or these tests, do not affect each other."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from keytail.cli.command import Command
from keytail.console import OutputStyle, output_style, print_message, set_output_style
from keytail.log import meter
from keytail.log.fs import LOCAL
from keytail.log.records.prefetch import prefetched
from keytail.main.running import function_of
from keytail.run.engine import ThisProcess
from keytail.run.spark import session
from keytail.run.spark.jvm import Jvm
from keytail.run.spark.jvm_log import JvmLog
from keytail.run.watching import HERE, TaskProgress, Watch, current_channel, sending_progress
from keytail.threads import Threads, inheriting


def _side_by_side(*runs: Callable[[], None]) -> None:
    problems: list[BaseException] = []

    def work(run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=work, args=(run,)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not problems, problems


def test_each_run_has_its_own_output_style(capsys: pytest.CaptureFixture[str]) -> None:
    """The threads of a run use its output style, too, even after the other run has set another one."""
    both = threading.Barrier(2)

    def run(how: OutputStyle, text: str) -> None:
        set_output_style(how)
        both.wait(60)
        print_message(f"{text} itself", "detail")
        with Threads(1) as pool:
            pool.submit(print_message, f"{text} in a pool", "detail").result()
        thread = threading.Thread(target=inheriting(lambda: print_message(f"{text} in a thread", "detail")))
        thread.start()
        thread.join(60)

    before = output_style()
    _side_by_side(
        lambda: run(OutputStyle(verbose=True, as_json=True), "json"), lambda: run(OutputStyle(quiet=True), "quiet")
    )
    lines = [json.loads(line)["message"] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["json itself", "json in a pool", "json in a thread"]
    assert output_style() == before


@dataclass(frozen=True)
class Empty:
    """The request of a command without flags of its own."""


SEEN: list[OutputStyle] = []


def note_style(request: Empty) -> int:
    """Run a command that records the output style of its run."""
    SEEN.append(output_style())
    return 0


def test_the_output_style_of_a_command_ends_with_it() -> None:
    before = output_style()
    command = function_of(Command(name="see", help="", request=Empty, run="tests.run.test_two_runs:note_style"))
    with pytest.raises(typer.Exit):
        command(context=SimpleNamespace(obj=None), quiet=True)
    assert SEEN == [OutputStyle(quiet=True)]
    assert output_style() == before


def _pieces(path: str, count: int) -> Iterator[bytes]:
    for _ in range(count):
        yield LOCAL.read_at(path, 0, 1000)


def test_each_run_is_notified_only_of_its_own_tasks_and_bytes(tmp_path: Path) -> None:
    """Tasks of both runs are in this process at the same time, and each reads with another thread."""
    path = tmp_path / "file"
    path.write_bytes(bytes(1000))
    both = threading.Barrier(2)

    def read(payload: tuple[str, int], attempt: str) -> int:
        name, count = payload
        with sending_progress(name, attempt, "first"):
            both.wait(60)
            read = sum(map(len, prefetched(_pieces(str(path), count))))
            with meter.during(f"second of {name}"):
                time.sleep(0.7)  # the task runs long enough to be reported
            both.wait(60)
        return read

    def run(name: str, count: int, on_result: list[TaskProgress]) -> None:
        with Watch(HERE, on_result.append):
            [outcome] = ThisProcess().run_bundle([(name, count)], read)
            assert outcome.value == 1000 * count
            last_s = time.monotonic() + 60
            while not any(report.is_over for report in on_result) and time.monotonic() < last_s:
                time.sleep(0.01)
        assert current_channel() is None

    item: list[TaskProgress] = []
    two: list[TaskProgress] = []
    _side_by_side(lambda: run("a-0", 3, item), lambda: run("b-0", 70, two))
    for name, count, on_result in (("a-0", 3, item), ("b-0", 70, two)):
        assert {report.name for report in on_result} == {name}
        assert on_result[-1].read_bytes == 1000 * count
        assert {report.phase for report in on_result} <= {"first", f"second of {name}"}


@pytest.mark.parametrize("was_there", [False, True])
def test_a_run_stops_only_its_own_session(was_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that a notebook has started before is not stopped."""
    stopped: list[str] = []
    context = SimpleNamespace(master="local[1]")
    made = SimpleNamespace(stop=lambda: stopped.append("session"), sparkContext=context)
    monkeypatch.setattr(session, "has_session", lambda: was_there)
    monkeypatch.setattr(session, "local_session", lambda *_, **__: made)
    monkeypatch.setattr(session, "jvm_of_keytail", lambda: None)
    monkeypatch.setattr(session, "end_jvm", lambda: stopped.append("JVM"))
    with contextlib.ExitStack() as run:
        assert session.session_of_run(run, "local[1]", submitted=False).session is made
    assert stopped == ([] if was_there else ["session", "JVM"])


def test_silencing_one_jvm_does_not_silence_another() -> None:
    out, real = os.pipe()
    item, two = JvmLog(), JvmLog()
    item.silence()
    started = threading.Event()
    for log, text in ((item, b"of one\n"), (two, b"of two\n")):
        reader, jvm = os.pipe()
        os.write(jvm, text)
        os.close(jvm)
        log._pass_on(reader, real, started)
    os.close(real)
    assert os.read(out, 100) == b"of two\n"
    os.close(out)


def test_a_jvm_whose_start_was_interrupted_ends_and_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that starts the JVM continues, and other child processes do not end."""
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    other = subprocess.Popen(["sleep", "60"])
    jvm = Jvm()
    assert len(list(tmp_path.iterdir())) == 1
    with pytest.raises(KeyboardInterrupt), jvm.starting():
        first = jvm.popen(["sleep", "60"])
        raise KeyboardInterrupt
    assert first.poll() == -signal.SIGKILL
    assert jvm.popen(["sleep", "60"]).wait(60) == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []
    assert other.poll() is None
    other.kill()
    other.wait()


def test_reads_outside_of_tasks_are_not_counted(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1000))
    with meter.metered() as outer:
        with meter.metered() as inner, meter.during("a"):
            LOCAL.read_at(str(path), 0, 1000)
        thread = threading.Thread(target=lambda: LOCAL.read_at(str(path), 0, 1000))
        thread.start()
        thread.join(60)
    LOCAL.read_at(str(path), 0, 1000)
    assert (inner.read_bytes, outer.read_bytes) == (1000, 0)
