"""Fixtures for tests of the DAGs. They start processes in Airflow's separate environment, `.venv-airflow`.

Without that environment the tests are skipped with the reason, or fail if KEYTAIL_NO_SKIP=1.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sqlite3
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.airflow_dags.rolls import write_inventory
from tests.class_archives import submit_options

ROOT = Path(__file__).parents[2]
DAGS = ROOT / "airflow_dags"
AIRFLOW = ROOT / ".venv-airflow" / "bin"


@pytest.fixture(scope="session")
def airflow_bin() -> Path:
    """Return the directory of the programs of Airflow's environment."""
    if not (AIRFLOW / "python").exists():
        reason = f"there is no {AIRFLOW}; `make airflow-venv` builds it"
        if os.environ.get("KEYTAIL_NO_SKIP") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return AIRFLOW


@pytest.fixture(scope="session")
def keytail_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder as an operator has it: the environment with keytail, and in it jobs/ and conf/."""
    home = tmp_path_factory.mktemp("keytail-home")
    for path in (*(Path(sys.prefix) / name for name in ("bin", "lib", "pyvenv.cfg")), ROOT / "jobs", ROOT / "conf"):
        (home / path.name).symlink_to(path)
    return home


@pytest.fixture(scope="session")
def environment(
    airflow_bin: Path, tmp_path_factory: pytest.TempPathFactory, keytail_home: Path
) -> dict[str, str]:
    """Return the variables for Airflow's processes: a separate home, and none of Spark or an activated environment."""
    made = {k: v for k, v in os.environ.items() if not k.startswith(("PYSPARK_", "SPARK_", "VIRTUAL_", "AIRFLOW_"))}
    return made | {
        "AIRFLOW_HOME": str(tmp_path_factory.mktemp("airflow")),
        "AIRFLOW__CORE__DAGS_FOLDER": str(DAGS),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__UNIT_TEST_MODE": "False",
        "AIRFLOW__LOGGING__LOGGING_LEVEL": "INFO",
        "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
        "AIRFLOW_CONN_SPARK_DEFAULT": json.dumps({"conn_type": "spark", "host": "local[2]"}),
        "KEYTAIL_HOME": str(keytail_home),
        "KEYTAIL_ROLL_RETRY_SECONDS": "0",
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_SUBMIT_OPTS": submit_options(),
    }


class Airflow:
    """A process that has imported Airflow and answers questions (in_airflow.py)."""

    def __init__(self, airflow_bin: Path, environment: Mapping[str, str]) -> None:
        self.home = Path(environment["AIRFLOW_HOME"])
        self.errors = self.home / "in_airflow.log"
        with self.errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [str(airflow_bin / "python"), str(Path(__file__).with_name("in_airflow.py"))], env=environment,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
            )  # fmt: skip

    def ask(self, what: str, *arguments: Any, log: Path, **environ: str) -> Any:
        """Return the answer to a question. Other output is written to the file `log`, whose end is part of the error if
        there is no answer.
        """
        path = self.home / "answer.json"
        path.unlink(missing_ok=True)
        question = {"what": what, "arguments": arguments, "env": environ, "answer": str(path), "log": str(log)}
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)
        status = self._process.stdout.readline()
        assert status, self.errors.read_text(errors="replace")[-5000:]
        assert status == "0\n", log.read_text(errors="replace")[-5000:]
        return json.loads(path.read_text())

    def rolls(self, asked: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return self.ask("rolls", str(DAGS), *asked, log=self.home / "rolls.log")

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@pytest.fixture(scope="session")
def airflow(airflow_bin: Path, environment: dict[str, str]) -> Iterator[Airflow]:
    """Start Airflow without a database: it reads DAGs but runs none."""
    made = Airflow(airflow_bin, environment)
    yield made
    made.end()


@pytest.fixture(scope="session")
def empty_database(airflow: Airflow) -> Path:
    """Return a copy of Airflow's database from before the first run of a DAG."""
    airflow.ask("migrate", log=airflow.home / "migrate.log")
    copied = airflow.home / "empty.db"
    with (  # a part of the database is in a write-ahead log
        contextlib.closing(sqlite3.connect(airflow.home / "airflow.db")) as origin,
        contextlib.closing(sqlite3.connect(copied)) as copy,
    ):
        origin.backup(copy)
    return copied


@pytest.fixture(scope="session")
def airflow_runs(airflow: Airflow, empty_database: Path) -> Airflow:
    """Start Airflow with a database."""
    return airflow


@pytest.fixture(scope="session")
def ssh(airflow_bin: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Start an SSH server, and return the variable of its Connection, `ssh_b1`."""
    keys = tmp_path_factory.mktemp("ssh") / "keys"
    command = [str(airflow_bin / "python"), str(Path(__file__).with_name("ssh_server.py")), str(keys)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None and server.stdout is not None
        port = int(server.stdout.readline())
        extra = {**json.loads(keys.read_text()), "look_for_keys": False}
        fields = {"conn_type": "ssh", "host": "127.0.0.1", "port": port, "login": "kafka", "extra": extra}
        yield {"AIRFLOW_CONN_SSH_B1": json.dumps(fields)}
        server.stdin.close()


Ask = Callable[..., Any]


@pytest.fixture
def ask(airflow: Airflow, tmp_path: Path) -> Ask:
    """Return a function that asks in_airflow.py; its other output is in `ask.log`."""
    return partial(airflow.ask, log=tmp_path / "ask.log")


@pytest.fixture
def run_dag(airflow_runs: Airflow, tmp_path: Path) -> Ask:
    """Return a function that runs a DAG with Params, and with variables as keywords; `consumed` is the id of a run
    whose asset events have started this one.
    """

    def run(dag_id: str, conf: Mapping[str, Any], consumed: str = "", **environ: str) -> Any:
        return airflow_runs.ask("test", dag_id, json.dumps(conf), consumed, log=tmp_path / "ask.log", **environ)

    return run


@pytest.fixture(scope="session")
def commands() -> Any:
    """Import the module commands in this process, without Airflow, whose exceptions are replaced by others.

    test_structure.py checks in Airflow's own environment that the exceptions have these names.
    """
    names = ("airflow", "airflow.sdk", "airflow.sdk.exceptions")
    before = {name: sys.modules.get(name) for name in names}
    for name in names:
        sys.modules[name] = types.ModuleType(name)
    stand_in: Any = sys.modules["airflow.sdk.exceptions"]
    stand_in.AirflowException = type("AirflowException", (Exception,), {})
    stand_in.AirflowFailException = type("AirflowFailException", (stand_in.AirflowException,), {})
    try:
        return imported("keytail_provider.commands")
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


@pytest.fixture(scope="session")
def inventory() -> Any:
    """Import the module brokers, which requires only Python's standard library."""
    return imported("keytail_provider.brokers")


def imported(name: str) -> Any:
    """Import a module of the provider, which is on Airflow's path but not on the path of this process."""
    sys.path.insert(0, str(DAGS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(DAGS))


@pytest.fixture(scope="session")
def rolls_of(airflow: Airflow, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the DAG of the rolling run as built from an inventory with three brokers."""
    [made] = airflow.rolls([{"env": write_inventory(tmp_path_factory.mktemp("rolls"), {"a": {}, "b": {}, "c": {}})}])
    return made
