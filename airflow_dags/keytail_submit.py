"""Runs a keytail job by spark-submit, with its rows in the XCom and its exit status preserved."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk.exceptions import AirflowException, AirflowFailException

from keytail_assets import add_event
from keytail_commands import Ended, outcome
from keytail_steps import RUN_ID, flags


class KeytailSubmitOperator(SparkSubmitOperator):
    """A SparkSubmitOperator for `jobs/*.py`, whose task also succeeds if only a part of the partitions was done.

    spark-submit writes rows and all other output to one stream, and its hook treats every status but 0 as a failure.
    Therefore, the job writes its rows to a file on this host, which is the driver's in client mode. These rows and the
    status decide the result of the task, as for any command (keytail_commands.outcome). Arguments, settings and
    environment are derived from Params when the task runs; the text of a Param is neither split nor evaluated.
    """

    def __init__(self, *, command: str, job: str, execute_it: bool = False, **kwargs: Any) -> None:
        self.command = command
        self.job = job
        self.execute_it = execute_it
        self.run_ids: list[str] = []
        super().__init__(
            application="{{ params.keytail_home }}/jobs/" + job,
            application_args=self._arguments,  # type: ignore[arg-type] (a callable is a template too)
            conf=_conf,  # type: ignore[arg-type]
            env_vars=_environment,  # type: ignore[arg-type]
            properties_file="{{ params.properties_file or '' }}",
            name="keytail " + command + " {{ dag_run.run_id }}",
            **kwargs,
        )

    def _arguments(self, context: Mapping[str, Any], jinja_env: Any) -> list[str]:
        values = context["params"]
        words = [*place(values), *flags(values, self.command)]
        return [*words, "--execute"] if self.execute_it else words

    def execute(self, context: Any) -> dict[str, Any]:  # type: ignore[override]
        with tempfile.TemporaryDirectory(prefix="keytail-") as folder:
            path = os.path.join(folder, "rows.json")
            self.application_args = [*(self.application_args or ()), "--rows-file", path]
            status, words = 0, ""
            try:
                super().execute(context)
            except AirflowException as problem:
                status, words = _status(self._hook), "\n".join(str(problem).splitlines()[-20:])
                if not status:
                    raise
            rows = json.loads(Path(path).read_text()) if os.path.exists(path) else None
        if rows is None and status in (0, 3):
            raise AirflowFailException(
                "the job wrote no rows on this host: its driver ran elsewhere (deploy-mode cluster), or jobs/ is of an "
                "older keytail. Submit in client mode, with the jobs/ of this keytail"
            )
        run_id = self.run_ids[-1] if self.run_ids else None
        made = {"step": self.command, "run_id": run_id} | outcome(Ended(status, rows or [], words))
        if self.outlets:
            add_event(context["params"]["ledger"], None, self.command, run_id)
        return made

    def _get_hook(self) -> Any:
        hook = super()._get_hook()
        process_log = hook._process_spark_submit_log
        hook._process_spark_submit_log = lambda lines: process_log(self._storing_run_ids(lines))
        return hook

    def _storing_run_ids(self, lines: Iterable[str]) -> Iterator[str]:
        """Yield the lines, and store the run's id in the ledger, which the job prints in its log."""
        for line in lines:
            self.run_ids += RUN_ID.findall(line)
            yield line


def place(values: Mapping[str, Any]) -> list[str]:
    """Return the flags for the log dirs and the broker's settings, from Params."""
    words: list[str] = []
    if values.get("config"):
        words += ["--config", values["config"]]
    if values.get("log_dirs"):
        words += ["--log-dirs", ",".join(values["log_dirs"])]
    if not words:
        raise AirflowFailException("the Params have neither log dirs nor a server.properties: give log_dirs or config")
    return words


def _conf(context: Mapping[str, Any], jinja_env: Any) -> dict[str, str]:
    return {name: str(value) for name, value in context["params"]["conf"].items()}


def _environment(context: Mapping[str, Any], jinja_env: Any) -> dict[str, str]:
    """Return the environment variables for spark-submit, as if the environment with keytail were activated. Airflow's
    own environment also has a Spark, but without keytail and without spark-submit."""
    home = context["params"]["keytail_home"]
    made = {
        "PATH": os.pathsep.join([f"{home}/bin", os.environ.get("PATH", os.defpath)]),
        "PYSPARK_PYTHON": f"{home}/bin/python",
        "PYSPARK_DRIVER_PYTHON": f"{home}/bin/python",
        "SPARK_CONF_DIR": f"{home}/conf",
    }
    spark = context["params"].get("spark_home") or next(
        (str(found) for found in Path(home).glob("lib/python3*/site-packages/pyspark")), None
    )
    return made if spark is None else {**made, "SPARK_HOME": spark}


def _status(hook: Any) -> int:
    """Return the status of spark-submit, which is the job's in client mode; 0 if spark-submit was not started."""
    process = getattr(hook, "_submit_sp", None)
    return 0 if process is None else process.wait()
