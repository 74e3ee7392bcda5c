"""Runs a keytail job by spark-submit, with its rows in the XCom and its exit status preserved."""

from __future__ import annotations

import json
import os
import re
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from airflow.sdk import BaseHook, BaseOperator
from airflow.sdk.exceptions import AirflowFailException, AirflowNotFoundException

from keytail_provider.assets import add_event
from keytail_provider.commands import outcome
from keytail_provider.steps import flags, run_with_id

_BINARIES = ("spark-submit", "spark2-submit", "spark3-submit")
# Keys of a Spark Connection that apply only in deploy mode `cluster`.
_ONLY_IN_A_CLUSTER = ("rest-scheme", "rest-port", "yarn_resourcemanager_webapp_address")
_SECRET = re.compile("secret|passw|token|access.?key", re.IGNORECASE)


class KeytailSubmitOperator(BaseOperator):
    """Submits one of `jobs/*.py` in client mode. The task also succeeds if only a part of the partitions was done.

    spark-submit writes rows and all other output to one stream. Therefore, the job writes its rows to a file on this
    host, which is the driver's in client mode. These rows and the status decide the result of the task, as for any
    command (commands.outcome). Arguments, settings and environment are derived from Params when the task runs;
    the text of a Param is neither split nor evaluated.
    """

    template_fields: Sequence[str] = (
        "application", "application_args", "conf", "env_vars", "properties_file", "submit_name",
    )  # fmt: skip

    def __init__(
        self, *, command: str, job: str, execute_it: bool = False, spark_conn_id: str = "spark_default", **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.command = command
        self.execute_it = execute_it
        self.spark_conn_id = spark_conn_id
        self.application = "{{ params.keytail_home }}/jobs/" + job
        self.application_args: Any = self._arguments  # a callable is a template, too
        self.conf: Any = _conf
        self.env_vars: Any = _environment
        self.properties_file = "{{ params.properties_file or '' }}"
        self.submit_name = "keytail " + command + " {{ dag_run.run_id }}"

    def _arguments(self, context: Mapping[str, Any], jinja_env: Any) -> list[str]:
        values = context["params"]
        words = [*place(values), *flags(values, self.command)]
        return [*words, "--execute"] if self.execute_it else words

    def execute(self, context: Any) -> dict[str, Any]:
        try:
            connection = BaseHook.get_connection(self.spark_conn_id)
        except AirflowNotFoundException:
            raise AirflowNotFoundException(  # retried: its secrets backend may not have answered
                f"there is no Connection {self.spark_conn_id}, or it cannot be read now: add one of type spark, whose "
                "host is the master"
            ) from None
        binary, *on_master = submit_words(self.spark_conn_id, connection)
        words = ["env", *(f"{name}={value}" for name, value in self.env_vars.items()), binary, *on_master]
        words += [word for name, value in self.conf.items() for word in ("--conf", f"{name}={value}")]
        words += ["--properties-file", self.properties_file] if self.properties_file else []
        words += ["--name", self.submit_name, self.application, *self.application_args]
        secrets = [value for name, value in self.conf.items() if value and _SECRET.search(name)]
        # The line with the command has them as shlex.quote writes them.
        secrets += [quoted for value in secrets if (quoted := shlex.quote(f" {value}")[2:-1]) != value]

        def masked(text: str) -> str:
            for secret in secrets:
                text = text.replace(secret, "***")
            return text

        with tempfile.TemporaryDirectory(prefix="keytail-") as folder:
            path = Path(folder, "rows.json")
            ended, run_id = run_with_id([*words, "--rows-file", str(path)], on_line=lambda line: print(masked(line)),
                                        parse_rows=False)  # fmt: skip
            ended = replace(ended, last_lines=masked(ended.last_lines))
            rows = json.loads(path.read_text()) if path.exists() else None
        if rows is None and ended.exit_status in (0, 3):
            raise AirflowFailException(
                "the job wrote no rows on this host: its driver ran elsewhere (deploy-mode cluster), or jobs/ is of an "
                "older keytail. Submit in client mode, with the jobs/ of this keytail"
            )
        made = {"step": self.command, "run_id": run_id, **outcome(replace(ended, rows=rows or []))}
        if self.outlets:
            add_event(context["params"]["ledger"], None, self.command, run_id)
        return made


def submit_words(conn_id: str, connection: Any) -> list[str]:
    """Return the program and the flags of a Connection of type `spark`, whose fields are those of Airflow's Spark
    provider. Raises AirflowFailException for a field that is not passed on, and without a master.
    """
    where = f"the Connection {conn_id}"
    host, port, extra = connection.host or "", connection.port, connection.extra_dejson
    if not host:
        raise AirflowFailException(f"{where} has no host: it must be the master, such as spark://master or local[4]")
    # A Connection that was given as a URI, such as k8s://host:443, has the scheme of the master as its type.
    is_whole = connection.conn_type == "spark" and ("://" in host or not port)
    master = host if is_whole else f"{connection.conn_type}://{host}"
    given = {name: value for name, value in extra.items() if value and name not in _ONLY_IN_A_CLUSTER}
    binary, mode = given.pop("spark-binary", _BINARIES[0]), given.pop("deploy-mode", "client")
    if binary not in _BINARIES:
        raise AirflowFailException(f"{where}: spark-binary is {binary!r}; it must be one of {', '.join(_BINARIES)}")
    if mode != "client":
        raise AirflowFailException(f"{where}: deploy-mode is {mode!r}; it must be client: the driver reads the logs")
    words = [binary, "--master", f"{master}:{port}" if port else master, "--deploy-mode", "client"]
    if queue := given.pop("queue", None):
        words += ["--queue", queue]
    if namespace := given.pop("namespace", None):
        words += ["--conf", f"spark.kubernetes.namespace={namespace}"]
    if given:
        raise AirflowFailException(
            f"{where} has {', '.join(sorted(given))} in its extra, which is not passed to spark-submit: remove it, and "
            "put settings of Spark, such as spark.kerberos.keytab, into the Param conf or the properties file"
        )
    return words


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
    """Return the environment variables for spark-submit, as if the environment with keytail were activated."""
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
