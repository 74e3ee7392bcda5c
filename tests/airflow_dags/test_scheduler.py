"""A run by a real Airflow: its scheduler, its DAG processor and its API server, each a separate process.

This covers what `dag.test()` omits: DAGs are stored in the database, and tasks are processes that use the API server
and get XComs from it. All processes listen only on the loopback address, and are ended by their process ids.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.airflow_dags.conftest import DAGS, Airflow
from tests.airflow_dags.test_runs import ORDERS, inventory, small
from tests.airflow_dags.test_structure import BROKERS, LEDGER
from tests.log_dirs import newest_by_key, records_of
from tests.ports import free_ports

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("airflow")]

LONGEST_S = 600.0


@contextlib.contextmanager
def running(commands: dict[str, list[str]], env: dict[str, str], logs: Path) -> Iterator[dict[str, Any]]:
    """Run these programs, each in a separate session, until the end of the block."""
    processes: dict[str, Any] = {}
    try:
        for name, command in commands.items():
            with open(logs / f"{name}.log", "wb") as log:
                processes[name] = subprocess.Popen(
                    command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                )
        yield processes
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # processes that the program started
            process.wait()


@pytest.mark.soak("test_runs.py and test_rolling_runs.py, by `dag.test()`")
def test_a_run_by_the_scheduler_over_two_brokers_succeeds(
    airflow_bin: Path,
    airflow: Airflow,
    environment: dict[str, str],
    empty_database: Path,
    tmp_path: Path,
    keytail_home: Path,
) -> None:
    """One broker is compacted and verified, through a shell in place of ssh. On the other one, too little is due, so
    that all its tasks except the plan are skipped. The event of the ledger then starts its maintenance.
    """
    worth, little = small(tmp_path / "it's one", 0, 1), small(tmp_path / "two", 2)
    before = {n: records_of(worth / f"orders-{n}") for n in range(2)}
    untouched = records_of(little / "orders-2")
    gate = sum(log.stat().st_size for log in worth.glob("*/*.log")) // 2
    [port] = free_ports(1)
    home = tmp_path / "airflow"
    database = home / "airflow.db"
    dags = home / "dags"
    dags.mkdir(parents=True)
    for file in (".airflowignore", "compaction.py", "ledger_maintenance.py", "keytail_provider"):
        (dags / file).symlink_to(DAGS / file)
    shutil.copy(empty_database, database)
    connection = inventory(
        keytail_home, b1={"log_dirs": [str(worth)], "on_host": ["sh", "-c"]}, b2={"log_dirs": [str(little)]},
    )  # fmt: skip
    env = environment | {
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__DAGS_FOLDER": str(dags),
        "AIRFLOW__CORE__EXECUTOR": "LocalExecutor",
        "AIRFLOW__CORE__PARALLELISM": "2",
        "AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": "False",
        "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"http://127.0.0.1:{port}/execution/",
        "AIRFLOW__API_AUTH__JWT_SECRET": secrets.token_urlsafe(48),
        "AIRFLOW__SCHEDULER__SCHEDULER_IDLE_SLEEP_TIME": "0.2",
        "KEYTAIL_LEDGER_MAINTENANCE_SCHEDULE": "keytail_ledger",
    } | connection
    program = str(airflow_bin / "airflow")
    programs = {
        "api-server": [program, "api-server", "--apps", "execution", "-w", "1", "-H", "127.0.0.1", "-p", str(port)],
        "dag-processor": [program, "dag-processor"],
        "scheduler": [program, "scheduler", "--skip-serve-logs"],
    }
    ledger = str(tmp_path / "ledger")
    conf = {"topic_config": ORDERS, "topics_have_no_overrides": True, "least_bytes": gate, "ledger": ledger}
    with running(programs, env, tmp_path) as processes:

        def wait_for(what: str, true: Callable[[], bool]) -> None:
            until = time.monotonic() + LONGEST_S
            while not true():
                ended = [name for name, process in processes.items() if process.poll() is not None]
                if ended or time.monotonic() > until:
                    logs = "\n".join(log.read_text()[-1500:] for log in tmp_path.glob("*.log"))
                    raise AssertionError(f"not reached: {what}; ended programs: {ended}\n{logs}")
                time.sleep(0.3)

        for dag_id in (BROKERS, LEDGER):
            query = "select 1 from serialized_dag where dag_id = ?"
            wait_for(f"{dag_id} is read", lambda dag_id=dag_id, query=query: asked(database, query, dag_id))
        airflow.ask("trigger", BROKERS, "once", json.dumps(conf), str(database), log=tmp_path / "trigger.log")
        state = "select state from dag_run where run_id = 'once' and state in ('success', 'failed')"
        wait_for("the run has ended", lambda: asked(database, state))
        maintained = f"select run_type, state from dag_run where dag_id = '{LEDGER}' and state in ('success', 'failed')"
        wait_for("the maintenance has ended", lambda: asked(database, maintained))
    assert asked(database, maintained) == [("asset_triggered", "success")]
    [[outcomes]] = asked(database, "select value from xcom where task_id = 'maintain' and key = 'return_value'")
    assert [(one["ledger"], one["counts"]) for one in json.loads(outcomes)] == [
        (f"file://b1{ledger}", {"maintained": 3})
    ]
    assert asked(database, state) == [("success",)]
    states = {(task, index): state for task, index, state in asked(
        database, "select task_id, map_index, state from task_instance where run_id = 'once'"
    )}  # fmt: skip
    assert states == {
        ("choose", -1): "success",
        **{(f"broker.{step}", 0): "success" for step in ("plan", "gate", "compact", "verify", "ledger")},
        ("broker.plan", 1): "success",
        **{(f"broker.{step}", 1): "skipped" for step in ("gate", "compact", "verify", "ledger")},
        ("report_partial", -1): "skipped", ("done", -1): "success",
    }  # fmt: skip
    found = asked(database, "select value from xcom where task_id = 'broker.compact' and key = 'return_value'")
    compacted = json.loads(found[0][0])
    assert (compacted["broker"], compacted["counts"]) == ("b1", {"compacted": 2})
    assert 0 < compacted["bytes_after"] < compacted["bytes_before"]
    names = "select rendered_map_index from task_instance where task_id = 'broker.compact' and map_index = 0"
    assert asked(database, names) == [("b1",)]
    for n in range(2):
        after = records_of(worth / f"orders-{n}")
        assert len(after) < len(before[n])
        newest = newest_by_key(before[n])
        assert newest_by_key(after) == {key: newest[key] for key in newest_by_key(after)}
    assert records_of(little / "orders-2") == untouched
    assert "keytail" in log_of(home, "broker.compact", 0)
    assert "orders-0" in log_of(home, "broker.compact", 0)
    assert "the gate is closed: 1 of 1 partitions are due" in log_of(home, "broker.gate", 1)


def log_of(home: Path, task: str, index: int) -> str:
    [log] = home.glob(f"logs/dag_id=*/run_id=once/task_id={task}/map_index={index}/*.log")
    return log.read_text()


def asked(database: Path, query: str, *values: str) -> list[tuple[Any, ...]]:
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=30)) as connection:
        return connection.execute(query, values).fetchall()
