"""The Spark session in which keytail's jobs run.

Sets in code the settings that correctness and safety need (the workers' interpreter, no speculation, worker reuse, no
module from the current directory) and, only for a session that the command line starts itself, those of a session on
one machine. Tuning belongs to conf/spark-defaults.conf; a job under spark-submit never gets a master from here.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from keytail.acting_user import as_caller, popen_as_caller
from keytail.errors import KeytailError
from keytail.limits import MAX_RECORD_VARIABLE
from keytail.run import jvm_log
from keytail.run.delta import IVY_NOISE, jars_problem
from keytail.run.ended import (
    SparkEnded,
    await_signal,
    is_of_spark,
    quiet_py4j,
    raise_if_ended,
    signal_of,
    text_of,
)
from keytail.run.isolation import LocalDirs, configured_parents, environment_of_children, safe_environment
from keytail.run.java import require_java
from keytail.run.spark_engine import SparkEngine

_log = logging.getLogger(__name__)

# For the JVM that this process started.
_local_dirs: list[LocalDirs] = []

# A task that runs twice at once would write everything twice; a worker that is not reused compiles the kernels again.
CORRECTNESS = {
    "spark.speculation": "false",
    "spark.python.worker.reuse": "true",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "10000",
    "spark.sql.execution.pythonUDF.arrow.enabled": "true",
    "spark.sql.adaptive.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # Otherwise Python puts the current directory first on sys.path: a `pyspark` there would run in every worker.
    "spark.executorEnv.PYTHONSAFEPATH": "1",
}

# The driver's JVM only distributes ids and collects small cells: with the first compiler tier and the serial collector
# it starts about 1.5 s sooner (measured on 2 cores) and leaves cores to the Python workers.
LOCAL = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    # Without this, its ports accept serialized Java objects from any local user. Spark generates a new secret for each
    # JVM, which never leaves it: on one machine nothing else needs it.
    "spark.authenticate": "true",
    "spark.log.structuredLogging.enabled": "false",
}
_LOCAL_JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
_ROWS_JAVA_OPTIONS = "-XX:+UseSerialGC"
_QUIET_LOGGING = Path(__file__).with_name("log4j2.properties")


def local_session(
    master: str = "local[*]",
    app_name: str = "keytail",
    extra: Mapping[str, str] | None = None,
    *,
    rows_in_jvm: bool = False,
) -> Any:
    """Return a session for a command line run, with `extra` settings. `master` may be any of Spark's; `local[...]`
    binds to 127.0.0.1. With `rows_in_jvm` the JVM processes records, and is configured for that and not for a quick
    start.

    The JVM keeps its files in a private directory, which is removed by `end_jvm` or at the end of this process.
    """
    require_java()
    local = master.startswith("local")
    if local:
        # Workers must use this interpreter, whatever the environment names: they import keytail and numpy.
        os.environ["PYSPARK_PYTHON"] = sys.executable
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    settings = dict(LOCAL) if local else {}
    environment, java_options = {}, [f'"-Dlog4j2.configurationFile={_QUIET_LOGGING.as_uri()}"']
    if local:
        java_options.insert(0, _ROWS_JAVA_OPTIONS if rows_in_jvm else _LOCAL_JAVA_OPTIONS)
    if not jvm_log.has_jvm():
        with as_caller():
            dirs = LocalDirs(configured_parents())
        _local_dirs.append(dirs)
        environment = safe_environment(dirs.paths)
        java_options.append(f'"-Djava.io.tmpdir={dirs.paths[0]}"')
    settings["spark.driver.extraJavaOptions"] = " ".join(java_options)
    settings |= extra or {}
    before = _children()
    withheld: list[bytes] = []
    try:
        noise = IVY_NOISE if "spark.jars.packages" in settings else None
        with environment_of_children(environment), jvm_log.without_start_noise(noise) as withheld:
            return _build(app_name, settings, master)
    except BaseException as problem:
        # An interrupted start keeps no handle of its JVM, which may then wait for ever.
        for pid in _children() - before:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if environment:
            _remove_local_dirs()
        if isinstance(problem, KeytailError):
            if (jars := jars_problem(b"".join(withheld))) is not None:
                raise jars from problem
            jvm_log.write(2, b"".join(withheld))  # not printed by a healthy start
        raise


def _children() -> set[int]:
    """Return the ids of this process's children; none if the kernel does not list them."""
    pids: set[int] = set()
    for listing in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            pids.update(map(int, listing.read_text().split()))
    return pids


def end_jvm() -> None:
    """End the JVM that this process started, whose session has been stopped or abandoned, and remove its files."""
    from pyspark import SparkContext  # noqa: PLC0415

    process = getattr(SparkContext._gateway, "proc", None)
    if process is not None:
        process.kill()
        process.wait()
        SparkContext._gateway = SparkContext._jvm = None  # the next session starts a JVM of its own
    _remove_local_dirs()


@atexit.register
@as_caller()
def _remove_local_dirs() -> None:
    while _local_dirs:
        _local_dirs.pop().remove()


def session_of_run(
    run: contextlib.ExitStack,
    master: str | None,
    *,
    submitted: bool,
    extra: Mapping[str, str] | None = None,
    rows_in_jvm: bool = False,
) -> SparkEngine:
    """Return the engine of spark-submit's session if there is one, else of one of `local_session` on `master`; the
    session is stopped with `run`.

    A cluster marks a submitted application that never creates a session as failed. If the session ends during the run,
    the resulting errors become SparkEnded, or the signal that accompanies it. Errors that a signal caused become the
    signal.
    """
    if submitted:
        engine = SparkEngine(submitted_session())
    else:
        engine = SparkEngine(local_session(master or "local[*]", extra=extra, rows_in_jvm=rows_in_jvm))
        run.callback(end_jvm)
    run.callback(_stop, engine.session)
    run.push(partial(_raise_ended, engine))  # runs before end_jvm and _stop
    return engine


def _raise_ended(engine: SparkEngine, kind: Any, problem: BaseException | None, trace: Any) -> None:
    if isinstance(problem, Exception) and (stop := signal_of(problem)) is not None:
        raise stop from None
    if isinstance(problem, SparkEnded):
        if problem.rows is None:  # otherwise it has already been awaited
            await_signal()
    elif isinstance(problem, Exception) and is_of_spark(problem) and engine.has_ended():
        await_signal()
        raise_if_ended(engine, problem)


@as_caller()
def _stop(spark: Any) -> None:
    """Stop the session. Its JVM may have ended before: the signal that stops a run also reaches spark-submit's."""
    jvm_log.silence()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pyspark warns in that case
        try:
            spark.stop()
        except Exception:
            _log.info("Spark's JVM ended before its session", exc_info=True)


def submitted_session(app_name: str = "keytail") -> Any:
    """Return the session of a job under spark-submit, which has already chosen master, memory and logging."""
    try:
        spark = _build(app_name, {}, None)
    except KeytailError:
        await_signal()
        raise
    jvm_log.redirect(spark)
    return spark


def _build(app_name: str, settings: dict[str, str], master: str | None) -> Any:
    from pyspark.sql import SparkSession  # noqa: PLC0415 (0.2 s that `plan` and `--help` do not pay)

    quiet_py4j()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(app_name)
    if master is not None:
        builder = builder.master(master)
    executors = {}
    if limit := os.environ.get(MAX_RECORD_VARIABLE):
        executors[f"spark.executorEnv.{MAX_RECORD_VARIABLE}"] = limit
    for key, value in {**settings, **executors, **CORRECTNESS}.items():
        builder = builder.config(key, value)
    try:
        return _in_a_thread(partial(_launched, builder.getOrCreate))
    except Exception as problem:
        raise KeytailError(
            f"Spark did not start: {first_line(problem)}",
            remedy="Read Spark's messages above, and check JAVA_HOME, --master and free memory",
            slug="spark-not-started",
        ) from problem


@as_caller()
def _launched(get_or_create: Callable[[], Any]) -> Any:
    """Start Spark's JVM as the user that started this process: it reads packages and writes tables."""
    import pyspark.java_gateway as gateway  # noqa: PLC0415 (0.2 s that `plan` and `--help` do not pay)

    gateway.Popen = popen_as_caller
    return get_or_create()


def _in_a_thread(make: Callable[[], Any]) -> Any:
    """Return what `make` returns, or raise what it raises. In the main thread Spark would install its own handler for
    SIGINT, and a signal would interrupt it anywhere; in another thread only the wait for it is interrupted."""
    made: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            made.put((make(), None))
        except Exception as problem:
            made.put((None, problem))

    threading.Thread(target=work, name="starts Spark", daemon=True).start()
    value, problem = made.get()
    if problem is not None:
        raise problem
    return value


def first_line(problem: BaseException) -> str:
    lines = text_of(problem).strip().splitlines()
    return lines[0] if lines else type(problem).__name__
