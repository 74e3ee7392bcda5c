"""The Spark session in which keytail's jobs run: a session that a run starts, or the session of spark-submit.

run/spark/settings.py defines the settings of the session; run/spark/jvm.py starts and ends its JVM. The master of a job
under spark-submit is never set in this module.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from keytail.acting_user import as_caller, popen_as_caller
from keytail.errors import KeytailError
from keytail.extras import SPARK, require
from keytail.run.ended import (
    SparkEnded,
    await_signal,
    first_line,
    is_of_spark,
    raise_if_ended,
    signal_of,
    silence_py4j,
)
from keytail.run.spark.delta import IVY_NOISE, jars_problem
from keytail.run.spark.engine import SparkEngine
from keytail.run.spark.executor_wait import reported_wait
from keytail.run.spark.java import require_java
from keytail.run.spark.jvm import Jvm, end_jvm, has_jvm, has_session, jvm_of_keytail
from keytail.run.spark.jvm_log import JvmLog, write
from keytail.run.spark.settings import settings_of, settings_of_every_session

_log = logging.getLogger(__name__)
_ANSWERS_WITHIN_S = 10.0


def local_session(
    master: str = "local[*]",
    app_name: str = "keytail",
    extra: Mapping[str, str] | None = None,
    *,
    rows_in_jvm: bool = False,
) -> Any:
    """Return a session for a run on the command line, with `extra` settings. `master` is any master that Spark accepts;
    with `local[...]`, ports are bound to 127.0.0.1. `rows_in_jvm` is True if the JVM processes records: then the
    JVM is configured for throughput instead of a quick start.

    The JVM keeps its files in private directories, which are removed by `end_jvm` or at the end of this process. If
    this process already has a JVM, that JVM is used. Raises KeytailError if Spark cannot be started.
    """
    require_java()
    refuse_unreachable(master)
    local = master.startswith("local")
    if local:
        # Workers import keytail and numpy, so they must use this interpreter and not one that the environment names.
        os.environ["PYSPARK_PYTHON"] = sys.executable
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    jvm = None if has_jvm() else Jvm()
    temporary = None if jvm is None else jvm.temporary
    settings = {**settings_of(local=local, rows_in_jvm=rows_in_jvm, temporary=temporary), **(extra or {})}
    if jvm is None:
        return _build(app_name, settings, master)
    if "spark.jars.packages" in settings:
        jvm.log.withhold(IVY_NOISE)
    try:
        with jvm.starting():
            return _build(app_name, settings, master, jvm.popen)
    except KeytailError as problem:
        withheld = b"".join(jvm.log.withheld)
        if (jars := jars_problem(withheld)) is not None:
            raise jars from problem
        write(2, withheld)  # these lines are printed only if the start has failed
        raise


def refuse_unreachable(master: str) -> None:
    """Raise KeytailError if `master` is `spark://HOST:PORT,...` and none of these standalone masters accepts
    connections. Spark itself would try for a minute, and then report no reason."""
    if not master.startswith("spark://"):
        return
    problems = []
    for place in master.removeprefix("spark://").split(","):
        host, _, port = place.rpartition(":")
        try:
            # Of a port above 65535, getaddrinfo uses the low 16 bits.
            if not (port.isdecimal() and 0 < int(port) < 1 << 16):
                raise ValueError(f"{port} is not a port: ports are numbers from 1 to 65535")
            socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWERS_WITHIN_S).close()
            return
        except (OSError, ValueError) as problem:
            problems.append(f"{place} ({getattr(problem, 'strerror', None) or problem})")
    raise KeytailError(
        f"no Spark master accepts connections: {', '.join(problems)}",
        remedy="Start the master, or correct --master; the master's page, usually on port 8080, shows its URL",
        slug="spark-master-unreachable",
    )


def session_of_run(
    run: contextlib.ExitStack,
    master: str | None,
    *,
    submitted: bool,
    extra: Mapping[str, str] | None = None,
    rows_in_jvm: bool = False,
    kernels: str | None = None,
) -> SparkEngine:
    """Return the engine of spark-submit's session (`submitted`), or of a `local_session` on `master`. The session is
    stopped when the stack `run` is closed, unless other code of this process (such as a notebook) has started it.
    Raises KeytailError if Spark does not start, or no worker of a standalone cluster is large enough for an executor.

    Every submitted job must call this function: a Spark cluster marks an application without a session as failed. If
    the session ends during the run, the resulting errors are replaced by SparkEnded, or by the signal that accompanies
    the end. Errors that a signal caused are replaced by the signal. Workers compile the kernels of the command
    `kernels` before their first task.
    """
    require("Spark", SPARK)
    if submitted:
        session, log, is_own = submitted_session(), JvmLog(), True
        log.redirect(session)
    else:
        is_own = not has_session()
        session = local_session(master or "local[*]", extra=extra, rows_in_jvm=rows_in_jvm)
        jvm = jvm_of_keytail()
        log = JvmLog() if jvm is None else jvm.log
        if is_own:
            run.callback(end_jvm)
    engine = SparkEngine(session, log, kernels)
    if is_own:
        run.callback(_stop, engine)
    run.push(partial(_raise_ended, engine))  # an ExitStack calls the last callback first, before end_jvm and _stop
    run.enter_context(reported_wait(session))
    return engine


def _raise_ended(engine: SparkEngine, kind: Any, problem: BaseException | None, trace: Any) -> None:
    if isinstance(problem, Exception) and (stop := signal_of(problem)) is not None:
        raise stop from None
    if isinstance(problem, SparkEnded):
        if problem.rows is None:  # a run with rows has already waited for the signal
            await_signal()
    elif isinstance(problem, Exception) and is_of_spark(problem) and engine.has_ended():
        await_signal()
        raise_if_ended(engine, problem)


@as_caller()
def _stop(engine: SparkEngine) -> None:
    """Stop the session. The session's JVM may already have ended, because the signal that stops a run also reaches the
    JVM of spark-submit."""
    engine.log.silence()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pyspark warns if the JVM has ended
        try:
            engine.session.stop()
        except Exception:
            _log.info("Spark's JVM ended before its session", exc_info=True)


def submitted_session(app_name: str = "keytail") -> Any:
    """Return the session of a job under spark-submit, which has already set the master, the memory and the logging."""
    try:
        return _build(app_name, {}, None)
    except KeytailError:
        await_signal()
        raise


def _build(
    app_name: str, settings: dict[str, str], master: str | None, popen: Callable[..., Any] = popen_as_caller
) -> Any:
    """Return a session. `popen` starts the JVM if this process has no JVM."""
    from pyspark.sql import SparkSession  # noqa: PLC0415 (0.2 s that `plan` and `--help` do not pay)

    silence_py4j()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(app_name)
    if master is not None:
        builder = builder.master(master)
    for key, value in {**settings, **settings_of_every_session()}.items():
        builder = builder.config(key, value)
    try:
        return _in_a_thread(partial(_launched, builder.getOrCreate, popen))
    except Exception as problem:
        what = first_line(problem)
        raise KeytailError(
            f"Spark did not start: {what}",
            remedy="Set spark.authenticate.secret in spark-defaults.conf of SPARK_CONF_DIR to the secret of the "
            "cluster. If the cluster has no secret, set spark.authenticate and spark.network.crypto.enabled to false "
            "in this file (run/CLUSTER.md)"
            if "spark.authenticate.secret" in what
            else "Read Spark's messages above, and check JAVA_HOME, --master and free memory",
            slug="spark-not-started",
        ) from problem


@as_caller()
def _launched(get_or_create: Callable[[], Any], popen: Callable[..., Any]) -> Any:
    """Start Spark's JVM with the file access of the user that started this process, and return the session."""
    import pyspark.java_gateway as gateway  # noqa: PLC0415 (0.2 s that `plan` and `--help` do not pay)

    gateway.Popen = popen
    return get_or_create()


def _in_a_thread(make: Callable[[], Any]) -> Any:
    """Call `make` in another thread, and return its result or raise its error, so that a signal interrupts only the
    wait. In the main thread a signal could interrupt `make` at any point, and Spark would install its own handler for
    SIGINT."""
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
