"""Runs of the roll in Airflow's own environment: `.venv-airflow/bin/python rolls_in_airflow.py ASKED ANSWER`, files.

ASKED: a JSON array of rolls, each with `env` (of the process, for this one), `conf` (its Params) and `again`, task ids
that are cleared for a second go. ANSWER: of each the states of its tasks, its XComs, how often each task was tried, and
the structure of its DAG.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

DAG_ID = "keytail_rolling_maintenance"


def main() -> None:
    # dag.test() sleeps a second for each level of tasks that it finds nothing to do for.
    sleep = time.sleep
    time.sleep = lambda seconds: sleep(0.01 if seconds == 1 else seconds)
    asked, answer = map(Path, sys.argv[1:])
    answer.write_text(json.dumps([roll(one) for one in json.loads(asked.read_text())], default=str))


def roll(one: dict[str, Any]) -> dict[str, Any]:
    from airflow.dag_processing.dagbag import DagBag

    os.environ.update(one["env"])
    bag = DagBag(os.environ["AIRFLOW__CORE__DAGS_FOLDER"])
    assert not bag.import_errors, bag.import_errors
    dag = bag.dags[DAG_ID]
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
    if one.get("conf") is None:
        return made
    for task in dag.tasks:
        task.retries = min(task.retries, one.get("retries", 1))
    run = dag.test(run_conf=one["conf"])
    return {**made, **of_run(run)}


def of_run(run: Any) -> dict[str, Any]:
    from airflow.models.xcom import XComModel
    from airflow.utils.session import create_session
    from sqlalchemy import select

    with create_session() as session:
        found = session.scalars(select(XComModel).where(XComModel.run_id == run.run_id, XComModel.dag_id == DAG_ID))
        xcoms = {f"{one.task_id} {one.key}": XComModel.deserialize_value(one) for one in found}
    instances = run.get_task_instances()
    return {
        "state": str(run.state),
        "states": {one.task_id: str(one.state) for one in instances},
        "tries": {one.task_id: one.try_number for one in instances},
        "xcoms": xcoms,
    }


if __name__ == "__main__":
    main()
