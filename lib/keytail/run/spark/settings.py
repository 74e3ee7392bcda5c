"""Defines the settings of Spark sessions that are set in code: for correctness and safety, and for one machine.

Other settings that only affect speed are in conf/spark-defaults.conf.
"""

from __future__ import annotations

import os
from pathlib import Path

from keytail.limits import MAX_RECORD_VARIABLE

# With speculation, a task could run twice at the same time and write its files twice. Without the reuse of workers, a
# new worker would have to load the kernels for each task.
CORRECTNESS = {
    "spark.speculation": "false",
    "spark.python.worker.reuse": "true",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "10000",
    "spark.sql.execution.pythonUDF.arrow.enabled": "true",
    "spark.sql.adaptive.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # Without this variable, the current directory is first on sys.path, and a `pyspark` in it runs in every worker.
    "spark.executorEnv.PYTHONSAFEPATH": "1",
}

_LOCAL = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    # Without authentication, Spark's ports accept serialized Java objects from any local user. Spark generates a secret
    # for each JVM, which never leaves the JVM: on one machine no other process needs the secret.
    "spark.authenticate": "true",
    "spark.log.structuredLogging.enabled": "false",
}
# The driver's JVM processes no records: it sends parameters of tasks to workers and collects small results. With the
# first compiler tier and the serial collector this JVM starts about 1.5 s sooner (measured on 2 cores), and leaves
# cores to the Python workers.
_LOCAL_JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
_ROWS_JAVA_OPTIONS = "-XX:+UseSerialGC"
_QUIET_LOGGING = Path(__file__).parents[1] / "log4j2.properties"


def settings_of(*, local: bool, rows_in_jvm: bool, temporary: str | None) -> dict[str, str]:
    """Return the settings of a session that keytail starts without spark-submit. CORRECTNESS is not included.

    `local` is True if all processes are on this machine. `rows_in_jvm` is True if the JVM processes records: then the
    JVM is configured for throughput instead of a quick start. `temporary` is the JVM's directory for temporary files;
    None if the JVM already exists.
    """
    java_options = [f'"-Dlog4j2.configurationFile={_QUIET_LOGGING.as_uri()}"']
    if local:
        java_options.insert(0, _ROWS_JAVA_OPTIONS if rows_in_jvm else _LOCAL_JAVA_OPTIONS)
    if temporary is not None:
        java_options.append(f'"-Djava.io.tmpdir={temporary}"')
    return {**(_LOCAL if local else {}), "spark.driver.extraJavaOptions": " ".join(java_options)}


def settings_of_every_session() -> dict[str, str]:
    """Return CORRECTNESS, and settings that pass environment variables of this process to executors."""
    limit = os.environ.get(MAX_RECORD_VARIABLE)
    return {**({f"spark.executorEnv.{MAX_RECORD_VARIABLE}": limit} if limit else {}), **CORRECTNESS}
