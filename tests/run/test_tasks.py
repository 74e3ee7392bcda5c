from __future__ import annotations

import sys
from pathlib import Path

import pytest

from keytail.errors import CorruptLog, KeytailError
from keytail.run.spark.engine import SparkEngine
from tests.run import work

pytestmark = pytest.mark.spark


def test_each_payload_is_a_task_and_answers_are_in_order(engine: SparkEngine) -> None:
    outcomes = engine.run_bundle(list(range(7)), work.double)
    assert [outcome.value[0] for outcome in outcomes if outcome.value] == [0, 2, 4, 6, 8, 10, 12]
    attempts = [outcome.value[1] for outcome in outcomes if outcome.value]
    assert len(set(attempts)) == 7, "every payload must be a separate attempt, and so a separate task"
    again = engine.run_bundle(list(range(7)), work.double)
    assert not set(attempts) & {outcome.value[1] for outcome in again if outcome.value}
    assert all(outcome.host and outcome.end_ms >= outcome.start_ms > 0 for outcome in outcomes)


def test_a_bundle_without_payloads_starts_no_job(engine: SparkEngine) -> None:
    assert engine.run_bundle([], work.double) == []


def test_workers_use_this_interpreter_and_are_reused(engine: SparkEngine) -> None:
    first = [o.value for o in engine.run_bundle([0, 1], work.interpreter) if o.value]
    assert {executable for executable, _ in first} == {sys.executable}
    pids = {pid for _, pid in first}
    for _ in range(3):
        pids |= {o.value[1] for o in engine.run_bundle([0, 1], work.interpreter) if o.value}
    assert len(pids) <= 4, "workers must be reused"


def test_errors_are_returned_as_values(engine: SparkEngine) -> None:
    outcomes = engine.run_bundle(list(range(6)), work.fail_on_odd)
    assert [outcome.value for outcome in outcomes] == [0, None, 2, None, 4, None]
    corrupt, missing, oversight = (outcomes[number].problem for number in (1, 3, 5))
    assert isinstance(corrupt, CorruptLog)
    assert (corrupt.path, corrupt.byte_position, corrupt.offset) == ("/x", 7, 3)
    assert type(missing) is KeytailError
    assert missing.path == "/y"
    assert "No such file" in missing.what
    assert type(oversight) is KeytailError
    assert "ZeroDivisionError: an oversight" in oversight.what
    assert "work.py" in outcomes[5].trace


def test_an_answer_cannot_run_code_in_the_driver(engine: SparkEngine, tmp_path: Path) -> None:
    [outcome] = engine.run_bundle([str(tmp_path / "mark")], work.attack)
    assert not (tmp_path / "mark").exists()
    assert outcome.value is None
    assert outcome.problem is not None
    assert "OpensWhereUnpickled cannot be serialized" in outcome.problem.what


def test_a_killed_worker_fails_only_its_own_payload(engine: SparkEngine, tmp_path: Path) -> None:
    payloads = [(number, number == 2, str(tmp_path)) for number in range(5)]
    again: list[tuple[int, int]] = []

    def before_again(payload: tuple[int, bool, str]) -> None:
        again.append((payload[0], len(list(tmp_path.glob(f"{payload[0]}.*")))))

    outcomes = engine.run_bundle(payloads, work.kill_worker_if_requested, before_again=before_again)
    assert [outcome.value for outcome in outcomes] == [0, 1, None, 3, 4]
    problem = outcomes[2].problem
    assert type(problem) is KeytailError
    assert "killed twice" in problem.what
    assert "--map-memory" in (problem.remedy or "")
    assert len(list(tmp_path.glob("2.*"))) == 2, "the payload must run twice: with its job, then alone"
    assert [number for number, _ in again] == [0, 1, 2, 3, 4], "files of every payload of the lost job must be removed"
    assert dict(again)[2] == 1, "the files of its first attempt must be removed before the second"


def test_a_task_whose_worker_is_killed_once_succeeds(engine: SparkEngine, tmp_path: Path) -> None:
    outcomes = engine.run_bundle([(0, str(tmp_path))], work.kill_worker_once)
    assert [outcome.value for outcome in outcomes] == [0]


def test_a_task_of_a_killed_worker_is_not_repeated_in_a_stopped_run(engine: SparkEngine, tmp_path: Path) -> None:
    payloads = [(0, str(tmp_path))]
    [outcome] = engine.run_bundle(payloads, work.kill_worker_once, stopped=lambda: True)
    assert outcome.problem is not None
    assert outcome.value is None
