"""The command of a task: its start, its end, its rows, and the result of each exit status."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.airflow_dags.conftest import DAGS

ODD = ["it's", 'a "b"', "c  d", "$HOME", "`x`", "*", "", "\\", "new\nline", "ünï", "; exit 9", "--flag=a,b"]
ECHO = [sys.executable, "-c", "import json, sys; print(json.dumps([{'words': sys.argv[1:]}]))"]
HOSTS = [(), ("sh", "-c"), ("env", "sh", "-c")]
LOOP = "trap 'echo told >>\"$0\"; echo told >&2; exit 143' TERM; echo up >&2; while :; do sleep 0.05; done"


@pytest.mark.parametrize("on_host", HOSTS)
def test_arguments_are_passed_unchanged(commands: Any, on_host: tuple[str, ...]) -> None:
    ended = commands.run([*ECHO, *ODD], commands.Host(on_host))
    assert (ended.exit_status, ended.rows) == (0, [{"words": ODD}])


def test_arguments_are_passed_unchanged_through_ssh(commands: Any, tmp_path: Path) -> None:
    """ssh joins its arguments with blanks to one line, which a shell on the other host parses."""
    (tmp_path / "ssh").write_text("#!/bin/sh\nshift\nexec sh -c \"$*\"\n")
    (tmp_path / "ssh").chmod(0o755)
    assert commands.run([*ECHO, *ODD], commands.Host((str(tmp_path / "ssh"), "kafka@b1"))).rows == [{"words": ODD}]


def test_standard_error_is_logged_during_the_run(commands: Any, tmp_path: Path) -> None:
    """The command continues when its first line has been logged."""
    lines: list[str] = []

    def on_line(line: str) -> None:
        lines.append(line)
        if line == "first":
            (tmp_path / "logged").touch()

    script = 'echo first >&2; while [ ! -e "$0" ]; do sleep 0.02; done; '
    script += "printf 'second\\r\\nhalf \\303' >&2; echo '[]'; exit 3"
    ended = commands.run(["sh", "-c", script, str(tmp_path / "logged")], timeout_s=300, on_line=on_line)
    assert lines[1:] == ["first", "second", "half \ufffd"]
    assert ended.last_lines.splitlines() == ["first", "second", "half \ufffd"]
    assert ended.exit_status == 3


def test_without_rows_all_output_is_logged(commands: Any) -> None:
    lines: list[str] = []
    ended = commands.run(["sh", "-c", "echo out; echo err >&2; exit 5"], on_line=lines.append, parse_rows=False)
    assert sorted(lines[1:]) == ["err", "out"]
    assert (ended.exit_status, ended.rows) == (5, [])


def test_much_output_on_both_streams_does_not_block(commands: Any) -> None:
    script = "import json, sys\nfor n in range(20000): print('e' * 50, file=sys.stderr)\n"
    script += "print(json.dumps([{'n': n, 'text': 'x' * 100} for n in range(20000)]))"
    lines: list[str] = []
    ended = commands.run([sys.executable, "-c", script], on_line=lines.append)
    assert (len(lines), len(ended.rows)) == (20001, 20000)
    assert len(ended.last_lines) < 20_000


@pytest.mark.parametrize("output", ["", "Welcome to b1\n[]", "{}", "[1]", "[{}"])
def test_invalid_rows_are_reported(commands: Any, output: str) -> None:
    script = ["sh", "-c", 'printf %s "$1"; exit "$2"', "sh", output]
    for status in ("0", "3"):
        with pytest.raises(commands.AirflowFailException, match="not a JSON array of rows"):
            commands.run([*script, status])
    assert commands.run([*script, "1"]).rows == []


def test_a_task_does_not_wait_for_background_processes(commands: Any) -> None:
    started = time.monotonic()
    ended = commands.run(["sh", "-c", "sleep 120 & echo '[]'"])
    assert (ended.exit_status, ended.rows) == (0, [])
    assert time.monotonic() - started < 100


@pytest.mark.long
@pytest.mark.parametrize("on_host", HOSTS)
def test_a_timeout_stops_the_command_with_sigterm(commands: Any, tmp_path: Path, on_host: tuple[str, ...]) -> None:
    ended = commands.run(["sh", "-c", LOOP, str(tmp_path / "told")], commands.Host(on_host), timeout_s=10)
    assert ended.exit_status == 124
    assert (tmp_path / "told").read_text() == "told\n"
    assert ended.last_lines.splitlines() == ["up", "not finished after 10 s: stopped", "told"]


@pytest.mark.long
def test_a_command_that_does_not_stop_is_killed_with_all_its_children(commands: Any, tmp_path: Path) -> None:
    script = f"trap '' TERM; (while :; do sleep 0.05; done) & echo $! >{tmp_path}/pid; wait; wait; sleep 120"
    started = time.monotonic()
    ended = commands.run(["sh", "-c", script], timeout_s=10, grace_s=0.5)
    assert ended.exit_status == 124
    assert time.monotonic() - started < 100
    wait_until_gone(int((tmp_path / "pid").read_text()))


def test_an_exception_stops_the_command(commands: Any, tmp_path: Path) -> None:
    """An exception like that of Airflow's execution_timeout may be raised at any point of the task."""

    class Timeout(BaseException):
        pass

    def on_line(line: str) -> None:
        if line == "up":
            raise Timeout

    with pytest.raises(Timeout):
        commands.run(["sh", "-c", LOOP, str(tmp_path / "told")], on_line=on_line)
    assert (tmp_path / "told").read_text() == "told\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("on_host", HOSTS[:2])
def test_the_command_of_a_task_that_is_ended_is_stopped(tmp_path: Path, number: int, on_host: tuple[str, ...]) -> None:
    """The task is ended by SIGTERM, after which Airflow's handler runs too, or by SIGKILL, which no task can handle."""
    task = textwrap.dedent(f"""
        import signal, sys, types
        for name in ("airflow", "airflow.sdk", "airflow.sdk.exceptions"):
            sys.modules[name] = types.ModuleType(name)
        sys.modules[name].AirflowException = sys.modules[name].AirflowFailException = Exception
        sys.path.insert(0, {str(DAGS)!r})
        from keytail_provider import commands
        signal.signal(signal.SIGTERM, lambda *_: print("Airflow's", flush=True))
        ended = commands.run(["sh", "-c", {LOOP!r}, {str(tmp_path / "told")!r}], commands.Host({on_host!r}), 300,
                                     on_line=lambda line: print(line, flush=True))
        print(ended.exit_status, flush=True)
    """)
    process = subprocess.Popen([sys.executable, "-c", task], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = [process.stdout.readline(), process.stdout.readline()]
    assert lines[1] == "up\n"
    process.send_signal(number)
    rest = process.stdout.read().split()
    assert process.wait() == (0 if number == signal.SIGTERM else -9)
    if number == signal.SIGTERM:
        assert rest == ["Airflow's", "told", "143"]
    wait_for((tmp_path / "told").exists)


def test_without_standard_input_nothing_is_started(commands: Any, tmp_path: Path) -> None:
    (tmp_path / "ssh").write_text("#!/bin/sh\nshift\nexec sh -c \"$*\" </dev/null\n")
    (tmp_path / "ssh").chmod(0o755)
    ended = commands.run(["touch", str(tmp_path / "begun")], commands.Host((str(tmp_path / "ssh"), "-n")))
    assert ended.exit_status == 2
    assert "standard input is not passed on to this host" in ended.last_lines
    assert not (tmp_path / "begun").exists()


# Results


def row(status: str, number: int = 0, **more: Any) -> dict[str, Any]:
    return {"topic": "orders", "partition": number, "log_dir": "/d", "status": status, "error": "", **more}


def test_a_run_with_all_partitions_done_is_a_success(commands: Any) -> None:
    rows = [row("compacted", 0, bytes_before=100, bytes_after=30), row("clean", 1, bytes_before=7, bytes_after=7)]
    made = commands.outcome(commands.Ended(0, rows))
    assert (made["partial"], made["counts"]) == (False, {"compacted": 1, "clean": 1})
    assert (made["bytes_before"], made["bytes_after"], made["rows_left_out"]) == (107, 37, 0)


@pytest.mark.parametrize("status", [1, 3])
def test_a_run_with_some_partitions_done_is_partial(commands: Any, status: int) -> None:
    rows = [row("sound"), row("corrupt", 1, error="checksum")]
    made = commands.outcome(commands.Ended(status, rows))
    assert made["partial"] is True
    assert made["rows"][0]["error"] == "checksum"


def test_a_run_whose_ledger_is_incomplete_is_partial(commands: Any) -> None:
    assert commands.outcome(commands.Ended(3, [row("compacted")]))["partial"] is True


def test_a_run_with_only_warnings_is_a_success(commands: Any) -> None:
    made = commands.outcome(commands.Ended(1, [row("suspect")]))
    assert (made["partial"], made["counts"]) == (False, {"suspect": 1})


@pytest.mark.parametrize(
    ("status", "rows", "retry", "message"),
    [
        (1, [], True, "could not start.*the lock"),
        (255, [], True, "host was not reached"),
        (143, [row("compacted")], True, "signal 15"),
        (137, [], True, "signal 9"),
        (124, [row("compacted")], True, "took too long"),
        (141, [], True, "signal 13"),
        (1, [row("failed", error="disk")], True, r"nothing was done \(0 of 1\): orders-0 failed: disk"),
        (1, [row("failed"), row("corrupt", 1)], True, "nothing was done"),
        (1, [row("refused", error="stray"), row("corrupt", 1)], False, "orders-0 refused: stray; orders-1 corrupt"),
        (1, [row("damaged", error="1 finding", findings=[{"what": "a checksum"}])], False, "damaged: a checksum"),
        (2, [], False, "wrong usage"),
        (127, [], False, "command not found"),
        (126, [], False, "command not found"),
    ],
)
def test_failures_that_a_retry_may_resolve_are_retried(
    commands: Any, status: int, rows: list[dict[str, Any]], retry: bool, message: str
) -> None:
    with pytest.raises(commands.AirflowException, match=message) as failed:
        commands.outcome(commands.Ended(status, rows, "a broker holds the lock"))
    assert isinstance(failed.value, commands.AirflowFailException) is not retry


def test_the_result_for_ten_thousand_partitions_is_small(commands: Any) -> None:
    rows = [row("compacted", n, bytes_before=n, bytes_after=1, segments=[{"base": 1}] * 50) for n in range(9_000)]
    rows += [row("refused", n, error="x" * 5000, findings=[{"what": "y" * 5000}] * 9) for n in range(9_000, 10_000)]
    made = commands.outcome(commands.Ended(3, rows))
    assert len(json.dumps(made)) < 100_000
    assert made["counts"] == {"compacted": 9_000, "refused": 1_000}
    assert made["rows_left_out"] == 10_000 - len(made["rows"])
    assert {one["status"] for one in made["rows"]} == {"refused"}
    fewer = commands.outcome(commands.Ended(3, [*rows[:9_000], rows[-1]]))
    assert [one["partition"] for one in fewer["rows"]] == [9_999, *range(8_999, 8_989, -1)]
    assert fewer["rows"][1]["segments"] == 50


def wait_until_gone(pid: int) -> None:
    def is_gone() -> bool:
        with contextlib.suppress(OSError):
            os.kill(pid, 0)
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        return True

    wait_for(is_gone)


def wait_for(true: Callable[[], bool], seconds: float = 300) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_missing_program_of_the_prefix_is_not_retried(commands: Any, tmp_path: Path) -> None:
    ended = commands.run(["true"], commands.Host((str(tmp_path / "no-ssh"), "b1")))
    assert (ended.exit_status, ended.last_lines) == (127, f"{tmp_path}/no-ssh: No such file or directory")
    with pytest.raises(commands.AirflowFailException, match="command not found"):
        commands.outcome(ended)
