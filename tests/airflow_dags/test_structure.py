"""The DAGs as Airflow reads them: their imports, tasks, params and rendered commands."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import typer.main

from keytail.main.main import app
from tests.airflow_dags.conftest import DAGS, ROOT, Ask
from tests.airflow_dags.test_commands import ODD

pytestmark = pytest.mark.xdist_group("airflow")  # all tests use one process of Airflow

SNAPSHOTS, BROKERS = "keytail_compact_snapshots", "keytail_compact_brokers"
REBUILD, LEDGER = "keytail_index_rebuild", "keytail_ledger_maintenance"
DESCRIBED_HERE = (SNAPSHOTS, BROKERS, REBUILD, LEDGER)
PAGE = (DAGS / "README.md").read_text()


@pytest.mark.long
def test_the_dags_have_the_expected_structure(ask: Ask) -> None:
    """All DAGs are read once, because that takes seconds: only that of the rolling run has an error, since there is no
    Connection, only Airflow is imported, and the DAGs have the properties that they share.
    """
    found = ask("structure", KEYTAIL_COMPACT_BROKERS_SCHEDULE="0 3 * * 6",
                KEYTAIL_LEDGER_MAINTENANCE_PARAMS='{"ledger": "/l"}',
                KEYTAIL_LEDGER_MAINTENANCE_SCHEDULE="keytail_ledger")  # fmt: skip
    assert [Path(path).name for path in found["errors"]] == ["rolling_maintenance.py"]
    assert "there is no Connection keytail_default" in next(iter(found["errors"].values()))
    assert found["forbidden"] == []
    dags = found["dags"]
    assert dags.keys() >= set(DESCRIBED_HERE)
    for dag_id, dag in dags.items():
        assert (dag["max_active_runs"], dag["catchup"]) == (1, False), dag_id
        schedules = {BROKERS: "0 3 * * 6", LEDGER: "AssetAlias(name='keytail_ledger', group='asset')"}
        assert dag["schedule"] == schedules.get(dag_id)
        assert "keytail" in dag["tags"]
        assert dag["description"]
        for task_id in dag["tasks"]:
            quoted = f"`{task_id.rpartition('.')[2]}`"
            assert quoted in dag["doc"] or dag_id not in DESCRIBED_HERE, f"{dag_id} {task_id}"
        for name, param in dag["params"].items():
            assert param["description"], f"{dag_id} {name}"
            assert param["schema"]["type"], f"{dag_id} {name}"
            assert dag_id not in DESCRIBED_HERE or f"`{name}`" in PAGE, f"{dag_id} {name}"
    for dag_id in DESCRIBED_HERE:
        assert f"`{dag_id}`" in PAGE
        tasks = dags[dag_id]["tasks"]
        assert [task_id for task_id, task in tasks.items() if not task["downstream"]] == ["done"]
        assert tasks["done"]["rule"].endswith("NONE_FAILED")
        assert tasks["report_partial"]["rule"].endswith("ALL_DONE")
        assert tasks["report_partial"]["retries"] == 0
        for task_id, task in tasks.items():
            assert task["timeout_s"], task_id
            if task_id != "report_partial":
                assert (task["retries"], task["delay_s"], task["backoff"]) == (3, 300, True), task_id
    assert in_order(dags[SNAPSHOTS]["tasks"], "plan", "gate", "compact", "verify", "ledger", "report_partial", "done")
    steps = [f"broker.{step}" for step in ("plan", "gate", "compact", "verify", "ledger")]
    assert in_order(dags[BROKERS]["tasks"], "choose", *steps, "report_partial", "done")
    assert in_order(dags[REBUILD]["tasks"], "choose", "brokers.rebuild", "brokers.verify", "report_partial", "done")
    assert dags[LEDGER]["params"]["ledger"]["value"] == "/l"
    assert in_order(dags[LEDGER]["tasks"], "maintain", "report_partial", "done")
    assert dags[SNAPSHOTS]["tasks"]["compact"]["kind"] == "KeytailSubmitOperator"
    outlets = {f"{dag_id} {task_id}" for dag_id, dag in dags.items() for task_id, task in dag["tasks"].items()
               if task["outlets"] == ["keytail_ledger"]}  # fmt: skip
    assert outlets == {f"{SNAPSHOTS} compact", f"{BROKERS} broker.compact", f"{REBUILD} brokers.rebuild"}


def in_order(tasks: dict[str, Any], *names: str) -> bool:
    return all(after in tasks[before]["downstream"] for before, after in itertools.pairwise(names))


@pytest.mark.long
def test_the_command_of_a_job_contains_its_params(ask: Ask, keytail_home: Path) -> None:
    """A Param is a single argument of the command, with any contents; templates in it are not rendered."""
    odd = [*(word for word in ODD if word), "{{ 1 + 1 }}", "{% raw %}"]
    full = {
        "log_dirs": ["/a b", "/c'd"], "config": "/x y/server.properties", "topic": odd, "topic_list": ["o r", "u"],
        "partitions": ["a-0", "b-1"], "topic_config": ["t:cleanup.policy=compact"], "force": True,
        "topic_configs": "/t c", "metadata_is_current": True,
        "topics_have_no_overrides": True, "high_watermark": "log-end", "deadline_minutes": 90, "throttle": "100m",
        "ledger": "s3a://b/l", "more_flags": ["--grouping", "kafka"], "conf": {"spark.x": "a {{ b }}", "spark.y": 3},
        "properties_file": "/p q",
    }  # fmt: skip
    confs = [json.dumps({"log_dirs": ["/a"]}), json.dumps(full)]
    least, most, _, verify = ask("render", SNAPSHOTS, "compact,verify", *confs)
    assert least["application"] == f"{keytail_home}/jobs/compact.py"
    assert least["application_args"] == ["--log-dirs", "/a", "--execute"]
    assert (least["conf"], least["properties_file"]) == ({}, "")
    assert most["application_args"] == [
        "--config", "/x y/server.properties", "--log-dirs", "/a b,/c'd", "--topic-list", "o r,u",
        *(word for text in odd for word in ("--topic", text)), "--partitions", "a-0,b-1",
        "--topic-config", "t:cleanup.policy=compact", "--topic-configs", "/t c", "--metadata-is-current",
        "--topics-have-no-overrides", "--high-watermark", "log-end", "--force", "--deadline", "90",
        "--throttle", "100m", "--ledger", "s3a://b/l", "--grouping", "kafka", "--execute",
    ]  # fmt: skip
    assert most["conf"] == {"spark.x": "a {{ b }}", "spark.y": "3"}
    assert most["properties_file"] == "/p q"
    env = most["env_vars"]
    assert env["PATH"].startswith(f"{keytail_home}/bin:")
    assert env["PYSPARK_PYTHON"] == env["PYSPARK_DRIVER_PYTHON"] == f"{keytail_home}/bin/python"
    assert Path(env["SPARK_HOME"], "bin", "spark-submit").exists()
    assert env["SPARK_CONF_DIR"] == f"{keytail_home}/conf"
    assert "--execute" not in verify["application_args"]
    assert "--force" not in verify["application_args"]


def test_a_spark_connection_becomes_flags_or_an_error(ask: Ask) -> None:
    """Airflow's Spark provider has the same fields. A field that is not passed on is an error."""
    spark = {"conn_type": "spark", "host": "spark://m", "port": 7077}
    client = ["--deploy-mode", "client"]
    wanted = [
        (spark, ["spark-submit", "--master", "spark://m:7077", *client]),
        ({**spark, "host": "m"}, ["spark-submit", "--master", "spark://m:7077", *client]),
        ({"conn_type": "spark", "host": "local[2]"}, ["spark-submit", "--master", "local[2]", *client]),
        ({"conn_type": "k8s", "host": "h", "port": 443, "extra": '{"namespace": "n", "rest-port": "6066"}'},
         ["spark-submit", "--master", "k8s://h:443", *client, "--conf", "spark.kubernetes.namespace=n"]),
        ({"conn_type": "spark", "host": "yarn", "extra": '{"queue": "q", "spark-binary": "spark3-submit"}'},
         ["spark3-submit", "--master", "yarn", *client, "--queue", "q"]),
        ({"conn_type": "spark"}, "has no host"),
        ({**spark, "extra": '{"deploy-mode": "cluster"}'}, "deploy-mode is 'cluster'; it must be client"),
        ({**spark, "extra": '{"spark-binary": "sh"}'}, "spark-binary is 'sh'"),
        ({**spark, "extra": '{"keytab": "x", "principal": "p"}'}, "has keytab, principal in its extra"),
    ]  # fmt: skip
    found = ask("submitted", *(fields for fields, _ in wanted))
    for made, (fields, words) in zip(found, wanted, strict=True):
        assert made == words if isinstance(words, list) else words in made, fields


@pytest.mark.long
def test_invalid_defaults_are_reported(ask: Ask) -> None:
    """Invalid Params in the environment are reported when the DAGs are read, with the variable, and only for the DAGs
    of that file.
    """
    found = ask(
        "structure", KEYTAIL_COMPACT_BROKERS_PARAMS="{", KEYTAIL_INDEX_REBUILD_PARAMS='{"x": 1}',
        KEYTAIL_LEDGER_MAINTENANCE_PARAMS='{"retain_days": 0}',
    )  # fmt: skip
    errors = {Path(path).name: error for path, error in found["errors"].items()}
    del errors["rolling_maintenance.py"]  # it has no Connection
    assert errors.keys() == {"compaction.py", "index_rebuild.py", "ledger_maintenance.py"}
    assert "KEYTAIL_COMPACT_BROKERS_PARAMS is not valid JSON" in errors["compaction.py"]
    assert "KEYTAIL_INDEX_REBUILD_PARAMS must be a JSON object with keys among brokers" in errors["index_rebuild.py"]
    assert "minimum" in errors["ledger_maintenance.py"]


def test_flags_exist_in_their_commands(commands: Any) -> None:
    """All flags that the DAGs pass to a command exist in it. They are read from the source of the DAGs, because Airflow
    is not available in this process.
    """
    commands_by_name = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    namespace: dict[str, Any] = {}
    source = (DAGS / "keytail_provider" / "steps.py").read_text()
    begin, end = source.index("_SELECTS ="), source.index("Command = Callable")
    exec("from __future__ import annotations\n" + source[begin:end], namespace)
    values = {
        "topic_list": ["a"], "topic": ["b"], "partitions": ["c-0"], "topic_config": ["k=v"],
        "topic_configs": "/t", "metadata_is_current": True,
        "topics_have_no_overrides": True, "high_watermark": "log-end", "force": True, "deadline_minutes": 1.5,
        "throttle": "1m", "ledger": "/l", "delta_jars": "/j", "truncate": True, "all": True, "more_flags": ["--force"],
    }  # fmt: skip
    assert {name for names in namespace["FLAGS"].values() for name in names} == values.keys()
    for command in namespace["FLAGS"]:
        known = {name for parameter in commands_by_name[command].params for name in parameter.opts}
        given = namespace["flags"](values, command)
        assert {word for word in given if word.startswith("--")} <= known, command
        assert namespace["flags"]({}, command) == namespace["flags"]({"high_watermark": "checkpoint"}, command) == []


def test_no_dag_passes_a_time_to_a_command() -> None:
    for path in DAGS.rglob("*.py"):
        text = path.read_text()
        assert not [word for word in ("--now", "logical_date", "{{ ds", "data_interval") if word in text], path


def test_the_environment_has_the_pinned_versions(airflow_bin: Path) -> None:
    lines = (ROOT / "conf" / "constraints-airflow.txt").read_text().splitlines()
    pinned = {name.lower().replace("_", "-"): version for name, _, version in (
        line.partition("==") for line in lines if not line.startswith("#")
    )}  # fmt: skip
    assert all(pinned.values())
    installed = {}
    for path in airflow_bin.parent.glob("lib/python*/site-packages/*.dist-info"):
        name, version = path.name.removesuffix(".dist-info").rsplit("-", 1)
        installed[name.lower().replace("_", "-").replace(".", "-")] = version
    known = {name.replace(".", "-"): version for name, version in pinned.items()}
    assert {k: v for k, v in installed.items() if k not in ("pip", "setuptools", "wheel")} == known
    assert not known.keys() & {"pyspark", "pyspark-client"}


def test_the_asset_of_a_ledger_names_the_host_of_its_directory(ask: Ask) -> None:
    uris = {("/a b", "b1"): "file://b1/a%20b", ("/l/", None): "file:///l", ("file:///l", "b/1"): "file://b%2F1/l",
            ("s3a://b/l", "b1"): "s3a://b/l"}  # fmt: skip
    events = [{"ledger": ledger, "broker": broker} for ledger, broker in uris]
    found = ask("ledgers", [*events, {}, {"ledger": "s3a://b/l", "broker": "b2"}])
    assert list(found.items()) == [(uri, list(of)) for of, uri in uris.items()]
