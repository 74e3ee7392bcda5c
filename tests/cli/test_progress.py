"""Progress of a run: its output on a terminal and in a log, and the flags that control it."""

from __future__ import annotations

import fcntl
import itertools
import json
import logging
import os
import pty
import select
import struct
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyte
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from keytail import console
from keytail.cli import progress
from keytail.cli.progress import PACE_S, Reporter
from keytail.cli.run_progress import DRIVER, WAITING, RunProgress, Slowest
from keytail.console import OutputStyle
from keytail.main.main import COMMANDS, app
from keytail.run.watching import TaskProgress
from tests.chance import chance
from tests.cli.forked import keytail
from tests.compact.fan_out.test_memory import BATCH_RECORDS, write_segments

KEYTAIL = [sys.executable, "-m", "keytail"]


@pytest.fixture(autouse=True)
def plain() -> Iterator[None]:
    console.set_output_style(OutputStyle())
    yield
    console.set_output_style(OutputStyle())


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


EVENTS = st.one_of(
    st.tuples(
        st.just("report"), st.integers(0, 6), st.integers(0, 2), st.sampled_from(["", "map", "write"]),
        st.integers(0, 400), st.booleans(),
    ),
    st.tuples(st.just("done"), st.integers(0, 6)),
)


@given(
    st.lists(st.integers(0, 100), min_size=5, max_size=5),
    st.sampled_from([1.0, 3.5]),
    st.lists(EVENTS, max_size=40),
)
def test_progress_equals_a_simple_count(
    sizes: list[int], passes: float, events: list[tuple[Any, ...]]
) -> None:
    names = [f"t-{number}" for number in range(len(sizes))]
    progress_so_far = RunProgress(list(zip(names, sizes, strict=True)), passes)
    read: dict[str, dict[int, int]] = {}
    done: set[str] = set()
    for event in events:
        name = f"t-{event[1]}"
        if event[0] == "report":
            _, _, attempt, phase, read_bytes, is_over = event
            progress_so_far.on_progress(TaskProgress(name, str(attempt), phase, read_bytes, is_over), 0.0)
            if name in names and name not in done:
                read.setdefault(name, {})[attempt] = read_bytes
        elif name in names and name not in done:
            progress_so_far.done(name, sizes[event[1]])
            done.add(name)
            read.pop(name, None)

        assert progress_so_far.ended == len(done)
        ended_bytes = sum(sizes[names.index(name)] for name in done)
        shares = {
            name: min(sum(of.values()) / (sizes[names.index(name)] * passes), 0.99) if sizes[names.index(name)] else 0.0
            for name, of in read.items()
        }
        in_flight = sum(share * sizes[names.index(name)] for name, share in shares.items())
        assert progress_so_far.done_bytes == ended_bytes + int(in_flight)
        assert ended_bytes <= progress_so_far.done_bytes <= sum(sizes)
        slowest = progress_so_far.slowest(0.0)
        assert (slowest is None) == (not shares)
        if slowest is not None:
            left = {name: (1 - share) * sizes[names.index(name)] for name, share in shares.items()}
            assert left[slowest.name] == max(left.values())


def test_a_partition_whose_tasks_have_ended_is_waiting() -> None:
    progress_so_far = RunProgress([("t-0", 10)], 1.0)
    assert progress_so_far.on_progress(TaskProgress("t-0", "a", "write", 5), 1.0)
    assert not progress_so_far.on_progress(TaskProgress("t-0", "b", "write", 1), 1.0)
    assert not progress_so_far.on_progress(TaskProgress("t-0", "a", "write", 6, is_over=True), 2.0)
    assert progress_so_far.slowest(2.0).phase == "write"  # type: ignore[union-attr]
    assert not progress_so_far.on_progress(TaskProgress("t-0", "b", "write", 3, is_over=True), 3.0)
    assert progress_so_far.slowest(4.0) == Slowest("t-0", WAITING, 0.9, 3.0)
    assert progress_so_far.on_progress(TaskProgress("t-0", DRIVER, "replace", 0), 5.0)


def test_a_late_report_of_a_task_does_not_change_the_phase_of_the_driver() -> None:
    progress_so_far = RunProgress([("t-0", 10)], 1.0)
    assert progress_so_far.on_progress(TaskProgress("t-0", "a", "prove", 5), 1.0)
    assert progress_so_far.on_progress(TaskProgress("t-0", DRIVER, "replace", 0), 2.0)
    assert not progress_so_far.on_progress(TaskProgress("t-0", "a", "prove", 8), 2.0)
    assert not progress_so_far.on_progress(TaskProgress("t-0", "a", "prove", 9, is_over=True), 2.1)
    assert progress_so_far.slowest(3.0) == Slowest("t-0", "replace", 0.9, 2.0)


def test_a_dead_attempt_counts_neither_as_read_nor_as_running() -> None:
    progress_so_far = RunProgress([("t-0", 10)], 1.0)
    progress_so_far.on_progress(TaskProgress("t-0", "died", "write", 8), 1.0)
    progress_so_far.on_progress(TaskProgress("t-0", "again", "write", 1), 20.0)
    assert progress_so_far.done_bytes == 9  # the later task may be another task of a fan-out
    progress_so_far.on_progress(TaskProgress("t-0", "again", "write", 2), 40.0)
    assert progress_so_far.done_bytes == 2
    progress_so_far.on_progress(TaskProgress("t-0", "again", "write", 9, is_over=True), 41.0)
    assert progress_so_far.slowest(42.0) == Slowest("t-0", WAITING, 0.9, 41.0)


def _reporter(count: int, clock: Clock) -> Reporter:
    return Reporter("compact", [(f"t-{number}", 1 << 20) for number in range(count)], clock=clock)


def test_a_few_partitions_have_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with _reporter(3, clock) as reporter:
        for number in range(3):
            clock.now_s += 100
            reporter.done(f"t-{number}", "compacted", 1 << 20)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "keytail: [1/3] t-0 compacted (1.0 MiB, at 1 min 40 s)"
    assert len(lines) == 3


def test_for_many_partitions_problems_long_tasks_and_periodic_progress_are_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rng, clock, count = chance(), Clock(), 5000
    bad, long = set(rng.sample(range(count), 7)), rng.randrange(count)
    reported_s: list[float] = []
    with _reporter(count, clock) as reporter:
        for number in range(count):
            clock.now_s += rng.expovariate(1 / 0.2)
            if number == long:
                reporter.on_progress(TaskProgress(f"t-{number}", "a", "write", 1))
                clock.now_s += progress.LONG_S + 1
            reporter.done(f"t-{number}", "corrupt" if number in bad else "compacted", 1 << 20)
            err = capsys.readouterr().err
            reported_s += [clock.now_s] * err.count("partitions,")
            assert ("corrupt" in err) == (number in bad)
            assert (f"t-{number} compacted" in err) == (number == long and number not in bad)
    assert reported_s
    assert all(later - earlier >= PACE_S for earlier, later in itertools.pairwise(reported_s))
    assert len(reported_s) >= (clock.now_s - 1000) / (2 * PACE_S) - 1


def test_a_long_partition_is_reported_periodically(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with Reporter("compact", [("t-0", 1000 << 20)], 2.0, clock) as reporter:
        reporter.on_progress(TaskProgress("t-0", "a", "write", 500 << 20))
        clock.now_s += 31
        reporter.report_progress_if_due()
        reporter.report_progress_if_due()
    [line] = capsys.readouterr().err.splitlines()
    assert line == (
        "keytail: compact: 0 of 1 partitions, 250.0 MiB of 1000.0 MiB, 8.1 MiB/s, 1 min 33 s left; "
        "slowest: t-0 (write, 25 %, for 31.0 s) (at 31.0 s)"
    )


def test_only_one_of_two_threads_prints_a_line_that_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, message = Clock(), []

    def print_message(text: str, *_: object, **facts: object) -> None:
        message.append(text)
        reporter.report_progress_if_due()  # another thread may call this before the line is printed

    with _reporter(3, clock) as reporter:
        monkeypatch.setattr(reporter, "_print", print_message)
        for _ in range(2):
            clock.now_s += PACE_S + 1
            reporter.report_progress_if_due()
    assert len(message) == 2


def test_with_json_each_line_is_an_object(capsys: pytest.CaptureFixture[str]) -> None:
    console.set_output_style(OutputStyle(verbose=True, as_json=True))
    clock = Clock()
    hostile = "t\x1b[2J\n\u202e-0"
    with Reporter("compact", [("t-0", 100), (hostile, 100)], 1.0, clock) as reporter:
        reporter.note("starting Spark")
        reporter.on_progress(TaskProgress(hostile, "a", "map", 50))
        clock.now_s += 60
        reporter.report_progress_if_due()
        reporter.done("t-0", "compacted", 100)
        reporter.done(hostile, "corrupt", 100, "what\nit is")
    err = capsys.readouterr().err
    assert "\x1b" not in err
    found = [json.loads(line) for line in err.splitlines()]
    assert [(item.get("event"), item["level"]) for item in found] == [
        (None, "info"), ("phase", "detail"), ("progress", "info"), ("partition", "info"), ("partition", "warning"),
    ]  # fmt: skip
    assert found[0]["message"] == "starting Spark"
    assert found[1]["partition"] == found[4]["partition"] == hostile
    progress_so_far = {
        name: found[2][name] for name in ("partitions_done", "partitions", "bytes_done", "bytes", "slowest")
    }
    assert progress_so_far == {
        "partitions_done": 0,
        "partitions": 2,
        "bytes_done": 50,
        "bytes": 200,
        "slowest": hostile,
    }
    assert found[2]["seconds_left"] == 180
    assert found[3]["seconds"] == 60.0
    assert all(item["time"].endswith("Z") for item in found)


def test_quiet_prints_problems(capsys: pytest.CaptureFixture[str]) -> None:
    console.set_output_style(OutputStyle(quiet=True))
    clock = Clock()
    with _reporter(2, clock) as reporter:
        reporter.note("starting Spark")
        reporter.watch()
        clock.now_s += 100
        reporter.report_progress_if_due()
        reporter.done("t-0", "compacted", 1)
        reporter.done("t-1", "refused", 1, "why")
    assert capsys.readouterr().err == "keytail: [2/2] t-1 refused (1 B, at 1 min 40 s): why\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_the_flags_for_progress(command: str) -> None:
    reported = CliRunner().invoke(app, [command, "--help"]).stdout
    assert "--quiet" in reported
    assert "--verbose" in reported
    assert "--log-format" in reported


def test_invalid_flags_of_progress_are_refused(tmp_path: Path) -> None:
    both = keytail("plan", "--log-dirs", str(tmp_path), "--quiet", "--verbose")
    assert (both.returncode, both.stdout) == (2, "")
    assert "--quiet and --verbose cannot be combined" in both.stderr
    assert keytail("plan", "--log-dirs", str(tmp_path), "--log-format", "xml").returncode == 2
    missing = keytail("plan", "--log-dirs", str(tmp_path / "none"), "--log-format", "json", "--quiet")
    [line] = missing.stderr.splitlines()
    assert json.loads(line)["level"] == "error"
    assert missing.returncode == 2


@pytest.fixture(scope="module")
def log_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("progress")
    for number in range(2):
        write_segments(path / f"orders-{number}", 2, 20_000 // BATCH_RECORDS, 4000, value_bytes=91)
    (path / ".kafka_cleanshutdown").touch(0o644)
    return path


COMPACT = (
    "--topics-have-no-overrides", "--topic-config", "orders:cleanup.policy=compact", "--high-watermark", "log-end",
    "--execute", "--throttle", "9m", "--force", "--from-log-start",
)  # fmt: skip


def _screens(command: list[str], columns: int) -> Iterator[list[str]]:
    """Yield the contents of a terminal with this many columns until the command has ended; then yield the final
    contents.
    """
    screen = pyte.Screen(columns, 40)
    stream = pyte.ByteStream(screen)
    pid, terminal = pty.fork()
    if pid == 0:
        environment = {**os.environ, "TERM": "xterm-256color"}
        environment.pop("COLUMNS", None)
        while os.get_terminal_size(2).columns != columns:  # lines printed for another width would not be erased
            time.sleep(0.001)
        # Unlike execvp, this does not pass on variables that readline has set in C, which are not in os.environ.
        os.execvpe(command[0], command, environment)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    last_s = time.monotonic() + 600
    while time.monotonic() < last_s:
        if select.select([terminal], [], [], 0.2)[0]:
            try:
                data = os.read(terminal, 1 << 16)
            except OSError:
                break
            if not data:
                break
            stream.feed(data)
        yield [line.rstrip() for line in screen.display if line.strip()]
    os.close(terminal)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    yield [*(line.rstrip() for line in screen.display if line.strip()), f"status {status}"]


@pytest.mark.long
def test_a_terminal_shows_one_live_view(log_dir: Path) -> None:
    columns = chance().randrange(72, 150)
    print("columns", columns)
    command = [*KEYTAIL, "compact", "--log-dirs", str(log_dir), *COMPACT]
    *screens, last = _screens(command, columns)
    bars = [[line for line in screen if line.startswith("compact ")] for screen in screens]
    assert not [found for found in bars if len(found) > 1], "an earlier view is still shown"
    assert any(" left " in found[0] and "MiB" in found[0] for found in bars if found)
    lines = {line for screen in screens for line in screen if "slowest: orders-" in line}
    reported = {
        line.split("(")[1].split(",")[0] for line in lines if "(" in line
    }  # a screen may be captured while it is drawn
    assert reported & {"map", "write", "prove"}
    assert any("0/2" in found[0] for found in bars if found)
    assert last[-1] == "status 0"
    assert not any("slowest" in line or line.startswith("compact ") for line in last)
    assert any("2 partitions: 2 compacted" in line for line in last)


@pytest.mark.long
def test_every_phase_is_reported_as_json(log_dir: Path) -> None:
    """The previous test has compacted the log dir, unless this test runs alone."""
    how = ("--throttle", "2m", "--verbose", "--log-format", "json")
    done = keytail("compact", "--log-dirs", str(log_dir), *COMPACT, *how)
    assert done.returncode == 0, done.stderr
    reported = [json.loads(line) for line in done.stderr.splitlines()]
    for name in ("orders-0", "orders-1"):
        of_one = [item for item in reported if item.get("partition") == name]
        phases = [item["phase"] for item in of_one if item["event"] == "phase"]
        assert phases == [phase for phase in ("check", "map", "write", "prove", "replace") if phase in phases]
        assert {"write", "replace"} < set(phases)
        assert (of_one[-1]["event"], of_one[-1]["status"]) == ("partition", "compacted")


@pytest.mark.parametrize("kind", ["full", "closed"])
def test_a_run_whose_output_cannot_be_written_continues(kind: str, log_dir: Path) -> None:
    """If standard error is a full disk or a closed pipe, the rows and the status do not change."""
    command = ("verify", "--log-dirs", log_dir, "--output", "json", "--verbose")
    unaffected = keytail(*command)
    assert "orders-0 " in unaffected.stderr
    if kind == "full":
        done = keytail(*command, streams={2: "/dev/full"})
    else:
        nobody, out = os.pipe()
        os.close(nobody)
        try:
            done = keytail(*command, streams={2: out})
        finally:
            os.close(out)
    assert done.returncode == unaffected.returncode
    assert [row["findings"] for row in json.loads(done.stdout)] == [
        row["findings"] for row in json.loads(unaffected.stdout)
    ]
    assert [row["topic"] for row in json.loads(done.stdout)] == ["orders", "orders"]


def test_log_messages_are_forwarded_once_for_two_commands_in_a_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        CliRunner().invoke(app, ["plan", "--verbose", "--log-dirs", str(tmp_path / "none")])
    logging.getLogger("keytail.test").warning("heard")
    assert capsys.readouterr().err.count("heard") == 1
