"""Runs many tasks that change no files, in bundles, the largest tasks first."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from keytail.run.batching import in_bundles
from keytail.run.engine import Engine, end_tasks
from keytail.run.tasks import Outcome
from keytail.threads import Threads

P = TypeVar("P")
R = TypeVar("R")

# Maximum bytes, and maximum number of tasks, of a bundle with several tasks.
BUNDLE_BYTES = 256 << 20
BUNDLE_PARTITIONS = 64


def run_every(
    engine: Engine,
    tasks: Sequence[P],
    function: Callable[[P, str], R],
    on_result: Callable[[P, Outcome[R]], None],
    *,
    name: str,
    size_of: Callable[[P], int],
) -> None:
    """Run `function(task, attempt)` for each task. `on_result` is called with each task and its outcome, in the thread
    of the caller and in descending order of size. `size_of` returns the bytes that a task reads. `name` is the name of
    the jobs."""
    threads = engine.concurrent_tasks + 1
    stopped = threading.Event()
    with Threads(max_workers=threads, thread_name_prefix="bundles") as pool:
        largest_first = sorted(tasks, key=size_of, reverse=True)
        bundles = list(in_bundles(largest_first, size_of, BUNDLE_BYTES, BUNDLE_PARTITIONS))
        run = partial(engine.run_bundle, function=function, name=name, stopped=stopped.is_set)
        jobs = [pool.submit(run, bundle) for bundle in bundles]
        try:
            for bundle, job in zip(bundles, jobs, strict=True):
                for task, outcome in zip(bundle, job.result(), strict=True):
                    on_result(task, outcome)
        except BaseException:  # after a signal, or the end of Spark, no other bundle is started
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            end_tasks(engine, lambda: any(job.running() for job in jobs))
            raise
