"""Worker processes without Spark: they give the same guarantees as Spark's, and no worker outlives its driver."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from keytail.run.processes import Processes
from tests.run import work


@pytest.fixture
def workers() -> Iterator[Processes]:
    with Processes(2) as made:
        yield made


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _wait_until_gone(pids: list[int]) -> None:
    last_s = time.monotonic() + 60
    while any(map(_is_alive, pids)):
        assert time.monotonic() < last_s, "a worker outlived its driver"
        time.sleep(0.01)


def test_two_processes_that_are_reused_return_answers_in_order(workers: Processes) -> None:
    answers = workers.run(list(range(20)), work.double)
    assert [value for value, _ in answers] == list(range(0, 40, 2))  # type: ignore[misc]
    attempts = {attempt for _, attempt in answers}  # type: ignore[misc]
    assert len(attempts) == 20
    again = workers.run([1, 2, 3], work.double)
    assert not attempts & {attempt for _, attempt in again}  # type: ignore[misc]
    seen = workers.run([0.01] * 20, work.sleep_for)
    assert len(set(seen)) == 2
    assert os.getpid() not in seen


def test_a_function_given_at_the_start_need_not_be_picklable() -> None:
    large = object()
    with Processes(1, lambda payload, attempt: (payload, large is not None)) as workers:
        assert workers.run([7]) == [(7, True)]


def test_a_worker_that_dies_fails_only_its_task(workers: Processes, tmp_path: Path) -> None:
    tidied: list[int] = []
    payloads = [(number, number == 2, str(tmp_path)) for number in range(5)]
    answers = workers.run(payloads, work.kill_worker_if_requested, lambda payload: tidied.append(payload[0]))
    assert answers == [0, 1, None, 3, 4]
    assert len(list(tmp_path.glob("2.*"))) == 2, "the task must run again, in another process"
    assert tidied == [2]
    assert workers.run([(0, str(tmp_path))], work.kill_worker_once) == [0]


def test_several_threads_share_the_workers(workers: Processes) -> None:
    found: dict[int, list[int]] = {}

    def ask(number: int) -> None:
        found[number] = [answer[0] for answer in workers.run([number] * 5, work.double)]  # type: ignore[index]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {number: [2 * number] * 5 for number in range(6)}


def test_cancel_kills_running_tasks_and_discards_waiting_ones(workers: Processes) -> None:
    [first] = workers.run([0], work.sleep_for)
    threading.Timer(0.3, workers.cancel).start()
    start_s = time.monotonic()
    assert workers.run([60.0, 60.0, 60.0], work.sleep_for) == [None, None, None]
    assert time.monotonic() - start_s < 30
    _wait_until_gone([first or 0])


def test_no_process_outlives_close() -> None:
    with Processes(2) as workers:
        pids = [pid for pid in workers.run([0.05] * 4, work.sleep_for) if pid]
        forker = workers._forker
    assert not any(map(_is_alive, [*pids, forker])), "close() must wait for processes, which hold the driver's locks"


def test_workers_ignore_signals_to_the_process_group(workers: Processes) -> None:
    [pid] = workers.run([0], work.sleep_for)
    assert pid
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid, number)
        os.kill(workers._forker, number)
    time.sleep(0.1)
    assert _is_alive(pid)
    assert _is_alive(workers._forker)


@pytest.mark.parametrize("ends_by", ["SIGKILL of the driver", "an exit without close"])
def test_workers_end_with_their_driver(ends_by: str) -> None:
    lines = (
        "import os, sys, time\nfrom keytail.run.processes import Processes\nfrom tests.run import work\n"
        "workers = Processes(2)\nprint(workers._forker, *set(workers.run([0.1] * 4, work.sleep_for)), flush=True)\n"
    )
    lines += "os._exit(0)\n" if "exit" in ends_by else "workers.run([60.0] * 2, work.sleep_for)\n"
    run = subprocess.Popen([sys.executable, "-c", lines], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    pids = list(map(int, run.stdout.readline().split()))
    assert len(pids) == 3
    if "SIGKILL" in ends_by:
        time.sleep(0.2)
        run.kill()
    run.wait(timeout=60)
    run.stdout.close()
    _wait_until_gone(pids)


def test_workers_end_with_the_process_that_forked_them(workers: Processes) -> None:
    pids = [pid for pid in workers.run([0.05] * 4, work.sleep_for) if pid]
    os.kill(workers._forker, signal.SIGKILL)
    _wait_until_gone(pids)
    with pytest.raises(ChildProcessError, match="the process that starts worker processes has died"):
        workers.run([0.0], work.sleep_for)


@pytest.mark.parametrize("cause", ["EMFILE", "dead forker", "before_again"])
def test_an_error_of_the_driver_is_not_reported_as_a_killed_worker(
    cause: str, workers: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    payload, function = (0, str(tmp_path)), work.kill_worker_once
    before_again: Callable[[object], object] = fail if cause == "before_again" else (lambda payload: None)
    if cause == "EMFILE":
        monkeypatch.setattr("keytail.run.processes.socket.socketpair", fail)
    elif cause == "dead forker":
        os.kill(workers._forker, signal.SIGKILL)
        os.waitpid(workers._forker, 0)
    [outcome] = workers.run_bundle([payload], function, before_again=before_again)
    expected = "the process that starts worker processes has died" if cause == "dead forker" else "Too many open files"
    assert outcome.problem is not None
    assert expected in str(outcome.problem)
    assert "killed" not in str(outcome.problem)
    (tmp_path / "0.died").unlink(missing_ok=True)
    with pytest.raises(OSError, match=expected):
        workers.run([payload], function, before_again)


def test_a_lost_payload_is_not_run_again_after_a_stop(workers: Processes, tmp_path: Path) -> None:
    [outcome] = workers.run_bundle([(0, str(tmp_path))], work.kill_worker_once, stopped=lambda: True)
    assert outcome.problem is not None
    assert outcome.problem.slug == "run-interrupted"


def test_cancelled_tasks_are_reported_as_interrupted(workers: Processes) -> None:
    threading.Timer(0.3, workers.cancel).start()
    outcomes = workers.run_bundle([60.0, 60.0, 60.0], work.sleep_for)
    assert {outcome.problem.slug for outcome in outcomes if outcome.problem} == {"run-interrupted"}
    assert len(outcomes) == 3
