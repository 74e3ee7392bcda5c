"""Verifies many partitions, in tasks of Spark or of Processes, or, for little data, in this process.

Reads only. This module schedules the tasks; verify/task.py inspects a partition.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from keytail.log.fs import LOCAL
from keytail.run.batching import in_bundles
from keytail.run.hosts import SeenLogs, refuse_other_logs
from keytail.run.session import concurrent_tasks, end_jobs
from keytail.run.tasks import Outcome, attempt_one, run_bundle
from keytail.run.watching import telling
from keytail.verify.scope import NO_CLAIMS, Claims
from keytail.verify.task import VerifyReport, verify_partition

BUNDLE_BYTES = 256 << 20
BUNDLE_PARTITIONS = 64


@dataclass(frozen=True)
class VerifyTask:
    """One partition directory, and the offsets that its log dir's checkpoints have for it.

    `live`: a broker may be writing to it, so its tail is not checked. Otherwise `seen` describes the files that the
    driver saw there: a task on a host that sees other files refuses (None: not compared).
    """

    path: str
    size_bytes: int
    claims: Claims = NO_CLAIMS
    live: bool = False
    seen: SeenLogs | None = None


Heard = Callable[[VerifyTask, Outcome[VerifyReport]], None]


def verify_on_worker(task: VerifyTask, attempt: str) -> VerifyReport:
    if task.seen is not None and not task.live:
        refuse_other_logs(LOCAL, task.path, task.seen)
    with telling(task.path, attempt, "verify"):
        return verify_partition(LOCAL, task.path, task.claims, live=task.live)


def verify_here(tasks: Sequence[VerifyTask], heard: Heard) -> None:
    for task in tasks:
        heard(task, attempt_one(verify_on_worker, task, "here"))


def verify_all(spark: Any, tasks: Sequence[VerifyTask], heard: Heard) -> None:
    """Verify `tasks` in bundles, largest first. `heard` is called in the caller's thread, in the order of the bundles.
    """
    threads = concurrent_tasks(spark) + 1
    stopped = threading.Event()
    with ThreadPoolExecutor(max_workers=threads, thread_name_prefix="bundles") as pool:
        largest_first = sorted(tasks, key=lambda task: task.size_bytes, reverse=True)
        bundles = list(in_bundles(largest_first, lambda task: task.size_bytes, BUNDLE_BYTES, BUNDLE_PARTITIONS))
        run = partial(run_bundle, spark, function=verify_on_worker, name="verify", stopped=stopped.is_set)
        jobs = [pool.submit(run, bundle) for bundle in bundles]
        try:
            for bundle, job in zip(bundles, jobs, strict=True):
                for task, outcome in zip(bundle, job.result(), strict=True):
                    heard(task, outcome)
        except BaseException:  # a signal, or Spark has ended: start no other bundle
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            end_jobs(spark, lambda: any(job.running() for job in jobs))
            raise
