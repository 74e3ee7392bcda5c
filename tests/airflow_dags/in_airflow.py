"""Answers questions of tests about Airflow: a process of `.venv-airflow/bin/python` that reads questions from its
input.

A question is a line of JSON: `what` (a function of `ANSWERS`), its `arguments`, `env` (variables), and the files for
`answer` (JSON) and `log`. After each answer the process prints the exit status of the process that gave it.

This process runs the DAGs, one after the other, because the first run of a process takes seconds longer. Questions that
only read DAGs are answered by forks of another process, which has imported Airflow and nothing else.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import itertools
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

FORBIDDEN = ("pyspark", "numba", "keytail", "numpy", "pyarrow")
ROLLING = "keytail_rolling_maintenance"


def main() -> None:
    ready = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import_airflow()
    here, there = Pipe()
    if os.fork() == 0:
        here.close()
        answer_in_forks(there)
    there.close()
    while line := sys.stdin.readline():
        question = json.loads(line)
        if question["what"] in IN_A_FORK:
            here.send(question)
            status = here.recv()
        else:
            status = answer(question)
        print(status, file=ready, flush=True)


def answer_in_forks(questions: Connection) -> NoReturn:
    with contextlib.suppress(EOFError):
        while True:
            question = questions.recv()
            child = os.fork()
            if child == 0:
                os._exit(answer(question))
            questions.send(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    os._exit(0)


def import_airflow() -> None:
    from airflow import settings
    from airflow.api_fastapi.execution_api import routes  # noqa: F401
    from airflow.api_fastapi.execution_api.app import InProcessExecutionAPI  # noqa: F401
    from airflow.dag_processing.dagbag import DagBag  # noqa: F401
    from airflow.models.xcom import XComModel  # noqa: F401
    from airflow.sdk import dag  # noqa: F401
    from airflow.sdk.execution_time.supervisor import run_task_in_process  # noqa: F401
    from airflow.serialization.serialized_objects import DagSerialization  # noqa: F401

    assert settings.engine is not None


def answer(question: dict[str, Any]) -> int:
    """Answer a question, and return the exit status. Variables and standard files are restored afterwards."""
    variables, own = dict(os.environ), [os.dup(number) for number in range(3)]
    try:
        with open(question["log"], "wb") as log, open(os.devnull, "rb") as nothing:
            for number, file in enumerate((nothing, log, log)):
                os.dup2(file.fileno(), number)
        os.environ.update(question["env"])
        result = ANSWERS[question["what"]](*question["arguments"])
        with open(question["answer"], "w") as file:
            json.dump(result, file, default=str)
        return 0
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.environ.clear()
        os.environ.update(variables)
        for number, before in enumerate(own):
            os.dup2(before, number)
            os.close(before)


def migrate() -> None:
    """Create a database with Airflow's tables."""
    from airflow.utils import db

    db.upgradedb()


def dag_bag(path: str | None = None) -> Any:
    """Return all DAGs, or those of one file."""
    from airflow.dag_processing.dagbag import DagBag

    return DagBag(path or os.environ["AIRFLOW__CORE__DAGS_FOLDER"])


def structure() -> dict[str, Any]:
    """Return import errors, the modules that the DAG files imported, and the tasks, params and settings of each DAG."""
    bag = dag_bag()
    loaded = {name.partition(".")[0] for name in sys.modules}
    return {
        "errors": bag.import_errors,
        "forbidden": sorted(loaded & set(FORBIDDEN)),
        "dags": {
            dag_id: {
                "tasks": {
                    task.task_id: {
                        "downstream": sorted(task.downstream_task_ids),
                        "rule": str(task.trigger_rule),
                        "retries": task.retries,
                        "delay_s": task.retry_delay.total_seconds(),
                        "backoff": bool(task.retry_exponential_backoff),
                        "timeout_s": task.execution_timeout and task.execution_timeout.total_seconds(),
                        "kind": task.task_type,
                        "outlets": [one.name for one in task.outlets],
                    }
                    for task in dag.tasks
                },
                "params": {name: dag.params.get_param(name).dump() for name in dag.params},
                "doc": dag.doc_md,
                "tags": sorted(dag.tags),
                "max_active_runs": dag.max_active_runs,
                "catchup": dag.catchup,
                "schedule": dag.schedule,
                "description": dag.description,
            }
            for dag_id, dag in bag.dags.items()
        },
    }


def ledgers(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the ledgers of events by the URIs of their assets."""
    sys.path.insert(0, os.environ["AIRFLOW__CORE__DAGS_FOLDER"])
    from keytail_provider import assets

    return assets.written(events)


def over_ssh(odd: list[str], much: list[str], loop: str, folder: str) -> dict[str, Any]:
    """Return results of commands over the Connection ssh_b1."""
    sys.path.insert(0, os.environ["AIRFLOW__CORE__DAGS_FOLDER"])
    import paramiko
    from airflow.sdk.exceptions import AirflowNotFoundException

    from keytail_provider.brokers import Host
    from keytail_provider.commands import run

    host, lines = Host(ssh_conn_id="ssh_b1"), list[str]()
    made: dict[str, Any] = {}
    for name, on in (("odd", host), ("behind a prefix", Host(("sh", "-c"), "ssh_b1"))):
        ended = run(odd, on)
        made[name] = [ended.exit_status, ended.rows]
    ended = run(much, host, on_line=lines.append)
    made["much"] = [ended.exit_status, len(ended.rows), len(lines) - 1]
    ended = run(["sh", "-c", "echo out; echo err >&2; exit 5"], host, parse_rows=False)
    made["without rows"] = [ended.exit_status, "|".join(sorted(ended.last_lines.splitlines()))]
    ended = run(["sh", "-c", loop, f"{folder}/stopped"], host, 8)
    made["timeout"] = [ended.exit_status, ended.last_lines.splitlines()]
    ended = run(["true"], Host(ssh_conn_id="ssh_unknown"))
    made["wrong key"] = [ended.exit_status, ended.last_lines]
    before = threading.enumerate()
    ended = run(["refused"], host)
    more: list[Any] = [one for one in threading.enumerate() if one not in before]
    left = [str(one) for one in more if isinstance(one, paramiko.Transport) and one.is_active()]
    made["not started"] = [ended.exit_status, ended.last_lines, left]
    try:
        run(["true"], Host(ssh_conn_id="ssh_none"))
    except AirflowNotFoundException as problem:
        made["no Connection"] = str(problem)
    begun, child = os.pipe(), os.fork()
    if child == 0:
        run(["sh", "-c", loop, f"{folder}/killed"], host, 60, lambda line: os.write(begun[1], f"{line}\n".encode()))
        os._exit(1)
    printed = b""
    while not printed.endswith(b"\nup\n"):
        printed += os.read(begun[0], 1 << 16)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while not (path := Path(folder, "killed")).exists() or not path.read_text():
        time.sleep(0.02)
    made["killed"] = path.read_text()
    return made


def submitted(*connections: dict[str, Any]) -> list[Any]:
    """Return, for each Connection, the words of spark-submit, or the error."""
    sys.path.insert(0, os.environ["AIRFLOW__CORE__DAGS_FOLDER"])
    from airflow.sdk import Connection
    from airflow.sdk.exceptions import AirflowFailException

    from keytail_provider.operators.keytail_submit import submit_words

    made: list[Any] = []
    for fields in connections:
        try:
            made.append(submit_words("s", Connection(conn_id="s", **fields)))
        except AirflowFailException as problem:
            made.append(str(problem))
    return made


def render(dag_id: str, task_ids: str, *confs: str) -> list[dict[str, Any]]:
    """Return the rendered templates of each task, once for each set of Params in `confs`."""
    import types

    dag = dag_bag().dags[dag_id]
    names = ("application", "application_args", "conf", "env_vars", "submit_name", "properties_file")
    made = []
    for task_id, conf in itertools.product(task_ids.split(","), confs):
        task = copy.copy(dag.get_task(task_id))
        values = {name: dag.params[name] for name in dag.params} | json.loads(conf)
        context: Any = {"params": values, "dag_run": types.SimpleNamespace(run_id="r"), "task": task}
        task.render_template_fields(context)
        made.append({name: getattr(task, name) for name in names})
    return made


def test(dag_id: str, conf: str, consumed: str = "") -> dict[str, Any]:
    """Run a DAG once, and return the states, XComs and asset events of its tasks. `consumed` is the id of a run whose
    asset events have started this one."""
    dag = dag_bag().dags[dag_id]
    for task in dag.tasks:  # the run waits for retries
        task.retry_delay, task.retry_exponential_backoff = datetime.timedelta(0), 0
        task.retries = min(task.retries, 1)
    with consuming(consumed):
        run = run_of(dag, json.loads(conf))
    return {
        "state": str(run.state),
        "run_id": run.run_id,
        "events": [
            {"task": one.source_task_id, "index": one.source_map_index, "uri": one.uri, "extra": one.extra}
            for one in events_of(run.run_id)
        ],
        "tasks": {name_of(one): str(one.state) for one in run.get_task_instances()},
        "tries": {name_of(one): one.try_number for one in run.get_task_instances()},
        "xcoms": [
            {"task": one.task_id, "index": one.map_index, "key": one.key, "value": value}
            for one, value in xcoms_of(run)
        ],
    }


def rolls(folder: str, *asked: dict[str, Any]) -> list[dict[str, Any]]:
    """Return, for each rolling run, the structure of its DAG and, if it has `conf` (its Params), the result of a run.
    Each rolling run also has `env` (variables) and `retries`, the maximum for a task.
    """
    return [roll(f"{folder}/rolling_maintenance.py", **one) for one in asked]


def roll(path: str, env: dict[str, str], conf: Any = None, retries: int = 1) -> dict[str, Any]:
    os.environ.update(env)
    bag = dag_bag(path)
    assert not bag.import_errors, bag.import_errors
    dag = bag.dags[ROLLING]
    tasks = {
        task.task_id: {
            "upstream": sorted(task.upstream_task_ids),
            "rule": task.trigger_rule.value,
            "setup": task.is_setup,
            "teardown": task.is_teardown,
            "fails_run": task.on_failure_fail_dagrun,
            "retries": task.retries,
        }
        for task in dag.tasks
    }
    made: dict[str, Any] = {
        "tasks": tasks,
        "params": {name: dag.params.get_param(name).dump() for name in dag.params},
        "max_active_runs": dag.max_active_runs,
        "catchup": dag.catchup,
        "doc": dag.doc_md,
    }
    if conf is None:
        return made
    for task in dag.tasks:
        task.retries = min(task.retries, retries)
    run = run_of(dag, conf)
    instances = run.get_task_instances()
    return {
        **made,
        "state": str(run.state),
        "states": {one.task_id: str(one.state) for one in instances},
        "tries": {one.task_id: one.try_number for one in instances},
        "xcoms": {f"{one.task_id} {one.key}": value for one, value in xcoms_of(run)},
    }


def run_of(dag: Any, conf: Any) -> Any:
    with without_delays(dag):
        return dag.test(run_conf=conf)


@contextlib.contextmanager
def without_delays(dag: Any) -> Iterator[None]:
    """Avoid three delays: dag.test() reads all DAG files again, and sleeps a second for each level of tasks without
    anything to do; each copy of a Param checks its JSON schema against the meta-schema.
    """
    from unittest.mock import patch

    from airflow.dag_processing import dagbag
    from jsonschema import Draft202012Validator

    def only_this_file(dag_folder: Any, bundle_path: Any, bundle_name: str) -> Any:
        return real_bag(dag_folder=dag.fileloc, bundle_path=bundle_path, bundle_name=bundle_name)

    def sleep_less(seconds: float) -> None:
        real_sleep(0.01 if seconds == 1 else seconds)

    def check_once(schema: Any, **more: Any) -> None:
        key = json.dumps(schema, sort_keys=True)
        if key not in checked:
            real_check(schema, **more)
            checked.add(key)

    real_bag, real_sleep, real_check = dagbag.BundleDagBag, time.sleep, Draft202012Validator.check_schema
    checked: set[str] = set()
    with (
        patch.object(dagbag, "BundleDagBag", only_this_file),
        patch.object(time, "sleep", sleep_less),
        patch.object(Draft202012Validator, "check_schema", check_once),
    ):
        yield


@contextlib.contextmanager
def consuming(run_id: str) -> Iterator[None]:
    """Make runs that were started by the asset events of another run, which dag.test() cannot do."""
    from unittest.mock import patch

    from airflow.models import dagrun

    def create(**given: Any) -> Any:
        made = real_create(**given)
        made.consumed_asset_events = [given["session"].merge(one) for one in events_of(run_id)]
        given["session"].commit()
        return made

    real_create = dagrun.get_or_create_dagrun
    with patch.object(dagrun, "get_or_create_dagrun", create):
        yield


def events_of(run_id: str) -> list[Any]:
    from airflow.models.asset import AssetEvent
    from airflow.utils.session import create_session
    from sqlalchemy import select
    from sqlalchemy.orm import joinedload

    with create_session() as session:
        query = select(AssetEvent).options(joinedload(AssetEvent.asset)).where(AssetEvent.source_run_id == run_id)
        return list(session.scalars(query.order_by(AssetEvent.source_task_id, AssetEvent.source_map_index)))


def xcoms_of(run: Any) -> list[tuple[Any, Any]]:
    from airflow.models.xcom import XComModel
    from airflow.utils.session import create_session
    from sqlalchemy import select

    with create_session() as session:
        found = session.scalars(
            select(XComModel).where(XComModel.run_id == run.run_id, XComModel.dag_id == run.dag_id)
        ).all()
        return [(one, XComModel.deserialize_value(one)) for one in found]


def name_of(instance: Any) -> str:
    return f"{instance.task_id}[{instance.map_index}]" if instance.map_index >= 0 else instance.task_id


def trigger(dag_id: str, run_id: str, conf: str, database: str) -> None:
    """Trigger a run as `airflow dags trigger` does, in a database that other processes use."""
    from airflow import settings
    from airflow.api.common.trigger_dag import trigger_dag
    from airflow.utils.types import DagRunTriggeredByType

    settings.dispose_orm()
    settings.SQL_ALCHEMY_CONN = f"sqlite:///{database}"
    settings.configure_orm()
    trigger_dag(dag_id=dag_id, triggered_by=DagRunTriggeredByType.CLI, run_id=run_id, conf=json.loads(conf))


IN_A_FORK = ("structure", "ledgers", "over_ssh", "submitted", "render", "trigger")
ANSWERS: dict[str, Any] = {
    one.__name__: one for one in (migrate, structure, ledgers, over_ssh, submitted, render, test, rolls, trigger)
}


if __name__ == "__main__":
    main()
