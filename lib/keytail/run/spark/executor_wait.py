"""Reports that a run gets no executors from its cluster, and the reason: as an error at the start if no executor can
ever start, otherwise as a warning after 30 s.

Spark itself only logs a warning every 15 s that a job has not accepted any resources. On a standalone cluster the list
of workers is requested from the master, with the message that the master's web page uses; other cluster managers are
not asked.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from keytail.console import print_message
from keytail.errors import KeytailError
from keytail.threads import inheriting

# Seconds without an executor after which a warning is printed: with free resources, executors start in a few seconds.
LONGEST_WAIT_S = 30.0
_PACE_S = 1.0  # seconds between two checks
_ANSWER_S = 10  # seconds to wait for the master's reply
_MAX_NAMED = 5  # maximum number of workers or applications that a message names


@dataclass(frozen=True)
class Worker:
    """A worker of a standalone cluster, with all its cores and memory, whether they are used or free."""

    host: str
    cores: int
    memory_mib: int

    def __str__(self) -> str:
        return f"{self.host} {_cores(self.cores)}, {self.memory_mib} MiB"


@dataclass(frozen=True)
class MasterState:
    """The state that a standalone master reports: its workers, including workers that died recently, and the other
    applications. The reply does not show which workers are alive, or how many of their resources are free."""

    workers: tuple[Worker, ...]
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class Executor:
    """The resources of one executor according to Spark's settings. `cores` is None if an executor takes all free cores
    of a worker. `cores_max` is the limit for all executors of the run together; None if there is no limit."""

    memory_mib: int
    cores: int | None = None
    cores_max: int | None = None

    def fits(self, worker: Worker) -> bool:
        return worker.cores >= (self.cores or 1) and worker.memory_mib >= self.memory_mib

    def __str__(self) -> str:
        cores = _cores(self.cores or 1)
        return f"{cores} (spark.executor.cores) and {self.memory_mib} MiB (spark.executor.memory)"


def refuse_too_large(executor: Executor, workers: Sequence[Worker], master: str) -> None:
    """Raise KeytailError if no such executor can start, because the settings contradict each other or all workers are
    too small."""
    if executor.cores is not None and executor.cores_max is not None and executor.cores > executor.cores_max:
        raise KeytailError(
            f"spark.executor.cores is {executor.cores}, but spark.cores.max is {executor.cores_max}: no executor "
            "would start",
            remedy="Set spark.executor.cores to at most spark.cores.max",
            slug="no-executor-possible",
        )
    if not workers or any(executor.fits(worker) for worker in workers):
        return
    largest = max(workers, key=lambda worker: (worker.cores, worker.memory_mib))
    raise KeytailError(
        f"no worker of {master} is large enough: an executor needs {executor}, and the workers have: "
        f"{_listed(list(map(str, workers)))}",
        remedy=f"Set spark.executor.cores to at most {largest.cores} and spark.executor.memory to at most "
        f"{largest.memory_mib}m, in spark-defaults.conf of SPARK_CONF_DIR or with --conf of spark-submit; or start "
        "larger workers",
        slug="no-executor-possible",
    )


def why_none(executor: Executor, state: MasterState | None) -> str:
    """Return the probable reason why there is no executor, and what to check. `state` is None if the cluster is not
    standalone, or its master does not answer."""
    if state is None:
        return "see the cluster manager for free resources, and the logs of executors"
    if not state.workers:
        return "the master has no worker; start one"
    if state.others:
        return (
            f"an executor needs {executor} of one worker, but other applications use the workers: "
            f"{_listed(state.others)}"
        )
    return (
        "no other application uses the workers, so the workers are dead, or executors end when they start or do not "
        "reach the driver; see the page of the master, and stderr in the work directories of the workers"
    )


def _cores(count: int) -> str:
    return "1 core" if count == 1 else f"{count} cores"


def _listed(items: Sequence[str]) -> str:
    more = len(items) - _MAX_NAMED
    return "; ".join(items[:_MAX_NAMED]) + (f"; and {more} more" if more > 0 else "")


@contextlib.contextmanager
def reported_wait(session: Any) -> Iterator[None]:
    """Print a warning if a job waits for executors while the context is open. Raises KeytailError at the beginning if
    no executor can ever start (`refuse_too_large`). Does nothing with a local master."""
    context = session.sparkContext
    if context.master.startswith("local"):
        yield
        return
    executor = _executor_of(context)
    state = _state(context)
    refuse_too_large(executor, state.workers if state else (), context.master)
    over = threading.Event()

    def report() -> None:
        why = why_none(executor, _state(context))
        print_message(
            f"keytail: no executor has started on {context.master} for {LONGEST_WAIT_S:.0f} s, so the run waits: {why}",
            "warning",
        )

    watch = partial(report_waits, lambda: _is_waiting(context), report, over)
    threading.Thread(target=inheriting(watch), name="executors", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def report_waits(is_waiting: Callable[[], bool], report: Callable[[], None], over: threading.Event) -> None:
    """Until `over` is set, call `report` once for each wait in which `is_waiting` returns True for LONGEST_WAIT_S."""
    waited_s, pace_s = 0.0, min(_PACE_S, LONGEST_WAIT_S)
    while not over.wait(pace_s):
        try:
            if not is_waiting():
                waited_s = 0.0
                continue
            before_s, waited_s = waited_s, waited_s + pace_s
            if before_s < LONGEST_WAIT_S <= waited_s:
                report()
        except Exception:  # Spark is ending; other code of the run detects this
            logging.getLogger(__name__).info("the executors cannot be counted", exc_info=True)


def _executor_of(context: Any) -> Executor:
    settings = context.getConf()
    cores, cores_max = (settings.get(name, None) for name in ("spark.executor.cores", "spark.cores.max"))
    return Executor(
        int(context._jsc.sc().executorMemory()), cores and int(cores), cores_max and int(cores_max)
    )


def _is_waiting(context: Any) -> bool:
    """Return whether there is a job, but no executor. Spark counts the driver as an executor."""
    has_jobs = bool(context.statusTracker().getActiveJobsIds())
    return has_jobs and int(context._jsc.sc().getExecutorMemoryStatus().size()) <= 1


def _state(context: Any) -> MasterState | None:
    """Return the state of the active standalone master; None for another cluster manager, or if none answers."""
    scheme, _, hosts = context.master.partition("://")
    if scheme != "spark":
        return None
    for host in hosts.split(","):  # if there are several masters, only one is active
        try:
            state = _master_state(context, f"{scheme}://{host}")
            if str(state.status().toString()) == "ALIVE":
                workers = tuple(Worker(str(one.host()), one.cores(), one.memory()) for one in state.workers())
                others = [one for one in state.activeApps() if one.id() != context.applicationId]
                return MasterState(workers, tuple(f"{one.desc().name()} ({one.id()})" for one in others))
        except Exception:
            logging.getLogger(__name__).info("the master %s does not answer", host, exc_info=True)
    return None


def _master_state(context: Any, url: str) -> Any:
    """Return the master's reply to Spark's internal message RequestMasterState. Raises an error of py4j if there is no
    reply."""
    java, rpc = context._jvm, context._jsc.sc().env().rpcEnv()
    unit = java.java.util.concurrent.TimeUnit.SECONDS
    timeout = java.org.apache.spark.rpc.RpcTimeout(java.scala.concurrent.duration.FiniteDuration(_ANSWER_S, unit), "")
    address = java.org.apache.spark.rpc.RpcAddress.fromSparkURL(url)
    uri = java.org.apache.spark.rpc.RpcEndpointAddress(address, "Master").toString()
    master = timeout.awaitResult(rpc.asyncSetupEndpointRefByURI(uri))
    messages = "org.apache.spark.deploy.DeployMessages"
    request = getattr(getattr(java.org.apache.spark.deploy, "DeployMessages$RequestMasterState$"), "MODULE$")
    answer = java.java.lang.Class.forName(f"{messages}$MasterStateResponse")
    return master.askSync(request, timeout, java.scala.reflect.ClassTag.apply(answer))
