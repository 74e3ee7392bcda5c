"""What tests of the DAGs share. Airflow has an environment of its own, `.venv-airflow`, which they start processes of.

Where it is missing they are skipped with the reason, or fail if KEYTAIL_NO_SKIP=1.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.airflow_dags.rolls import Airflow, write_inventory
from tests.spark.cluster import LEAN_JAVA

ROOT = Path(__file__).parents[2]
DAGS = ROOT / "airflow_dags"
AIRFLOW = ROOT / ".venv-airflow" / "bin"


@pytest.fixture(scope="session")
def airflow_bin() -> Path:
    """Where the programs of the environment are."""
    if not (AIRFLOW / "python").exists():
        reason = f"there is no {AIRFLOW}; `make airflow-venv` builds it"
        if os.environ.get("KEYTAIL_NO_SKIP") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return AIRFLOW


@pytest.fixture(scope="session")
def keytail_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As an operator has it: the environment with keytail, with jobs/ and conf/ in it."""
    home = tmp_path_factory.mktemp("keytail-home")
    for path in (*(Path(sys.prefix) / name for name in ("bin", "lib", "pyvenv.cfg")), ROOT / "jobs", ROOT / "conf"):
        (home / path.name).symlink_to(path)
    return home


@pytest.fixture(scope="session")
def environment(
    airflow_bin: Path, tmp_path_factory: pytest.TempPathFactory, keytail_home: Path
) -> dict[str, str]:
    """Of Airflow's processes: a home of their own with a database, and nothing of Spark or an activated environment."""
    made = {k: v for k, v in os.environ.items() if not k.startswith(("PYSPARK_", "SPARK_", "VIRTUAL_", "AIRFLOW_"))}
    made |= {
        "AIRFLOW_HOME": str(tmp_path_factory.mktemp("airflow")),
        "AIRFLOW__CORE__DAGS_FOLDER": str(DAGS),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
        "AIRFLOW_CONN_SPARK_DEFAULT": json.dumps({"conn_type": "spark", "host": "local[2]"}),
        "KEYTAIL_HOME": str(keytail_home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_SUBMIT_OPTS": LEAN_JAVA,  # for the tests' time
    }
    migrated = subprocess.run(
        [str(airflow_bin / "airflow"), "db", "migrate"], env=made, capture_output=True, text=True, timeout=300,
        check=False,
    )
    assert migrated.returncode == 0, migrated.stderr[-3000:]
    home = Path(made["AIRFLOW_HOME"])
    shutil.copy(home / "airflow.db", home / "airflow.db.new")  # for who wants one that nothing has run with
    return made


Ask = Callable[..., Any]


@pytest.fixture
def ask(airflow_bin: Path, environment: dict[str, str], tmp_path: Path) -> Ask:
    """What in_airflow.py answers; what it says besides is told where it fails, and is in `ask.log` else."""

    def answer(what: str, *arguments: str, **more: str) -> Any:
        path = tmp_path / "answer.json"
        script = str(Path(__file__).with_name("in_airflow.py"))
        done = subprocess.run(
            [str(airflow_bin / "python"), script, what, *arguments], env=environment | more | {"ANSWER": str(path)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=400, check=False,
        )  # fmt: skip
        (tmp_path / "ask.log").write_text(done.stdout)
        assert done.returncode == 0, done.stdout[-5000:]
        return json.loads(path.read_text())

    return answer


@pytest.fixture(scope="session")
def commands() -> Any:
    """The module keytail_commands in this process, which has no Airflow: with exceptions that stand for Airflow's.

    That those have these names is what test_structure.py sees, in Airflow's own environment.
    """
    names = ("airflow", "airflow.sdk", "airflow.sdk.exceptions")
    before = {name: sys.modules.get(name) for name in names}
    for name in names:
        sys.modules[name] = types.ModuleType(name)
    stand_in: Any = sys.modules["airflow.sdk.exceptions"]
    stand_in.AirflowException = type("AirflowException", (Exception,), {})
    stand_in.AirflowFailException = type("AirflowFailException", (stand_in.AirflowException,), {})
    try:
        return imported("keytail_commands")
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


@pytest.fixture(scope="session")
def inventory() -> Any:
    """The module keytail_brokers, which needs Python's own library alone."""
    return imported("keytail_brokers")


def imported(name: str) -> Any:
    """A module of the DAGs' folder, which is on Airflow's path and not on ours."""
    sys.path.insert(0, str(DAGS))
    try:
        return __import__(name)
    finally:
        sys.path.remove(str(DAGS))


@pytest.fixture(scope="session")
def airflow(airflow_bin: Path, tmp_path_factory: pytest.TempPathFactory) -> Airflow:
    """Airflow with a database, for rolls."""
    made = Airflow(airflow_bin, tmp_path_factory.mktemp("airflow"))
    made.prepare()
    return made


@pytest.fixture(scope="session")
def rolls_of(airflow: Airflow, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The roll's DAG as the inventory makes it: of `three` brokers, and where there is `none`."""
    folder = tmp_path_factory.mktemp("structure")
    three = write_inventory(folder, {"a": {}, "b": {}, "c": {}})
    asked = [{"env": {"KEYTAIL_BROKERS": str(path)}} for path in (three, folder / "none.toml")]
    return dict(zip(("three", "none"), airflow.rolls(asked), strict=True))
