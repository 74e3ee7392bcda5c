"""One run by a real Airflow: its scheduler, its reader of DAGs and its API server, each a process of its own.

What `dag.test()` leaves out is here: DAGs go through the database, tasks are processes that speak to the API server,
and their XComs come back from there. All of it listens on the loopback address alone and is ended by process id.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.airflow_dags.test_runs import ORDERS, inventory, small
from tests.airflow_dags.test_structure import BROKERS
from tests.app.log_dirs import records_of

LONGEST_S = 180.0


@contextlib.contextmanager
def running(commands: dict[str, list[str]], env: dict[str, str], logs: Path) -> Iterator[dict[str, Any]]:
    """These programs, each in a session of its own, until the end of the block."""
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
                os.killpg(process.pid, signal.SIGKILL)  # what it started
            process.wait()


def test_a_run_by_the_scheduler(
    airflow_bin: Path, environment: dict[str, str], tmp_path: Path, keytail_home: Path
) -> None:
    log_dir = small(tmp_path / "logs", 0, 1)
    before = len(records_of(log_dir / "orders-0"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    home = tmp_path / "airflow"
    home.mkdir()
    database = home / "airflow.db"
    shutil.copy(Path(environment["AIRFLOW_HOME"]) / "airflow.db.new", database)
    path = inventory(tmp_path / "b.toml", keytail_home, b1={"log_dirs": [str(log_dir)], "on_host": ["sh", "-c"]})
    env = environment | {
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__EXECUTOR": "LocalExecutor",
        "AIRFLOW__CORE__PARALLELISM": "2",
        "AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": "False",
        "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"http://127.0.0.1:{port}/execution/",
        "AIRFLOW__API_AUTH__JWT_SECRET": secrets.token_urlsafe(48),
        "AIRFLOW__SCHEDULER__SCHEDULER_IDLE_SLEEP_TIME": "0.2",
        "KEYTAIL_BROKERS": path,
    }
    airflow = str(airflow_bin / "airflow")
    programs = {
        "api-server": [airflow, "api-server", "--apps", "execution", "-w", "1", "-H", "127.0.0.1", "-p", str(port)],
        "dag-processor": [airflow, "dag-processor"],
        "scheduler": [airflow, "scheduler", "--skip-serve-logs"],
    }
    conf = {"topic_config": ORDERS, "topics_have_no_overrides": True, "least_bytes": 1}
    with running(programs, env, tmp_path) as processes:

        def wait_for(what: str, true: Callable[[], bool]) -> None:
            until = time.monotonic() + LONGEST_S
            while not true():
                ended = [name for name, process in processes.items() if process.poll() is not None]
                if ended or time.monotonic() > until:
                    logs = "\n".join(log.read_text()[-1500:] for log in tmp_path.glob("*.log"))
                    raise AssertionError(f"{what}: not so; ended are {ended}\n{logs}")
                time.sleep(0.3)

        wait_for("the DAG is read", lambda: asked(database, "select 1 from serialized_dag where dag_id = ?", BROKERS))
        trigger = [airflow, "dags", "trigger", BROKERS, "--run-id", "once", "--conf", json.dumps(conf)]
        subprocess.run(trigger, env=env, check=True, capture_output=True, timeout=120)
        state = "select state from dag_run where run_id = 'once' and state in ('success', 'failed')"
        wait_for("the run has ended", lambda: asked(database, state))
    assert asked(database, state) == [("success",)]
    states = dict(asked(database, "select task_id, state from task_instance where run_id = 'once'"))
    assert states == {
        "choose": "success", **{f"broker.{step}": "success" for step in ("plan", "gate", "compact", "verify")},
        "broker.ledger": "skipped", "tell_partial": "skipped", "done": "success",
    }  # fmt: skip
    found = asked(database, "select value from xcom where task_id = 'broker.compact' and key = 'return_value'")
    assert '"compacted"' in str(found)
    names = "select rendered_map_index from task_instance where task_id = 'broker.compact'"
    assert asked(database, names) == [("b1",)]
    assert len(records_of(log_dir / "orders-0")) < before
    [log] = home.glob("logs/dag_id=*/run_id=once/task_id=broker.compact/**/*.log")
    assert "keytail" in log.read_text()
    assert "orders-0" in log.read_text()


def asked(database: Path, query: str, *values: str) -> list[tuple[Any, ...]]:
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=30)) as connection:
        return connection.execute(query, values).fetchall()
