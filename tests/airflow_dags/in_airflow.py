"""What tests ask of Airflow, in its own environment: `.venv-airflow/bin/python in_airflow.py WHAT ...`, JSON as answer.

`structure`: errors of imports, modules that the DAG files brought in, and of each DAG its tasks, params and settings.
`render DAG TASK[,TASK] CONF...`: the templates of each task, once for each of the Params in CONF.
`test DAG CONF`: one run of a DAG in this process: states of its tasks, and their XComs.
"""

from __future__ import annotations

import copy
import datetime
import itertools
import json
import os
import sys
from typing import Any

FORBIDDEN = ("pyspark", "numba", "keytail", "numpy", "pyarrow")


def main() -> None:
    what, *arguments = sys.argv[1:]
    answer = {"structure": structure, "render": render, "test": test}[what](*arguments)
    with open(os.environ["ANSWER"], "w") as file:
        json.dump(answer, file, default=str)


def dag_bag() -> Any:
    from airflow.dag_processing.dagbag import DagBag

    return DagBag(os.environ["AIRFLOW__CORE__DAGS_FOLDER"])


def structure() -> dict[str, Any]:
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


def render(dag_id: str, task_ids: str, *confs: str) -> list[dict[str, Any]]:
    import types

    dag = dag_bag().dags[dag_id]
    names = ("application", "application_args", "conf", "env_vars", "name", "properties_file")
    made = []
    for task_id, conf in itertools.product(task_ids.split(","), confs):
        task = copy.copy(dag.get_task(task_id))
        values = {name: dag.params[name] for name in dag.params} | json.loads(conf)
        context: Any = {"params": values, "dag_run": types.SimpleNamespace(run_id="r"), "task": task}
        task.render_template_fields(context)
        made.append({name: getattr(task, name) for name in names})
    return made


def test(dag_id: str, conf: str) -> dict[str, Any]:
    dag = dag_bag().dags[dag_id]
    for task in dag.tasks:  # a retry is waited for
        task.retry_delay, task.retry_exponential_backoff = datetime.timedelta(0), 0
        task.retries = min(task.retries, 1)
    run = dag.test(run_conf=json.loads(conf))
    from airflow.models.xcom import XComModel
    from airflow.utils.session import create_session
    from sqlalchemy import select

    with create_session() as session:
        found = session.scalars(select(XComModel).where(XComModel.run_id == run.run_id, XComModel.dag_id == dag_id))
        xcoms = [
            {"task": one.task_id, "index": one.map_index, "key": one.key, "value": XComModel.deserialize_value(one)}
            for one in found
        ]
    return {
        "state": str(run.state),
        "tasks": {name_of(one): str(one.state) for one in run.get_task_instances()},
        "tries": {name_of(one): one.try_number for one in run.get_task_instances()},
        "xcoms": xcoms,
    }


def name_of(instance: Any) -> str:
    return f"{instance.task_id}[{instance.map_index}]" if instance.map_index >= 0 else instance.task_id


if __name__ == "__main__":
    main()
